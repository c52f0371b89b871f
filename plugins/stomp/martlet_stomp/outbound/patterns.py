"""Wildcards over topics: a subscription to ``/topic/orders.>`` has the messages of all topics whose names match.

``.`` and ``/`` separate the levels of a name. ``*`` matches one level, ``>`` and ``#`` match any number of levels, also
none; ``>`` must be the last level. (``>`` is ActiveMQ's, ``#`` RabbitMQ's; both have ``*``.)

Such a subscription has one part for each topic. A matching topic that is created later is read from its first message.
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

# Most wildcards for any number of levels in a pattern: each one makes a match slower.
RESTS_MAX: Final = 3
_LEVELS: Final = re.compile(r"([./])")


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression for names that match *text*. Raises `StompError` if *text* is invalid."""
    parts = _LEVELS.split(text)
    levels, separators = parts[::2], ["", *parts[1::2]]
    rests = [level for level in levels if level in (">", "#")]
    if ">" in levels[:-1]:
        raise StompError(f"wildcard > of {shown(text)} is not at the end; use * for one level, or #")
    if len(rests) > RESTS_MAX:
        raise StompError(f"{shown(text)} has more than {RESTS_MAX} wildcards for any number of levels; use *")
    regex, is_open = "", True  # is_open: no level precedes, so the next one needs no separator
    for separator, level in zip(separators, levels, strict=True):
        if level in (">", "#"):
            regex += r"(?:[^./]+(?:[./][^./]+)*)?" if is_open else r"(?:[./][^./]+)*"
            continue
        before = r"(?:^|[./])" if is_open and regex else re.escape(separator)
        regex += before + ("[^./]+" if level == "*" else re.escape(level))
        is_open = False
    return re.compile(regex)


@final
class Pattern:
    """One subscription to several topics, with its ``parts`` by topic, and topics without a part yet (``pending``).

    If it ``follows``, the topics are all that match a pattern, now and later; otherwise they are a fixed list.
    """

    __slots__ = ("_matches", "_prefix", "_wake", "follows", "key", "parts", "pending", "request")

    def __init__(self, request: Subscribe, pattern: Destination | None, key: str, wake: Callable[[], None]) -> None:
        """Begin without parts; *wake* is called for a new topic. Raises `StompError` if *pattern* is invalid.

        Args:
          pattern: the destination with wildcards; None for a list.
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
        """Return whether *topic* matches the pattern."""
        return self._matches(unquote(topic)) is not None

    def destination(self, topic: str) -> Destination:
        """Return the destination of messages in *topic*."""
        return Destination(Kind.TOPIC, self._prefix + name_of(topic), topic)

    def offer(self, topic: str) -> None:
        """Add *topic*, which was created, to ``pending`` if it matches."""
        if self.wants(topic):
            self.pending.append(topic)
            self._wake()
