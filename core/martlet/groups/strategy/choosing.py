"""Which member of a shared group takes a message, where members choose.

A member may take only some of the group's messages, such as a consumer with a selector. The member that collects reads
for all of them: what it does not take is kept for another member that does. What no member takes is *parked*: it stays
in the group, for a member that joins later.

Messages can also be sticky: all with one key are for the same member (`sticky.py`).
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from martlet.groups.strategy.sticky import Keepers, Sticky, sticky_takers
from martlet.records.layout import RecordView, record_views
from martlet.store import ReadResult

__all__ = ["CHOICES_A_READ", "PARKED_MAX", "Taker", "takers_of"]

# Calls of predicates for the messages that are read at once, 1 to 5 us each: one for each message and member.
CHOICES_A_READ: Final = 1024
# Parked messages of a queue; with so many, nothing later is looked at until some of them are taken. ActiveMQ looks at
# the first 200 messages of a queue.
PARKED_MAX: Final = 1000


class Taker(Protocol):
    """A member, as `takers_of` uses it."""

    @property
    def takes(self) -> Callable[[RecordView], bool] | None:
        """Returns whether the member takes a message; None if it takes all."""
        ...

    @property
    def is_full(self) -> bool:
        """Whether as much is kept for the member as can be."""
        ...


T = TypeVar("T", bound=Taker)


def takers_of(
    result: ReadResult, first: T, others: Sequence[T], sticky: Sticky | None, keepers: Keepers, *, may_stop: bool = True
) -> list[T | None]:
    """Return for each message of *result* the member that takes it, None if nobody does.

    With *sticky*, it stops before a message for a member that cannot take more now, if it *may_stop*.

    Args:
      first: the member that gets what it takes.
      others: all members, in the order in which they are asked.
    """
    members = [first, *(each for each in others if each is not first)]
    if sticky is not None:
        records = [record for piece in result.pieces for record in record_views(piece)]
        return sticky_takers(
            records, members, sticky, keepers, lambda taker: may_stop and taker is not first and taker.is_full
        )
    predicates = [(member, member.takes) for member in members]
    found: list[T | None] = []
    for piece in result.pieces:
        for record in record_views(piece):
            taker = next((member for member, takes in predicates if takes is None or takes(record)), None)
            found.append(taker)
    return found
