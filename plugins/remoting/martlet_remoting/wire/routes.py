"""Routes, and the topics that brokers register: records and their JSON.

A route lists the brokers of a topic with their addresses and numbers of queues (RocketMQ TopicRouteData). Old clients
get it with unquoted broker ids as keys, ``{0:"10.0.0.1:10911"}``, clients that request it in standard JSON. Neither
form contains blanks, because the Go client splits the text on commas and colons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, final

from martlet.errors import RemoteProtocolError
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BadAnswer
from martlet_remoting.wire.fastjson import dumps, integer
from martlet_remoting.wire.packets import MessageQueue

__all__ = [
    "MASTER_ID",
    "READABLE",
    "WRITABLE",
    "BrokerGroup",
    "TopicQueues",
    "TopicRoute",
    "TopicShape",
    "Version",
    "decode_route",
    "encode_route",
]

MASTER_ID: Final = 0
READABLE: Final = 4
WRITABLE: Final = 2


@final
class Version(NamedTuple):
    """The version of a topic table (RocketMQ DataVersion); versions are only compared for equality."""

    counter: int = 0
    state_version: int = 0
    timestamp: int = 0

    def as_json(self) -> dict[str, object]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}

    @classmethod
    def from_json(cls, fields: object) -> "Version":
        """Return the version in *fields*; 4.x brokers have no stateVersion."""
        if not isinstance(fields, Mapping):
            return cls()
        return cls(
            integer(fields.get("counter")),
            integer(fields.get("stateVersion")),
            integer(fields.get("timestamp")),
        )


@final
class TopicShape(NamedTuple):
    """The part of a topic's configuration that routes contain (RocketMQ TopicConfig)."""

    name: str
    read_queues: int
    write_queues: int
    perm: int
    sys_flag: int = 0

    @classmethod
    def from_json(cls, name: str, fields: object) -> "TopicShape":
        """Return the shape in *fields*; the defaults are those of RocketMQ's TopicConfig."""
        if not isinstance(fields, Mapping):
            raise RemoteProtocolError(f"topic {name!r:.140} is registered with {fields!r:.80}, which is not an object")
        return cls(
            name,
            integer(fields.get("readQueueNums"), 16),
            integer(fields.get("writeQueueNums"), 16),
            integer(fields.get("perm"), 6),
            integer(fields.get("topicSysFlag")),
        )


@final
class TopicQueues(NamedTuple):
    """The number of queues of a topic on one broker; ``perm`` allows reading (bit 4) and writing (bit 2)."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int
    sys_flag: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "brokerName": self.broker_name,
            "perm": self.perm,
            "readQueueNums": self.read_queues,
            "topicSysFlag": self.sys_flag,
            "writeQueueNums": self.write_queues,
        }

    @classmethod
    def from_json(cls, fields: object) -> "TopicQueues":
        if not isinstance(fields, Mapping) or not isinstance(fields.get("brokerName"), str):
            raise RemoteProtocolError(f"queue data {fields!r:.80} lacks brokerName")
        shape = TopicShape.from_json("", fields)
        return cls(fields["brokerName"], shape.read_queues, shape.write_queues, shape.perm, shape.sys_flag)


@final
@dataclass(frozen=True, slots=True)
class BrokerGroup:
    """The brokers with the same name, by id; 0 is the master (RocketMQ BrokerData)."""

    cluster: str
    name: str
    addresses: Mapping[int, str]
    acting_master: bool = False
    zone: str | None = None

    def as_json(self, standard: bool = False) -> dict[str, object]:
        ids = sorted(self.addresses)
        addresses: Mapping[object, object] = (
            {str(number): self.addresses[number] for number in ids}
            if standard
            else {number: self.addresses[number] for number in ids}
        )
        return {
            "brokerAddrs": addresses,
            "brokerName": self.name,
            "cluster": self.cluster,
            "enableActingMaster": self.acting_master,
            "zoneName": self.zone,
        }


@final
@dataclass(frozen=True, slots=True)
class TopicRoute:
    """The route of a topic: its queues, and its brokers by name.

    ``order`` has the queues of an ordered topic, ``mappings`` those of a static topic by broker.
    """

    queues: tuple[TopicQueues, ...]
    brokers: Mapping[str, BrokerGroup]
    order: str | None = None
    filter_servers: Mapping[str, list[str]] = field(default_factory=dict)
    mappings: Mapping[str, Mapping[str, object]] | None = None

    def read_queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues to consume, in RocketMQ's order."""
        return sorted(
            MessageQueue(topic, found.broker_name, number)
            for found in self.queues
            if found.perm & READABLE and found.broker_name in self.brokers
            for number in range(found.read_queues)
        )

    def write_queues(self, topic: str, queues_max: int = 1 << 30) -> list[MessageQueue]:
        """Return the queues to send to, all on writable brokers that have a master.

        An ordered topic has exactly the queues in its configuration (``brokerA:4;brokerB:4``).
        """
        if self.order:
            return sorted(_ordered_queues(topic, self.order))
        return sorted(
            MessageQueue(topic, found.broker_name, number)
            for found in self.queues
            if found.perm & WRITABLE and self.master(found.broker_name) is not None
            for number in range(min(found.write_queues, queues_max))
        )

    def master(self, broker_name: str) -> str | None:
        """Return the master's address, None if the broker has none at the moment."""
        group = self.brokers.get(broker_name)
        return group.addresses.get(MASTER_ID) if group is not None else None

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        """Return the address of that broker id, or of any other id if there is none."""
        group = self.brokers.get(broker_name)
        addresses = group.addresses if group is not None else {}
        return addresses.get(broker_id) or next(iter(addresses.values()), None)

    def addresses(self) -> list[str]:
        """Return every address of every broker."""
        return [address for group in self.brokers.values() for address in group.addresses.values()]


def _ordered_queues(topic: str, order: str) -> list[MessageQueue]:
    found: list[MessageQueue] = []
    for part in order.split(";"):
        name, _, number = part.partition(":")
        if name and number.isdecimal():
            found += [MessageQueue(topic, name, queue) for queue in range(int(number))]
    return found


def encode_route(route: TopicRoute, *, standard: bool) -> bytes:
    """Return the body of a route answer, in standard JSON if *standard* is set."""
    fields: dict[str, object] = {
        "brokerDatas": [group.as_json(standard) for group in route.brokers.values()],
        "filterServerTable": dict(route.filter_servers),
        "orderTopicConf": route.order,
        "queueDatas": [queues.as_json() for queues in route.queues],
        "topicQueueMappingByBroker": route.mappings or None,
    }
    body = dumps(fields)
    return body if body.isascii() or not standard else _escaped(body.decode())


def decode_route(body: bytes) -> TopicRoute:
    """Return the route in a name server's answer, whose integer keys may be quoted or not.

    Raises:
      BadAnswer: the body is not a route.
    """
    fields = bodies.load_object(body)
    if "queueDatas" not in fields:
        raise BadAnswer("route lacks queueDatas")
    queues = tuple(
        TopicQueues(
            bodies.text(item, "brokerName"),
            bodies.integer(item, "readQueueNums"),
            bodies.integer(item, "writeQueueNums"),
            bodies.integer(item, "perm"),
            bodies.integer(item, "topicSysFlag", 0),
        )
        for item in bodies.objects(fields, "queueDatas")
    )
    groups = map(_decode_group, bodies.objects(fields, "brokerDatas"))
    return TopicRoute(queues, {group.name: group for group in groups}, bodies.text(fields, "orderTopicConf", ""))


def _decode_group(fields: bodies.Fields) -> BrokerGroup:
    name, addresses = bodies.text(fields, "brokerName"), fields.get("brokerAddrs")
    if type(addresses) is not dict:
        raise BadAnswer(f"route of broker {name!r} has no addresses")
    try:
        by_id = {int(key): str(value) for key, value in sorted(addresses.items())}
    except ValueError as error:
        raise BadAnswer(f"route of broker {name!r} has a broker id that is not a number") from error
    return BrokerGroup(bodies.text(fields, "cluster", ""), name, by_id)


def _escaped(text: str) -> bytes:
    """Return *text* with each character above U+007F as \\uXXXX, as Java writes standard JSON (BrowserCompatible)."""
    units = memoryview(text.encode("utf-16-be"))
    codes = (int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2))
    return "".join(chr(code) if code < 0x80 else f"\\u{code:04X}" for code in codes).encode()
