"""Counts the requests of all connections, and the refusals by response code."""

from typing import Final, final

__all__ = ["RequestCounters"]


@final
class RequestCounters:
    """Numbers of requests handled and refused since the broker started, and time and log position of the start."""

    def __init__(self, started_ms: int, started_position: int) -> None:
        self.started_ms: Final = started_ms
        self.started_position: Final = started_position
        self.requests = 0
        self.refusals: dict[int, int] = {}  # by response code

    def count_refusal(self, code: int) -> None:
        self.refusals[code] = self.refusals.get(code, 0) + 1
