"""Messages that stay with one member of a shared group: those with the same key, as long as this member is there.

So they are delivered in order. Keys fall into `SLOTS` slots, and a slot belongs to the member that has the fewest of
them when its first message is read; so memory does not grow with the number of keys. When a member leaves, its slots
are free, and its messages go to the next one, the oldest first.

If members take only some messages, a slot has more than one of them: what its first member does not take goes to its
second one, and so on. So messages with one key go to as few members as can be, and each gets its own in order. The
members of a slot that take none of a key's messages do not keep these from those who do, as in ActiveMQ, where they
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
    """Which messages of all groups with a policy stay with one member.

    ``seen`` says whether there ever was a message with a key: until then nobody looks for keys. Who encodes messages
    sets it, before the message is handed out.
    """

    __slots__ = ("key_of", "seen")

    def __init__(self, key_of: Callable[[RecordView], str | None]) -> None:
        """Begin; *key_of* returns the key of a message, None for one that any member may get."""
        self.key_of = key_of
        self.seen = False


class _Keeper(Protocol):
    @property
    def takes(self) -> Callable[[RecordView], bool] | None: ...


T = TypeVar("T", bound=_Keeper)


@final
class Keepers:
    """Which members of one group have which slots."""

    __slots__ = ("_counts", "_members")

    def __init__(self) -> None:
        self._members: dict[int, list[_Keeper]] = {}  # the one that is asked first is the first
        self._counts: dict[_Keeper, int] = {}

    def of(self, key: str, record: RecordView, members: Iterable[T]) -> T | None:
        """Return the one of *members* that gets *record*, which has this key; None if nobody takes it."""
        able = [member for member in members if member.takes is None or member.takes(record)]
        slot = crc32(key.encode()) % SLOTS
        for keeper in self._members.get(slot, ()):
            for member in able:
                if member is keeper:
                    return member
        if not able:
            return None
        found = min(able, key=lambda member: self._counts.get(member, 0))
        self._members.setdefault(slot, []).append(found)
        self._counts[found] = self._counts.get(found, 0) + 1
        return found

    def forget(self, member: _Keeper) -> None:
        """Free the slots of *member*, which has left."""
        if self._counts.pop(member, 0):
            left = {slot: [each for each in keepers if each is not member] for slot, keepers in self._members.items()}
            self._members = {slot: keepers for slot, keepers in left.items() if keepers}


def first_taker(record: RecordView, members: Iterable[T]) -> T | None:
    """Return the first one of *members* that takes *record*; None if nobody does."""
    return next((member for member in members if member.takes is None or member.takes(record)), None)


def sticky_takers(
    records: Iterable[tuple[RecordView, Sequence[T]]], sticky: Sticky, keepers: Keepers, is_full: Callable[[T], bool]
) -> list[T | None]:
    """Return for each of *records* the one of its members that takes it, None if nobody does.

    Stops before the first message for a member that cannot take more now.
    """
    found: list[T | None] = []
    for record, members in records:
        key = sticky.key_of(record)
        taker = first_taker(record, members) if key is None else keepers.of(key, record, members)
        if taker is not None and is_full(taker):
            break
        found.append(taker)
    return found
