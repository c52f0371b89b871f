"""Worker threads for calls that may hang, such as requests to an object store: with a deadline, and a bound.

No thread can be stopped from outside. A call that misses its deadline is *abandoned*: its caller goes on with a
refusal, and the thread ends when the call returns, if ever. So these calls have threads of their own, and once too many
are abandoned, further calls are refused at once instead of hanging as well.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar, final

import trio

from martlet.errors import Reason, Refused
from martlet.runtime.live_calls import noted

__all__ = ["IoThreads"]

T = TypeVar("T")

# As many requests at once saturate a link to an object store, with ranges of some MiB each.
THREADS_MAX: Final = 8
# A thread takes about 100 KiB of memory while it hangs.
ABANDONED_MAX: Final = 32
DEADLINE_S: Final = 10.0


@final
class IoThreads:
    """Runs blocking calls in threads of its own.

    Args:
      name: says in refusals what the threads call, such as ``the object store``.
      threads_max: calls that run at the same time; others wait for their turn.
      abandoned_max: calls that may hang after their deadline.
      deadline_s: time for a call, the wait for its turn included.
    """

    def __init__(
        self,
        name: str,
        *,
        threads_max: int = THREADS_MAX,
        abandoned_max: int = ABANDONED_MAX,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.abandoned = 0  # calls that still hang after their deadline
        self._name = name
        self._abandoned_max = abandoned_max
        self._deadline_s = deadline_s
        self._turns = trio.Semaphore(threads_max)
        # Trio's own limiter counts abandoned threads too; the semaphore and the bound limit these.
        self._unlimited = trio.CapacityLimiter(math.inf)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of *work*, or raise its error; *work* is abandoned at the deadline and when cancelled.

        Raises:
          Refused: it did not return in time, or too many earlier calls hang (BUSY).
        """
        if self.abandoned >= self._abandoned_max:
            text = f"{self.abandoned} calls of {self._name} hang; try again when it answers"
            raise Refused(Reason.BUSY, text)
        with trio.move_on_after(self._deadline_s):
            async with self._turns:
                return await self._run(work)
        raise Refused(Reason.BUSY, f"{self._name} did not answer within {self._deadline_s:g} s; try again")

    async def _run(self, work: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()  # from here on the thread starts, whatever is cancelled
        call = _Call(self, trio.lowlevel.current_trio_token())

        def in_thread() -> T:
            try:
                return noted(work)
            finally:
                call.end()

        try:
            return await trio.to_thread.run_sync(in_thread, abandon_on_cancel=True, limiter=self._unlimited)
        except trio.Cancelled:
            call.abandon()
            raise


@final
class _Call:
    """A call in a thread; counts as abandoned from `abandon` until its end."""

    __slots__ = ("_is_abandoned", "_is_over", "_threads", "_token")

    def __init__(self, threads: IoThreads, token: trio.lowlevel.TrioToken) -> None:
        self._threads = threads
        self._token = token
        self._is_abandoned = self._is_over = False

    def abandon(self) -> None:
        if not self._is_over:
            self._is_abandoned = True
            self._threads.abandoned += 1

    def end(self) -> None:
        """Note the end of the call, on the event loop; called by the thread."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._note_end)

    def _note_end(self) -> None:
        self._is_over = True
        if self._is_abandoned:
            self._is_abandoned = False
            self._threads.abandoned -= 1
