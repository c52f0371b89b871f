"""Runs long work in a thread beside the event loop, and leaves the interpreter to the loop most of the time."""

import time
from typing import Final, TypeVar, final

import trio

from martlet.runtime.steps import PAUSE_S, Steps, finish_now

__all__ = ["PacedThread"]

T = TypeVar("T")

# Pause after a slice, as a multiple of its time.
PAUSES: Final = 2.0
# Longer pauses bring nothing: a slice was long because the processors are busy with something else.
PAUSE_MAX_S: Final = 0.02


@final
class PacedThread:
    """Runs steps in a worker thread, one work at a time."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, steps: Steps[T]) -> T:
        """Run *steps* to the end and return the result; cancellation ends them after the current slice."""
        return await trio.to_thread.run_sync(_finish, steps, limiter=self._limiter)


def _finish(steps: Steps[T]) -> T:
    began = time.perf_counter()

    def pause() -> None:
        nonlocal began
        took = time.perf_counter() - began
        time.sleep(min(max(took * PAUSES, PAUSE_S), PAUSE_MAX_S))
        trio.from_thread.check_cancelled()
        began = time.perf_counter()

    try:
        return finish_now(steps, pause)
    finally:
        steps.close()
