"""Ends what clients may no longer do, without waiting for the next message.

Every delivery asks whether its client may still read, so after a change of the rules nothing is delivered that they
deny. But a client that waits would learn of the change only from the next message. So after a change, `Revocation`
visits everything that waits, some in each turn of the event loop: ten thousand clients may wait, and each question may
ask the authorizers again. What is denied wakes its client, and the delivery then ends it in the words of the protocol.

The same holds for logins: whoever is disabled, or has a new password, is still connected with the old one. The end of a
login visits all connections, and the requests that wait in the name of an identity that signed them.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeAlias, final

import trio

from martlet.contracts import Identity
from martlet.errors import Refused
from martlet.runtime.steps import Budget, Steps

__all__ = ["Login", "Revocation", "Waiter"]

log = logging.getLogger("martlet.access")

# Cost of the questions of one waiter, of which an authorizer answers the first after a change.
RECHECK_US: Final = 20.0
# Cost of the look at a login, and of its end in such looks.
LOGIN_US: Final = 2.0
END_STEPS: Final = 20

# An identity that acts now, and what ends that, with the reason for the client.
Login: TypeAlias = tuple[Identity, Callable[[Refused], None]]


class Waiter(Protocol):
    """What waits for messages that its client may read, such as a subscription or a request that is held."""

    def recheck(self) -> Steps[None] | None:
        """Ask again whether the client may read; if not, let the delivery end what waits, which refuses it.

        Returns the remaining steps, if there are many questions.
        """
        ...


@final
class Revocation:
    """Visits what waits after each change of the rules, and clients whose login is ended, while `run` runs.

    ``waiting`` has functions that yield what waits, ``logins`` functions that yield logins. A plugin adds one for what
    the core does not know. Such a function must tolerate that others come and go between two of its results.
    """

    def __init__(self) -> None:
        self.waiting: list[Callable[[], Iterator[Waiter]]] = []
        self.logins: list[Callable[[], Iterator[Login]]] = []
        self._visits: deque[Steps[None]] = deque()
        self._is_queued = False  # whether a visit of all waiters has not begun yet
        self._work = trio.Event()

    def recheck_all(self) -> None:
        """Let everything that waits check its permission: now, or after the visit in progress."""
        if not self._is_queued:
            self._is_queued = True
            self._queue(self._recheck_all())

    def end_logins(self, matches: Callable[[Identity], bool], refused: Refused) -> None:
        """End the logins of identities that *matches* accepts."""
        self._queue(self._end_logins(matches, refused))

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

    def _end_logins(self, matches: Callable[[Identity], bool], refused: Refused) -> Steps[None]:
        budget = Budget(LOGIN_US)
        for logins in self.logins:
            for identity, end in logins():
                try:
                    if matches(identity):
                        budget.spend(END_STEPS)
                        end(refused)
                except Exception:  # a bug in one costs no other
                    log.exception("a login of %r was not ended because of a bug", identity.name)
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
