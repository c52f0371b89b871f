"""Results and counters of a store."""

from typing import final

from martlet.store.append.admission import Admission
from martlet.store.append.committer import Committer
from martlet.store.append.flusher import Flusher
from martlet.store.append.readable import ReadableEnd
from martlet.store.disk.page_cache import LogWriter
from martlet.store.disk.segments import Segments
from martlet.store.keys.key_index import KeyIndex
from martlet.store.queues.queues import Queues
from martlet.store.read.readers import Readers
from martlet.store.upkeep.retention import Retention
from martlet.store.upkeep.topic_retention import TopicRetention

__all__ = ["Recovered", "StoreStatistics"]


@final
class Recovered:
    """The results of a start."""

    def __init__(self) -> None:
        self.records = 0
        self.cut_bytes = 0
        self.seconds = 0.0
        # Topics that were rebuilt from RocketMQ's log but had no queues there: they may have been deleted.
        self.unlisted: set[str] = set()


@final
class StoreStatistics:
    """Counters of one store, since it was opened."""

    def __init__(
        self,
        committer: Committer,
        flusher: Flusher,
        readable: ReadableEnd,
        readers: Readers,
        admission: Admission,
        segments: Segments,
        tail: LogWriter,
        queues: Queues,
        retention: Retention,
        topic_retention: TopicRetention,
        keys: KeyIndex | None,
        recovered: Recovered,
    ) -> None:
        self.appended_messages = committer.appended_messages
        self.appended_bytes = committer.appended_bytes
        self.commits = committer.commits
        self.fsyncs = flusher.fsyncs
        self.fsync_seconds = flusher.fsync_seconds
        self.fsync_seconds_max = flusher.fsync_seconds_max
        self.damaged_records = readers.damaged_records
        self.cut_bytes = recovered.cut_bytes
        self.recovery_seconds = recovered.seconds
        self.recovered_records = recovered.records
        self.refused = admission.refusal
        self.log_start = segments.start
        self.log_end = tail.position
        self.written = tail.written
        self.durable = flusher.durable
        self.readable = readable.position
        self.segments = len(segments.items)
        self.queues = sum(map(len, queues.topics.values()))
        self.open_files = len(segments.files)
        self.overdue_hours = retention.age.overdue_ms / 3_600_000
        self.clock_behind_hours = retention.age.clock_behind_ms / 3_600_000
        self.topics_with_retention = len(topic_retention.topics)
        self.overdue_topics = topic_retention.overdue_topics
        self.expired_messages = topic_retention.expired_messages
        self.disk_used_ratio = retention.space.used_ratio
        self.segments_removed_early = retention.removed_early
        self.unindexed_messages = len(keys.pending) if keys else 0
        self.unindexed_bytes = tail.written - keys.position if keys else 0

    def as_dict(self) -> dict[str, object]:
        """Return the counters by name."""
        return dict(sorted(vars(self).items()))
