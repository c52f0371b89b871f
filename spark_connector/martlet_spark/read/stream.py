"""The streaming reader: chooses the messages of the next micro-batch.

Spark keeps one reader per query in a process of the driver, which calls everything but `read`. The offsets alone define
the messages of a batch (`offsets.py`), so a batch that is planned again after a crash has the same messages.
"""

import logging
from collections.abc import Iterator, Mapping
from math import ceil
from time import monotonic
from typing import Any, final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import Bounds, BrokerGone, Cluster, UnknownTopic
from martlet_spark.connection import attempts
from martlet_spark.errors import DataLost, ReadError
from martlet_spark.options import Options
from martlet_spark.read.batch import RangePartition, TopicReader
from martlet_spark.read.identity import identities
from martlet_spark.read.offsets import Last, Offsets, decode, decode_last, decode_new, encode, queue_name, words
from martlet_spark.read.planner import MESSAGE_BYTES, Range
from martlet_spark.read.seam import StreamSeam, alive_at
from martlet_spark.read.topics import QueryBound, Subscribed
from martlet_spark.read.watching import MessageSizes, Watch

__all__ = ["StreamReader", "limited"]

log = logging.getLogger("martlet.spark")


@final
class _Driver:
    """The reader's state on the driver: connections, and knowledge of the topics."""

    def __init__(self, cluster: Cluster, options: Options) -> None:
        self.cluster = cluster
        self.subscribed = Subscribed(cluster, options)
        self.starting = QueryBound(self.subscribed, options, "starting", "latest")
        self.watch = Watch(cluster)
        self.sizes = MessageSizes(cluster)
        self.seam = StreamSeam(options)
        self.bounds: dict[MessageQueue, Bounds] = {}  # as of the last look
        self.last_batch = monotonic()
        self.has_begun = False
        self.published: Offsets = {}  # the offsets of the group that shows the progress
        self.publish_error = ""
        self.warned: set[str] = set()
        self.last: Last = {}  # the last messages that the query has read
        self.turn = 0  # index of the first queue in a batch that has fewer messages than there are queues


@final
class StreamReader(TopicReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as a stream."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._made: _Driver | None = None
        self._target: Offsets | None = None  # the end of a query with Trigger.AvailableNow
        self._has_looked = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for tasks, without connections, which stay on the driver."""
        return {**self.__dict__, "_made": None}

    @property
    def _driver(self) -> _Driver:
        if self._made is None:
            self._made = _Driver(self.cluster(), self.options)
        return self._made

    # offsets

    def initialOffset(self) -> dict[str, Any]:
        return encode({})

    def prepareForTriggerAvailableNow(self) -> None:
        try:
            bounds = self._driver.subscribed.bounds()
        except UnknownTopic:  # the name server may have just started; then the first look sets the target
            bounds = {}
        self._target = {queue: end for queue, (_, end) in bounds.items()}
        self._driver.subscribed.forget_routes()  # so the first look sees topics created just now

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self.options
        if options["maxOffsetsPerTrigger"]:
            return ReadMaxRows(options["maxOffsetsPerTrigger"])
        if options["maxBytesPerTrigger"]:
            return ReadMaxBytes(options["maxBytesPerTrigger"])
        return ReadMinRows(options["minOffsetsPerTrigger"]) if options["minOffsetsPerTrigger"] else ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        offsets, self._driver.last = decode(start), decode_last(start)
        self._publish(offsets)
        end = None if self._is_watched(offsets) else self._next(offsets, self._look(offsets), limit)
        if end is None and self._target is None:
            driver = self._driver
            ends = {queue: end for queue, (_, end) in driver.bounds.items()}
            if driver.watch.wait(ends, driver.subscribed.routes(offsets), self.options["pollMs"] / 1000):
                end = self._next(offsets, self._look(offsets), limit)
        return start if end is None else end

    def _is_watched(self, offsets: Offsets) -> bool:
        """Whether the query has read everything, and a request waits at each queue for the next message."""
        driver = self._driver
        if self._target is not None or driver.subscribed.is_old or not offsets:
            return False
        return driver.watch.has_all(offsets) and {queue: end for queue, (_, end) in driver.bounds.items()} == offsets

    def _next(self, offsets: Offsets, bounds: Mapping[MessageQueue, Bounds], limit: ReadLimit) -> dict[str, Any] | None:
        """Return the end of the micro-batch that begins at *offsets*; None if no batch is to run yet."""
        new = self._find_first_offsets(offsets, bounds)
        ends = self._ends({**offsets, **new}, bounds, limit)
        self._driver.has_begun = True
        if ends == offsets:
            return None
        self._driver.last_batch = monotonic()
        return encode(ends, new, self._find_last_messages(offsets, ends))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        bounds = self._driver.bounds
        return encode({queue: end for queue, (_, end) in bounds.items()}) if bounds else None

    def _look(self, offsets: Offsets) -> dict[MessageQueue, Bounds]:
        """Return the present bounds of all queues; with Trigger.AvailableNow they end at the query's target.

        Raises:
          DataLost: a queue of *offsets* is gone, and did not come back in time.
        """
        bounds = self._driver.bounds = self._wait_for(offsets)
        if self._target is None:
            return bounds
        target = self._target
        for queue, (_, end) in bounds.items():
            # The queue was missing when the query began: its broker was away, or its topic was just being created.
            if queue in offsets or not self._has_looked:
                target.setdefault(queue, end)
        self._has_looked = True
        return {queue: (first, min(end, target[queue])) for queue, (first, end) in bounds.items() if queue in target}

    def _wait_for(self, offsets: Offsets) -> dict[MessageQueue, Bounds]:
        """Return the bounds of all queues; wait for queues of *offsets* that are missing.

        A broker that stops disappears from the routes, and so do all brokers when the name server restarts.
        """
        subscribed, strict = self._driver.subscribed, self.options["failOnDataLoss"]
        for queue in sorted(queue for queue in offsets if not subscribed.selects(queue)):
            why = "which the options do not select: it is the checkpoint of another query, or they were changed"
            self._lose(f"the checkpoint has {words(queue)}, {why}")
        bounds: dict[MessageQueue, Bounds] = {}
        for _ in attempts(self.options["timeoutMs"] / 1000):
            try:
                bounds = subscribed.bounds(offsets)
            except BrokerGone:
                if strict:
                    raise
                subscribed.forget_routes()
                continue
            missing = offsets.keys() - bounds.keys()
            if not missing or not strict:
                break
            subscribed.forget_routes()
        for queue in sorted(offsets.keys() - bounds.keys()):
            if subscribed.selects(queue):
                self._lose(f"{words(queue)} is gone: its topic or its broker was removed")
        return bounds

    def _find_first_offsets(self, offsets: Offsets, bounds: Mapping[MessageQueue, Bounds]) -> Offsets:
        """Return the first offsets of queues that *offsets* lack, and of queues that were created again.

        Raises:
          DataLost: a queue has other messages than *offsets* say.
        """
        driver = self._driver
        new_bounds = {queue: bounds[queue] for queue in bounds.keys() - offsets.keys()}
        if new_bounds and not offsets and not driver.has_begun:
            first_offsets = driver.starting.find(new_bounds)
        else:
            first_offsets = {queue: first for queue, (first, _) in new_bounds.items()}
        for queue, offset in offsets.items():
            end = driver.bounds[queue][1] if queue in driver.bounds else offset
            if offset > end:
                text = f"{words(queue)} ends at {end}, but the checkpoint is at {offset}"
                self._lose(f"{text}: the topic was created again, or the broker lost messages")
                first_offsets[queue] = driver.bounds[queue][0]
        recreated_topics = self._created_again(offsets)
        return first_offsets | {
            queue: driver.bounds[queue][0] for queue in offsets if (queue.topic, queue.broker_name) in recreated_topics
        }

    def _created_again(self, offsets: Offsets) -> set[tuple[str, str]]:
        """Return the (topic, broker) pairs at whose last read offset there is another message now.

        Checks only topics that have new messages.

        Raises:
          DataLost: there is one.
        """
        driver = self._driver
        advanced = {
            (queue.topic, queue.broker_name)
            for queue, (_, end) in driver.bounds.items()
            if queue in offsets and offsets[queue] < end
        }
        wanted: Offsets = {}
        for queue, (offset, _) in driver.last.items():
            first, end = driver.bounds.get(queue, (0, 0))
            if first <= offset < end and (queue.topic, queue.broker_name) in advanced:
                wanted[queue] = offset
        return self._find_recreated(wanted, driver.last) if wanted else set()

    def _find_recreated(self, offsets: Offsets, last: Last) -> set[tuple[str, str]]:
        """Return the (topic, broker) pairs with a message at the *offsets* offsets that differs from the one in *last*.

        Raises:
          DataLost: there is one.
        """
        recreated_topics: set[tuple[str, str]] = set()
        routes = self._driver.subscribed.routes(offsets)
        for queue, identity in identities(self._driver.cluster, routes, offsets).items():
            if identity != last[queue][1]:
                text = f"topic {queue.topic!r} was deleted and created again: message {offsets[queue]} of queue"
                self._lose(f"{text} {queue_name(queue)} is not the one that the query has read")
                recreated_topics.add((queue.topic, queue.broker_name))
        return recreated_topics

    def _find_last_messages(self, offsets: Offsets, ends: Offsets) -> Last:
        """Return the last message of a batch that ends at *ends*, in one queue per topic and broker."""
        driver = self._driver
        longest: dict[tuple[str, str], MessageQueue] = {}
        for queue, end in ends.items():
            name = queue.topic, queue.broker_name
            if end > offsets.get(queue, 0) and (name not in longest or end > ends[longest[name]]):
                longest[name] = queue
        last_offsets = {queue: ends[queue] - 1 for queue in longest.values()}
        identity_by_queue = identities(driver.cluster, driver.subscribed.routes(ends), last_offsets)
        last_messages = {
            queue: last_message
            for queue, last_message in driver.last.items()
            if (queue.topic, queue.broker_name) not in longest
        }
        return last_messages | {queue: (last_offsets[queue], identity) for queue, identity in identity_by_queue.items()}

    def _lose(self, text: str) -> None:
        if self.options["failOnDataLoss"]:
            raise DataLost(f"{text}; set failOnDataLoss to false to continue, or begin with a new checkpoint")
        if text not in self._driver.warned:  # once, not for each look
            self._driver.warned.add(text)
            log.warning("%s; continuing", text)

    def _ends(self, starts: Offsets, bounds: Mapping[MessageQueue, Bounds], limit: ReadLimit) -> Offsets:
        """Return the end of the next batch in each queue, within the limits."""
        found = {queue: max(bounds[queue][1], start) if queue in bounds else start for queue, start in starts.items()}
        if isinstance(limit, ReadAllAvailable):
            return found
        counts = {queue: end - max(starts[queue], bounds.get(queue, (0, 0))[0]) for queue, end in found.items()}
        total = sum(counts.values())
        if self._target is None and self._waits(total, limit):
            return starts
        most = self._count_max(starts, bounds, limit)
        if most is None or total <= most:
            return found
        shares = limited(counts, most, self._driver.turn)
        self._driver.turn += most
        return {queue: end - counts[queue] + shares[queue] for queue, end in found.items()}

    def _waits(self, total: int, limit: ReadLimit) -> bool:
        least = max(self.options["minOffsetsPerTrigger"], limit.min_rows if isinstance(limit, ReadMinRows) else 0)
        waited_s = monotonic() - self._driver.last_batch
        return total < least and waited_s * 1000 < int(self.options["maxTriggerDelay"])

    def _count_max(self, starts: Offsets, bounds: Mapping[MessageQueue, Bounds], limit: ReadLimit) -> int | None:
        """Return the maximum number of messages in a batch; None for no limit."""
        counts = [self.options["maxOffsetsPerTrigger"], limit.max_rows if isinstance(limit, ReadMaxRows) else 0]
        sizes = [self.options["maxBytesPerTrigger"], limit.max_bytes if isinstance(limit, ReadMaxBytes) else 0]
        if any(sizes):
            left = {queue: (max(starts[queue], first), end) for queue, (first, end) in bounds.items()}
            average = self._average_size(left)
            counts += [max(int(each / average), 1) for each in sizes if each]
        return min((count for count in counts if count), default=None)

    def _average_size(self, bounds: Mapping[MessageQueue, Bounds]) -> float:
        """Return the average size of the messages in these *bounds*."""
        sizes = self._sizes(bounds)
        count = size = 0
        for queue, (first, end) in bounds.items():
            if first < end:
                count += end - first
                size += (end - first) * sizes[queue.topic]
        return max(size / count, 1) if count else MESSAGE_BYTES

    def _sizes(self, bounds: Mapping[MessageQueue, Bounds]) -> dict[str, int]:
        """Return the average size of a message for each topic that has messages in these *bounds*."""
        return self._driver.sizes.of(self._driver.subscribed.routes(bounds), bounds)

    def _publish(self, offsets: Offsets) -> None:
        """Commit the offsets of the group that shows the query's progress; they are in the checkpoint already."""
        driver = self._driver
        group = self.options["group"]
        changed = {queue: offset for queue, offset in offsets.items() if driver.published.get(queue) != offset}
        if not group or not changed:
            return
        try:
            driver.cluster.commit(group, changed, driver.subscribed.routes())
            driver.published.update(changed)
        except ReadError as error:
            if driver.publish_error != str(error):  # once, not for each batch
                driver.publish_error = str(error)
                log.warning("the progress of the query cannot be shown as that of group %r: %s", group, error)

    # partitions

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        starts, ends = {**decode(start), **decode_new(end)}, decode(end)
        last = decode_last(end)
        if last and not self._driver.has_begun:  # an earlier run of the query planned the batch
            self._find_recreated({queue: offset for queue, (offset, _) in last.items()}, last)
        bounds = {queue: (starts[queue], ends[queue]) for queue in sorted(ends) if starts[queue] < ends[queue]}
        driver = self._driver
        cold, left = driver.seam.divide(driver.subscribed, alive_at(driver.bounds, bounds), starts)
        hot = {queue: each for queue, each in {**bounds, **left}.items() if each[0] < each[1]}
        sizes = self._sizes(hot)
        ranges = [Range(queue, first, last, sizes[queue.topic]) for queue, (first, last) in hot.items()]
        return [*self.partitions_of([*cold, *ranges])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, RangePartition)
        return self.read_ranges(partition.ranges)

    def stop(self) -> None:
        if self._made is not None:
            self._made.watch.close()


def limited(counts: Mapping[MessageQueue, int], most: int, turn: int = 0) -> dict[MessageQueue, int]:
    """Divide *most* messages among queues in proportion to their *counts*, at least one each.

    If there are more queues than messages, queues from number *turn* on get one message each, so all have a turn.
    """
    queues = sorted(queue for queue, count in counts.items() if count > 0)
    if most < len(queues):
        start = turn % len(queues)
        chosen_queues = {*(queues[start:] + queues[:start])[:most]}
        return {queue: int(queue in chosen_queues) for queue in counts}
    total = sum(counts.values())
    messages_left = most
    shares: dict[MessageQueue, int] = {}
    for queue, count in sorted(counts.items(), key=lambda item: item[1]):
        share = min(count, messages_left, max(ceil(most * count / total), 1 if count else 0)) if total else 0
        shares[queue] = share
        messages_left -= share
    return shares
