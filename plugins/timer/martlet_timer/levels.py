"""The table of delay levels, in RocketMQ's notation (``messageDelayLevel``)."""

import re
from typing import Final

from martlet.errors import ConfigError

__all__ = ["LEVELS_MAX", "parse_levels"]

# Each level has a queue, which the broker keeps open.
LEVELS_MAX: Final = 256
UNITS_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
# The longest delay is about 27 years.
_DELAY: Final = re.compile(r"(\d{1,4})([smhd])")


def parse_levels(text: str) -> tuple[int, ...]:
    """Return the delays in ms of *text*, such as ``1s 5s 2h``, from level 1 on.

    Raises:
      ConfigError: it is not a list of 1 to 256 delays.
    """
    words = text.split()
    if not 1 <= len(words) <= LEVELS_MAX:
        raise ConfigError(f"timer.levels {text!r} has {len(words)} delays; give 1 to {LEVELS_MAX}")
    return tuple(map(_delay_ms, words))


def _delay_ms(word: str) -> int:
    match = _DELAY.fullmatch(word)
    if match is None:
        raise ConfigError(f"timer.levels has {word!r}, which is no delay; write up to 4 digits and s, m, h or d")
    return int(match[1]) * UNITS_MS[match[2]]
