"""A membership of a shared group: the messages that a member may hold, and the length of its leases."""

from collections.abc import Callable, Hashable
from typing import Protocol, final

from msgspec import Struct

from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import Start, from_tail
from martlet.errors import LocalProtocolError
from martlet.groups.queues.finder import MessageSelection
from martlet.records.layout import RecordView

__all__ = ["MemberPermit", "Membership"]


class MemberPermit(Protocol):
    """Decides whether a member may take part in its group, and which messages it may get; created by a gate."""

    @property
    def asks(self) -> bool:
        """Whether `allows` depends on the names of messages."""
        ...

    def check(self) -> None:
        """Raise `Refused` if the member may no longer read."""
        ...

    def allows(self, name: str) -> bool:
        """Return whether the member may still read, also messages of *name* if it `asks`."""
        ...


@final
class Membership(Struct, frozen=True, kw_only=True):
    """The terms on which a peer takes part in a shared group.

    Args:
      lease_s: how long the member may hold a message before another gets it; infinity: until it leaves; 0: it holds
        none and need not acknowledge, messages are settled when it collects them.
      credit: the number of messages that it may hold at once; for a member that holds none, the number that a
        `Member.collect` returns at most.
      holder: the holder of the messages: any hashable but None; by default one that only the member has. If two members
        have the same holder, the newer one gets the credit of settled messages.
      takes: returns whether the member takes a message that the group selects; None for all. Other messages go to
        another member, or wait for one: up to `receivers.PARKED_MAX` of a queue; above that, later ones wait too.
      is_exclusive: whether other members get no new messages while this one, the first exclusive one, is there.
      selection: selects the messages of the group; the same for all members.
      names: finds the messages of *selection* by their names, of which each group has one topic filter; only for groups
        with a policy, and not with *takes*. A new group begins with messages published from now on.
      start: where the group begins in a queue that it has never consumed.
      marks: of a new group with a policy: `OWNS_TOPIC` if the topic was created for it, `AUTO_DELETE` if it is deleted
        with its last member (`unused_groups.py`).
    """

    lease_s: float
    credit: int = 0
    holder: Hashable = None
    takes: Callable[[RecordView], bool] | None = None
    is_exclusive: bool = False
    selection: Selection = EVERYTHING
    names: MessageSelection | None = None
    start: Start = from_tail
    marks: int = 0

    def __post_init__(self) -> None:
        if self.takes is not None and self.names is not None:
            raise LocalProtocolError("a group that finds messages by their names has no members that choose; use names")
