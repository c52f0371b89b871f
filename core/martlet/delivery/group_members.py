"""Members of shared groups: who competes for messages."""

from collections.abc import Callable, Hashable
from typing import final

from martlet.contracts import Peer
from martlet.delivery.fanout import Encoding
from martlet.delivery.share import Share
from martlet.delivery.subscriptions import Delivery

__all__ = ["Member"]


@final
class Member:
    """One peer in a shared group; ``credit`` is how many more messages it may hold.

    A message whose lease ends goes to another member. Its credit comes back only when this member is heard of
    again, because until then it may be dead. ``holder`` is who holds what this member gets.
    """

    __slots__ = ("_permit", "credit", "encoding", "holder", "lapsed", "lease_s", "peer", "share", "woken")

    def __init__(
        self,
        share: Share,
        peer: Peer,
        encoding: Encoding,
        lease_s: float,
        credit: int,
        permit: Callable[[], None] | None,
        holder: Hashable = None,
    ) -> None:
        self._permit = permit
        self.share = share
        self.peer = peer
        self.encoding = encoding
        self.lease_s = lease_s
        self.credit = credit
        self.holder: Hashable = self if holder is None else holder
        self.lapsed = 0  # messages that it lost since it was last heard of
        self.woken = False  # and has not collected since

    def add_credit(self, count: int) -> None:
        """Allow this member to hold *count* more messages, and wake its peer."""
        self.credit += count
        self.wake()

    def wake(self) -> None:
        self.woken = True
        self.peer.wake()

    def collect(self, budget_bytes: int) -> list[Delivery]:
        """Return messages that this member holds from now on: at most ``credit``, and about *budget_bytes*.

        Raises:
          Refused: the filter failed, or reading is not allowed any more; leave the group.
        """
        self.woken = False
        if self._permit is not None:
            self._permit()
        return self.share.hand_out(self, budget_bytes) if self.credit > 0 else []

    def touch(self) -> None:
        """Note that the peer is alive, and give back the credit of messages whose lease ended meanwhile."""
        if self.lapsed:
            lapsed, self.lapsed = self.lapsed, 0
            self.add_credit(lapsed)

    def ack(self, queue_id: int, offset: int) -> bool:
        """Settle a message and give its credit back; False when this member does not hold it, or no longer."""
        if self.lapsed:
            self.touch()
        return self.share.ack_held(self.holder, queue_id, offset)

    def nack(self, queue_id: int, offset: int, delay_s: float = 0) -> bool:
        """Return a message that failed to the group; False when this member does not hold it.

        It is delivered again after *delay_s* or later: the more often it failed, the longer it waits.
        """
        self.touch()
        return self.share.nack_held(self.holder, queue_id, offset, delay_s)

    def extend(self, queue_id: int, offset: int) -> bool:
        """Start the lease of a message again; False when this member does not hold it."""
        self.touch()
        return self.share.renew_held(self.holder, queue_id, offset, self.lease_s) > 0

    def leave(self, *, keep: bool = False) -> None:
        """What this member holds goes to others: at once what it was the first to get, the rest after a pause.

        With *keep* it stays with its ``holder`` until the leases end, or somebody settles it.
        """
        self.share.leave(self, keep=keep)
