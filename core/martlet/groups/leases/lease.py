"""The state of one message that a shared group has delivered and not settled."""

from collections.abc import Hashable
from typing import Final, final

__all__ = ["DEAD_DELIVERIES", "Lease"]

# Notes and snapshots mark a dead message with this number of deliveries.
DEAD_DELIVERIES: Final = 1 << 20


@final
class Lease:
    """A message that is delivered and not settled; without a ``holder`` it is waiting or dead.

    The messages of a first delivery have one lease together, and so have restored ones that are alike. It never changes
    (``shared``); a message whose state changes gets its own first.
    """

    __slots__ = ("before", "dead", "deliveries", "generation", "holder", "length_s", "settling", "shared", "until")

    def __init__(
        self,
        holder: Hashable | None,
        until: float,
        generation: int,
        length_s: float,
        deliveries: int = 1,
        *,
        shared: bool = False,
    ) -> None:
        self.holder: Hashable | None = holder
        self.until = until
        self.generation = generation
        self.length_s = length_s
        self.shared = shared
        self.deliveries = deliveries
        self.dead = False
        # An acknowledgement is in the current commit: only its result or the deadline may change the state now.
        self.settling = False
        self.before = until  # the deadline without it
