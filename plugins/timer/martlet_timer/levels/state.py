"""Delivered messages of each delay level: from notes in the log, and RocketMQ's ``config/delayOffset.json``.

Each atomic group of delivered messages contains a note with the offsets of all levels, so after a crash a delivered
message is never delivered again, and any other is (`journal_codec.py`). RocketMQ knows only the file; its
`POSITION_KEY` is the log position up to which it contains notes. If the key is missing, RocketMQ wrote the file last:
then its offsets count, and earlier notes in the log do not. The offsets become a new note, so that the log is complete
again.

The file is never ahead of the durable log: else a crash could lose a delivery that the file contains.
"""

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, final

import orjson
import trio

from martlet.errors import Reason, Refused, StoreError
from martlet.records.layout import RecordView
from martlet.runtime.steps import Steps, WaitingSteps, finish_now
from martlet.state import NOTHING, pack_rows, unpack_rows
from martlet.state.journal import Journal, read_notes
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet.tables.rocketmq_json import DataVersion, head_of, parse, reading, seal, table_in
from martlet.tables.saved import NO_POSITION, POSITION_KEY, Table
from martlet_timer.levels.journal_codec import (
    Delivered,
    Ranges,
    apply_note,
    encode_note,
    later_of,
    low_of,
    union,
)

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["LevelState"]

log = logging.getLogger("martlet.timer")

PATH: Final = "config/delayOffset.json"
# The key with the ranges delivered after the offset of a level; RocketMQ drops the key and delivers them again.
LATER_KEY: Final = "martletDelivered"
FORMAT: Final = 1
# Pause after the file could not be written.
RETRY_S: Final = 5.0


class LevelKeeper(Protocol):
    """The owner of the pending messages, for retention."""

    def floor(self) -> int:
        """Return the position of the oldest record that is still needed, or one before it; `NOTHING` for none."""
        ...

    async def release(self, end: int) -> None:
        """Append needed records before *end* again, and a note; return once they are stored."""
        ...


@final
class LevelState:
    """The delivered messages by level; a projection (martlet.state.Projection) of the notes."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self.journal: Journal = broker.journal("delay-levels")
        self.name = "delay-levels"
        # Keeps records that retention is about to remove; set while the delivery runs.
        self.keeper: LevelKeeper | None = None
        self.topics = frozenset((self.journal.topic,))
        self.delivered: Delivered = {}
        # Whether there was a file, a snapshot or a note.
        self._is_known = False
        # The end of the newest record that is contained; 0 if there is none.
        self._position = 0
        # Log position of the newest note; NOTHING if there is none.
        self._noted_at = NOTHING
        self._version = DataVersion()
        # Whether RocketMQ wrote the file last, so that it must be written before the first delivery.
        self._is_foreign = False
        self.table = Table(PATH, self._render, self._load)
        broker.tables.add(self.table)
        if self._position == NO_POSITION:
            # RocketMQ wrote the file: all notes in the log so far are older.
            self._position, self._is_foreign = broker.store.readable, True
            self.delivered = {level: self._up_to_end(level, ranges) for level, ranges in self.delivered.items()}
        elif self._position > broker.store.readable:
            # A power failure took the end of a log with asynchronous flush: any note is nearer to the truth.
            self._position = 0
        self._base = self._position, self.delivered, self._is_known
        # Positions and states for the file: the newest durable state, and newer ones.
        self._states = deque([(self._position, self.delivered)])

    @property
    def by_level(self) -> dict[int, int]:
        """The offset of the first message that was not delivered, by level."""
        return {level: low_of(ranges) for level, ranges in self.delivered.items()}

    def _up_to_end(self, level: int, ranges: Ranges) -> Ranges:
        """Return *ranges* cut at the end of the queue: a later offset would skip future messages."""
        queue = self._broker.store.queues.find(SCHEDULE_TOPIC, level - 1)
        end = queue.next_offset if queue is not None else 0
        return union((min(first, end), min(after, end)) for first, after in ranges)

    # the projection

    def held(self) -> int:
        count = 0
        for queue_id, queue in self._broker.store.queues.topics.get(SCHEDULE_TOPIC, {}).items():
            ranges = self.delivered.get(queue_id + 1, ())
            later = sum(end - first for first, end in later_of(ranges))
            count += max(queue.next_offset - max(low_of(ranges), queue.first_offset) - later, 0)
        return count

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            if record.position < self._position:
                continue
            if not self._is_known:
                self._is_known = not self._are_notes_removed()
            for note in read_notes(record.body):
                self.delivered = apply_note(self.delivered if self._is_known else None, note)
                self._is_known = True
            self._noted_at, self._position = record.position, record.position + record.size
            self._version.next(self._broker.clock)
        self._states.append((self._position, self.delivered))
        self._drop_states(self._broker.store.durable)
        self.table.change()

    def _are_notes_removed(self) -> bool:
        """Return whether retention removed notes; if not, a first note that does not begin at 0 follows lost ones."""
        queue = self._broker.store.queues.find(self.journal.topic, 0)
        return queue is not None and queue.first_offset > 0

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(FORMAT, [(self._position, self._noted_at, list(self.delivered.items()))])

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._position, self.delivered, self._is_known = self._base
        self._noted_at = NOTHING
        for position, noted_at, rows in unpack_rows(FORMAT, data):
            if position > self._position:  # else the file is newer
                self._position, self._noted_at = position, noted_at
                self.delivered = {level: _ranges_of(found) for level, found in rows}
                self._is_known = True
        self._states = deque([(self._position, self.delivered)])
        yield

    def forget(self, topic: str) -> None:
        """Do nothing: journals are never deleted."""

    def floor(self) -> int:
        return min(self._noted_at, self.keeper.floor() if self.keeper is not None else 0)

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        """Let the delivery write a new note: a note with the offsets known here might come after a newer one."""
        if self.keeper is None:
            raise Refused(Reason.BUSY, "the delivery of the delay levels does not run")
        yield partial(self.keeper.release, end)

    # the file

    def _drop_states(self, durable: int) -> None:
        """Drop states for the file that are older than the newest durable one."""
        while len(self._states) > 1 and self._states[1][0] <= durable:
            self._states.popleft()

    def _render(self, position: int) -> Steps[list[bytes]]:
        """Render the file as of the newest note before *position*, which is durable."""
        self._drop_states(position)
        if len(self._states) > 1:
            self.table.change()  # the file is written again once newer states are durable
        state_position, delivered = self._states[0]
        head, offsets = (
            head_of(self._version, state_position),
            {level: low_of(delivered[level]) for level in sorted(delivered)},
        )
        later = {level: ranges for level in sorted(delivered) if (ranges := later_of(delivered[level]))}
        if later:
            head[LATER_KEY] = {str(level): ranges for level, ranges in later.items()}

        def render() -> Steps[list[bytes]]:
            lines = b",".join(b"%d:%d" % each for each in offsets.items())
            fields = b",".join(b"%b:%b" % (orjson.dumps(key), orjson.dumps(value)) for key, value in head.items())
            yield
            return seal([b'{%b,"offsetTable":{%b}}' % (fields, lines)])

        return render()

    def _load(self, data: bytes) -> None:
        table = parse(data, "delayOffset.json")
        offsets = table_in(table, "offsetTable", "delayOffset.json").items()
        with reading("delayOffset.json"):
            ranges_by_level = {int(level): [(0, int(offset))] for level, offset in offsets}
            for level, ranges in (table.get(LATER_KEY) or {}).items():
                ranges_by_level.setdefault(int(level), []).extend((int(first), int(end)) for first, end in ranges)
            position = int(table.get(POSITION_KEY, NO_POSITION))
        self._version.load(table.get("dataVersion"))
        self.delivered = {level: union(ranges) for level, ranges in ranges_by_level.items()}
        self._position, self._is_known = position, True

    async def adopt(self) -> None:
        """If RocketMQ wrote the file last, note its offsets in the log and write the file, before any delivery.

        Otherwise the old offsets would count again after a crash. Both copies are written: damage to the new file must
        not bring the old one back.
        """
        store = self._broker.store
        while self._is_foreign:
            try:
                self._broker.publish_all([], atomic=True, notes=[(self.journal, encode_note(self.by_level, {}, {}))])
                store.committer.commit_early()
                await store.flusher.wait_flushed(store.written)
                content = finish_now(self._render(NO_POSITION))
                with trio.CancelScope(shield=True):
                    for _ in range(2):
                        await store.disk.off_loop(partial(store.data_directory.write_file, PATH, *content))
                self._is_foreign = False
            except (OSError, StoreError, Refused) as error:
                log.error("%s cannot be written, so nothing is delivered yet; %s", PATH, error)
                await trio.sleep(RETRY_S)


def _ranges_of(row: int | list[list[int]]) -> Ranges:
    """Return the ranges in a snapshot; an older snapshot has only an offset."""
    return union([(0, row)] if isinstance(row, int) else [(first, end) for first, end in row])
