"""Wakes a task that works in rounds."""

from typing import final

import trio

__all__ = ["Wakeup"]


@final
class Wakeup:
    """Any code may `set` it, and the task waits for it; a `set` during a round causes another round."""

    __slots__ = ("_event", "_is_set")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._is_set = False

    def set(self) -> None:
        """Request another round of the task."""
        if not self._is_set:
            self._is_set = True
            self._event.set()

    async def wait(self) -> None:
        """Return once it was set after the last return."""
        await self._event.wait()
        self._event = trio.Event()
        self._is_set = False
