"""Log lines about connections, limited in number, so that a client cannot fill the disk with them."""

import logging
from typing import Final, final

import trio

__all__ = ["Complaints", "Refusals"]

PER_SECOND: Final = 20
# Seconds between two lines of one kind about one connection.
EVERY_S: Final = 10.0


@final
class Complaints:
    """Logs a limited number of lines per second. Lines over the limit are counted, and the next line reports the
    count.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._second_ends = 0.0
        self._lines_left = 0
        self.left_out = 0
        self._left_out_reported = 0

    def warn(self, text: str, *values: object) -> None:
        """Log a warning."""
        self._log_limited(logging.WARNING, "%d more warnings about connections were suppressed", text, values)

    def info(self, text: str, *values: object) -> None:
        """Log an informational line, under the same limit."""
        if self._log.isEnabledFor(logging.INFO):
            self._log_limited(logging.INFO, "%d more lines about connections were suppressed", text, values)

    def _log_limited(self, level: int, omitted_text: str, text: str, values: tuple[object, ...]) -> None:
        now = trio.current_time()
        if now >= self._second_ends:
            self._second_ends = now + 1
            self._lines_left = PER_SECOND
            if self.left_out > self._left_out_reported:
                self._log.log(level, omitted_text, self.left_out - self._left_out_reported)
                self._left_out_reported = self.left_out
        if self._lines_left > 0:
            self._lines_left -= 1
            self._log.log(level, text, *values)
        else:
            self.left_out += 1


@final
class Refusals:
    """Warnings about requests refused on one connection: one line of each kind per `EVERY_S`, with a count of lines
    omitted.
    """

    def __init__(self, complaints: Complaints) -> None:
        self._complaints = complaints
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> [time of the next line in s, lines omitted]

    def warn(self, kind: str, who: str, why: str) -> None:
        """Log that a request of kind *kind* from client *who* was refused, and *why*."""
        now = trio.current_time()
        next_at, left_out = self._kinds.get(kind, (0.0, 0))
        if now < next_at:
            self._kinds[kind] = next_at, left_out + 1
            return
        self._kinds[kind] = now + EVERY_S, 0
        self._complaints.warn("%s of %s%s; %s", kind, who, f" ({left_out} more before)" if left_out else "", why)
