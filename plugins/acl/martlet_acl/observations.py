"""What the rules would have refused while they were only observed: a bounded report."""

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final, final

from msgspec import Struct

from martlet.contracts import Question, Verdict

__all__ = ["Observation", "Observations"]

# Different refusals that are remembered, some 500 bytes each; of more, those that happened least recently are dropped.
OBSERVATIONS_MAX: Final = 2000
# Longer names are cut: they come from clients. A rule has no longer one, so there is none for the part that is left.
NAME_MAX: Final = 1024


class Observation(Struct):
    """One thing that would be refused: a request, or a login, whose *action* is ``login`` and whose *name* the method.

    Args:
      subject: the user, or what the client claimed to be; empty for anonymous clients.
      rule: the rule that denies it; empty if no rule allows it.
      groups: those that the token of the user named when it happened last.
    """

    subject: str
    action: str
    kind: str
    name: str
    reason: str
    rule: str = ""
    address: str = ""
    protocol: str = ""
    count: int = 0
    first_ms: int = 0
    last_ms: int = 0
    groups: tuple[str, ...] = ()


@final
class Observations:
    """Counts refusals that did not happen; thread-safe, because passwords are checked in worker threads."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._lock = Lock()
        self._found: OrderedDict[tuple[str, str, str, str], Observation] = OrderedDict()
        self.count = 0
        self.dropped = 0  # observations that were dropped because there were too many

    def note_request(self, question: Question, verdict: Verdict, protocol: str) -> None:
        """Count a request that the rules would refuse."""
        subject, address = question.identity.name, question.address
        new = Observation(
            subject, question.action, question.kind, question.name, verdict.reason, verdict.rule, address, protocol
        )
        new.groups = question.identity.groups
        self._note(new)

    def note_login(self, user: str, method: str, reason: str) -> None:
        """Count a login that would be refused."""
        self._note(Observation(user, "login", "", method, reason))

    def _note(self, new: Observation) -> None:
        key = (new.subject[:NAME_MAX], new.action, new.kind, new.name[:NAME_MAX])
        with self._lock:
            self.count += 1
            found = self._found.get(key)
            if found is None:
                if len(self._found) >= OBSERVATIONS_MAX:
                    self._found.popitem(last=False)
                    self.dropped += 1
                new.subject, new.name = key[0], key[3]
                new.first_ms = self._now_ms()
                found = self._found[key] = new
            else:
                self._found.move_to_end(key)
                found.rule, found.reason = new.rule, new.reason
                found.address, found.protocol, found.groups = new.address, new.protocol, new.groups
            found.count += 1
            found.last_ms = self._now_ms()

    def report(self) -> list[Observation]:
        """Return what would have been refused, the most recent first."""
        with self._lock:
            return list(reversed(self._found.values()))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._found.clear()
            self.count = self.dropped = 0
