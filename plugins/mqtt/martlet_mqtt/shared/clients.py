"""Connected clients, as the parts of the plugin see them that do not serve them: administrators, metrics, take-over."""

from collections.abc import Mapping
from typing import Protocol

from martlet.contracts import Identity

__all__ = ["Connected"]


class Connected(Protocol):
    """A connected client."""

    @property
    def identity(self) -> Identity:
        """Who the client is."""
        ...

    @property
    def is_stored(self) -> bool:
        """Whether the session outlives the connection."""
        ...

    @property
    def dropped(self) -> int:
        """The number of messages of QoS 0 that it did not get because it was too slow."""
        ...

    @property
    def filters(self) -> Mapping[str, bytes]:
        """The filters of its session, with options as `subscribing.grant_of` takes them."""
        ...

    def described(self) -> dict[str, object]:
        """Return a row of the list of clients."""
        ...

    def lose(self, reason: str) -> None:
        """End the connection because another one uses its client identifier."""
        ...

    def kick(self) -> None:
        """End the connection because an administrator wishes so."""
        ...

    def say_goodbye(self) -> None:
        """Tell the client that the broker stops."""
        ...
