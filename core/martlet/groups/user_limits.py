"""Counts the shared groups of each user, so that no user takes all the room.

A group counts twice: while it is in use, for the user who opened it, and with all its queues as long as its state is
kept, for the user who began it. After a restart nobody knows who began a group.
"""

from typing import TypeAlias, final

from martlet.errors import Reason, Refused
from martlet.settings import DeliveryConfig

__all__ = ["Place", "UserGroups"]

# The topic, the group and its scope.
Place: TypeAlias = tuple[str, str, str]


@final
class UserGroups:
    """The number of shared groups that each user has in use, and the number of queues of groups that each has begun."""

    def __init__(self, config: DeliveryConfig) -> None:
        self._config = config
        self._counts: dict[str, int] = {}
        self._queues: dict[str, int] = {}
        self._begun: dict[Place, tuple[str, int]] = {}

    def add(self, user: str | None) -> None:
        """Count one more group in use; None is the broker itself."""
        if user is not None:
            self._counts[user] = self._counts.get(user, 0) + 1

    def remove(self, user: str | None) -> None:
        """Count one group in use less."""
        if user is not None:
            _subtract(self._counts, user, 1)

    def begin(self, place: Place, user: str | None, queues: int) -> None:
        """Count the *queues* of a group that *user* begins, until `forget`."""
        if user is not None and place not in self._begun:
            self._begun[place] = user, queues
            self._queues[user] = self._queues.get(user, 0) + queues

    def forget(self, place: Place) -> None:
        """Stop counting a group whose state was dropped."""
        begun = self._begun.pop(place, None)
        if begun is not None:
            _subtract(self._queues, *begun)

    def is_full(self, user: str) -> bool:
        """Return whether *user* may use no more groups."""
        return self._counts.get(user, 0) >= self._config.shares_user_max

    def check(self, user: str) -> None:
        """Raise `Refused` (BUSY) if `is_full`."""
        if self.is_full(user):
            limit = self._config.shares_user_max
            text = (
                f"{_describe_user(user)} {self._counts[user]} shared groups in use; delivery.shares_user_max is {limit}"
            )
            raise Refused(Reason.BUSY, text)

    def has_queues(self, user: str | None, queues: int) -> bool:
        """Return whether *user* may begin a group with this many *queues*."""
        return user is None or self._queues.get(user, 0) + queues <= self._config.share_queues_user_max

    def check_queues(self, user: str | None, queues: int) -> None:
        """Raise `Refused` (BUSY) unless `has_queues`."""
        if user is not None and not self.has_queues(user, queues):
            held, limit = self._queues.get(user, 0), self._config.share_queues_user_max
            text = f"{_describe_user(user)} {held} queues of shared groups; delivery.share_queues_user_max is {limit}"
            raise Refused(Reason.BUSY, f"{text}, delete unused groups or topics")


def _subtract(table: dict[str, int], user: str, count: int) -> None:
    table[user] -= count
    if not table[user]:
        del table[user]


def _describe_user(user: str) -> str:
    return f"user {user!r} has" if user else "clients without a name have"
