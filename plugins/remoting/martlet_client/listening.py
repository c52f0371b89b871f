"""Calls the user's listener, which is a plain function or a coroutine function.

If a listener raises, that message failed and is retried. If it returns an invalid value, the
consumer cannot know whether any message is done, so it stops with an error instead of
turning message after message into a dead letter.
"""

import inspect
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, unique
from functools import partial
from typing import Final, TypeAlias, final

import trio

from martlet_client.arguments import check_callable, check_integer
from martlet_remoting.wire.answers.messages import ReceivedMessage

__all__ = ["Listener", "Listening", "Outcome", "check_listener", "is_coroutine_listener"]

log = logging.getLogger(__name__)

# Far more than needed, and few enough to start quickly.
CONCURRENCY_MAX: Final = 10_000


@final
@unique
class Outcome(Enum):
    """The result of a listener for a message.

    ``SUCCESS``, or None: the message is done. ``RETRY``, or an exception: it is delivered again later.
    """

    SUCCESS = "success"
    RETRY = "retry"


# A listener is a plain or a coroutine function of one message.
Listener: TypeAlias = (
    Callable[[ReceivedMessage], Outcome | None] | Callable[[ReceivedMessage], Awaitable[Outcome | None]]
)


def is_coroutine_listener(listener: Listener) -> bool:
    """Whether *listener*, a function or an object, returns a coroutine when it is called."""
    call = getattr(listener, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(listener) or inspect.iscoroutinefunction(call)


@final
class Listening:
    """Calls a listener, at most *concurrency* times at once; plain functions in threads, so that they may block.

    *broken* is called once if the listener returns an invalid value.
    """

    def __init__(self, listener: Listener, concurrency: int, broken: Callable[[Exception], None]) -> None:
        check_listener(listener)
        check_integer("concurrency", concurrency, 1, CONCURRENCY_MAX)
        self._listener = listener
        self._broken = broken
        self._is_async = is_coroutine_listener(listener)
        self._limiter = trio.CapacityLimiter(concurrency)
        self.running = 0
        self._idle = trio.Event()
        self.succeeded = 0
        self.failed = 0

    async def call(self, message: ReceivedMessage) -> tuple[Outcome | None, str]:
        """Return the outcome of *message*, and why it failed; None if the listener is broken."""
        self.running += 1
        text = ""
        outcome: Outcome | None
        try:
            result = await self._call(message)
        except Exception as error:
            log.exception("listener failed on message %s of topic %r", message.message_id, message.topic)
            outcome, text = Outcome.RETRY, f"{type(error).__name__}: {error}"
        else:
            outcome = Outcome.SUCCESS if result is None else result if isinstance(result, Outcome) else None
            text = self._report(message, result) if outcome is None else ""
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
        """Wait until no call is running."""
        while self.running:
            await self._idle.wait()

    async def _call(self, message: ReceivedMessage) -> object:
        if self._is_async:
            async with self._limiter:
                return await _resolved(self._listener(message))
        call = partial(_called, self._listener, message)
        return await _resolved((await trio.to_thread.run_sync(call, limiter=self._limiter))[0])

    def _report(self, message: ReceivedMessage, result: object) -> str:
        error = TypeError(
            f"listener returned {result!r:.60} for message {message.message_id} of topic {message.topic!r}; "
            "return Outcome.SUCCESS, Outcome.RETRY or None"
        )
        log.error("consumer stops: %s", error)
        self._broken(error)
        return str(error)


def check_listener(listener: object) -> None:
    """Raise TypeError if *listener* cannot be called with one message."""
    check_callable("listener", listener, "def listener(message): ...", 1)


def _called(listener: Listener, message: ReceivedMessage) -> tuple[object]:
    """Return the listener's result in a tuple: trio refuses a coroutine as the result of a thread."""
    return (listener(message),)


async def _resolved(result: object) -> object:
    return await result if inspect.isawaitable(result) else result
