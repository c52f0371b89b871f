"""State that all connections of the plugin share: the topic and its feed, names, shapes, clients, counters."""

import logging
from typing import Final, final

from msgspec import Struct, field
from msgspec.structs import asdict

from martlet.broker import Broker
from martlet.delivery.feed import Feed
from martlet.groups.leaving import Leaving
from martlet.net.complaints import Complaints
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.mapping.bridges import Bridges
from martlet_mqtt.mapping.frames import Shapes
from martlet_mqtt.mapping.rules import TopicRules
from martlet_mqtt.shared.clients import Connected
from martlet_mqtt.shared.retained import Retained
from martlet_mqtt.shared.round_runs import RoundRuns
from martlet_mqtt.wire.names import Names

__all__ = ["PROTOCOL", "Context", "Counters", "create_topics"]

log = logging.getLogger("martlet.mqtt")

# Room in a PUBLISH for more than the payload: the name, and the properties that are not stored in the body.
BESIDE_PAYLOAD_BYTES: Final = 1 << 17
PROTOCOL: Final = "mqtt"


@final
class Counters(Struct):
    """Counters since the start."""

    received: int = 0  # PUBLISH packets from clients
    delivered: int = 0  # PUBLISH packets to clients
    stored: int = 0  # messages from clients, stored in the log
    dropped: int = 0  # QoS 0 messages dropped because the client was too slow
    oversize: int = 0  # messages not delivered because they are larger than the client accepts
    refused: int = 0  # messages from clients that were not stored
    unretained: int = 0  # messages with RETAIN that were stored but not retained
    expired: int = 0  # messages that expired before delivery
    unreadable: int = 0  # messages not delivered because their bodies cannot be decompressed
    wills: int = 0  # wills published
    removed: int = 0  # messages in flight that retention removed before they were sent again
    missed: int = 0  # messages that retention removed from topics of absent sessions; an upper bound
    missed_sessions: int = 0  # sessions that returned after retention had removed such messages
    connections: int = 0
    packets_received: int = 0  # of all kinds
    answers: int = 0  # packets to clients other than PUBLISH
    expired_sessions: int = 0


def create_topics(broker: Broker, rules: TopicRules) -> None:
    """Create missing topics of *rules*. Raises `Refused` if a name is invalid, or there are too many topics."""
    topics = broker.topics
    for name in rules.topics:
        if topics.get(name) is None:
            topics.ensure(name, rules.queues_of(name), attributes=rules.attributes_of(name, topics.hours_max))


@final
class Context(Struct):
    """State that all connections share; the plugin makes one."""

    config: MqttConfig
    broker: Broker
    feed: Feed
    names: Names
    retained: Retained
    rules: TopicRules
    shapes: Shapes = field(default_factory=Shapes)
    # Answers the runs of messages that are stored at the end of a round.
    runs: RoundRuns = field(default_factory=RoundRuns)
    counters: Counters = field(default_factory=Counters)
    # Warnings about clients, limited in number.
    complaints: Complaints = field(default_factory=lambda: Complaints(log))
    # Connected clients by their identifier.
    clients: dict[str, Connected] = field(default_factory=dict)
    # States of other brokers' bridges.
    bridges: Bridges = field(default_factory=Bridges)
    # Members of shared subscriptions that must leave their groups, because their clients are gone.
    leaving: Leaving = field(default_factory=Leaving)
    # Groups of shared subscriptions with recent joins; the search for unused groups skips them.
    shared_lately: set[str] = field(default_factory=set)

    @property
    def packet_bytes_max(self) -> int:
        """The size of the longest packet that a client may send, limited to the need of the longest message."""
        return min(self.config.packet_bytes_max, self.broker.config.message_bytes_max + BESIDE_PAYLOAD_BYTES)

    def ensure_topics(self) -> None:
        """Create deleted topics of the feed again. Raises `Refused` if there are too many topics."""
        create_topics(self.broker, self.rules)

    def statistics(self) -> dict[str, object]:
        """Return the counters; ``dropped`` includes the connected clients' own counts."""
        dropped = self.counters.dropped + sum(client.dropped for client in self.clients.values())
        return {**asdict(self.counters), "dropped": dropped, "clients": len(self.clients)}
