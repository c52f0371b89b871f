"""Which platform topic has the messages of a name: rules of the configuration, else one topic for all.

A rule is ``FILTER=TOPIC`` or ``FILTER=TOPIC:QUEUES``. A topic name has no colon.
"""

from collections.abc import Sequence
from typing import Final, final

from martlet.delivery.interest import FilterTrie
from martlet.errors import ConfigError, MartletError

from .names import HIDDEN, check_filter

__all__ = ["Rules"]

QUEUES_MAX: Final = 1024  # as of ``mqtt.queues``


@final
class Rules:
    """The rules; ``topics`` are all topics that may have messages.

    Args:
      rules: as in ``mqtt.rules``; the first one that matches counts.
      otherwise: the topic for all other names.
      queues: how many queues a topic gets when it is created, unless its rule says how many.

    Raises:
      ConfigError: a rule is invalid.
    """

    def __init__(self, rules: Sequence[str], otherwise: str, queues: int) -> None:
        self._otherwise = otherwise
        self._queues = queues
        self._own_queues: dict[str, int] = {}
        self._trie: FilterTrie[int] = FilterTrie(names_max=1)
        self._topics: list[str] = []
        self._filters: list[list[str]] = []
        for number, rule in enumerate(rules):
            topic_filter, topic, own_queues = _parse(rule)
            if own_queues != self._own_queues.setdefault(topic, own_queues):
                raise ConfigError(f"mqtt.rules has {rule!r}, but another rule creates {topic!r} with other queues")
            self._trie.add(topic_filter, number)
            self._topics.append(topic)
            self._filters.append(topic_filter.split("/"))
        self.topics = list(dict.fromkeys([otherwise, *self._topics]))

    def queues_of(self, topic: str) -> int:
        """Return how many queues *topic* gets when it is created."""
        return self._own_queues.get(topic) or self._queues

    def topics_of(self, topic_filter: str) -> list[str]:
        """Return the topics of the names that *topic_filter* matches; a name matches itself."""
        levels, found = topic_filter.split("/"), list[str]()
        for rule, topic in zip(self._filters, self._topics, strict=True):
            if _may_share_names(rule, levels):
                found.append(topic)
                if _has_all_of(rule, levels):
                    break
        else:
            found.append(self._otherwise)
        return list(dict.fromkeys(found))

    def topic_of(self, name: str) -> str:
        """Return the topic of *name*."""
        found = self._trie.match(name) if self._topics else ()
        return self._topics[min(found)] if found else self._otherwise


def _parse(rule: str) -> tuple[str, str, int]:
    """Return the filter, the topic and the number of queues of *rule*, 0 if it has none. Raises `ConfigError`."""
    topic_filter, _, target = rule.rpartition("=")
    topic, colon, queues = target.partition(":")
    try:
        check_filter(topic_filter)
    except MartletError as error:
        raise ConfigError(f"mqtt.rules has {rule!r}; {error}; write FILTER=TOPIC") from error
    if not topic:
        raise ConfigError(f"mqtt.rules has {rule!r}, which names no topic; write FILTER=TOPIC")
    if not colon:
        return topic_filter, topic, 0
    is_number = queues.isascii() and queues.isdigit() and len(queues) <= len(str(QUEUES_MAX))
    if not is_number or not 1 <= int(queues) <= QUEUES_MAX:
        text = f"whose number of queues is not 1 to {QUEUES_MAX}; write FILTER=TOPIC:QUEUES"
        raise ConfigError(f"mqtt.rules has {rule!r}, {text}")
    return topic_filter, topic, int(queues)


def _may_share_names(one: list[str], other: list[str]) -> bool:
    """Return whether some name may match both filters, given as levels."""
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
