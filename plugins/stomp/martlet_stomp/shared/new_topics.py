"""Notification of subscriptions with wildcards about new topics (see `patterns.py`)."""

from collections.abc import Iterator
from typing import Protocol, final

from martlet.tables.topics import BROKER_TOPICS, Topic, Topics, is_reserved

__all__ = ["NewTopics", "Watcher"]


class Watcher(Protocol):
    """A subscription with wildcards."""

    def offer(self, topic: str) -> None:
        """Note that *topic* was created."""
        ...


@final
class NewTopics:
    """The watchers of all clients, and the topics known to them."""

    def __init__(self, topics: Topics, own: str) -> None:
        """Begin without watchers; *own* is the plugin's own topic, which watchers never get."""
        self._topics = topics
        self._own = own
        self._known: set[str] = set()  # topics known to the watchers; empty without watchers
        self._table: dict[Watcher, None] = {}
        topics.changed.append(self._changed)
        topics.deleted.append(self._known.discard)

    def add(self, watcher: Watcher) -> Iterator[str]:
        """Tell *watcher* of new topics from now on; return the names of the existing topics."""
        if not self._table:
            self._known.update(topic.name for topic in self._topics)
        self._table[watcher] = None
        return iter([name for name in self._known if not self._is_hidden(name)])

    def remove(self, watcher: Watcher) -> None:
        self._table.pop(watcher, None)
        if not self._table:
            self._known.clear()

    def _is_hidden(self, name: str) -> bool:
        return is_reserved(name) or name in BROKER_TOPICS or name == self._own

    def _changed(self, topic: Topic | None) -> None:
        if topic is None or not self._table or topic.name in self._known:
            return
        self._known.add(topic.name)
        if not self._is_hidden(topic.name):
            for watcher in self._table:
                watcher.offer(topic.name)
