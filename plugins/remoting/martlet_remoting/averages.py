"""RocketMQ's two strategies that share queues evenly, for consumers and for the broker when they ask it.

Who is not among the members gets nothing.
"""

from collections.abc import Sequence
from typing import TypeVar, final

__all__ = ["Average", "AverageByCircle"]

Q = TypeVar("Q")  # a queue, or its number


@final
class Average:
    """Consecutive queues for each member, the first ones getting one more: A A A B B."""

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
