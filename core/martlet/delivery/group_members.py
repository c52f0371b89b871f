"""Members of shared groups: who competes for messages."""

from collections.abc import Callable, Hashable
from typing import final

from martlet.delivery.fanout import Encoding
from martlet.delivery.share import MemberPeer, Share
from martlet.delivery.subscriptions import Delivery

__all__ = ["Member"]


@final
class Member:
    """One peer in a shared group; ``credit`` is how many more messages it may hold.

    A message whose lease ends goes to another member. This member gets the credit back only when it acts again,
    because until then it may be dead. ``holder`` holds what this member gets.
    """

    __slots__ = ("_permit", "credit", "encoding", "holder", "lapsed", "lease_s", "peer", "share", "woken")

    def __init__(
        self,
        share: Share,
        peer: MemberPeer,
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
        self.lapsed = 0  # leases that ended since it last acted
        self.woken = False  # woken, and has not collected since

    def add_credit(self, count: int) -> None:
        """Allow this member to hold *count* more messages, and wake its peer."""
        self.credit += count
        self.woken = True
        self.peer.wake()

    def wake(self) -> None:
        self.woken = True
        self.peer.wake()

    def collect(self, budget_bytes: int) -> list[Delivery]:
        """Lease and return messages: at most ``credit``, and about *budget_bytes*.

        Raises:
          Refused: the filter failed, or reading is no longer allowed; leave the group.
        """
        self.woken = False
        if self._permit is not None:
            self._permit()
        return self.share.hand_out(self, budget_bytes) if self.credit > 0 else []

    def touch(self) -> None:
        """Note that the peer is alive, and give it back the credit of leases that ended."""
        if self.lapsed:
            lapsed, self.lapsed = self.lapsed, 0
            self.add_credit(lapsed)

    def ack(self, queue_id: int, offset: int) -> bool:
        """Settle a message and give its credit back; False if this member does not hold it."""
        if self.lapsed:
            self.touch()
        return self.share.ack_held(self.holder, queue_id, offset)

    def nack(self, queue_id: int, offset: int, delay_s: float = 0) -> bool:
        """Return a failed message to the group; False if this member does not hold it.

        It is redelivered after *delay_s*, or later: the pause grows with each failure.
        """
        self.touch()
        return self.share.nack_held(self.holder, queue_id, offset, delay_s)

    def extend(self, queue_id: int, offset: int) -> bool:
        """Restart the lease of a message; False if this member does not hold it."""
        self.touch()
        return self.share.renew_held(self.holder, queue_id, offset, self.lease_s) > 0

    def leave(self, *, keep: bool = False) -> None:
        """Leave; other members get what this one holds: first deliveries immediately, the rest after a pause.

        With *keep*, the messages stay with the ``holder`` until they are settled or their leases end.
        """
        self.share.leave(self, keep=keep)
