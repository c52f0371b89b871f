"""The state of transactions, a projection of the log: pending transactions, with their numbers of checks.

The projection follows half messages, op records, and the journal.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice
from typing import Final, final

from martlet.broker import Broker
from martlet.message import find_property
from martlet.records.layout import RecordView
from martlet.runtime.steps import Budget, Steps, WaitingSteps
from martlet.state import NOTHING, pack_rows, unpack_rows
from martlet.state.journal import read_notes
from martlet_tx.formats import CHECK_TIMES, HALF_TOPIC, NAME, OP_TOPIC, PREPARED_OFFSET, half_offsets, number_of
from martlet_tx.halves import PAGE, Halves, OpBlocks
from martlet_tx.journal_codec import ADOPTED, CHECKED, UNCHECKED, decode_note

__all__ = ["HalfMessageState"]

FORMAT: Final = 1
HALF, OP = HALF_TOPIC.encode(), OP_TOPIC.encode()


@final
class HalfMessageState:
    """The pending transactions.

    ``ending`` is not part of the state: half message -> op record that is appended but not applied yet. ``resumed`` has
    the offsets of parked messages that are half messages again.
    """

    def __init__(self, broker: Broker) -> None:
        self.name = NAME
        self._journal = broker.journal(NAME)
        self.topics = frozenset((HALF_TOPIC, OP_TOPIC, self._journal.topic))
        self.halves = Halves()
        self.ops = OpBlocks()
        self.ending: dict[int, int] = {}
        self.resumed: set[int] = set()
        # Copies made by RocketMQ, by the offset of the original half message, which op records continue to name.
        self._copies: dict[int, int] = {}
        # Replaces the half messages before a log position by copies; set by the owner of the journal.
        self.renew: Callable[[int], WaitingSteps[None]] | None = None
        self._begin = -1  # the oldest half message in the log when this state began

    def held(self) -> int:
        return self.halves.pending

    def apply(self, records: Sequence[RecordView]) -> None:
        fresh: list[RecordView] = []  # successive usual half messages in one page
        for record in records:
            topic = record.topic_bytes
            if topic == HALF and self._is_fresh(record):
                if fresh and not self._continues(fresh, record):
                    self._add_and_clear(fresh)
                fresh.append(record)
                continue
            self._add_and_clear(fresh)
            if topic == HALF:
                self._apply_half(record)
            elif topic == OP:
                self._apply_op(record)
            else:
                for note in read_notes(record.body):
                    self._apply_note(*decode_note(note))
        self._add_and_clear(fresh)

    @staticmethod
    def _is_fresh(record: RecordView) -> bool:
        """Return whether the half message *record* was never checked and is no copy."""
        properties = record.properties
        return properties.find(CHECK_TIMES) < 0 and properties.find(PREPARED_OFFSET) < 0

    @staticmethod
    def _continues(fresh: Sequence[RecordView], record: RecordView) -> bool:
        offset = record.queue_offset
        return offset % PAGE != 0 and offset == fresh[0].queue_offset + len(fresh)

    def _add_and_clear(self, fresh: list[RecordView]) -> None:
        """Add the half messages in *fresh*, which have successive offsets, and clear it."""
        if not fresh:
            return
        first_half = fresh[0]
        offset = first_half.queue_offset
        for half_offset in range(offset, offset + len(fresh)) if self.ending else ():
            self.ending.pop(half_offset, None)  # of an op record that was lost
        if self._begin < 0:
            self._begin = offset
        self.halves.add_all(offset, len(fresh), first_half.position, first_half.store_ms)
        fresh.clear()

    def _apply_half(self, record: RecordView) -> None:
        offset, properties = record.queue_offset, record.properties
        self.ending.pop(offset, None)  # of an op record that was lost
        checks = number_of(find_property(properties, CHECK_TIMES))
        self.halves.add(offset, record.position, record.store_ms, max(checks, 0))
        if self._begin < 0:
            self._begin = offset
        original_offset = number_of(find_property(properties, PREPARED_OFFSET))
        if self._begin <= original_offset < offset:
            self._apply_copy(original_offset, offset)

    def _apply_copy(self, original_offset: int, copy_offset: int) -> None:
        """Replace the half message at *original_offset*, or its previous copy, by RocketMQ's copy at *copy_offset*.

        If the transaction has ended already, the new copy ends with it.
        """
        if self.halves.end(self._copies.get(original_offset, original_offset)):
            self._copies[original_offset] = copy_offset
        else:
            self.halves.end(copy_offset)

    def _apply_op(self, record: RecordView) -> None:
        ended_offsets = half_offsets(record.properties, bytes(record.body))
        for offset in ended_offsets if self.ending else ():
            self.ending.pop(offset, None)
        self.halves.end_all(ended_offsets)
        if self._copies:
            self.halves.end_all([copy for offset in ended_offsets if (copy := self._copies.pop(offset, -1)) >= 0])
        self.ops.add(record.queue_offset, max(ended_offsets, default=-1))
        self.ops.drop_before(self.halves.first())

    def _apply_note(self, kind: int, *numbers: int) -> None:
        halves = self.halves
        if kind == CHECKED:
            for offset in accumulate(numbers):
                halves.set_checks(offset, halves.checks(offset) + 1)
        elif kind == ADOPTED:
            halves.end_before(numbers[0])
            self._copies = {first: copy for first, copy in self._copies.items() if halves.checks(copy) >= 0}
        elif kind == UNCHECKED:
            halves.set_checks(numbers[0], 0)
        else:
            self.resumed = {offset for offset in self.resumed if offset >= numbers[1]} | {numbers[0]}

    def is_ending(self, offset: int, next_op: int) -> bool:
        """Return whether an op record that ends this transaction is appended but not applied yet.

        Args:
          next_op: the next offset of the op queue. If a commit failed, the op record's own offset is not before it, or
            another op record has it.
        """
        op = self.ending.get(offset, -1)
        if op < 0:
            return False
        if op >= next_op or op < self.ops.next:
            del self.ending[offset]
            return False
        return True

    # ---- snapshots

    def freeze(self) -> Steps[Sequence[bytes]]:
        halves, ops, rows = self.halves, self.ops, self.halves.freeze()
        head = halves.next, self._begin, ops.next, ops.freeze(), list(self.resumed), list(self._copies.items())
        return pack_rows(FORMAT, chain((head,), rows))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self.halves, self.ops, self._begin = Halves(), OpBlocks(), -1
        self.ending, self.resumed, self._copies = {}, set(), {}
        rows = unpack_rows(FORMAT, data)
        for next_half, begin_offset, next_op, blocks, parked, copies in islice(rows, 1):
            self.halves.next, self._begin = next_half, begin_offset
            self.ops.restore(blocks, next_op)
            self.resumed, self._copies = set(parked), dict(copies)
        budget = Budget()
        for number, page in rows:
            self.halves.restore(number, *page)
            if budget.is_over():
                yield

    def forget(self, topic: str) -> None:
        if topic == HALF_TOPIC:
            self.halves, self._copies, self._begin = Halves(), {}, -1
            self.ending.clear()
        elif topic == OP_TOPIC:
            self.ops = OpBlocks()

    def floor(self) -> int:
        oldest = self.halves.floor()
        return oldest[0] if oldest is not None else NOTHING

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        assert self.renew is not None
        return self.renew(end)
