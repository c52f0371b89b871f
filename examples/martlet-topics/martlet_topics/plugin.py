"""The entry point: a port and the topic behind it."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import Handler, Peer, Protocol
from martlet.net.addresses import split_address
from martlet.plugins.hooks import Hooks
from martlet_topics.codec import Limits
from martlet_topics.config import TopicsConfig
from martlet_topics.connection import TopicsConnection
from martlet_topics.handler import Shared, TopicsHandler

__all__ = ["TopicsPlugin"]


class TopicsPlugin(Hooks):
    """Serves the protocol on the port of its configuration."""

    config_class: ClassVar[type[Settings] | None] = TopicsConfig
    config: TopicsConfig

    def __init__(self, config: TopicsConfig) -> None:
        super().__init__(config)
        split_address(config.listen)

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        return (self.protocol(broker),)

    def protocol(self, broker: Broker, bound: Callable[[str], None] = lambda address: None) -> Protocol:
        """Return the protocol over the topic of the configuration, which is created if need be."""
        config = self.config
        broker.topics.ensure(config.topic, config.queues)
        feed = broker.cursors.open([config.topic])
        shared = Shared(config, broker.clock, broker.gate, feed, {})
        limits = Limits(config.line_bytes_max, config.run_bytes_max, config.run_messages_max)
        broker.stats.add(
            "topics",
            lambda: {
                "published": shared.published,
                "delivered": shared.delivered,
                "refused": shared.refused,
            },
        )

        def connect(now: float) -> TopicsConnection:
            return TopicsConnection(limits, config.idle_s, now)

        def handle(peer: Peer, connection: Any) -> Handler:
            return TopicsHandler(peer, shared)

        return Protocol("topics", config.listen, connect, handle, bound=bound)
