"""Removes old segments, and refuses appends while the disk is full.

RocketMQ's rules (DefaultMessageStore.CleanCommitLogService): whole segments, the oldest first,
never the one in use. By age at the hours of ``delete_when``; at any hour above
``disk_used_ratio_max``; whatever the age above ``disk_clean_ratio``. Above ``disk_full_ratio``
nothing is appended.

Age is what the wall clock says, and that may be wrong by years. In normal operation a segment goes
within a day or so of its time. One that is overdue by more than `OVERDUE_HOURS` means that the clock
jumped or that the broker was stopped for long, and nothing on this machine can tell which. So
overdue segments go at the rate at which they would have come of age: the whole log takes as
long as ``file_reserved_hours``. Nothing is remembered across starts, so no restart gets around it.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Final, Protocol, final

import trio

from martlet.clock import Clock
from martlet.errors import Refused
from martlet.store.admission import Admission
from martlet.store.checkpointer import Checkpointer
from martlet.store.committer import Committer
from martlet.store.config import StoreConfig
from martlet.store.files import is_full
from martlet.store.first_offsets import FirstOffsets
from martlet.store.flusher import Flusher
from martlet.store.key_index import KeyIndex
from martlet.store.note_writer import NoteWriter
from martlet.store.page_cache import Chunks, LogWriter
from martlet.store.queues import Queue, Queues
from martlet.store.segments import Segments

__all__ = ["Keeper", "Retention"]

logger = logging.getLogger("martlet.store")

# Segments removed in one go (RocketMQ's destroyMappedFile loop takes ten files a batch).
BATCH: Final = 10
# Each queue then has its first offset looked for, in about 70 us: so many at once, so many before others have a turn.
ADVANCED_AT_ONCE: Final = 256
ADVANCED_A_TURN: Final = 32
# Queues that are looked at before the event loop gets its turn, to see which a removal leaves empty.
NOTED_A_TURN: Final = 2000
# Further past its time than an hour of `delete_when` explains, with a day missed and a clock set for summer.
OVERDUE_HOURS: Final = 49
HOUR_MS: Final = 3_600_000
# A clock that is set right by NTP may go back a little.
BEHIND_MS: Final = 60_000
# Later segments that are asked when a segment was written; each is a read.
ASKED_MAX: Final = 64
# After appends were refused they go on when this much is free again under the limit, so that they do not flutter.
HYSTERESIS: Final = 0.02


class Keeper(Protocol):
    """Whoever needs records for longer than retention keeps them."""

    @property
    def released(self) -> int:
        """Retention may remove what is before this log position."""
        ...

    async def release(self, end: int) -> None:
        """Let records before log position *end* go, after what is still needed of them was appended again.

        ``released`` says afterwards whether it was done. It must not be put off for ever.
        """
        ...


@final
class Retention:
    """Looks at age and disk use of one store."""

    __slots__ = (
        "_admission",
        "_checkpointer",
        "_clock",
        "_committer",
        "_complete_start",
        "_config",
        "_directory",
        "_files",
        "_first_offsets",
        "_flusher",
        "_keys",
        "_noted_to",
        "_notes",
        "_overdue_from",
        "_pages",
        "_queues",
        "_segments",
        "_tail",
        "_unnoted",
        "clock_behind_ms",
        "keeper",
        "overdue_ms",
        "removed_segments",
        "used_ratio",
    )

    def __init__(
        self,
        directory: str,
        config: StoreConfig,
        segments: Segments,
        pages: Chunks,
        queues: Queues,
        keys: KeyIndex | None,
        tail: LogWriter,
        flusher: Flusher,
        admission: Admission,
        committer: Committer,
        notes: NoteWriter,
        first_offsets: FirstOffsets,
        checkpointer: Checkpointer,
        complete_start: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._directory = directory
        self._config = config
        self._files = segments.files
        self._segments = segments
        self._pages = pages
        self._queues = queues
        self._keys = keys
        self._tail = tail
        self._flusher = flusher
        self._admission = admission
        self._committer = committer
        self._notes = notes
        self._first_offsets = first_offsets
        self._checkpointer = checkpointer
        self._complete_start = complete_start
        self._clock = clock
        self.used_ratio = 0.0
        self.removed_segments = 0
        # Before this log position every queue that has no record behind it is noted in the log.
        self._noted_to = 0
        # A note found no space on the disk and is owed.
        self._unnoted = False
        # Asked before anything is removed.
        self.keeper: Keeper | None = None
        # How far the oldest segment is past its time, if that is too far to believe the clock; else 0.
        self.overdue_ms = 0
        # From when on the next overdue segment waits for its turn, on trio's clock.
        self._overdue_from = 0.0
        # How far the clock is behind the newest record; 0 when it is not.
        self.clock_behind_ms = 0

    async def run(self) -> None:
        """Look every ``retention_interval_ms``, until cancelled; every second while appends are refused."""
        interval = self._config.retention_interval_ms / 1000
        while True:
            try:
                if self.keeper is not None and (end := self._wanted_end()) > self.keeper.released:
                    await self.keeper.release(end)
                await self._note_ends()
                self.look()
                while self._first_offsets.advance(ADVANCED_A_TURN):
                    await trio.lowlevel.checkpoint()
            except OSError as error:
                logger.warning("retention in %s is put off: %s", self._directory, error)
            await trio.sleep(min(interval, 1.0) if self._admission.refusal else interval)

    def look(self) -> None:
        """Measure, remove what may go, and decide whether appends are taken."""
        self.used_ratio = self._files.disk.usage(self._directory).ratio
        self._first_offsets.retry_stuck()
        self._check_clock()
        self._note_ends_now()
        self._remove_old()
        self._decide()

    # ---- whether the clock can be right

    def _check_clock(self) -> None:
        """Compare the clock with the records, and say once when they contradict each other."""
        behind_ms = self._committer.last_store_ms - self._clock.now_ms()
        if behind_ms <= BEHIND_MS:
            behind_ms = 0
        elif not self.clock_behind_ms:
            logger.warning(
                "the clock is %s behind the newest record in %s; nothing newer than the clock is removed by age",
                _span(behind_ms),
                self._directory,
            )
        self.clock_behind_ms = behind_ms
        past_due_ms = self._past_due_ms() if len(self._segments.items) > 1 and self._hours() else 0
        if past_due_ms <= OVERDUE_HOURS * HOUR_MS:
            past_due_ms = 0
        elif not self.overdue_ms:
            self._overdue_from = trio.current_time()
            logger.warning(
                "segment %s is %s past store.file_reserved_hours; the clock jumped ahead or the broker was stopped for "
                "long; such segments are removed %s apart; if the clock is wrong, set it right",
                self._segments.items[0].path,
                _span(past_due_ms),
                _span(self._pause_s() * 1000),
            )
        self.overdue_ms = past_due_ms

    def _past_due_ms(self) -> int:
        """How far the oldest segment is past its time; not above 0 while it is young enough."""
        reserved_ms = self._config.file_reserved_hours * HOUR_MS
        return self._clock.now_ms() - self._last_store_ms() - reserved_ms

    def _pause_s(self) -> float:
        """The seconds between two overdue segments."""
        return self._config.file_reserved_hours * 3600 / len(self._segments.items)

    def _overdue_may_go(self) -> bool:
        """Whether it is the turn of another overdue segment; it counts as gone then."""
        pause_s = self._pause_s()
        if trio.current_time() - self._overdue_from < pause_s:
            return False
        self._overdue_from += pause_s
        return True

    # ---- where queues go on

    def _wanted_end(self) -> int:
        """Before which log position segments may go now."""
        items = self._segments.items
        ends = [segment.end for segment in items[: min(BATCH, len(items) - 1)]]
        wanted = ends[-1] if ends and self._removal_is_due() and (self._is_forced() or self._past_due_ms() > 0) else 0
        return max(wanted, self._segments.start) if self._unnoted else wanted

    def _left_empty(self, end: int) -> Iterator[list[Queue]]:
        """Queues that have records, none of them at or behind log position *end*, and no note there."""
        queues = self._queues.all()
        for at in range(0, len(queues), NOTED_A_TURN):
            part = queues[at : at + NOTED_A_TURN]
            yield [queue for queue in part if queue.last_end <= end and queue.next_offset and queue.noted < end]

    def _note(self, queues: list[Queue]) -> None:
        """Write into the log where *queues* go on: without their records nothing else there says it."""
        try:
            if queues:
                self._notes.note_offsets(queues)
        except Refused as refused:
            # Segments go all the same, which makes space.
            self._unnoted = True
            logger.warning("where %d empty queues go on is noted later; %s", len(queues), refused)

    async def _note_ends(self) -> None:
        """Note where queues go on that a removal leaves empty, and wait until that is durable."""
        end = self._wanted_end()
        if self._flusher.failed is not None or (end <= self._noted_to and not self._unnoted):
            return
        self._unnoted = False
        for queues in self._left_empty(end):
            self._note(queues)
            await trio.lowlevel.checkpoint()
        await self._flusher.wait_durable(self._tail.written)
        self._noted_to = end

    def _note_ends_now(self) -> None:
        """As `_note_ends`, blocking; nothing is left to do behind that."""
        end = self._wanted_end()
        if self._flusher.failed is not None or (end <= self._noted_to and not self._unnoted):
            return
        self._unnoted = False
        for queues in self._left_empty(end):
            self._note(queues)
        self._flusher.flush_now()
        if self._flusher.durable >= self._tail.written:
            self._noted_to = end

    # ---- what goes

    def _is_forced(self) -> bool:
        return self.used_ratio > self._config.disk_clean_ratio

    def _removal_is_due(self) -> bool:
        return self._is_forced() or self.used_ratio > self._config.disk_used_ratio_max or self._is_the_hour()

    def _remove_old(self) -> None:
        forced = self._is_forced()
        if not self._removal_is_due():
            return
        removed = 0
        while removed < BATCH and self._may_go(forced):
            gone = self._segments.remove_first()
            logger.info("segment %s was removed (disk %.0f %% used)", gone.path, self.used_ratio * 100)
            removed += 1
        if removed:
            self.removed_segments += removed
            self._after_removal()

    def _is_the_hour(self) -> bool:
        return datetime.fromtimestamp(self._clock.now_ms() / 1000).hour in self._hours()

    def _hours(self) -> set[int]:
        parts = self._config.delete_when.split(";")
        return {int(part) for part in map(str.strip, parts) if part.isdecimal()}

    def _may_go(self, forced: bool) -> bool:
        """Whether the oldest segment is old enough; never the one in use, nor what no checkpoint covers.

        A start finds the end of a queue in its entries. Were these not on the disk and the records gone,
        a queue of which nothing is left would begin again at 0.
        """
        if len(self._segments.items) < 2:
            return False
        covered = min(self._checkpointer.checkpointed, self._noted_to)
        if self.keeper is not None:
            covered = min(covered, self.keeper.released)
        if self._segments.items[0].end > covered:
            return False
        if forced:
            return True
        past_due_ms = self._past_due_ms()
        if past_due_ms <= 0:
            return False
        return not self.overdue_ms or past_due_ms <= OVERDUE_HOURS * HOUR_MS or self._overdue_may_go()

    def _last_store_ms(self) -> int:
        """A time at which the oldest segment was no longer written; now, if nothing tells.

        It is when a later segment began: of the first one that says neither a time before this segment
        began nor one that is still to come, which were written while the clock was wrong.
        """
        segments, now_ms = self._segments, self._clock.now_ms()
        began_ms = segments.head_store_ms(segments.items[0])
        if began_ms > now_ms:
            began_ms = 0
        for segment in segments.items[1 : 1 + ASKED_MAX]:
            stored_ms = segments.head_store_ms(segment)
            if max(began_ms, 1) <= stored_ms <= now_ms:
                return stored_ms
        return now_ms

    def _after_removal(self) -> None:
        start = self._segments.start
        self._pages.drop_before(start)
        self._files.disk.sync_directory(self._segments.directory)
        if self._first_offsets.look_again() <= ADVANCED_AT_ONCE:
            self._first_offsets.advance(ADVANCED_AT_ONCE)
        if self._keys is not None:
            self._keys.remove_before(start)
        self.used_ratio = self._files.disk.usage(self._directory).ratio

    # ---- whether appends are taken

    def _decide(self) -> None:
        if self._flusher.failed is not None:
            return
        limit = self._config.disk_full_ratio
        if self.used_ratio > limit:
            self._admission.close(
                f"the disk of {self._directory!r} is {self.used_ratio:.0%} full, above the limit of {limit:.0%} "
                "(store.disk_full_ratio); writes go on by themselves when there is space"
            )
            return
        if (
            self._admission.refusal
            and (self.used_ratio <= limit - HYSTERESIS or self._admission.disk_full)
            and self._has_space()
        ):
            logger.info("there is space again in %s; writes go on", self._directory)
            self._admission.disk_full = False
            self._admission.refusal = ""

    def _has_space(self) -> bool:
        """Whether a page can be written and kept, and nothing of the start is left to be written."""
        try:
            self._probe()
            return self._complete_start()
        except OSError as error:
            if not is_full(error):
                raise
            return False

    def _probe(self) -> None:
        """Write a page and remove it again."""
        path = f"{self._directory}/space.probe"
        if "space.probe" in self._files.disk.names(self._directory):
            self._files.unlink(path)
        self._files.create(path, 0)
        try:
            self._files.write(path, b"\xff" * 65536, 0)
            self._files.sync(path)
        finally:
            self._files.unlink(path)


def _span(ms: float) -> str:
    """*ms* for people: ``3.5 days``, ``2.0 hours`` or ``90 seconds``."""
    if ms >= 48 * HOUR_MS:
        return f"{ms / HOUR_MS / 24:.1f} days"
    return f"{ms / HOUR_MS:.1f} hours" if ms >= HOUR_MS else f"{ms / 1000:.0f} seconds"
