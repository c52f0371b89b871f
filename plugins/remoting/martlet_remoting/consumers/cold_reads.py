"""Limits the bytes that a consumer group reads far behind the tail, where records come from the disk or a cold tier.

A group that starts again after days reads the whole backlog as fast as its clients take it, and the disk is then busy
for everybody. An administrator can set a limit for such a group (RocketMQ's updateColdDataFlowCtrGroupConfig), which
holds until the broker stops. As in RocketMQ, bytes are counted in windows of 5 s (ColdDataCgCtrService), and a pull
over the limit is refused with SYSTEM_BUSY; Java clients then pull again after 3 s.

Records of a cold tier cost requests to its store, and processor time to rebuild them. So all groups without a limit of
their own have one for these.
"""

from collections.abc import Callable
from typing import Final, final

from martlet.errors import Reason, Refused

__all__ = ["WINDOW_S", "ColdReads"]

WINDOW_S: Final = 5.0


@final
class _Reads:
    """The reads of one group in the current window."""

    __slots__ = ("bytes", "first_ms", "last_ms", "tier_bytes")

    def __init__(self, now_ms: int) -> None:
        self.bytes = 0
        self.tier_bytes = 0  # of these, from the cold tier
        self.first_ms = self.last_ms = now_ms


@final
class ColdReads:
    """The limits, and the bytes that each group has read from the disk or the cold tier in the current window.

    A group that `limits` does not name may read *tier_bytes_max* bytes from the cold tier in a window; 0: any number.
    """

    def __init__(self, now: Callable[[], float], now_ms: Callable[[], int], tier_bytes_max: int = 0) -> None:
        self.limits: dict[str, int] = {}  # group -> bytes per window
        self._tier_bytes_max = tier_bytes_max
        self.refused = 0
        self._now = now
        self._now_ms = now_ms
        self._reads: dict[str, _Reads] = {}
        self._end = 0.0  # end of the current window

    def check(self, group: str, *, is_cold: bool = False) -> None:
        """Refuse a read of *group* (BUSY) if it has reached its limit; *is_cold*: from the cold tier, not the disk."""
        limit = self.limits.get(group)
        reads = self._current().get(group)
        if limit is not None:
            size = reads.bytes if reads is not None else 0
        elif is_cold and self._tier_bytes_max:
            limit, size = self._tier_bytes_max, reads.tier_bytes if reads is not None else 0
        else:
            return
        if size >= limit:
            self.refused += 1
            where = "the cold tier" if is_cold else "the disk"
            text = f"group [{group}] has read {size} bytes of old messages from {where}; its limit per"
            text = f"{text} {WINDOW_S:g} s is {limit}, change it with updateColdDataFlowCtrGroupConfig"
            raise Refused(Reason.BUSY, text)

    def took(self, group: str, size: int, *, is_cold: bool = False) -> None:
        """Count *size* bytes that *group* got; *is_cold*: from the cold tier, not the disk."""
        now_ms = self._now_ms()
        window = self._current()
        reads = window.get(group)
        if reads is None:
            reads = window[group] = _Reads(now_ms)
        reads.bytes += size
        reads.tier_bytes += size * is_cold
        reads.last_ms = now_ms

    def _current(self) -> dict[str, _Reads]:
        """Return the reads of the current window; begin a new one if it is over."""
        now = self._now()
        if now >= self._end:
            self._reads = {}
            self._end = now + WINDOW_S
        return self._reads

    def as_json(self) -> dict[str, object]:
        """Return limits and reads in RocketMQ's form; a threshold of 0 for all groups means that there is none."""
        reads = self._current()
        table = {
            group: {"coldAcc": each.bytes, "createTimeMills": each.first_ms, "lastColdReadTimeMills": each.last_ms}
            for group, each in reads.items()
        }
        return {
            "runtimeTable": table,
            "configTable": dict(self.limits),
            "cgColdReadThreshold": 0,
            "globalColdReadThreshold": 0,
            "globalAcc": sum(each.bytes for each in reads.values()),
        }
