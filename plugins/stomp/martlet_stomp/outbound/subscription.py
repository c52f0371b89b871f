"""One subscription of a client: its source, and the messages that it sends; see `unacknowledged.py` for the rest.

A queue is a shared group of the core on the platform topic, so each message is with one client. With ``ack:auto`` a
message is settled when it is sent; otherwise it is leased until the client acknowledges it, and returns if the client
goes. A topic is read by each subscription from its end on. There, acknowledgements only say how many more messages the
client wants.
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
from martlet_stomp.shared.context import Counters
from martlet_stomp.shared.following import Followed, Follower
from martlet_stomp.wire.packets import AckMode, Subscribe, Version

__all__ = ["UNLIMITED", "Source", "Subscription", "SubscriptionOwner"]

UNLIMITED: Final = 1 << 60
# Frames from here on are not copied for each subscriber.
LARGE_BYTES: Final = 1 << 15

Source: TypeAlias = Member | TopicSubscription | Follower


class SubscriptionOwner(Protocol):
    """Who has a subscription: all those of its client."""

    def ready(self, subscription: "Subscription") -> None:
        """Have *subscription* deliver soon."""
        ...

    def lose(self, subscription: "Subscription", reason: str) -> None:
        """End the connection of *subscription*, for *reason*."""
        ...


@final
class Subscription:
    """One subscription; it is the peer of its source (`martlet.delivery.subscriptions.MemberPeer`).

    ``number`` is its own on this connection, and ``durable`` says what it is if it outlives that. The client may hold
    ``prefetch`` messages.
    """

    __slots__ = (
        "_browse",
        "_counters",
        "_heads",
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
        counters: Counters,
        request: Subscribe,
        destination: Destination,
        number: int,
        version: Version,
    ) -> None:
        self._peer = peer
        self._owner = owner
        self._counters = counters
        self._version = version
        self.request = request
        self.destination = destination
        self.number = number
        self.key = ""  # among those of its client
        self.parts: dict[str, Subscription] | None = None  # of the subscription with wildcards that it is one of
        self.follows = False  # whether those are the topics that match, as they come and go
        self.durable: Durable | None = None
        self.prefetch = UNLIMITED
        self._heads: dict[int, bytes] = {}  # by the number of the delivery
        self._source: Source | None = None
        self._browse: Browse | None = None
        is_cumulative = request.ack is AckMode.CLIENT
        self.unacknowledged = Unacknowledged(counters, destination.text, is_cumulative=is_cumulative)

    def begin(self, source: Source, browse: Browse | None = None) -> None:
        """Deliver what *source* brings; with *browse*, what it wants of that."""
        self._source, self._browse = source, browse
        if browse is not None:
            self.wake()  # there may be nothing to show
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
        """Return what a list of subscriptions says about it; ``held`` is what is not acknowledged yet."""
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
        """The log position before which it has brought everything; None unless it follows names."""
        return self._source.position if isinstance(self._source, Follower) else None

    def wake(self) -> None:
        self._owner.ready(self)

    def lose(self, reason: str) -> None:
        """End the connection, for *reason*."""
        self._owner.lose(self, reason)

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._peer.start(work, *args)

    def close(self) -> None:
        """End; what the client holds goes to others."""
        member = self.end()
        if member is not None:
            member.leave()

    def end(self) -> Member | None:
        """End, but for a member of a group, which is returned and must leave."""
        source, self._source = self._source, None
        self.unacknowledged.end()
        if isinstance(source, Member):
            return source
        if source is not None:
            source.close()
        return None

    # messages

    def deliver(self, budget_bytes: int) -> int:
        """Send messages, about *budget_bytes*; return their size. Raises `Refused`."""
        size = 0
        if self._source is not None:
            for delivery in self._source.collect(budget_bytes):
                size += delivery.size
                if self._browse is None:
                    self._send(delivery)
                else:
                    self._show(delivery, self._browse)
        if self._browse is not None:
            self._end_if_over(self._browse)
        return size

    def _show(self, delivery: Delivery | Followed, browse: Browse) -> None:
        wanted = browse.wanted(delivery.queue_id, delivery.offsets)
        frames = [frame for frame in compress(delivery.frames, wanted) if frame]
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
        """Send *frames*, each after *head*; subscribers share large ones."""
        if len(frames) > 1 and max(map(len, frames)) >= LARGE_BYTES:
            self._peer.send(*chain.from_iterable([(head, frame) for frame in frames]))
        else:
            self._peer.send(head, head.join(frames))

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
