"""Which records of a range are still messages: not those of deleted topics, and not those that have expired."""

from array import array
from collections.abc import Sequence
from typing import Final, final

import trio

from martlet.store import Store
from martlet_tiered.upload.messages import QueueRun

__all__ = ["LiveQueues"]

NOWHERE: Final = 1 << 62
# Look-ups in one turn of the event loop.
RUNS_AT_ONCE: Final = 1000


@final
class LiveQueues:
    """The queues of *store*, and the topics that were deleted while an upload may be behind."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._deleted: dict[str, int] = {}  # the log position after the deletion
        store.deletions.on_deleted.append(self._note)

    def _note(self, topic: str) -> None:
        self._deleted[topic] = self._store.deletions.end

    async def first_offsets(self, runs: Sequence[QueueRun], end: int) -> "array[int]":
        """Return the first offset of each of *runs* that is still a message; they are before log position *end*.

        Internal records have no queue and are all kept. A topic that was deleted after *end* has no messages, also if
        it exists again. If any topic has none, this waits until its deletion is durable: a power cut could undo it.
        Expiry needs no such wait, because the next start finds the same messages to be too old.

        Raises:
          StoreFailed: the disk failed, so a deletion will never be durable.
        """
        firsts = array("q")
        for number, run in enumerate(runs):
            if number % RUNS_AT_ONCE == RUNS_AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
            firsts.append(self._first(run, end))
        if NOWHERE in firsts:
            await self._store.deletions.wait_durable()
        return firsts

    def _first(self, run: QueueRun, end: int) -> int:
        if run.kind == "internal":
            return -NOWHERE
        queue = self._store.queues.find(run.topic, run.queue)
        if queue is None or self._deleted.get(run.topic, 0) > end:
            return NOWHERE
        return queue.expired_to

    def forget_before(self, end: int) -> None:
        """Forget deletions before log position *end*, up to which everything is uploaded."""
        self._deleted = {topic: at for topic, at in self._deleted.items() if at > end}
