"""Sends chunks with acknowledgement: the sink's guarantee ``at-least-once``."""

import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, final

from martlet_remoting.wire.batches import decode_batch
from martlet_remoting.wire.codes import RESPONSE_NAMES, RequestCode, ResponseCode
from martlet_remoting.wire.headers import SendHeader
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import BUSY, Cluster, rights_hint
from martlet_spark.connection import CONNECTIONS, AnswerFrame, BrokerConnection, ConnectionBroken, attempts
from martlet_spark.errors import WriteError
from martlet_spark.write.targets import BatchBody, QueueTurns, RowTarget
from martlet_spark.write.writable import TEMPLATE_QUEUES, TEMPLATE_TOPIC, master

__all__ = ["Lane", "Outbox", "SendRequest", "refusal", "send_fields"]

log = logging.getLogger("martlet.spark")

GROUP: Final = "martlet-spark"
# Unanswered requests per broker. Their answers must fit the socket's buffers, as no answer is read during a send.
WINDOW: Final = 4
# The time for which a failed broker is avoided while there are others.
AVOIDED_S: Final = 5.0
# Codes for messages that are stored, but not as safely as the broker is configured for.
STORED: Final = frozenset(
    (
        ResponseCode.FLUSH_DISK_TIMEOUT,
        ResponseCode.SLAVE_NOT_AVAILABLE,
        ResponseCode.FLUSH_SLAVE_TIMEOUT,
    )
)


@final
@dataclass(frozen=True, slots=True)
class SendRequest:
    """One request that stores *count* messages of *place* in *queue*."""

    code: int
    ext: Mapping[str, object]
    body: bytes
    queue: MessageQueue
    place: RowTarget
    count: int


def send_fields(queue: MessageQueue, properties: bytes = b"", flag: int = 0, *, batch: bool) -> dict[str, object]:
    """Return the header fields of a send to *queue*."""
    return SendHeader(
        producer_group=GROUP,
        topic=queue.topic,
        default_topic=TEMPLATE_TOPIC,
        default_queues=TEMPLATE_QUEUES,
        queue_id=queue.queue_id,
        born_ms=time.time_ns() // 1_000_000,
        flag=flag,
        properties=properties.decode(),
        batch=batch,
        broker_name=queue.broker_name,
    ).to_ext()


@final
class Lane:
    """Pipelined requests to one broker: ``unanswered`` has the requests without an answer, oldest first."""

    def __init__(self, cluster: Cluster, broker: str) -> None:
        self._cluster = cluster
        self._broker = broker
        self._connection: BrokerConnection | None = None
        self.unanswered: dict[int, SendRequest] = {}

    def post(self, request: SendRequest) -> None:
        """Send *request*, on a new connection if there is none.

        Raises:
          ConnectionBroken: the request could not be sent.
        """
        if self._connection is None:
            address = master(self._cluster, request.queue)
            self._connection = CONNECTIONS.borrow(address, self._cluster.security, self._cluster.timeout_s)
        self.unanswered[self._connection.send(request.code, request.ext, request.body)] = request

    def receive(self) -> tuple[SendRequest, AnswerFrame]:
        """Return the next answer and its request.

        Raises:
          ConnectionBroken: no answer will arrive.
        """
        assert self._connection is not None
        answer = self._connection.receive()
        request = self.unanswered.pop(answer.opaque, None)
        if request is None:
            raise ConnectionBroken(f"{self._connection.address} answered request {answer.opaque}, which was not sent")
        self._connection.outstanding -= 1
        return request, answer

    def drop(self) -> list[SendRequest]:
        """Close the connection; return the unanswered requests."""
        left = list(self.unanswered.values())
        self.unanswered.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return left

    def release(self) -> None:
        """Return the connection to the pool if all requests are answered."""
        if self._connection is not None:
            CONNECTIONS.give_back(self._connection)
            self._connection = None


@final
class Outbox:
    """Sends chunks, several at once, and again until a broker confirms them.

    A queue has one unanswered batch, so that a batch which is sent again is not overtaken by the next one; messages
    with a time have no order. After a failure, rows that may go to any queue go to another broker if there is one;
    other rows wait for their broker. A permanent refusal, and brokers that confirm nothing for the cluster's timeout,
    raise `WriteError`.
    """

    def __init__(self, cluster: Cluster, turns: QueueTurns) -> None:
        self._cluster = cluster
        self._turns = turns
        self._lanes: dict[str, Lane] = {}
        self._waiting: deque[SendRequest] = deque()
        self._busy: set[MessageQueue] = set()
        self._avoided: dict[str, float] = {}
        self._tries = attempts(cluster.timeout_s)

    def write(self, chunk: BatchBody) -> None:
        """Send *chunk*; return before it is confirmed."""
        self._waiting.extend(self._requests(chunk))
        self._send_waiting()

    def finish(self) -> None:
        """Return once all chunks are confirmed."""
        while self._waiting or any(lane.unanswered for lane in self._lanes.values()):
            self._send_waiting()
            for lane in list(self._lanes.values()):
                if lane.unanswered:
                    self._settle(lane)
        for lane in self._lanes.values():
            lane.release()

    def close(self) -> None:
        """Close the connections that have unanswered requests."""
        for lane in self._lanes.values():
            lane.drop()

    def _requests(self, chunk: BatchBody) -> Iterator[SendRequest]:
        if not chunk.place.timed and not chunk.is_over:
            yield self._batch(chunk.place, chunk.body, chunk.count)
            return
        # Messages are sent alone here: brokers refuse batches with timed messages, and count a batch's properties as
        # body.
        for message in decode_batch(chunk.body):
            queue = self._turns.next_queue(chunk.place, self._avoided_now())
            ext = send_fields(queue, message.properties, message.flag, batch=False)
            yield SendRequest(RequestCode.SEND_MESSAGE_V2, ext, message.body, queue, chunk.place, 1)

    def _batch(self, place: RowTarget, body: bytes, count: int) -> SendRequest:
        queue = self._turns.next_queue(place, self._avoided_now())
        ext = send_fields(queue, batch=True)
        return SendRequest(RequestCode.SEND_BATCH_MESSAGE, ext, body, queue, place, count)

    def _avoided_now(self) -> list[str]:
        return [broker for broker, until in self._avoided.items() if time.monotonic() < until]

    def _lane(self, broker: str) -> Lane:
        return self._lanes.setdefault(broker, Lane(self._cluster, broker))

    def _send_waiting(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            lane = self._lane(request.queue.broker_name)
            if len(lane.unanswered) >= WINDOW or (not request.place.timed and request.queue in self._busy):
                self._settle(lane)
                continue
            self._waiting.popleft()
            if not request.place.timed:
                self._busy.add(request.queue)
            try:
                lane.post(request)
            except ConnectionBroken as error:
                self._send_again([*lane.drop(), request], str(error))

    def _settle(self, lane: Lane) -> None:
        """Wait for an answer from *lane*."""
        try:
            request, answer = lane.receive()
        except ConnectionBroken as error:
            self._send_again(lane.drop(), str(error))
            return
        if not request.place.timed:
            self._busy.discard(request.queue)
        if answer.code in STORED:
            log.warning(
                "%s: they are stored, but the broker could not flush or copy them in time", refusal(request, answer)
            )
        elif answer.code in BUSY:
            self._send_again([request], refusal(request, answer))
            return
        elif answer.code != ResponseCode.SUCCESS:
            raise WriteError(refusal(request, answer))
        self._tries = attempts(self._cluster.timeout_s)

    def _send_again(self, requests: list[SendRequest], why: str) -> None:
        """Queue the failed *requests* before all others."""
        if next(self._tries, None) is None:
            queue = requests[0].queue
            text = f"queue {queue.queue_id} of topic {queue.topic!r} on broker {queue.broker_name!r}"
            raise WriteError(f"{text} confirmed no message for {self._cluster.timeout_s:g} s: {why}")
        for request in requests:
            if not request.place.timed:
                self._busy.discard(request.queue)
            self._avoided[request.queue.broker_name] = time.monotonic() + AVOIDED_S
        self._waiting.extendleft(reversed([self._reroute(request) for request in requests]))

    def _reroute(self, request: SendRequest) -> SendRequest:
        """Return *request* for another broker if its place allows one."""
        if request.place.broker:
            return request
        queue = self._turns.next_queue(request.place, self._avoided_now())
        ext = {**request.ext, "e": queue.queue_id, "n": queue.broker_name}
        return SendRequest(request.code, ext, request.body, queue, request.place, request.count)


def refusal(request: SendRequest, answer: AnswerFrame) -> str:
    """Return the text of an error for a broker's refusal."""
    queue, name = request.queue, RESPONSE_NAMES.get(answer.code, str(answer.code))
    what = f"{request.count} messages ({len(request.body)} bytes) for topic {queue.topic!r}"
    text = f"broker {queue.broker_name!r} answered to {what}: {name}: {answer.remark}{rights_hint(answer)}"
    if answer.code == ResponseCode.MESSAGE_ILLEGAL and request.count > 1:
        text += "; if its limit is below the option batchBytes, set that lower"
    return text
