"""Reads ranges of queues from one broker: by bulk reads, or from RocketMQ's brokers by pulls.

Both keep several requests outstanding. Answers arrive in any order, so an answer is matched with its request by number,
and its records with the queue and the offsets of the request.

RocketMQ's queues list messages for some seconds after its log has lost them, and pulls skip them without an error. So
answers to pulls without a filter must have every offset, except in compacted topics. Pulls with a filter are followed
by one without, for the first offset that they skipped: RocketMQ removes the oldest messages first, so if this message
exists, all later ones do. A message that seems lost is requested once more: the files of a queue can be away for a
moment while it is cleaned.

Answers to bulk reads without a filter must have every offset too; with a filter, the broker reports messages that it
could not read. The broker does not compare messages with their CRCs, so frames may have damaged messages. If loss is
allowed, such frames are requested once more, without damaged messages.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Final, final

import numpy as np
import orjson

from martlet.errors import RemoteProtocolError
from martlet_columns.records import Integers, Records
from martlet_remoting.wire.answers.bodies import load_object
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import PULL_SUBSCRIPTION, PULL_SUSPEND
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import check
from martlet_spark.connection import AnswerFrame, BrokerConnection
from martlet_spark.errors import DataLost, ReadError, SparkConnectorError
from martlet_spark.read.filters import LANGUAGE, Filter
from martlet_spark.read.frames import FrameBodies, FramePart
from martlet_spark.read.inner_batches import unrolled
from martlet_spark.read.progress import RangeProgress
from martlet_spark.read.received import Damaged, check_range, received_records

__all__ = ["BulkReadExchange", "Exchange", "NotSupported", "Pulls", "Unchecked", "pull_only", "request_one"]

log = logging.getLogger("martlet.spark")

# Unanswered requests of one connection; further ranges wait for a turn.
OUTSTANDING_MAX: Final = 8
# The time for which a broker may wait for readable messages, before it answers without any.
WAIT_MS: Final = 1000
PULL_MESSAGES: Final = 1024  # RocketMQ answers with up to 32
PULL_GROUP: Final = "martlet-spark"
EVERYTHING: Final = Filter()

REMOVED: Final = "were removed by the broker's retention before the query read them"
PERHAPS: Final = "were removed by the broker's retention while the query read them; some may match its filter"
DAMAGED: Final = "are damaged or missing in the log of the broker; 'martlet store verify' lists the damage"
MAYBE_DAMAGED: Final = f"{DAMAGED}. Some may match the filter of the query"
LISTED: Final = "'martlet store verify' lists damaged messages"
CONTINUE: Final = f"{LISTED}; set failOnDataLoss to false to continue without them"
LEAVE_OUT: Final = f"{LISTED}; startingOffsets and endingOffsets leave them out"
UNREADABLE: Final = "cannot be read: the broker finds no entries for them in its queue files; see its log"
STATIC_TOPIC: Final = "its queues are parts of queues of several brokers, which the source does not read"

# Codes of answers without messages.
NOTHING_FOUND: Final = frozenset(
    (ResponseCode.PULL_NOT_FOUND, ResponseCode.PULL_RETRY_IMMEDIATELY, ResponseCode.PULL_OFFSET_MOVED)
)


# The addresses of brokers that do not know bulk reads; a process meets few such brokers.
pull_only: Final[set[str]] = set()


class NotSupported(ReadError):
    """The broker does not know bulk reads."""


class Unchecked(ReadError):
    """Frames with damaged messages were dropped; the next read leaves damaged messages out."""


class Exchange(ABC):
    """Requests and answers on one *connection*.

    Args:
      fetch_bytes: size of one request; brokers have limits too.
      timeout_s: fail after this time if a broker does not send messages that it reports to have.
      fail_on_loss: raise `DataLost` if messages are gone; otherwise log a warning and continue after them.
    """

    def __init__(
        self, connection: BrokerConnection, wanted: Filter, fetch_bytes: int, timeout_s: float, *, fail_on_loss: bool
    ) -> None:
        self.connection = connection
        self.wanted = wanted
        self.fetch_bytes = fetch_bytes
        self._timeout_s = timeout_s
        self._fail_on_loss = fail_on_loss

    broker_checks = False  # whether the broker can leave damaged messages out

    @abstractmethod
    def ask(self, progress: RangeProgress) -> int:
        """Request the next messages of *progress*; return the number of the request."""

    @abstractmethod
    def take(self, progress: RangeProgress, answer: AnswerFrame) -> bool:
        """Advance *progress* by *answer*, whose records were not checked.

        Return whether the records must include every message of the range by which *progress* has advanced.
        """

    def read(self, ranges_left: list[RangeProgress]) -> Iterator[Records]:
        """Yield the records of all ranges in *ranges_left*, many at once; remove each range that is read to its end.

        Yielded records are overwritten when the next ones are requested. Before an error, the received records are
        yielded.

        Raises:
          ConnectionLost: the connection broke; the ranges in *ranges_left* can be read on another one.
          ReadError: the broker refuses, or sends damaged records.
          Unchecked: the ranges in *ranges_left* can be read on another connection.
          DataLost: messages are gone.
        """
        frames, waiting_ranges = FrameBodies(), deque(ranges_left)
        ranges_by_request: dict[int, RangeProgress] = {}
        while ranges_by_request or waiting_ranges:
            try:
                while waiting_ranges and len(ranges_by_request) < OUTSTANDING_MAX:
                    progress = waiting_ranges.popleft()
                    ranges_by_request[self.ask(progress)] = progress
                self._receive(frames, ranges_by_request, waiting_ranges, ranges_left)
            except SparkConnectorError:
                yield from self._take_records(frames, ranges_left)
                raise
            if frames.enough:
                yield from self._take_records(frames, ranges_left)
        yield from self._take_records(frames, ranges_left)

    def _take_records(self, frames: FrameBodies, ranges_left: list[RangeProgress]) -> Iterator[Records]:
        """Take the records out of *frames* and yield them; report the messages that they lack."""
        parts = frames.parts
        try:
            records = frames.take()
        except ReadError as error:
            self._check_again(parts, ranges_left, error)
            if not isinstance(error, Damaged):
                raise
            hint = CONTINUE if self._fail_on_loss and self.broker_checks else LEAVE_OUT
            raise ReadError(f"{error}; {hint}") from error
        if records is not None:
            yield records
        for part, start, end in frames.gaps:
            self.lose(part.progress, start, end, REMOVED if start < part.oldest else DAMAGED)

    def _check_again(self, parts: Sequence[FramePart], ranges_left: list[RangeProgress], error: ReadError) -> None:
        """Reset progress to before *parts*, of which one is damaged, if loss is allowed and they are unchecked.

        Raises:
          Unchecked: the ranges of *parts* are in *ranges_left* again.
        """
        if self._fail_on_loss or all(part.progress.checked for part in parts):
            return
        for part in reversed(parts):
            progress = part.progress
            progress.next, progress.checked = part.first, True
            if progress not in ranges_left:
                ranges_left.append(progress)
        log.warning("%s; reading again without damaged messages", error)
        raise Unchecked(str(error)) from error

    def _receive(
        self,
        frames: FrameBodies,
        ranges_by_request: dict[int, RangeProgress],
        waiting_ranges: deque[RangeProgress],
        ranges_left: list[RangeProgress],
    ) -> None:
        """Receive one frame into *frames*; update its request and its range in *ranges_left*."""
        answer = self.receive(frames.room)
        progress = ranges_by_request.get(answer.opaque)
        if progress is None:
            raise RemoteProtocolError(f"answer {answer.opaque} belongs to no request")
        first_offset = progress.next
        is_whole = self.take(progress, answer)
        if answer.body and first_offset < progress.end:
            bounds = first_offset, answer.integer("nextBeginOffset"), progress.next
            oldest = answer.integer("minOffset") if is_whole else 0
            frames.add(FramePart(frames.end, len(answer.body), progress, *bounds, is_whole, oldest))
        if answer.ext.get("more") == "true":
            return
        del ranges_by_request[answer.opaque]
        self.connection.outstanding -= 1
        if progress.is_done:
            ranges_left.remove(progress)
        else:
            self._check_moves(progress, first_offset)
            waiting_ranges.append(progress)

    def receive(self, room: Callable[[int], memoryview]) -> AnswerFrame:
        """Return the next answer; its body is in the buffer that *room* returns."""
        return self.connection.receive(room)

    def _check_moves(self, progress: RangeProgress, first: int) -> None:
        """Fail if answers have left *progress* at *first* for too long."""
        if progress.next > first or progress.next >= progress.end:
            return
        if progress.stuck_since is None:
            progress.stuck_since = monotonic()
        elif monotonic() - progress.stuck_since > self._timeout_s:
            text = f"{progress} has messages from {progress.next} to {progress.end}, but the broker sends none of them"
            raise ReadError(f"{text}; see its log")

    def moved(self, progress: RangeProgress, answer: AnswerFrame) -> None:
        """Continue where the broker still has messages, after it said that ``progress.next`` is out of its range.

        Raises:
          DataLost: messages are gone.
        """
        first, end = answer.integer("minOffset"), answer.integer("maxOffset")
        if progress.next < first:
            self.lose(progress, progress.next, min(first, progress.end), REMOVED)
        elif end < progress.end:
            why = f"do not exist: the queue ends at {end}. The topic was created again, or the broker lost messages"
            self.lose(progress, progress.next, progress.end, why)

    def lose(self, progress: RangeProgress, start: int, end: int, why: str) -> None:
        """Continue after the messages from *start* to *end*, which are gone.

        Raises:
          DataLost: the query does not allow this.
        """
        text = f"messages {start} to {end - 1} of {progress} {why}"
        if self._fail_on_loss:
            hint = "set failOnDataLoss to false to continue without them, or begin with a new checkpoint"
            raise DataLost(f"{text}; {hint}")
        log.warning("%s; continuing without them", text)
        progress.move(end)


@final
class BulkReadExchange(Exchange):
    """BULK_READ requests, each answered by many frames."""

    broker_checks = True

    def ask(self, progress: RangeProgress) -> int:
        fields: dict[str, object] = {"endOffset": progress.end, **self.wanted.fields(knows_like=True)}
        if progress.checked:
            fields["checked"] = "true"
        return _bulk(self.connection, progress.queue, progress.next, WAIT_MS, self.fetch_bytes, **fields)

    def take(self, progress: RangeProgress, answer: AnswerFrame) -> bool:
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise NotSupported("no bulk reads")
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            self.moved(progress, answer)
            return False
        check(answer, f"read of {progress}", f"broker {progress.queue.broker_name!r}")
        first, is_whole = progress.next, self.wanted.is_everything
        progress.move(answer.integer("nextBeginOffset"))
        if not is_whole:
            self._tell_lost(progress, answer)
        elif not answer.body and progress.next > first:
            self.lose(progress, first, progress.next, REMOVED if first < answer.integer("minOffset") else DAMAGED)
        more = answer.ext.get("more") == "true"
        if not more and progress.next < progress.end and answer.integer("maxOffset") < progress.end:
            self.moved(progress, answer)
        return is_whole

    def _tell_lost(self, progress: RangeProgress, answer: AnswerFrame) -> None:
        """Report the messages that the broker could not read for *answer*."""
        for each in filter(None, answer.ext.get("lost", "").split(",")):
            start, _, end = each.partition("-")
            if not (start.isdecimal() and end.isdecimal()):
                raise RemoteProtocolError(f"field lost {each!r} is no range of offsets")
            self.lose(progress, int(start), int(end), MAYBE_DAMAGED)


@final
class Pulls(Exchange):
    """PULL_MESSAGE requests, each answered by one frame."""

    def __init__(
        self, connection: BrokerConnection, wanted: Filter, fetch_bytes: int, timeout_s: float, *, fail_on_loss: bool
    ) -> None:
        super().__init__(connection, wanted, fetch_bytes, timeout_s, fail_on_loss=fail_on_loss)
        self._filters = wanted.fields(knows_like=False)
        self._is_filtered = self._filters != EVERYTHING.fields(knows_like=False)
        self._early: deque[AnswerFrame] = deque()  # arrived while another one was waited for
        self._compacted: dict[str, bool] = {}

    def read(self, ranges_left: list[RangeProgress]) -> Iterator[Records]:
        if self.wanted.has_sql:
            for topic in sorted({progress.queue.topic for progress in ranges_left}):
                self._check_expression(topic)
        yield from super().read(ranges_left)

    def receive(self, room: Callable[[int], memoryview]) -> AnswerFrame:
        if not self._early:
            return super().receive(room)
        answer = self._early.popleft()
        body = room(len(answer.body))
        body[:] = answer.body
        return AnswerFrame(answer.opaque, answer.code, answer.ext, answer.remark, body)

    def _request(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> AnswerFrame:
        """Send a request, and return its answer; other requests may be outstanding."""
        opaque = self.connection.send(code, ext, body)
        while (answer := self.connection.receive()).opaque != opaque:
            self._early.append(answer)
        self.connection.outstanding -= 1
        return answer

    def _check_expression(self, topic: str) -> None:
        """Fail if the broker does not understand the expression: RocketMQ would answer pulls with all messages."""
        subscription = {"topic": topic, "subString": self._filters["subscription"], "expressionType": LANGUAGE}
        config = {"clientId": PULL_GROUP, "group": PULL_GROUP, "subscriptionData": subscription}
        answer = self._request(RequestCode.CHECK_CLIENT_CONFIG, {}, orjson.dumps(config))
        check(answer, f"filter on topic {topic!r}", self.connection.address)
        if self._is_compacted(topic):
            text = f"option sql cannot be used with topic {topic!r}: it is compacted, so the broker ignores filters"
            raise ReadError(f"{text}; select rows by their properties in Spark")

    def _is_compacted(self, topic: str) -> bool:
        """Whether the broker removes messages from the middle of the queues of *topic*."""
        if topic not in self._compacted:
            answer = self._request(RequestCode.GET_TOPIC_CONFIG, {"topic": topic})
            config = load_object(bytes(answer.body)) if answer.code == ResponseCode.SUCCESS else {}
            attributes = config.get("attributes")
            policy = attributes.get("cleanup.policy") if isinstance(attributes, dict) else None
            self._compacted[topic] = policy == "COMPACTION"
        return self._compacted[topic]

    def ask(self, progress: RangeProgress) -> int:
        ask = partial(_pull, self.connection, progress.queue)
        if progress.next < progress.end:
            count = min(progress.end - progress.next, PULL_MESSAGES)
            return ask(progress.next, WAIT_MS, count, self.fetch_bytes, self._filters)
        assert progress.passed is not None
        return ask(progress.passed, 0, 1, 1, EVERYTHING.fields(knows_like=False))

    def take(self, progress: RangeProgress, answer: AnswerFrame) -> bool:
        self._take(progress, answer)
        return False  # `_advance` has handled the messages that the answer lacks

    def _take(self, progress: RangeProgress, answer: AnswerFrame) -> None:
        what, queue = f"pull of {progress}", progress.queue
        if answer.code not in NOTHING_FOUND:
            check(answer, what, f"broker {queue.broker_name!r}")
        if answer.ext.get("offsetDelta", "0") != "0":
            raise ReadError(f"topic {queue.topic!r} is a static topic: {STATIC_TOPIC}")
        if progress.next >= progress.end:
            self._prove(progress, answer)
            return
        if answer.code == ResponseCode.PULL_OFFSET_MOVED:
            if self._is_certain(progress):
                self.moved(progress, answer)
            return
        after = answer.integer("nextBeginOffset")
        if answer.code == ResponseCode.PULL_NOT_FOUND:
            self._end(progress, answer, after)
        elif self._is_filtered:
            if progress.passed is None and after > progress.next:
                progress.passed = progress.next
            progress.move(after)
        else:
            self._advance(progress, answer, after)

    def _end(self, progress: RangeProgress, answer: AnswerFrame, after: int) -> None:
        """Handle an *answer* by which ``progress.next`` is the end of the queue, or has no entry in it."""
        if after > progress.next:
            if self._is_certain(progress):
                self.lose(progress, progress.next, min(after, progress.end), UNREADABLE)
        elif answer.integer("maxOffset") < progress.end and self._is_certain(progress):
            self.moved(progress, answer)

    def _advance(self, progress: RangeProgress, answer: AnswerFrame, after: int) -> None:
        """Advance *progress* to *after*, or to the first offset that lacks a record and must have one."""
        first_offset, offsets = progress.next, _offsets(answer, progress.queue, progress.next)
        mismatches = np.flatnonzero(offsets != np.arange(first_offset, first_offset + len(offsets)))
        match_count = int(mismatches[0]) if len(mismatches) else len(offsets)
        next_offset = int(offsets[match_count]) if len(mismatches) else after
        missing_offset = first_offset + match_count
        if missing_offset >= min(next_offset, progress.end) or self._is_compacted(progress.queue.topic):
            progress.move(after)
        elif match_count:
            progress.move(missing_offset)  # and request it: the message may have been removed just now
        elif self._is_certain(progress):
            self.lose(progress, first_offset, min(next_offset, progress.end), REMOVED)

    def _prove(self, progress: RangeProgress, answer: AnswerFrame) -> None:
        """Check that the first message skipped by a filter still exists: then no later one was removed either."""
        skipped_offset = progress.passed
        assert skipped_offset is not None
        offsets = _offsets(answer, progress.queue, skipped_offset)
        next_offset = int(offsets[0]) if len(offsets) else answer.integer("nextBeginOffset")
        if not (len(offsets) and next_offset == skipped_offset) and not self._is_compacted(progress.queue.topic):
            if progress.suspect != skipped_offset:
                progress.suspect = skipped_offset
                return
            self.lose(progress, skipped_offset, min(max(next_offset, skipped_offset + 1), progress.end), PERHAPS)
        progress.passed = None

    @staticmethod
    def _is_certain(progress: RangeProgress) -> bool:
        """Whether the answer before this one also lacked the message at ``progress.next``."""
        is_certain = progress.suspect == progress.next
        progress.suspect = progress.next
        return is_certain


def _offsets(answer: AnswerFrame, queue: MessageQueue, first: int) -> Integers:
    """Return the offsets of the messages in *answer*, which must be of *queue*, from *first* on."""
    if not answer.body:
        return np.empty(0, np.int64)
    records = unrolled(received_records(answer.body), first)
    check_range(records, queue.queue_id, first, answer.integer("nextBeginOffset"))
    offsets: Integers = records.heads["offset"]
    return offsets


def request_one(connection: BrokerConnection, queue: MessageQueue, offset: int, wait_ms: int, credit_bytes: int) -> int:
    """Request a few messages, unfiltered, in one frame; return the number of the request.

    If there is no message, the broker waits up to *wait_ms* for one.
    """
    if connection.address in pull_only:
        filters = EVERYTHING.fields(knows_like=False)
        return _pull(connection, queue, offset, wait_ms, 32 if credit_bytes > 1 else 1, credit_bytes, filters)
    return _bulk(connection, queue, offset, wait_ms, credit_bytes)


def _bulk(
    connection: BrokerConnection, queue: MessageQueue, offset: int, wait_ms: int, credit_bytes: int, **more: object
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
    connection: BrokerConnection,
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
