"""Identifiers and choices that need chance, from one random source per broker.

The only module that makes randomness: a simulation gives it a seed.
"""

import random
from typing import Final, final

__all__ = ["Ids"]

_UNIQUE_BYTES: Final = 16


@final
class Ids:
    """Makes what must not repeat, or must be spread."""

    __slots__ = ("_random", "below")

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self.below = source.randrange

    def unique(self) -> str:
        """Return 32 hexadecimal digits in upper case, the form of a RocketMQ UNIQ_KEY."""
        return self._random.randbytes(_UNIQUE_BYTES).hex().upper()
