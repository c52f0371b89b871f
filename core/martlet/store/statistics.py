"""What a store tells about itself."""

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from martlet.store.log import Store

__all__ = ["StoreStatistics"]


@final
class StoreStatistics:
    """Counters of one store, since it was opened."""

    __slots__ = (
        "appended_bytes",
        "appended_messages",
        "clock_behind_hours",
        "commits",
        "cut_bytes",
        "damaged_records",
        "disk_used_ratio",
        "durable",
        "fsync_seconds",
        "fsync_seconds_max",
        "fsyncs",
        "log_end",
        "log_start",
        "open_files",
        "overdue_hours",
        "queues",
        "readable",
        "recovered_records",
        "recovery_seconds",
        "refused",
        "segments",
        "unindexed_bytes",
        "unindexed_messages",
        "written",
    )

    def __init__(self, store: "Store") -> None:
        self.appended_messages = store.committer.appended_messages
        self.appended_bytes = store.committer.appended_bytes
        self.commits = store.committer.commits
        self.fsyncs = store.flusher.fsyncs
        self.fsync_seconds = store.flusher.fsync_seconds
        self.fsync_seconds_max = store.flusher.fsync_seconds_max
        self.damaged_records = store.damaged_records
        self.cut_bytes = store.cut_bytes
        self.recovery_seconds = store.recovery_seconds
        self.recovered_records = store.recovered_records
        self.refused = store.refusal
        self.log_start = store.first_position
        self.log_end = store.appended
        self.written = store.written
        self.durable = store.durable
        self.readable = store.readable
        self.segments = len(store.segments.items)
        self.queues = sum(map(len, store.queues.topics.values()))
        self.open_files = len(store.files)
        self.overdue_hours = store.retention.overdue_ms / 3_600_000
        self.clock_behind_hours = store.retention.clock_behind_ms / 3_600_000
        self.disk_used_ratio = store.retention.used_ratio
        self.unindexed_messages = len(store.keys.pending) if store.keys else 0
        self.unindexed_bytes = store.written - store.keys.position if store.keys else 0

    def as_dict(self) -> dict[str, object]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}
