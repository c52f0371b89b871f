"""The sources of subscriptions: what the core opens for queues, topics, names and browsers."""

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

# Most unacknowledged messages of a topic that a client may ask for: each takes 100 bytes. For queues the core has its
# own limit.
HELD_MAX: Final = 20_000


@final
class Opening:
    """Opens the sources for subscriptions of one client."""

    __slots__ = ("_client_id", "_context", "_gate", "_host", "_session", "_version")

    def __init__(self, context: Context, gate: Gate, connect: Connect, session: str, host: bytes) -> None:
        """Open sources for the client with *session*, connected from *host*."""
        self._context = context
        self._gate = gate
        self._version = connect.version
        self._client_id = connect.client_id
        self._session = session
        self._host = host

    def durable_group(self, request: Subscribe | Unsubscribe, kind: Kind) -> str:
        """Return the group of the durable subscription in *request*; empty for none. Raises `StompError`."""
        return durable_group(self._gate.identity.name, self._client_id, request, kind)

    def open(
        self, subscription: Subscription, take_over: Callable[[Durable], None], position: int | None = None
    ) -> tuple[Source, Browse | None]:
        """Return the source of *subscription*, and its `Browse` if it is a browser.

        Sets ``durable`` of a durable *subscription*.

        Args:
          take_over: ends the use of a durable subscription by another connection.
          position: the log position at which a subscription to a temporary destination begins; None for the end.

        Raises:
          StompError: the broker does not support the client's request.
          Refused: the client may not subscribe, or the topic cannot be read.
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
                    context.broker.topics.delete(destination.topic)  # so that refused requests leave no topics
                raise
        if is_new:
            context.created(destination.topic)
        return self.read_topic(subscription, from_earliest if request.is_retroactive else from_tail), None

    def read_topic(self, subscription: Subscription, start: Start) -> Source:
        """Return the source of all messages of a topic from *start* on. Raises `StompError` and `Refused`."""
        destination = subscription.destination
        return self._gate.subscribe(
            subscription,
            destination.topic,
            self._context.encodings.of(self._version, destination, is_acknowledged=subscription.acknowledges),
            selection=self._select(subscription.request),
            start=start,
            credit=self._set_prefetch(subscription),
        )

    def check_part(self, request: Subscribe, destination: Destination, why: str) -> None:
        """Raise `StompError` or `Refused` if *request* cannot have several topics; *why* is text for the error."""
        text = f"{shown(destination.text)} {why}"
        if self.durable_group(request, destination.kind):
            raise StompError(f"{text}, and a durable subscription is to one topic; name it alone")
        if request.is_browser:
            raise StompError(f"{text}, and only a queue can be browsed; name it alone")
        if request.ack is AckMode.CLIENT:
            raise StompError(f"{text}, so ACK cannot be cumulative; use ack:client-individual or auto")
        self._select(request)

    def _select(self, request: Subscribe) -> Selection:
        """Return the selection of messages that *request* wants. Raises `StompError` and `Refused`."""
        selection = select(self._context.broker, request.selector)
        return selection.both(not_from(self._host)) if request.no_local else selection

    def _set_prefetch(self, subscription: Subscription) -> int:
        """Set ``prefetch`` of *subscription*, the number of messages that the client may hold; return it."""
        requested = subscription.request.prefetch
        prefetch = self._context.config.prefetch if requested is None else requested
        limit = max(HELD_MAX, self._context.config.prefetch)
        subscription.prefetch = min(prefetch or limit, limit) if subscription.acknowledges else UNLIMITED
        return subscription.prefetch

    def _join(self, subscription: Subscription, group: str, *, is_new: bool) -> Source:
        """Join a queue's group, or *group* of a durable subscription; *is_new* if the topic was just created.

        Raises `StompError` and `Refused`.
        """
        context, request, destination = self._context, subscription.request, subscription.destination
        acknowledges, name = subscription.acknowledges, destination.name
        is_topics = bool(group or destination.application)  # whether the group has messages of a topic, from now on
        selection, selected = EVERYTHING, select(context.broker, request.selector)
        names: MessageSelection | None = None
        if name:
            if not group and selected is not EVERYTHING:
                text = f"subscribe to {Kind.QUEUE.value}{destination.topic} with a selector on {TAGS}, the name"
                raise StompError(f"queue {shown(destination.text)} has a topic filter, so it has no selectors; {text}")
            selection = select_names(name)
            names = MessageSelection(context.feeds.of(destination.topic), name, selected.predicate if group else None)
        membership = Membership(
            lease_s=math.inf if acknowledges else 0,
            credit=self._set_prefetch(subscription),
            takes=None if group else selected.predicate,  # each consumer of a queue may have its own selector
            is_exclusive=request.is_exclusive,
            selection=selection.both(selected) if group else selection,
            names=names,
            start=from_tail if name or (is_topics and not request.is_retroactive) else from_earliest,
            marks=0 if is_topics else OWNS_TOPIC * is_new | AUTO_DELETE * (request.auto_delete is True),
        )
        encoding = context.encodings.of(self._version, destination, is_acknowledged=acknowledges)
        group_name = group or queue_group(destination)
        return self._gate.join(subscription, destination.topic, group_name, encoding, membership, context.policy)

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
            self._set_prefetch(subscription),
            has_places=subscription.acknowledges,
            takes=self._select(subscription.request).predicate,
            position=position,
        )

    def _browse(self, subscription: Subscription) -> tuple[Source, Browse]:
        """Browse a queue. Raises `StompError` and `Refused`."""
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
        """Create the topic if it is missing; return whether it was created. Raises `Refused`."""
        topic, context = destination.topic, self._context
        context.check_exists(destination, self._gate, "subscribe")
        is_new = not context.has_topic(topic)
        if destination.is_filter and not is_new:
            return False  # a client that may read only some names is not checked for the whole topic
        if self._gate.find_topic(topic, "subscribe", context.config.queues) is None:
            text = f"topic[{topic}] does not exist; create it, or set broker.auto_create_topics"
            raise Refused(Reason.NO_TOPIC, text)
        return is_new
