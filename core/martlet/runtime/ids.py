"""Random identifiers and choices, from the random sources of one broker.

This is the only module of the core that uses randomness, so that a simulation can seed it.
"""

import random
from typing import Final, final

__all__ = ["Ids"]

_UNIQUE_BYTES: Final = 16
_KEY_BYTES: Final = 32


@final
class Ids:
    """Generates unique identifiers and random numbers.

    Without a *source* nobody can predict an identifier from others: they come from the operating system. Numbers come
    from a separate Mersenne Twister, which is faster; use them for nothing that must stay secret. With a *source*, both
    come from it, and are the same for the same seed.
    """

    def __init__(self, source: random.Random | None = None) -> None:
        self._randbytes = (source or random.SystemRandom()).randbytes
        self.below = (source or random.Random()).randrange

    def key(self) -> bytes:
        """Return 32 random bytes, a key for keyed hashes."""
        return self._randbytes(_KEY_BYTES)

    def unique(self) -> str:
        """Return 32 hexadecimal digits in upper case, the form of a RocketMQ UNIQ_KEY."""
        return self._randbytes(_UNIQUE_BYTES).hex().upper()
