"""Groups that do not exist, and have pulled lately.

A pull creates no group, because anybody can pull with any name. With RocketMQ it does, and a consumer that sends no
heartbeats can commit then. So who has pulled creates its group with its first commit.
"""

from typing import Final, final

__all__ = ["PulledGroups"]

# The names kept: of the last so many groups. A name has 255 bytes at most.
NAMES_MAX: Final = 1024


@final
class PulledGroups:
    """The names of the last groups that have pulled without being there."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def __contains__(self, group: str) -> bool:
        return group in self._names

    def add(self, group: str) -> None:
        """Note that *group* has pulled; the name that has not pulled for the longest time may be forgotten."""
        self._names.pop(group, None)
        if len(self._names) >= NAMES_MAX:
            del self._names[next(iter(self._names))]
        self._names[group] = None
