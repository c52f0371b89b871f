"""The log on disk (RocketMQ's CommitLog), and indexes that can be rebuilt from it."""

from martlet.store.config import StoreConfig
from martlet.store.files import Disk, RealDisk, Usage, atomic_write, read_generation
from martlet.store.log import Found, Store
from martlet.store.queue_reader import QueueReader
from martlet.store.queues import Queue
from martlet.store.reading import Care, ReadResult, ReadStatus, merged
from martlet.store.recovery import Progress
from martlet.store.statistics import StoreStatistics

__all__ = [
    "Care",
    "Disk",
    "Found",
    "Progress",
    "Queue",
    "QueueReader",
    "ReadResult",
    "ReadStatus",
    "RealDisk",
    "Store",
    "StoreConfig",
    "StoreStatistics",
    "Usage",
    "atomic_write",
    "merged",
    "read_generation",
]
