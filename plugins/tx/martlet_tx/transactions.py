"""Holds half messages until their transactions end: the stage, and the interface for protocols and commands.

A transaction ends once, with the op record that names its half message. A commit appends the op record and the message
in one atomic group, so a crash cannot separate them. The projection applies an op record when it is readable; until
then ``ending`` has it, so that a second request is refused.
"""

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, final

from martlet.broker import Broker
from martlet.contracts import HalfMessage, PendingTransaction, Transactions
from martlet.errors import CorruptRecord, Reason, Refused, StoreFailed
from martlet.message import Message, Record, find_property
from martlet.records.codec import decode_record
from martlet.records.layout import PREPARED, TRANSACTION_MASK, Buffer, RecordView, record_views
from martlet.stages import Stages
from martlet.state.journal import NEXT_COMMIT
from martlet.store import Queue
from martlet.store.append.items import AppendItem
from martlet.store.read.reading import ReadResult
from martlet.tables.topics import DLQ_PREFIX, RETRY_PREFIX
from martlet_tx.config import TxConfig
from martlet_tx.formats import (
    HALF_TOPIC,
    IMMUNITY,
    MOVED_FROM,
    NAME,
    OP_TOPIC,
    PARK_TOPIC,
    decode_half,
    final_message,
    half_message,
    immunity_ms,
    is_half,
    number_of,
    op_message,
    parked_message,
    renewed_message,
)
from martlet_tx.halves import PAGE
from martlet_tx.journal_codec import resumed_note, unchecked_note
from martlet_tx.state import HalfMessageState

__all__ = ["HalfMessages", "HeldTransactions"]

log = logging.getLogger("martlet.tx")

# Half messages to read at once, and their total size; at least one is read.
READ_MESSAGES: Final = 256
READ_BYTES: Final = 256 * 1024
# Limit of half messages with one unique key, of which one may be the copy of the one that a producer names.
COPIES_MAX: Final = 64
# Older copies to check for each new copy; readable ones are forgotten.
COPIES_FORGOTTEN: Final = 2
# Bytes that the message and the op record of a commit need beyond the half message.
COMMIT_BYTES: Final = 1024
# Transactions that end together are one atomic group of about this size.
TOGETHER_BYTES: Final = 256 * 1024


class HalfMessages(NamedTuple):
    """The half messages at *taken* offsets, and the offsets of those that are damaged or were removed.

    ``unreadable`` is the number of half messages that the disk failed to read.
    """

    taken: int
    halves: list[HalfMessage]
    lost: list[int]
    unreadable: int = 0


@final
class HeldTransactions(Transactions):
    """The transactions of one broker."""

    def __init__(self, broker: Broker, config: TxConfig, state: HalfMessageState) -> None:
        self._broker = broker
        self._store = broker.store
        self._config = config
        self.state = state
        self._journal = broker.journal(NAME)
        # Parked message -> its copy that is appended but not applied yet.
        self._resuming: dict[int, int] = {}
        # Position of the original half message -> log position after its newest copy; readable ones are removed.
        self._copied: dict[int, int] = {}
        # RocketMQ, which opened this store after Martlet, has handled the half messages before this offset.
        self.handled_before = 0
        self.committed = self.rolled_back = self.parked = 0

    @property
    def half_queue(self) -> Queue:
        return self._store.queues.get(HALF_TOPIC, 0)

    @property
    def op_queue(self) -> Queue:
        return self._store.queues.get(OP_TOPIC, 0)

    # ---- the stage

    def hold(self, message: Message) -> Message:
        """Turn *message* into a half message if it begins a transaction.

        Raises:
          Refused: *message* names no producer group or cannot be stored in its topic, or too many transactions are
            pending.
        """
        if message.topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            message.sys_flag &= ~PREPARED  # a copy of a committed message still has the properties of its transaction
            return message
        if not is_half(message):
            return _clear_transaction_bits(message)
        if not find_property(message.properties, b"PGROUP"):
            text = "message has the property TRAN_MSG, but no PGROUP; name the group of its producer"
            raise Refused(Reason.ILLEGAL, text)
        self._check_room()
        half = half_message(message, self._broker.queue_for_later(message))
        size = len(half.body) + len(half.properties) + COMMIT_BYTES
        limit = min(self._store.config.group_room, self._store.config.segment_bytes)
        if size > limit:
            text = f"transactional message needs {size} bytes with its op record; {limit} fit into an atomic group"
            raise Refused(Reason.ILLEGAL, f"{text} (store.group_bytes_max) and a segment")
        return half

    def _check_room(self) -> None:
        pending = self.state.halves.pending
        if pending >= self._config.pending_max:
            text = f"{pending} transactions are pending; tx.pending_max is {self._config.pending_max}"
            raise Refused(Reason.BUSY, f"[OVERLOAD]system busy, {text}")

    # ---- finding half messages

    def find_nowait(self, offset: int, position: int) -> HalfMessage | None:
        queue = self.half_queue
        view = self._store.readers.view_now(queue, offset)
        if view is not None:
            return _decode(view.buffer, view.start, check_body=False) if view.position == position else None
        result = self._store.readers.read_near(queue, offset, 1, 1) if offset >= 0 else None
        if result is None or not result.pieces:
            return None
        data = b"".join(result.pieces)
        return _decode(data) if RecordView(data).position == position else None

    async def find(self, position: int) -> HalfMessage:
        data = await self._store.lookup.record_far(position) if position >= 0 else None
        if data is None or RecordView(data).topic not in (HALF_TOPIC, PARK_TOPIC):
            text = f"Find prepared transaction message failed; none is at commit log offset {position}"
            raise Refused(Reason.NOT_FOUND, text)
        half = _decode(data)
        if half is None:
            text = (
                f"half message at commit log offset {position} lacks REAL_TOPIC or PGROUP; nothing can be done with it"
            )
            raise Refused(Reason.NOT_FOUND, text)
        return half

    async def find_copy(self, position: int, key: str) -> HalfMessage | None:
        while True:
            end = self._copied.get(position, 0)
            if end > self._store.readable:
                self._store.committer.commit_early()
                await self._store.flusher.wait_flushed(end)
            readable = self._store.readable
            half = await self._find_readable_copy(position, key)
            if half is not None or self._copied.get(position, 0) <= readable:
                return half  # no newer copy was made meanwhile

    async def _find_readable_copy(self, position: int, key: str) -> HalfMessage | None:
        steps = self._store.lookup.query_keys(HALF_TOPIC, key.encode(), COPIES_MAX, 0, 1 << 62, READ_BYTES)
        original_position = b"%d" % position
        for data in (await self._broker.turns.finish(steps)).records:
            half = _decode(data)
            if half is None or find_property(half.record.properties, MOVED_FROM) != original_position:
                continue
            if self.is_pending(half.record.queue_offset):
                return half
        return None

    async def read(self, offsets: Sequence[int]) -> HalfMessages:
        """Read the half messages at *offsets*, ascending; only the first ones if there are many or large ones."""
        result = self._store.readers.read_near(self.half_queue, offsets[0], READ_MESSAGES, READ_BYTES)
        try:
            if result is None:
                result = await self._store.readers.read_far(self.half_queue, offsets[0], READ_MESSAGES, READ_BYTES)
        except OSError as error:
            log.warning("half message %d cannot be read; %s", offsets[0], error)
            return HalfMessages(1, [], [], 1)
        return _portion(offsets, result)

    async def pending(self, offset: int, count: int, bytes_max: int) -> list[PendingTransaction]:
        state = self.state.halves
        transactions: list[PendingTransaction] = []
        size = 0
        for number in state.pages(offset // PAGE):
            offsets = [each for each in state.pending_in(number) if each >= offset]
            while offsets:
                portion = await self.read(offsets)
                offsets = offsets[portion.taken :]
                for half in portion.halves:
                    size += half.record.size
                    if len(transactions) == count or (transactions and size > bytes_max):
                        return transactions
                    transactions.append(PendingTransaction(half, max(state.checks(half.record.queue_offset), 0)))
        return transactions

    # ---- the end

    def is_pending(self, offset: int) -> bool:
        """Return whether the transaction of the half message at *offset*, which exists, has not ended."""
        state = self.state
        if offset < self.handled_before:
            return False
        if offset in state.ending and state.is_ending(offset, self.op_queue.next_offset):
            return False
        return state.halves.checks(offset) >= 0 or offset >= state.halves.next

    def is_late(self, half: HalfMessage) -> bool:
        properties = half.record.properties
        if not find_property(properties, IMMUNITY):
            return False
        age_ms = self._broker.clock.now_ms() - half.record.born_ms
        return age_ms > immunity_ms(properties, self._config.immunity_ms)

    def end(self, half: HalfMessage, *, commit: bool) -> int:
        self._check_pending(half)
        if commit:
            end = self._end_with(half, [self._committed_message(half)])
            self.committed += 1
        else:
            end = self._end_with(half, [])
            self.rolled_back += 1
        return end

    def end_together(self, ends: Sequence[tuple[HalfMessage, bool]]) -> list[int]:
        if self._broker.stages.every_message:
            return list(range(len(ends)))  # a run would bypass that stage
        left_places: list[int] = []
        items: list[AppendItem] = []
        later_stages, queues = self._broker.stages.after(NAME), dict[tuple[str, int], Queue | None]()
        place_by_offset: dict[int, int] = {}  # by the offset of the half message
        size = 0
        for place, (half, commit) in enumerate(ends):
            record = half.record
            if (
                record.topic != HALF_TOPIC
                or record.queue_offset in place_by_offset
                or not self.is_pending(record.queue_offset)
            ):
                left_places.append(place)
                continue
            if commit:
                key = half.topic, half.queue_id
                if key not in queues:
                    queues[key] = self._broker.find_queue(half.topic, half.queue_id)
                queue = queues[key]
                if queue is None or not self._skips_stages(record, later_stages):
                    left_places.append(place)
                    continue
                items.append(self._store.writer.item(final_message(half), half.queue_id))
                size += record.size
            place_by_offset[record.queue_offset] = place
            if size > TOGETHER_BYTES:
                left_places += self._append_ends(items, place_by_offset)
                items, place_by_offset, size = [], {}, 0
        return left_places + self._append_ends(items, place_by_offset) if place_by_offset else left_places

    def _skips_stages(self, record: Record, later: Stages) -> bool:
        """Return whether the message of *record* needs none of the *later* stages, and its body can be stored as is."""
        return not (
            record.sys_flag & later.sys_flag
            or later.may_want_properties(record.properties)
            or len(record.body) > self._broker.config.message_bytes_max
        )

    def _append_ends(self, items: list[AppendItem], place_by_offset: Mapping[int, int]) -> list[int]:
        """Store *items* with one op record for all half messages of *place_by_offset*, all or none.

        Returns the places of the items that are left for `end`: all if the store refuses them.
        """
        op = op_message(list(place_by_offset), self._broker.clock.now_ms(), self._store.writer.store_host)
        try:
            result = self._broker.publish_all(
                [*items, self._store.writer.item(op, self.op_queue.queue_id)], atomic=True
            )
        except (Refused, StoreFailed):
            return list(place_by_offset.values())
        self.state.ending.update(dict.fromkeys(place_by_offset, result.offsets[-1]))
        self.committed += len(items)
        self.rolled_back += len(place_by_offset) - len(items)
        return []

    def _check_pending(self, half: HalfMessage) -> None:
        record = half.record
        if record.topic != HALF_TOPIC:
            text = f"message at commit log offset {record.position} was parked after too many checks"
            raise Refused(Reason.NOT_FOUND, f"{text}; RESUME_CHECK_HALF_MESSAGE continues it")
        if not self.is_pending(record.queue_offset):
            text = f"transaction of half message {record.queue_offset} has ended, or was parked after too many checks"
            raise Refused(Reason.NOT_FOUND, f"{text}; it can be committed or rolled back only once")

    def _committed_message(self, half: HalfMessage) -> Message:
        message, topic = final_message(half), self._broker.topics.get(half.topic)
        if topic is not None and message.queue_id >= max(topic.write_queues, topic.read_queues):
            message.queue_id = -1  # the topic has fewer queues now
        return message

    def _end_with(self, half: HalfMessage, messages: list[Message], notes: Sequence[bytes] = ()) -> int:
        """Store *messages* and *notes* with the op record that ends the transaction of *half*, all or none."""
        offset = half.record.queue_offset
        op = op_message([offset], self._broker.clock.now_ms(), self._store.writer.store_host)
        journal_notes = [(self._journal, note) for note in notes]
        placed = self._broker.publish_all([*messages, op], atomic=True, notes=journal_notes, passed=NAME).placed(-1)
        self.state.ending[offset] = placed.queue_offset
        return placed.end

    def park(self, half: HalfMessage, checks: int) -> None:
        """Move *half* to the topic of transactions that were checked too often."""
        log.warning(
            "transaction %s of group %s is parked in %s after %d checks; `martlet tx` can resume or end it",
            *(half.record.property("UNIQ_KEY"), half.group, PARK_TOPIC, checks),
        )
        self._broker.topics.ensure(PARK_TOPIC, 1)
        self._end_with(half, [parked_message(half, checks)])
        self.parked += 1

    def renew(self, half: HalfMessage, checks: int) -> None:
        """Replace *half* by a copy at the end of the log."""
        self._note_copy(half.record, self._end_with(half, [renewed_message(half, checks)]))

    def _note_copy(self, record: Record, end: int) -> None:
        """Set *end* as the log position after the newest copy of *record*; forget readable copies."""
        original_position = number_of(find_property(record.properties, MOVED_FROM))
        original_position = original_position if original_position >= 0 else record.position
        self._copied.pop(original_position, None)
        self._copied[original_position] = end
        for position in list(islice(self._copied, COPIES_FORGOTTEN)):
            if self._copied[position] <= self._store.readable:
                del self._copied[position]

    def drop(self, offset: int) -> None:
        """End the transaction of a half message that is lost: removed by retention, or damaged."""
        op = op_message([offset], self._broker.clock.now_ms(), self._store.writer.store_host)
        self.state.ending[offset] = self._broker.publish(op, passed=NAME).queue_offset

    def resume(self, half: HalfMessage) -> int:
        record = half.record
        if record.topic == HALF_TOPIC:
            self._check_pending(half)
            return self._journal.note(unchecked_note(record.queue_offset))
        return self._resume_parked(half)

    def _resume_parked(self, half: HalfMessage) -> int:
        offset, park = half.record.queue_offset, self._store.queue(PARK_TOPIC, 0)
        if offset in self.state.resumed or self._is_resuming(offset):
            raise Refused(Reason.NOT_FOUND, f"parked message {offset} is a half message again already; it is checked")
        self._check_room()
        note = self._journal, resumed_note(offset, park.first_offset)
        placed = self._broker.publish_all([renewed_message(half, 0)], atomic=True, notes=[note], passed=NAME).placed(0)
        self._resuming[offset] = placed.queue_offset
        return NEXT_COMMIT

    def _is_resuming(self, offset: int) -> bool:
        """Return whether a copy of the parked message at *offset* is appended but not applied yet."""
        copy = self._resuming.get(offset, -1)
        if self.state.halves.next <= copy < self.half_queue.next_offset:
            return True
        self._resuming.pop(offset, None)
        return False

    def statistics(self) -> dict[str, object]:
        """Return the number of pending transactions, the age of the oldest, and the numbers of outcomes."""
        state, park = self.state.halves, self._store.queues.find(PARK_TOPIC, 0)
        return {
            "pending": state.pending,
            "oldest_age_ms": self._oldest_age_ms(),
            "committed": self.committed,
            "rolled_back": self.rolled_back,
            "parked": self.parked,
            "parked_messages": park.next_offset - park.first_offset - len(self.state.resumed) if park else 0,
        }

    def _oldest_age_ms(self) -> int:
        """Return the age of the oldest pending half message, since it was stored; 0 if none is pending."""
        floor = self.state.halves.floor()
        if floor is None:
            return 0
        result = self._store.readers.read_near(self.half_queue, self.state.halves.first(), 1, 1)
        view = next(record_views(b"".join(result.pieces)), None) if result is not None else None
        store_ms = view.store_ms if view is not None else floor[1]
        return max(self._broker.clock.now_ms() - store_ms, 0)


def _clear_transaction_bits(message: Message) -> Message:
    """Return *message* without transaction bits in its sysFlag: with them, RocketMQ would lose it."""
    if message.sys_flag & PREPARED:
        if message.reconsume_times <= 0:
            text = f"message has the sysFlag {message.sys_flag:#x} of a transaction, but not TRAN_MSG true"
            raise Refused(Reason.ILLEGAL, f"{text}; set both")
        message.sys_flag &= ~TRANSACTION_MASK
    return message


def _decode(data: Buffer, start: int = 0, *, check_body: bool = True) -> HalfMessage | None:
    try:
        return decode_half(decode_record(data, start, check_body=check_body))
    except CorruptRecord:
        return None


def _portion(offsets: Sequence[int], result: ReadResult) -> HalfMessages:
    """Return the half messages at *offsets* in *result*, a read that began at the first offset."""
    count = max(bisect_left(offsets, result.next_offset), 1)
    offsets_to_read = set(offsets[:count])
    halves = {
        view.queue_offset: half
        for view in record_views(b"".join(result.pieces))
        if view.queue_offset in offsets_to_read and (half := _decode(view.buffer, view.start)) is not None
    }
    lost = [each for each in offsets[:count] if each not in halves] if offsets[0] < result.end_offset else []
    return HalfMessages(count, list(halves.values()), lost)
