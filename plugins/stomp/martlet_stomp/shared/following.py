"""Followers: sources of subscriptions to names in a topic, each a cursor of the core with a topic filter."""

from collections.abc import Callable, Sequence
from itertools import compress, groupby
from operator import itemgetter
from typing import Final, NamedTuple, final

from martlet.access import Gate
from martlet.broker import Broker
from martlet.delivery.fanout import Encoding
from martlet.delivery.feed import Feed
from martlet.delivery.runs import Run
from martlet.records.layout import Predicate
from martlet_stomp.mapping.destinations import is_name

__all__ = ["Feeds", "Followed", "Follower"]

# Queue of messages that the client does not acknowledge: their real queues do not matter.
ANY_QUEUE: Final = -1


@final
class Feeds:
    """The feeds of topics whose messages have names."""

    def __init__(self, broker: Broker, names: Sequence[str]) -> None:
        """Make the feeds of the topics *names*, and let access rules refer to names in these topics."""
        self._broker = broker
        self._feeds: dict[str, Feed] = {}
        broker.rules.add_named(names)

    def of(self, topic: str) -> Feed:
        """Return the feed of *topic*. Raises `Refused` if there is no such topic."""
        feed = self._feeds.get(topic)
        if feed is None:
            feed = self._feeds[topic] = self._broker.cursors.open((topic,), is_name=is_name)
        return feed


@final
class Followed(NamedTuple):
    """Messages of one queue, with the fields of `martlet.delivery.subscriptions.Delivery`."""

    queue_id: int
    offsets: Sequence[int]
    frames: list[bytes]
    size: int
    delivery: int = 1


@final
class Follower:
    """Collects messages whose names match a filter; ``credit`` is the number of messages that it may still return."""

    __slots__ = ("_cursor", "_encoding", "_has_places", "_takes", "_wake", "credit")

    def __init__(
        self,
        gate: Gate,
        feed: Feed,
        topic_filter: str,
        wake: Callable[[], None],
        encoding: Encoding,
        credit: int,
        *,
        has_places: bool,
        takes: Predicate | None = None,
        position: int | None = None,
    ) -> None:
        """Begin at the log position *position*; None for the end of the topic.

        Args:
          has_places: whether messages need their queues and offsets, because the client acknowledges them.
          takes: returns whether the client wants a message; None if it wants all.

        Raises:
          Refused: *topic_filter* is invalid, or the client may not read it.
        """
        self._encoding = encoding
        self._has_places = has_places
        self._takes = takes
        self._wake = wake
        self.credit = credit
        self._cursor = gate.follow(feed, wake, {topic_filter: None}, position)

    @property
    def position(self) -> int:
        """The log position before which everything was collected."""
        return self._cursor.position

    def add_credit(self, count: int) -> None:
        """Allow *count* more messages."""
        self.credit += count
        if self._cursor.has_pending and self.credit > 0:
            self._wake()

    def collect(self, budget_bytes: int) -> list[Followed]:
        """Return about *budget_bytes* of messages, at most ``credit``. Raises `Refused` if no longer allowed."""
        collected: list[Followed] = []
        self._cursor.check_rules()  # also while the client owes acknowledgements
        if self.credit > 0:
            for run, _ in self._cursor.collect(budget_bytes, self.credit):
                collected += self._parts(run)
        self.credit -= sum(len(part.frames) for part in collected)
        return collected

    def _parts(self, run: Run) -> list[Followed]:
        encoded = run.frames(self._encoding)
        frames = encoded.each
        if self._takes is None and not self._has_places:
            return [Followed(ANY_QUEUE, range(len(frames)), frames, encoded.size)]
        records = list(run.records())
        wanted = list(map(self._takes, records)) if self._takes is not None else [True] * len(frames)
        places = [(record.queue_id, record.queue_offset) for record in records]
        parts: list[Followed] = []
        chosen = compress(zip(places, frames, strict=True), wanted)
        for queue_id, group in groupby(chosen, lambda each: each[0][0]):
            some = list(group)
            own = list(map(itemgetter(1), some))
            parts.append(Followed(queue_id, [place[1] for place, _ in some], own, sum(map(len, own))))
        return parts

    def close(self) -> None:
        """Stop."""
        self._cursor.close()
