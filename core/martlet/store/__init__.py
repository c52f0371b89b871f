"""The log on disk (RocketMQ's CommitLog), and indexes that can be rebuilt from it."""

from martlet.store.cold_tier import ColdTier
from martlet.store.config import StoreConfig
from martlet.store.disk.files import Disk, RealDisk, Usage, atomic_write, read_generation
from martlet.store.queue_reader import QueueReader
from martlet.store.queues.queues import Queue
from martlet.store.read.lookup import KeyQueryResult
from martlet.store.read.reading import Care, ReadOptions, ReadResult, ReadStatus, merged
from martlet.store.recovery.recovery import Progress
from martlet.store.statistics import StoreStatistics
from martlet.store.store import Store

__all__ = [
    "Care",
    "ColdTier",
    "Disk",
    "KeyQueryResult",
    "Progress",
    "Queue",
    "QueueReader",
    "ReadOptions",
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
