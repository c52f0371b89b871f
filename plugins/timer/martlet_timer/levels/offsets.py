"""How many messages of each delay level were delivered: notes in the log, and RocketMQ's ``config/delayOffset.json``.

Each atomic group of delivered messages contains a note with the offsets of all levels, so after a crash a message was
either delivered and is not again, or it was not. The newest note says everything. RocketMQ knows only the file; with
`POSITION_KEY` it says which notes it contains. If that is missing, RocketMQ wrote the file last: its offsets count, and
notes that are in the log already do not.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, final

import msgpack  # type: ignore[import-untyped]
import orjson
import trio

from martlet.errors import Reason, Refused, StoreError
from martlet.records.layout import RecordView
from martlet.state import NOTHING, pack_rows, unpack_rows
from martlet.state.journal import Journal, read_notes
from martlet.steps import Steps, WaitingSteps, finish_now
from martlet.store.delays import SCHEDULE_TOPIC
from martlet.tables.rocketmq_json import DataVersion, head_of, parse, reading
from martlet.tables.saved import NO_POSITION, POSITION_KEY, Table

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["LevelOffsets"]

log = logging.getLogger("martlet.timer")

PATH: Final = "config/delayOffset.json"
FORMAT: Final = 1
# Pause after the file could not be written.
RETRY_S: Final = 5.0


class LevelKeeper(Protocol):
    """What knows the pending messages."""

    def floor(self) -> int:
        """Return the position of the oldest record that is still needed, or one before it; `NOTHING` for none."""
        ...

    async def release(self, end: int) -> None:
        """Append again what is needed of the records before *end*, and a note; return when that is stored."""
        ...


@final
class LevelOffsets:
    """The offset of the next message to deliver, by level; a projection (martlet.state.Projection) of the notes."""

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self.journal: Journal = broker.journal("delay-levels")
        self.name = "delay-levels"
        # Cares for what retention is about to remove; set while it runs.
        self.keeper: LevelKeeper | None = None
        self.topics = frozenset((self.journal.topic,))
        self.by_level: Mapping[int, int] = {}
        # The end of the newest record that is contained; 0 if there is none.
        self._position = 0
        # Where the newest note is; NOTHING if it is not needed, because there is none.
        self._noted_at = NOTHING
        self._version = DataVersion()
        # Whether the file must be written before the first delivery.
        self._is_foreign = False
        self.table = Table(PATH, self._render, self._load)
        broker.tables.add(self.table)
        if self._position == NO_POSITION:
            # RocketMQ wrote the file: all notes in our log so far are older.
            self._position, self._is_foreign = broker.store.readable, True
        elif self._position > broker.store.readable:
            # A power failure took the end of a log with asynchronous flush: any note is nearer to the truth.
            self._position = 0
        self._base = self._position, self.by_level

    def note(self, by_level: Mapping[int, int]) -> bytes:
        """Return a note with the offsets *by_level*."""
        note: bytes = msgpack.packb(by_level)
        return note

    # the projection

    def held(self) -> int:
        queues = self._broker.store.queues.topics.get(SCHEDULE_TOPIC, {})
        first = {level: max(self.by_level.get(level + 1, 0), queue.first_offset) for level, queue in queues.items()}
        return sum(max(queue.next_offset - first[level], 0) for level, queue in queues.items())

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            if record.position < self._position:
                continue
            for note in read_notes(record.body):
                self.by_level = msgpack.unpackb(note, strict_map_key=False)
            self._noted_at, self._position = record.position, record.position + record.size
            self._version.next(self._broker.clock)
        self.table.change()

    def freeze(self) -> Steps[Sequence[bytes]]:
        return pack_rows(FORMAT, [(self._position, self._noted_at, list(self.by_level.items()))])

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        self._position, self.by_level = self._base
        self._noted_at = NOTHING
        for position, noted_at, offsets in unpack_rows(FORMAT, data):
            if position > self._position:  # else the file is newer
                self._position, self._noted_at = position, noted_at
                self.by_level = dict(offsets)
        yield

    def forget(self, topic: str) -> None:
        """Do nothing: journals are never deleted."""

    def floor(self) -> int:
        return min(self._noted_at, self.keeper.floor() if self.keeper is not None else 0)

    def roll(self, start: int, end: int) -> WaitingSteps[None]:
        """Have the delivery of the levels write a new note: one with offsets from here might come after a newer one."""
        if self.keeper is None:
            raise Refused(Reason.BUSY, "the delivery of the delay levels does not run")
        yield partial(self.keeper.release, end)

    # the file

    def _render(self, position: int) -> Steps[list[bytes]]:
        """Render the file; it is complete up to the newest note that was applied, whatever *position* is durable."""
        head, offsets = head_of(self._version, self._position), dict(sorted(self.by_level.items()))

        def render() -> Steps[list[bytes]]:
            lines = b",".join(b"%d:%d" % each for each in offsets.items())
            fields = b",".join(b"%b:%b" % (orjson.dumps(key), orjson.dumps(value)) for key, value in head.items())
            yield
            return [b'{%b,"offsetTable":{%b}}' % (fields, lines)]

        return render()

    def _load(self, data: bytes) -> None:
        table = parse(data, "delayOffset.json")
        with reading("delayOffset.json"):
            found = {int(level): int(offset) for level, offset in (table.get("offsetTable") or {}).items()}
            position = int(table.get(POSITION_KEY, NO_POSITION))
        self._version.load(table.get("dataVersion"))
        self.by_level, self._position = found, position

    async def adopt(self) -> None:
        """Write the file if RocketMQ wrote it last, before anything is delivered.

        Else, after a crash, its old offsets would count again.
        """
        store = self._broker.store
        while self._is_foreign:
            content = finish_now(self._render(NO_POSITION))
            try:
                with trio.CancelScope(shield=True):
                    await store.disk.off_loop(partial(store.write_file, PATH, *content))
                self._is_foreign = False
            except (OSError, StoreError, Refused) as error:
                log.error("%s cannot be written, so nothing is delivered yet; %s", PATH, error)
                await trio.sleep(RETRY_S)
