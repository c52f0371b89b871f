"""Sharing the event loop: long work is a generator of short slices, and of all long work one slice runs a turn.

Nothing may keep the event loop for more than 10 ms. What takes longer yields after about a
millisecond of work, counted in items and not in time, so that a simulation runs it the same way each time.
`Turns` is the one line in which all such work waits for its next slice: a hundred statistics at once cost a turn
of the loop no more than one.

A worker thread alone does not help work that computes in Python or in orjson. orjson.loads keeps the interpreter's lock
to its end: 15 MB of empty arrays in a thread stopped the loop for 1.7 s. Threads are for what releases
the lock: files, fdatasync, and slices with `finish_off_loop` between which it does so itself.
"""

import time
from collections.abc import Generator
from typing import Final, TypeAlias, TypeVar, final

import trio

__all__ = ["Pace", "Steps", "Turns", "begin", "finish_now", "finish_off_loop"]

T = TypeVar("T")

# Yields at the end of each slice, and returns what the work has made.
Steps: TypeAlias = Generator[None, None, T]

# A slice of steps that take a few microseconds each, such as the entries of a table: about a millisecond.
STEPS_AT_ONCE: Final = 256


@final
class Pace:
    """Counts the steps of long work, and says when a slice is over: ``if pace.is_over(): yield``."""

    __slots__ = ("_left", "_steps_at_once")

    def __init__(self, steps_at_once: int = STEPS_AT_ONCE) -> None:
        self._steps_at_once = steps_at_once
        self._left = steps_at_once

    def spend(self, steps: int) -> None:
        """*steps* more are done, where the slice cannot end."""
        self._left -= steps

    def is_over(self, steps: int = 1) -> bool:
        """Whether *steps* more have used up this slice; the next one begins then."""
        self._left -= steps
        if self._left > 0:
            return False
        self._left = self._steps_at_once
        return True


@final
class Turns:
    """The line in which long work waits for its next slice; first come, first served."""

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self.slices = 0

    async def finish(self, steps: Steps[T]) -> T:
        """Return what *steps* return in the end; others run between its slices. It is closed when this is cancelled."""
        try:
            while True:
                # Taking the lock passes through the event loop, whether or not anybody else wants it.
                async with self._lock:
                    self.slices += 1
                    next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            steps.close()

    def statistics(self) -> dict[str, object]:
        waiting = self._lock.statistics().tasks_waiting
        return {"slices": self.slices, "waiting": waiting}


def begin(steps: Steps[T]) -> Steps[T]:
    """Run the first slice of *steps* now, and return the others."""
    try:
        next(steps)
    except StopIteration as done:
        return _finished(done.value)
    return steps


def _finished(result: T) -> Steps[T]:
    yield from ()
    return result


def finish_off_loop(steps: Steps[T]) -> T:
    """Return what *steps* return in the end; for a worker thread, which lets the event loop run after each slice.

    A thread that computes keeps the interpreter's lock for 5 ms before another gets it, at every turn of the loop.
    """
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        time.sleep(0)


def finish_now(steps: Steps[T]) -> T:
    """Return what *steps* return in the end, without a pause; for the end of a broker, and for what has no loop."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
