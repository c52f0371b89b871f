"""The slow requests of one connection: work that its handler has started, each in a task of its own."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, final

import trio

from martlet.errors import MartletError, Reason, Refused
from martlet.net.output import Output

__all__ = ["RequestOwner", "SlowRequests"]


class RequestOwner(Protocol):
    """The peer that has slow requests."""

    output: Output

    def close(self, reason: str) -> None: ...

    def fail(self, error: Exception) -> None: ...


@final
class SlowRequests:
    """Runs at most *limit* slow requests of one peer; ``len`` counts those in progress."""

    __slots__ = ("_limit", "_scopes")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._scopes: set[trio.CancelScope] = set()

    def __len__(self) -> int:
        return len(self._scopes)

    def start(
        self, owner: RequestOwner, nursery: trio.Nursery, work: Callable[..., Awaitable[None]], args: tuple[Any, ...]
    ) -> None:
        """Run *work* in a task of *nursery*; an error closes *owner*. Raises `Refused` if too many are in progress."""
        limit = self._limit
        if len(self._scopes) >= limit:
            raise Refused(
                Reason.BUSY, f"{limit} slow requests of this connection are running; server.peer_tasks_max is {limit}"
            )
        scope = trio.CancelScope()
        self._scopes.add(scope)
        nursery.start_soon(self._run, owner, scope, work, args)

    async def _run(
        self, owner: RequestOwner, scope: trio.CancelScope, work: Callable[..., Awaitable[None]], args: tuple[Any, ...]
    ) -> None:
        try:
            with scope:
                await work(*args)
        except MartletError as error:
            owner.close(str(error))
        except Exception as error:
            owner.fail(error)
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                owner.output.note_progress()

    def cancel(self) -> None:
        """Cancel all."""
        for scope in self._scopes:
            scope.cancel()
