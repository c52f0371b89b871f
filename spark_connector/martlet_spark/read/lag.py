"""The lag of streaming queries, in messages: `LagListener`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    SourceProgress,
    StreamingQueryListener,
)

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.errors import SparkConnectorError
from martlet_spark.read.offsets import Offsets, decode

__all__ = ["Lag", "LagListener"]


@final
@dataclass(frozen=True, slots=True)
class Lag:
    """The number of messages that a query had still to read after one micro-batch, per queue."""

    query_id: str
    query_name: str | None
    batch_id: int
    queues: Mapping[MessageQueue, int]

    @property
    def total(self) -> int:
        """The sum of all queues."""
        return sum(self.queues.values())


class LagListener(StreamingQueryListener):
    """Records the lag of all queries that read topics of Martlet: ``spark.streams.addListener(LagListener())``.

    Works in classic sessions and with Spark Connect. Spark calls it some milliseconds after each micro-batch, in a
    thread of its own.

    Args:
      report: called with each `Lag`, for example to send it to a monitoring system.
    """

    def __init__(self, report: Callable[[Lag], object] | None = None) -> None:
        self._report = report
        self.lags: dict[str, Lag] = {}  # the last one of each running query, by the query's id

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing: Spark requires the method."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Record the lag after a micro-batch."""
        progress = event.progress
        queues: dict[MessageQueue, int] = {}
        for source in progress.sources:
            for queue, lag in _lags(source).items():
                queues[queue] = max(lag, queues.get(queue, 0))  # two sources of a query may read the same topic
        if queues:
            found = self.lags[str(progress.id)] = Lag(str(progress.id), progress.name, progress.batchId, queues)
            if self._report is not None:
                self._report(found)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing: the lag is as before."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Forget the query."""
        self.lags.pop(str(event.id), None)


def _lags(source: SourceProgress) -> Offsets:
    """Return the lag of each queue that *source* has begun to read; none for sources of another kind."""
    ends, heads = _offsets(source.endOffset), _offsets(source.latestOffset)
    return {queue: max(head - ends[queue], 0) for queue, head in heads.items() if queue in ends}


def _offsets(text: str | None) -> Offsets:
    try:
        value = json.loads(text or "null")
        return decode(value) if isinstance(value, dict) else {}
    except (SparkConnectorError, ValueError):  # the offset of a source of another kind
        return {}
