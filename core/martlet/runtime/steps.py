"""Runs long work on the event loop in short slices.

Nothing may block the event loop for more than 10 ms. Longer work is a generator that yields after a slice
of about a millisecond. Its `Budget` adds up declared costs instead of reading a clock, so that a simulation is
reproducible; `per_slice` derives from the same costs how many items a turn of the event loop takes. All such work
waits in one queue, `Turns`, and each turn of the event loop runs at most one slice: a hundred concurrent
requests for statistics delay a turn no more than one.

A worker thread does not help if the work computes in Python or in orjson. orjson.loads holds the interpreter's lock
to its end: 15 MB of empty arrays in a thread blocked the loop for 1.7 s. Use threads for work that releases
the lock: file access (`off_loop` in the middle of a slice), fdatasync, and slices with `finish_off_loop`, which
releases it between slices.
"""

import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

__all__ = [
    "SLICE_US",
    "Blocking",
    "Budget",
    "Steps",
    "Wait",
    "WaitingSteps",
    "begin",
    "finish_now",
    "finish_off_loop",
    "off_loop",
    "per_slice",
    "resume",
    "wait_for",
]

T = TypeVar("T")


@final
class Blocking(Generic[T]):
    """Work that may wait for the disk. A slice that yields it continues after the work is done; see `off_loop`."""

    __slots__ = ("_error", "_results", "_work")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._results: list[T] = []
        self._error: Exception | None = None

    def __call__(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:
            self._error = error

    def result(self) -> T:
        """Return the result of the work, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._results[0]


# Yields None at the end of a slice, or `Blocking` work to do before the next slice, and returns the result. It is `Any`
# because mypy allows a bare ``yield`` only for None and Any.
Steps: TypeAlias = Generator[Any, None, T]

# Called and awaited between two slices, for example until a condition holds.
Wait: TypeAlias = Callable[[], Awaitable[None]]

# `Steps` that may also yield a function that waits, to be called before the next slice. Only `Turns.finish` runs them.
WaitingSteps: TypeAlias = Generator[Blocking[Any] | Wait | None, None, T]

# The work of one slice, in microseconds by the costs that modules declare. They were measured on a slow machine
# (benchmarks/slices.py, benchmarks/pauses.py); on a faster machine all slices are shorter by the same factor.
SLICE_US: Final = 1000.0


def per_slice(us: float) -> int:
    """Return the number of items that fit into a slice, at least one; each costs *us* microseconds."""
    return max(int(SLICE_US / us), 1)


@final
class Budget:
    """The time left in a slice of long work, in steps of *step_us* microseconds: ``if budget.is_over(): yield``.

    The default is the cost of a step like an entry of a table.
    """

    __slots__ = ("_left", "_steps")

    def __init__(self, step_us: float = 4.0) -> None:
        self._steps = per_slice(step_us)
        self._left = self._steps

    def spend(self, steps: int) -> None:
        """Count *steps* more at a point where the slice cannot end."""
        self._left -= steps

    def is_over(self, steps: int = 1) -> bool:
        """Count *steps* more and return whether this slice is used up; if so, start the next one."""
        self._left -= steps
        if self._left > 0:
            return False
        self._left = self._steps
        return True


# The pause of a worker thread after a slice. It makes the event loop late by 4 ms at most; one of 0 s by 20 to 60 ms
# (benchmarks/policies.py).
PAUSE_S: Final = 0.00005


def begin(steps: Steps[T]) -> Steps[T]:
    """Run the first slice of *steps* now; return the remaining steps."""
    try:
        first = next(steps)
    except StopIteration as done:
        return _finished(done.value)
    return resume(first, steps)


def resume(yielded: Blocking[Any] | None, steps: Steps[T]) -> Steps[T]:
    """Return the remaining *steps*; *yielded* is the result of their last slice."""
    return steps if yielded is None else _after(yielded, steps)


def _after(blocking: Blocking[Any], steps: Steps[T]) -> Steps[T]:
    yield blocking
    return (yield from steps)


def off_loop(work: Callable[[], T]) -> Steps[T]:
    """Run *work*, which may wait for the disk, in a worker thread, and return its result.

    Call it with ``yield from``. `finish_now` and `finish_off_loop` run *work* in their own thread.
    """
    blocking = Blocking(work)
    yield blocking
    return blocking.result()


def wait_for(work: Callable[[], Awaitable[T]]) -> WaitingSteps[T]:
    """Await *work* between two slices, and return its result. Call it with ``yield from``; see `WaitingSteps`."""
    results: list[T] = []
    errors: list[Exception] = []

    async def wait() -> None:
        try:
            results.append(await work())
        except Exception as error:
            errors.append(error)

    yield wait
    if errors:
        raise errors.pop()
    return results[0]


def _finished(result: T) -> Steps[T]:
    yield from ()
    return result


def finish_off_loop(steps: Steps[T]) -> T:
    """Run *steps* to the end in a worker thread and return the result; let the event loop run after each slice.

    Without the pauses, a computing thread holds the interpreter's lock for 5 ms each time the event loop wants it; with
    pauses of 0 s it often takes the lock again before the event loop has woken up.
    """
    return finish_now(steps, lambda: time.sleep(PAUSE_S))


def _go_on() -> None:
    """Do nothing."""


def finish_now(steps: Steps[T], pause: Callable[[], None] = _go_on) -> T:
    """Run *steps* to the end and return the result; for shutdown and code without an event loop.

    *pause* is called after each slice; by default the next one follows at once.
    """
    while True:
        try:
            blocking = next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
        if blocking is not None:
            blocking()
        pause()
