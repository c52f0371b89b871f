"""Chooses the members of a shared group that receive the messages which one of them has read.

The member that collects reads for all members: messages that it does not receive are kept for other members. Members
differ in three ways:

- Permissions may depend on the names of messages. A message goes to a member that may get its name. A message that no
  member may get is for nobody, like a message that the group does not select: it does not wait for a member that may
  never come.
- A member may take only some of the group's messages, such as a consumer with a selector. A message that no member
  takes is *parked*: it stays in the group, for a member that joins later.
- Messages can be sticky: all messages with one key are for the same member (`sticky.py`).
"""

from collections.abc import Sequence
from itertools import groupby, repeat
from typing import Final, NamedTuple

from martlet.delivery.fanout import parts
from martlet.groups.queues.group_members import GroupMember, GroupMembers
from martlet.groups.strategy.sticky import first_taker, sticky_takers
from martlet.records.layout import record_views
from martlet.store import ReadResult
from martlet.store.format.tags import find_tags

__all__ = ["CHOICES_A_READ", "PARKED_MAX", "Portion", "receivers_of"]

# Calls of predicates for the messages of one read, 1 to 5 us each: one for each message and member.
CHOICES_A_READ: Final = 1024
# Parked messages of a queue; at this number, no later message is delivered until some are taken. ActiveMQ looks at the
# first 200 messages of a queue.
PARKED_MAX: Final = 1000


class Portion(NamedTuple):
    """Consecutive messages for one *receiver*; None if they are for nobody.

    Messages for nobody count as settled, unless they are *parked*. *name* is the name of each message, if the
    receiver's permission depends on it.
    """

    receiver: GroupMember | None
    length: int
    name: str = ""
    is_parked: bool = False


def receivers_of(
    result: ReadResult, first: GroupMember, members: GroupMembers, *, may_stop: bool = True
) -> Sequence[Portion]:
    """Return the receivers of the messages of *result*, in order; *first* gets every message that it may get and
    takes.

    If it *may_stop*, it stops at the first message whose member can take no more now.
    """
    names = _read_names(result) if first.asks else ()
    if result.count and (members.choosing or members.sticky is not None):
        takers = _find_takers(result, names, first, members, may_stop=may_stop)
        return [
            Portion(taker, len(list(run)), name, is_parked=taker is None and not names)
            for (taker, name), run in groupby(zip(takers, names or repeat(""), strict=False))
        ]
    if names and not all(first.may_get(name) for name in set(names)):
        return _divide_by_name(names, first, members.in_turn())
    return (Portion(first, result.count),) if result.count else ()


def _read_names(result: ReadResult) -> list[str]:
    data = b"".join(result.pieces)
    return [find_tags(properties).decode(errors="replace") for *_, properties in parts(data)]


def _divide_by_name(names: Sequence[str], first: GroupMember, others: Sequence[GroupMember]) -> list[Portion]:
    """Divide messages with *names* among members that may get them."""
    receivers: dict[str, GroupMember | None] = {}
    for name in names:
        if name not in receivers:
            permitted = (member for member in (first, *others) if member.may_get(name))
            receivers[name] = next(permitted, None)
    return [Portion(receivers[name], len(list(run)), name) for name, run in groupby(names)]


def _find_takers(
    result: ReadResult, names: Sequence[str], first: GroupMember, members: GroupMembers, *, may_stop: bool
) -> list[GroupMember | None]:
    """Return for each message of *result* the member that takes it and may get its name; None for nobody."""
    candidates = [first, *(each for each in members.in_turn() if each is not first)]
    permitted = {name: [member for member in candidates if member.may_get(name)] for name in set(names)}
    records = [record for piece in result.pieces for record in record_views(piece)]
    records_with_members = (
        [(record, permitted[name]) for record, name in zip(records, names, strict=True)]
        if names
        else [(record, candidates) for record in records]
    )
    if members.sticky is None:
        return [first_taker(record, members_asked) for record, members_asked in records_with_members]

    def is_full(taker: GroupMember) -> bool:
        return may_stop and taker is not first and taker.is_full

    return sticky_takers(records_with_members, members.sticky, members.keepers, is_full)
