"""The view of a connected client for other parts of the plugin: administrators' requests, metrics, take-over."""

from collections.abc import Mapping
from typing import Protocol

from martlet.contracts import Identity

__all__ = ["Connected"]


class Connected(Protocol):
    """A connected client."""

    @property
    def identity(self) -> Identity:
        """The client's identity."""
        ...

    @property
    def is_stored(self) -> bool:
        """Whether the session outlives the connection."""
        ...

    @property
    def dropped(self) -> int:
        """The number of QoS 0 messages dropped because the client was too slow."""
        ...

    @property
    def filters(self) -> Mapping[str, bytes]:
        """The topic filters of its session, with their options as `stored_subscriptions.grant_of` takes them."""
        ...

    def described(self) -> dict[str, object]:
        """Return the client's row in the list of clients."""
        ...

    def lose(self, reason: str) -> None:
        """End the connection because another one uses its client identifier."""
        ...

    def kick(self) -> None:
        """End the connection because an administrator asked for it."""
        ...

    def say_goodbye(self) -> None:
        """Tell the client that the broker stops."""
        ...
