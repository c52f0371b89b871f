"""Runs a trio client in its own thread, for programs that do not run trio.

Callers get `concurrent.futures.Future` objects: blocking code waits for
them, asyncio wraps them, and cancelling one cancels the call in the thread.
"""

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from functools import wraps
from typing import Concatenate, Generic, ParamSpec, TypeVar, final

import trio

from martlet_client.network import NetworkClient
from martlet_remoting.wire.answers.errors import ClientClosed

__all__ = ["Bridged", "Portal", "direct"]

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=NetworkClient)


@final
class Portal(Generic[C]):
    """Keeps *client* open in a thread, from `open` to `close`."""

    def __init__(self, client: C) -> None:
        self.client = client
        self._opened: Future[None] = Future()
        self._closed: Future[None] = Future()
        # Marked as running from the start: a waiter may give up, but cannot cancel them.
        self._opened.set_running_or_notify_cancel()
        self._closed.set_running_or_notify_cancel()
        self._close_wanted = False
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._closing: trio.Event | None = None

    def open(self) -> Future[None]:
        """Start the thread; the future is done when the client is open, or holds the reason why it cannot open."""
        if self._thread is not None:
            raise ClientClosed("client was opened before; make a new one")
        # A daemon, so that a program that forgets to close still ends.
        self._thread = threading.Thread(target=self._run, name=f"martlet-client-{self.client.client_id}", daemon=True)
        self._thread.start()
        return self._opened

    def close(self) -> Future[None]:
        """Close the client; the future is done when its thread has finished."""
        if self._thread is None:
            raise ClientClosed("client was never opened")
        # Set this first: the thread may check it at this moment.
        self._close_wanted = True
        if self._token is not None and self._closing is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._closing.set)
        return self._closed

    def when_failed(self, tell: Callable[[], object]) -> None:
        """Call *tell*, in some thread, if the client stops by itself with an error."""

        def closed(done: "Future[None]") -> None:
            if done.exception() is not None:
                with suppress(RuntimeError):  # the caller's event loop may be closed
                    tell()

        self._closed.add_done_callback(closed)

    def call(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run *function* in the client's thread."""
        future: Future[T] = Future()
        if self._closed.done() and (failure := self._closed.exception()) is not None:
            future.set_exception(ClientClosed(f"client has stopped: {failure}"))
            return future
        if self._token is None or self._closed.done():
            future.set_exception(ClientClosed("client is not open; enter it with 'with' or 'async with' first"))
            return future
        try:
            self._token.run_sync_soon(self._begin, function, future)
        except trio.RunFinishedError:
            future.set_exception(ClientClosed("client is closed"))
        return future

    def run_sync_soon(self, function: Callable[[], object]) -> None:
        """Run a plain *function* in the client's thread without waiting for it."""
        if self._token is not None:
            self._token.run_sync_soon(function)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
                self._closed.set_result(None)
            else:
                self._closed.set_exception(error)
        else:
            self._closed.set_result(None)

    async def _main(self) -> None:
        self._closing = trio.Event()
        async with self.client, trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            self._opened.set_result(None)
            if not self._close_wanted:
                await self._closing.wait()
            nursery.cancel_scope.cancel()

    def _begin(self, function: Callable[[], Awaitable[T]], future: "Future[T]") -> None:
        assert self._nursery is not None
        if self._closing is not None and self._closing.is_set():
            _settle(future, ClientClosed("client is closed"))
        else:
            self._nursery.start_soon(self._carry_out, function, future)

    async def _carry_out(self, function: Callable[[], Awaitable[T]], future: "Future[T]") -> None:
        token = trio.lowlevel.current_trio_token()
        with trio.CancelScope() as scope:

            def cancelled(done: "Future[T]") -> None:
                if done.cancelled():
                    try:
                        token.run_sync_soon(scope.cancel)
                    except trio.RunFinishedError:
                        return

            future.add_done_callback(cancelled)
            try:
                result = await function()
            except trio.Cancelled:
                _settle(future, ClientClosed("client was closed during the call"))
                raise
            except Exception as error:
                _settle(future, error)
            else:
                try:
                    future.set_result(result)
                except InvalidStateError:
                    return


def _settle(future: "Future[T]", error: BaseException) -> None:
    try:
        future.set_exception(error)
    except (InvalidStateError, CancelledError):
        return


class Bridged(Generic[C]):
    """Base of the asyncio and blocking classes: a trio client in its thread. Subclasses add entering and calling."""

    def __init__(self, client: C) -> None:
        self._client = client
        self._portal = Portal(client)

    @property
    def client_id(self) -> str:
        """How brokers list this client."""
        return self._client.client_id


def direct(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[Bridged[C], P], T]:
    """Return *method* of a trio client for its asyncio and blocking classes; it runs in the caller's thread."""

    @wraps(method)
    def call(self: Bridged[C], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._client, *args, **kwargs)

    return call
