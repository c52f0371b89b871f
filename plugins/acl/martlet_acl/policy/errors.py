"""The error of rules."""

from typing import final

from martlet.errors import MartletError

__all__ = ["PolicyError"]


@final
class PolicyError(MartletError):
    """A rule, a subject or a group is invalid, or exceeds a limit; *place* says where, from the whole to the part."""

    def __init__(self, reason: str, *place: str) -> None:
        super().__init__(f"{', '.join(place)}: {reason}" if place else reason)
        self.reason = reason
        self.place = place

    def inside(self, *place: str) -> "PolicyError":
        """Return the same error with its place inside *place*."""
        return PolicyError(self.reason, *place, *self.place)
