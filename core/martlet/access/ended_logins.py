"""Logins in progress when somebody ends the logins of their user: what they prove is no longer enough.

A password is checked in a thread, and an exchange of a mechanism takes several steps. Both may use what was stored
before the change for which the logins were ended. So a login notes how many ends there were when it began, and is
refused if a later one was meant for its identity.
"""

from collections import deque
from collections.abc import Callable
from typing import Final, final

from martlet.contracts import Identity
from martlet.errors import Reason, Refused

__all__ = ["EndedLogins"]

# Ends that are remembered; a login during which there were more must begin again.
ENDS_MAX: Final = 256


@final
class EndedLogins:
    """The last ends of logins, and ``count``, the number of all."""

    def __init__(self) -> None:
        self.count = 0
        self._ends: deque[tuple[int, Callable[[Identity], bool], Refused]] = deque(maxlen=ENDS_MAX)

    def add(self, matches: Callable[[Identity], bool], refused: Refused) -> None:
        """Refuse the logins in progress of identities that *matches* accepts."""
        self._ends.append((self.count, matches, refused))
        self.count += 1

    def check(self, identity: Identity, begun: int) -> None:
        """Raise `Refused` if a login of *identity* was ended since ``count`` was *begun*."""
        if self.count - begun > len(self._ends):
            raise Refused(Reason.BUSY, "too many logins were ended during this one; log in again")
        for number, matches, refused in self._ends:
            if number >= begun and matches(identity):
                raise Refused(Reason.CREDENTIALS, str(refused))
