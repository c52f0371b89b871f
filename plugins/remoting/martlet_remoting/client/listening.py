"""Calling the user's listener, whether it is a plain function or a coroutine function."""

import inspect
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, unique
from functools import partial
from typing import TypeAlias, final

import trio

from .messages import ReceivedMessage

__all__ = ["Listener", "Listening", "Outcome", "is_coroutine_listener"]

log = logging.getLogger(__name__)


@final
@unique
class Outcome(Enum):
    """What became of a message; a listener that returns nothing means SUCCESS, one that raises RETRY."""

    SUCCESS = "success"
    RETRY = "retry"


Listener: TypeAlias = (
    Callable[[ReceivedMessage], Outcome | None] | Callable[[ReceivedMessage], Awaitable[Outcome | None]]
)


def is_coroutine_listener(listener: Listener) -> bool:
    """Whether *listener*, a function or an object, gives a coroutine when it is called."""
    call = getattr(listener, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call)


@final
class Listening:
    """Calls a listener, at most *concurrency* at a time; plain functions in threads, so that they may block."""

    def __init__(self, listener: Listener, concurrency: int) -> None:
        self._listener = listener
        self._is_async = is_coroutine_listener(listener)
        self._limiter = trio.CapacityLimiter(concurrency)
        self.running = 0
        self._idle = trio.Event()
        self.succeeded = 0
        self.failed = 0

    async def call(self, message: ReceivedMessage) -> tuple[Outcome, str]:
        """Return what became of *message*, and why it failed."""
        self.running += 1
        text = ""
        try:
            outcome = await self._call(message)
        except Exception as error:
            log.exception("listener failed on message %s of topic %r", message.message_id, message.topic)
            outcome, text = Outcome.RETRY, f"{type(error).__name__}: {error}"
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()
                self._idle = trio.Event()
        if outcome is Outcome.SUCCESS:
            self.succeeded += 1
        else:
            self.failed += 1
        return outcome, text

    async def wait_idle(self) -> None:
        """Return when no call is running."""
        while self.running:
            await self._idle.wait()

    async def _call(self, message: ReceivedMessage) -> Outcome:
        if self._is_async:
            async with self._limiter:
                outcome = await _resolved(self._listener(message))
        else:
            call = partial(_called, self._listener, message)
            outcome = await _resolved((await trio.to_thread.run_sync(call, limiter=self._limiter))[0])
        return outcome


def _called(listener: Listener, message: ReceivedMessage) -> tuple[Outcome | Awaitable[Outcome | None] | None]:
    """What *listener* returns, packed: trio lets no thread return the coroutine that a plain function may give."""
    return (listener(message),)


async def _resolved(result: Outcome | Awaitable[Outcome | None] | None) -> Outcome:
    if inspect.isawaitable(result):
        result = await result
    if result is None:
        return Outcome.SUCCESS
    if not isinstance(result, Outcome):
        raise TypeError(f"listener returned {result!r:.60}; an Outcome or None would be right")
    return result
