"""Warnings about connections, limited in number, so that a client cannot fill the disk with them."""

import logging
from typing import Final, final

import trio

__all__ = ["Complaints"]

PER_SECOND: Final = 20


@final
class Complaints:
    """Logs a limited number of warnings per second and counts the others; the next one reports how many."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._second_ends = 0.0
        self._room = 0
        self.left_out = 0
        self._left_out_told = 0

    def warn(self, text: str, *values: object) -> None:
        now = trio.current_time()
        if now >= self._second_ends:
            self._second_ends = now + 1
            self._room = PER_SECOND
            if self.left_out > self._left_out_told:
                self._log.warning(
                    "%d more warnings about connections were suppressed", self.left_out - self._left_out_told
                )
                self._left_out_told = self.left_out
        if self._room > 0:
            self._room -= 1
            self._log.warning(text, *values)
        else:
            self.left_out += 1
