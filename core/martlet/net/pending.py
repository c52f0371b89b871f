"""Work for the end of a round, collected for all peers, and the total of their unsent output."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, final

import trio

__all__ = ["PendingWork"]

T = TypeVar("T")


@final
class PendingWork(Generic[T]):
    """The work that `martlet.net.rounds.Rounds` does at the end of a round; *T* is a peer.

    A round is the work between two turns of the event loop: the requests of one or several socket reads, a deadline, or
    a completed flush. While `in_round` is set, the running code ends the round itself. Work added at other times, for
    example in a task of a plugin, sets `due`.
    """

    __slots__ = (
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
        self.woken.append(peer)
        if not self.in_round:
            self.due.set()

    def wake_last(self, peer: T) -> None:
        """As `wake`, but after all other peers."""
        self.woken_last.append(peer)
        if not self.in_round:
            self.due.set()
