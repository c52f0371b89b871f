"""Collects the counters of all parts; each part provides them with `statistics()`."""

from collections.abc import Callable, Mapping
from typing import final

__all__ = ["Stats"]


@final
class Stats:
    """The counters of each part, by the part's name."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], Mapping[str, object]]] = {}

    def add(self, part: str, statistics: Callable[[], Mapping[str, object]]) -> None:
        """Add the counters of *part*; they replace those added before under the same name."""
        self._parts[part] = statistics

    def collect(self) -> dict[str, dict[str, object]]:
        """Return the current counters of every part, ready for JSON."""
        return {part: dict(statistics()) for part, statistics in sorted(self._parts.items())}
