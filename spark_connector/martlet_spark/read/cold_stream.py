"""A streaming reader of the cold tier's tables alone: for replays of history while the brokers that had it are gone.

The offsets of a batch are those of queues, as in `offsets.py`, so a batch that is planned again has the same messages,
whichever files have them by then.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import Bounds
from martlet_spark.errors import OptionError
from martlet_spark.options import Options
from martlet_spark.read.batch import RangePartition, TopicReader
from martlet_spark.read.cold_topics import ColdTopics
from martlet_spark.read.history import Window
from martlet_spark.read.offsets import Offsets, decode, decode_new, encode
from martlet_spark.read.seam import cold_ranges, places_of
from martlet_spark.read.stream import limited
from martlet_spark.read.topics import QueryBound

__all__ = ["ColdStreamReader"]

# A table gets new messages every few minutes, and each look costs some requests.
LOOK_S: Final = 10.0
BROKER_OPTIONS: Final = ("group", "minOffsetsPerTrigger")


@final
class ColdStreamReader(TopicReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads tables as a stream.

    Raises:
      OptionError: an option needs brokers.
    """

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._places = places_of(options)
        self._topics: ColdTopics | None = None
        self._looked = 0.0
        self._is_fixed = False  # the query ends where the tables end now
        self._turn = 0
        for name in BROKER_OPTIONS:
            if options[name]:
                raise OptionError(f"option {name} needs brokers, and tier is cold; leave one of them out")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for tasks, without what the driver knows of the tables."""
        return {**self.__dict__, "_topics": None}

    def initialOffset(self) -> dict[str, Any]:
        return encode({})

    def prepareForTriggerAvailableNow(self) -> None:
        self._look()
        self._is_fixed = True

    def getDefaultReadLimit(self) -> ReadLimit:
        if self.options["maxOffsetsPerTrigger"]:
            return ReadMaxRows(self.options["maxOffsetsPerTrigger"])
        if self.options["maxBytesPerTrigger"]:
            return ReadMaxBytes(self.options["maxBytesPerTrigger"])
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        offsets = decode(start)
        bounds = self._look().bounds()
        new_bounds = {queue: each for queue, each in bounds.items() if queue not in offsets}
        new = {queue: first for queue, (first, _) in new_bounds.items()}
        if not offsets and new_bounds:
            new = QueryBound(self._look(), self.options, "starting", "earliest").find(new_bounds)
        starts = {**offsets, **new}
        ends = {queue: max(bounds[queue][1], first) if queue in bounds else first for queue, first in starts.items()}
        ends = self._limited(starts, ends)
        if ends != offsets:
            return encode(ends, new)
        if not self._is_fixed:
            time.sleep(self.options["pollMs"] / 1000)  # or Spark would ask a hundred times a second
        return start

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return (
            None if self._topics is None else encode({queue: end for queue, (_, end) in self._topics.bounds().items()})
        )

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        starts, ends = {**decode(start), **decode_new(end)}, decode(end)
        bounds = {queue: (starts[queue], ends[queue]) for queue in sorted(ends) if starts[queue] < ends[queue]}
        return [*self.partitions_of(cold_ranges(self._look(), bounds, fails=self.options["failOnDataLoss"]))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, RangePartition)
        return self.read_ranges(partition.ranges)

    def _look(self) -> ColdTopics:
        """Return what the tables have: now, some seconds ago, or when the query began, if it ends there."""
        now = time.monotonic()
        if self._topics is None or (not self._is_fixed and now >= self._looked + LOOK_S):
            self._topics = ColdTopics(self._places, self.options, Window(), self._topics)
            self._looked = now
        return self._topics

    def _limited(self, starts: Offsets, ends: Offsets) -> Offsets:
        """Return the end of the next batch in each queue, within the limits of the options."""
        counts = {queue: end - starts[queue] for queue, end in ends.items()}
        most: int = self.options["maxOffsetsPerTrigger"]
        if not most and self.options["maxBytesPerTrigger"]:
            most = max(self.options["maxBytesPerTrigger"] // self._message_bytes(starts, ends), 1)
        if not most or sum(counts.values()) <= most:
            return ends
        shares = limited(counts, most, self._turn)
        self._turn += most
        return {queue: starts[queue] + share for queue, share in shares.items()}

    def _message_bytes(self, starts: Offsets, ends: Offsets) -> int:
        left: Mapping[MessageQueue, Bounds] = {queue: (starts[queue], end) for queue, end in ends.items()}
        ranges = [each for history in self._look().histories for each in history.ranges(left.items())]
        return max(sum(each.bytes for each in ranges) // max(sum(map(len, ranges)), 1), 1)
