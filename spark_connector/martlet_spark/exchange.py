"""Asks one broker for ranges of queues: by bulk reads, or by pulls where the broker is RocketMQ's.

Both keep several requests outstanding. Their answers come in any order, so each is matched with its request by number,
and its records with the queue and the offsets that were asked for.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import Final, final

import orjson

from martlet.errors import RemoteProtocolError
from martlet_remoting.codes import RequestCode, ResponseCode
from martlet_remoting.headers import PULL_SUBSCRIPTION, PULL_SUSPEND
from martlet_remoting.packets import MessageQueue
from martlet_spark.cluster import check
from martlet_spark.connection import Answer, Connection
from martlet_spark.errors import DataLost, ReadError, SparkConnectorError
from martlet_spark.filters import LANGUAGE, Filter
from martlet_spark.frames import Frames, Part
from martlet_spark.offsets import queue_name
from martlet_spark.planner import Range
from martlet_spark.records import Records

__all__ = ["BulkReads", "Exchange", "NotSupported", "Progress", "Pulls", "pull_only", "request_one"]

log = logging.getLogger("martlet.spark")

# Requests of one connection without an answer; more ranges than that wait for a turn.
OUTSTANDING_MAX: Final = 8
# How long a broker may wait for messages that are not readable yet, before it answers without any.
WAIT_MS: Final = 1000
PULL_MESSAGES: Final = 1024  # RocketMQ answers 32 of them
PULL_GROUP: Final = "martlet-spark"
EVERYTHING: Final = Filter()


# The addresses of brokers that do not know bulk reads; a process meets few of them.
pull_only: Final[set[str]] = set()


class NotSupported(ReadError):
    """The broker does not know bulk reads."""


@final
class Progress:
    """How far a range has been read: the next offset, and since when answers have not moved it."""

    __slots__ = ("end", "next", "queue", "stuck_since")

    def __init__(self, each: Range) -> None:
        self.queue: Final[MessageQueue] = each.queue
        self.next = each.start
        self.end: Final = each.end
        self.stuck_since: float | None = None

    def __str__(self) -> str:
        return f"queue {queue_name(self.queue)} of topic {self.queue.topic!r}"

    def move(self, offset: int) -> None:
        if offset > self.next:
            self.next = min(offset, self.end)
            self.stuck_since = None


class Exchange(ABC):
    """Requests and answers on one *connection*.

    Args:
      fetch_bytes: how much to ask for at once; brokers have limits too.
      timeout_s: fail if a broker does not answer with messages that it says it has.
      fail_on_loss: raise `DataLost` if messages are gone; otherwise log a warning and continue after them.
    """

    def __init__(
        self, connection: Connection, wanted: Filter, fetch_bytes: int, timeout_s: float, *, fail_on_loss: bool
    ) -> None:
        self.connection = connection
        self.wanted = wanted
        self.fetch_bytes = fetch_bytes
        self._timeout_s = timeout_s
        self._fail_on_loss = fail_on_loss

    @abstractmethod
    def ask(self, progress: Progress) -> int:
        """Request the next messages of *progress*; return the number of the request."""

    @abstractmethod
    def take(self, progress: Progress, answer: Answer) -> bool:
        """Advance *progress* by *answer*, whose records were not checked; return whether more frames follow."""

    def read(self, left: list[Progress]) -> Iterator[Records]:
        """Yield the records of all ranges in *left*, many at once, and remove ranges that were read to their end.

        Records are overwritten when the next ones are asked for. Before an error, those that were received are yielded.

        Raises:
          ConnectionLost: the connection broke; what is in *left* can be read on another one.
          ReadError: the broker refuses, or sends damaged records.
          DataLost: messages are gone.
        """
        frames, waiting = Frames(), deque(left)
        asked: dict[int, Progress] = {}
        while asked or waiting:
            try:
                while waiting and len(asked) < OUTSTANDING_MAX:
                    progress = waiting.popleft()
                    asked[self.ask(progress)] = progress
                self._receive(frames, asked, waiting, left)
            except SparkConnectorError:
                yield from _taken(frames)
                raise
            if frames.enough:
                yield from _taken(frames)
        yield from _taken(frames)

    def _receive(
        self, frames: Frames, asked: dict[int, Progress], waiting: deque[Progress], left: list[Progress]
    ) -> None:
        """Receive one frame into *frames*, and note what it ends."""
        answer = self.connection.receive(frames.room)
        found = asked.get(answer.opaque)
        if found is None:
            raise RemoteProtocolError(f"answer {answer.opaque} belongs to no request")
        first = found.next
        more = self.take(found, answer)
        if answer.body:
            bounds = first, answer.integer("nextBeginOffset"), found.end
            frames.add(Part(frames.end, len(answer.body), found.queue.queue_id, *bounds))
        if more:
            return
        del asked[answer.opaque]
        self.connection.outstanding -= 1
        if found.next < found.end:
            self._check_moves(found, first)
            waiting.append(found)
        else:
            left.remove(found)

    def _check_moves(self, progress: Progress, first: int) -> None:
        """Fail if one answer after the other has left *progress* at *first* for too long."""
        if progress.next > first:
            return
        if progress.stuck_since is None:
            progress.stuck_since = monotonic()
        elif monotonic() - progress.stuck_since > self._timeout_s:
            text = f"{progress} has messages from {progress.next} to {progress.end}, but the broker sends none of them"
            raise ReadError(f"{text}; see its log")

    def moved(self, progress: Progress, answer: Answer) -> None:
        """Continue where the broker still has messages, after it said that ``progress.next`` is out of its range.

        Raises:
          DataLost: messages are gone.
        """
        first, end = answer.integer("minOffset"), answer.integer("maxOffset")
        if progress.next < first:
            upto = min(first, progress.end)
            why = "were removed by the broker's retention before the query read them"
        elif end < progress.end:
            upto = progress.end
            why = f"do not exist: the queue ends at {end}. The topic was created again, or the broker lost messages"
        else:
            return
        text = f"messages {progress.next} to {upto - 1} of {progress} {why}"
        if self._fail_on_loss:
            hint = "set failOnDataLoss to false to continue without them, or begin with a new checkpoint"
            raise DataLost(f"{text}; {hint}")
        log.warning("%s; continuing without them", text)
        progress.move(upto)


@final
class BulkReads(Exchange):
    """BULK_READ requests, each answered by many frames."""

    def ask(self, progress: Progress) -> int:
        filters = self.wanted.fields(knows_like=True)
        queue, end = progress.queue, progress.end
        return _bulk(self.connection, queue, progress.next, WAIT_MS, self.fetch_bytes, endOffset=end, **filters)

    def take(self, progress: Progress, answer: Answer) -> bool:
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise NotSupported("no bulk reads")
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            self.moved(progress, answer)
            return False
        check(answer, f"read of {progress}", f"broker {progress.queue.broker_name!r}")
        progress.move(answer.integer("nextBeginOffset"))
        more = answer.ext.get("more") == "true"
        if not more and progress.next < progress.end and answer.integer("maxOffset") < progress.end:
            self.moved(progress, answer)
        return more


@final
class Pulls(Exchange):
    """PULL_MESSAGE requests, each answered by one frame."""

    def read(self, left: list[Progress]) -> Iterator[Records]:
        if self.wanted.has_sql:
            for topic in sorted({progress.queue.topic for progress in left}):
                self._check_expression(topic)
        yield from super().read(left)

    def _check_expression(self, topic: str) -> None:
        """Fail if the broker does not understand the expression: RocketMQ would answer pulls with all messages."""
        filters = self.wanted.fields(knows_like=False)
        subscription = {"topic": topic, "subString": filters["subscription"], "expressionType": LANGUAGE}
        config = {"clientId": PULL_GROUP, "group": PULL_GROUP, "subscriptionData": subscription}
        answer = self.connection.request(RequestCode.CHECK_CLIENT_CONFIG, {}, orjson.dumps(config))
        check(answer, f"filter on topic {topic!r}", self.connection.address)

    def ask(self, progress: Progress) -> int:
        count = min(progress.end - progress.next, PULL_MESSAGES)
        filters = self.wanted.fields(knows_like=False)
        return _pull(self.connection, progress.queue, progress.next, WAIT_MS, count, self.fetch_bytes, filters)

    def take(self, progress: Progress, answer: Answer) -> bool:
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            self.moved(progress, answer)
        elif answer.code in (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY):
            progress.move(answer.integer("nextBeginOffset"))
            if answer.integer("maxOffset") < progress.end:
                self.moved(progress, answer)
        else:
            check(answer, f"pull of {progress}", f"broker {progress.queue.broker_name!r}")
            progress.move(answer.integer("nextBeginOffset"))
        return False


def _taken(frames: Frames) -> Iterator[Records]:
    records = frames.take()
    if records is not None:
        yield records


def request_one(connection: Connection, queue: MessageQueue, offset: int, wait_ms: int, credit_bytes: int) -> int:
    """Request a few messages of any kind, in one frame; return the number of the request.

    If there is none, the broker waits up to *wait_ms* for one.
    """
    if connection.address in pull_only:
        filters = EVERYTHING.fields(knows_like=False)
        return _pull(connection, queue, offset, wait_ms, 32 if credit_bytes > 1 else 1, credit_bytes, filters)
    return _bulk(connection, queue, offset, wait_ms, credit_bytes)


def _bulk(
    connection: Connection, queue: MessageQueue, offset: int, wait_ms: int, credit_bytes: int, **more: object
) -> int:
    ext = {
        "topic": queue.topic,
        "queueId": queue.queue_id,
        "brokerName": queue.broker_name,
        "offset": offset,
        "creditBytes": credit_bytes,
        "waitMs": wait_ms,
        **more,
    }
    return connection.send(RequestCode.BULK_READ, ext)


def _pull(
    connection: Connection,
    queue: MessageQueue,
    offset: int,
    wait_ms: int,
    count: int,
    size: int,
    filters: Mapping[str, object],
) -> int:
    ext = {
        "consumerGroup": PULL_GROUP,
        "topic": queue.topic,
        "queueId": queue.queue_id,
        "queueOffset": offset,
        "maxMsgNums": count,
        "maxMsgBytes": size,
        "sysFlag": PULL_SUBSCRIPTION | (PULL_SUSPEND if wait_ms else 0),
        "commitOffset": 0,
        "suspendTimeoutMillis": wait_ms,
        "subVersion": 0,
        **filters,
    }
    return connection.send(RequestCode.PULL_MESSAGE, ext)
