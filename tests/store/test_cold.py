"""Records that retention removed are read from a cold tier, where there is one, as if the log still had them."""

import ast
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.records.codec import tags_code
from martlet.records.layout import RecordView, record_views
from martlet.runtime.steps import Steps
from martlet.runtime.turns import Turns
from martlet.store import Queue, QueueReader, ReadResult, ReadStatus, Store
from martlet.store.format.delays import SCHEDULE_TOPIC
from martlet.store.read.cold import ANSWER_S, may_be_cold
from martlet.tables.topics import BROKER_TOPICS
from martlet.testing.cold import MemoryTier, remove_sealed, use_memory_tier
from martlet.testing.stores import ManualClock, bodies, message, small_config

OpenStore = Callable[..., Awaitable[Store]]
COUNT = 200
STEP_MS = 1000


def body(number: int) -> bytes:
    return b"%03d" % number * 30


def tag(number: int) -> str:
    return "AB"[number % 2]


async def filled(open_store: OpenStore, clock: ManualClock, **config: Any) -> tuple[Store, Queue]:
    """A store whose one queue has *COUNT* messages in many segments, a second apart."""
    store = await open_store(small_config(**config))
    for number in range(COUNT):
        store.writer.append(message(body(number), tags=tag(number), keys=f"k{number % 50}"), 0)
        store.committer.commit()
        clock.ms += STEP_MS
    store.flusher.flush_now()
    return store, store.queue("T", 0)


async def with_removed(open_store: OpenStore, clock: ManualClock, **config: Any) -> tuple[Store, Queue, MemoryTier]:
    """As `filled`, with most of it removed from the log, and in a tier."""
    store, queue = await filled(open_store, clock, **config)
    tier = use_memory_tier(store)
    await remove_sealed(store)
    assert queue.first_offset == 0
    assert COUNT // 2 < queue.local_from < COUNT
    return store, queue, tier


async def read_all(store: Store, queue: Queue, offset: int = 0, **filters: Any) -> list[bytes]:
    """Read as a consumer does, and return the bodies."""
    found: list[bytes] = []
    while offset < store.readers.end_offset(queue):
        near = store.readers.read_near(queue, offset, 7, 1 << 20, **filters)
        result = near if near is not None else await store.readers.read_far(queue, offset, 7, 1 << 20, **filters)
        assert result.next_offset > offset
        assert (result.first_offset, result.end_offset) == (queue.first_offset, store.readers.end_offset(queue))
        found += bodies(result.pieces)
        offset = result.next_offset
    return found


async def finish(steps: Steps[Any]) -> Any:
    return await Turns().finish(steps)


# ---- offsets


def test_a_queue_begins_where_the_tier_does_and_locally_where_the_log_does() -> None:
    queue = Queue("T", 0)
    queue.begin_at(100)
    assert (queue.first_offset, queue.local_from) == (100, 100)
    queue.keep_cold_from(30)
    assert (queue.first_offset, queue.local_from) == (30, 100)
    queue.expire_to(50)
    assert (queue.first_offset, queue.local_from) == (50, 100), "expired messages are gone in the tier as well"
    queue.expire_to(120)
    assert (queue.first_offset, queue.local_from) == (120, 120)
    queue.store_from(150)
    assert (queue.first_offset, queue.local_from) == (120, 150)


def test_a_tier_that_begins_within_the_log_has_nothing_cold() -> None:
    queue = Queue("T", 0)
    queue.begin_at(10)
    queue.keep_cold_from(20)
    assert (queue.first_offset, queue.local_from) == (10, 10)
    queue.store_from(40)
    assert (queue.first_offset, queue.local_from) == (20, 40)


@pytest.mark.parametrize(
    "topic", [*sorted(BROKER_TOPICS), "martlet.journal.sessions", "rmq_sys_REVIVE_LOG_c", "%LMQ%a"]
)
async def test_topics_that_only_the_broker_reads_have_no_cold_range(open_store: OpenStore, topic: str) -> None:
    assert not may_be_cold(topic)
    store = await open_store()
    use_memory_tier(store)
    queue = store.queue(topic, 0)
    queue.begin_at(10)
    store.cold.keep(queue, 0)
    assert (queue.first_offset, store.cold.has(queue, 5)) == (10, False)


def test_topics_of_consumers_may_be_cold() -> None:
    assert all(map(may_be_cold, ("T", "%RETRY%group", "%DLQ%group", "mqtt", "TBW102", "RMQ_SYS_TRACE_TOPIC")))
    assert not may_be_cold(SCHEDULE_TOPIC)


# ---- reads


async def test_a_read_goes_through_the_seam_without_a_gap(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, _ = await with_removed(open_store, clock)
    assert await read_all(store, queue) == [body(number) for number in range(COUNT)]
    at = queue.local_from
    for first in (at - 8, at - 1, at, at + 1):
        assert await read_all(store, queue, first) == [body(number) for number in range(first, COUNT)]


async def test_cold_records_are_the_bytes_of_the_log(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue = await filled(open_store, clock)
    before = b"".join(map(bytes, store.readers.read(queue, 0, COUNT, 1 << 20).pieces))
    use_memory_tier(store)
    await remove_sealed(store)
    after = b""
    offset = 0
    while offset < COUNT:
        result = await store.readers.read_far(queue, offset, 50, 1 << 20)
        after, offset = after + b"".join(map(bytes, result.pieces)), result.next_offset
    assert after == before


@pytest.mark.parametrize("by_predicate", [False, True])
async def test_filters_select_cold_records(open_store: OpenStore, clock: ManualClock, by_predicate: bool) -> None:
    store, queue, _ = await with_removed(open_store, clock)
    filters: dict[str, Any] = {"codes": frozenset((tags_code("B"),))}
    if by_predicate:
        filters = {"predicate": lambda record: record.property("TAGS") == "B"}
    assert await read_all(store, queue, **filters) == [body(number) for number in range(1, COUNT, 2)]


async def test_a_read_obeys_its_limits(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, _ = await with_removed(open_store, clock)
    result = await store.readers.read_far(queue, 3, 2, 1 << 20)
    assert (bodies(result.pieces), result.next_offset, result.count) == ([body(3), body(4)], 5, 2)
    assert result.size == sum(map(len, result.pieces))
    small = await store.readers.read_far(queue, 3, 2, 1)
    assert (bodies(small.pieces), small.next_offset) == ([body(3)], 4)


async def test_expired_messages_are_not_read_from_the_tier(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, _ = await with_removed(open_store, clock)
    queue.expire_to(20)
    too_small = await store.readers.read_far(queue, 5, 2, 1 << 20)
    assert (too_small.status, too_small.next_offset) == (ReadStatus.TOO_SMALL, 20)
    assert await read_all(store, queue, 20) == [body(number) for number in range(20, COUNT)]


async def test_what_the_tier_has_removed_is_too_old(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    tier.drop_before(queue, 40)
    result = store.readers.read_near(queue, 39, 2, 1 << 20)
    assert result is not None
    assert (result.status, result.next_offset, result.first_offset) == (ReadStatus.TOO_SMALL, 40, 40)
    assert store.readers.read_near(queue, 40, 2, 1 << 20) is None
    assert await read_all(store, queue, 40) == [body(number) for number in range(40, COUNT)]


async def test_a_deleted_topic_has_no_cold_messages_when_it_is_created_again(
    open_store: OpenStore, clock: ManualClock
) -> None:
    store, _, tier = await with_removed(open_store, clock)
    store.deletions.delete_topic("T")
    store.flusher.flush_now()
    queue = store.queue("T", 0)
    assert (queue.first_offset, store.cold.has(queue, 0)) == (0, False)
    store.writer.append(message(b"new"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    assert await read_all(store, queue) == [b"new"]
    assert "read" not in tier.asked


async def test_a_read_between_a_removal_and_the_new_first_offset_has_no_gap(
    open_store: OpenStore, clock: ManualClock
) -> None:
    store, queue = await filled(open_store, clock, cache_bytes=0)
    tier = use_memory_tier(store)
    await store.upkeep.checkpointer.checkpoint()
    await tier.release(store.segments.items[-1].start)
    while len(store.segments.items) > 1:
        store.segments.remove_first()  # and a queue's first offset follows later, when there are many queues
    store.pages.drop_before(store.segments.start)
    assert (queue.first_offset, queue.local_from) == (0, 0)
    assert await read_all(store, queue) == [body(number) for number in range(COUNT)]
    odd = await read_all(store, queue, codes=frozenset((tags_code("B"),)))
    assert odd == [body(number) for number in range(1, COUNT, 2)]


async def test_a_restarted_store_reads_from_the_tier_again(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    local_from = queue.local_from
    assert await store.close()
    store = await open_store(small_config())
    tier.move(store)
    store.use_cold_tier(tier)
    await tier.begin()
    queue = store.queue("T", 0)
    assert (queue.first_offset, queue.local_from) == (0, local_from)
    assert await read_all(store, queue) == [body(number) for number in range(COUNT)]


async def test_producers_write_and_segments_leave_while_a_consumer_reads(
    open_store: OpenStore, clock: ManualClock
) -> None:
    store, queue, _ = await with_removed(open_store, clock)
    found: list[bytes] = []
    offset, number = 0, COUNT
    while offset < store.readers.end_offset(queue):
        result = await store.readers.read_far(queue, offset, 3, 1 << 20)
        found, offset = found + bodies(result.pieces), result.next_offset
        if number < 2 * COUNT:
            for _ in range(2):
                store.writer.append(message(body(number)), 0)
                number += 1
            store.committer.commit()
            if number % 50 == 0:
                await remove_sealed(store)
            store.flusher.flush_now()
    assert found == [body(each) for each in range(2 * COUNT)]


# ---- look-ups


async def test_a_time_in_the_cold_range_is_found(open_store: OpenStore, clock: ManualClock) -> None:
    begin_ms = clock.ms
    store, queue, tier = await with_removed(open_store, clock)
    at, look = queue.local_from, store.lookup.offset_by_time
    for offset in (0, 1, 57, at - 1, at, at + 1, COUNT - 1):
        ms = begin_ms + offset * STEP_MS
        assert await finish(look(queue, ms)) == offset
        assert await finish(look(queue, ms - 1)) == offset
        assert await finish(look(queue, ms, upper=True)) == offset
        assert await finish(look(queue, ms + STEP_MS - 1, upper=True)) == offset
    assert await finish(look(queue, begin_ms + COUNT * STEP_MS)) == COUNT
    assert await finish(look(queue, begin_ms - 1, upper=True)) == 0
    tier.asked.clear()
    assert await finish(look(queue, begin_ms + (at + 2) * STEP_MS)) == at + 2
    assert tier.asked == [], "times in the log are found there"


async def test_times_and_positions_of_cold_messages_are_known(open_store: OpenStore, clock: ManualClock) -> None:
    begin_ms = clock.ms
    store, queue, tier = await with_removed(open_store, clock)
    assert await finish(store.lookup.earliest_store_ms(queue)) == begin_ms
    assert await finish(store.lookup.store_ms_at(queue, 9)) == begin_ms + 9 * STEP_MS
    records = [RecordView(data) for data in tier._of(queue).records[:10]]
    assert await finish(store.lookup.position_at(queue, 9)) == records[9].position
    queue.expire_to(10)
    assert await finish(store.lookup.position_at(queue, 9)) == -1
    assert await finish(store.lookup.earliest_store_ms(queue)) == begin_ms + 10 * STEP_MS


async def test_a_record_is_found_by_its_position(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    record = RecordView(tier._of(queue).records[9])
    position = record.position
    for look in (store.lookup.record_far, store.lookup.known_record_far):
        assert await look(position) == record.buffer
        assert await look(position + 1) is None
        assert await look(-1) is None
    queue.expire_to(10)
    assert await store.lookup.record_far(position) is None


async def test_a_damaged_record_of_the_tier_is_not_found(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    records = tier._of(queue).records
    position = RecordView(records[9]).position
    records[9] = records[9].replace(body(9), body(8))
    assert await store.lookup.record_far(position) is None


async def test_records_are_found_by_key_newest_first(open_store: OpenStore, clock: ManualClock) -> None:
    begin_ms = clock.ms
    store, queue, _ = await with_removed(open_store, clock)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)

        async def numbers(count: int, begin: int = 0, end: int = 1 << 60, bytes_max: int = 1 << 20) -> list[int]:
            found = await finish(store.lookup.query_keys("T", b"k37", count, begin, end, bytes_max))
            return [RecordView(each).queue_offset for each in found.records]

        assert 137 < queue.local_from <= 187
        assert await numbers(64) == [187, 137, 87, 37]
        assert await numbers(2) == [187, 137]
        assert await numbers(64, begin_ms, begin_ms + 100 * STEP_MS) == [87, 37]
        size = len((await finish(store.lookup.query_keys("T", b"k37", 1, 0, 1 << 60))).records[0])
        assert await numbers(64, bytes_max=3 * size) == [187, 137, 87]
        assert await numbers(64, end=begin_ms + 100 * STEP_MS, bytes_max=1) == [87], "the first one always"
        queue.expire_to(50)
        assert await numbers(64) == [187, 137, 87]
        assert (await finish(store.lookup.query_keys("U", b"k37", 9, 0, 1 << 60))).records == []
        nursery.cancel_scope.cancel()


# ---- a tier that is slow or fails


async def test_a_tier_that_fails_refuses_the_read_and_says_so(
    open_store: OpenStore, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    tier.failure = OSError("connection reset")
    with pytest.raises(Refused, match="cold tier 'memory' failed; OSError: connection reset") as refused:
        await store.readers.read_far(queue, 0, 1, 1)
    assert refused.value.reason is Reason.UNAVAILABLE
    assert "cold tier 'memory' failed" in caplog.text
    tier.failure = Refused(Reason.BUSY, "9 requests wait")
    with pytest.raises(Refused, match="9 requests wait"):
        await finish(store.lookup.offset_by_time(queue, 0))
    assert store.cold.failed_reads == 2
    tier.failure = None
    assert await read_all(store, queue, COUNT - 1) == [body(COUNT - 1)]


async def test_a_tier_that_does_not_answer_refuses_the_read_after_a_while(
    open_store: OpenStore, clock: ManualClock, autojump_clock: trio.testing.MockClock
) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    tier.gate = trio.Event()
    began = trio.current_time()
    with pytest.raises(Refused, match=r"cold tier 'memory' did not answer within 15 s; try again") as refused:
        await store.readers.read_far(queue, 0, 1, 1)
    assert refused.value.reason is Reason.BUSY
    assert trio.current_time() - began == pytest.approx(ANSWER_S)


@pytest.mark.parametrize("next_offset", [0, 3, COUNT + 1])
async def test_a_result_that_does_not_go_on_is_a_failure(
    open_store: OpenStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, next_offset: int
) -> None:
    store, queue, _ = await with_removed(open_store, clock)

    async def read(*arguments: Any) -> ReadResult:
        return ReadResult(ReadStatus.NO_MATCH, next_offset, 0, 0)

    monkeypatch.setattr(MemoryTier, "read", read)
    with pytest.raises(Refused, match=f"it read message 3 of .* and said to go on at {next_offset}"):
        await store.readers.read_far(queue, 3, 1, 1)


# ---- one consumer with several places


class Consumer:
    """A consumer whose peer runs its tasks in a nursery."""

    def __init__(self, store: Store, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.ready: list[object] = []
        self.tasks = 0
        self.reader = QueueReader(store.readers, self.ready.append)

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        self.tasks += 1
        self.nursery.start_soon(work)

    def read(self, place: str, queue: Queue, offset: int) -> list[bytes] | None:
        result = self.reader.read(self.start, place, queue, offset, 1, 1 << 20)
        return None if result is None else bodies(result.pieces)


async def test_a_slow_tier_delays_no_disk_read_of_the_same_consumer(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock, cache_bytes=0)
    far = COUNT - 12
    assert queue.local_from < far
    store.pages.drop_before(store.segments.end)  # nothing is in memory
    tier.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        consumer = Consumer(store, nursery)
        assert consumer.read("cold", queue, 0) is None
        assert consumer.read("other", queue, 1) is None
        assert consumer.tasks == 1
        await trio.testing.wait_all_tasks_blocked()
        assert tier.asked == ["read"]
        if (found := consumer.read("disk", queue, queue.local_from)) is None:
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert consumer.ready == ["disk"]
            found = consumer.read("disk", queue, queue.local_from)
        assert found == [body(queue.local_from)]
        assert (consumer.reader.must_wait, consumer.reader.has_read) == (True, False)
        tier.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert consumer.ready[-2:] == ["cold", "other"]
        assert (consumer.read("cold", queue, 0), consumer.read("other", queue, 1)) == ([body(0)], [body(1)])
        assert (consumer.reader.must_wait, consumer.reader.has_read) == (False, False)


async def test_a_place_that_leaves_the_cold_range_leaves_its_line(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    tier.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        consumer = Consumer(store, nursery)
        assert consumer.read("place", queue, 0) is None
        await trio.testing.wait_all_tasks_blocked()
        assert consumer.read("place", queue, COUNT - 1) == [body(COUNT - 1)]
        tier.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (consumer.ready, consumer.reader.has_read, consumer.reader.must_wait) == ([], False, False)


async def test_a_failure_of_the_tier_is_that_of_one_place(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    tier.failure = OSError("reset")
    async with trio.open_nursery() as nursery:
        consumer = Consumer(store, nursery)
        assert consumer.read("cold", queue, 0) is None
        await trio.testing.wait_all_tasks_blocked()
        assert consumer.read("hot", queue, COUNT - 1) == [body(COUNT - 1)]
        with pytest.raises(Refused, match="cold tier 'memory' failed; OSError: reset"):
            consumer.read("cold", queue, 0)
        tier.failure = None
        assert consumer.read("cold", queue, 0) is None
        await trio.testing.wait_all_tasks_blocked()
        assert consumer.read("cold", queue, 0) == [body(0)]


async def test_a_closed_reader_gets_nothing_from_the_tier(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue, tier = await with_removed(open_store, clock)
    tier.gate = trio.Event()
    async with trio.open_nursery() as nursery:
        consumer = Consumer(store, nursery)
        assert consumer.read("cold", queue, 0) is None
        await trio.testing.wait_all_tasks_blocked()
        consumer.reader.close()
        tier.gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert (consumer.ready, consumer.reader.has_read) == ([], False)


# ---- the page


def users_of_offsets() -> dict[str, set[str]]:
    """The modules that use one of the two first offsets of a queue, and which."""
    root, found = Path(__file__).parents[2], dict[str, set[str]]()
    for pattern in ("core/martlet", "plugins/*/martlet_*", "spark_connector/martlet_spark"):
        for top in root.glob(pattern):
            for file in top.rglob("*.py"):
                used = {
                    node.attr
                    for node in ast.walk(ast.parse(file.read_text()))
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
                } & {"first_offset", "local_from"}
                if used:
                    found[str(file.relative_to(top.parent))] = used
    return found


def test_the_page_says_of_every_user_of_a_first_offset_which_one_it_uses() -> None:
    page = (Path(__file__).parents[2] / "docs/store.md").read_text()
    rows = dict(re.findall(r"^\| `(martlet[\w/]*\.py)` \| ([\w, ]+) \| .+ \|$", page, re.MULTILINE))
    both = {"first_offset", "local_from"}
    meaning = {
        "tiered": {"first_offset"},
        "internal": {"first_offset"},
        "neither": {"first_offset"},
        "local": {"local_from"},
        "both": both,
        "tiered, local": both,
        "local, tiered": both,
    }
    users = users_of_offsets()
    users["martlet/store/queues/queues.py"] = both  # it sets them
    assert {module: meaning[what] for module, what in rows.items()} == users


# ---- messages without a tier


async def test_without_a_tier_removed_messages_are_too_old(open_store: OpenStore, clock: ManualClock) -> None:
    store, queue = await filled(open_store, clock)
    await remove_sealed(store)
    assert queue.first_offset == queue.local_from > COUNT // 2
    result = await store.readers.read_far(queue, 1, 2, 1 << 20)
    assert (result.status, result.next_offset) == (ReadStatus.TOO_SMALL, queue.local_from)
    assert store.oldest_position == store.first_position
    assert await store.lookup.record_far(1) is None


async def test_messages_of_several_queues_and_sizes_keep_their_order(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store(small_config())
    use_memory_tier(store)
    sent: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    for number in range(300):
        text = b"%d " % number * (number % 37 + 1)
        sent[number % 3].append(text)
        store.writer.append(Message("T", text, born_ms=1), number % 3)
        store.committer.commit()
        if number % 60 == 59:
            await remove_sealed(store)
    store.flusher.flush_now()
    for queue_id, texts in sent.items():
        queue = store.queue("T", queue_id)
        assert queue.first_offset < queue.local_from
        assert await read_all(store, queue) == texts
        offsets = [
            view.queue_offset
            for piece in (await store.readers.read_far(queue, 0, 20, 1 << 20)).pieces
            for view in record_views(piece)
        ]
        assert offsets == list(range(20))
