"""How fast a peer is served."""

from collections.abc import Callable
from typing import Protocol

__all__ = ["Pace"]


class Pace(Protocol):
    """How fast the server reads from one peer and delivers to it; slower if the quota of its client is used up.

    Times are those of trio's clock.
    """

    receive_bytes: int  # the most that is read from the peer at once

    def slow_reading(self, until: float) -> None:
        """Handle no more events of the peer before *until*, and read nothing.

        Meanwhile it may be silent without missing a deadline.
        """
        ...

    def slow_delivery(self, until: float) -> None:
        """Call `Handler.collect` no more before *until*."""
        ...

    def on_end(self, tell: Callable[[], None]) -> None:
        """Call *tell* when the connection ends or begins to close."""
        ...
