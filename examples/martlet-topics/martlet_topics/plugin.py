"""The entry point: a port, the sessions behind it, and the service that looks after them."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import trio

from martlet.broker import Broker
from martlet.contracts import Handler, Peer, Protocol, Service
from martlet.errors import Refused
from martlet.net.addresses import split_address
from martlet.plugins.hooks import Hooks
from martlet.state import Projection
from martlet_topics.codec import Limits
from martlet_topics.config import TopicsConfig
from martlet_topics.connection import TopicsConnection
from martlet_topics.handler import Shared, TopicsHandler
from martlet_topics.sessions import Sessions

__all__ = ["TopicsPlugin"]

log = logging.getLogger("martlet.topics")

LOOK_S: Final = 60.0
# A session whose client wants little would read much again after a crash, unless its position is noted now and then.
DISTANCE_BYTES: Final = 64 << 20


class TopicsPlugin(Hooks):
    """Serves the protocol on the port of its configuration."""

    config_class: ClassVar[type | None] = TopicsConfig
    config: TopicsConfig

    def __init__(self, config: TopicsConfig) -> None:
        super().__init__(config)
        split_address(config.listen)
        self._sessions: Sessions | None = None

    def sessions(self, broker: Broker) -> Sessions:
        """Return the sessions that all hooks share."""
        if self._sessions is None:
            self._sessions = Sessions(broker.journal("topics"), self.config.sessions_max)
        return self._sessions

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        return (self.sessions(broker),)

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        return (self.protocol(broker),)

    def protocol(self, broker: Broker, bound: Callable[[str], None] = lambda address: None) -> Protocol:
        """Return the protocol over the topic of the configuration, which is created if need be."""
        config = self.config
        broker.topics.ensure(config.topic, config.queues)
        feed = broker.cursors.open([config.topic])
        shared = Shared(config, broker.clock, broker.gate, feed, self.sessions(broker), {})
        limits = Limits(config.line_bytes_max, config.run_bytes_max, config.run_messages_max)
        broker.stats.add(
            "topics",
            lambda: {
                "sessions": len(shared.sessions),
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

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        async def look_after_sessions() -> None:
            sessions, started_ms = self.sessions(broker), broker.clock.now_ms()
            while True:
                await trio.sleep(LOOK_S)
                left_before_ms = broker.clock.now_ms() - self.config.session_expiry_s * 1000
                try:
                    await broker.turns.finish(sessions.expire(left_before_ms, started_ms))
                    await broker.turns.finish(sessions.note_positions(DISTANCE_BYTES))
                except Refused as refused:
                    log.warning("the positions of sessions cannot be noted, again in %g s; %s", LOOK_S, refused)

        return (look_after_sessions,)
