"""Rules of the configuration: the platform topic of each MQTT topic name; one topic has all other names.

A rule is ``FILTER=TOPIC``, ``FILTER=TOPIC:QUEUES`` or ``FILTER=TOPIC:QUEUES:HOURS``, with QUEUES empty for the default.
A platform topic has no colon in its name.
"""

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from martlet.delivery.routing.route_cache import RouteCache
from martlet.errors import ConfigError, MartletError
from martlet.tables.topics import RESERVE_TIME
from martlet_mqtt.wire.names import HIDDEN, check_filter

__all__ = ["TopicRules"]

log = logging.getLogger("martlet.mqtt")

QUEUES_MAX: Final = 1024  # as of ``mqtt.queues``
HOURS_MAX: Final = 1_000_000
SHAPE: Final = "write FILTER=TOPIC, FILTER=TOPIC:QUEUES or FILTER=TOPIC:QUEUES:HOURS"


class Target(NamedTuple):
    """A platform topic, and the number of queues and hours of retention that it is created with; 0 for the default."""

    topic: str
    queues: int
    hours: int


@final
class TopicRules:
    """The rules; ``topics`` are all platform topics that may have messages.

    Args:
      rules: as in ``mqtt.rules``; the first rule that matches a name counts.
      otherwise: the topic for all other names.
      queues: the number of queues of a new topic, unless its rule has one.

    Raises:
      ConfigError: a rule is invalid.
    """

    def __init__(self, rules: Sequence[str], otherwise: str, queues: int) -> None:
        self._otherwise = otherwise
        self._queues = queues
        self._targets: dict[str, Target] = {}
        self._trie: RouteCache[int] = RouteCache(names_max=1)
        self._topics: list[str] = []
        self._filters: list[list[str]] = []
        for number, rule in enumerate(rules):
            topic_filter, target = _parse(rule)
            other = self._targets.setdefault(target.topic, target)
            if target != other:
                what = "queues" if target.queues != other.queues else "hours"
                text = f"but another rule creates {target.topic!r} with other {what}"
                raise ConfigError(f"mqtt.rules has {rule!r}, {text}")
            self._trie.add(topic_filter, number)
            self._topics.append(target.topic)
            self._filters.append(topic_filter.split("/"))
        self.topics = list(dict.fromkeys([otherwise, *self._topics]))

    def queues_of(self, topic: str) -> int:
        """Return the number of queues with which *topic* is created."""
        return self._target(topic).queues or self._queues

    def _target(self, topic: str) -> Target:
        return self._targets.get(topic) or Target(topic, 0, 0)

    def attributes_of(self, topic: str, hours_max: int) -> dict[str, str]:
        """Return the attributes with which *topic* is created.

        More hours than *hours_max* (0 for no limit) are ignored: the topic then keeps messages as long as the log.
        """
        hours = self._target(topic).hours
        if 0 < hours_max < hours:
            text = "mqtt.rules keeps messages of topic %r for %d hours, but store.file_reserved_hours is %d"
            log.warning(text + "; all topics share one log, so they are kept for that time", topic, hours, hours_max)
            return {}
        return {RESERVE_TIME: str(hours)} if hours else {}

    def topics_of(self, topic_filter: str) -> list[str]:
        """Return the platform topics that may have names matching *topic_filter*; a name is a filter, too."""
        levels, topics = topic_filter.split("/"), list[str]()
        for rule, topic in zip(self._filters, self._topics, strict=True):
            if _may_share_names(rule, levels):
                topics.append(topic)
                if _has_all_of(rule, levels):
                    break
        else:
            topics.append(self._otherwise)
        return list(dict.fromkeys(topics))

    def topic_of(self, name: str) -> str:
        """Return the platform topic of *name*."""
        numbers = self._trie.match(name) if self._topics else ()
        return self._topics[min(numbers)] if numbers else self._otherwise


def _parse(rule: str) -> tuple[str, Target]:
    """Return the filter and the target of *rule*. Raises `ConfigError`."""
    topic_filter, _, target = rule.rpartition("=")
    topic, *numbers = target.split(":")
    try:
        check_filter(topic_filter)
    except MartletError as error:
        raise ConfigError(f"mqtt.rules has {rule!r}; {error}; {SHAPE}") from error
    if not topic:
        raise ConfigError(f"mqtt.rules has {rule!r}, which names no topic; {SHAPE}")
    if len(numbers) > 2:
        raise ConfigError(f"mqtt.rules has {rule!r}, which has too many colons; {SHAPE}")
    queues = hours = 0
    if numbers and (numbers[0] or len(numbers) == 1):
        queues = _number(rule, "queues", numbers[0], QUEUES_MAX)
    if len(numbers) == 2:
        hours = _number(rule, "hours", numbers[1], HOURS_MAX)
    return topic_filter, Target(topic, queues, hours)


def _number(rule: str, what: str, text: str, most: int) -> int:
    """Return *text*, a field of *rule*, as a number from 1 to *most*. Raises `ConfigError`."""
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not is_number or not 1 <= int(text) <= most:
        raise ConfigError(f"mqtt.rules has {rule!r}, whose number of {what} is not 1 to {most}; {SHAPE}")
    return int(text)


def _may_share_names(one: list[str], other: list[str]) -> bool:
    """Return whether a name may match both filters, given as lists of levels."""
    if _hides(one[0], other[0]) or _hides(other[0], one[0]):
        return False
    for level, as_level in zip(one, other, strict=False):
        if "#" in (level, as_level):
            return True
        if level != as_level and "+" not in (level, as_level):
            return False
    return len(one) == len(other) or max(one, other, key=len)[min(len(one), len(other)) :] == ["#"]


def _has_all_of(one: list[str], other: list[str]) -> bool:
    """Return whether the filter *one* matches all names that *other* matches."""
    if _hides(one[0], other[0]):
        return False
    for level, as_level in zip(one, other, strict=False):
        if level == "#":
            return True
        if as_level == "#" or level not in ("+", as_level):
            return False
    return len(one) == len(other) or one[len(other) :] == ["#"]


def _hides(wildcard: str, level: str) -> bool:
    """Return whether *wildcard* at the first level does not match *level* [MQTT-4.7.2-1]."""
    return wildcard in ("+", "#") and level.startswith(HIDDEN)
