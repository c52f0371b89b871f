"""The rules of shared groups that are no consumer groups."""

from dataclasses import dataclass
from typing import final

__all__ = ["GroupPolicy"]


@final
@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """How a group that is no consumer group retries; its name may be any text, within *scope*.

    Args:
      scope: whose names these are, such as that of the protocol.
      retries_max: after so many deliveries in vain, and the first, a message is dead; -1 for no limit.
      dead_letters: the topic for dead messages; where it is empty they are dropped.
    """

    scope: str
    retries_max: int = -1
    dead_letters: str = ""
