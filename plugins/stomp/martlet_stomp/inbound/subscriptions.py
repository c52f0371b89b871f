"""SUBSCRIBE and UNSUBSCRIBE of one client."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.delivery.subscriptions import from_earliest, from_tail
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet_stomp.mapping.destinations import Destination, Kind, check_filter, parse_destinations
from martlet_stomp.mapping.groups import Durable
from martlet_stomp.outbound.patterns import Pattern
from martlet_stomp.outbound.sources import Opening
from martlet_stomp.outbound.subscription import Subscription
from martlet_stomp.shared.context import Context
from martlet_stomp.shared.temporary import is_temporary, remote_text
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import Connect, Subscribe, Unsubscribe

__all__ = ["ClientSubscriptions"]

# Parts of a subscription with wildcards: most that begin in one turn, 150 us each, and the steps that one counts as.
PARTS_A_TURN: Final = 32
STEPS_A_PART: Final = 150


@final
class ClientSubscriptions:
    """The subscriptions of one client."""

    __slots__ = (
        "_allowance",
        "_automatic",
        "_by_id",
        "_by_number",
        "_context",
        "_end",
        "_last_number",
        "_opening",
        "_patterns",
        "_peer",
        "_ready",
        "_session",
        "_temporary",
        "_version",
    )

    def __init__(
        self,
        peer: Peer,
        context: Context,
        gate: Gate,
        connect: Connect,
        session: str,
        end: Callable[[str], None],
    ) -> None:
        """Begin without subscriptions; *end* closes the connection, with the reason."""
        self._peer = peer
        self._context = context
        self._allowance = gate.allowance
        self._end = end
        self._version = connect.version
        self._session = session
        self._opening = Opening(context, gate, connect, session, peer.host)
        self._by_number: dict[int, Subscription] = {}
        self._by_id: dict[str, Subscription] = {}
        self._patterns: dict[str, Pattern] = {}  # subscriptions with wildcards, by the same keys
        self._temporary: dict[str, dict[Subscription, None]] = {}  # subscriptions to each temporary destination
        self._automatic: dict[str, Subscription] = {}  # of these, the ones that the broker made for replies
        self._last_number = 0
        self._ready: dict[Subscription, None] = {}  # subscriptions that may have messages to deliver

    def __len__(self) -> int:
        return len(self._by_number)

    def described(self) -> Iterator[dict[str, object]]:
        """Yield a row of the list of subscriptions for each subscription."""
        for subscription in list(self._by_number.values()):
            yield subscription.described()

    def find(self, number: int) -> Subscription | None:
        """Return subscription *number*; None if it has ended."""
        return self._by_number.get(number)

    def has_ended(self, number: int) -> bool:
        """Return whether subscription *number* has ended, so its messages have gone to other consumers."""
        return number not in self._by_number and 0 < number <= self._last_number

    # begin and end

    def subscribe(self, request: Subscribe) -> Steps[None] | None:
        """Begin a subscription. Raises `StompError` and `Refused`.

        Returns the remaining steps, if these may take long.
        """
        self._check_count()
        destinations = parse_destinations(request.destination, self._context.names)
        for destination in destinations:
            check_filter(destination)
            self._context.temporary.check(destination)
        destination = destinations[0]
        key = _key(request.id, destination.text if len(destinations) == 1 else request.destination)
        if key in self._patterns or (request.id is not None and key in self._by_id):
            text = f"there is a subscription with {key} already"
            raise StompError(f"{text}; use another id, or UNSUBSCRIBE first")
        if len(destinations) > 1:
            return self._begin_all(request, destinations, key)
        if destination.is_pattern:
            return self._begin_pattern(request, destination, key)
        position = self._end_automatic(destination) if is_temporary(destination.kind) else None
        self._begin(request, destination, position)
        return None

    def _begin_pattern(self, request: Subscribe, destination: Destination, key: str) -> Steps[None]:
        """Begin a subscription to all topics that match *destination*. Raises `StompError`."""
        self._opening.check_part(request, destination, "has a wildcard")
        pattern = Pattern(request, destination, key, self._peer.wake)
        self._patterns[key] = pattern
        return self._begin_parts(pattern, self._context.new_topics.add(pattern))

    def _begin_all(self, request: Subscribe, destinations: Sequence[Destination], key: str) -> Steps[None]:
        """Begin a subscription to each of *destinations*. Raises `StompError` and `Refused`."""
        for destination in destinations:
            self._opening.check_part(request, destination, "is in a list")
            if destination.is_pattern:
                raise StompError(f"{shown(destination.text)} is in a list, and has a wildcard; subscribe to it alone")
        pattern = self._patterns[key] = Pattern(request, None, key, self._peer.wake)
        for destination in destinations:
            text = destination.text
            if text not in pattern.parts:
                self._check_count()
                part = self._make_subscription(request, destination)
                part.begin(*self._opening.open(part, self._take_over))
                part.parts, part.key = pattern.parts, f"number {part.number}"
                pattern.parts[text] = self._by_id[part.key] = part
                self._add(part)
            yield
            if key not in self._patterns:
                return  # the client is gone

    def _begin_parts(self, pattern: Pattern, topics: Iterator[str]) -> Steps[None]:
        budget = Budget()
        for topic in topics:
            if pattern.wants(topic):
                self._begin_part(pattern, topic, is_new=pattern.request.is_retroactive)
                budget.spend(STEPS_A_PART)
            if budget.is_over():
                yield
                if pattern.key not in self._patterns:
                    return  # the client is gone

    def _begin_part(self, pattern: Pattern, topic: str, *, is_new: bool) -> None:
        """Begin to read *topic*, if the client may; a new topic from its first message. Raises as `subscribe`."""
        destination = pattern.destination(topic)
        if destination.text in pattern.parts:
            return
        self._check_count()
        part = self._make_subscription(pattern.request, destination)
        try:
            part.begin(self._opening.read_topic(part, from_earliest if is_new else from_tail))
        except Refused as refused:
            if refused.reason in (Reason.NO_PERMISSION, Reason.NO_TOPIC):
                return
            raise
        part.parts, part.follows, part.key = pattern.parts, pattern.follows, f"number {part.number}"
        pattern.parts[destination.text] = self._by_id[part.key] = part
        self._add(part)

    def _begin_new_parts(self) -> None:
        """Begin to read topics created since the last call. Raises `StompError` and `Refused`."""
        for pattern in self._patterns.values():
            for _ in range(min(len(pattern.pending), PARTS_A_TURN)):
                self._begin_part(pattern, pattern.pending.popleft(), is_new=True)
            if pattern.pending:
                self._peer.wake()

    def _make_subscription(self, request: Subscribe, destination: Destination) -> Subscription:
        self._last_number += 1
        return Subscription(self._peer, self, self._context, request, destination, self._last_number, self._version)

    def _begin(self, request: Subscribe, destination: Destination, position: int | None = None) -> Subscription:
        """Begin a subscription; *position* is as for `Opening.open`. Raises `StompError` and `Refused`."""
        if is_temporary(destination.kind):
            destination = destination._replace(topic=self._context.temporary.topic)
        subscription = self._make_subscription(request, destination)
        subscription.begin(*self._opening.open(subscription, self._take_over, position))
        if subscription.durable is not None:
            self._context.durable[subscription.durable] = subscription
        self._add(subscription)
        key = _key(request.id, destination.text)
        # With STOMP 1.0, several subscriptions without id may have the same destination.
        subscription.key = key if key not in self._by_id else f"number {subscription.number}"
        self._by_id[subscription.key] = subscription
        if is_temporary(destination.kind):
            self._temporary.setdefault(destination.text, {})[subscription] = None
        return subscription

    def _add(self, subscription: Subscription) -> None:
        self._by_number[subscription.number] = subscription
        self._allowance.note_subscriptions(len(self._by_number))

    def _end_automatic(self, destination: Destination) -> int | None:
        """End the subscription that the broker made for replies; return its log position, or None.

        Raises `StompError` if the client itself subscribed to the same temporary queue.
        """
        automatic = self._automatic.get(destination.text)
        if automatic is not None:
            position = automatic.position
            self._drop(automatic)
            return position
        if destination.kind is Kind.TEMP_QUEUE and destination.text in self._temporary:
            raise StompError(f"there is a subscription to {shown(destination.text)} already; UNSUBSCRIBE first")
        return None

    def reply_to(self, destination: Destination) -> str:
        """Subscribe the client to its temporary *destination*, if it is not; return the text for other clients.

        Raises `StompError` and `Refused`.
        """
        if destination.text not in self._temporary:
            self._check_count()
            if _key(destination.text, "") in self._by_id:
                text = "is the id of a subscription to something else, but that to the reply-to is called so"
                raise StompError(f"{shown(destination.text)} {text}; use another id")
            # As with RabbitMQ, the id of the subscription is the destination.
            request = Subscribe(destination.text, destination.text)
            self._automatic[destination.text] = self._begin(request, destination)
        return remote_text(self._session, destination)

    def _check_count(self) -> None:
        """Raise `StompError` or `Refused` unless there may be one more subscription."""
        limit = self._context.config.subscriptions_max
        if len(self._by_number) >= limit:
            raise StompError(f"the connection has {limit} subscriptions; stomp.subscriptions_max allows no more")
        self._allowance.check_subscriptions()

    def _take_over(self, durable: Durable) -> None:
        """End the use of *durable* by another connection, as if its client had returned. Raises `StompError`."""
        holder = self._context.durable.get(durable)
        if holder is not None and self._by_number.get(holder.number) is holder:
            raise StompError("the connection uses this durable subscription already; UNSUBSCRIBE from it first")
        if holder is not None:
            holder.lose("another connection uses its durable subscription")

    def lose(self, subscription: Subscription, reason: str) -> None:
        self._drop(subscription)
        self._end(reason)

    def unsubscribe(self, request: Unsubscribe) -> Steps[None] | None:
        """End a subscription; with its durable name, drop its waiting messages, too. Raises `StompError`.

        Returns the remaining steps, if these may take long.
        """
        pattern = self._patterns.pop(_key(request.id, self._text_of(request)), None)
        if pattern is not None:
            self._end_pattern(pattern)
            return None
        subscription = self._find_requested(request)
        group = self._opening.durable_group(request, Kind.TOPIC)
        if subscription is None and not group:
            name = f"id {shown(request.id)}" if request.id is not None else shown(request.destination or "")
            raise StompError(f"there is no subscription with {name}; use the id of SUBSCRIBE")
        durable = subscription.durable if subscription is not None else None
        if subscription is not None:
            self._drop(subscription)
        return self._forget(group, durable) if group else None

    def _end_pattern(self, pattern: Pattern) -> None:
        self._context.new_topics.remove(pattern)
        for part in list(pattern.parts.values()):
            self._drop(part)

    def _text_of(self, request: Unsubscribe) -> str:
        """Return the destination of *request* in the form of a subscription's; empty for none."""
        text = request.destination or ""
        try:
            destinations = parse_destinations(text, self._context.names) if text else []
            return destinations[0].text if len(destinations) == 1 else text
        except StompError:
            return text

    def _find_requested(self, request: Unsubscribe) -> Subscription | None:
        destination = self._text_of(request)
        subscription = self._by_id.get(_key(request.id, destination))
        if subscription is None and request.id is None:
            # STOMP 1.0 allows the destination alone, even if SUBSCRIBE had an id.
            subscription = next((each for each in self._by_id.values() if each.destination.text == destination), None)
        return subscription

    def _forget(self, group: str, durable: Durable | None) -> Steps[None] | None:
        """End the durable subscription *group*, even if another connection uses it."""
        shared_groups, policy = self._context.broker.shared_groups, self._context.policy
        if durable is not None and durable.group == group:
            shared_groups.forget(durable.topic, group, policy)
            return None
        for each, holder in list(self._context.durable.items()):
            if each.group == group:
                holder.lose("another connection ended its durable subscription")
        return shared_groups.forget_groups(policy, (group,))  # on all topics: UNSUBSCRIBE may not name the topic

    def _drop(self, subscription: Subscription) -> None:
        self._by_number.pop(subscription.number, None)
        self._allowance.note_subscriptions(len(self._by_number))
        self._by_id.pop(subscription.key, None)
        self._ready.pop(subscription, None)
        if subscription.parts is not None:
            subscription.parts.pop(subscription.destination.text, None)
        text = subscription.destination.text
        if self._automatic.get(text) is subscription:
            del self._automatic[text]
        subscriptions = self._temporary.get(text, {})
        subscriptions.pop(subscription, None)
        if not subscriptions:
            self._temporary.pop(text, None)
        self._close(subscription)

    def _close(self, subscription: Subscription) -> None:
        subscription.close()
        self._forget_durable(subscription)

    def _forget_durable(self, subscription: Subscription) -> None:
        durable, table = subscription.durable, self._context.durable
        if durable is not None and table.get(durable) is subscription:
            del table[durable]

    def close(self) -> None:
        """End all subscriptions: the client is gone."""
        for pattern in self._patterns.values():
            self._context.new_topics.remove(pattern)
        self._patterns.clear()
        members = [subscription.end() for subscription in self._by_number.values()]
        self._context.leaving.leave(member for member in members if member is not None)
        for subscription in self._by_number.values():
            self._forget_durable(subscription)
        for table in self._by_number, self._by_id, self._ready, self._temporary, self._automatic:
            table.clear()

    # deliveries

    def ready(self, subscription: Subscription) -> None:
        self._ready[subscription] = None
        self._peer.wake()

    def collect(self, budget_bytes: int) -> None:
        """Send about *budget_bytes* of messages of ready subscriptions. Raises `StompError` and `Refused`."""
        if self._patterns:
            self._begin_new_parts()
        for subscription in list(self._ready):
            if budget_bytes <= 0:
                self._peer.wake()
                return
            del self._ready[subscription]
            if subscription.gone and subscription.follows:
                self._drop(subscription)
                continue
            if subscription.gone:
                raise Refused(Reason.NO_TOPIC, _end_of(subscription))
            budget_bytes -= subscription.deliver(budget_bytes)


def _key(subscription_id: str | None, destination: str) -> str:
    """Return the key of a subscription of a connection; with STOMP 1.0 the id may be missing."""
    return f"id {subscription_id}" if subscription_id is not None else f"destination {destination}"


def _end_of(subscription: Subscription) -> str:
    return f"destination {shown(subscription.destination.text)} was deleted, or may not be read any more"
