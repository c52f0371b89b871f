"""Random identifiers and choices, from one random source per broker.

This is the only module that uses randomness, so that a simulation can seed it.
"""

import random
from typing import Final, final

__all__ = ["Ids"]

_UNIQUE_BYTES: Final = 16


@final
class Ids:
    """Generates unique identifiers and random numbers."""

    __slots__ = ("_random", "below")

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self.below = source.randrange

    def unique(self) -> str:
        """Return 32 hexadecimal digits in upper case, the form of a RocketMQ UNIQ_KEY."""
        return self._random.randbytes(_UNIQUE_BYTES).hex().upper()
