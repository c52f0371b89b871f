"""The route table: pure state, without sockets or a clock.

Registration adds a broker. It is removed when it unregisters, when its connection closes, or when it is silent for too
long. Topics belong to brokers and are removed with the last broker of a name. Rules: RocketMQ RouteInfoManager.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, final

from msgspec import Struct

from martlet.errors import Reason, Refused
from martlet.runtime.steps import Steps
from martlet.store.format.light import is_light
from martlet_remoting.nameserver.live import LiveBrokers
from martlet_remoting.nameserver.topics import READ_WRITE, WRITE, Brokers, TopicIndex
from martlet_remoting.wire.register_broker import Registration
from martlet_remoting.wire.routes import MASTER_ID, BrokerGroup, TopicQueues, TopicRoute, TopicShape, Version

__all__ = ["DEFAULT_TIMEOUT_MS", "Registered", "RouteTable"]

READ: Final = 4
# Bits of topicSysFlag (RocketMQ TopicSysFlag).
UNIT: Final = 1
UNIT_SUB: Final = 2

DEFAULT_TIMEOUT_MS: Final = 120_000
SYNC_MEMBER_PREFIX: Final = "rmq_sys_SYNC_BROKER_MEMBER_"


@final
class Registered(Struct, frozen=True):
    """The answer to a registration: it tells a slave the address of its master.

    ``left_out`` is the number of new topics for which there was no room.
    """

    master_address: str = ""
    ha_address: str = ""
    left_out: int = 0


@final
class RouteTable:
    """Brokers by name, their topics in ``index``, and ``live`` ones; ``now`` is in seconds of any monotonic clock.

    With *acting_master* the slave with the lowest id acts as a lost master, for reads; with
    *drop_missing_topics* a registration also removes topics that it does not contain.
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
        self._brokers_max = brokers_max
        self._topics_max = topics_max
        self._brokers: dict[str, Brokers] = {}
        self._clusters: dict[str, dict[str, None]] = {}  # names in order of registration
        self.index = TopicIndex()
        self.live = LiveBrokers(timeout_ms, brokers_max)

    # registration of brokers

    def register(
        self,
        registration: Registration,
        now: float,
        connection: object = None,
        topics: Iterable[TopicShape] | None = None,
        *,
        limited: bool = True,
    ) -> Steps[Registered]:
        """Register a broker, or renew its registration, in slices. *topics* replace the topics of *registration*.

        If the table is full, known topics are kept and updated, and new ones are left out, unless the broker is not
        *limited*.

        Raises:
          Refused: a new broker registers a single topic, so its change has arrived before its whole table
            (NOT_SUPPORTED); or there are too many brokers (BUSY).
        """
        self._check_room(registration, connection)
        brokers = self._brokers.get(registration.name)
        is_known = brokers is not None and registration.broker_id in brokers.addresses
        if not is_known and len(registration.topics) == 1 and not registration.complete:
            raise Refused(
                Reason.NOT_SUPPORTED,
                f"register broker failed: broker {registration.name!r} is not known and names one topic; "
                "it must register all its topics first",
            )
        if brokers is None:
            brokers = self._brokers[registration.name] = Brokers(registration.cluster)
        self._clusters.setdefault(registration.cluster, {})[registration.name] = None
        brokers.acting_master = registration.acting_master is True
        brokers.zone = registration.zone
        if self._is_overtaken(brokers, registration):
            self.live.remove(registration.cluster, registration.address)
            return Registered()
        _place(brokers, registration)
        old_live = self.live.get(registration.cluster, registration.address)
        is_changed = not is_known or old_live is None or old_live.version != registration.version
        live = self.live.add(registration, now, connection)
        live.version = None if is_changed else registration.version
        left_out = 0
        if _speaks_for_all(brokers, registration):
            limit = self._topics_max if limited else sys.maxsize
            dropping = is_changed and (
                registration.complete or (self.drop_missing_topics and not registration.mappings)
            )
            topics = registration.topics if topics is None else topics
            left_out = yield from self.index.update(
                brokers, registration, topics, limit, changed=is_changed, dropping=dropping
            )
        live.version = registration.version if not left_out else None
        return self._answer(brokers, registration, left_out)

    def _check_room(self, new: Registration, connection: object) -> None:
        self.live.check_room(new, connection)
        if new.name not in self._brokers and len(self._brokers) >= self._brokers_max:
            text = f"{len(self._brokers)} names of brokers are registered; nameserver.brokers_max is"
            raise Refused(Reason.BUSY, f"{text} {self._brokers_max}")

    def _is_overtaken(self, brokers: Brokers, new: Registration) -> bool:
        """Return whether another live address with a newer state has the id."""
        old = brokers.addresses.get(new.broker_id)
        if old is None or old == new.address:
            return False
        live = self.live.get(new.cluster, old)
        return live is not None and live.state_version > new.version.state_version

    def _answer(self, brokers: Brokers, new: Registration, left_out: int) -> Registered:
        master = brokers.addresses.get(MASTER_ID)
        if new.broker_id == MASTER_ID or master is None:
            return Registered(left_out=left_out)
        live = self.live.get(new.cluster, master)
        if live is None:
            return Registered(left_out=left_out)
        return Registered(master, live.ha_address, left_out)

    def unregister(self, cluster: str, name: str, address: str) -> None:
        """Remove the broker at *address*, and if it is the last one of *name*, also its topics."""
        self.live.remove(cluster, address)
        brokers = self._brokers.get(name)
        if brokers is None:
            return
        for number in [n for n, found in brokers.addresses.items() if found == address]:
            del brokers.addresses[number]
        if not brokers.addresses:
            self._forget_name(name, brokers)
        elif brokers.acting_master and MASTER_ID not in brokers.addresses:
            brokers.read_only = True

    def _forget_name(self, name: str, brokers: Brokers) -> None:
        del self._brokers[name]
        for cluster in [cluster for cluster, names in self._clusters.items() if name in names]:
            del self._clusters[cluster][name]
            if not self._clusters[cluster]:
                del self._clusters[cluster]
        self.index.discard(name, brokers)

    def version_of(self, cluster: str, address: str) -> Version | None:
        """Return the version that the broker at *address* registered last.

        None if the version is unknown, if there was no room for some topics, or if another broker took its place: then
        the broker must register all its topics again.
        """
        live = self.live.get(cluster, address)
        brokers = self._brokers.get(live.name) if live is not None else None
        if live is None or brokers is None or address not in brokers.addresses.values():
            return None
        return live.version

    def expire(self, now: float) -> list[object]:
        """Remove brokers that were silent for too long; return their connections."""
        late = self.live.silent(now)
        for key, _ in late:
            self._forget_address(*key)
        return [live.connection for _, live in late if live.connection is not None]

    def drop_connection(self, connection: object) -> None:
        """Remove every broker that registered over *connection*, which has closed."""
        for key in self.live.of_connection(connection):
            self._forget_address(*key)

    def _forget_address(self, cluster: str, address: str) -> None:
        live = self.live.get(cluster, address)
        for name in live.names if live is not None else ():
            self.unregister(cluster, name, address)

    # topics

    def route(self, topic: str) -> TopicRoute | None:
        """Return the route of *topic*; None if no live broker has it."""
        brokers_by_name = self.index.brokers_of(topic)
        if not brokers_by_name:
            return self._light_route() if is_light(topic) else None
        queues = [_as_now(brokers, brokers.topics[topic]) for brokers in brokers_by_name.values()]
        groups = {name: self.group(name) for name in brokers_by_name}
        if self.acting_master and not topic.startswith(SYNC_MEMBER_PREFIX):
            groups = {
                name: _standing_in(groups[name], each) for name, each in zip(brokers_by_name, queues, strict=True)
            }
        mappings_by_name = {
            name: brokers.mappings[topic] for name, brokers in brokers_by_name.items() if topic in brokers.mappings
        }
        mappings = {str(mapping.get("bname") or name): mapping for name, mapping in mappings_by_name.items()}
        return TopicRoute(tuple(queues), groups, None, self.live.filter_servers(groups.values()), mappings or None)

    def _light_route(self) -> TopicRoute | None:
        """Return the route of a light topic, which no broker registers: every broker may have its only queue."""
        groups = {name: self.group(name) for name in self._brokers}
        queues = tuple(TopicQueues(name, 1, 0, READ) for name in groups)
        return TopicRoute(queues, groups) if groups else None

    def group(self, name: str) -> BrokerGroup:
        """Return the brokers of *name*. Raises `KeyError` if there are none."""
        brokers = self._brokers[name]
        return BrokerGroup(brokers.cluster, name, dict(brokers.addresses), brokers.acting_master, brokers.zone)

    def delete_topic(self, topic: str, cluster: str | None = None) -> None:
        """Remove *topic* from all brokers, or from the brokers in *cluster*."""
        names = self._clusters.get(cluster, {}) if cluster is not None else self._brokers
        for name, brokers in self.index.brokers_of(topic).items():
            if name in names:
                self.index.remove(topic, name, brokers)

    def register_topic(self, topic: str, queues: Iterable[TopicQueues]) -> None:
        """Add *topic* to known brokers; stop at the first unknown one.

        Raises:
          Refused: the table is full (BUSY).
        """
        for entry in queues:
            brokers = self._brokers.get(entry.broker_name)
            if brokers is None:
                return
            if not self.index.put(brokers, topic, entry, self._topics_max):
                text = f"{self.index.held} topics are registered; nameserver.topics_max is {self._topics_max}"
                raise Refused(Reason.BUSY, text)

    def wipe_write(self, broker: str) -> Steps[int]:
        """Make every topic of *broker* read-only in routes; return their number."""
        return self._set_permissions(broker, lambda perm: perm & ~WRITE)

    def add_write(self, broker: str) -> Steps[int]:
        """Make every topic of *broker* readable and writable in routes; return their number."""
        return self._set_permissions(broker, lambda _: READ_WRITE)

    def _set_permissions(self, name: str, change: Callable[[int], int]) -> Steps[int]:
        brokers = self._brokers.get(name)
        return (yield from self.index.set_permissions(brokers, change)) if brokers is not None else 0

    # lists

    def topics_of_cluster(self, cluster: str) -> Steps[list[str]]:
        """Return the topics that any broker of *cluster* has."""
        names = self._clusters.get(cluster, {}).keys()
        return self.index.select(lambda found: not names.isdisjoint(queues.broker_name for queues in found))

    def clusters(self) -> dict[str, list[str]]:
        """Broker names by cluster."""
        return {cluster: list(names) for cluster, names in self._clusters.items()}

    def groups(self) -> list[BrokerGroup]:
        """All brokers, by name."""
        return [self.group(name) for name in self._brokers]

    def statistics(self) -> dict[str, object]:
        return {
            "brokers": len(self.live),
            "clusters": len(self._clusters),
            "topics": len(self.index),
            "topics_of_all_brokers": self.index.held,
        }


def _place(brokers: Brokers, new: Registration) -> None:
    """Set the id of the address and remove its old one, for example when a slave becomes the master."""
    for number in [n for n, address in brokers.addresses.items() if address == new.address]:
        del brokers.addresses[number]
    brokers.addresses[new.broker_id] = new.address
    if new.broker_id == MASTER_ID:
        brokers.read_only = False


def _speaks_for_all(brokers: Brokers, new: Registration) -> bool:
    """Return whether *new* determines the topics of its name, as the master or the slave that acts as master."""
    stands_in = new.acting_master is not None and new.broker_id == min(brokers.addresses)
    return new.broker_id == MASTER_ID or stands_in


def _as_now(brokers: Brokers, queues: TopicQueues) -> TopicQueues:
    return queues._replace(perm=queues.perm & ~WRITE) if brokers.read_only else queues


def _standing_in(group: BrokerGroup, queues: TopicQueues) -> BrokerGroup:
    """Return *group* with its lowest slave at id 0 if there is no master and the topics are read-only."""
    if not group.acting_master or MASTER_ID in group.addresses or queues.perm & WRITE or not group.addresses:
        return group
    smallest = min(group.addresses)
    addresses = {number: address for number, address in group.addresses.items() if number != smallest}
    return replace(group, addresses={MASTER_ID: group.addresses[smallest], **addresses})
