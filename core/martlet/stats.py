"""Counters. Parts count in their own attributes and answer `statistics()`; this gathers them."""

from collections.abc import Callable, Mapping
from typing import final

__all__ = ["Stats"]


@final
class Stats:
    """Every part's counters by the part's name."""

    def __init__(self) -> None:
        self._parts: dict[str, Callable[[], Mapping[str, object]]] = {}

    def add(self, part: str, statistics: Callable[[], Mapping[str, object]]) -> None:
        """Let *part* be heard under its name; a second one of a name replaces the first."""
        self._parts[part] = statistics

    def collect(self) -> dict[str, dict[str, object]]:
        """Return what every part says now, ready for JSON."""
        return {part: dict(statistics()) for part, statistics in sorted(self._parts.items())}
