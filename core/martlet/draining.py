"""Changes of a topic's number of queues: begin groups in added queues, and remove queues once they are consumed.

A topic whose number of queues is reduced keeps the removed queues that have messages, for readers only
(`Topics.update`), until all consumers that the broker knows have read them: groups with committed offsets, shared
groups, sessions. `Draining` finds that out and removes the queues. The broker does not know the progress of others,
such as Spark's queries and consumers that keep their own offsets: without a known consumer the queues stay until
retention has removed their messages.

A consumer group that has consumed a topic begins at the beginning of queues that are added later, because offsets are
committed for it there. It would otherwise begin where its client wants a *new* group to begin, often at the end.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple, final

import trio

from martlet.errors import NotReady, Refused
from martlet.groups.progress import GroupProgress
from martlet.runtime.steps import Budget, Steps, per_slice
from martlet.runtime.turns import Turns
from martlet.sessions.sessions import Sessions
from martlet.store import Queue, Store
from martlet.store.queues.queues import BlockDamaged
from martlet.tables.groups import Groups
from martlet.tables.topics import Topic, Topics

__all__ = ["Draining", "Unread"]

log = logging.getLogger("martlet.delivery")

# Seconds between two checks whether queues are consumed.
LOOK_S: Final = 10.0
# Offsets committed in one turn of the event loop for groups whose topic gets more queues.
BEGUN_A_TURN: Final = per_slice(us=0.5)
# Cost of checking one session, and, in such checks, the cost of unpacking one.
LOOK_US: Final = 0.5
LOOKS_A_SESSION: Final = 20


class Unread(NamedTuple):
    """The number of ``messages`` not read by every known consumer; ``reader`` is the consumer with most left.

    ``reader`` is empty if no consumer is known. The queues ended at ``ends`` when the messages were counted.
    """

    messages: int
    reader: str
    ends: Sequence[tuple[Queue, int]]


@final
class Draining:
    """Removes queues of topics once they are consumed, while `run` runs.

    Each function of ``others`` returns the name of a reader of the topic whose progress the broker does not know, or
    None.
    """

    def __init__(
        self,
        store: Store,
        topics: Topics,
        groups: Groups,
        progress: GroupProgress,
        sessions: Sessions,
        turns: Turns,
    ) -> None:
        self.others: list[Callable[[str], str]] = []
        self._store = store
        self._topics = topics
        self._groups = groups
        self._progress = progress
        self._sessions = sessions
        self._turns = turns
        self._waiting: dict[str, None] = {}  # topics with queues that accept no messages and are still read
        self._beginning: Iterator[None] = iter(())  # commits the offsets in added queues, one a step
        self._begins = False
        self._rung = trio.Event()
        topics.changed.append(self._topic_changed)
        topics.grown.append(self._grown)

    @property
    def topics(self) -> Sequence[str]:
        """The topics that have queues only until they are consumed."""
        return list(self._waiting)

    # ---- more queues

    def _grown(self, topic: Topic, added: range) -> None:
        self._beginning = _both(self._beginning, self._begin_groups(topic, added))
        self._begin_some()

    def _begin_some(self) -> None:
        self._begins = sum(1 for _ in islice(self._beginning, BEGUN_A_TURN)) == BEGUN_A_TURN
        if self._begins:
            self._rung.set()

    def _begin_groups(self, topic: Topic, added: range) -> Iterator[None]:
        """Commit the first offset of each group of *topic* in the *added* queues, one offset at a time."""
        groups, name = self._groups, topic.name
        for group in groups.offsets.groups_of(name):
            try:
                groups.offsets.check_may_commit(group, name, added)
            except Refused as refused:
                log.warning("new queues of topic %s: group %s begins where its client wants; %s", name, group, refused)
                continue
            for queue_id in added:
                if groups.get(group) is not None and groups.offsets.get(group, name, queue_id) < 0:
                    queue = self._store.queues.find(name, queue_id)
                    groups.offsets.commit(group, name, queue_id, topic.beginning_of(queue) if queue is not None else 0)
                yield

    # ---- fewer queues

    def _topic_changed(self, topic: Topic | None) -> None:
        if topic is not None and _is_draining(topic):
            self._waiting[topic.name] = None
            self._rung.set()

    async def run(self) -> None:
        """Remove queues once they are consumed, until cancelled."""
        for topic in self._topics:
            self._topic_changed(topic)
        while True:
            with trio.move_on_after(LOOK_S if self._waiting else math.inf):
                await self._rung.wait()
            self._rung = trio.Event()
            self._begin_some()
            if self._begins:
                await trio.lowlevel.checkpoint()
                continue
            for name in list(self._waiting):
                await self._look(name)

    async def _look(self, name: str) -> None:
        topic = self._topics.get(name)
        if topic is None or topic.read_queues_wanted is None or not _is_draining(topic):
            self._waiting.pop(name, None)
            return
        try:
            unread = await self._turns.finish(self.unread(topic, topic.read_queues_wanted))
        except (NotReady, BlockDamaged, OSError, Refused) as error:
            log.warning("topic %s keeps its queues, trying again later; %s", name, error)
            return
        if unread.messages or self._topics.get(name) is not topic:
            return
        if all(queue.next_offset == end for queue, end in unread.ends):
            self._waiting.pop(name, None)
            before, topic = topic.read_queues, self._topics.narrow(topic)
            log.info("topic %s has %d queues instead of %d: the rest is consumed", name, topic.read_queues, before)

    def unread(self, topic: Topic, first_queue: int) -> Steps[Unread]:
        """Return how many messages of *topic*, in the queues from *first_queue* on, are not read by all consumers.

        Raises `NotReady`, `BlockDamaged` and `OSError`.
        """
        queues = self._store.queues.topics.get(topic.name, {})
        used = [each for key, each in queues.items() if key >= first_queue and each.first_offset < each.next_offset]
        ends = [(queue, queue.next_offset) for queue in used]
        lows = dict(ends)
        worst = _Worst(lows)
        for other in self.others:
            if name := other(topic.name):
                worst.add(name, {queue: queue.first_offset for queue in used})
        budget = Budget()
        for name, offsets in self._groups_at(topic, used):
            worst.add(name, offsets)
            if budget.is_over(len(used)):
                yield
        last = -1
        for queue in used:
            offset = self._store.readers.end_offset(queue) - 1
            at = yield from self._store.lookup.position_at(queue, offset)
            last = max(last, at if at >= 0 else self._store.readable)
        name, position = yield from self._position_before(topic, last)
        if position >= 0:
            missed = self._sessions.missed
            offsets = {}
            for queue, end in ends:
                (offsets[queue],) = yield from missed.offsets(queue, end, [position])
            worst.add(name, offsets)
        if not worst.is_known:
            worst.add("", {queue: queue.first_offset for queue in used})
        count = sum(max(end - max(lows[queue], queue.first_offset), 0) for queue, end in ends)
        return Unread(count, worst.reader, ends)

    def drop(self, topic: Topic) -> Steps[None]:
        """Expire all messages in queues beyond the number of queues of *topic*. Raises `NotReady` and `Refused`."""
        queues, kept = self._store.queues.topics.get(topic.name, {}), topic.read_queues
        gone = [each for key, each in queues.items() if key >= kept and each.first_offset < each.next_offset]
        yield from self._store.upkeep.topic_retention.expire_whole(gone)

    def _groups_at(self, topic: Topic, queues: Sequence[Queue]) -> Iterator[tuple[str, dict[Queue, int]]]:
        """Yield each group that reads *topic* by its queues, with its next offset in each of *queues*."""
        groups, progress, name = self._groups, self._progress, topic.name
        for group in groups.offsets.groups_of(name):
            if groups.get(group) is not None:
                offsets = groups.offsets.committed(group, name)
                yield f"group {group}", {queue: offsets.get(queue.queue_id, 0) for queue in queues}
        for scope, group in progress.groups_on(name):
            lows = {queue: progress.low_of(scope, group, queue) for queue in queues}
            yield f"{scope} group {group}", {queue: low for queue, low in lows.items() if low is not None}

    def _position_before(self, topic: Topic, last: int) -> Steps[tuple[str, int]]:
        """Return the slowest reader that reads the log by position, and its position; -1 if all are after *last*.

        Such readers are sessions, and shared groups that find messages by their names.
        """
        name, least, progress, sessions = "", last + 1, self._progress, self._sessions
        has_any = False
        for scope, group in progress.groups_on(topic.name):
            position = progress.reached_by(scope, group, topic.name)
            has_any = has_any or position >= 0
            if 0 <= position < least:
                name, least = f"{scope} group {group}", position
        budget = Budget(LOOK_US)
        for key in sessions.table:
            position = sessions.position_of(key)
            if position >= 0 and (position < least or not has_any) and self._reads(key, topic.name):
                has_any = True
                budget.spend(LOOKS_A_SESSION)
                if position < least:
                    name, least = f"session {key}", position
            if budget.is_over():
                yield
        return name, least if has_any else -1

    def _reads(self, key: str, topic: str) -> bool:
        """Return whether session *key* gets messages of *topic*, as far as its protocol can tell."""
        topics_of, state = self._sessions.missed.topics_of.get(key.partition(" ")[0]), self._sessions.table.get(key)
        return state is not None and (topics_of is None or topic in topics_of(state.filters))


@final
class _Worst:
    """The lowest offset of all readers in each queue, and the reader with most messages left."""

    def __init__(self, lows: dict[Queue, int]) -> None:
        self._lows = lows
        self._left = -1
        self.reader = ""

    @property
    def is_known(self) -> bool:
        """Whether there is any reader."""
        return self._left >= 0

    def add(self, reader: str, offsets: dict[Queue, int]) -> None:
        left = 0
        for queue, offset in offsets.items():
            left += max(queue.next_offset - max(offset, queue.first_offset), 0)
            self._lows[queue] = min(self._lows[queue], offset)
        if left > self._left:
            self._left, self.reader = left, reader


def _is_draining(topic: Topic) -> bool:
    return topic.read_queues_wanted is not None and topic.read_queues > topic.read_queues_wanted


def _both(first: Iterator[None], second: Iterator[None]) -> Iterator[None]:
    yield from first
    yield from second
