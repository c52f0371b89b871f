"""Runtime information about delays, by the names of RocketMQ's broker (GET_BROKER_RUNTIME_INFO)."""

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, final

import trio

from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet_timer.levels.state import LevelState

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["RunningInfo"]

# Rates are means over this many seconds.
WINDOW_S: Final = 10


@final
class RunningInfo:
    """The values; *timers* returns the statistics of the timers. Rates are known while `sample` runs."""

    def __init__(self, broker: "Broker", offsets: LevelState, timers: Callable[[], Mapping[str, object]]) -> None:
        self._store = broker.store
        self._offsets = offsets
        self._timers = timers
        # (time, number of added timers, number of delivered timers).
        self._samples: deque[tuple[float, int, int]] = deque(maxlen=WINDOW_S + 1)

    async def sample(self) -> None:
        """Sample the counts each second, until cancelled."""
        while True:
            self._samples.append((trio.current_time(), *self._counts()))
            await trio.sleep(1)

    def _counts(self) -> tuple[int, int]:
        counters = self._timers()
        delivered, pending, recalled, dropped = (
            int(str(counters[name])) for name in ("delivered", "pending", "recalled", "dropped_without_topic")
        )
        return delivered + pending + recalled + dropped, delivered

    def _rates(self) -> tuple[float, float]:
        if not self._samples:
            return 0.0, 0.0
        since, added, delivered = self._samples[0]
        now_added, now_delivered = self._counts()
        seconds = max(trio.current_time() - since, 1.0)
        return max(now_added - added, 0) / seconds, (now_delivered - delivered) / seconds

    def values(self) -> dict[str, str]:
        """Return delivered and stored messages of each level, and statistics of timers."""
        levels: dict[str, str] = {}
        for queue_id, queue in sorted(self._store.queues.topics.get(SCHEDULE_TOPIC, {}).items()):
            delivered_to = max(self._offsets.by_level.get(queue_id + 1, 0), queue.first_offset)
            end = self._store.readers.end_offset(queue)
            if end:
                levels[f"scheduleMessageOffset_{queue_id + 1}"] = f"{delivered_to},{end}"
        timers, (added, delivered) = self._timers(), self._rates()
        return {
            **levels,
            "timerCongestNum": str(timers["pending"]),
            "timerDequeueTps": str(round(delivered, 1)),
            "timerEnqueueTps": str(round(added, 1)),
            "timerOffsetBehind": str(timers["not_yet_pending"]),
            "timerReadBehind": str(int(str(timers["behind_ms"])) // 1000),
        }
