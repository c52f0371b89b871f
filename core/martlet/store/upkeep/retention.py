"""Removes old segments.

RocketMQ's rules (DefaultMessageStore.CleanCommitLogService): whole segments, the oldest first, never the active one. By
age at the hours of ``delete_when``; at any hour if the disk usage is above ``disk_used_ratio_max``; whatever their age
if it is above ``disk_clean_ratio``. Above ``disk_full_ratio`` appends are refused.
"""

import logging
from datetime import UTC, datetime
from typing import Final, Protocol, final

import trio

from martlet.store.disk.page_cache import PageCache
from martlet.store.disk.segments import Segments
from martlet.store.keys.key_index import KeyIndex
from martlet.store.queues.first_offsets import FirstOffsets
from martlet.store.upkeep.checkpointer import Checkpointer
from martlet.store.upkeep.disk_space import DiskSpace
from martlet.store.upkeep.emptied_queues import EmptiedQueues
from martlet.store.upkeep.segment_age import SegmentAge

__all__ = ["Keeper", "Retention"]

logger = logging.getLogger("martlet.store")

# Segments to remove per step (RocketMQ's destroyMappedFile loop takes ten files per batch).
BATCH: Final = 10
# After a removal each queue needs its new first offset, about 70 us each. Queues to advance at once, and per turn of
# the event loop.
ADVANCED_AT_ONCE: Final = 256
ADVANCED_A_TURN: Final = 32
# Seconds between warnings of segments removed before their time; each `look` may remove ten.
EARLY_WARNING_S: Final = 60.0


class Keeper(Protocol):
    """A component that needs records for longer than retention keeps them."""

    @property
    def released(self) -> int:
        """Retention may remove records before this log position."""
        ...

    @property
    def reason(self) -> str:
        """Why records from ``released`` on may not be removed yet, as a clause without a full stop; for administrators.

        While the disk is too full for appends, their refusal says it.
        """
        ...

    async def release(self, end: int) -> None:
        """Allow the removal of records before log position *end*, after saving the parts that are still needed.

        ``released`` tells afterwards whether it succeeded. A keeper may refuse for as long as it must: then the disk
        fills up, and appends are refused. Return soon: retention waits, so begin long work and finish it elsewhere. An
        *end* of 0 means that nothing has to be removed now.
        """
        ...


@final
class Retention:
    """Removes segments that are old enough (``age``), or for which there is no space (``space``)."""

    def __init__(
        self,
        directory: str,
        segments: Segments,
        pages: PageCache,
        keys: KeyIndex | None,
        first_offsets: FirstOffsets,
        checkpointer: Checkpointer,
        age: SegmentAge,
        space: DiskSpace,
        emptied: EmptiedQueues,
    ) -> None:
        self._directory = directory
        self._segments = segments
        self._pages = pages
        self._keys = keys
        self._first_offsets = first_offsets
        self._checkpointer = checkpointer
        self.age = age
        self.space = space
        self._emptied = emptied
        # Segments that were removed before their time because the disk was too full, since the store was opened.
        self.removed_early = 0
        # Segments removed early that no warning has named yet: their number, the path of the newest, the time before
        # which all of their records were stored, and the disk usage; then the time of the next warning on trio's clock.
        self._early = 0, "", 0, 0.0
        self._early_warning_at = 0.0
        self._keepers: list[Keeper] = []
        self._copies = ""  # where consumers read what was removed
        self._refusing: Keeper | None = None  # the first one that did not release all that it was asked for

    def add_keeper(self, keeper: Keeper, copies: str = "") -> None:
        """Let *keeper* keep records, too; *copies* names where consumers read the records that it has released.

        It is asked before those that were added earlier, which then need not save anything of records that it keeps.
        """
        self._keepers.insert(0, keeper)
        self._copies = copies or self._copies

    async def release(self) -> None:
        """Ask the keepers to allow the removal of what may be removed now."""
        end, self._refusing = self._removable_end(), None
        for keeper in self._keepers:
            await keeper.release(end)
            if keeper.released < end:
                self._refusing, end = self._refusing or keeper, keeper.released

    async def run(self) -> None:
        """Call `look` every ``retention_interval_ms``, until cancelled; every second while appends are refused."""
        interval = self.age.config.retention_interval_ms / 1000
        while True:
            try:
                await self.release()
                await self._emptied.note(self._removable_end())
                self.look()
                while self._first_offsets.advance(ADVANCED_A_TURN):
                    await trio.lowlevel.checkpoint()
            except OSError as error:
                logger.warning("retention in %s is postponed: %s", self._directory, error)
            await trio.sleep(min(interval, 1.0) if self.space.is_refused else interval)

    def look(self) -> None:
        """Measure the disk usage, remove segments, and decide whether to accept appends."""
        self.space.measure()
        self._first_offsets.retry_stuck()
        self.age.check_clock()
        self._emptied.note_now(self._removable_end())
        self._remove_old()
        self._warn_of_early()
        self.space.admit_or_refuse(self._why_kept())

    def _removable_end(self) -> int:
        """Return the log position before which segments may be removed now."""
        items = self._segments.items
        ends = [segment.end for segment in items[: min(BATCH, len(items) - 1)]]
        is_forced = self.space.is_very_short
        end = ends[-1] if ends and self._is_removal_due() and (is_forced or self.age.past_due_ms() > 0) else 0
        return max(end, self._segments.start) if self._emptied.owes_note else end

    def _is_removal_due(self) -> bool:
        return self.space.is_short or self.age.is_the_hour

    def _remove_old(self) -> None:
        """Remove a batch of segments that are old enough or for which there is no space, the oldest first."""
        is_forced = self.space.is_very_short
        if not self._is_removal_due():
            return
        count, used_ratio = 0, self.space.used_ratio
        while count < BATCH and self._may_remove_first(is_forced):
            is_early, stored_ms = self.age.past_due_ms() <= 0, self.age.stored_ms()
            segment = self._segments.remove_first()
            logger.info("segment %s was removed (disk usage %.0f %%)", segment.path, used_ratio * 100)
            count += 1
            if is_early:
                self.removed_early += 1
                self._early = self._early[0] + 1, segment.path, stored_ms, used_ratio
        if count:
            self._update_after_removal()

    def _warn_of_early(self) -> None:
        """Log which segments were removed before their time: consumers may not have read their messages.

        With copies elsewhere nothing is lost; they are only slower to read.
        """
        count, path, stored_ms, used_ratio = self._early
        now = trio.current_time()
        if not count or now < self._early_warning_at:
            return
        self._early, self._early_warning_at = (0, "", 0, 0.0), now + EARLY_WARNING_S
        segments = f"{count} segments up to {path} were" if count > 1 else f"segment {path} was"
        until = datetime.fromtimestamp(stored_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        if self._copies:
            level, outcome = logging.INFO, f"consumers read messages stored until {until} from {self._copies}"
        else:
            level = logging.WARNING
            outcome = (
                f"messages stored until {until} are gone, also those that consumers have not read; give the data "
                "directory more space, or set store.file_reserved_hours lower to remove old messages in time"
            )
        logger.log(
            level,
            "%s removed before store.file_reserved_hours (%d) because the disk is %.0f %% full, and "
            "store.disk_clean_ratio is %g: %s",
            segments,
            self.age.config.file_reserved_hours,
            used_ratio * 100,
            self.age.config.disk_clean_ratio,
            outcome,
        )

    def _may_remove_first(self, is_forced: bool) -> bool:
        """Return whether the oldest segment is old enough; never true for the active one or beyond the checkpoint.

        A start finds the end of a queue in its entries. If neither entries nor records were on disk, an empty queue
        would restart at 0.
        """
        if len(self._segments.items) < 2:
            return False
        removable_end = min(self._checkpointer.checkpointed, self._emptied.noted_to)
        removable_end = min([removable_end, *[keeper.released for keeper in self._keepers]])
        return self._segments.items[0].end <= removable_end and (is_forced or self.age.may_go())

    def _why_kept(self) -> str:
        """Return which keeper holds back a removal that is due, and why; empty if none does."""
        items, keeper = self._segments.items, self._refusing
        if keeper is None or not self.space.is_short or keeper.released >= items[0].end:
            return ""
        behind = items[-1].start - max(keeper.released, self._segments.start)
        size = f"{behind / (1 << 30):.1f} GiB" if behind >= 1 << 30 else f"{behind / (1 << 20):.1f} MiB"
        return f"{size} of old records may not be removed yet: {keeper.reason}"

    def _update_after_removal(self) -> None:
        start = self._segments.start
        self._pages.drop_before(start)
        self._segments.files.disk.sync_directory(self._segments.directory)
        if self._first_offsets.look_again() <= ADVANCED_AT_ONCE:
            self._first_offsets.advance(ADVANCED_AT_ONCE)
        if self._keys is not None:
            self._keys.remove_before(start)
        self.space.measure()
