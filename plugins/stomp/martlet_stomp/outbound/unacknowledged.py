"""Unacknowledged messages of one subscription: messages sent to the client and not acknowledged by it.

A queue is a shared group of the core, whose member settles its messages. Settling a message of a topic only returns its
credit.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple, Protocol, final

from martlet.delivery.subscriptions import TopicSubscription
from martlet.errors import Reason, Refused
from martlet.groups.member import Member
from martlet.state.journal import Journal
from martlet_stomp.shared.context import Counters
from martlet_stomp.shared.following import Follower
from martlet_stomp.wire.errors import shown

__all__ = ["Ledger", "Outstanding", "SentPart", "Unacknowledged"]


class Ledger(Protocol):
    """A record of unacknowledged messages; a `Member` of a group is one.

    The methods named ``_all`` settle messages, and return the offsets that the client held.
    """

    def holds(self, queue_id: int, offset: int) -> bool: ...

    def ack_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]: ...

    def nack_all(self, queue_id: int, offsets: Sequence[int], delay_s: float = 0) -> Sequence[int]: ...

    def give_up_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]: ...


@final
class Outstanding:
    """The ledger of a subscription to a topic: settling a message only returns its credit."""

    __slots__ = ("_held", "_reader")

    def __init__(self, reader: TopicSubscription | Follower) -> None:
        self._reader = reader
        self._held: dict[int, dict[int, None]] = {}

    def add(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Note that messages were sent to the client."""
        self._held.setdefault(queue_id, {}).update(dict.fromkeys(offsets))

    def holds(self, queue_id: int, offset: int) -> bool:
        return offset in self._held.get(queue_id, ())

    def ack_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        held_offsets = self._held.get(queue_id, {})
        settled = [offset for offset in dict.fromkeys(offsets) if offset in held_offsets]
        for offset in settled:
            del held_offsets[offset]
        self._reader.add_credit(len(settled))
        return settled

    def nack_all(self, queue_id: int, offsets: Sequence[int], delay_s: float = 0) -> Sequence[int]:
        return self.ack_all(queue_id, offsets)

    def give_up_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        return self.ack_all(queue_id, offsets)


@final
class SentPart(NamedTuple):
    """Messages of one queue. With cumulative acknowledgements, ``number`` counts the messages sent before the first."""

    queue_id: int
    offsets: Sequence[int]
    number: int = 0


@final
class Unacknowledged:
    """The unacknowledged messages of a subscription to *destination*, between `begin` and `end`.

    If it *is_cumulative*, an acknowledgement of a message is also for all messages sent before it.
    """

    __slots__ = ("_counters", "_destination", "_is_cumulative", "_ledger", "_sent", "_sent_count")

    def __init__(self, counters: Counters, destination: str, *, is_cumulative: bool) -> None:
        self._counters = counters
        self._destination = destination
        self._is_cumulative = is_cumulative
        self._ledger: Ledger | None = None
        # With cumulative acknowledgements: the unacknowledged messages in the order sent.
        self._sent: deque[SentPart] = deque()
        self._sent_count = 0

    def begin(self, source: Member | TopicSubscription | Follower) -> None:
        """Keep account of the messages of *source* from now on."""
        self._ledger = source if isinstance(source, Member) else Outstanding(source)

    def end(self) -> None:
        self._ledger = None

    def add(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Note that messages were sent to the client."""
        if isinstance(self._ledger, Outstanding):
            self._ledger.add(queue_id, offsets)
        if self._is_cumulative:
            self._sent.append(SentPart(queue_id, offsets, self._sent_count))
            self._sent_count += len(offsets)

    def skip(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Settle messages of the source that are not sent to the client."""
        ledger = self._ledger
        if isinstance(ledger, Outstanding):
            ledger.add(queue_id, offsets)
        if ledger is not None:
            ledger.ack_all(queue_id, offsets)

    def acknowledge(self, queue_id: int, offsets: Sequence[int]) -> int:
        """Handle ACK for messages; a cumulative ACK is also for the messages before each.

        Returns the number of *offsets* before the first that the client does not hold.
        """
        return self._settle(queue_id, offsets, self._ack)

    def refuse(self, queue_id: int, offset: int, *, requeue: bool) -> bool:
        """Handle NACK for a message; a cumulative NACK is also for the messages before it.

        A refused message is delivered again, or without *requeue* becomes a dead letter. Returns whether the client
        held the message.
        """
        return self._settle(queue_id, (offset,), self._nack if requeue else self._bury) == 1

    def _settle(
        self, queue_id: int, offsets: Sequence[int], settle: Callable[[int, Sequence[int]], Sequence[int]]
    ) -> int:
        if self._ledger is None:
            return 0
        if self._is_cumulative:
            return self._settle_cumulatively(queue_id, offsets, settle)
        settled = settle(queue_id, offsets)
        return len(offsets) if len(settled) == len(offsets) else _count_before_unheld(offsets, settled)

    def _ack(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        settled = self._ledger.ack_all(queue_id, offsets) if self._ledger is not None else ()
        self._counters.acknowledged += len(settled)
        return settled

    def _nack(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        failed = self._ledger.nack_all(queue_id, offsets) if self._ledger is not None else ()
        self._counters.failed += len(failed)
        return failed

    def _bury(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        failed = self._ledger.give_up_all(queue_id, offsets) if self._ledger is not None else ()
        self._counters.failed += len(failed)
        return failed

    def _settle_cumulatively(
        self, queue_id: int, offsets: Sequence[int], settle: Callable[[int, Sequence[int]], Sequence[int]]
    ) -> int:
        head = self._sent[0] if self._sent else None
        if len(offsets) > 1 and head is not None and head.queue_id == queue_id and _is_slice(offsets, head.offsets):
            self._settle_up_to(queue_id, offsets[-1], settle)  # the other offsets were sent before this one
            return len(offsets)
        for index, offset in enumerate(offsets):
            if not self._settle_up_to(queue_id, offset, settle):
                return index
        return len(offsets)

    def _settle_up_to(self, queue_id: int, offset: int, settle: Callable[[int, Sequence[int]], Sequence[int]]) -> bool:
        """Settle a message and all messages sent before it; return False if the client does not hold it."""
        parts = self._take_up_to(queue_id, offset)
        for part in parts:
            settle(part.queue_id, part.offsets)
        return bool(parts)

    def _take_up_to(self, queue_id: int, offset: int) -> list[SentPart]:
        """Remove and return a message and all messages sent before it; empty if the client does not hold it."""
        numbered_parts = enumerate(self._sent)
        index = next((i for i, part in numbered_parts if part.queue_id == queue_id and offset in part.offsets), -1)
        if index < 0:
            return []
        parts = [self._sent.popleft() for _ in range(index + 1)]
        _, offsets, number = parts[index]
        end = offsets.index(offset) + 1
        if end < len(offsets):
            self._sent.appendleft(SentPart(queue_id, offsets[end:], number + end))
            parts[index] = SentPart(queue_id, offsets[:end], number)
        return parts

    # transactions

    def reserve(self, queue_id: int, offset: int) -> list[SentPart]:
        """Return the messages that an acknowledgement in a transaction is for; empty if the client holds none.

        Later cumulative acknowledgements do not include them.
        """
        ledger = self._ledger
        if ledger is None or not ledger.holds(queue_id, offset):
            return []
        if self._is_cumulative:
            return self._take_up_to(queue_id, offset)
        return [SentPart(queue_id, (offset,))]

    def restore(self, parts: Sequence[SentPart]) -> None:
        """Undo `reserve` for all *parts*, in the order in which they were reserved."""
        if self._is_cumulative:
            # Sorted, because parts restored by other transactions may have been sent earlier.
            self._sent = deque(sorted(chain(parts, self._sent), key=attrgetter("number")))

    def check_open(self) -> None:
        """Raise `Refused` if the subscription has ended."""
        if self._ledger is None:
            text = f"the subscription to {shown(self._destination)} has ended, and others have its messages"
            raise Refused(Reason.NOT_FOUND, text)

    def notes(self, parts: Sequence[SentPart]) -> list[tuple[Journal, bytes]]:
        """Return the acknowledgements of *parts* for an atomic group. Raises `Refused` as `Member.acknowledgements`."""
        self.check_open()
        ledger = self._ledger
        if not isinstance(ledger, Member):
            return []
        notes: list[tuple[Journal, bytes]] = []
        for noted_count, (queue_id, offsets, _) in enumerate(parts):
            try:
                notes += ledger.acknowledgements(queue_id, offsets)
            except Refused:
                self.withdraw(parts[:noted_count])
                raise
        return notes

    def withdraw(self, parts: Sequence[SentPart]) -> None:
        """Undo `notes`, because the atomic group was refused."""
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
        """Handle NACK for *parts*."""
        for part in parts:
            (self._nack if requeue else self._bury)(part.queue_id, part.offsets)


def _count_before_unheld(offsets: Sequence[int], settled: Sequence[int]) -> int:
    """Return the number of *offsets* before the first that is not in *settled*, or is repeated."""
    offsets_left: dict[Hashable, None] = dict.fromkeys(settled)
    for index, offset in enumerate(offsets):
        if offset not in offsets_left:
            return index
        del offsets_left[offset]
    return len(offsets)


def _is_slice(offsets: Sequence[int], all_offsets: Sequence[int]) -> bool:
    """Return whether *offsets* is a slice of *all_offsets*."""
    if offsets[0] not in all_offsets:
        return False
    at = all_offsets.index(offsets[0])
    return list(offsets) == list(all_offsets[at : at + len(offsets)])
