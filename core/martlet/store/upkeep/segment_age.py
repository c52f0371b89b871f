"""The age of segments, by a wall clock that may be wrong.

Age depends on the wall clock, which may be wrong by years. In normal operation a segment is removed within about a day
after it expires. If one is overdue by more than `OVERDUE_HOURS`, the clock has jumped or the broker was stopped for
long, and nothing on this machine can tell which. So overdue segments are removed at the rate at which they would have
expired: the whole log takes ``file_reserved_hours``. No state is kept across starts, so restarts do not make this
faster.
"""

import logging
from datetime import datetime
from typing import Final, final

import trio

from martlet.runtime.clock import Clock
from martlet.store.append.committer import Committer
from martlet.store.config import StoreConfig
from martlet.store.disk.segments import Segments

__all__ = ["HOUR_MS", "OVERDUE_HOURS", "SegmentAge", "span"]

logger = logging.getLogger("martlet.store")

# More hours after expiry than one missed hour of `delete_when`, one missed day and daylight saving time explain.
OVERDUE_HOURS: Final = 49
HOUR_MS: Final = 3_600_000
# Tolerance for a clock that NTP sets back by a little.
BEHIND_MS: Final = 60_000
# Later segments checked, at most, to find out when a segment was written; each check is a read.
ASKED_MAX: Final = 64


@final
class SegmentAge:
    """Tells when the oldest segment is old enough; `check_clock` first says whether the clock is plausible.

    ``config`` may be replaced.
    """

    def __init__(
        self, directory: str, config: StoreConfig, segments: Segments, committer: Committer, clock: Clock
    ) -> None:
        self._directory = directory
        self.config = config
        self._segments = segments
        self._committer = committer
        self._clock = clock
        # Milliseconds for which the oldest segment is overdue, if too long to trust the clock; else 0.
        self.overdue_ms = 0
        # When the waiting time of the next overdue segment began, on trio's clock.
        self._overdue_from = 0.0
        # Milliseconds for which the clock is behind the newest record; 0 if it is not.
        self.clock_behind_ms = 0

    @property
    def hours_max(self) -> int:
        """The age in hours at which segments are removed; 0 if they are only removed when the disk is too full."""
        return self.config.file_reserved_hours if self._hours() else 0

    @property
    def is_the_hour(self) -> bool:
        """Whether segments that are old enough are removed now, in an hour of ``delete_when``."""
        return datetime.fromtimestamp(self._clock.now_ms() / 1000).hour in self._hours()

    def _hours(self) -> set[int]:
        texts = self.config.delete_when.split(";")
        return {int(text) for text in map(str.strip, texts) if text.isdecimal()}

    def may_go(self) -> bool:
        """Return whether the oldest segment is old enough; if it is overdue, the caller must then remove it."""
        past_due_ms = self.past_due_ms()
        if past_due_ms <= 0:
            return False
        return not self.overdue_ms or past_due_ms <= OVERDUE_HOURS * HOUR_MS or self._take_overdue_turn()

    def check_clock(self) -> None:
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
        past_due_ms = self.past_due_ms() if len(self._segments.items) > 1 and self._hours() else 0
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

    def past_due_ms(self) -> int:
        """Return how long ago the oldest segment expired; at most 0 while it is young enough."""
        reserved_ms = self.config.file_reserved_hours * HOUR_MS
        return self._clock.now_ms() - self.stored_ms() - reserved_ms

    def _pause_s(self) -> float:
        """Return the pause in seconds between removing one overdue segment and the next."""
        return self.config.file_reserved_hours * 3600 / len(self._segments.items)

    def _take_overdue_turn(self) -> bool:
        """Return True if the pause since the last overdue segment is over; the caller must then remove one."""
        pause_s = self._pause_s()
        if trio.current_time() - self._overdue_from < pause_s:
            return False
        self._overdue_from += pause_s
        return True

    def stored_ms(self) -> int:
        """Return a time after the last write to the oldest segment; the current time if unknown.

        The result is the first store time of a later segment: of the first one whose time is neither before the
        beginning of this segment nor in the future, because such times were written while the clock was wrong.
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


def span(ms: float) -> str:
    """Format *ms* for people: ``3.5 days``, ``2.0 hours`` or ``90 seconds``."""
    if ms >= 48 * HOUR_MS:
        return f"{ms / HOUR_MS / 24:.1f} days"
    return f"{ms / HOUR_MS:.1f} hours" if ms >= HOUR_MS else f"{ms / 1000:.0f} seconds"
