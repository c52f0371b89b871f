"""Takes over the pops of a store that RocketMQ has used: popped messages without an acknowledgement become leases.

RocketMQ moves a group's offset when it pops. It stores a check point for each pop and a record for each acknowledgement
in a revive topic, through its timer topic, and later puts messages without an acknowledgement into a retry topic
(PopMessageProcessor, AckMessageProcessor, PopReviveService). So a relevant check point is in one of two places: in the
revive topic after the offset of the revive group, or in the timer topic if it was not delivered yet according to
``config/timercheck``.

A check point's pop time and invisible time are the generation and the duration of a lease, so handles from RocketMQ
stay valid.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple, final

import trio

from martlet.app.saving import save
from martlet.broker import Broker
from martlet.errors import NotReady, Refused, StoreError
from martlet.groups.handover import take_over
from martlet.groups.journal.journal_codec import LeaseState
from martlet.message import Record, find_property
from martlet.records.codec import decode_records, tags_code
from martlet.runtime.steps import Budget, Steps
from martlet.store import Queue
from martlet.tables.topics import REVIVE_PREFIX, TIMER_TOPIC
from martlet_remoting.handlers.bodies import integer, text
from martlet_remoting.wire.fastjson import loads

__all__ = ["CheckPoints", "RevivedPops"]

log = logging.getLogger("martlet.remoting")

REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
CHECK_POINT: Final = b"ck"
ACK: Final = b"ack"
BATCH_ACK: Final = b"bAck"
TAGS: Final = (CHECK_POINT, ACK, BATCH_ACK)
TAG_CODES: Final = frozenset(tags_code(tag.decode()) for tag in TAGS)
TIMER_CHECK: Final = "config/timercheck"
TIMER_PRECISION_MS: Final = 1000
TAGS_KEY: Final = b"TAGS"
TIMER_OUT_MS: Final = b"TIMER_OUT_MS"
# lastReadTimeMs lastTimerLogFlushPos lastTimerQueueOffset masterTimerQueueOffset
TIMER_NUMBERS: Final = Struct(">qqqq")
# Invisible times are usually a minute. RocketMQ's proxy allows 12 hours.
INVISIBLE_MS_MAX: Final = 86_400_000
# Number of the timer topic's newest messages to read: about a minute of work.
TIMERS_MAX: Final = 2_000_000
# Messages of one check point; a pop gets 32.
COUNT_MAX: Final = 256
# Acknowledgements that are kept until their check point is found.
EARLY_MAX: Final = 1_000_000
READ_AT_ONCE: Final = 512
READ_BYTES: Final = 1 << 20
LOG_EVERY: Final = 100_000
RETRY_S: Final = 5.0


class PoppedQueue(NamedTuple):
    """A queue that a group has popped."""

    group: str
    topic: str
    queue_id: int


# Offset -> pop time and invisible time.
Pops = dict[int, tuple[int, int]]


@final
class CheckPoints:
    """Pairs check points with acknowledgements. A message's newest pop counts; changing the invisible time is a pop."""

    def __init__(self) -> None:
        self.pops: dict[PoppedQueue, Pops] = {}
        self._early: set[tuple[PoppedQueue, int, int]] = set()
        self.damaged = 0

    def add(self, tag: bytes, data: bytes) -> None:
        """Add the record with *tag* and body *data*; one of another kind is ignored, a damaged one is counted."""
        if tag not in TAGS:
            return
        try:
            body = loads(data)
            if not isinstance(body, dict):
                raise ValueError(f"{data!r:.80} is not an object")
            self._add(tag, body)
        except (ValueError, RecursionError, Refused):
            self.damaged += 1

    def _add(self, tag: bytes, body: dict[object, object]) -> None:
        """Add a record like `add`. Raises `Refused` if a number does not fit 64 bits."""
        group, topic = text(body, "c"), text(body, "t")
        queue = PoppedQueue(group, topic, integer(body, "q", -1))
        start, pop_ms = integer(body, "so", -1), integer(body, "pt", -1)
        if not group or not topic or queue.queue_id < 0 or min(start, pop_ms) < 0:
            self.damaged += 1
        elif tag == CHECK_POINT:
            self._pop(queue, self._popped(body, start), pop_ms, max(integer(body, "it"), 0))
        else:
            self._ack(queue, _numbers(body, "aol") if tag == BATCH_ACK else [integer(body, "ao", -1)], pop_ms)

    def _popped(self, body: dict[object, object], start: int) -> Iterator[int]:
        """Yield the offsets of a check point that RocketMQ has not marked as acknowledged in it."""
        differences = _numbers(body, "d") or range(min(integer(body, "n"), COUNT_MAX))
        acked = integer(body, "bm")
        return (start + more for bit, more in enumerate(differences[:COUNT_MAX]) if not acked >> bit & 1)

    def _pop(self, queue: PoppedQueue, offsets: Iterable[int], pop_ms: int, invisible_ms: int) -> None:
        pops = self.pops.setdefault(queue, {})
        for offset in offsets:
            held = pops.get(offset)
            if held is not None and held[0] > pop_ms:
                continue
            if self._early and (queue, offset, pop_ms) in self._early:
                pops.pop(offset, None)
            else:
                pops[offset] = pop_ms, invisible_ms

    def _ack(self, queue: PoppedQueue, offsets: Iterable[int], pop_ms: int) -> None:
        pops = self.pops.get(queue, {})
        for offset in offsets:
            held = pops.get(offset)
            if held is not None and held[0] == pop_ms:
                del pops[offset]
            elif held is None and len(self._early) < EARLY_MAX:
                self._early.add((queue, offset, pop_ms))


def _numbers(body: dict[object, object], name: str) -> list[int]:
    value = body.get(name)
    return [each for each in value if isinstance(each, int)] if isinstance(value, list) else []


@final
class RevivedPops:
    """Takes over RocketMQ's pops before any client is served, if RocketMQ wrote the offsets of groups last."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._read = 0
        self._topics = [topic.name for topic in broker.topics if topic.name.startswith(REVIVE_PREFIX)]
        # If the broker is killed before the end, the next start takes over all pops again.
        self._wanted = broker.groups.offsets.has_foreign_pops
        # RocketMQ's timers are trusted only up to the newest record of its log.
        timers = broker.store.queues.find(TIMER_TOPIC, 0) if self._wanted else None
        self._newest_ms = broker.store.lookup.newest_ms() if timers is not None and timers.next_offset else 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take over the pops, and report that clients can be served."""
        while self._wanted:
            try:
                await self._take_over()
            except (OSError, StoreError, NotReady, Refused) as error:
                log.error("pops of RocketMQ cannot be taken over, so no client is served yet; %s", error)
                await trio.sleep(RETRY_S)
        task_status.started()

    async def _take_over(self) -> None:
        broker, points, self._read = self._broker, CheckPoints(), 0
        ends = [await self._revive_queue(points, queue) for queue in self._revive_queues()]
        queue = broker.store.queues.find(TIMER_TOPIC, 0)
        if queue is not None:
            ends.append(await self._timers(points, queue))
        leased = await broker.turns.finish(self._lease(points))
        broker.store.committer.commit_early()
        await broker.store.flusher.wait_flushed(broker.store.written)
        # With the offset committed, RocketMQ and the next start after it do not read these records again.
        for queue, end in ends:
            if end > 0:
                broker.groups.offsets.commit(REVIVE_GROUP, queue.topic, queue.queue_id, end - 1)
        self._save()
        text_ = "RocketMQ has used this store: %d messages are leased that it had popped; %d records read, %d damaged"
        log.info(text_, leased, self._read, points.damaged)

    def _save(self) -> None:
        groups = self._broker.groups
        groups.offsets.has_foreign_pops = False
        groups.offsets.note_changed()
        try:
            problem = save(self._broker)
        except OSError:
            groups.offsets.has_foreign_pops = True
            raise
        if problem:
            groups.offsets.has_foreign_pops = True
            raise StoreError(problem)
        self._wanted = False

    def _revive_queues(self) -> Iterator[Queue]:
        for name in self._topics:
            topic = self._broker.topics.get(name)
            if topic is not None:
                yield from map(topic.queue, range(topic.read_queues))

    async def _revive_queue(self, points: CheckPoints, queue: Queue) -> tuple[Queue, int]:
        """Read the records that the revive group has not consumed; return the end of the queue."""
        consumed = self._broker.groups.offsets.get(REVIVE_GROUP, queue.topic, queue.queue_id)
        return queue, await self._read_all(points, queue, consumed + 1)

    async def _timers(self, points: CheckPoints, queue: Queue) -> tuple[Queue, int]:
        """Read check points and acknowledgements that were not delivered yet; return the end of the timer queue."""
        store, groups = self._broker.store, self._broker.groups
        check = next(iter(store.data_directory.read_generations(TIMER_CHECK)), b"")
        read_ms = in_wheel = 0
        begin_ms = self._broker.clock.now_ms()
        if len(check) >= TIMER_NUMBERS.size:
            read_ms, _, of_this, of_master = TIMER_NUMBERS.unpack_from(check)
            read_ms = min(read_ms, self._newest_ms + TIMER_PRECISION_MS)
            in_wheel, begin_ms = min(of_this, of_master), read_ms
        start = await self._broker.turns.finish(store.lookup.offset_by_time(queue, begin_ms - INVISIBLE_MS_MAX))
        start = max(start, groups.offsets.get(REVIVE_GROUP, queue.topic, queue.queue_id) + 1)
        oldest = store.readers.end_offset(queue) - TIMERS_MAX
        if start < oldest:
            text_ = "%d records of %s are too many to read; RocketMQ's pops in the first %d are not taken over"
            log.warning(text_, oldest + TIMERS_MAX - start, TIMER_TOPIC, oldest - start)
            start = oldest

        def is_pending(record: Record) -> bool:
            out = find_property(record.properties, TIMER_OUT_MS)
            return record.queue_offset >= in_wheel or not out.isdigit() or int(out) >= read_ms

        return queue, await self._read_all(points, queue, start, is_pending, TAG_CODES)

    async def _read_all(
        self,
        points: CheckPoints,
        queue: Queue,
        offset: int,
        wanted: Callable[[Record], bool] = lambda record: True,
        codes: frozenset[int] | None = None,
    ) -> int:
        """Add the *wanted* records of *queue* from *offset* on to *points*; return the end of the queue."""
        store = self._broker.store
        offset, end = max(offset, queue.first_offset), store.readers.end_offset(queue)
        while offset < end:
            result = await store.readers.read_far(queue, offset, READ_AT_ONCE, READ_BYTES, codes)
            for record in decode_records(b"".join(result.pieces)):
                if wanted(record):
                    points.add(find_property(record.properties, TAGS_KEY), record.body)
                self._read += 1
                if self._read % LOG_EVERY == 0:
                    log.info("%d records of RocketMQ's pops read, at %d of %d in %s", self._read, offset, end, queue)
            offset = max(result.next_offset, offset + 1)
        return end

    def _lease(self, points: CheckPoints) -> Steps[int]:
        """Lease the messages that were popped and not acknowledged; return their number."""
        budget, leased, shared_groups = Budget(), 0, self._broker.shared_groups
        room = shared_groups.room
        for popped, pops in points.pops.items():
            leases = {
                offset: LeaseState(pop_ms, invisible_ms, 1) for offset, (pop_ms, invisible_ms) in sorted(pops.items())
            }
            leased += take_over(shared_groups, popped.topic, popped.group, popped.queue_id, leases, room - leased)
            if budget.is_over(1 + len(pops)):
                yield
        return leased
