"""The members that compete for the messages of one group, and the order in which they are woken.

One member with credit is woken; if it leaves some messages, it wakes the next one. If a woken member does not collect
within `STALL_S`, because its client reads slowly, the next one is woken instead.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Protocol, final

from martlet.delivery.fanout import Encoding
from martlet.delivery.subscriptions import Delivery, MemberPeer
from martlet.groups.queues.group_context import GroupContext
from martlet.groups.strategy.sticky import Keepers, Sticky
from martlet.records.layout import RecordView

__all__ = ["GroupMember", "GroupMembers"]

STALL_S: Final = 0.1


class GroupMember(Protocol):
    """A member as its group uses it; implemented by `martlet.groups.member.Member`."""

    peer: MemberPeer
    encoding: Encoding
    holder: Hashable
    lease_s: float
    acknowledges: bool
    credit: int
    lapsed: int
    woken: bool

    @property
    def is_exclusive(self) -> bool: ...

    @property
    def asks(self) -> bool: ...

    @property
    def is_full(self) -> bool: ...

    @property
    def takes(self) -> Callable[[RecordView], bool] | None: ...

    def may_get(self, name: str) -> bool: ...

    def keep(self, name: str, delivery: Delivery) -> None: ...

    def add_credit(self, count: int) -> None: ...

    def wake(self) -> None: ...


@final
class GroupMembers:
    """The members of one group; if it is ``gone``, they get no more messages, and are all woken to learn that."""

    __slots__ = ("_by_holder", "_context", "by_turn", "choosing", "exclusive", "gone", "keepers", "stalled_at")

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self.gone = False
        self.by_turn: OrderedDict[GroupMember, None] = OrderedDict()  # the member whose turn it is comes first
        self.choosing = 0  # members that take only some messages
        self.keepers = Keepers()
        self.exclusive: dict[GroupMember, None] = {}  # the first one gets everything
        self._by_holder: dict[Hashable, GroupMember] = {}
        self.stalled_at = math.inf  # time to wake another member in place of one that has not collected

    def add(self, member: GroupMember) -> None:
        """Add *member*."""
        self.by_turn[member] = None
        self._by_holder[member.holder] = member
        self.choosing += member.takes is not None
        if member.is_exclusive:
            self.exclusive[member] = None

    def remove(self, member: GroupMember) -> bool:
        """Remove *member*; return whether no other member has its holder."""
        del self.by_turn[member]
        self.keepers.forget(member)
        self.choosing -= member.takes is not None
        self.exclusive.pop(member, None)
        last = self._by_holder.get(member.holder) is member
        if last:
            del self._by_holder[member.holder]
        return last

    @property
    def sticky(self) -> Sticky | None:
        """The rule for messages that stay with one member; None if no message does."""
        policy = self._context.policy
        sticky = policy.sticky if policy is not None else None
        return sticky if sticky is not None and sticky.seen else None

    def in_turn(self) -> list[GroupMember]:
        """Return the members that may get messages, the one whose turn it is first."""
        return [next(iter(self.exclusive))] if self.exclusive else list(self.by_turn)

    def give_credit(self, holder: Hashable, count: int = 1) -> None:
        """Return credit to the member with *holder*, if there is one."""
        member = self._by_holder.get(holder)
        if member is not None:
            member.add_credit(count)

    def have_lost(self, holders: Iterable[Hashable]) -> None:
        """Note that leases ended; *holders* has the holder of each."""
        for holder in holders:
            member = self._by_holder.get(holder)
            if member is not None:
                member.lapsed += 1

    def wake(self) -> None:
        """Wake the next member that has credit and is not woken yet; all members if the group is gone."""
        if self.gone:
            for member in list(self.by_turn):
                member.wake()
            return
        ready = self._next_ready()
        if ready is None:
            return
        ready.wake()
        if self.stalled_at == math.inf and len(self.by_turn) > 1:
            owner = self._context.owner
            self.stalled_at = owner.now() + STALL_S
            owner.alarm(self._context, self.stalled_at)

    def _next_ready(self) -> GroupMember | None:
        """Return the next member that has credit and is not woken; its turn comes after all others again."""
        members, lapsed = self.by_turn, None
        if self.exclusive:
            first = next(iter(self.exclusive))
            return first if first.credit > 0 and not first.woken else None
        for _ in range(len(members)):
            member = next(iter(members))
            members.move_to_end(member)
            if member.credit > 0 and not member.woken:
                if not member.lapsed:
                    return member
                # A member that lost a lease and has been silent since may be dead.
                lapsed = lapsed or member
        return lapsed

    def has_stalled(self, now: float) -> bool:
        """Return whether a member was woken long ago and has not collected; `wake` sets the next time to ask."""
        if now < self.stalled_at:
            return False
        self.stalled_at = math.inf
        return any(member.woken for member in self.by_turn)
