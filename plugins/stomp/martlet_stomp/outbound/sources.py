"""Where the messages of a subscription come from: what the core opens for it."""

import math
from collections.abc import Callable
from typing import Final, final

from martlet.access import Gate
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import Start, from_earliest, from_tail
from martlet.errors import Reason, Refused
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import AUTO_DELETE, OWNS_TOPIC
from martlet.message import TAGS
from martlet_stomp.mapping.destinations import Destination, Kind, select_names
from martlet_stomp.mapping.groups import Durable, durable_group, queue_group
from martlet_stomp.mapping.selectors import not_from, select
from martlet_stomp.outbound.browsing import Browse
from martlet_stomp.outbound.subscription import UNLIMITED, Source, Subscription
from martlet_stomp.shared.context import Context
from martlet_stomp.shared.following import Follower
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import AckMode, Connect, Subscribe, Unsubscribe

__all__ = ["Opening"]

# What a client may hold of a topic, however much it asks for: 100 bytes of memory each. Of a queue, the core bounds it.
HELD_MAX: Final = 20_000


@final
class Opening:
    """Opens the sources for subscriptions of one client."""

    __slots__ = ("_client_id", "_context", "_gate", "_host", "_session", "_version")

    def __init__(self, context: Context, gate: Gate, connect: Connect, session: str, host: bytes) -> None:
        """Open for the client with *session*, which is connected from *host*."""
        self._context = context
        self._gate = gate
        self._version = connect.version
        self._client_id = connect.client_id
        self._session = session
        self._host = host

    def durable_group(self, request: Subscribe | Unsubscribe, kind: Kind) -> str:
        """Return the group of the durable subscription that *request* is about; empty for none. Raises `StompError`."""
        return durable_group(self._gate.identity.name, self._client_id, request, kind)

    def open(
        self, subscription: Subscription, take_over: Callable[[Durable], None], position: int | None = None
    ) -> tuple[Source, Browse | None]:
        """Return what brings the messages of *subscription*, and what a browser wants of that.

        If it is durable, ``durable`` of *subscription* is set.

        Args:
          take_over: ends the use of a durable subscription by others.
          position: where one to a temporary destination begins in the log; None for the end.

        Raises:
          StompError: it cannot be opened as the client wants it.
          Refused: it may not be opened, or its topic cannot be read.
        """
        context, request, destination = self._context, subscription.request, subscription.destination
        group = self.durable_group(request, destination.kind)
        if (
            request.is_retroactive
            and destination.kind is not Kind.QUEUE
            and (destination.name or not destination.topic)
        ):
            text = f"{shown(destination.text)} begins with the next message; activemq.retroactive is for a whole topic"
            raise StompError(text)
        if destination.application and request.auto_delete:
            text = "keeps what its consumers have missed; subscribe without auto-delete"
            raise StompError(f"{shown(destination.text)} {text}")
        if request.is_browser:
            return self._browse(subscription)
        if not destination.kind.is_stored or (destination.is_filter and destination.kind is Kind.TOPIC and not group):
            return self._follow(subscription, position), None
        is_new = self._find_topic(destination)
        if destination.kind is Kind.QUEUE or group:
            if group:
                subscription.durable = Durable(destination.topic, group)
                take_over(subscription.durable)
            try:
                return self._join(subscription, group, is_new=is_new), None
            except (Refused, StompError):
                if is_new:
                    context.broker.topics.delete(destination.topic)  # else a client could create any number
                raise
        if is_new:
            context.created(destination.topic)
        return self.read_topic(subscription, from_earliest if request.is_retroactive else from_tail), None

    def read_topic(self, subscription: Subscription, start: Start) -> Source:
        """Return what brings all messages of a topic from *start* on. Raises `StompError` and `Refused`."""
        destination = subscription.destination
        return self._gate.subscribe(
            subscription,
            destination.topic,
            self._context.encodings.of(self._version, destination, is_acknowledged=subscription.acknowledges),
            selection=self._select(subscription.request),
            start=start,
            credit=self._credit(subscription),
        )

    def check_part(self, request: Subscribe, destination: Destination, why: str) -> None:
        """Raise `StompError` or `Refused` if *request* cannot be for several destinations; *why* says that it is."""
        text = f"{shown(destination.text)} {why}"
        if self.durable_group(request, destination.kind):
            raise StompError(f"{text}, and a durable subscription is to one topic; name it alone")
        if request.is_browser:
            raise StompError(f"{text}, and only a queue can be browsed; name it alone")
        if request.ack is AckMode.CLIENT:
            raise StompError(f"{text}, so ACK cannot be cumulative; use ack:client-individual or auto")
        self._select(request)

    def _select(self, request: Subscribe) -> Selection:
        """Return which messages of a topic *request* wants. Raises `StompError` and `Refused`."""
        wanted = select(self._context.broker, request.selector)
        return wanted.both(not_from(self._host)) if request.no_local else wanted

    def _credit(self, subscription: Subscription) -> int:
        """Return how many messages the client may hold."""
        asked = subscription.request.prefetch
        prefetch = self._context.config.prefetch if asked is None else asked
        limit = max(HELD_MAX, self._context.config.prefetch)
        subscription.prefetch = min(prefetch or limit, limit) if subscription.acknowledges else UNLIMITED
        return subscription.prefetch

    def _join(self, subscription: Subscription, group: str, *, is_new: bool) -> Source:
        """Consume a queue, or the durable subscription that has *group*; *is_new* says that it has created the topic.

        Raises `StompError` and `Refused`.
        """
        context, request, destination = self._context, subscription.request, subscription.destination
        acknowledges, name = subscription.acknowledges, destination.name
        is_topics = bool(group or destination.application)  # what is sent to the topic from now on
        selection, wanted = EVERYTHING, select(context.broker, request.selector)
        names: MessageSelection | None = None
        if name:
            if not group and wanted is not EVERYTHING:
                text = f"subscribe to {Kind.QUEUE.value}{destination.topic} with a selector on {TAGS}, the name"
                raise StompError(f"queue {shown(destination.text)} has a topic filter, so it has no selectors; {text}")
            selection = select_names(name)
            names = MessageSelection(context.feeds.of(destination.topic), name, wanted.predicate if group else None)
        membership = Membership(
            lease_s=math.inf if acknowledges else 0,
            credit=self._credit(subscription),
            takes=None if group else wanted.predicate,  # consumers of a queue may have different selectors
            is_exclusive=request.is_exclusive,
            selection=selection.both(wanted) if group else selection,
            names=names,
            start=from_tail if name or (is_topics and not request.is_retroactive) else from_earliest,
            marks=0 if is_topics else OWNS_TOPIC * is_new | AUTO_DELETE * (request.auto_delete is True),
        )
        encoding = context.encodings.of(self._version, destination, is_acknowledged=acknowledges)
        shared = group or queue_group(destination)
        return self._gate.join(subscription, destination.topic, shared, encoding, membership, context.policy)

    def _follow(self, subscription: Subscription, position: int | None) -> Source:
        """Follow names in a topic. Raises `StompError` and `Refused`."""
        context, destination = self._context, subscription.destination
        if destination.kind.is_stored:
            self._find_topic(destination)
            topic_filter: str | None = destination.name
        else:
            context.temporary.ensure_topic()
            topic_filter = context.temporary.tag_of(destination, self._session)
        return Follower(
            self._gate,
            context.feeds.of(destination.topic),
            topic_filter or "",
            subscription.wake,
            context.encodings.of(self._version, destination, is_acknowledged=subscription.acknowledges),
            self._credit(subscription),
            has_places=subscription.acknowledges,
            takes=self._select(subscription.request).predicate,
            position=position,
        )

    def _browse(self, subscription: Subscription) -> tuple[Source, Browse]:
        """Show what a queue has. Raises `StompError` and `Refused`."""
        context, destination = self._context, subscription.destination
        if destination.kind is not Kind.QUEUE or destination.name:
            raise StompError(f"{shown(destination.text)} cannot be browsed, because it is no queue; subscribe to it")
        if self._find_topic(destination):
            context.created(destination.topic)
        shared_group = self._gate.shared_group(destination.topic, queue_group(destination), context.policy)
        if shared_group is None and destination.application:
            raise StompError(f"{shown(destination.text)} has no messages, nobody ever consumed it; subscribe to it")
        browse = Browse(shared_group)
        reader = self._gate.subscribe(
            subscription,
            destination.topic,
            context.encodings.of(self._version, destination, is_acknowledged=False),
            selection=select(context.broker, subscription.request.selector),
            start=browse.start,
            credit=UNLIMITED,
        )
        return reader, browse

    def _find_topic(self, destination: Destination) -> bool:
        """Make sure that the topic is there; return whether it was created. Raises `Refused`."""
        topic, context = destination.topic, self._context
        context.check_exists(destination)
        is_new = not context.has_topic(topic)
        if destination.is_filter and not is_new:
            return False  # whoever reads names need not be allowed to read the whole topic
        if self._gate.find_topic(topic, "read", context.config.queues) is None:
            text = f"topic[{topic}] does not exist; create it, or set broker.auto_create_topics"
            raise Refused(Reason.NO_TOPIC, text)
        return is_new
