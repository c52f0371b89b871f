"""Members of shared groups, which compete for messages."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Final, final

from martlet.contracts import DeliveryLimit
from martlet.delivery.fanout import Encoding
from martlet.delivery.subscriptions import Delivery, MemberPeer, collect_limited
from martlet.errors import Refused
from martlet.groups.group import SharedGroup
from martlet.groups.membership import MemberPermit, Membership
from martlet.state.journal import Journal

__all__ = ["KEPT_BYTES_MAX", "KEPT_MAX", "Member"]

# Messages kept for a member; further messages that are sticky to it wait in the log.
KEPT_MAX: Final = 256
KEPT_BYTES_MAX: Final = 1 << 18


@final
class Member:
    """One peer in a shared group; ``credit`` is the number of messages that it may still get.

    A message whose lease ends goes to another member. This member gets the credit back only when it acts again, because
    until then it may be dead. ``holder`` holds the messages of this member. Unless it ``acknowledges``, messages are
    settled when it collects them. ``limit`` is what the client's quotas allow, None if it has none; ``left`` is called
    once it has left.
    """

    __slots__ = (
        "_distribution",
        "_kept",
        "_kept_bytes",
        "_permit",
        "_settlement",
        "acknowledges",
        "credit",
        "denied",
        "encoding",
        "group",
        "holder",
        "is_exclusive",
        "lapsed",
        "lease_s",
        "left",
        "limit",
        "peer",
        "takes",
        "woken",
    )

    def __init__(
        self,
        shared_group: SharedGroup,
        peer: MemberPeer,
        encoding: Encoding,
        membership: Membership,
        permit: MemberPermit | None,
    ) -> None:
        self._permit = permit
        self.limit: DeliveryLimit | None = None
        self.left: Callable[[], None] | None = None
        # Messages that it holds and has not collected, with their names: another member read them.
        self._kept: deque[tuple[str, Delivery]] = deque()
        self._kept_bytes = 0
        self.group = shared_group
        self._distribution = shared_group.distribution
        self._settlement = shared_group.settlement
        self.peer = peer
        self.encoding = encoding
        self.takes = membership.takes
        self.is_exclusive = membership.is_exclusive
        self.acknowledges = membership.lease_s > 0
        self.lease_s = membership.lease_s or math.inf
        self.credit = membership.credit
        # By default an object of its own: if the holder were the member, only a garbage collection could free both.
        self.holder: Hashable = object() if membership.holder is None else membership.holder
        self.lapsed = 0  # leases that ended since its last action
        self.woken = False  # whether it was woken and has not collected since
        self.denied: Refused | None = None  # why it could no longer read at the last `recheck`

    def add_credit(self, count: int) -> None:
        """Allow this member to hold *count* more messages, and wake its peer."""
        self.credit += count
        self.woken = True
        self.peer.wake()

    def wake(self) -> None:
        self.woken = True
        self.peer.wake()

    def pass_on(self) -> None:
        """Wake another member for the messages that this one was woken for: its client can hold no more now."""
        self.credit = 0
        if self.woken:
            self.woken = False
            self.group.wake()

    def collect(self, budget_bytes: int) -> list[Delivery]:
        """Lease and return messages: at most ``credit``, and about *budget_bytes*.

        Raises:
          Refused: the filter failed, or reading is no longer allowed; leave the group.
        """
        if self.limit is None or not self.limit.applies:
            return self.collect_unlimited(budget_bytes)
        deliveries, may_have_more = collect_limited(self, self.limit, budget_bytes)
        if may_have_more:
            self.wake()
            if not deliveries:
                self.group.wake()  # somebody else may have the messages meanwhile
        return deliveries

    def collect_unlimited(self, budget_bytes: int) -> list[Delivery]:
        """As `collect`, whatever the client's quotas are."""
        self.woken = False
        self.check()
        deliveries: list[Delivery] = []
        if self._kept:
            deliveries = self._take_kept(budget_bytes)
            budget_bytes -= sum([delivery.size for delivery in deliveries])
        if self.credit > 0 and budget_bytes > 0:
            deliveries += self._distribution.hand_out(self, budget_bytes)
        elif self._kept and self.credit > 0:
            self.wake()
        elif deliveries and self._distribution.has_more():
            self.group.wake()
        if not self.acknowledges:
            for delivery in deliveries:  # it holds messages that were delivered before, or that another member read
                self._settlement.ack_held_all(self.holder, delivery.queue_id, delivery.offsets)
        return deliveries

    def check(self) -> None:
        """Raise `Refused` if the member may no longer read; `collect` calls it."""
        if self.denied is not None:
            raise self.denied
        if self._permit is not None:
            self._permit.check()

    def ask_nothing(self) -> None:
        """Drop the permission that was checked when it joined: each for whom it takes messages is asked instead."""
        self._permit = None

    def recheck(self) -> None:
        """Wake the peer if it may no longer read: `collect` refuses it. Called after a change of the rules."""
        self.denied = None
        try:
            self.check()
        except Refused as refused:
            self.denied = refused
            self.wake()

    def _take_kept(self, budget_bytes: int) -> list[Delivery]:
        kept: list[Delivery] = []
        while self._kept and self.credit > 0 and budget_bytes > 0:
            name, delivery = self._kept.popleft()
            self._kept_bytes -= delivery.size
            if not self._settlement.is_held(self.holder, delivery):
                self.credit -= 1  # the end of its lease returned a credit that was not taken
            elif self.may_get(name):
                self.credit -= 1
                budget_bytes -= delivery.size
                kept.append(delivery)
            else:
                self._settlement.pass_on(self.holder, delivery.queue_id, delivery.first)
        return kept

    @property
    def asks(self) -> bool:
        """Whether the member's permission depends on the names of messages."""
        return self._permit is not None and self._permit.asks

    def may_get(self, name: str) -> bool:
        """Return whether it may get messages of *name*; no refusal is noted, because `check` notes it."""
        try:
            return self._permit is None or self._permit.allows(name)
        except Refused:  # an authorizer has failed
            return False

    def keep(self, name: str, delivery: Delivery) -> None:
        """Keep a message of *name*, which another member read and this one holds, until it collects."""
        self._kept.append((name, delivery))
        self._kept_bytes += delivery.size
        self.wake()

    @property
    def is_full(self) -> bool:
        """Whether no more messages can be kept for it."""
        return len(self._kept) >= KEPT_MAX or self._kept_bytes >= KEPT_BYTES_MAX

    def touch(self) -> None:
        """Note that the peer is alive, and return to it the credit of leases that ended."""
        if self.lapsed:
            lapsed, self.lapsed = self.lapsed, 0
            self.add_credit(lapsed)

    def holds(self, queue_id: int, offset: int) -> bool:
        """Return whether this member holds a message, and may settle it."""
        return self._settlement.holds(self.holder, queue_id, offset)

    def ack(self, queue_id: int, offset: int) -> bool:
        """Settle a message and return its credit; False if this member does not hold it."""
        if self.lapsed:
            self.touch()
        return self._settlement.ack_held(self.holder, queue_id, offset)

    def ack_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        """Settle messages of one queue and give their credit back. Returns those of *offsets* that this member held.

        Runs of consecutive offsets take 0.2 us for each message, `ack` 3 us.
        """
        if self.lapsed:
            self.touch()
        return self._settlement.ack_held_all(self.holder, queue_id, offsets)

    def nack(self, queue_id: int, offset: int, delay_s: float = 0) -> bool:
        """Give a failed message back to the group. Returns False if this member does not hold it.

        It is redelivered after *delay_s*, or later: the pause grows with each failure.
        """
        return bool(self.nack_all(queue_id, (offset,), delay_s))

    def nack_all(self, queue_id: int, offsets: Sequence[int], delay_s: float = 0) -> list[int]:
        """Give failed messages of one queue back, as `nack`. Returns those of *offsets* that this member held."""
        self.touch()
        return self._settlement.nack_held(self.holder, queue_id, offsets, delay_s)

    def give_up_all(self, queue_id: int, offsets: Sequence[int]) -> list[int]:
        """Make messages of one queue dead now. Returns those of *offsets* that this member held.

        If the broker is killed before the dead letter is stored, the message is delivered again. In the topic of the
        group's dead letters it does not become dead, but is delivered again as with `nack`.
        """
        self.touch()
        return self._settlement.give_up_held(self.holder, queue_id, offsets)

    def acknowledgements(self, queue_id: int, offsets: Sequence[int]) -> list[tuple[Journal, bytes]]:
        """Return acknowledgements for `Gate.publish_all`, which must be called next.

        The messages are settled, and their credit is returned, once the atomic group is readable. If the group is
        refused, call `withdraw`; if its commit fails, the messages are returned within a minute.

        Raises:
          Refused: this member does not hold one of them (Reason.NOT_FOUND), or the store accepts no writes now.
        """
        if self.lapsed:
            self.touch()
        return self._settlement.acknowledgements_held(self.holder, queue_id, offsets)

    def withdraw(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Undo `acknowledgements`: the atomic group was refused."""
        for offset in offsets:
            self._settlement.withdraw(queue_id, offset)

    def extend(self, queue_id: int, offset: int) -> bool:
        """Restart the lease of a message; False if this member does not hold it."""
        self.touch()
        return self._settlement.renew_held(self.holder, queue_id, offset, self.lease_s) > 0

    def leave(self, *, keep: bool = False) -> None:
        """Leave; other members get the messages that this one holds: first deliveries immediately, the others after a
        pause.

        With *keep*, the messages stay with the ``holder`` until they are settled or their leases end.
        """
        self._kept.clear()
        self._kept_bytes = 0
        self.group.leave(self, keep=keep)
        if self.left is not None:
            left, self.left = self.left, None
            left()
