"""Wildcards over topics: a subscription to ``/topic/orders.>`` has the messages of all topics whose names match.

The levels of a name are separated by ``.`` or ``/``. ``*`` is one level, and ``>`` or ``#`` any number of them, also
none; only ``#`` need not be the last one (`>` is ActiveMQ's, ``#`` RabbitMQ's, ``*`` that of both).

Such a subscription consists of one for each topic. A topic that is created later and matches is read from its first
message on.
"""

import re
from collections import deque
from collections.abc import Callable
from typing import Final, final
from urllib.parse import unquote

from martlet_stomp.mapping.destinations import Destination, Kind, name_of
from martlet_stomp.outbound.subscription import Subscription
from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import Subscribe

__all__ = ["Pattern", "compile_pattern"]

# The time of a match grows with each.
RESTS_MAX: Final = 3
_LEVELS: Final = re.compile(r"([./])")


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return what matches the names that *text* stands for. Raises `StompError` if it cannot be understood."""
    parts = _LEVELS.split(text)
    levels, separators = parts[::2], ["", *parts[1::2]]
    rests = [level for level in levels if level in (">", "#")]
    if ">" in levels[:-1]:
        raise StompError(f"wildcard > of {shown(text)} is not at the end; use * for one level, or #")
    if len(rests) > RESTS_MAX:
        raise StompError(f"{shown(text)} has more than {RESTS_MAX} wildcards for any number of levels; use *")
    found, is_open = "", True  # whether nothing precedes, so that the next level has no separator
    for separator, level in zip(separators, levels, strict=True):
        if level in (">", "#"):
            found += r"(?:[^./]+(?:[./][^./]+)*)?" if is_open else r"(?:[./][^./]+)*"
            continue
        before = r"(?:^|[./])" if is_open and found else re.escape(separator)
        found += before + ("[^./]+" if level == "*" else re.escape(level))
        is_open = False
    return re.compile(found)


@final
class Pattern:
    """One subscription to several destinations: its ``parts`` by these, and topics to begin with (``pending``).

    If it ``follows``, they are the topics that match a pattern, otherwise those of a list.
    """

    __slots__ = ("_matches", "_prefix", "_wake", "follows", "key", "parts", "pending", "request")

    def __init__(self, request: Subscribe, pattern: Destination | None, key: str, wake: Callable[[], None]) -> None:
        """Begin without parts; *wake* is called when there is a new topic. Raises `StompError`.

        Args:
          pattern: what topics match; None for a list.
        """
        self.follows = pattern is not None
        text, self._prefix = (pattern.text, pattern.prefix) if pattern is not None else ("", "")
        self._matches = compile_pattern(text.removeprefix(self._prefix)).fullmatch
        self._wake = wake
        self.request = request
        self.key = key
        self.parts: dict[str, Subscription] = {}
        self.pending: deque[str] = deque()

    def wants(self, topic: str) -> bool:
        """Return whether *topic* matches."""
        return self._matches(unquote(topic)) is not None

    def destination(self, topic: str) -> Destination:
        """Return the destination of messages in *topic*."""
        return Destination(Kind.TOPIC, self._prefix + name_of(topic), topic)

    def offer(self, topic: str) -> None:
        """Note that *topic* was created."""
        if self.wants(topic):
            self.pending.append(topic)
            self._wake()
