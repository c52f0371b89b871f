"""Which platform topic has the messages of a name: rules of the configuration, else one topic for all."""

from collections.abc import Sequence
from typing import final

from martlet.delivery.interest import FilterTrie
from martlet.errors import ConfigError, MartletError

from .names import check_filter

__all__ = ["Rules"]


@final
class Rules:
    """The rules, each ``FILTER=TOPIC``; ``topics`` are all topics that may have messages.

    Raises:
      ConfigError: a rule is invalid.
    """

    def __init__(self, rules: Sequence[str], otherwise: str) -> None:
        self._otherwise = otherwise
        self._trie: FilterTrie[int] = FilterTrie(names_max=1)
        self._topics: list[str] = []
        for number, rule in enumerate(rules):
            topic_filter, _, topic = rule.rpartition("=")
            try:
                check_filter(topic_filter)
            except MartletError as error:
                raise ConfigError(f"mqtt.rules has {rule!r}; {error}; write FILTER=TOPIC") from error
            if not topic:
                raise ConfigError(f"mqtt.rules has {rule!r}, which names no topic; write FILTER=TOPIC")
            self._trie.add(topic_filter, number)
            self._topics.append(topic)
        self.topics = list(dict.fromkeys([otherwise, *self._topics]))

    def topic_of(self, name: str) -> str:
        """Return the topic of *name*."""
        found = self._trie.match(name) if self._topics else ()
        return self._topics[min(found)] if found else self._otherwise
