"""Which member of a shared group may get a message, where permissions depend on the names of messages.

The member that collects reads for all of them: what it may not get is kept for another member that may, and what no
member may get is for nobody, like a message that the group does not select. So nothing waits for somebody who may
never come, and nothing is handed back and forth.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Protocol, TypeVar

from martlet.delivery.fanout import parts
from martlet.store import ReadResult
from martlet.store.format.tags import find_tags

__all__ = ["Receiver", "assign", "may_get_all", "receivers_of"]


class Receiver(Protocol):
    """A member, as `assign` uses it."""

    @property
    def asks(self) -> bool: ...

    def may_get(self, name: str) -> bool: ...


R = TypeVar("R", bound=Receiver)


def assign(result: ReadResult, first: R, others: Sequence[R]) -> Iterator[tuple[R | None, list[str]]]:
    """Yield who gets the messages of *result*, in their order: runs of names with the member for them, None for nobody.

    Args:
      first: the member that gets what it may get.
      others: all members, in the order in which they are asked.
    """
    found: dict[str, R | None] = {}
    names = _names(result)
    for name in names:
        if name not in found:
            found[name] = first if first.may_get(name) else _first_of(others, name)
    for receiver, run in groupby(names, key=lambda name: found[name]):
        yield receiver, list(run)


def receivers_of(result: ReadResult, first: R, others: Sequence[R], offsets: Sequence[int]) -> dict[int, tuple[R, str]]:
    """Return by offset who gets the messages of *result*, as `assign`, and their names; none that are for nobody.

    Args:
      offsets: those of the messages; if they are fewer, the last messages are left out.
    """
    at = 0
    found: dict[int, tuple[R, str]] = {}
    for receiver, names in assign(result, first, others):
        for name, offset in zip(names, offsets[at : at + len(names)], strict=False):
            if receiver is not None:
                found[offset] = receiver, name
        at += len(names)
    return found


def may_get_all(member: Receiver, result: ReadResult) -> bool:
    """Return whether *member* may get all messages of *result*."""
    return all(member.may_get(name) for name in set(_names(result)))


def _first_of(members: Iterable[R], name: str) -> R | None:
    return next((member for member in members if member.may_get(name)), None)


def _names(result: ReadResult) -> list[str]:
    data = b"".join(result.pieces)
    return [find_tags(properties).decode(errors="replace") for *_, properties in parts(data)]
