"""The route table: pure state, without sockets or a clock.

A broker is added when it registers, and removed when it unregisters, when its connection
closes, or when it is silent for too long. Topics belong to brokers and are removed with the
last broker of a name. Rules: RocketMQ RouteInfoManager.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, final

from msgspec import Struct, field

from martlet.errors import Reason, Refused
from martlet.runtime.steps import Pace, Steps
from martlet.store.format.light import is_light
from martlet_remoting.wire.register_broker import Registration
from martlet_remoting.wire.routes import MASTER_ID, BrokerGroup, Route, TopicQueues, TopicShape, Version

__all__ = ["DEFAULT_TIMEOUT_MS", "Registered", "RouteTable"]

READ: Final = 4
WRITE: Final = 2
READ_WRITE: Final = 6
# Bits of topicSysFlag (RocketMQ TopicSysFlag).
UNIT: Final = 1
UNIT_SUB: Final = 2

DEFAULT_TIMEOUT_MS: Final = 120_000
# A container of RocketMQ 5 registers all its brokers over one connection.
BROKERS_OF_A_CONNECTION_MAX: Final = 256
TOPICS_AT_ONCE: Final = 512  # a topic takes two microseconds
SYNC_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"


@final
class _Live(Struct):
    """When the broker at an address last sent something, its names, and its connection."""

    name: str
    seen: float
    timeout_ms: int
    state_version: int
    version: Version | None  # None: its topics here are outdated, so it must register all of them again
    ha_address: str
    connection: object
    names: dict[str, None]
    filter_servers: tuple[str, ...] = ()


@final
class _Brokers(Struct, eq=False):
    """The brokers of one name, and their topics."""

    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    acting_master: bool = False
    zone: str | None = None
    topics: dict[str, TopicQueues] = field(default_factory=dict)
    mappings: dict[str, Mapping[str, object]] = field(default_factory=dict)
    read_only: bool = False  # it lost its master; overrides the permissions of its topics


@final
class Registered(Struct, frozen=True):
    """The answer to a registration: a slave learns where its master is.

    ``left_out`` is the number of topics for which there was no room; known topics are kept.
    """

    master_address: str = ""
    ha_address: str = ""
    left_out: int = 0


@final
class RouteTable:
    """Brokers by name, topics by name, and live brokers; ``now`` is in seconds of any monotonic clock.

    With *acting_master* the slave with the lowest id acts as a lost master, for reads; with
    *drop_missing_topics* a registration also removes topics that it does not contain.

    A topic belongs to its `_Brokers`, so removing a name takes the same time for any number of topics; `sweep` then
    removes its topics from the index in slices.
    """

    def __init__(
        self,
        *,
        acting_master: bool = False,
        drop_missing_topics: bool = False,
        timeout_ms: int = DEFAULT_TIMEOUT_MS,
        brokers_max: int = 10_000,
        topics_max: int = 1_000_000,
    ) -> None:
        self.acting_master = acting_master
        self.drop_missing_topics = drop_missing_topics
        self.timeout_ms = timeout_ms  # of brokers that register without a timeout
        self._brokers_max = brokers_max
        self._topics_max = topics_max
        self._brokers: dict[str, _Brokers] = {}
        self._clusters: dict[str, dict[str, None]] = {}  # names in order of registration
        self._index: dict[str, dict[str, _Brokers]] = {}  # topic -> broker name
        self._kept = 0  # topics of all brokers and queues of their mappings, including those not swept yet
        self._gone: dict[_Brokers, str] = {}  # removed but not swept yet, with their names
        self._live: dict[tuple[str, str], _Live] = {}  # by cluster and address
        self._of_connection: dict[object, dict[tuple[str, str], None]] = {}

    # registration of brokers

    def register(
        self,
        new: Registration,
        now: float,
        connection: object = None,
        topics: Iterable[TopicShape] | None = None,
        *,
        limited: bool = True,
    ) -> Steps[Registered]:
        """Register a broker, or renew its registration, in slices. *topics* replace those of *new*.

        If the table is full, known topics are kept and updated, and new ones are left out, except those of
        a broker that is not *limited*.

        Raises:
          Refused: a new broker registers a single topic, so this must be a change that came before its whole
            table (NOT_SUPPORTED); or there are too many brokers (BUSY).
        """
        self._check_room(new, connection)
        brokers = self._brokers.get(new.name)
        known = brokers is not None and new.broker_id in brokers.addresses
        if not known and len(new.topics) == 1 and not new.complete:
            raise Refused(
                Reason.NOT_SUPPORTED,
                f"register broker failed: broker {new.name!r} is not known and names one topic; "
                "it must register all its topics first",
            )
        if brokers is None:
            brokers = self._brokers[new.name] = _Brokers(new.cluster)
        self._clusters.setdefault(new.cluster, {})[new.name] = None
        brokers.acting_master = new.acting_master is True
        brokers.zone = new.zone
        if self._is_overtaken(brokers, new):
            self._forget_live((new.cluster, new.address))
            return Registered()
        self._place(brokers, new)
        old = self._live.get((new.cluster, new.address))
        changed = not known or old is None or old.version != new.version
        live = self._note_alive(new, now, connection)
        live.version = None if changed else new.version
        left_out = 0
        if self._speaks_for_all(brokers, new):
            limit = self._topics_max if limited else sys.maxsize
            left_out = yield from self._take_topics(
                brokers, new, new.topics if topics is None else topics, changed, limit
            )
        live.version = new.version if not left_out else None
        return self._answer(brokers, new, left_out)

    def _check_room(self, new: Registration, connection: object) -> None:
        key = new.cluster, new.address
        if key not in self._live and len(self._live) >= self._brokers_max:
            text = f"{len(self._live)} brokers are registered; nameserver.brokers_max is {self._brokers_max}"
            raise Refused(Reason.BUSY, text)
        if new.name not in self._brokers and len(self._brokers) >= self._brokers_max:
            text = f"{len(self._brokers)} names of brokers are registered; nameserver.brokers_max is"
            raise Refused(Reason.BUSY, f"{text} {self._brokers_max}")
        held = self._of_connection.get(connection, {})
        if connection is not None and key not in held and len(held) >= BROKERS_OF_A_CONNECTION_MAX:
            text = f"{len(held)} brokers are registered over this connection"
            raise Refused(Reason.BUSY, f"{text}; at most {BROKERS_OF_A_CONNECTION_MAX}")

    def _is_overtaken(self, brokers: _Brokers, new: Registration) -> bool:
        """Whether another live address with a newer state has the id."""
        old = brokers.addresses.get(new.broker_id)
        if old is None or old == new.address:
            return False
        live = self._live.get((new.cluster, old))
        return live is not None and live.state_version > new.version.state_version

    def _place(self, brokers: _Brokers, new: Registration) -> None:
        """Give the address its id and remove its old one, as when a slave becomes the master."""
        for number in [n for n, address in brokers.addresses.items() if address == new.address]:
            del brokers.addresses[number]
        brokers.addresses[new.broker_id] = new.address
        if new.broker_id == MASTER_ID:
            brokers.read_only = False

    def _speaks_for_all(self, brokers: _Brokers, new: Registration) -> bool:
        """Whether *new* determines the topics of its name: it is the master, or the slave that acts as master."""
        stands_in = new.acting_master is not None and new.broker_id == min(brokers.addresses)
        return new.broker_id == MASTER_ID or stands_in

    def _take_topics(
        self, brokers: _Brokers, new: Registration, topics: Iterable[TopicShape], changed: bool, limit: int
    ) -> Steps[int]:
        """Add or update *topics*; return how many had no room."""
        read_only = new.broker_id != MASTER_ID and new.acting_master is True
        dropping = changed and (new.complete or (self.drop_missing_topics and not new.mappings))
        # Topics that others add during the slices do not count as missing.
        missing = dict.fromkeys(brokers.topics) if dropping else {}
        left_out, pace = 0, Pace(TOPICS_AT_ONCE)
        for shape in topics:
            missing.pop(shape.name, None)
            if changed or shape.name not in brokers.topics:
                perm = shape.perm & ~WRITE if read_only else shape.perm
                queues = TopicQueues(new.name, shape.read_queues, shape.write_queues, perm, shape.sys_flag)
                left_out += not self._put(brokers, shape.name, queues, limit)
            if pace.is_over():
                yield
                if self._brokers.get(new.name) is not brokers:  # it was unregistered meanwhile
                    return 0
        if changed:
            for topic, mapping in new.mappings.items():
                self._put_mapping(brokers, topic, mapping, limit)
                if pace.is_over():
                    yield
        for topic in missing:
            self._take_away(topic, new.name, brokers)
            if pace.is_over():
                yield
        return left_out

    def _put(self, brokers: _Brokers, topic: str, queues: TopicQueues, limit: int) -> bool:
        """Add a topic to *brokers*, or update it; return False if it is new and there is no room."""
        if topic not in brokers.topics:
            if self._kept >= limit:
                return False
            self._kept += 1
            self._index.setdefault(topic, {})[queues.broker_name] = brokers
        brokers.topics[topic] = queues
        return True

    def _put_mapping(self, brokers: _Brokers, topic: str, mapping: Mapping[str, object], limit: int) -> None:
        self._drop_mapping(brokers, topic)
        if topic in brokers.topics and self._kept + _weight(mapping) <= limit:
            brokers.mappings[topic] = mapping
            self._kept += _weight(mapping)

    def _drop_mapping(self, brokers: _Brokers, topic: str) -> None:
        old = brokers.mappings.pop(topic, None)
        if old is not None:
            self._kept -= _weight(old)

    def _note_alive(self, new: Registration, now: float, connection: object) -> _Live:
        timeout_ms = self.timeout_ms if new.timeout_ms is None else new.timeout_ms
        key = (new.cluster, new.address)
        old = self._live.get(key)
        servers = new.filter_servers
        if servers is None:
            servers = old.filter_servers if old is not None else ()
        names = {**(old.names if old is not None else {}), new.name: None}
        self._forget_live(key)
        state = new.version.state_version
        live = _Live(new.name, now, timeout_ms, state, None, new.ha_address, connection, names, servers)
        self._live[key] = live
        if connection is not None:
            self._of_connection.setdefault(connection, {})[key] = None
        return live

    def _forget_live(self, key: tuple[str, str]) -> _Live | None:
        live = self._live.pop(key, None)
        if live is not None and live.connection is not None:
            held = self._of_connection[live.connection]
            del held[key]
            if not held:
                del self._of_connection[live.connection]
        return live

    def _answer(self, brokers: _Brokers, new: Registration, left_out: int) -> Registered:
        master = brokers.addresses.get(MASTER_ID)
        if new.broker_id == MASTER_ID or master is None:
            return Registered(left_out=left_out)
        live = self._live.get((new.cluster, master))
        if live is None:
            return Registered(left_out=left_out)
        return Registered(master, live.ha_address, left_out)

    def unregister(self, cluster: str, name: str, address: str) -> None:
        """Remove the broker at *address*, and if it is the last one of *name*, also its topics."""
        self._forget_live((cluster, address))
        brokers = self._brokers.get(name)
        if brokers is None:
            return
        for number in [n for n, found in brokers.addresses.items() if found == address]:
            del brokers.addresses[number]
        if not brokers.addresses:
            self._forget_name(name, brokers)
        elif brokers.acting_master and MASTER_ID not in brokers.addresses:
            brokers.read_only = True

    def _forget_name(self, name: str, brokers: _Brokers) -> None:
        del self._brokers[name]
        for cluster in [cluster for cluster, names in self._clusters.items() if name in names]:
            del self._clusters[cluster][name]
            if not self._clusters[cluster]:
                del self._clusters[cluster]
        self._gone[brokers] = name

    def sweep(self) -> Steps[None]:
        """Remove the topics of removed brokers from the index."""
        pace = Pace(TOPICS_AT_ONCE)
        while self._gone:
            brokers, name = next(iter(self._gone.items()))
            # Use a list: finding the first key of a dict gets slower with each key that was removed before it.
            # Pop from it in each slice, because freeing 90,000 names at once would take too long.
            topics = list(brokers.topics)
            while topics:
                self._take_away(topics.pop(), name, brokers)
                if pace.is_over():
                    yield
            self._gone.pop(brokers, None)

    def heard(self, cluster: str, address: str, now: float) -> None:
        """Note that a broker is alive; ignore one that is not registered."""
        live = self._live.get((cluster, address))
        if live is not None:
            live.seen = now

    def version_of(self, cluster: str, address: str) -> Version | None:
        """The version that the broker at *address* registered last.

        None if it is not known, if there was no room for some of its topics, or if another broker took its place:
        then it must register all its topics again.
        """
        live = self._live.get((cluster, address))
        brokers = self._brokers.get(live.name) if live is not None else None
        if live is None or brokers is None or address not in brokers.addresses.values():
            return None
        return live.version

    def expire(self, now: float) -> list[object]:
        """Remove brokers that were silent for too long; return their connections."""
        late = [(key, live) for key, live in self._live.items() if live.seen + live.timeout_ms / 1000 < now]
        for key, _ in late:
            self._forget_address(key)
        return [live.connection for _, live in late if live.connection is not None]

    def drop_connection(self, connection: object) -> None:
        """Remove every broker that registered over *connection*, which has closed."""
        for key in list(self._of_connection.get(connection, ())):
            self._forget_address(key)

    def _forget_address(self, key: tuple[str, str]) -> None:
        live = self._live.get(key)
        for name in live.names if live is not None else ():
            self.unregister(key[0], name, key[1])

    # topics

    def route(self, topic: str) -> Route | None:
        """Return the route of *topic*; None if no live broker has it."""
        found = self._brokers_of(topic)
        if not found:
            return self._light_route() if is_light(topic) else None
        queues = [_as_now(brokers, brokers.topics[topic]) for brokers in found.values()]
        groups = {name: self.group(name) for name in found}
        if self.acting_master and not topic.startswith(SYNC_MEMBER_PREFIX):
            groups = {name: _standing_in(groups[name], each) for name, each in zip(found, queues, strict=True)}
        held = {name: brokers.mappings[topic] for name, brokers in found.items() if topic in brokers.mappings}
        mappings = {str(mapping.get("bname") or name): mapping for name, mapping in held.items()}
        return Route(tuple(queues), groups, None, self._filter_servers(groups.values()), mappings or None)

    def _light_route(self) -> Route | None:
        """Where a light topic is, which no broker registers: every broker may have its one queue."""
        groups = {name: self.group(name) for name in self._brokers}
        queues = tuple(TopicQueues(name, 1, 0, READ) for name in groups)
        return Route(queues, groups) if groups else None

    def _brokers_of(self, topic: str) -> dict[str, _Brokers]:
        """Return the brokers that have *topic*, by name, without those that are removed but not swept yet."""
        found = self._index.get(topic, {})
        return {name: brokers for name, brokers in found.items() if self._brokers.get(name) is brokers}

    def group(self, name: str) -> BrokerGroup:
        """Return the brokers of *name*. Raises `KeyError` if there are none."""
        brokers = self._brokers[name]
        return BrokerGroup(brokers.cluster, name, dict(brokers.addresses), brokers.acting_master, brokers.zone)

    def _filter_servers(self, brokers: Iterable[BrokerGroup]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for group in brokers:
            for address in group.addresses.values():
                live = self._live.get((group.cluster, address))
                if live is not None and live.filter_servers:
                    found[address] = list(live.filter_servers)
        return found

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove *topic* from all brokers, or from those in *cluster*."""
        names = self._clusters.get(cluster, {}) if cluster is not None else self._brokers
        for name, brokers in self._brokers_of(topic).items():
            if name in names:
                self._take_away(topic, name, brokers)

    def _take_away(self, topic: str, name: str, brokers: _Brokers) -> None:
        self._drop_mapping(brokers, topic)
        if brokers.topics.pop(topic, None) is None:
            return
        self._kept -= 1
        by_name = self._index.get(topic, {})
        if by_name.get(name) is brokers:  # not a later broker of the same name
            del by_name[name]
            if not by_name:
                del self._index[topic]

    def register_topic(self, topic: str, queues: Iterable[TopicQueues]) -> None:
        """Add *topic* to known brokers; stop at the first unknown one.

        Raises:
          Refused: the table is full (BUSY).
        """
        for entry in queues:
            brokers = self._brokers.get(entry.broker_name)
            if brokers is None:
                return
            if not self._put(brokers, topic, entry, self._topics_max):
                text = f"{self._kept} topics are registered; nameserver.topics_max is {self._topics_max}"
                raise Refused(Reason.BUSY, text)

    def wipe_write(self, broker: str) -> Steps[int]:
        """Make every topic of *broker* read-only in routes; return how many there are."""
        return self._each_of(broker, lambda perm: perm & ~WRITE)

    def add_write(self, broker: str) -> Steps[int]:
        """Make every topic of *broker* readable and writable in routes; return how many there are."""
        return self._each_of(broker, lambda _: READ_WRITE)

    def _each_of(self, name: str, change: Callable[[int], int]) -> Steps[int]:
        brokers = self._brokers.get(name)
        if brokers is None:
            return 0
        brokers.read_only = False
        pace, names = Pace(TOPICS_AT_ONCE), list(brokers.topics)
        for topic in names:
            queues = brokers.topics.get(topic)
            if queues is not None:
                brokers.topics[topic] = queues._replace(perm=change(queues.perm))
            if pace.is_over():
                yield
        return len(names)

    # lists

    def topics(self) -> Steps[list[str]]:
        """Return the names of all topics."""
        return self._choose(lambda found: True)

    def topics_of_cluster(self, cluster: str) -> Steps[list[str]]:
        """Return the topics that any broker of *cluster* has."""
        names = self._clusters.get(cluster, {}).keys()
        return self._choose(lambda found: not names.isdisjoint(queues.broker_name for queues in found))

    def topics_by_flag(self, wanted: int, unwanted: int = 0) -> Steps[list[str]]:
        """Return the topics whose sysFlag, on their first broker, has the bits *wanted* and none of *unwanted*."""
        return self._choose(lambda found: found[0].sys_flag & wanted == wanted and not found[0].sys_flag & unwanted)

    def _choose(self, is_wanted: Callable[[list[TopicQueues]], bool]) -> Steps[list[str]]:
        names: list[str] = []
        pace = Pace(TOPICS_AT_ONCE)
        for topic in list(self._index):
            found = [brokers.topics[topic] for brokers in self._brokers_of(topic).values()]
            if found and is_wanted(found):
                names.append(topic)
            if pace.is_over(1 + len(found)):
                yield
        return names

    def clusters(self) -> dict[str, list[str]]:
        """Broker names by cluster."""
        return {cluster: list(names) for cluster, names in self._clusters.items()}

    def groups(self) -> list[BrokerGroup]:
        """All brokers, by name."""
        return [self.group(name) for name in self._brokers]

    def statistics(self) -> dict[str, object]:
        return {
            "brokers": len(self._live),
            "clusters": len(self._clusters),
            "topics": len(self._index),
            "topics_of_all_brokers": self._kept,
        }


def _weight(mapping: Mapping[str, object]) -> int:
    """Return how many topics a mapping counts as in the table: its number of queues."""
    ids = mapping.get("currIdMap")
    return 1 + (len(ids) if isinstance(ids, Mapping) else 0)


def _as_now(brokers: _Brokers, queues: TopicQueues) -> TopicQueues:
    return queues._replace(perm=queues.perm & ~WRITE) if brokers.read_only else queues


def _standing_in(group: BrokerGroup, queues: TopicQueues) -> BrokerGroup:
    """Return *group* with its lowest slave at id 0 if there is no master and nothing may be written."""
    if not group.acting_master or MASTER_ID in group.addresses or queues.perm & WRITE or not group.addresses:
        return group
    smallest = min(group.addresses)
    addresses = {number: address for number, address in group.addresses.items() if number != smallest}
    return replace(group, addresses={MASTER_ID: group.addresses[smallest], **addresses})
