"""Which records leave the table."""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from martlet_columns.records import Integers
from martlet_tiered.format.footer import Span

__all__ = ["Dropping"]


class Dropping(Struct, frozen=True):
    """Records of a topic before a log position leave: that of `before`, or `otherwise` for topics that are not in it.

    A topic that was deleted loses the records before the deletion, and keeps those of its next life.
    """

    before: Mapping[str, int]
    otherwise: int = 0

    def before_of(self, topic: str) -> int:
        """Return the log position before which the records of *topic* leave."""
        return self.before.get(topic, self.otherwise)

    def touches(self, span: Span) -> bool:
        """Return whether records of *span* leave."""
        return span.min_position < self.before_of(span.topic)

    def keeps(self, topics: list[str], codes: Integers, positions: Integers) -> Integers:
        """Return which records stay; ``topics[codes[n]]`` is the topic of record n, and -1 that of no topic."""
        bounds = np.array([*map(self.before_of, topics), 0], np.int64)
        kept: Integers = positions >= bounds[codes]
        return kept
