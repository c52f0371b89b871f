"""The route table: pure state, no sockets and no clock of its own.

A broker appears by registering, and goes when it says so, when its connection closes, or
when it was silent for too long. Topics belong to brokers: with the last broker of a name
go its topics. Rules: RocketMQ RouteInfoManager.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet_remoting.registrations import Registration
from martlet_remoting.routes import MASTER_ID, BrokerGroup, Route, TopicQueues, TopicShape, Version

__all__ = ["DEFAULT_TIMEOUT_MS", "Registered", "RouteTable"]

WRITE: Final = 2
READ_WRITE: Final = 6
# Bits of topicSysFlag (RocketMQ TopicSysFlag).
UNIT: Final = 1
UNIT_SUB: Final = 2

DEFAULT_TIMEOUT_MS: Final = 120_000
SYNC_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"


@final
@dataclass(slots=True)
class _Live:
    """When the broker *name* was last heard of, and over which connection."""

    name: str
    seen: float
    timeout_ms: int
    version: Version
    ha_address: str
    connection: object
    filter_servers: tuple[str, ...] = ()


@final
@dataclass(slots=True)
class _Brokers:
    """The brokers of one name."""

    cluster: str
    addresses: dict[int, str] = field(default_factory=dict)
    acting_master: bool = False
    zone: str | None = None


@final
@dataclass(frozen=True, slots=True)
class Registered:
    """The answer to a registration: a slave learns where its master is."""

    master_address: str = ""
    ha_address: str = ""


@final
class RouteTable:
    """Brokers by name, topics by name, and who is alive; ``now`` is in seconds of any clock that never goes back.

    With *acting_master* the smallest slave stands in for a lost master, to be read from; with
    *drop_missing_topics* a registration also takes topics away that it does not name.
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
        self.timeout_ms = timeout_ms  # of brokers that do not say theirs
        self._brokers_max = brokers_max
        self._topics_max = topics_max
        self._brokers: dict[str, _Brokers] = {}
        self._clusters: dict[str, dict[str, None]] = {}  # names in the order they came
        self._topics: dict[str, dict[str, TopicQueues]] = {}
        self._mappings: dict[str, dict[str, Mapping[str, object]]] = {}
        self._live: dict[tuple[str, str], _Live] = {}  # by cluster and address

    # brokers come and go

    def register(self, registration: Registration, now: float, connection: object = None) -> Registered:
        """Take a broker in, or hear of it again.

        Raises:
          Refused: it is new and has one topic only, so this is a change of it that came before the whole
            (NOT_SUPPORTED); or the table is full (BUSY).
        """
        self._check_room(registration)
        brokers = self._brokers.get(registration.name)
        known = brokers is not None and registration.broker_id in brokers.addresses
        if not known and len(registration.topics) == 1 and not registration.complete:
            raise Refused(
                Reason.NOT_SUPPORTED,
                f"register broker failed: broker {registration.name!r} is not known and names one topic; "
                "it must register all its topics first",
            )
        if brokers is None:
            brokers = self._brokers[registration.name] = _Brokers(registration.cluster)
        self._clusters.setdefault(registration.cluster, {})[registration.name] = None
        brokers.acting_master = registration.acting_master is True
        brokers.zone = registration.zone
        if self._is_overtaken(brokers, registration):
            self._live.pop((registration.cluster, registration.address), None)
            return Registered()
        self._place(brokers, registration)
        self._take_topics(brokers, registration, first=not known)
        self._note_alive(registration, now, connection)
        return self._answer(brokers, registration)

    def _check_room(self, new: Registration) -> None:
        if len(self._live) >= self._brokers_max and (new.cluster, new.address) not in self._live:
            text = f"{len(self._live)} brokers are registered; nameserver.brokers_max is {self._brokers_max}"
            raise Refused(Reason.BUSY, text)
        if len(self._topics) + len(new.topics) > self._topics_max:
            more = sum(shape.name not in self._topics for shape in new.topics)
            if len(self._topics) + more > self._topics_max:
                text = f"{len(self._topics)} topics are registered; nameserver.topics_max is {self._topics_max}"
                raise Refused(Reason.BUSY, text)

    def _is_overtaken(self, brokers: _Brokers, new: Registration) -> bool:
        """Whether the id is held by another live address of a newer state."""
        old = brokers.addresses.get(new.broker_id)
        if old is None or old == new.address:
            return False
        live = self._live.get((new.cluster, old))
        return live is not None and live.version.state_version > new.version.state_version

    def _place(self, brokers: _Brokers, new: Registration) -> None:
        """Give the address its id; it can have no other, as when a slave becomes the master."""
        for number in [n for n, address in brokers.addresses.items() if address == new.address]:
            del brokers.addresses[number]
        brokers.addresses[new.broker_id] = new.address

    def _take_topics(self, brokers: _Brokers, new: Registration, *, first: bool) -> None:
        stands_in = new.acting_master is not None and new.broker_id == min(brokers.addresses)
        if new.broker_id != MASTER_ID and not stands_in:
            return
        live = self._live.get((new.cluster, new.address))
        changed = first or live is None or live.version != new.version
        read_only = new.broker_id != MASTER_ID and new.acting_master is True
        for shape in new.topics:
            if changed or new.name not in self._topics.get(shape.name, {}):
                self._put(new.name, shape, shape.perm & ~WRITE if read_only else shape.perm)
        if changed:
            for topic, mapping in new.mappings.items():
                self._mappings.setdefault(topic, {})[str(mapping.get("bname") or new.name)] = mapping
            if new.complete or (self.drop_missing_topics and not new.mappings):
                self._drop_missing(new)

    def _put(self, broker: str, shape: TopicShape, perm: int) -> None:
        queues = TopicQueues(broker, shape.read_queues, shape.write_queues, perm, shape.sys_flag)
        self._topics.setdefault(shape.name, {})[broker] = queues

    def _drop_missing(self, new: Registration) -> None:
        named = {shape.name for shape in new.topics}
        for topic in [t for t, by_broker in self._topics.items() if new.name in by_broker and t not in named]:
            self._take_away(topic, (new.name,))

    def _note_alive(self, new: Registration, now: float, connection: object) -> None:
        timeout_ms = self.timeout_ms if new.timeout_ms is None else new.timeout_ms
        key = (new.cluster, new.address)
        servers = new.filter_servers
        if servers is None:
            old = self._live.get(key)
            servers = old.filter_servers if old is not None else ()
        self._live[key] = _Live(new.name, now, timeout_ms, new.version, new.ha_address, connection, servers)

    def _answer(self, brokers: _Brokers, new: Registration) -> Registered:
        master = brokers.addresses.get(MASTER_ID)
        if new.broker_id == MASTER_ID or master is None:
            return Registered()
        live = self._live.get((new.cluster, master))
        return Registered(master, live.ha_address) if live is not None else Registered()

    def unregister(self, cluster: str, name: str, address: str) -> None:
        """Forget the broker at *address*, and with the last one of *name* its topics."""
        self._live.pop((cluster, address), None)
        brokers = self._brokers.get(name)
        if brokers is None:
            return
        for number in [n for n, found in brokers.addresses.items() if found == address]:
            del brokers.addresses[number]
        if not brokers.addresses:
            self._forget_name(name)
        elif brokers.acting_master and MASTER_ID not in brokers.addresses:
            self._each_of(name, lambda perm: perm & ~WRITE)

    def _forget_name(self, name: str) -> None:
        del self._brokers[name]
        for cluster in [cluster for cluster, names in self._clusters.items() if name in names]:
            del self._clusters[cluster][name]
            if not self._clusters[cluster]:
                del self._clusters[cluster]
        for topic in [topic for topic, by_broker in self._topics.items() if name in by_broker]:
            self._take_away(topic, (name,))

    def heard(self, cluster: str, address: str, now: float) -> None:
        """A broker is alive; one that is not registered stays unknown."""
        live = self._live.get((cluster, address))
        if live is not None:
            live.seen = now

    def version_of(self, cluster: str, address: str) -> Version | None:
        """The version that the broker at *address* registered last.

        None when it is not known, or another of its name took its place: then it has to register as a whole again.
        """
        live = self._live.get((cluster, address))
        brokers = self._brokers.get(live.name) if live is not None else None
        if live is None or brokers is None or address not in brokers.addresses.values():
            return None
        return live.version

    def expire(self, now: float) -> list[object]:
        """Forget brokers that were silent for too long; return the connections of those."""
        late = [(key, live) for key, live in self._live.items() if live.seen + live.timeout_ms / 1000 < now]
        for (cluster, address), _ in late:
            self._forget_address(cluster, address)
        return [live.connection for _, live in late if live.connection is not None]

    def drop_connection(self, connection: object) -> None:
        """Forget every broker that registered over *connection*, which has closed."""
        for cluster, address in [key for key, live in self._live.items() if live.connection == connection]:
            self._forget_address(cluster, address)

    def _forget_address(self, cluster: str, address: str) -> None:
        names = [name for name, brokers in self._brokers.items() if address in brokers.addresses.values()]
        for name in names or [""]:
            self.unregister(cluster, name, address)

    # topics

    def route(self, topic: str) -> Route | None:
        """Where *topic* is; None when no live broker has it."""
        by_broker = self._topics.get(topic)
        if by_broker is None:
            return None
        brokers = [self.group(name) for name in by_broker if name in self._brokers]
        if not brokers:
            return None
        if self.acting_master and not topic.startswith(SYNC_MEMBER_PREFIX):
            brokers = [_standing_in(group, by_broker[group.name]) for group in brokers]
        servers = self._filter_servers(brokers)
        return Route(tuple(by_broker.values()), tuple(brokers), None, servers, self._mappings.get(topic))

    def group(self, name: str) -> BrokerGroup:
        """The brokers of *name*. Raises `KeyError` when there are none."""
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
        """Forget *topic*, of all brokers or of those in *cluster*."""
        names: Iterable[str] = self._topics.get(topic, {}) if cluster is None else self._clusters.get(cluster, {})
        self._take_away(topic, list(names))

    def _take_away(self, topic: str, brokers: Iterable[str]) -> None:
        by_broker = self._topics.get(topic)
        mappings = self._mappings.get(topic, {})
        for name in brokers:
            mappings.pop(name, None)
            if by_broker is not None:
                by_broker.pop(name, None)
        if not by_broker:
            self._topics.pop(topic, None)
            self._mappings.pop(topic, None)

    def register_topic(self, topic: str, queues: Iterable[TopicQueues]) -> None:
        """Put *topic* on brokers that are known; the first unknown one ends it."""
        for entry in queues:
            if entry.broker_name not in self._brokers:
                return
            self._topics.setdefault(topic, {})[entry.broker_name] = entry

    def wipe_write(self, broker: str) -> int:
        """Make every topic of *broker* read-only in routes; return how many there are."""
        return self._each_of(broker, lambda perm: perm & ~WRITE)

    def add_write(self, broker: str) -> int:
        """Make every topic of *broker* readable and writable in routes; return how many there are."""
        return self._each_of(broker, lambda _: READ_WRITE)

    def _each_of(self, broker: str, change: Callable[[int], int]) -> int:
        count = 0
        for by_broker in self._topics.values():
            queues = by_broker.get(broker)
            if queues is not None:
                by_broker[broker] = replace(queues, perm=change(queues.perm))
                count += 1
        return count

    # lists

    def topics(self) -> list[str]:
        """The names of all topics."""
        return list(self._topics)

    def topics_of_cluster(self, cluster: str) -> list[str]:
        """The topics that some broker of *cluster* has."""
        names = self._clusters.get(cluster, {})
        return [topic for topic, by_broker in self._topics.items() if not names.keys().isdisjoint(by_broker)]

    def topics_by_flag(self, wanted: int, unwanted: int = 0) -> list[str]:
        """The topics whose sysFlag has the bits *wanted* and none of *unwanted*, as their first broker says."""
        flags = ((topic, next(iter(by_broker.values())).sys_flag) for topic, by_broker in self._topics.items())
        return [topic for topic, flag in flags if flag & wanted == wanted and not flag & unwanted]

    def clusters(self) -> dict[str, list[str]]:
        """Broker names by cluster."""
        return {cluster: list(names) for cluster, names in self._clusters.items()}

    def groups(self) -> list[BrokerGroup]:
        """All brokers, by name."""
        return [self.group(name) for name in self._brokers]

    def statistics(self) -> dict[str, object]:
        return {"brokers": len(self._live), "clusters": len(self._clusters), "topics": len(self._topics)}


def _standing_in(group: BrokerGroup, queues: TopicQueues) -> BrokerGroup:
    """*group* with its smallest slave at id 0, where there is no master and nothing may be written."""
    if not group.acting_master or MASTER_ID in group.addresses or queues.perm & WRITE or not group.addresses:
        return group
    smallest = min(group.addresses)
    addresses = {number: address for number, address in group.addresses.items() if number != smallest}
    return replace(group, addresses={MASTER_ID: group.addresses[smallest], **addresses})
