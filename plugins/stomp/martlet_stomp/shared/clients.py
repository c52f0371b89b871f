"""Connected clients and their durable subscriptions, as the parts of the plugin see them that do not serve them."""

from collections.abc import Iterator
from typing import Protocol

__all__ = ["Connected", "DurableUse"]


class Connected(Protocol):
    """A connected client."""

    session: str

    def described(self) -> dict[str, object]:
        """Return a row of the list of connections."""
        ...

    def described_subscriptions(self) -> Iterator[dict[str, object]]:
        """Yield a row of the list of subscriptions for each."""
        ...

    def say_goodbye(self) -> None:
        """Tell the client that the broker stops."""
        ...


class DurableUse(Protocol):
    """A subscription of some connection that uses a durable subscription."""

    number: int  # of its connection

    def lose(self, reason: str) -> None:
        """End the subscription and its connection."""
        ...
