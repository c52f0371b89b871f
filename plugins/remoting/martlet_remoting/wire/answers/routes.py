"""The brokers and queues of a topic, from the name server's answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BadAnswer
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["MASTER_ID", "READABLE", "WRITABLE", "Route", "TopicQueues", "decode_route"]

MASTER_ID: Final = 0
READABLE: Final = 4
WRITABLE: Final = 2


@final
@dataclass(frozen=True, slots=True)
class TopicQueues:
    """The number of queues of a topic on one broker; ``perm`` allows reading (bit 4) and writing (bit 2)."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int


@final
@dataclass(frozen=True, slots=True)
class Route:
    """Where a topic is: the addresses of its brokers by broker name and broker id (0 is the master), and its queues."""

    brokers: Mapping[str, Mapping[int, str]]
    queues: tuple[TopicQueues, ...]
    order_conf: str = ""
    clusters: Mapping[str, str] | None = None

    def read_queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues to consume, in RocketMQ's order."""
        return sorted(
            MessageQueue(topic, found.broker_name, number)
            for found in self.queues
            if found.perm & READABLE and found.broker_name in self.brokers
            for number in range(found.read_queues)
        )

    def write_queues(self, topic: str, queues_max: int = 1 << 30) -> list[MessageQueue]:
        """Return the queues to send to: those of writable brokers that have a master.

        An ordered topic has exactly the queues in its configuration (``brokerA:4;brokerB:4``).
        """
        if self.order_conf:
            return sorted(self._ordered_queues(topic))
        return sorted(
            MessageQueue(topic, found.broker_name, number)
            for found in self.queues
            if found.perm & WRITABLE and MASTER_ID in self.brokers.get(found.broker_name, {})
            for number in range(min(found.write_queues, queues_max))
        )

    def _ordered_queues(self, topic: str) -> list[MessageQueue]:
        found: list[MessageQueue] = []
        for part in self.order_conf.split(";"):
            name, _, number = part.partition(":")
            if name and number.isdecimal():
                found += [MessageQueue(topic, name, queue) for queue in range(int(number))]
        return found

    def master(self, broker_name: str) -> str | None:
        """Return the master's address, None if the broker has none at the moment."""
        return self.brokers.get(broker_name, {}).get(MASTER_ID)

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        """Return the address of that broker id, or of any other id if it is absent."""
        addresses = self.brokers.get(broker_name, {})
        return addresses.get(broker_id) or next(iter(addresses.values()), None)

    def addresses(self) -> list[str]:
        """Return every address of every broker."""
        return [address for addresses in self.brokers.values() for address in addresses.values()]


def decode_route(body: bytes) -> Route:
    """Return the route in a name server's answer, whose integer keys may be quoted or not.

    Raises:
      BadAnswer: the body is not a route.
    """
    fields = bodies.load_object(body)
    brokers: dict[str, dict[int, str]] = {}
    clusters: dict[str, str] = {}
    for item in bodies.objects(fields, "brokerDatas"):
        name = bodies.text(item, "brokerName")
        addresses = item.get("brokerAddrs")
        if type(addresses) is not dict:
            raise BadAnswer(f"route of broker {name!r} has no addresses")
        try:
            brokers[name] = {int(key): str(value) for key, value in sorted(addresses.items())}
        except ValueError as error:
            raise BadAnswer(f"route of broker {name!r} has a broker id that is not a number") from error
        clusters[name] = bodies.text(item, "cluster", "")
    queues = tuple(
        TopicQueues(
            bodies.text(item, "brokerName"),
            bodies.integer(item, "readQueueNums"),
            bodies.integer(item, "writeQueueNums"),
            bodies.integer(item, "perm"),
        )
        for item in bodies.objects(fields, "queueDatas")
    )
    return Route(brokers, queues, bodies.text(fields, "orderTopicConf", ""), clusters)
