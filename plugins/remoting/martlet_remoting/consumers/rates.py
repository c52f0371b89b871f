"""Message rates per topic and group, over the last minute, hour and day.

There is no count per message: the store knows the ends and sizes of its queues, and delivered messages are added once
per pull. A service samples the sums every ten seconds. The windows and their names are RocketMQ's (BrokerStatsManager
and StatsItem).
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias, final

import trio

from martlet.store import Store
from martlet.tables.topics import Topics

__all__ = ["Rates", "Series"]

SAMPLE_S: Final = 10.0
MINUTE_SAMPLES: Final = 7  # 10 s apart
HOUR_SAMPLES: Final = 7  # 10 minutes apart
DAY_SAMPLES: Final = 25  # an hour apart
HOUR_EVERY: Final = 60  # samples of 10 s
DAY_EVERY: Final = 360
TOPICS_AT_ONCE: Final = 256
SUMS_AT_ONCE: Final = 2048  # more than topics, because each needs only a look-up
DAY_MS: Final = 86_400_000
PUT_NUMS: Final = "TOPIC_PUT_NUMS"
PUT_SIZE: Final = "TOPIC_PUT_SIZE"
OF_TOPICS: Final = (PUT_NUMS, PUT_SIZE)

Sample: TypeAlias = tuple[float, int, int]


@final
class Series:
    """One growing sum, and its samples of the last minute, hour and day: time, value, and number of increases.

    The number of increases is RocketMQ's ``times``: messages for stored sums, requests for delivered and acknowledged
    ones.
    """

    __slots__ = ("_count", "_day", "_hour", "_minute", "last")

    def __init__(self, now: float, value: int, times: int) -> None:
        first = (now, value, times)
        self._minute = deque([first], MINUTE_SAMPLES)
        self._hour = deque([first], HOUR_SAMPLES)
        self._day = deque([first], DAY_SAMPLES)
        self._count = 0
        self.last = value

    def sample(self, now: float, value: int, times: int) -> None:
        """Add a sample; called every SAMPLE_S."""
        self._count += 1
        self.last = value
        sample = (now, value, times)
        self._minute.append(sample)
        if self._count % HOUR_EVERY == 0:
            self._hour.append(sample)
        if self._count % DAY_EVERY == 0:
            self._day.append(sample)

    @property
    def is_flat(self) -> bool:
        """Whether the sum has not changed for a day, according to the samples."""
        return self._count >= DAY_EVERY and self._day[0][1] == self.last

    def tps(self, seconds: float = 60.0) -> float:
        """Return the increase per second over the last *seconds* of samples."""
        newest, value, _ = self._minute[-1]
        recent = ((t, v) for t, v, _ in self._points() if newest - t <= seconds + SAMPLE_S / 2)
        start, base = next(recent, (newest, value))
        return (value - base) / (newest - start) if newest > start else 0.0

    def _points(self) -> Iterator[Sample]:
        """Yield the samples, oldest first: of the hour, then of the minute."""
        oldest = self._minute[0][0]
        yield from (point for point in self._hour if point[0] < oldest)
        yield from self._minute

    def as_json(self) -> dict[str, object]:
        """Return RocketMQ's BrokerStatsData."""
        return {"statsDay": _window(self._day), "statsHour": _window(self._hour), "statsMinute": _window(self._minute)}


def _window(points: deque[Sample]) -> dict[str, object]:
    (start, base, times_before), (end, value, times) = points[0], points[-1]
    total, seconds, count = value - base, end - start, times - times_before
    return {
        "avgpt": total / count if count > 0 else 0.0,
        "sum": total,
        "tps": total / seconds if seconds > 0 else 0.0,
    }


@final
class Rates:
    """The sums of one broker. Call `got` for each delivery; `run` takes the samples."""

    def __init__(
        self,
        topics: Topics,
        has_group: Callable[[str], bool],
        store: Store,
        now: Callable[[], float],
        now_ms: Callable[[], int],
    ) -> None:
        self._topics = topics
        self._has_group = has_group
        self._store = store
        self._now = now
        self._now_ms = now_ms
        self._gets: dict[tuple[str, str], list[int]] = {}  # (topic, group): messages, bytes, deliveries
        self._acks: dict[tuple[str, str], list[int]] = {}  # (topic, group): messages, requests
        self._removed = 0  # messages that were stored in deleted topics
        self.sent_back: dict[tuple[str, str], int] = {}
        self.found = 0  # messages delivered
        self.found_bytes = 0
        self.missed = 0  # pulls that found no message
        self.acknowledged = 0  # popped messages
        self._base = 0  # messages stored before the start
        self._put_now = 0
        self._series: dict[tuple[str, str], Series] = {}  # (statistic, key)
        self._last: dict[tuple[str, str], tuple[int, int]] = {}  # value and times of the last sample
        self._day = now_ms() // DAY_MS
        self.put_at_midnight = [0, 0]  # the sums at the last two midnights, oldest first
        self.get_at_midnight = [0, 0]

    def got(self, topic: str, group: str, messages: int, size: int) -> None:
        """Count *messages* of *size* bytes in total, delivered to a consumer of *group*.

        Messages to a group that does not exist count only in the totals: any client can pull with any name.
        """
        self.found += messages
        self.found_bytes += size
        key = (topic, group)
        sums = self._gets.get(key)
        if sums is None:
            if not self._has_group(group):
                return
            sums = self._gets[key] = [0, 0, 0]
        sums[0] += messages
        sums[1] += size
        sums[2] += 1

    def acked(self, topic: str, group: str, messages: int, requests: int = 1) -> None:
        """Count *messages* that a consumer of *group* popped and acknowledged, and the number of *requests* for it."""
        sums = self._acks.setdefault((topic, group), [0, 0])
        sums[0] += messages
        sums[1] += requests
        self.acknowledged += messages

    def came_back(self, topic: str, group: str) -> None:
        """Count a message of *topic* that a consumer of *group* sent back."""
        self.sent_back[topic, group] = self.sent_back.get((topic, group), 0) + 1

    @property
    def put_total(self) -> int:
        """Return the number of messages stored since the start, as of the last sample."""
        return self._put_now - self._base

    def series(self, name: str, key: str) -> Series | None:
        """Return the series of a statistic by RocketMQ's names, None if nothing was counted."""
        return self._series.get((name, key))

    def tps(self, name: str, key: str, seconds: float = 60.0) -> float:
        """Return messages per second over the last *seconds*; 0 if nothing was counted."""
        series = self._series.get((name, key))
        return series.tps(seconds) if series is not None else 0.0

    async def run(self) -> None:
        """Sample every SAMPLE_S until cancelled."""
        await self.start()
        while True:
            await trio.sleep(SAMPLE_S)
            await self.sample()

    async def start(self) -> None:
        """Take the messages stored so far as the baseline."""
        self._base = self._put_now = await self._sample_topics(self._now(), new=False)

    async def sample(self) -> None:
        """Sample all sums once; yields to the event loop if there are many topics."""
        now = self._now()
        await self._forget_topics()
        self._put_now = self._removed + await self._sample_topics(now, new=True)
        for number, ((topic, group), (messages, size, times)) in enumerate(list(self._gets.items())):
            key = f"{topic}@{group}"
            self._note("GROUP_GET_SIZE", key, size, now, times)
            if not self._note("GROUP_GET_NUMS", key, messages, now, times):
                del self._gets[topic, group]
            if number % TOPICS_AT_ONCE == TOPICS_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
        for number, ((topic, group), (messages, times)) in enumerate(list(self._acks.items())):
            if not self._note("GROUP_ACK_NUMS", f"{topic}@{group}", messages, now, times):
                del self._acks[topic, group]
            if number % TOPICS_AT_ONCE == TOPICS_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
        for (topic, group), count in list(self.sent_back.items()):
            if not self._note("SNDBCK_PUT_NUMS", f"{topic}@{group}", count, now, count):
                del self.sent_back[topic, group]
        sums = {"PUT": self.put_total, "GET": self.found, "MISS": self.missed, "ACK": self.acknowledged}
        for name, value in sums.items():
            self._note("BROKER", name, value, now, value, always=True)
        self._turn_day()

    async def _forget_topics(self) -> None:
        """Drop the series of deleted topics, but keep their messages in the total."""
        for number, place in enumerate(list(self._last)):
            if place[0] in OF_TOPICS and self._topics.get(place[1]) is None:
                last, _ = self._last.pop(place)
                if place[0] == PUT_NUMS:
                    self._removed += last
                self._series.pop(place, None)
            if number % SUMS_AT_ONCE == SUMS_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()

    async def _sample_topics(self, now: float, *, new: bool) -> int:
        total = 0
        for number, topic in enumerate(self._topics):
            stored, size = self._stored_totals(topic.name)
            total += stored
            self._note(PUT_NUMS, topic.name, stored, now, stored, new=new)
            self._note(PUT_SIZE, topic.name, size, now, stored, new=new)
            if number % TOPICS_AT_ONCE == TOPICS_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
        return total

    def _stored_totals(self, topic: str) -> tuple[int, int]:
        """Return the number of messages ever stored in *topic*, and their bytes since the start."""
        queues = self._store.queues.topics.get(topic)
        if not queues:
            return 0, 0
        return sum([queue.next_offset for queue in queues.values()]), sum([q.put_bytes for q in queues.values()])

    def _note(
        self, name: str, key: str, value: int, now: float, times: int, *, always: bool = False, new: bool = True
    ) -> bool:
        """Sample a sum; return whether the sum has a series.

        A sum that never changed has no series, and one that has not changed for a day loses it. A *new* sum began at 0.
        """
        place = (name, key)
        old, old_times = self._last.get(place, (0, 0) if new else (value, times))
        self._last[place] = value, times
        series = self._series.get(place)
        if series is None and (always or old != value):
            series = self._series[place] = Series(now - SAMPLE_S, old, old_times)
        if series is None:
            return False
        series.sample(now, value, times)
        if series.is_flat and not always:
            del self._series[place]
            if name not in OF_TOPICS:
                del self._last[place]
            return False
        return True

    def _turn_day(self) -> None:
        """Store the sums at midnight (UTC)."""
        day = self._now_ms() // DAY_MS
        if day != self._day:
            self._day = day
            self.put_at_midnight = [self.put_at_midnight[1], self.put_total]
            self.get_at_midnight = [self.get_at_midnight[1], self.found]
