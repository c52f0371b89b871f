"""Removes old segments, and refuses appends while the disk is full.

RocketMQ's rules (DefaultMessageStore.CleanCommitLogService): whole segments, the oldest first, never the active one. By
age at the hours of ``delete_when``; at any hour if the disk usage is above ``disk_used_ratio_max``; whatever their age
if it is above ``disk_clean_ratio``. Above ``disk_full_ratio`` appends are refused.

Age depends on the wall clock, which may be wrong by years. In normal operation a segment is removed within about a day
after it expires. If one is overdue by more than `OVERDUE_HOURS`, the clock has jumped or the broker was stopped for
long, and nothing on this machine can tell which. So overdue segments are removed at the rate at which they would have
expired: the whole log takes ``file_reserved_hours``. No state is kept across starts, so restarts do not make this
faster.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Final, Protocol, final

import trio

from martlet.errors import Refused
from martlet.runtime.clock import Clock
from martlet.runtime.steps import per_slice
from martlet.store.append.admission import Admission
from martlet.store.append.committer import Committer
from martlet.store.append.flusher import Flusher
from martlet.store.append.note_writer import NoteWriter
from martlet.store.config import StoreConfig
from martlet.store.disk.files import is_full
from martlet.store.disk.page_cache import LogWriter, PageCache
from martlet.store.disk.segments import Segments
from martlet.store.keys.key_index import KeyIndex
from martlet.store.queues.first_offsets import FirstOffsets
from martlet.store.queues.queues import Queue, Queues
from martlet.store.upkeep.checkpointer import Checkpointer

__all__ = ["HOUR_MS", "OVERDUE_HOURS", "Keeper", "Retention", "span"]

logger = logging.getLogger("martlet.store")

# Segments to remove per step (RocketMQ's destroyMappedFile loop takes ten files per batch).
BATCH: Final = 10
# Afterwards each queue needs its new first offset, about 70 us each. Queues to advance at once, and per turn of the
# event loop.
ADVANCED_AT_ONCE: Final = 256
ADVANCED_A_TURN: Final = per_slice(us=70)
# Queues to check per turn of the event loop for whether a removal empties them.
NOTED_A_TURN: Final = 2000
# Longer after expiry than one missed hour of `delete_when`, one missed day and daylight saving time explain.
OVERDUE_HOURS: Final = 49
HOUR_MS: Final = 3_600_000
# NTP may set a clock back by a little.
BEHIND_MS: Final = 60_000
# At most this many later segments are checked to find out when a segment was written; each check is a read.
ASKED_MAX: Final = 64
# Between warnings of segments that were removed before their time; each look may remove ten.
EARLY_WARNING_S: Final = 60.0
# After a refusal, appends resume when this fraction of the disk below the limit is free again, to avoid flapping.
HYSTERESIS: Final = 0.02


class Keeper(Protocol):
    """A component that needs records for longer than retention keeps them."""

    @property
    def released(self) -> int:
        """Retention may remove records before this log position."""
        ...

    async def release(self, end: int) -> None:
        """Allow the removal of records before log position *end*, after appending again what is still needed of them.

        ``released`` tells afterwards whether it succeeded. A keeper must not refuse forever. An *end* of 0 says that
        nothing has to be removed now.
        """
        ...


@final
class Retention:
    """Applies the limits on age and disk usage to one store."""

    def __init__(
        self,
        directory: str,
        config: StoreConfig,
        segments: Segments,
        pages: PageCache,
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
        # Segments that were removed before their time because the disk was too full, since the store was opened.
        self.removed_early = 0
        # Those of them that no warning has named yet: how many, the path of the newest, the time before which all of
        # their records were stored, and the disk usage. The next warning may come at this time of trio's clock.
        self._early = 0, "", 0, 0.0
        self._early_said_from = 0.0
        # All queues without a record after this log position have a note in the log.
        self._noted_to = 0
        # A note must still be written, because there was no space on the disk.
        self._unnoted = False
        # Called before anything is removed.
        self.keeper: Keeper | None = None
        # How long the oldest segment is overdue, if that is too long to trust the clock; else 0.
        self.overdue_ms = 0
        # When the waiting time of the next overdue segment began, on trio's clock.
        self._overdue_from = 0.0
        # How far the clock is behind the newest record; 0 if it is not.
        self.clock_behind_ms = 0

    async def run(self) -> None:
        """Call `look` every ``retention_interval_ms``, until cancelled; every second while appends are refused."""
        interval = self._config.retention_interval_ms / 1000
        while True:
            try:
                if self.keeper is not None:
                    await self.keeper.release(self._wanted_end())
                await self._note_ends()
                self.look()
                while self._first_offsets.advance(ADVANCED_A_TURN):
                    await trio.lowlevel.checkpoint()
            except OSError as error:
                logger.warning("retention in %s is postponed: %s", self._directory, error)
            await trio.sleep(min(interval, 1.0) if self._admission.refusal else interval)

    def look(self) -> None:
        """Measure the disk usage, remove segments, and decide whether to accept appends."""
        self.used_ratio = self._files.disk.usage(self._directory).ratio
        self._first_offsets.retry_stuck()
        self._check_clock()
        self._note_ends_now()
        self._remove_old()
        self._warn_of_early()
        self._decide()

    # ---- plausibility of the clock

    def _check_clock(self) -> None:
        """Compare the clock with the records, and log it once if they contradict each other."""
        behind_ms = self._committer.last_store_ms - self._clock.now_ms()
        if behind_ms <= BEHIND_MS:
            behind_ms = 0
        elif not self.clock_behind_ms:
            logger.warning(
                "the clock is %s behind the newest record in %s; newer records than the clock are not removed by age",
                span(behind_ms),
                self._directory,
            )
        self.clock_behind_ms = behind_ms
        past_due_ms = self._past_due_ms() if len(self._segments.items) > 1 and self._hours() else 0
        if past_due_ms <= OVERDUE_HOURS * HOUR_MS:
            past_due_ms = 0
        elif not self.overdue_ms:
            self._overdue_from = trio.current_time()
            logger.warning(
                "segment %s is %s past store.file_reserved_hours: the clock jumped ahead or the broker was stopped for "
                "long; such segments are removed %s apart; if the clock is wrong, correct it",
                self._segments.items[0].path,
                span(past_due_ms),
                span(self._pause_s() * 1000),
            )
        self.overdue_ms = past_due_ms

    def _past_due_ms(self) -> int:
        """Return how long ago the oldest segment expired; at most 0 while it is young enough."""
        reserved_ms = self._config.file_reserved_hours * HOUR_MS
        return self._clock.now_ms() - self._last_store_ms() - reserved_ms

    def _pause_s(self) -> float:
        """Return the pause in seconds between removing one overdue segment and the next."""
        return self._config.file_reserved_hours * 3600 / len(self._segments.items)

    def _take_overdue_turn(self) -> bool:
        """Return True if the pause since the last overdue segment is over; the caller must then remove one."""
        pause_s = self._pause_s()
        if trio.current_time() - self._overdue_from < pause_s:
            return False
        self._overdue_from += pause_s
        return True

    # ---- notes on queues that become empty

    def _wanted_end(self) -> int:
        """Return the log position before which segments may be removed now."""
        items = self._segments.items
        ends = [segment.end for segment in items[: min(BATCH, len(items) - 1)]]
        wanted = ends[-1] if ends and self._removal_is_due() and (self._is_forced() or self._past_due_ms() > 0) else 0
        return max(wanted, self._segments.start) if self._unnoted else wanted

    def _left_empty(self, end: int) -> Iterator[list[Queue]]:
        """Return the queues that had records or a note, but have neither at or after log position *end*."""
        queues = self._queues.all()
        for at in range(0, len(queues), NOTED_A_TURN):
            part = queues[at : at + NOTED_A_TURN]
            used = [queue for queue in part if queue.next_offset or queue.noted >= 0]
            yield [queue for queue in used if queue.last_end <= end and queue.noted < end]

    def _note(self, queues: list[Queue]) -> None:
        """Write the next offsets of *queues* into the log, which has no other trace of them without their records."""
        try:
            if queues:
                self._notes.note_offsets(queues)
        except Refused as refused:
            # The segments are removed anyway, which makes space.
            self._unnoted = True
            logger.warning("the next offsets of %d empty queues are noted later; %s", len(queues), refused)

    async def _note_ends(self) -> None:
        """Note the next offsets of queues that a removal empties, and wait until that is durable."""
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
        """Like `_note_ends`, but blocking and complete on return."""
        end = self._wanted_end()
        if self._flusher.failed is not None or (end <= self._noted_to and not self._unnoted):
            return
        self._unnoted = False
        for queues in self._left_empty(end):
            self._note(queues)
        self._flusher.flush_now()
        if self._flusher.durable >= self._tail.written:
            self._noted_to = end

    # ---- removal

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
            is_early, stored_ms = self._past_due_ms() <= 0, self._last_store_ms()
            gone = self._segments.remove_first()
            logger.info("segment %s was removed (disk usage %.0f %%)", gone.path, self.used_ratio * 100)
            removed += 1
            if is_early:
                self.removed_early += 1
                self._early = self._early[0] + 1, gone.path, stored_ms, self.used_ratio
        if removed:
            self.removed_segments += removed
            self._after_removal()

    def _warn_of_early(self) -> None:
        """Log which segments were removed before their time: messages are gone that consumers may not have read."""
        count, path, stored_ms, used_ratio = self._early
        now = trio.current_time()
        if not count or now < self._early_said_from:
            return
        self._early, self._early_said_from = (0, "", 0, 0.0), now + EARLY_WARNING_S
        segments = f"{count} segments up to {path} were" if count > 1 else f"segment {path} was"
        logger.warning(
            "%s removed before store.file_reserved_hours (%d) because the disk is %.0f %% full, and "
            "store.disk_clean_ratio is %g: messages stored until %s are gone, also those that consumers have not read; "
            "give the data directory more space, or set store.file_reserved_hours lower to remove old messages in time",
            segments,
            self._config.file_reserved_hours,
            used_ratio * 100,
            self._config.disk_clean_ratio,
            datetime.fromtimestamp(stored_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )

    @property
    def is_by_age(self) -> bool:
        """Whether segments are removed when they are old enough, and not only when the disk is too full."""
        return bool(self._hours())

    def _is_the_hour(self) -> bool:
        return datetime.fromtimestamp(self._clock.now_ms() / 1000).hour in self._hours()

    def _hours(self) -> set[int]:
        parts = self._config.delete_when.split(";")
        return {int(part) for part in map(str.strip, parts) if part.isdecimal()}

    def _may_go(self, forced: bool) -> bool:
        """Return whether the oldest segment is old enough; never true for the active one or beyond the checkpoint.

        A start finds the end of a queue in its entries. If neither these nor the records were on disk, an empty queue
        would restart at 0.
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
        return not self.overdue_ms or past_due_ms <= OVERDUE_HOURS * HOUR_MS or self._take_overdue_turn()

    def _last_store_ms(self) -> int:
        """Return a time after the last write to the oldest segment; the current time if unknown.

        It is the first store time of a later segment, the first one whose time is neither before the beginning of this
        segment nor in the future: such times were written while the clock was wrong.
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

    # ---- refusing appends

    def _decide(self) -> None:
        if self._flusher.failed is not None:
            return
        limit = self._config.disk_full_ratio
        if self.used_ratio > limit:
            self._admission.close(
                f"the disk of {self._directory!r} is {self.used_ratio:.0%} full, above the limit of {limit:.0%} "
                "(store.disk_full_ratio); writes resume automatically once there is space"
            )
            return
        if (
            self._admission.refusal
            and (self.used_ratio <= limit - HYSTERESIS or self._admission.disk_full)
            and self._has_space()
        ):
            logger.info("there is space again in %s; accepting writes", self._directory)
            self._admission.disk_full = False
            self._admission.refusal = ""

    def _has_space(self) -> bool:
        """Return whether a page can be written, and the start is complete."""
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


def span(ms: float) -> str:
    """Format *ms* for people: ``3.5 days``, ``2.0 hours`` or ``90 seconds``."""
    if ms >= 48 * HOUR_MS:
        return f"{ms / HOUR_MS / 24:.1f} days"
    return f"{ms / HOUR_MS:.1f} hours" if ms >= HOUR_MS else f"{ms / 1000:.0f} seconds"
