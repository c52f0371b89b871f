"""Views of connected clients and of durable subscriptions in use, for other parts of the plugin."""

from collections.abc import Iterator
from typing import Protocol

__all__ = ["Connected", "DurableUse"]


class Connected(Protocol):
    """A connected client."""

    session: str

    def described(self) -> dict[str, object]:
        """Return the client's row in the list of connections."""
        ...

    def described_subscriptions(self) -> Iterator[dict[str, object]]:
        """Yield a row of the list of subscriptions for each subscription."""
        ...

    def say_goodbye(self) -> None:
        """Tell the client that the broker stops."""
        ...


class DurableUse(Protocol):
    """The use of a durable subscription by a connection."""

    number: int  # number of the subscription on its connection

    def lose(self, reason: str) -> None:
        """End the subscription and its connection."""
        ...
