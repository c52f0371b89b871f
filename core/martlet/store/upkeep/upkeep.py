"""The tasks of a store: flushes, checkpoints, the key index, and retention."""

from typing import final

import trio

from martlet.errors import StoreFailed
from martlet.store.append.flusher import Flusher
from martlet.store.config import StoreConfig
from martlet.store.recovery.indexer import Indexer
from martlet.store.recovery.repair import Repairs
from martlet.store.upkeep.checkpointer import Checkpointer
from martlet.store.upkeep.retention import Retention
from martlet.store.upkeep.topic_retention import TopicRetention

__all__ = ["StoreUpkeep"]


@final
class StoreUpkeep:
    """The background parts of a store. A caller that needs one of their results now calls the part itself."""

    def __init__(
        self,
        config: StoreConfig,
        flusher: Flusher,
        indexer: Indexer,
        repairs: Repairs,
        checkpointer: Checkpointer,
        retention: Retention,
        topic_retention: TopicRetention,
    ) -> None:
        self._flush_seconds = config.flush_interval_ms / 1000
        self._flusher = flusher
        self.indexer = indexer
        self.repairs = repairs
        self.checkpointer = checkpointer
        self.retention = retention
        self.topic_retention = topic_retention

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Flush, save indexes, make checkpoints and apply retention, until cancelled.

        Raises:
          StoreFailed: the disk failed; the store is read-only.
        """
        flusher = self._flusher
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(flusher.run, 0.0 if flusher.is_sync else self._flush_seconds)
                nursery.start_soon(flusher.run_late, self._flush_seconds)
                nursery.start_soon(self.checkpointer.maintain)
                nursery.start_soon(self.indexer.follow)
                nursery.start_soon(self.retention.run)
                nursery.start_soon(self.topic_retention.run)
                task_status.started()
        except BaseExceptionGroup as group:
            if flusher.failed is None or group.split(StoreFailed)[1] is not None:
                raise
            raise flusher.failed from None
