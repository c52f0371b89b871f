"""Topics of the route table: each belongs to the brokers of a name, and an index finds the brokers by topic."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

from msgspec import Struct, field

from martlet.runtime.steps import Budget, Steps
from martlet_remoting.wire.register_broker import Registration
from martlet_remoting.wire.routes import MASTER_ID, TopicQueues, TopicShape

__all__ = ["READ_WRITE", "WRITE", "Brokers", "TopicIndex"]

WRITE: Final = 2
READ_WRITE: Final = 6
TOPIC_US: Final = 2.0


@final
class Brokers(Struct, eq=False):
    """The brokers of one name, and their topics."""

    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    acting_master: bool = False
    zone: str | None = None
    topics: dict[str, TopicQueues] = field(default_factory=dict)
    mappings: dict[str, Mapping[str, object]] = field(default_factory=dict)
    read_only: bool = False  # the master is lost; overrides the permissions of the topics
    is_gone: bool = False  # no broker has the name any more; the topics are not swept yet


@final
class TopicIndex:
    """Brokers by topic and name.

    A topic belongs to its `Brokers`, so removing a name takes the same time for any number of topics; `sweep` then
    removes the name's topics from the index in slices.
    """

    def __init__(self) -> None:
        self._by_topic: dict[str, dict[str, Brokers]] = {}  # topic -> broker name
        self._gone: dict[Brokers, str] = {}  # removed brokers that are not swept yet, with their names
        self.held = 0  # topics of all brokers and queues of their mappings, including brokers that are not swept yet

    def __len__(self) -> int:
        return len(self._by_topic)

    def brokers_of(self, topic: str) -> dict[str, Brokers]:
        """Return the brokers that have *topic*, by name, without removed ones that are not swept yet."""
        found = self._by_topic.get(topic, {})
        return {name: brokers for name, brokers in found.items() if not brokers.is_gone}

    def update(
        self,
        brokers: Brokers,
        registration: Registration,
        topics: Iterable[TopicShape],
        limit: int,
        *,
        changed: bool,
        dropping: bool,
    ) -> Steps[int]:
        """Add *topics* to *brokers*, in slices; if *changed*, update known ones; return the number without room.

        Args:
          limit: the maximum number of topics in the index afterwards.
          dropping: also remove all other topics of *brokers*.
        """
        read_only = registration.broker_id != MASTER_ID and registration.acting_master is True
        # Topics that others add during the slices do not count as missing.
        missing_topics = dict.fromkeys(brokers.topics) if dropping else {}
        left_out, budget = 0, Budget(TOPIC_US)
        for shape in topics:
            missing_topics.pop(shape.name, None)
            if changed or shape.name not in brokers.topics:
                perm = shape.perm & ~WRITE if read_only else shape.perm
                queues = TopicQueues(registration.name, shape.read_queues, shape.write_queues, perm, shape.sys_flag)
                left_out += not self.put(brokers, shape.name, queues, limit)
            if budget.is_over():
                yield
                if brokers.is_gone:  # the brokers were unregistered meanwhile
                    return 0
        if changed:
            for topic, mapping in registration.mappings.items():
                self._put_mapping(brokers, topic, mapping, limit)
                if budget.is_over():
                    yield
        for topic in missing_topics:
            self.remove(topic, registration.name, brokers)
            if budget.is_over():
                yield
        return left_out

    def put(self, brokers: Brokers, topic: str, queues: TopicQueues, limit: int) -> bool:
        """Add a topic to *brokers*, or update it; return False if it is new and there is no room."""
        if topic not in brokers.topics:
            if self.held >= limit:
                return False
            self.held += 1
            self._by_topic.setdefault(topic, {})[queues.broker_name] = brokers
        brokers.topics[topic] = queues
        return True

    def _put_mapping(self, brokers: Brokers, topic: str, mapping: Mapping[str, object], limit: int) -> None:
        self._drop_mapping(brokers, topic)
        if topic in brokers.topics and self.held + _weight(mapping) <= limit:
            brokers.mappings[topic] = mapping
            self.held += _weight(mapping)

    def _drop_mapping(self, brokers: Brokers, topic: str) -> None:
        old = brokers.mappings.pop(topic, None)
        if old is not None:
            self.held -= _weight(old)

    def remove(self, topic: str, name: str, brokers: Brokers) -> None:
        """Remove *topic* from *brokers*, which have *name*."""
        self._drop_mapping(brokers, topic)
        if brokers.topics.pop(topic, None) is None:
            return
        self.held -= 1
        by_name = self._by_topic.get(topic, {})
        if by_name.get(name) is brokers:  # not a later broker of the same name
            del by_name[name]
            if not by_name:
                del self._by_topic[topic]

    def discard(self, name: str, brokers: Brokers) -> None:
        """Hide *brokers*, which have lost *name*, from `brokers_of`; `sweep` removes their topics."""
        brokers.is_gone = True
        self._gone[brokers] = name

    def sweep(self) -> Steps[None]:
        """Remove the topics of discarded brokers from the index."""
        budget = Budget(TOPIC_US)
        while self._gone:
            brokers, name = next(iter(self._gone.items()))
            # A list, because finding the first key of a dict gets slower with each key removed before it. Slices pop
            # from it, because freeing 90,000 names at once would take too long.
            topics = list(brokers.topics)
            while topics:
                self.remove(topics.pop(), name, brokers)
                if budget.is_over():
                    yield
            self._gone.pop(brokers, None)

    def set_permissions(self, brokers: Brokers, change: Callable[[int], int]) -> Steps[int]:
        """Change the permissions of all topics of *brokers*; return the number of topics."""
        brokers.read_only = False
        budget, names = Budget(TOPIC_US), list(brokers.topics)
        for topic in names:
            queues = brokers.topics.get(topic)
            if queues is not None:
                brokers.topics[topic] = queues._replace(perm=change(queues.perm))
            if budget.is_over():
                yield
        return len(names)

    # lists

    def names(self) -> Steps[list[str]]:
        """Return the names of all topics."""
        return self.select(lambda found: True)

    def names_by_flag(self, wanted: int, unwanted: int = 0) -> Steps[list[str]]:
        """Return the topics whose sysFlag, on their first broker, has the bits *wanted* and none of *unwanted*."""
        return self.select(lambda found: found[0].sys_flag & wanted == wanted and not found[0].sys_flag & unwanted)

    def select(self, is_wanted: Callable[[list[TopicQueues]], bool]) -> Steps[list[str]]:
        """Return the topics whose queues, on each broker, *is_wanted* selects."""
        names: list[str] = []
        budget = Budget(TOPIC_US)
        for topic in list(self._by_topic):
            found = [brokers.topics[topic] for brokers in self.brokers_of(topic).values()]
            if found and is_wanted(found):
                names.append(topic)
            if budget.is_over(1 + len(found)):
                yield
        return names


def _weight(mapping: Mapping[str, object]) -> int:
    """Return the number of topics that a mapping counts as in the table: its number of queues."""
    ids = mapping.get("currIdMap")
    return 1 + (len(ids) if isinstance(ids, Mapping) else 0)
