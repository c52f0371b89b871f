"""Members of shared groups: who competes for messages."""

from collections import deque
from collections.abc import Callable, Hashable
from typing import final

from martlet.delivery.by_name import NamePermit
from martlet.delivery.fanout import Encoding
from martlet.delivery.share import MemberPeer, Share
from martlet.delivery.subscriptions import Delivery
from martlet.errors import Refused

__all__ = ["Member"]


@final
class Member:
    """One peer in a shared group; ``credit`` is how many more messages it may hold.

    A message whose lease ends goes to another member. This member gets the credit back only when it acts again,
    because until then it may be dead. ``holder`` holds what this member gets.
    """

    __slots__ = (
        "_kept",
        "_names",
        "_permit",
        "credit",
        "encoding",
        "holder",
        "lapsed",
        "lease_s",
        "peer",
        "share",
        "woken",
    )

    def __init__(
        self,
        share: Share,
        peer: MemberPeer,
        encoding: Encoding,
        lease_s: float,
        credit: int,
        permit: Callable[[], None] | None,
        holder: Hashable = None,
        names: NamePermit | None = None,
    ) -> None:
        self._permit = permit
        self._names = names
        # Messages that it holds and has not collected, with their names: another member read them.
        self._kept: deque[tuple[str, Delivery]] = deque()
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

    def pass_on(self) -> None:
        """Let another member have what this one was woken for, because its client can hold no more now."""
        self.credit = 0
        if self.woken:
            self.woken = False
            self.share.wake()

    def collect(self, budget_bytes: int) -> list[Delivery]:
        """Lease and return messages: at most ``credit``, and about *budget_bytes*.

        Raises:
          Refused: the filter failed, or reading is no longer allowed; leave the group.
        """
        self.woken = False
        if self._permit is not None:
            self._permit()
        found = self._take_kept(budget_bytes) if self._kept else []
        budget_bytes -= sum(len(delivery.data) for delivery in found)
        if self.credit > 0 and budget_bytes > 0:
            found += self.share.hand_out(self, budget_bytes)
        return found

    def _take_kept(self, budget_bytes: int) -> list[Delivery]:
        found: list[Delivery] = []
        while self._kept and self.credit > 0 and budget_bytes > 0:
            name, delivery = self._kept.popleft()
            if not self.share.is_held(self.holder, delivery):
                self.credit -= 1  # the end of its lease gave one back that was not taken
            elif self.may_get(name):
                self.credit -= 1
                budget_bytes -= len(delivery.data)
                found.append(delivery)
            else:
                self.share.pass_on(self.holder, delivery.queue_id, delivery.first)
        return found

    @property
    def asks(self) -> bool:
        """Whether it depends on a message's name if it may get it."""
        return self._names is not None and self._names.asks

    def may_get(self, name: str) -> bool:
        """Return whether it may get messages of *name*."""
        try:
            if self._permit is not None:
                self._permit()
            return self._names is None or not self._names.asks or self._names.allows(name)
        except Refused:
            return False

    def keep(self, name: str, delivery: Delivery) -> None:
        """Keep a message of *name*, which it holds since another member read it, until it collects."""
        self._kept.append((name, delivery))
        self.wake()

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
        self._kept.clear()
        self.share.leave(self, keep=keep)
