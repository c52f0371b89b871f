"""How far a pipeline is: for a progress bar while it runs, and for its report."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Show", "StreamReport", "follow_query", "ignore", "show_tasks"]

# Called with how much is done, and the total.
Show: TypeAlias = Callable[[int, int], None]
LOOK_S: Final = 0.25


def ignore(done: int, total: int) -> None:
    """Show nothing."""


@final
class StreamReport:
    """What a streaming query has done."""

    def __init__(self) -> None:
        self._began = monotonic()
        self._last_batch = -1
        self.messages = 0
        self.batches = 0
        self.behind = 0  # messages that were newer than the last batch, when it ended
        self.seconds = 0.0

    def add(self, progress: Mapping[str, Any]) -> None:
        """Count one report of Spark, unless it was counted before."""
        source = progress["sources"][0]
        self.behind = max(_total(source["latestOffset"]) - _total(source["endOffset"]), 0)
        self.seconds = monotonic() - self._began
        if progress["numInputRows"] > 0 and progress["batchId"] > self._last_batch:
            self._last_batch = progress["batchId"]
            self.messages += progress["numInputRows"]
            self.batches += 1

    def fields(self) -> dict[str, object]:
        """For a printed report."""
        rate = round(self.messages / self.seconds) if self.seconds else 0
        counted = {"messages": self.messages, "batches": self.batches, "behind": self.behind}
        return {**counted, "seconds": round(self.seconds, 1), "messages_per_second": rate}


def _total(offsets: object) -> int:
    """Return the sum of *offsets*, which Spark gives as text."""
    value = json.loads(offsets) if isinstance(offsets, str) else offsets
    topics = value.get("t", {}) if isinstance(value, dict) else {}
    return sum(sum(queues.values()) for queues in topics.values())


def follow_query(
    query: "StreamingQuery", show: Show = ignore, is_done: Callable[[Mapping[str, Any]], bool] | None = None
) -> StreamReport:
    """Wait until *query* ends, or *is_done* says so of its progress, and return what it did; then it is stopped."""
    report = StreamReport()
    last: object = None
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(LOOK_S))  # type: ignore[arg-type]
            progress = query.lastProgress
            if (progress is not None and progress["timestamp"] != last) or ended:
                last = progress["timestamp"] if progress else None
                for each in query.recentProgress:
                    report.add(each)
                ended = ended or (progress is not None and is_done is not None and is_done(progress))
                show(report.messages, report.messages + report.behind)
    finally:
        query.stop()
    return report


@contextmanager
def show_tasks(session: "SparkSession", show: Show = ignore) -> Iterator[None]:
    """Show how many tasks of the running jobs are done, while the block runs."""
    ended = Event()
    watcher = Thread(target=_watch, args=(session.sparkContext.statusTracker(), show, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(tracker: Any, show: Show, ended: Event) -> None:
    while not ended.wait(LOOK_S):
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        running = [stage for stage in stages if stage is not None]
        if running:
            show(sum(each.numCompletedTasks for each in running), sum(each.numTasks for each in running))
