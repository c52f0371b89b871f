"""One subscription of a client: the delivery of its messages, and its unacknowledged messages (`unacknowledged.py`).

A queue is a shared group of the core on the platform topic, so each message goes to one client. With ``ack:auto`` a
message is settled when it is sent; otherwise it is leased until the client acknowledges it, and returns to the queue if
the client is gone. Each subscription to a topic reads it from its end on; acknowledgements only give credit for more
messages.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, compress
from operator import not_
from typing import Any, Final, Protocol, TypeAlias, final

from martlet.contracts import Peer
from martlet.delivery.subscriptions import Delivery, TopicSubscription
from martlet.groups.member import Member
from martlet_stomp.mapping.destinations import Destination
from martlet_stomp.mapping.encoding import message_head
from martlet_stomp.mapping.groups import Durable
from martlet_stomp.outbound.browsing import Browse, last_frame
from martlet_stomp.outbound.unacknowledged import Unacknowledged
from martlet_stomp.shared.context import Context
from martlet_stomp.shared.following import Followed, Follower
from martlet_stomp.wire.packets import AckMode, Subscribe, Version

__all__ = ["UNLIMITED", "Source", "Subscription", "SubscriptionOwner"]

UNLIMITED: Final = 1 << 60
# Frames of this size and above are not copied for each subscriber.
LARGE_BYTES: Final = 1 << 15

Source: TypeAlias = Member | TopicSubscription | Follower


class SubscriptionOwner(Protocol):
    """The subscriptions of a client, as their owner."""

    def ready(self, subscription: "Subscription") -> None:
        """Note that *subscription* may have messages to deliver."""
        ...

    def lose(self, subscription: "Subscription", reason: str) -> None:
        """End the connection of *subscription*, for *reason*."""
        ...


@final
class Subscription:
    """One subscription, the peer of its source (`martlet.delivery.subscriptions.MemberPeer`).

    ``number`` is unique on the connection, ``durable`` is set if the subscription outlives the connection, and
    ``prefetch`` is the number of messages that the client may hold.
    """

    __slots__ = (
        "_browse",
        "_counters",
        "_heads",
        "_joined",
        "_owner",
        "_peer",
        "_source",
        "_version",
        "destination",
        "durable",
        "follows",
        "key",
        "number",
        "parts",
        "prefetch",
        "request",
        "unacknowledged",
    )

    def __init__(
        self,
        peer: Peer,
        owner: SubscriptionOwner,
        context: Context,
        request: Subscribe,
        destination: Destination,
        number: int,
        version: Version,
    ) -> None:
        self._peer = peer
        self._owner = owner
        self._counters = context.counters
        self._joined = context.joined
        self._version = version
        self.request = request
        self.destination = destination
        self.number = number
        self.key = ""  # key among the client's subscriptions
        self.parts: dict[str, Subscription] | None = None  # all parts of the `Pattern` of which this is a part
        self.follows = False  # `Pattern.follows` of that pattern
        self.durable: Durable | None = None
        self.prefetch = UNLIMITED
        self._heads: dict[int, bytes] = {}  # by the number of deliveries
        self._source: Source | None = None
        self._browse: Browse | None = None
        is_cumulative = request.ack is AckMode.CLIENT
        self.unacknowledged = Unacknowledged(context.counters, destination.text, is_cumulative=is_cumulative)

    def begin(self, source: Source, browse: Browse | None = None) -> None:
        """Deliver the messages of *source*; with *browse*, only the messages that it wants."""
        self._source, self._browse = source, browse
        if browse is not None:
            self.wake()  # even without messages, to send the last frame
        if self.acknowledges:
            self.unacknowledged.begin(source)

    @property
    def acknowledges(self) -> bool:
        """Whether the client acknowledges messages."""
        return self.request.ack is not AckMode.AUTO and not self.request.is_browser

    @property
    def gone(self) -> bool:
        """Whether the topic was deleted or closed to readers."""
        source = self._source
        if isinstance(source, Member):
            return source.group.gone
        return isinstance(source, TopicSubscription) and source.gone

    def described(self) -> dict[str, object]:
        """Return a row of the list of subscriptions; ``held`` is the number of unacknowledged messages."""
        request, source, durable = self.request, self._source, self.durable
        is_bounded = self.acknowledges and source is not None and self.prefetch < UNLIMITED
        return {
            "id": request.id,
            "destination": self.destination.text,
            "ack": request.ack.name.lower().replace("_", "-"),
            "held": self.prefetch - source.credit if is_bounded and source is not None else None,
            "prefetch": self.prefetch if is_bounded else None,
            "selector": request.selector,
            "durable": durable.group if durable is not None else None,
            "exclusive": request.is_exclusive,
        }

    @property
    def position(self) -> int | None:
        """The log position before which all messages were delivered; None unless the source is a `Follower`."""
        return self._source.position if isinstance(self._source, Follower) else None

    def wake(self) -> None:
        self._owner.ready(self)

    def lose(self, reason: str) -> None:
        """End the connection of the client, for *reason*."""
        self._owner.lose(self, reason)

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._peer.start(work, *args)

    def close(self) -> None:
        """End the subscription; messages that the client holds go to other consumers."""
        member = self.end()
        if member is not None:
            member.leave()

    def end(self) -> Member | None:
        """End the subscription; return its member of a group, which the caller must make leave, or None."""
        source, self._source = self._source, None
        self.unacknowledged.end()
        if isinstance(source, Member):
            return source
        if source is not None:
            source.close()
        return None

    # messages

    def deliver(self, budget_bytes: int) -> int:
        """Send about *budget_bytes* of messages; return their size in bytes. Raises `Refused`."""
        size = 0
        if self._source is not None:
            for delivery in self._source.collect(budget_bytes):
                size += delivery.size
                if self._browse is None:
                    self._send(delivery)
                else:
                    self._send_browsed(delivery, self._browse)
        if self._browse is not None:
            self._end_if_over(self._browse)
        return size

    def _send_browsed(self, delivery: Delivery | Followed, browse: Browse) -> None:
        is_wanted = browse.wanted(delivery.queue_id, delivery.offsets)
        frames = [frame for frame in compress(delivery.frames, is_wanted) if frame]
        if frames:
            head = self._heads.get(1) or self._head(1)
            self._counters.delivered += len(frames)
            self._send_frames(head, frames)

    def _end_if_over(self, browse: Browse) -> None:
        source = self._source
        if isinstance(source, TopicSubscription) and browse.is_over(source):
            self._peer.send(last_frame(self.request.id, self.number, self.destination.text, self._version))
            self.close()

    def _send(self, delivery: Delivery | Followed) -> None:
        frames, offsets = delivery.frames, delivery.offsets
        if not all(frames):
            self.unacknowledged.skip(delivery.queue_id, list(compress(offsets, map(not_, frames))))
            offsets = list(compress(offsets, frames))
            frames = list(filter(None, frames))
            if not frames:
                return
        self.unacknowledged.add(delivery.queue_id, offsets)
        head = self._heads.get(delivery.delivery) or self._head(delivery.delivery)
        self._counters.delivered += len(frames)
        self._send_frames(head, frames)

    def _send_frames(self, head: bytes, frames: Sequence[bytes]) -> None:
        """Send *frames*, each after *head*; does not copy large frames."""
        if len(frames) == 1:
            self._peer.send(head, frames[0])
        elif (joined := self._joined.find(head, frames)) is not None:
            self._peer.send(head, joined)
        elif max(map(len, frames)) >= LARGE_BYTES:
            self._peer.send(*chain.from_iterable([(head, frame) for frame in frames]))
        else:
            self._peer.send(head, self._joined.join(head, frames))

    def _head(self, delivery: int) -> bytes:
        if len(self._heads) > 16:
            self._heads.clear()
        head = self._heads[delivery] = message_head(
            self.request.id,
            self.number,
            self.destination.topic,
            self._version,
            is_acknowledged=self.acknowledges,
            delivery=delivery,
        )
        return head
