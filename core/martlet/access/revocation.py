"""Ends what clients may no longer do, without waiting for the next message.

Every delivery asks whether its client may still read, so after a change of the rules nothing is delivered that they
deny. But a client that waits would learn of the change only from the next message. So after a change, `Revocation`
visits everything that waits, some in each turn of the event loop: ten thousand clients may wait, and each question may
ask the authorizers again. What is denied wakes its client, and the delivery then ends it in the words of the protocol.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol, final

import trio

from martlet.runtime.steps import Budget, Steps

__all__ = ["Revocation", "Waiter"]

log = logging.getLogger("martlet.access")

# Cost of the questions of one waiter, of which an authorizer answers the first after a change.
RECHECK_US: Final = 20.0


class Waiter(Protocol):
    """What waits for messages that its client may read, such as a subscription or a request that is held."""

    def recheck(self) -> Steps[None] | None:
        """Ask again whether the client may read; if not, let the delivery end what waits, which refuses it.

        Returns the remaining steps, if there are many questions.
        """
        ...


@final
class Revocation:
    """Visits everything that waits after each change of the rules, while `run` runs.

    ``waiting`` has functions that yield what waits; a plugin adds one for what the core does not know. Such a function
    must tolerate that waiters come and go between two of its results.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Iterator[Waiter]]] = []
        self._visits: deque[Steps[None]] = deque()
        self._is_queued = False  # whether a visit of all waiters has not begun yet
        self._work = trio.Event()

    def recheck_all(self) -> None:
        """Let everything that waits check its permission: now, or after the visit in progress."""
        if not self._is_queued:
            self._is_queued = True
            self._queue(self._recheck_all())

    def _queue(self, visit: Steps[None]) -> None:
        self._visits.append(visit)
        self._work.set()

    def _recheck_all(self) -> Steps[None]:
        self._is_queued = False
        budget = Budget(RECHECK_US)
        for waiters in self.waiting:
            for waiter in waiters():
                try:
                    steps = waiter.recheck()
                    if steps is not None:
                        yield from steps
                except Exception:  # a bug in one costs no other
                    log.exception("a permission was not checked because of a bug; the next delivery checks it again")
                if budget.is_over():
                    yield

    @property
    def is_visiting(self) -> bool:
        """Whether waiters are still to be visited."""
        return bool(self._visits)

    def visit_some(self) -> None:
        """Do the next slice of the visits."""
        visit = self._visits[0]
        try:
            next(visit)
        except StopIteration:
            self._visits.popleft()

    async def run(self) -> None:
        """Visit in slices, until cancelled."""
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while self._visits:
                self.visit_some()
                await trio.lowlevel.checkpoint()
