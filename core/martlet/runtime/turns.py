"""The queue in which long work waits for its next slice (`steps.py`)."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, final

import trio

from martlet.runtime.steps import Blocking, WaitingSteps

__all__ = ["Turns"]

T = TypeVar("T")


@final
class Turns:
    """The queue in which long work waits for its next slice; first come, first served."""

    def __init__(self, off_loop: Callable[[Blocking[Any]], Awaitable[None]] = trio.to_thread.run_sync) -> None:
        self._off_loop = off_loop
        self._lock = trio.Lock()
        self.slices = 0
        self.off_loop = 0  # number of works that wait for a thread now

    async def finish(self, steps: WaitingSteps[T]) -> T:
        """Run *steps* to the end and return the result; other work runs between slices. Cancellation closes *steps*."""
        try:
            while True:
                # Acquiring the lock is a checkpoint even when nobody else wants it.
                async with self._lock:
                    self.slices += 1
                    yielded = next(steps)
                if isinstance(yielded, Blocking):
                    self.off_loop += 1
                    try:
                        await self._off_loop(yielded)
                    finally:
                        self.off_loop -= 1
                elif yielded is not None:
                    await yielded()
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            steps.close()

    async def wait(self) -> None:
        """Return in a later turn of the event loop, in which no other work of the queue runs.

        Long work that cannot be a generator calls this between its slices.
        """
        async with self._lock:
            self.slices += 1

    def statistics(self) -> dict[str, object]:
        waiting = self._lock.statistics().tasks_waiting
        return {"slices": self.slices, "waiting": waiting, "off_loop": self.off_loop}
