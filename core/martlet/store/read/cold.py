"""Records that only a cold tier has, because local retention removed them.

A *cold tier* keeps the records of topics elsewhere, such as in an object store. It tells the first offset that it has
of each queue (`ColdRecords.keep`), so finding out whether a read is cold costs one comparison. Every question to a tier
has a deadline, and a failure refuses the one consumer that asked.

Only the broker itself reads its internal topics, and light queues index records of other queues: neither has a cold
range.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, Protocol, TypeVar, final

import trio

from martlet.errors import Reason, Refused
from martlet.message import find_property
from martlet.records.codec import check_record, tags_code
from martlet.records.layout import Buffer, RecordView
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet.store.format.light import is_light
from martlet.store.format.notes import OWN_PREFIX
from martlet.store.queues.queues import Queue, Queues
from martlet.store.read.reading import ReadOptions, ReadResult, ReadStatus

__all__ = ["RESTORED_FILE", "ColdReader", "ColdRecords", "may_be_cold", "select_records"]

logger = logging.getLogger("martlet.store")

# A tier's own deadlines are shorter; this one is for a tier that has none, or does not keep them.
ANSWER_S: Final = 15.0
# Pause between log lines about failures: many consumers may read at the same time.
LOG_S: Final = 60.0
# Internal topics of RocketMQ, which only the broker reads.
INTERNAL_PREFIXES: Final = (OWN_PREFIX, "rmq_sys_", "RMQ_SYS_TRANS_")
INTERNAL: Final = frozenset({SCHEDULE_TOPIC, "TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT"})
NOTHING_COLD: Final = 1 << 62

T = TypeVar("T")


class ColdReader(Protocol):
    """Reads the records of a cold tier.

    The broker asks only for queues and offsets that the tier keeps (`ColdRecords.keep`), and checks the answers. All
    records are the bytes of the log. A `Refused` tells the client why; each other exception refuses the read as well,
    and is logged.
    """

    @property
    def name(self) -> str:
        """The tier's name in errors, such as ``s3``."""
        ...

    async def read(self, queue: Queue, offset: int, wanted: ReadOptions) -> ReadResult:
        """As `Readers.read_far`, for an *offset* that the tier has; `select_records` makes the result.

        ``next_offset`` of the result is greater than *offset*: with a filter, the tier looks at some records, and goes
        on at the next call. The broker sets the bounds of the queue in the result. The predicate may be slow: call it
        in a thread.
        """
        ...

    async def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        """Return the first offset of *queue* stored at or after *timestamp_ms*; the offset after its last, if none."""
        ...

    async def offset_by_position(self, queue: Queue, position: int) -> int:
        """Return the first offset of *queue* at or after log position *position*; the offset after its last, if none.

        The sessions of clients are log positions.
        """
        ...

    async def record_at(self, position: int) -> bytes | None:
        """Return the record at log position *position*; None if none begins there."""
        ...

    async def records_by_key(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, end_position: int
    ) -> list[bytes]:
        """Return records of *topic* with *key* as unique key or in KEYS, newest first.

        They were stored from *begin_ms* to *end_ms*, and are before log position *end_position*.
        """
        ...


def may_be_cold(topic: str) -> bool:
    """Return whether a cold tier may keep the records of *topic* for consumers."""
    return not (topic in INTERNAL or topic.startswith(INTERNAL_PREFIXES) or is_light(topic))


def select_records(queue: Queue, records: Iterable[bytes], offset: int, end: int, wanted: ReadOptions) -> ReadResult:
    """Return the result of a read of *queue* at *offset* from *records*, which ascend and are all that it has up to
    *end*.

    Selects and limits as `Readers.read_far`, and calls the predicate. Messages that are missing in between are lost.
    """
    result = ReadResult(ReadStatus.NO_MATCH, offset, 0, 0)
    pieces: list[Buffer] = result.pieces
    codes, predicate = wanted.codes, wanted.predicate
    for data in records:
        record = RecordView(data)
        if record.queue_offset < offset:
            continue
        if result.count and (result.count >= wanted.count_max or result.size + len(data) > wanted.budget_bytes):
            break
        if record.queue_offset > result.next_offset:
            result.lose(result.next_offset, record.queue_offset)
        result.next_offset = record.queue_offset + 1
        if (codes is None or _code_of(queue, record) in codes) and (predicate is None or predicate(record)):
            pieces.append(data)
            result.count += 1
            result.size += len(data)
            result.status = ReadStatus.FOUND
    else:
        if end > result.next_offset:
            result.lose(result.next_offset, end)
        result.next_offset = max(result.next_offset, end)
    return result


def _code_of(queue: Queue, record: RecordView) -> int:
    """Return the code of the queue's entry for *record*."""
    properties = record.properties
    if queue.dispatcher is not None:
        return queue.dispatcher(properties, record.store_ms)
    return tags_code(find_property(properties, b"TAGS"))


# In a data directory that was restored from a cold tier: the messages before its log are nowhere else.
RESTORED_FILE: Final = "config/tiered.restored"


@final
class ColdRecords:
    """What the tier has, and guarded questions to it; without a ``tier`` there is nothing cold.

    ``from_position`` is the log position from which on the tier has every record of the topics that may be cold, up to
    the log's first; the tier sets it. So it does with ``to_position`` after a restore: the log has no record of these
    topics before this position, although it begins earlier.
    """

    def __init__(self, queues: Queues) -> None:
        self.tier: ColdReader | None = None
        self.from_position = NOTHING_COLD
        self.to_position = 0
        self.failed_reads = 0
        self._queues = queues
        self._log_at = 0.0  # time of the next log line about a failure, on trio's clock

    # ---- what the tier has

    def keep(self, queue: Queue, offset: int) -> None:
        """Note that the tier has every message of *queue* from *offset* on that the log has lost or will lose.

        Call it before retention removes the first of them, and at a start. A higher *offset* than before says that the
        tier has removed messages. Nothing happens for internal topics and light queues (`may_be_cold`).
        """
        if may_be_cold(queue.topic):
            queue.keep_cold_from(offset)

    def has(self, queue: Queue, offset: int) -> bool:
        """Return whether the tier has message *offset* of *queue*, and consumers may read it."""
        return self.tier is not None and max(queue.cold_from, queue.expired_to) <= offset < queue.next_offset

    def has_range(self, queue: Queue) -> bool:
        """Return whether the tier has messages of *queue* that the log has lost."""
        return self.tier is not None and queue.first_offset < queue.local_from

    # ---- questions

    async def read(self, queue: Queue, offset: int, wanted: ReadOptions, end: int) -> ReadResult:
        """As `Readers.read_far`, for an *offset* that the tier has; *end* is that of the queue.

        Raises:
          Refused: the tier failed or did not answer in time.
        """
        tier = self._of()
        result = await self._ask(lambda: tier.read(queue, offset, wanted))
        if not offset < result.next_offset <= end:
            raise self._failure(f"it read message {offset} of {queue} and said to go on at {result.next_offset}")
        result.first_offset, result.end_offset = queue.first_offset, end
        return result

    async def offset_by_time(self, queue: Queue, timestamp_ms: int) -> int:
        """Return the first offset of the cold range of *queue* stored at or after *timestamp_ms*; else its end.

        Raises:
          Refused: as `read`.
        """
        tier = self._of()
        found = await self._ask(lambda: tier.offset_by_time(queue, timestamp_ms))
        return min(max(found, queue.first_offset), queue.local_from)

    async def offset_by_position(self, queue: Queue, position: int) -> int:
        """Return the first offset of the cold range of *queue* at or after log position *position*; else its end.

        Raises:
          Refused: as `read`.
        """
        tier = self._of()
        found = await self._ask(lambda: tier.offset_by_position(queue, position))
        return min(max(found, queue.first_offset), queue.local_from)

    async def record_at(self, position: int) -> bytes | None:
        """Return the intact record at log position *position*, if consumers may read it; None if there is none.

        Raises:
          Refused: as `read`.
        """
        tier = self.tier
        if tier is None or position < 0:
            return None
        data = await self._ask(lambda: tier.record_at(position))
        return data if data is not None and self._is_readable(data, position) else None

    async def records_by_key(
        self, topic: str, key: bytes, count_max: int, begin_ms: int, end_ms: int, end_position: int
    ) -> list[bytes]:
        """Return intact records of *topic* with *key* that consumers may read, newest first.

        Raises:
          Refused: as `read`.
        """
        tier = self.tier
        if tier is None or count_max <= 0 or not may_be_cold(topic):
            return []
        records = await self._ask(lambda: tier.records_by_key(topic, key, count_max, begin_ms, end_ms, end_position))
        return [data for data in records if self._is_readable(data, RecordView(data).position)][:count_max]

    def _of(self) -> ColdReader:
        tier = self.tier
        assert tier is not None, "only queues of a tier have a cold range"
        return tier

    def _is_readable(self, data: bytes, position: int) -> bool:
        """Return whether *data* is an intact record of *position* in a queue that still has it, for consumers."""
        if not check_record(data, 0, len(data), position):
            return False
        record = RecordView(data)
        queue = self._queues.find(record.topic, record.queue_id)
        return queue is not None and self.has(queue, record.queue_offset)

    async def _ask(self, question: Callable[[], Awaitable[T]]) -> T:
        """Return the tier's answer to *question*.

        Raises:
          Refused: the tier refused, failed (UNAVAILABLE), or did not answer in time (BUSY).
        """
        try:
            with trio.move_on_after(ANSWER_S):
                return await question()
        except Refused:
            self.failed_reads += 1
            raise
        except Exception as error:
            self._log(error)
            raise self._failure(f"{type(error).__name__}: {error}") from error
        self.failed_reads += 1
        text = f"cold tier {self._of().name!r} did not answer within {ANSWER_S:g} s; try again"
        raise Refused(Reason.BUSY, text)

    def _log(self, error: Exception) -> None:
        """Log *error* of the tier, unless one was logged lately; with its origin, if it is no error of a connection."""
        now = trio.current_time()
        if now >= self._log_at:
            self._log_at = now + LOG_S
            origin = None if isinstance(error, OSError) else error
            logger.error("cold tier %r failed; %s: %s", self._of().name, type(error).__name__, error, exc_info=origin)

    def _failure(self, why: str) -> Refused:
        self.failed_reads += 1
        return Refused(Reason.UNAVAILABLE, f"cold tier {self._of().name!r} failed; {why}")
