"""The users whose logins count only while the plugin observes."""

from typing import Final, final

from martlet.contracts import Identity

__all__ = ["Unproved"]

NAMES_MAX: Final = 10_000


@final
class Unproved:
    """Names that clients got without proof, or by a proof that is no longer valid, while rules were only observed.

    Their logins must end when rules are enforced. Beyond `NAMES_MAX` names every user is one of them. Worker threads
    add names as well.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._are_all = False

    def add(self, name: str) -> None:
        """Add a user; clients without a name have nothing to prove."""
        if name:
            self._are_all = self._are_all or len(self._names) >= NAMES_MAX
            if not self._are_all:
                self._names.add(name)

    def has(self, identity: Identity) -> bool:
        """Whether the logins of *identity* are to end."""
        return bool(identity.name) and (self._are_all or identity.name in self._names)
