"""The number of the current turn of the event loop, for limits that hold per turn instead of per call."""

from typing import final

import trio

__all__ = ["TurnNumber"]


@final
class TurnNumber(trio.abc.Instrument):
    """Counts turns while it is installed as an instrument of the event loop."""

    def __init__(self) -> None:
        self.number = 0

    def before_io_wait(self, timeout: float) -> None:
        """Handle the end of a turn."""
        self.number += 1
