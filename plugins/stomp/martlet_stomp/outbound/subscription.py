"""One subscription of a client: what it brings, and what the client says about it.

A queue is a shared group of the core on the platform topic, so each message is with one client. With ``ack:auto`` a
message is settled when it is sent; otherwise it is leased until the client acknowledges it, and returns if the client
goes. A topic is read by each subscription from its end on. There, acknowledgements only say how many more messages the
client wants.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final

from martlet.contracts import Peer
from martlet.delivery.subscriptions import Delivery, TopicSubscription
from martlet.errors import Reason, Refused
from martlet.groups.member import Member
from martlet.state.journal import Journal
from martlet_stomp.mapping.destinations import Destination
from martlet_stomp.mapping.encoding import message_head
from martlet_stomp.mapping.groups import Durable
from martlet_stomp.outbound.browsing import Browse, last_frame
from martlet_stomp.shared.context import Counters
from martlet_stomp.shared.following import Followed, Follower
from martlet_stomp.wire.errors import shown
from martlet_stomp.wire.packets import AckMode, Subscribe, Version

__all__ = ["UNLIMITED", "Ledger", "Outstanding", "SentPart", "Source", "Subscription", "SubscriptionOwner"]

UNLIMITED: Final = 1 << 60
# Frames from here on are not copied for each subscriber.
LARGE_BYTES: Final = 1 << 15

Source: TypeAlias = Member | TopicSubscription | Follower


class Ledger(Protocol):
    """Messages that a client was sent and has not acknowledged; a `Member` of a group is one."""

    def holds(self, queue_id: int, offset: int) -> bool: ...

    def ack_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]: ...

    def nack_all(self, queue_id: int, offsets: Sequence[int], delay_s: float = 0) -> Sequence[int]: ...

    def give_up_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]: ...


@final
class Outstanding:
    """The ledger of a topic's subscription: a message that is settled gives its credit back, and nothing else."""

    __slots__ = ("_held", "_reader")

    def __init__(self, reader: TopicSubscription | Follower) -> None:
        self._reader = reader
        self._held: dict[int, dict[int, None]] = {}

    def add(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Note that the client was sent messages."""
        self._held.setdefault(queue_id, {}).update(dict.fromkeys(offsets))

    def holds(self, queue_id: int, offset: int) -> bool:
        return offset in self._held.get(queue_id, ())

    def ack_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        held = self._held.get(queue_id, {})
        settled = [offset for offset in dict.fromkeys(offsets) if offset in held]
        for offset in settled:
            del held[offset]
        self._reader.add_credit(len(settled))
        return settled

    def nack_all(self, queue_id: int, offsets: Sequence[int], delay_s: float = 0) -> Sequence[int]:
        return self.ack_all(queue_id, offsets)

    def give_up_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        return self.ack_all(queue_id, offsets)


@final
class SentPart(NamedTuple):
    """Messages of one queue; with cumulative acknowledgements, ``number`` is that of the first in the order sent."""

    queue_id: int
    offsets: Sequence[int]
    number: int = 0


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
        "_ledger",
        "_owner",
        "_peer",
        "_sent",
        "_sent_count",
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
        self._ledger: Ledger | None = None  # if the client acknowledges messages
        # With cumulative acknowledgements: what was sent and is not acknowledged, in that order.
        self._sent: deque[SentPart] = deque()
        self._sent_count = 0

    def begin(self, source: Source, browse: Browse | None = None) -> None:
        """Deliver what *source* brings; with *browse*, what it wants of that."""
        self._source, self._browse = source, browse
        if browse is not None:
            self.wake()  # there may be nothing to show
        if self.acknowledges:
            self._ledger = source if isinstance(source, Member) else Outstanding(source)

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
        source, self._source, self._ledger = self._source, None, None
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
        frames, offsets, ledger = delivery.frames, delivery.offsets, self._ledger
        if not all(frames):
            if ledger is not None:
                if isinstance(ledger, Outstanding):
                    ledger.add(delivery.queue_id, offsets)
                ledger.ack_all(delivery.queue_id, list(compress(offsets, map(not_, frames))))
            offsets = list(compress(offsets, frames))
            frames = list(filter(None, frames))
            if not frames:
                return
        if isinstance(ledger, Outstanding):
            ledger.add(delivery.queue_id, offsets)
        if self.request.ack is AckMode.CLIENT:
            self._sent.append(SentPart(delivery.queue_id, offsets, self._sent_count))
            self._sent_count += len(offsets)
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

    # acknowledgements

    def acknowledge(self, queue_id: int, offsets: Sequence[int]) -> int:
        """Settle messages, with cumulative acknowledgements also those before each.

        Returns how many of *offsets* the client held, up to the first that it did not.
        """
        return self._settle(queue_id, offsets, self._acked)

    def refuse(self, queue_id: int, offset: int, *, requeue: bool) -> bool:
        """Take NACK: the message, with cumulative acknowledgements also those before it, comes again or is dead.

        Returns whether the client held it.
        """
        return self._settle(queue_id, (offset,), self._nacked if requeue else self._buried) == 1

    def _settle(
        self, queue_id: int, offsets: Sequence[int], settle: Callable[[int, Sequence[int]], Sequence[int]]
    ) -> int:
        if self._ledger is None:
            return 0
        if self.request.ack is AckMode.CLIENT:
            return self._settle_cumulatively(queue_id, offsets, settle)
        settled = settle(queue_id, offsets)
        return len(offsets) if len(settled) == len(offsets) else _held_first(offsets, settled)

    def _acked(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        settled = self._ledger.ack_all(queue_id, offsets) if self._ledger is not None else ()
        self._counters.acknowledged += len(settled)
        return settled

    def _nacked(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        failed = self._ledger.nack_all(queue_id, offsets) if self._ledger is not None else ()
        self._counters.failed += len(failed)
        return failed

    def _buried(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        failed = self._ledger.give_up_all(queue_id, offsets) if self._ledger is not None else ()
        self._counters.failed += len(failed)
        return failed

    def _settle_cumulatively(
        self, queue_id: int, offsets: Sequence[int], settle: Callable[[int, Sequence[int]], Sequence[int]]
    ) -> int:
        first = self._sent[0] if self._sent else None
        if len(offsets) > 1 and first is not None and first.queue_id == queue_id and _is_part(offsets, first.offsets):
            self._settle_up_to(queue_id, offsets[-1], settle)  # the others are before it
            return len(offsets)
        for index, offset in enumerate(offsets):
            if not self._settle_up_to(queue_id, offset, settle):
                return index
        return len(offsets)

    def _settle_up_to(self, queue_id: int, offset: int, settle: Callable[[int, Sequence[int]], Sequence[int]]) -> bool:
        """Settle a message and all that were sent before it; return False if the client does not hold it."""
        found = self._take_up_to(queue_id, offset)
        for part in found:
            settle(part.queue_id, part.offsets)
        return bool(found)

    def _take_up_to(self, queue_id: int, offset: int) -> list[SentPart]:
        """Take a message, and all that were sent before it, out of what was sent; nothing if it is not there."""
        parts = enumerate(self._sent)
        place = next((i for i, part in parts if part.queue_id == queue_id and offset in part.offsets), -1)
        if place < 0:
            return []
        found = [self._sent.popleft() for _ in range(place + 1)]
        _, offsets, number = found[place]
        end = offsets.index(offset) + 1
        if end < len(offsets):
            self._sent.appendleft(SentPart(queue_id, offsets[end:], number + end))
            found[place] = SentPart(queue_id, offsets[:end], number)
        return found

    # transactions

    def reserve(self, queue_id: int, offset: int) -> list[SentPart]:
        """Return what an acknowledgement in a transaction is for; nothing if the client does not hold the message.

        Cumulative acknowledgements after this one do not include that.
        """
        ledger = self._ledger
        if ledger is None or not ledger.holds(queue_id, offset):
            return []
        if self.request.ack is AckMode.CLIENT:
            return self._take_up_to(queue_id, offset)
        return [SentPart(queue_id, (offset,))]

    def restore(self, parts: Sequence[SentPart]) -> None:
        """Undo `reserve` for all *parts*, which are in the order in which they were reserved."""
        if self.request.ack is AckMode.CLIENT:
            # What other transactions gave back before may have been sent earlier.
            self._sent = deque(sorted(chain(parts, self._sent), key=attrgetter("number")))

    def check_open(self) -> None:
        """Raise `Refused` if the subscription has ended."""
        if self._source is None:
            text = f"the subscription to {shown(self.destination.text)} has ended, and others have its messages"
            raise Refused(Reason.NOT_FOUND, text)

    def acknowledgements(self, parts: Sequence[SentPart]) -> list[tuple[Journal, bytes]]:
        """Return the acknowledgements of *parts* for an atomic group. Raises `Refused` as `Member.acknowledgements`."""
        self.check_open()
        ledger = self._ledger
        if not isinstance(ledger, Member):
            return []
        found: list[tuple[Journal, bytes]] = []
        for done, (queue_id, offsets, _) in enumerate(parts):
            try:
                found += ledger.acknowledgements(queue_id, offsets)
            except Refused:
                self.withdraw(parts[:done])
                raise
        return found

    def withdraw(self, parts: Sequence[SentPart]) -> None:
        """Undo `acknowledgements`: the atomic group was refused."""
        if isinstance(self._ledger, Member):
            for part in parts:
                self._ledger.withdraw(part.queue_id, part.offsets)

    def committed(self, parts: Sequence[SentPart]) -> None:
        """Note that the atomic group with the acknowledgements of *parts* was appended."""
        for queue_id, offsets, _ in parts:
            self._counters.acknowledged += len(offsets)
            if isinstance(self._ledger, Outstanding):
                self._ledger.ack_all(queue_id, offsets)

    def failed(self, parts: Sequence[SentPart], *, requeue: bool) -> None:
        """Take NACK for *parts*."""
        for part in parts:
            (self._nacked if requeue else self._buried)(part.queue_id, part.offsets)


def _held_first(offsets: Sequence[int], settled: Sequence[int]) -> int:
    """Return how many of *offsets* there are before the first that is not among *settled*, or is there again."""
    left: dict[Hashable, None] = dict.fromkeys(settled)
    for index, offset in enumerate(offsets):
        if offset not in left:
            return index
        del left[offset]
    return len(offsets)


def _is_part(offsets: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether *offsets* are some consecutive ones of *whole*."""
    if offsets[0] not in whole:
        return False
    at = whole.index(offsets[0])
    return list(offsets) == list(whole[at : at + len(offsets)])
