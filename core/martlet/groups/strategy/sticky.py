"""Sticky messages: messages with the same key go to one member of a shared group, as long as this member is there.

So they are delivered in order. Keys fall into `SLOTS` slots, and a slot belongs to the member that had the fewest slots
when its first message was read; so memory does not grow with the number of keys. When a member leaves, its slots are
free, and its messages go to the next member, the oldest first.

If members take only some messages, a slot has several members: messages that the first member does not take go to the
second, and so on. So messages with one key go to as few members as possible, and each gets its own in order. The
members of a slot that take none of a key's messages do not keep them from other members; in ActiveMQ, these messages
wait for the member to leave.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol, TypeVar, final
from zlib import crc32

from martlet.records.layout import RecordView

__all__ = ["SLOTS", "Keepers", "Sticky", "first_taker", "sticky_takers"]

SLOTS: Final = 1024


@final
class Sticky:
    """Decides which messages of all groups with a policy stay with one member.

    ``seen`` tells whether there ever was a message with a key: until then nobody looks for keys. The encoder of
    messages sets it, before the message is handed out.
    """

    __slots__ = ("key_of", "seen")

    def __init__(self, key_of: Callable[[RecordView], str | None]) -> None:
        """Begin; *key_of* returns the key of a message, None for a message that any member may get."""
        self.key_of = key_of
        self.seen = False


class _Keeper(Protocol):
    @property
    def takes(self) -> Callable[[RecordView], bool] | None: ...


T = TypeVar("T", bound=_Keeper)


@final
class Keepers:
    """The slots of the members of one group."""

    __slots__ = ("_counts", "_members")

    def __init__(self) -> None:
        self._members: dict[int, list[_Keeper]] = {}  # by slot; the first member is asked first
        self._counts: dict[_Keeper, int] = {}

    def of(self, key: str, record: RecordView, members: Iterable[T]) -> T | None:
        """Return the member of *members* that gets *record*, which has this key; None if nobody takes it."""
        takers = [member for member in members if member.takes is None or member.takes(record)]
        slot = crc32(key.encode()) % SLOTS
        for keeper in self._members.get(slot, ()):
            for member in takers:
                if member is keeper:
                    return member
        if not takers:
            return None
        keeper_chosen = min(takers, key=lambda member: self._counts.get(member, 0))
        self._members.setdefault(slot, []).append(keeper_chosen)
        self._counts[keeper_chosen] = self._counts.get(keeper_chosen, 0) + 1
        return keeper_chosen

    def forget(self, member: _Keeper) -> None:
        """Free the slots of *member*, which has left."""
        if self._counts.pop(member, 0):
            for slot, keepers in list(self._members.items()):
                others = [each for each in keepers if each is not member]
                if others:
                    self._members[slot] = others
                else:
                    del self._members[slot]


def first_taker(record: RecordView, members: Iterable[T]) -> T | None:
    """Return the first member of *members* that takes *record*; None if nobody does."""
    return next((member for member in members if member.takes is None or member.takes(record)), None)


def sticky_takers(
    records: Iterable[tuple[RecordView, Sequence[T]]], sticky: Sticky, keepers: Keepers, is_full: Callable[[T], bool]
) -> list[T | None]:
    """Return for each of *records* the member that takes it; None if nobody does.

    Stops before the first message for a member that cannot take more now.
    """
    takers: list[T | None] = []
    for record, members in records:
        key = sticky.key_of(record)
        taker = first_taker(record, members) if key is None else keepers.of(key, record, members)
        if taker is not None and is_full(taker):
            break
        takers.append(taker)
    return takers
