"""Wakes one task that works in rounds."""

from typing import final

import trio

__all__ = ["Wakeup"]


@final
class Wakeup:
    """Anything may `set` it; the task waits, and what is set from then on is for its next round."""

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._is_set = False

    def set(self) -> None:
        """Have the task make another round."""
        if not self._is_set:
            self._is_set = True
            self._event.set()

    async def wait(self) -> None:
        """Return once it was set since the last return."""
        await self._event.wait()
        self._event = trio.Event()
        self._is_set = False
