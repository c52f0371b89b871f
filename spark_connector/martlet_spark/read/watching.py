"""Waits for new messages on the driver, and estimates their sizes.

A streaming query polls the ends of its queues. While there is no new message, each queue has one request at its broker
that waits for one: an idle query costs a request per queue and half a minute, and sees a new message at once.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from select import select
from time import monotonic, sleep
from typing import Final, final

from martlet.errors import MartletError
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import TopicRoute
from martlet_spark.cluster import Bounds, Cluster
from martlet_spark.connection import BrokerConnection
from martlet_spark.errors import ReadError
from martlet_spark.read.exchange import pull_only, request_one
from martlet_spark.read.inner_batches import unrolled
from martlet_spark.read.planner import MESSAGE_BYTES
from martlet_spark.read.received import received_records

__all__ = ["MessageSizes", "Watch"]

log = logging.getLogger("martlet.spark")

WAIT_MS: Final = 30_000
# Queues of one broker that have a request there, as many as Martlet allows for a connection; other queues are polled
# each time that Spark asks.
WATCHED_MAX: Final = 128
PAUSE_S: Final = 0.1  # after a connection broke
SAMPLE_BYTES: Final = 65_536
SAMPLES_MAX: Final = 8  # queues of one topic
TOPICS_MAX: Final = 64
SAMPLE_S: Final = 60.0  # lifetime of an estimate


@final
class Watch:
    """Requests that wait at brokers for messages."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connections: dict[str, BrokerConnection] = {}
        # broker -> number of the request -> its queue
        self._asked: dict[str, dict[int, MessageQueue]] = {}
        self._waiting: set[MessageQueue] = set()
        self._refused: set[MessageQueue] = set()  # queues whose brokers have too many waiting requests

    def has_all(self, queues: Collection[MessageQueue]) -> bool:
        """Whether a request waits for a message of each of *queues*."""
        return self._waiting.issuperset(queues)

    def wait(self, ends: Mapping[MessageQueue, int], routes: Mapping[str, TopicRoute], timeout_s: float) -> bool:
        """Wait up to *timeout_s* for a message at or after the *ends* of queues; return whether there may be one."""
        until = monotonic() + timeout_s
        try:
            while True:
                self._ask(ends, routes)
                ready = self._ready(max(until - monotonic(), 0))
                if not ready:
                    return False
                found = [self._take(broker) for broker in ready]
                if any(found):
                    return True
        except (MartletError, OSError) as error:
            log.info("cannot wait for messages, asking again: %s", error)
            self.close()
            sleep(min(PAUSE_S, timeout_s))
            return True

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._asked.clear()
        self._waiting.clear()
        self._refused.clear()

    def _ask(self, ends: Mapping[MessageQueue, int], routes: Mapping[str, TopicRoute]) -> None:
        for queue, end in ends.items():
            if queue in self._waiting or queue in self._refused or queue.topic not in routes:
                continue
            connection = self._connection(queue.broker_name, routes[queue.topic])
            if len(self._asked[queue.broker_name]) >= WATCHED_MAX:
                continue
            opaque = request_one(connection, queue, end, WAIT_MS, 1)
            self._asked[queue.broker_name][opaque] = queue
            self._waiting.add(queue)

    def _connection(self, broker: str, route: TopicRoute) -> BrokerConnection:
        found = self._connections.get(broker)
        if found is None:
            address = self._cluster.address(route, broker)
            found = BrokerConnection(address, self._cluster.security, self._cluster.timeout_s)
            self._connections[broker] = found
            self._asked[broker] = {}
        return found

    def _ready(self, timeout_s: float) -> list[str]:
        """Return the brokers whose answers arrived, after waiting up to *timeout_s* for the first."""
        ready = [broker for broker, connection in self._connections.items() if connection.buffered]
        if ready:
            return ready
        by_socket = {connection.fileno(): broker for broker, connection in self._connections.items()}
        readable, _, _ = select(list(by_socket), [], [], timeout_s)
        return [by_socket[each] for each in readable]

    def _take(self, broker: str) -> bool:
        """Receive one answer of *broker*; return whether there is a message."""
        connection = self._connections[broker]
        answer = connection.receive()
        queue = self._asked[broker].pop(answer.opaque, None)
        if queue is None:
            return False
        self._waiting.discard(queue)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            pull_only.add(connection.address)
            return False
        if answer.code == ResponseCode.SYSTEM_BUSY:
            self._refused.add(queue)
            return False
        return bool(answer.body) or answer.code not in (ResponseCode.SUCCESS, ResponseCode.PULL_NOT_FOUND)


@final
class MessageSizes:
    """Estimates the average size of messages by reading some of them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[float, int]] = {}  # topic -> (expiry, bytes)

    def of(self, routes: Mapping[str, TopicRoute], bounds: Mapping[MessageQueue, Bounds]) -> dict[str, int]:
        """Return the average size of a message in bytes for each topic with messages in these *bounds*.

        Samples the first messages in some of the queues of the topics with most messages; other topics get their
        average.
        """
        queues_by_topic: dict[str, list[MessageQueue]] = {}
        counts: Counter[str] = Counter()
        for queue, (first, end) in sorted(bounds.items()):
            if first < end:
                queues_by_topic.setdefault(queue.topic, []).append(queue)
                counts[queue.topic] += end - first
        size_by_topic: dict[str, int] = {}
        for topic, _ in counts.most_common(TOPICS_MAX):
            if topic in routes:
                size_by_topic[topic] = self._of(topic, routes[topic], queues_by_topic[topic], bounds)
        average = sum(size_by_topic.values()) // len(size_by_topic) if size_by_topic else MESSAGE_BYTES
        return {topic: size_by_topic.get(topic, average) for topic in queues_by_topic}

    def _of(
        self, topic: str, route: TopicRoute, full: Sequence[MessageQueue], bounds: Mapping[MessageQueue, Bounds]
    ) -> int:
        until, size = self._known.get(topic, (0.0, MESSAGE_BYTES))
        if monotonic() >= until:
            try:
                size = self._sample(topic, route, full, bounds) or size
            except ReadError as error:
                # the read of the messages raises it too
                log.info("the size of messages of topic %r is unknown: %s", topic, error)
            self._known[topic] = (monotonic() + SAMPLE_S, size)
        return size

    def _sample(
        self, topic: str, route: TopicRoute, full: Sequence[MessageQueue], bounds: Mapping[MessageQueue, Bounds]
    ) -> int:
        count = size = 0
        for queue in full[:: max(len(full) // SAMPLES_MAX, 1)][:SAMPLES_MAX]:
            body = self._cluster.ask_broker(topic, route, queue.broker_name, partial(_some, queue, bounds[queue][0]))
            count += len(unrolled(received_records(body), 0)) if body else 0
            size += len(body)
        return size // count if count else 0


def _some(queue: MessageQueue, offset: int, connection: BrokerConnection) -> bytearray:
    """Return the first few records of *queue* from *offset* on."""
    body = bytearray()
    for _ in range(2):
        opaque = request_one(connection, queue, offset, 0, SAMPLE_BYTES)
        more = True
        while more:
            answer = connection.receive()
            more = answer.opaque != opaque or answer.ext.get("more") == "true"
            body += answer.body
        connection.outstanding -= 1
        if answer.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return body
        pull_only.add(connection.address)
    return body
