"""Repeated messages, which are delivered several times: the newest timer of each.

The key of such a message is the text by which RocketMQ recalls it (`records.delete_key`). A later timer with the same
key replaces the earlier one, even if a power cut has lost the note that removes the earlier one.
"""

from collections.abc import Iterable
from typing import Final, final

import msgpack  # type: ignore[import-untyped]

from martlet_timer.timers.schedule import Timer

__all__ = ["RepeatedTimers"]

KEYS_A_ROW: Final = 512


@final
class RepeatedTimers:
    """The table; ``newest`` is by key.

    ``ending`` has the keys of messages whose end is a note in the log that is not applied yet.
    """

    __slots__ = ("_keys", "ending", "newest")

    def __init__(self) -> None:
        self.newest: dict[str, Timer] = {}
        self.ending: set[str] = set()
        self._keys: dict[int, str] = {}  # by position

    def __len__(self) -> int:
        return len(self.newest)

    def put(self, key: str, timer: Timer) -> Timer | None:
        """Set the newest timer of *key*; return the previous one, which no longer counts."""
        before = self.end(key)
        self.newest[key] = timer
        self._keys[timer[1]] = key
        return before

    def end(self, key: str) -> Timer | None:
        """Forget *key*; return its timer."""
        timer = self.newest.pop(key, None)
        if timer is not None:
            del self._keys[timer[1]]
        return timer

    def gone(self, position: int) -> None:
        """Forget the message whose newest timer is at *position*, if any."""
        key = self._keys.get(position)
        if key is not None:
            self.end(key)

    def key_at(self, position: int) -> str:
        """Return the key of the message whose newest timer is at *position*; empty if there is none."""
        return self._keys.get(position, "")

    def is_ending(self, position: int) -> bool:
        """Return whether the timer at *position* belongs to a message that is ending."""
        return bool(self.ending) and self._keys.get(position) in self.ending

    def freeze(self) -> list[bytes]:
        """Return the table as packed rows."""
        items = list(self.newest.items())
        return [msgpack.packb(items[at : at + KEYS_A_ROW]) for at in range(0, len(items), KEYS_A_ROW)]

    def restore(self, row: bytes, first_position: int) -> None:
        """Add the rows of `freeze`, except timers before *first_position*."""
        rows: Iterable[tuple[str, list[int]]] = msgpack.unpackb(row)
        for key, (due_ms, position) in rows:
            if position >= first_position:
                self.put(key, (due_ms, position))
