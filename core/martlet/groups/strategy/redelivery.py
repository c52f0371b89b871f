"""The pause before a message is delivered again to a group that failed to process it.

A pause that doubles up to a few seconds keeps a short outage of a consumer's database from turning a backlog into dead
letters: RocketMQ's 16 retries take about a minute. RocketMQ's own delay levels add up to hours, and need a timer.
"""

from typing import Final

__all__ = ["LONGEST_MS", "pause_ms"]

FIRST_MS: Final = 250
LONGEST_MS: Final = 5000
DOUBLINGS_MAX: Final = 16  # enough to get from any first pause to the longest one; limits the shift


def pause_ms(failures: int) -> int:
    """Return the pause after this many failed deliveries of a message; 0 if none has failed."""
    if failures <= 0:
        return 0
    return min(FIRST_MS << min(failures - 1, DOUBLINGS_MAX), LONGEST_MS)
