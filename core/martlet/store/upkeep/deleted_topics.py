"""What remains to be done for deleted topics: their files are removed, and the journal of queues learns of it."""

from typing import final

from martlet.runtime.wakeup import Wakeup
from martlet.store.queues.queues import Queue, Queues

__all__ = ["DeletedTopics"]


@final
class DeletedTopics:
    """Deleted topics whose queues have files; sets *wakeup* when there is one.

    The files are removed once the record of the deletion is durable.
    """

    def __init__(self, queues: Queues, wakeup: Wakeup) -> None:
        self._queues = queues
        self._wakeup = wakeup
        # The end of the record of the deletion, the topic, and its queues.
        self._waiting: list[tuple[int, str, list[Queue]]] = []
        # Deletions that are not in the journal yet.
        self.unjournaled: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, topic: str, queues: list[Queue], end: int) -> None:
        """Note that *topic* with *queues* was deleted by the record that ends at *end*."""
        self._waiting.append((end, topic, queues))
        self._wakeup.set()

    def take(self, limit: int) -> list[str]:
        """Return the topics whose deletion is durable, below *limit*; the caller must remove their files."""
        durable = [(topic, queues) for end, topic, queues in self._waiting if end <= limit]
        self._waiting = [item for item in self._waiting if item[0] > limit]
        for topic, queues in durable:
            self._queues.let_go(queues)
            self.unjournaled.append(topic)
        return [topic for topic, _ in durable]

    def take_unjournaled(self) -> list[str]:
        """Return the deletions that are not in the journal; the caller must write them."""
        topics, self.unjournaled = self.unjournaled, []
        return topics

    def queues_with_files(self) -> list[Queue]:
        """Return the queues of topics whose files were not removed yet."""
        return [queue for _, _, queues in self._waiting for queue in queues]
