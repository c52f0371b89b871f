"""The names of groups that do not exist but have pulled lately.

A pull creates no group, because any client can pull with any name. In RocketMQ a pull does, so a consumer without
heartbeats can commit afterwards. So the first commit of a name that has pulled creates the group.
"""

from typing import Final, final

__all__ = ["PulledGroups"]

# Number of names to keep, of the last groups. A name has 255 bytes at most.
NAMES_MAX: Final = 1024


@final
class PulledGroups:
    """The names of the last groups that have pulled without existing."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __contains__(self, group: str) -> bool:
        return group in self._names

    def add(self, group: str) -> None:
        """Add *group*, which has pulled; the name that has pulled least recently may be forgotten."""
        self._names.pop(group, None)
        if len(self._names) >= NAMES_MAX:
            del self._names[next(iter(self._names))]
        self._names[group] = None
