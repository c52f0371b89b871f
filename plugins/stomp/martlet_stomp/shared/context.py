"""State that all connections of the plugin share: encodings, templates of messages, clients, counters."""

import logging
from collections.abc import Callable
from typing import Final, final

from msgspec import Struct, field
from msgspec.structs import asdict

from martlet.access import Gate
from martlet.broker import Broker
from martlet.contracts import Action
from martlet.errors import Reason, Refused
from martlet.groups.leaving import Leaving
from martlet.groups.strategy.policy import GroupPolicy
from martlet.groups.strategy.sticky import Sticky
from martlet.message import TAGS
from martlet.net.complaints import Complaints
from martlet.runtime.installed import installed_version
from martlet_stomp.config import StompConfig
from martlet_stomp.mapping.destinations import Destination, check_name, parse_destinations
from martlet_stomp.mapping.encoding import SubscriptionEncodings
from martlet_stomp.mapping.groups import GROUP, Durable, is_queue_group
from martlet_stomp.mapping.joined import JoinedFrames
from martlet_stomp.mapping.messages import GROUP_ID, Template
from martlet_stomp.shared.clients import Connected, DurableUse
from martlet_stomp.shared.following import Feeds
from martlet_stomp.shared.heartbeats import Heartbeats
from martlet_stomp.shared.new_topics import NewTopics
from martlet_stomp.shared.open_transactions import OpenTransactions
from martlet_stomp.shared.round_runs import RoundRuns
from martlet_stomp.shared.temporary import Temporary
from martlet_stomp.wire.errors import shown
from martlet_stomp.wire.packets import MessageHeaders

__all__ = ["PROTOCOL", "Context", "Counters", "MessageTemplates", "make_context"]

log = logging.getLogger("martlet.stomp")

PROTOCOL: Final = "stomp"
# Most cached templates, and the bytes of their header lines; beyond these all are dropped.
TEMPLATES_KEPT: Final = 4096
TEMPLATES_BYTES_KEPT: Final = 1 << 20


@final
class Counters(Struct):
    """Counters since the start."""

    received: int = 0  # SEND frames from clients
    stored: int = 0  # messages from clients, stored in the log
    delivered: int = 0  # MESSAGE frames to clients
    acknowledged: int = 0  # messages that clients acknowledged
    failed: int = 0  # messages that clients refused with NACK
    receipts: int = 0
    errors: int = 0  # ERROR frames
    connections: int = 0


@final
class MessageTemplates:
    """A cache of templates of messages, by their headers."""

    def __init__(self, names: frozenset[str], cluster: str, check: Callable[[Destination], None]) -> None:
        """Make an empty cache; *check* raises `StompError` if clients may not send to a destination."""
        self._names = names
        self._cluster = cluster
        self._check = check
        self._bytes = 0
        self.table: Final[dict[MessageHeaders, Template]] = {}

    def find(self, headers: MessageHeaders) -> Template:
        """Return the template for *headers*. Raises `StompError` if they are invalid."""
        template = self.table.get(headers)
        if template is None:
            parts = [self._make(headers, each) for each in parse_destinations(headers.destination, self._names)]
            template = parts[0]
            if len(parts) > 1:
                template.parts = tuple(parts)
            self._bytes += headers.size * len(parts)
            if len(self.table) >= TEMPLATES_KEPT or self._bytes > TEMPLATES_BYTES_KEPT:
                self.table.clear()
                self._bytes = headers.size
            self.table[headers] = template
        return template

    def _make(self, headers: MessageHeaders, destination: Destination) -> Template:
        check_name(destination)
        if destination.topic in self._names and not destination.name:
            check_name(destination._replace(name=headers.get(TAGS) or ""))
        self._check(destination)
        return Template(headers, destination, self._names, self._cluster)


@final
class Context(Struct):
    """State that all connections share; the plugin makes one."""

    config: StompConfig
    broker: Broker
    names: frozenset[str]
    templates: MessageTemplates
    encodings: SubscriptionEncodings
    # Feeds of topics whose messages have names.
    feeds: Feeds
    temporary: Temporary
    # Policy of the groups that consume queues.
    policy: GroupPolicy
    # Returns the tag code of a record with the given properties.
    code_of: Callable[[bytes], int]
    server: str  # header ``server`` of CONNECTED
    transactions: OpenTransactions
    new_topics: NewTopics
    # Answers the runs of messages that are stored at the end of a round.
    runs: RoundRuns = field(default_factory=RoundRuns)
    counters: Counters = field(default_factory=Counters)
    # Warnings about clients, limited in number.
    complaints: Complaints = field(default_factory=lambda: Complaints(log))
    # Durable subscriptions in use by a connection.
    durable: dict[Durable, DurableUse] = field(default_factory=dict)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    # Members that must leave their groups, because their clients are gone.
    leaving: Leaving = field(default_factory=Leaving)
    clients: dict[Connected, None] = field(default_factory=dict)
    joined: JoinedFrames = field(default_factory=JoinedFrames)

    def has_topic(self, name: str) -> bool:
        """Return whether topic *name* exists."""
        return self.broker.topics.get(name) is not None

    def check_exists(self, destination: Destination, gate: Gate, action: Action) -> None:
        """Raise `Refused` if *destination* must exist, and does not; only who may do *action* there learns it."""
        if destination.must_exist and not self.has_topic(destination.topic):
            gate.check(action, destination.topic)
            text = f"there is no queue {shown(destination.text)}; create it, or send and subscribe to that destination"
            raise Refused(Reason.NO_TOPIC, text)

    def created(self, name: str) -> None:
        """Note that a client created topic *name*, which is deleted once it is unused and empty."""
        topic = self.broker.topics.get(name)
        if topic is not None and name not in self.names and name != self.temporary.topic:
            self.broker.shared_groups.begin(topic, GROUP, self.policy)

    def statistics(self) -> dict[str, object]:
        """Return the counters."""
        encodings = self.encodings
        return {
            **asdict(self.counters),
            "expired": encodings.expired,
            "unreadable": encodings.unreadable,
            "unanswered": self.temporary.unanswered,
            "clients": len(self.clients),
            "transactions": len(self.transactions),
            "transaction_bytes": self.transactions.size,
            "heartbeats": self.heartbeats.sent,
        }


def make_context(config: StompConfig, broker: Broker) -> Context:
    """Return the context of a broker's STOMP port."""
    names, temporary = frozenset(config.names), Temporary(broker.topics, config.temporary)
    broker.shared_groups.unused.expire(PROTOCOL, config.queue_expiry_s, is_queue_group)
    sticky = Sticky(lambda record: record.property(GROUP_ID))
    policy = GroupPolicy(
        PROTOCOL, config.redeliveries_max, config.dead_letters, leaving_counts=False, in_parts=True, sticky=sticky
    )
    return Context(
        config,
        broker,
        names,
        MessageTemplates(names, broker.config.cluster, temporary.check),
        SubscriptionEncodings(broker.clock, config.names, sticky, broker.delivered_bytes_max),
        Feeds(broker, (*config.names, config.temporary)),
        temporary,
        policy,
        broker.store.writer.code_of,
        f"martlet/{installed_version()}",
        OpenTransactions(config.transaction_s),
        NewTopics(broker.topics, config.temporary),
    )
