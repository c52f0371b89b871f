"""Which queues of which shared groups have a state, found by group and by topic."""

from collections.abc import Iterator
from typing import TypeAlias, final

from martlet.groups.journal.journal_codec import Key

__all__ = ["KnownLanes"]

Name: TypeAlias = tuple[str, str]  # of a group: its scope and its name


@final
class KnownLanes:
    """A set of lanes; the queues of a group on a topic are the bits of one number."""

    def __init__(self) -> None:
        self._topics: dict[str, dict[Name, int]] = {}
        self._groups: dict[Name, dict[str, None]] = {}  # the topics of each group
        self._counts: dict[str, int] = {}  # of lanes, by topic
        self._count = 0
        # The queues of each topic, as far as they were said, and how many lanes groups may still open on these.
        self._queues: dict[str, int] = {}
        self._missing = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        scope, group, topic, queue_id = key
        return bool(self._topics.get(topic, {}).get((scope, group), 0) >> queue_id & 1)

    def add(self, key: Key) -> None:
        if key in self:
            return
        scope, group, topic, queue_id = key
        before = self._missing_on(topic)
        groups = self._topics.setdefault(topic, {})
        groups[scope, group] = groups.get((scope, group), 0) | 1 << queue_id
        self._groups.setdefault((scope, group), {})[topic] = None
        self._counts[topic] = self._counts.get(topic, 0) + 1
        self._count += 1
        self._missing += self._missing_on(topic) - before

    def discard(self, key: Key) -> None:
        if key not in self:
            return
        scope, group, topic, queue_id = key
        before = self._missing_on(topic)
        groups = self._topics[topic]
        left = groups[scope, group] & ~(1 << queue_id)
        self._counts[topic] -= 1
        self._count -= 1
        if left:
            groups[scope, group] = left
        else:
            del groups[scope, group]
            self._forget(topic, (scope, group))
        if not groups:
            del self._topics[topic], self._counts[topic]
        self._missing += self._missing_on(topic) - before
        if not groups:
            self._queues.pop(topic, None)

    def _forget(self, topic: str, name: Name) -> None:
        """Note that a group has nothing on *topic* any more."""
        topics = self._groups[name]
        del topics[topic]
        if not topics:
            del self._groups[name]

    def clear(self) -> None:
        self._topics.clear()
        self._groups.clear()
        self._counts.clear()
        self._queues.clear()
        self._count = self._missing = 0

    def topics(self) -> list[str]:
        """Return the topics of the lanes."""
        return list(self._topics)

    def groups(self, topic: str) -> list[Name]:
        """Return the groups with lanes on *topic*."""
        return list(self._topics.get(topic, ()))

    def topics_of(self, scope: str, group: str) -> list[str]:
        """Return the topics on which a group has lanes."""
        return list(self._groups.get((scope, group), ()))

    def names(self) -> list[Name]:
        """Return the groups with lanes."""
        return list(self._groups)

    def count_with(self, topic: str, queues: int) -> int:
        """Return how many lanes there are if each group has all queues: *queues* on *topic*, and those said before."""
        if topic in self._topics:
            before = self._missing_on(topic)
            self._queues[topic] = queues
            self._missing += self._missing_on(topic) - before
        return self._count + self._missing

    def _missing_on(self, topic: str) -> int:
        """Return how many lanes the groups on *topic* do not have yet; 0 if its queues were never said."""
        return max(len(self._topics.get(topic, ())) * self._queues.get(topic, 0) - self._counts.get(topic, 0), 0)

    def count_of(self, scope: str, group: str, topic: str) -> int:
        """Return how many lanes a group has on *topic*."""
        return self._topics.get(topic, {}).get((scope, group), 0).bit_count()

    def of(self, scope: str, group: str, topic: str) -> list[Key]:
        """Return the lanes of a group on *topic*."""
        return list(_keys((scope, group), topic, self._topics.get(topic, {}).get((scope, group), 0)))

    def on(self, topic: str) -> list[Key]:
        """Return all lanes on *topic*."""
        return [key for name, bits in self._topics.get(topic, {}).items() for key in _keys(name, topic, bits)]


def _keys(name: Name, topic: str, bits: int) -> Iterator[Key]:
    scope, group = name
    for queue_id, bit in enumerate(reversed(f"{bits:b}")):
        if bit == "1":
            yield Key(scope, group, topic, queue_id)
