"""Writes the entry of each topic that is created or changed into the log, with the commit that follows.

``config/topics.json`` is written some time after a client has created a topic by using it, and the first messages may
be stored and acknowledged before that. They are never in an earlier commit than the topic's entry. So a start after a
crash finds there how many queues the topic has, its permission and its attributes (`saving.load`).
"""

import logging
from typing import Final, final

from martlet.errors import Refused, StoreFailed
from martlet.store import Store
from martlet.tables.topics import Topic, Topics

__all__ = ["TopicNotes"]

log = logging.getLogger("martlet.tables")

# How many wait while the disk is full, so that the first commit after that takes no more than 10 ms. The others are
# left to the table, which is written as soon as there is space, too.
WAITING_MAX: Final = 500


@final
class TopicNotes:
    """The entries of *topics* that are to be noted in the log of *store*."""

    def __init__(self, store: Store, topics: Topics) -> None:
        self._store = store
        self._topics = topics
        self._wanted: dict[str, None] = {}  # names, in order
        self._is_waiting = False
        self._noted: dict[str, int] = {}  # ends of the notes of the last commit
        topics.changed.append(self._changed)
        store.committer.on_undone.append(self._undone)

    def _changed(self, topic: Topic | None) -> None:
        if topic is not None and (len(self._wanted) < WAITING_MAX or not self._store.refusal):
            self._wanted[topic.name] = None
            self._wait()

    def _wait(self) -> None:
        """Let the next commit write the notes."""
        if not self._is_waiting:
            self._is_waiting = True
            self._store.before_commit.append(self._write)
            self._store.commit_soon()

    def _undone(self, position: int) -> None:
        """Note again what was undone: the log ends at *position*."""
        undone = [name for name, end in self._noted.items() if end > position]
        self._noted = {}
        self._wanted = dict.fromkeys(undone) | self._wanted
        if undone:
            self._wait()

    def _write(self) -> None:
        """Append the notes to this commit.

        Raises:
          Refused, StoreFailed: the disk is full or failed; nothing of this commit is stored.
        """
        self._is_waiting, self._noted = False, {}
        if self._store.refusal:
            # No message is stored now either; the first one that is has the notes in its commit.
            self._is_waiting = True
            self._store.before_commit.append(self._write)
            return
        for name in list(self._wanted):
            topic = self._topics.get(name)
            if topic is not None:
                self._note(topic)
            del self._wanted[name]

    def _note(self, topic: Topic) -> None:
        try:
            self._noted[topic.name] = self._store.notes.define(topic.as_json())
        except (ValueError, OverflowError) as error:
            log.error("topic %s is not noted in the log; %s", topic.name, error)
        except (Refused, StoreFailed):
            self._wait()
            raise
