"""The error of rules."""

from typing import final

from martlet.errors import MartletError

__all__ = ["PolicyError"]


@final
class PolicyError(MartletError):
    """A rule, a subject or a group is invalid, or exceeds a limit; *place* says where, from the whole to the part."""

    def __init__(self, reason: str, *place: str) -> None:
        super().__init__(f"{', '.join(map(_printable, place))}: {reason}" if place else reason)
        self.reason = reason
        self.place = place

    def inside(self, *place: str) -> "PolicyError":
        """Return the same error with its place inside *place*."""
        return PolicyError(self.reason, *place, *self.place)


def _printable(text: str) -> str:
    """Return *text*, a part of a file, such that it is one line of a log."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
