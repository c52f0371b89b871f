"""Work for the end of a round, collected for all peers, and the total of their unsent output."""

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Generic, Protocol, TypeVar, final

import trio

__all__ = ["DELIVERY_TRANSITIONS", "Delivering", "DeliveryState", "PendingWork", "set_delivery"]


class DeliveryState(IntEnum):
    """Whether `Handler.collect` of a peer must be called."""

    IDLE = 0  # not woken
    QUEUED = 1  # woken, and in the queue
    QUEUED_LAST = 2  # woken by `wake_last` alone, and in the queue of those that come last
    NO_ROOM = 3  # woken; it is queued once enough of its output has been sent
    NO_ROOM_LAST = 4  # the same, in the queue of those that come last


IDLE: Final = DeliveryState.IDLE
QUEUED: Final = DeliveryState.QUEUED
QUEUED_LAST: Final = DeliveryState.QUEUED_LAST
NO_ROOM: Final = DeliveryState.NO_ROOM
NO_ROOM_LAST: Final = DeliveryState.NO_ROOM_LAST

DELIVERY_TRANSITIONS: Final[dict[DeliveryState, frozenset[DeliveryState]]] = {
    IDLE: frozenset({QUEUED, QUEUED_LAST}),
    QUEUED: frozenset({IDLE, NO_ROOM}),
    QUEUED_LAST: frozenset({IDLE, NO_ROOM_LAST}),
    NO_ROOM: frozenset({QUEUED}),
    NO_ROOM_LAST: frozenset({QUEUED, QUEUED_LAST}),
}


class Delivering(Protocol):
    """A peer, as the queues of woken peers see it."""

    delivery: DeliveryState


T = TypeVar("T", bound=Delivering)


@final
class PendingWork(Generic[T]):
    """The work that `martlet.net.rounds.Rounds` does at the end of a round; *T* is a peer.

    A round is the work between two turns of the event loop: the requests of one or several socket reads, a deadline, or
    a completed flush. While `in_round` is set, the running code ends the round itself. Work added at other times, for
    example in a task of a plugin, sets `due`.
    """

    __slots__ = (
        "before_commit",
        "commit_wanted",
        "due",
        "held",
        "in_round",
        "releasing",
        "touched",
        "unsent_bytes",
        "want_durable",
        "woken",
        "woken_last",
    )

    def __init__(self) -> None:
        self.in_round = False
        # Peers and what to call for them at the end of the round, before the commit.
        self.before_commit: list[tuple[T, Callable[[], None]]] = []
        self.commit_wanted = False  # whether a record was appended
        self.due = trio.Event()
        self.touched: list[T] = []  # peers with new answers, or with answers that must be held
        self.woken: deque[T] = deque()  # peers that asked for a call of `Handler.collect`
        self.woken_last: deque[T] = deque()  # the same, to be called after all others
        self.held: dict[T, None] = {}  # peers with answers that wait for a flush
        self.releasing = False  # whether the next round must continue to release held answers
        self.unsent_bytes = 0
        # Called with the log position that the held answers of a peer wait for.
        self.want_durable: Callable[[int], None] = lambda position: None

    def call_before_commit(self, peer: T, work: Callable[[], None]) -> None:
        """Request a call of *work* for *peer* at the end of this round, before its commit."""
        self.before_commit.append((peer, work))
        if not self.in_round:
            self.due.set()

    def want_commit(self) -> None:
        """Request a commit at the end of this round."""
        self.commit_wanted = True
        if not self.in_round:
            self.due.set()

    def touch(self, peer: T) -> None:
        """Request that the output of *peer* is queued at the end of this round."""
        self.touched.append(peer)
        if not self.in_round:
            self.due.set()

    def wake(self, peer: T) -> None:
        """Request a call of `Handler.collect` for *peer* at the end of this round or a later one."""
        if peer.delivery is QUEUED or peer.delivery is QUEUED_LAST:
            return
        set_delivery(peer, QUEUED)
        self.woken.append(peer)
        if not self.in_round:
            self.due.set()

    def wake_last(self, peer: T) -> None:
        """As `wake`, but after all other peers; ignored if *peer* was woken already."""
        if peer.delivery is IDLE:
            self._queue_last(peer)

    def _queue_last(self, peer: T) -> None:
        set_delivery(peer, QUEUED_LAST)
        self.woken_last.append(peer)
        if not self.in_round:
            self.due.set()

    def defer(self, peer: T) -> None:
        """Let *peer*, which was taken from its queue, wait until `resume`."""
        set_delivery(peer, NO_ROOM if peer.delivery is QUEUED else NO_ROOM_LAST)

    def resume(self, peer: T) -> None:
        """Queue *peer*, which has room now, again if it was deferred."""
        if peer.delivery is NO_ROOM:
            self.wake(peer)
        elif peer.delivery is NO_ROOM_LAST:
            self._queue_last(peer)


def set_delivery(peer: Delivering, delivery: DeliveryState) -> None:
    """Change the delivery state of *peer* to *delivery*."""
    assert delivery in DELIVERY_TRANSITIONS[peer.delivery], f"{peer.delivery!r} to {delivery!r}"
    peer.delivery = delivery
