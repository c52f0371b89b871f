"""SUBSCRIBE, UNSUBSCRIBE, ACK and NACK of one client, outside of transactions."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Final, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.delivery.selection import EVERYTHING
from martlet.delivery.subscriptions import from_earliest, from_tail
from martlet.errors import Reason, Refused
from martlet.state.journal import NEXT_COMMIT
from martlet.steps import Steps

from .browsing import Browse
from .codec import encode_receipts
from .context import Context
from .destinations import Destination, Kind, check_whole, parse_destination
from .durable import Durable, durable_group
from .errors import StompError, shown
from .packets import AckRun, Connect, Nack, Subscribe, Unsubscribe
from .selectors import select
from .subscriptions import UNLIMITED, Part, Source, Subscription

__all__ = ["GROUP", "Subscriptions"]

# The group that consumes a queue; there is one on each topic.
GROUP: Final = "queue"


@final
class Subscriptions:
    """The subscriptions of one client."""

    __slots__ = (
        "_by_id",
        "_by_number",
        "_client_id",
        "_context",
        "_end",
        "_gate",
        "_last_number",
        "_peer",
        "_ready",
        "_version",
    )

    def __init__(self, peer: Peer, context: Context, gate: Gate, connect: Connect, end: Callable[[str], None]) -> None:
        """Begin without any; *end* closes the connection, with the reason."""
        self._peer = peer
        self._context = context
        self._gate = gate
        self._end = end
        self._version = connect.version
        self._client_id = connect.client_id
        self._by_number: dict[int, Subscription] = {}
        self._by_id: dict[str, Subscription] = {}
        self._last_number = 0
        self._ready: dict[Subscription, None] = {}  # those with something to deliver

    def __len__(self) -> int:
        return len(self._by_number)

    def described(self) -> Iterator[dict[str, object]]:
        """Yield what a list of subscriptions says about each."""
        for subscription in list(self._by_number.values()):
            yield subscription.described()

    # begin and end

    def subscribe(self, request: Subscribe) -> None:
        """Begin a subscription. Raises `StompError` and `Refused`."""
        limit = self._context.config.subscriptions_max
        if len(self._by_number) >= limit:
            raise StompError(f"the connection has {limit} subscriptions; stomp.subscriptions_max allows no more")
        destination = parse_destination(request.destination, self._context.names)
        check_whole(destination)
        key = _key(request.id, destination.text)
        if key in self._by_id:
            what = f"id {shown(request.id)}" if request.id is not None else shown(destination.text)
            raise StompError(f"there is a subscription with {what} already; use another id, or UNSUBSCRIBE first")
        self._last_number += 1
        subscription = Subscription(
            self._peer, self, self._context.counters, request, destination, self._last_number, self._version
        )
        if request.is_browser:
            self._browse(subscription, request, destination)
        else:
            subscription.begin(self._open(subscription, request, destination))
        self._by_number[subscription.number] = self._by_id[key] = subscription

    def _open(self, subscription: Subscription, request: Subscribe, destination: Destination) -> Source:
        """Return what brings the messages of *subscription*. Raises `StompError` and `Refused`."""
        topic, context, acknowledges = destination.topic, self._context, subscription.acknowledges
        group = durable_group(self._gate.identity.name, self._client_id, request, destination.kind)
        self._find_topic(topic)
        encoding = context.encodings.of(self._version, destination, is_acknowledged=acknowledges)
        prefetch = context.config.prefetch if request.prefetch is None else request.prefetch
        credit = subscription.prefetch = prefetch if acknowledges and prefetch else UNLIMITED
        selection = select(context.broker, request.selector)
        if destination.kind is Kind.TOPIC and not group:
            return self._gate.subscribe(
                subscription, topic, encoding, selection=selection, start=from_tail, credit=credit
            )
        if group:
            self._take_over(Durable(topic, group))
        member = self._gate.join(
            subscription,
            topic,
            group or GROUP,
            encoding,
            lease_s=math.inf if acknowledges else 0,
            credit=credit,
            start=from_tail if group else from_earliest,
            policy=context.policy,
            selection=selection if group else EVERYTHING,
            takes=selection.predicate if not group else None,
            is_exclusive=request.is_exclusive,
        )
        if group:
            subscription.durable = Durable(topic, group)
            context.durable[subscription.durable] = subscription
        return member

    def _browse(self, subscription: Subscription, request: Subscribe, destination: Destination) -> None:
        """Show what a queue has. Raises `StompError` and `Refused`."""
        context, topic = self._context, destination.topic
        if destination.kind is not Kind.QUEUE or destination.name:
            raise StompError(f"{shown(destination.text)} cannot be browsed, because it is no queue; subscribe to it")
        self._find_topic(topic)
        browse = Browse(self._gate.share(topic, GROUP, context.policy))
        encoding = context.encodings.of(self._version, destination, is_acknowledged=False)
        selection = select(context.broker, request.selector)
        reader = self._gate.subscribe(
            subscription, topic, encoding, selection=selection, start=browse.start, credit=UNLIMITED
        )
        subscription.begin(reader, browse)

    def _find_topic(self, topic: str) -> None:
        """Make sure that *topic* is there. Raises `Refused`."""
        if self._gate.find_topic(topic, "read", self._context.config.queues) is None:
            text = f"topic[{topic}] does not exist; create it, or set broker.auto_create_topics"
            raise Refused(Reason.NO_TOPIC, text)

    def _take_over(self, durable: Durable) -> None:
        """End the use of *durable* by another connection: its client may have come back. Raises `StompError`."""
        holder = self._context.durable.get(durable)
        if holder is not None and self._by_number.get(holder.number) is holder:
            raise StompError("the connection uses this durable subscription already; UNSUBSCRIBE from it first")
        if holder is not None:
            holder.lose("another connection uses its durable subscription")

    def lose(self, subscription: Subscription, reason: str) -> None:
        self._drop(subscription)
        self._end(reason)

    def unsubscribe(self, request: Unsubscribe) -> Steps[None] | None:
        """End a subscription; with its durable name, also what it has waiting. Raises `StompError`.

        Returns what is left to do, if that may take long.
        """
        subscription = self._by_id.get(_key(request.id, request.destination or ""))
        group = durable_group(self._gate.identity.name, self._client_id, request, Kind.TOPIC)
        if subscription is None and not group:
            what = f"id {shown(request.id)}" if request.id is not None else shown(request.destination or "")
            raise StompError(f"there is no subscription with {what}; use the id of SUBSCRIBE")
        durable = subscription.durable if subscription is not None else None
        if subscription is not None:
            self._drop(subscription)
        return self._forget(group, durable) if group else None

    def _forget(self, group: str, durable: Durable | None) -> Steps[None] | None:
        """End the durable subscription *group*, also if another connection uses it."""
        shares, policy = self._context.broker.shares, self._context.policy
        if durable is not None and durable.group == group:
            shares.forget(durable.topic, group, policy)
            return None
        for each, holder in list(self._context.durable.items()):
            if each.group == group:
                holder.lose("another connection ended its durable subscription")
        return shares.forget_groups(policy, (group,))  # its topic is not known

    def _drop(self, subscription: Subscription) -> None:
        self._by_number.pop(subscription.number, None)
        self._by_id.pop(_key(subscription.request.id, subscription.destination.text), None)
        self._ready.pop(subscription, None)
        self._close(subscription)

    def _close(self, subscription: Subscription) -> None:
        subscription.close()
        durable, table = subscription.durable, self._context.durable
        if durable is not None and table.get(durable) is subscription:
            del table[durable]

    def close(self) -> None:
        """End all: the client is gone."""
        for subscription in self._by_number.values():
            self._close(subscription)
        for table in self._by_number, self._by_id, self._ready:
            table.clear()

    # deliveries

    def ready(self, subscription: Subscription) -> None:
        self._ready[subscription] = None
        self._peer.wake()

    def collect(self, budget_bytes: int) -> None:
        """Send what is due, about *budget_bytes*. Raises `Refused`."""
        for subscription in list(self._ready):
            if budget_bytes <= 0:
                self._peer.wake()
                return
            del self._ready[subscription]
            if subscription.gone:
                raise Refused(Reason.NO_TOPIC, _end_of(subscription))
            budget_bytes -= subscription.deliver(budget_bytes)

    # acknowledgements

    def acknowledge(self, run: AckRun) -> None:
        """Settle messages, and answer receipts. Raises `StompError` if the client does not hold one of them."""
        subscriptions, queue_ids, offsets = run.subscriptions, run.queue_ids, run.offsets
        number, queue_id, count = subscriptions[0], queue_ids[0], len(offsets)
        if subscriptions.count(number) == queue_ids.count(queue_id) == count:
            settled = self._acknowledge(number, queue_id, offsets)
        else:
            settled = 0
            for (number, queue_id), group in groupby(
                zip(subscriptions, queue_ids, offsets, strict=True), key=lambda place: place[:2]
            ):
                some = [offset for _, _, offset in group]
                done = self._acknowledge(number, queue_id, some)
                settled += done
                if done < len(some):
                    break
        if settled < count:
            self._answer([run.receipts[place] for place, at in enumerate(run.asking) if at < settled])
            text = _not_held("ACK", subscriptions[settled], queue_ids[settled], offsets[settled])
            raise StompError(text, run.receipt_of(settled))
        self._answer(run.receipts)

    def _acknowledge(self, number: int, queue_id: int, offsets: Sequence[int]) -> int:
        """Settle messages; return how many the client held, up to the first that it did not."""
        subscription = self._by_number.get(number)
        if subscription is None:
            # What it held of a subscription that has ended, others have by now.
            return len(offsets) if number <= self._last_number else 0
        return subscription.acknowledge(queue_id, offsets)

    def refuse(self, nack: Nack) -> None:
        """Take NACK. Raises `StompError` if the client does not hold the message."""
        number, queue_id, offset = nack.place
        subscription = self._by_number.get(number)
        if subscription is None and number <= self._last_number:
            return
        if subscription is None or not subscription.refuse(queue_id, offset, requeue=nack.requeue):
            raise StompError(_not_held("NACK", number, queue_id, offset))

    def reserve(self, command: str, number: int, queue_id: int, offset: int) -> tuple[Subscription, list[Part]]:
        """Return what ACK or NACK in a transaction is for. Raises `StompError` if the client does not hold it."""
        subscription = self._by_number.get(number)
        parts = subscription.reserve(queue_id, offset) if subscription is not None else []
        if subscription is None or not parts:
            raise StompError(_not_held(command, number, queue_id, offset))
        return subscription, parts

    def _answer(self, receipts: Sequence[bytes]) -> None:
        if receipts:
            self._context.counters.receipts += len(receipts)
            self._peer.hold_until(NEXT_COMMIT)
            self._peer.send(encode_receipts(receipts))


def _key(subscription_id: str | None, destination: str) -> str:
    """Return what identifies a subscription of a connection; with STOMP 1.0 its id may be missing."""
    return f"id {subscription_id}" if subscription_id is not None else f"destination {destination}"


def _not_held(command: str, number: int, queue_id: int, offset: int) -> str:
    text = f"{command} is for message {number}-{queue_id}-{offset}, which the client does not hold"
    return f"{text}; acknowledge each message once, with ack:client or ack:client-individual"


def _end_of(subscription: Subscription) -> str:
    return f"destination {shown(subscription.destination.text)} was deleted, or may not be read any more"
