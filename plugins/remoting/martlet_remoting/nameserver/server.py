"""The name server's state: routes, key-value texts, and the switches that can change at runtime."""

from collections.abc import Awaitable, Callable
from typing import Final, Protocol, final, runtime_checkable

import trio

from martlet.errors import Reason, Refused
from martlet.runtime.turns import Turns
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.kvconfig import KVConfig
from martlet_remoting.nameserver.table import RouteTable
from martlet_remoting.wire.properties import format_properties, parse_properties
from martlet_remoting.wire.routes import TopicQueues, TopicRoute

__all__ = ["NameServer"]

# Keys that a request may change, by RocketMQ's names; none of them can lock out a client.
SWITCHES: Final = (
    "orderMessageEnable",
    "returnOrderTopicConfigToBroker",
    "enableAllTopicList",
    "enableTopicList",
    "supportActingMaster",
    "deleteTopicWithBrokerRegistration",
)


@runtime_checkable
class Closable(Protocol):
    """A connection over which brokers register; `martlet.contracts.Peer` is one."""

    def close(self, reason: str) -> None:
        """Close the connection; *reason* goes to the log."""
        ...


@final
class NameServer:
    """The state that requests to the name server use; needs no broker and no store."""

    def __init__(
        self, config: NameServerConfig, save: Callable[[bytes], Awaitable[None]], turns: Turns | None = None
    ) -> None:
        self.config = config
        self.turns = turns or Turns()
        self.kv = KVConfig(save)
        self.table = RouteTable(
            acting_master=config.acting_master,
            drop_missing_topics=config.drop_missing_topics,
            timeout_ms=config.broker_timeout_s * 1000,
            brokers_max=config.brokers_max,
            topics_max=config.topics_max,
        )
        self.switches = {
            "orderMessageEnable": config.order_messages,
            "returnOrderTopicConfigToBroker": config.return_order_topics,
            "enableAllTopicList": config.topic_lists,
            "enableTopicList": config.topic_lists,
            "supportActingMaster": config.acting_master,
            "deleteTopicWithBrokerRegistration": config.drop_missing_topics,
        }
        self.address = config.listen
        # Function that returns the queues of a topic that the broker in this process will create at the first heartbeat
        # of the topic's group; None if the broker will not create it.
        self.planned: Callable[[str], TopicQueues | None] = lambda topic: None
        # Whether somebody may be refused the route of a topic that exists.
        self.has_rules: Callable[[], bool] = lambda: False
        # Connections that got a route. An unknown name from other connections, such as tools that ask for lists, is
        # rather mistyped than new.
        self.clients: set[object] = set()
        self.tools: set[object] = set()
        self.requests = 0

    def now(self) -> float:
        return trio.current_time()

    def no_route(self, topic: str) -> Refused:
        """Return the refusal to tell the route of *topic*, whether or not it exists."""
        text = f"No topic route info in name server for the topic: {topic}; create the topic"
        if self.has_rules():
            return Refused(Reason.NO_TOPIC, f"{text}, check that its broker is registered here, or that you may use it")
        return Refused(Reason.NO_TOPIC, f"{text}, or check that its broker is registered here")

    def planned_route(self, topic: str, connection: object) -> TopicRoute | None:
        """Return the route of *topic*, which does not exist yet, for a consumer whose heartbeat will create it.

        A consumer asks for the route of its retry topic before its first heartbeat, at which the broker creates the
        topic, and asks again only after 30 s. Without this route, a new group's first retry would wait for so long.
        """
        if connection not in self.clients or connection in self.tools:
            return None
        queues = self.planned(topic)
        try:
            if queues is None:
                return None
            name = queues.broker_name
            return TopicRoute((queues,), {name: self.table.group(name)})
        except KeyError:  # the broker has not registered yet
            return None

    def forget(self, connection: object) -> None:
        """Drop the state of *connection*, which has closed, and the brokers that registered over it."""
        self.table.drop_connection(connection)
        self.clients.discard(connection)
        self.tools.discard(connection)

    async def scan(self) -> None:
        """Remove silent brokers, and the topics of removed brokers, until cancelled."""
        while True:
            await trio.sleep(self.config.scan_s)
            for connection in self.table.expire(self.now()):
                if isinstance(connection, Closable):
                    connection.close("its broker was silent for too long")
            await self.turns.finish(self.table.index.sweep())

    def properties(self) -> bytes:
        """Return the configuration in the format of RocketMQ's tools."""
        host, _, port = self.address.rpartition(":")
        values: dict[str, object] = {
            "bindAddress": host.strip("[]"),
            "listenPort": port,
            "scanNotActiveBrokerInterval": self.config.scan_s * 1000,
            "serverChannelMaxIdleTimeSeconds": self.config.idle_s,
            **self.switches,
        }
        return format_properties(values)

    def change(self, body: bytes) -> None:
        """Set the switches in *body* until the name server stops.

        Raises:
          Refused: a key cannot change at runtime (NO_PERMISSION), or a value is neither true nor false.
        """
        wanted = parse_properties(body)
        for name, value in wanted.items():
            if name not in SWITCHES:
                text = f"Can not update config {name!r:.80} over the wire; these can be: {', '.join(SWITCHES)}"
                raise Refused(Reason.NO_PERMISSION, text)
            if value not in ("true", "false"):
                raise Refused(Reason.PARAMETER, f"{name} is {value!r:.80}; it must be true or false")
        self.switches.update({name: value == "true" for name, value in wanted.items()})
        self.table.acting_master = self.switches["supportActingMaster"]
        self.table.drop_missing_topics = self.switches["deleteTopicWithBrokerRegistration"]

    def statistics(self) -> dict[str, object]:
        return {"requests": self.requests, **self.table.statistics()}
