"""Counts the shared groups that each user has in use, so that none uses up the room of all."""

from typing import final

from martlet.errors import Reason, Refused
from martlet.settings import DeliveryConfig

__all__ = ["UserShares"]


@final
class UserShares:
    """How many shared groups each user has in use; a group counts for the user who opened it."""

    def __init__(self, config: DeliveryConfig) -> None:
        self._limit = config.shares_user_max
        self._counts: dict[str, int] = {}

    def add(self, user: str | None) -> None:
        """Count one more group of *user*; None is the broker itself."""
        if user is not None:
            self._counts[user] = self._counts.get(user, 0) + 1

    def remove(self, user: str | None) -> None:
        """Count one group of *user* less."""
        if user is None:
            return
        left = self._counts[user] - 1
        if left:
            self._counts[user] = left
        else:
            del self._counts[user]

    def is_full(self, user: str) -> bool:
        """Return whether *user* may use no more groups."""
        return self._counts.get(user, 0) >= self._limit

    def check(self, user: str) -> None:
        """Raise `Refused` (BUSY) if `is_full`."""
        if self.is_full(user):
            who = f"user {user!r} uses" if user else "clients without a name use"
            text = f"{who} {self._counts[user]} shared groups; delivery.shares_user_max is {self._limit}"
            raise Refused(Reason.BUSY, text)
