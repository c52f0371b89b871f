"""Subscriptions to topics whose messages have names: a cursor of the core with a topic filter brings them."""

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

# Of messages that nobody acknowledges: their queues do not matter.
ANY_QUEUE: Final = -1


@final
class Feeds:
    """What followers follow: a feed for each topic."""

    def __init__(self, broker: Broker, names: Sequence[str]) -> None:
        """Begin; *names* are the topics, and access rules can be about names in them."""
        self._broker = broker
        self._feeds: dict[str, Feed] = {}
        broker.rules.add_named(names)

    def of(self, topic: str) -> Feed:
        """Return the feed of *topic*. Raises `Refused` if there is no such topic."""
        found = self._feeds.get(topic)
        if found is None:
            found = self._feeds[topic] = self._broker.cursors.open((topic,), is_name=is_name)
        return found


@final
class Followed(NamedTuple):
    """Messages of one queue, as `martlet.delivery.subscriptions.Delivery` has them."""

    queue_id: int
    offsets: Sequence[int]
    frames: list[bytes]
    size: int
    delivery: int = 1


@final
class Follower:
    """Brings the messages whose names a filter matches; ``credit`` is how many more it may bring."""

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
          has_places: whether the client acknowledges messages, by their places.
          takes: returns whether the client wants a message; None if it wants all.

        Raises:
          Refused: the client may not read what *topic_filter* matches, or it is invalid.
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
        """Return about *budget_bytes* of messages, at most ``credit``. Raises `Refused` if that is not allowed now."""
        found: list[Followed] = []
        if self.credit > 0:
            for run, _ in self._cursor.collect(budget_bytes, self.credit):
                found += self._parts(run)
        self.credit -= sum(len(part.frames) for part in found)
        return found

    def _parts(self, run: Run) -> list[Followed]:
        encoded = run.frames(self._encoding)
        frames = encoded.each
        if self._takes is None and not self._has_places:
            return [Followed(ANY_QUEUE, range(len(frames)), frames, encoded.size)]
        records = list(run.records())
        wanted = list(map(self._takes, records)) if self._takes is not None else [True] * len(frames)
        places = [(record.queue_id, record.queue_offset) for record in records]
        found: list[Followed] = []
        chosen = compress(zip(places, frames, strict=True), wanted)
        for queue_id, group in groupby(chosen, lambda each: each[0][0]):
            some = list(group)
            own = list(map(itemgetter(1), some))
            found.append(Followed(queue_id, [place[1] for place, _ in some], own, sum(map(len, own))))
        return found

    def close(self) -> None:
        """Stop."""
        self._cursor.close()
