"""Takes over pending timers from RocketMQ, which does not know Martlet's notes, and hands them over to it.

RocketMQ's progress is in ``config/timercheck``: the second up to which it has delivered, and the offset of the timer
topic up to which it has put records into its wheel. So a record before that offset is delivered if its second is over,
and pending otherwise. A record that RocketMQ rolled exists several times, with the same time and unique key; the last
one counts. A recall is a record with the time and the key of the recalled message.

Then the file gets a mark with its CRC, which is wrong once RocketMQ changes the file. RocketMQ maps a page of 4096
bytes, and so lengthens the file to that size. A shorter file is Martlet's, and damaged if its CRC is wrong.

The file is trusted only up to the newest record of the log: messages that RocketMQ has delivered are in the log, too.

At an orderly shutdown, RocketMQ's files are written (`wheel_files.py`).
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.errors import NotReady, Reason, Refused, StoreError
from martlet.message import find_property
from martlet.records.codec import decode_records, tags_code
from martlet.records.layout import I32, RECORD_BYTES_MAX
from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Budget, Steps
from martlet.tables.saved import Table
from martlet.tables.topics import TIMER_TOPIC
from martlet_timer.handover.wheel_files import CHECK, Unit, write_wheel
from martlet_timer.properties import REAL_TOPIC
from martlet_timer.timers.journal_writer import TimerJournalWriter
from martlet_timer.timers.pending import HOUR_MS, Frozen
from martlet_timer.timers.records import OUT_MS, PRECISION_MS, RECALLED_KEY, due_of, key_of
from martlet_timer.timers.schedule import Timer
from martlet_timer.timers.state import TimerState

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["PATH", "TimerHandover", "mark"]

log = logging.getLogger("martlet.timer")

PATH: Final = "config/timercheck"
# The minimum size of the file once RocketMQ has opened it (TimerCheckpoint, DefaultMappedFile.OS_PAGE_SIZE).
FOREIGN_BYTES: Final = 4096
MARK: Final = b"MARTLET1"
RECALL_TAG: Final = "_RECALL_TAG_"
NOTED_AT_ONCE: Final = 512
READ_AT_ONCE: Final = 512
READ_BYTES: Final = 1 << 20
RETRY_S: Final = 5.0


def mark(check: bytes) -> bytes:
    """Return the content of the file *check*, marked as known."""
    head = check[: CHECK.size]
    return head + MARK + crc32(head).to_bytes(4, "big")


@final
class TimerHandover:
    """Adopts the state of RocketMQ's timers, if it has used the store since the last start."""

    def __init__(self, broker: "Broker", timers: TimerState, writer: TimerJournalWriter) -> None:
        self._broker = broker
        self._timers = timers
        self._writer = writer
        # The file as RocketMQ wrote it, empty if it did not, and the store time of the newest record of its log.
        self._foreign, self._newest_ms = b"", 0
        content = next(iter(broker.store.data_directory.read_generations(PATH)), b"")
        if len(content) >= FOREIGN_BYTES and not content.startswith(mark(content)):
            self._foreign = content
            self._newest_ms = broker.store.lookup.newest_ms()
        elif content and not content.startswith(mark(content)):
            log.warning("%s is damaged; ignoring it, because Martlet wrote it and the log says the same", PATH)
        self._table = Table(PATH, self._render, lambda content: None)
        broker.tables.register(self._table)

    async def adopt(self, failed: Callable[[], None]) -> None:
        """Remove timers that RocketMQ has delivered, rolled or recalled; call this before any delivery.

        Calls *failed* when it must retry: a full disk accepts no notes, but clients can read.
        """
        while self._foreign:
            try:
                await self._adopt()
            except (OSError, StoreError, Refused) as error:
                log.error("timers of RocketMQ cannot be taken over, so nothing is delivered yet; %s", error)
                failed()
                await trio.sleep(RETRY_S)

    async def _adopt(self) -> None:
        store = self._broker.store
        read_ms, _, of_this, of_master, *_ = CHECK.unpack_from(self._foreign)
        # The message of a timer is stored at its time or later.
        read_ms = min(read_ms, self._newest_ms + PRECISION_MS)
        wheel_end = await self._position_of(min(of_this, of_master))
        ended_timers = await self._broker.turns.finish(self._find_ended(read_ms, wheel_end))
        ended_timers |= await self._find_recalled()
        timers = sorted(ended_timers)
        for first in range(0, len(timers), NOTED_AT_ONCE):
            self._writer.append([], timers[first : first + NOTED_AT_ONCE])
            await trio.lowlevel.checkpoint()
        await store.flusher.wait_flushed(store.written)
        content = mark(self._foreign)
        with trio.CancelScope(shield=True):
            for _ in range(2):  # twice, so that the previous generation is not RocketMQ's file either
                await store.disk.off_loop(partial(store.data_directory.write_file, PATH, content))
        self._foreign = b""
        log.info("RocketMQ has used this store: %d of its timers are over", len(timers))

    def hand_over(self) -> None:
        """Schedule RocketMQ's files to be written with the tables; call this at shutdown."""
        if not self._foreign and self._broker.store.queue(TIMER_TOPIC, 0).next_offset:
            self._table.change()

    def _render(self, position: int) -> Steps[list[bytes]]:
        """Write wheel and log of the currently pending timers, and return the content of the checkpoint."""
        store, frozen, now_ms = self._broker.store, self._timers.pending.freeze(), self._broker.clock.now_ms()
        queue = store.queue(TIMER_TOPIC, 0)
        end = store.readers.end_offset(queue)

        def render() -> Steps[list[bytes]]:
            yield
            try:
                last = yield from store.lookup.position_at(queue, end - 1)
                units = self._units(frozen)
                check = yield from write_wheel(
                    store.disk, store.data_directory.path, units, (last, self._size_at(last)), end, now_ms
                )
            except (StoreError, Refused, NotReady) as error:
                log.error("pending timers cannot be handed over to RocketMQ; %s", error)
                return [b""]
            return [mark(check)]

        return render()

    def _units(self, frozen: Iterator[Frozen]) -> Iterator[Unit]:
        for hour, dues, positions, _ in frozen:
            for due, position in zip(dues, positions, strict=True):
                size = self._size_at(position)
                if size:
                    yield hour * HOUR_MS + due, position, size

    def _size_at(self, position: int) -> int:
        """Return the size of the record at *position*; 0 if it is damaged."""
        data = self._broker.store.segments.read(position, 4)
        size: int = I32.unpack(data)[0] if len(data) == 4 else 0
        return size if 0 < size <= RECORD_BYTES_MAX else 0

    async def _position_of(self, offset: int) -> int:
        """Return the log position of message *offset* of the timer topic; the end of the log after the last one."""
        store = self._broker.store
        queue = store.queue(TIMER_TOPIC, 0)
        offset = max(offset, queue.first_offset)
        if offset >= store.readers.end_offset(queue):
            return store.appended
        result = await store.readers.read_far(queue, offset, 1, 1)
        records = decode_records(b"".join(result.pieces))
        if not records:
            raise Refused(Reason.UNAVAILABLE, f"message {offset} of {TIMER_TOPIC} cannot be read")
        return records[0].position

    def _find_ended(self, read_ms: int, wheel_end: int) -> Steps[set[Timer]]:
        """Return the timers that RocketMQ has delivered or rolled."""
        ended_timers: set[Timer] = set()
        newest: dict[tuple[int, int], int] = {}
        hour_of = -1
        budget = Budget()
        for hour, due_ms, position, key in self._rows():
            if hour != hour_of:
                hour_of, newest = hour, {}
            if position < wheel_end and (due_ms - 1) // PRECISION_MS * PRECISION_MS < read_ms:
                ended_timers.add((due_ms, position))
            else:
                before = newest.get((due_ms, key))
                if before is not None:
                    ended_timers.add((due_ms, before))
                newest[due_ms, key] = position
            if budget.is_over():
                yield
        return ended_timers

    def _rows(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield hour, time, position and key hash of all pending timers, by hour and in log order."""
        for hour, dues, positions, keys in self._timers.pending.freeze():
            for due, position, key in zip(dues, positions, keys, strict=True):
                yield hour, hour * HOUR_MS + due, position, key

    async def _find_recalled(self) -> set[Timer]:
        """Return the timers with a recall later in the log."""
        store, timers = self._broker.store, set[Timer]()
        queue = store.queue(TIMER_TOPIC, 0)
        codes, offset = frozenset((tags_code(RECALL_TAG),)), queue.first_offset
        while offset < store.readers.end_offset(queue):
            result = await store.readers.read_far(queue, offset, READ_AT_ONCE, READ_BYTES, codes)
            for record in decode_records(b"".join(result.pieces)):
                out = find_property(record.properties, OUT_MS)
                due_ms = due_of(int(out)) if out.isdigit() else 0
                for key in _recalled_keys(record.properties):
                    positions = await self._broker.turns.finish(self._timers.pending.with_key(due_ms, key))
                    timers |= {(due_ms, position) for position in positions if position < record.position}
            offset = max(result.next_offset, offset + 1)
        return timers


def _recalled_keys(properties: bytes) -> list[int]:
    """Return the possible key hashes of a recall, whose key is topic and unique key, in RocketMQ 5.5 the latter."""
    key, topic = find_property(properties, RECALLED_KEY), find_property(properties, REAL_TOPIC)
    if not key:
        return []
    return [crc32(key), key_of(topic.decode("utf-8", "replace"), key.decode("utf-8", "replace"))]
