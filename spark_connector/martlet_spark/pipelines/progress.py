"""Progress of a pipeline: for a progress bar while it runs, and for its report."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from pyspark.errors import PySparkException

from martlet_columns.decode import COMPRESSED_BODY

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = [
    "OBSERVED",
    "SENT",
    "UNDECODED",
    "Interrupted",
    "Show",
    "StreamReport",
    "count_undecoded",
    "follow_query",
    "ignore",
    "show_tasks",
]

# A callback for progress, called several times a second with the amount done and the total. If it raises
# KeyboardInterrupt, the work ends.
Show: TypeAlias = Callable[[int, int], None]
LOOK_S: Final = 0.25
# Name of the count of sent messages in a query that selects; its observation has this name after `OBSERVED`.
SENT: Final = "sent"
UNDECODED: Final = "undecoded"  # name of the count of bodies that stay compressed, because they cannot be decompressed
OBSERVED: Final = "martlet_"


def ignore(done: int, total: int) -> None:
    """Show nothing."""


@final
class StreamReport:
    """Report of a streaming query; *observed* are the names of the counts that the query itself makes."""

    def __init__(self, observed: Sequence[str] = ()) -> None:
        self._began = monotonic()
        self._last_batch = -1
        self.messages = 0  # read by the query
        self.counted = dict.fromkeys(observed, 0)
        self.batches = 0
        self.behind = 0  # messages newer than the last batch when it ended
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
            for name in self.counted:
                row = progress["observedMetrics"].get(OBSERVED + name)
                self.counted[name] += row["count"] if row is not None else 0

    def fields(self) -> dict[str, object]:
        """The counts by name, for a printed report."""
        rate = round(self.messages / self.seconds) if self.seconds else 0
        counted = {"messages": self.messages, **self.counted, "batches": self.batches, "behind": self.behind}
        if not counted.get(UNDECODED, 1):
            del counted[UNDECODED]
        return {**counted, "seconds": round(self.seconds, 1), "messages_per_second": rate}


def count_undecoded(messages: "DataFrame") -> "DataFrame":
    """Return *messages* with an observation that counts bodies that cannot be decompressed as `UNDECODED`."""
    from pyspark.sql import functions as F

    is_one = F.expr(f"map_contains_key(properties, '{COMPRESSED_BODY}')")
    return messages.observe(OBSERVED + UNDECODED, F.count_if(is_one).alias("count"))


def _total(offsets: object) -> int:
    """Return the sum of *offsets*, which Spark gives as text."""
    value = json.loads(offsets) if isinstance(offsets, str) else offsets
    topics = value.get("t", {}) if isinstance(value, dict) else {}
    return sum(sum(queues.values()) for queues in topics.values())


@final
class Interrupted(KeyboardInterrupt):
    """Ctrl-C ended a query; ``report`` counts the batches that it had completed, which stay.

    A batch that was being completed at that moment may stay too, and is in no report.
    """

    def __init__(self, report: StreamReport) -> None:
        super().__init__()
        self.report = report


def follow_query(
    query: "StreamingQuery",
    show: Show = ignore,
    is_done: Callable[[Mapping[str, Any]], bool] | None = None,
    *,
    observed: Sequence[str] = (),
) -> StreamReport:
    """Wait until *query* ends, or *is_done* is true of its progress; stop the query and return its report.

    Raises:
      Interrupted: by Ctrl-C, or by *show*.
    """
    report = StreamReport(observed)
    last: object = None
    ended = False
    try:
        while not ended:
            ended = _wait(query, report, show)
            progress = query.lastProgress
            if (progress is not None and progress["timestamp"] != last) or ended:
                last = progress["timestamp"] if progress else None
                _count(query, report)
                ended = ended or (progress is not None and is_done is not None and is_done(progress))
            show(report.messages, report.messages + report.behind)
    except KeyboardInterrupt:
        query.stop()
        _count(query, report)
        raise Interrupted(report) from None
    finally:
        query.stop()
    return report


def _wait(query: "StreamingQuery", report: StreamReport, show: Show) -> bool:
    try:
        return bool(query.awaitTermination(LOOK_S))  # type: ignore[arg-type]
    except PySparkException:
        # Ctrl-C ends the Python processes of Spark too, so the query may fail.
        show(report.messages, report.messages + report.behind)
        raise


def _count(query: "StreamingQuery", report: StreamReport) -> None:
    for each in query.recentProgress:
        report.add(each)


@contextmanager
def show_tasks(session: "SparkSession", show: Show = ignore) -> Iterator[None]:
    """Show the number of finished tasks of running jobs, while the block runs; Ctrl-C cancels the jobs."""
    watcher = _Watcher(session, show)
    watcher.start()
    try:
        yield
    except Exception:  # cancelled jobs fail in several ways
        if watcher.was_interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        watcher.ended.set()
        watcher.join()


@final
class _Watcher(Thread):
    def __init__(self, session: "SparkSession", show: Show) -> None:
        super().__init__(daemon=True)
        self._context = session.sparkContext
        self._show = show
        self.ended = Event()
        self.was_interrupted = False

    def run(self) -> None:
        tracker = self._context.statusTracker()
        while not self.ended.wait(LOOK_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            running = [stage for stage in stages if stage is not None]
            try:
                self._show(sum(each.numCompletedTasks for each in running), sum(each.numTasks for each in running))
            except KeyboardInterrupt:
                self.was_interrupted = True
                self._context.cancelAllJobs()
