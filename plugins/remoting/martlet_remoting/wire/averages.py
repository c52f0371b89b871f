"""RocketMQ's two strategies that allocate queues evenly, used by consumers and by the broker (QUERY_ASSIGNMENT).

A client that is not a member gets no queues.
"""

from collections.abc import Sequence
from typing import TypeVar, final

__all__ = ["Average", "AverageByCircle"]

Q = TypeVar("Q")  # a queue, or its number


@final
class Average:
    """Consecutive queues for each member; if they do not divide evenly, the first members get one more: A A A B B."""

    name = "AVG"

    def allocate(self, group: str, member: str, queues: Sequence[Q], members: Sequence[str]) -> list[Q]:
        if member not in members:
            return []
        index = members.index(member)
        size, more = divmod(len(queues), len(members))
        start = index * size + min(index, more)
        return list(queues[start : start + size + (index < more)])


@final
class AverageByCircle:
    """Queues dealt in turn: A B A B A."""

    name = "AVG_BY_CIRCLE"

    def allocate(self, group: str, member: str, queues: Sequence[Q], members: Sequence[str]) -> list[Q]:
        return list(queues[members.index(member) :: len(members)]) if member in members else []
