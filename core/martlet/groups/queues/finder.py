"""Finds the messages of a shared group by their names.

A group that takes only some names of a topic does not read its queues: it would look at the messages of all names, and
each message would cost as much as there are groups. Instead it has a cursor in the feed of its protocol, which finds
the messages that match the group's topic filter, at the tail and behind it, for all groups and sessions in one pass
over the log. The group takes only their places from the cursor, when a member has room, and reads the messages that it
delivers.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final

from martlet.contracts import Buffer, Predicate
from martlet.delivery.cursor import Cursor
from martlet.delivery.feed import Feed
from martlet.records.layout import RecordView, record_views
from martlet.store import ReadResult

__all__ = ["FOUND_MAX", "Finder", "FoundMessage", "MessageSelection", "choose", "cut_at"]

# Messages of a group that were found and could not be delivered, because too many messages of their queue are
# unsettled.
FOUND_MAX: Final = 1024
# Size of the messages that the cursor has found and no member has taken; at this size the cursor waits.
PENDING_BYTES: Final = 1 << 18
TAKEN_BYTES: Final = 1 << 18


class MessageSelection(NamedTuple):
    """The messages that a group takes: messages of *feed* that match *topic_filter* and for which *condition* holds."""

    feed: Feed
    topic_filter: str
    condition: Predicate | None = None


class FoundMessage(NamedTuple):
    """The place of a message that was found."""

    queue_id: int
    offset: int
    position: int


@final
class Finder:
    """Finds messages of *topic* by their *names*, from *start* on, a position in the log.

    Messages are found between `go_on` and `pause`; *wake* is called when there may be messages to take.
    """

    __slots__ = ("_cursor", "_names", "_start", "_topic", "_wake")

    def __init__(self, names: MessageSelection, topic: str, start: int, wake: Callable[[], None]) -> None:
        self._names = names
        self._start = start
        self._topic = topic.encode() if len(names.feed.topics) > 1 else b""
        self._wake = wake
        self._cursor: Cursor | None = None

    def go_on(self) -> None:
        """Begin or continue to find messages.

        Raises:
          Refused: the feed may not be read.
        """
        if self._cursor is None:
            feed, topic_filter, _ = self._names
            self._cursor = feed.for_groups.open(self._wake, {topic_filter: None}, self._start, PENDING_BYTES)

    def pause(self) -> None:
        """Drop the messages found and stop finding until `go_on`."""
        if self._cursor is not None:
            self._start = self.position
            self._cursor.close()
            self._cursor = None

    @property
    def has_found(self) -> bool:
        """Whether there are messages to take."""
        return self._cursor is not None and self._cursor.has_pending

    @property
    def position(self) -> int:
        """The log position before which everything was taken."""
        return max(self._cursor.position, self._start) if self._cursor is not None else self._start

    def take(self, count: int) -> list[FoundMessage]:
        """Return the next *count* messages at most, in log order."""
        messages: list[FoundMessage] = []
        for run, _ in self._cursor.collect(TAKEN_BYTES, count) if self._cursor is not None else ():
            records = (each for each in run.records() if each.position >= self._start)
            if self._topic:
                records = (each for each in records if each.topic_bytes == self._topic)
            messages += [FoundMessage(each.queue_id, each.queue_offset, each.position) for each in records]
        return messages


def choose(result: ReadResult, offsets: Sequence[int], condition: Predicate | None) -> None:
    """Keep in *result* only the messages at *offsets*, which ascend, for which *condition* holds."""
    if condition is not None or offsets[-1] - offsets[0] != len(offsets) - 1:
        offsets_wanted = frozenset(offsets)
        _keep_only(
            result, lambda record: record.queue_offset in offsets_wanted and (condition is None or condition(record))
        )


def cut_at(result: ReadResult, end: int) -> None:
    """Keep in *result* only the messages before offset *end*."""
    if result.next_offset > end:
        result.next_offset = end
        _keep_only(result, lambda record: record.queue_offset < end)


def _keep_only(result: ReadResult, is_kept: Callable[[RecordView], bool]) -> None:
    pieces: list[Buffer] = []
    for piece in result.pieces:
        pieces += [piece[each.start : each.start + each.size] for each in record_views(piece) if is_kept(each)]
    result.pieces, result.count, result.size = pieces, len(pieces), sum(map(len, pieces))
