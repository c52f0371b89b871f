"""Appending, committing, reading and reopening."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from martlet.errors import Reason, Refused, StoreLocked
from martlet.message import Message
from martlet.records.codec import decode_record, decode_records, tags_code
from martlet.records.layout import RecordView
from martlet.store import Queue, ReadStatus, Store
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock, append_batch, bodies, drain, message, small_config

OpenStore = Callable[..., Awaitable[Store]]


def fill(store: Store, count: int, topic: str = "T", queue_id: int = 0, size: int = 50) -> list[bytes]:
    """Append *count* different messages and make them readable."""
    sent = [b"%d/" % i + b"x" * size for i in range(count)]
    for body in sent:
        store.writer.append(message(body, topic), queue_id)
    store.committer.commit()
    store.flusher.flush_now()
    return sent


async def test_what_was_appended_is_read_back_in_order(open_store: OpenStore) -> None:
    store = await open_store()
    sent = fill(store, 200)
    assert drain(store, store.queue("T", 0)) == sent


async def test_placed_says_where_the_record_is(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store()
    first = store.writer.append(message("a"), 3)
    second = store.writer.append(message("bb"), 3)
    store.committer.commit()
    store.flusher.flush_now()
    assert (first.queue_id, first.queue_offset, first.position, first.store_ms) == (3, 0, 0, clock.ms)
    assert (second.queue_offset, second.position) == (1, first.end)
    data = store.lookup.record_at(second.position)
    assert data is not None
    record = decode_record(data, 0, second.position)
    assert (record.topic, record.queue_id, record.queue_offset, record.body) == ("T", 3, 1, b"bb")
    assert (record.store_host, record.store_ms, record.size) == (HOST, clock.ms, second.end - second.position)


async def test_nothing_is_readable_before_it_is_durable(open_store: OpenStore) -> None:
    store = await open_store()
    queue = store.queue("T", 0)
    store.writer.append(message(), 0)
    assert store.readers.read(queue, 0, 1, 1000).status is ReadStatus.EMPTY
    store.committer.commit()
    assert (store.written, store.durable) == (store.appended, 0)
    assert store.readers.read(queue, 0, 1, 1000).status is ReadStatus.EMPTY
    assert store.lookup.record_at(0) is None
    store.flusher.flush_now()
    assert store.readers.read(queue, 0, 1, 1000).status is ReadStatus.FOUND


async def test_async_flush_makes_readable_what_is_written(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async"))
    queue = store.queue("T", 0)
    placed = store.writer.append(message(), 0)
    assert store.readers.read(queue, 0, 1, 1000).status is ReadStatus.EMPTY
    store.committer.commit()
    await store.flusher.wait_flushed(placed.end)
    assert bodies(store.readers.read(queue, 0, 1, 1000).pieces) == [b"hello"]
    assert store.durable == 0


async def test_waiting_for_what_was_not_committed_is_an_error_with_async_flush(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async"))
    placed = store.writer.append(message(), 0)
    with pytest.raises(RuntimeError, match="call commit"):
        await store.flusher.wait_flushed(placed.end)


async def test_many_waiters_share_flushes(open_store: OpenStore, nursery: trio.Nursery) -> None:
    store = await open_store()
    await nursery.start(store.upkeep.run)
    flushed: list[int] = []

    async def send(number: int) -> None:
        placed = store.writer.append(message(b"%d" % number), 0)
        store.committer.commit()
        await store.flusher.wait_flushed(placed.end)
        assert store.durable >= placed.end
        flushed.append(number)

    async with trio.open_nursery() as senders:
        for number in range(50):
            senders.start_soon(send, number)
    assert sorted(flushed) == list(range(50))
    assert store.statistics().fsyncs < 10
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_watchers_are_called_when_records_become_readable(open_store: OpenStore, flush: str) -> None:
    store = await open_store(small_config(flush=flush))
    queue = store.queue("T", 0)
    seen: list[tuple[Queue, int]] = []
    queue.watchers = [lambda q: seen.append((q, store.readers.end_offset(q)))]
    store.writer.append(message(), 0)
    store.writer.append(message(), 0)
    assert not seen
    store.committer.commit()
    store.flusher.flush_now()
    assert seen == [(queue, 2)]


async def test_a_watcher_that_comes_between_commit_and_flush_is_called(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="sync"))
    queue = store.queue("T", 0)
    store.writer.append(message(), 0)
    store.committer.commit()
    seen: list[int] = []
    queue.watchers = [lambda q: seen.append(store.readers.end_offset(q))]
    store.flusher.flush_now()
    assert seen == [1]


async def test_a_watcher_is_called_again_until_its_newest_record_is_readable(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="sync"))
    queue, other = store.queue("T", 0), store.queue("T", 1)
    confirmed = [0]
    store.readable_end.confirmed.append(lambda: confirmed[0])
    seen: list[int] = []
    queue.watchers = [lambda q: seen.append(store.readers.end_offset(q))]
    first, second = store.writer.append(message(), 0), store.writer.append(message(), 0)
    store.committer.commit()
    store.flusher.flush_now()
    for confirmed[0] in (first.end, second.end):
        store.readable_end.update()
    assert seen[-2:] == [1, 2]
    store.writer.append(message(), other.queue_id)
    store.committer.commit()
    store.flusher.flush_now()
    store.readable_end.update()
    assert seen[-1] == 2
    assert len(seen) == 3, "nobody is called for what was readable before"


async def test_a_commit_tells_when_its_newest_record_was_stored(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store()
    for _ in range(2):
        clock.ms += 1234
        store.writer.append(message(), 0)
        store.committer.commit()
        assert store.committer.last_store_ms == clock.ms


async def test_callbacks_run_after_readable_moved(open_store: OpenStore) -> None:
    store = await open_store()
    seen: list[int] = []
    store.readable_end.on_moved.append(lambda: seen.append(store.readable))
    fill(store, 1)
    assert seen == [store.written]


async def test_only_watched_queues_report_new_records_and_then_once_after_all_watchers(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async"))
    seen: list[object] = []
    store.readable_end.on_watched.append(lambda: seen.append(store.readable))
    store.writer.append(message(), 0)
    store.committer.commit()
    assert seen == []
    for queue_id in (0, 1):
        store.queue("T", queue_id).watchers = [lambda queue: seen.append(queue.queue_id)]
        store.writer.append(message(), queue_id)
    store.committer.commit()
    assert seen == [0, 1, store.written]


async def test_a_read_keeps_to_its_limits_but_the_first_message_always_comes(open_store: OpenStore) -> None:
    store = await open_store()
    fill(store, 20)
    queue = store.queue("T", 0)
    size = store.readers.read(queue, 0, 1, 0).size
    assert store.readers.read(queue, 0, 1, 0).count == 1
    assert store.readers.read(queue, 0, 7, 10**6).count == 7
    assert store.readers.read(queue, 0, 100, 2 * size).count == 2
    result = store.readers.read(queue, 18, 100, 10**6)
    assert (result.count, result.next_offset, result.first_offset, result.end_offset) == (2, 20, 0, 20)
    assert result.size == sum(len(piece) for piece in result.pieces)


async def test_records_side_by_side_come_as_one_piece(open_store: OpenStore) -> None:
    store = await open_store(small_config(segment_bytes=65536, page_bytes=65536, cache_bytes=10**6))
    fill(store, 20)
    assert len(store.readers.read(store.queue("T", 0), 0, 20, 10**6).pieces) == 1


async def test_the_status_of_an_empty_read_gives_the_reason(open_store: OpenStore) -> None:
    store = await open_store()
    queue = store.queue("T", 0)
    assert store.readers.read(queue, 0, 1, 1).status is ReadStatus.EMPTY
    assert store.readers.read(queue, 7, 1, 1).next_offset == 0
    fill(store, 3)
    queue.store_from(1)
    for offset, status, goes_on in [(0, "TOO_SMALL", 1), (3, "AT_END", 3), (9, "BEYOND_END", 3)]:
        result = store.readers.read(queue, offset, 1, 1000)
        assert (result.status.name, result.next_offset) == (status, goes_on)
        assert (result.first_offset, result.end_offset, result.pieces) == (1, 3, [])


async def test_only_wanted_tags_come(open_store: OpenStore) -> None:
    store = await open_store()
    queue = store.queue("T", 0)
    for number in range(30):
        store.writer.append(message(b"%d" % number, tags="ABC"[number % 3]), 0)
    store.committer.commit()
    store.flusher.flush_now()
    codes = frozenset((tags_code("A"), tags_code("C")))
    result = store.readers.read(queue, 0, 6, 10**6, codes)
    assert bodies(result.pieces) == [b"0", b"2", b"3", b"5", b"6", b"8"]
    assert result.next_offset == 9
    rest = store.readers.read(queue, 9, 100, 10**6, codes)
    assert bodies(rest.pieces) == [b"%d" % n for n in range(9, 30) if n % 3 != 1]
    nothing = store.readers.read(queue, 0, 6, 10**6, frozenset((tags_code("Z"),)))
    assert (nothing.status, nothing.next_offset) == (ReadStatus.NO_MATCH, 30)
    many = frozenset(range(1000, 1020)) | codes
    assert store.readers.read(queue, 0, 6, 10**6, many).count == 6


async def test_a_search_without_result_moves_on_by_a_bounded_number_of_entries(open_store: OpenStore) -> None:
    store = await open_store(small_config(segment_bytes=10**7))
    fill(store, 9000, size=0)
    queue, tested = store.queue("T", 0), 0

    def nothing(record: RecordView) -> bool:
        nonlocal tested
        tested += 1
        return False

    result = store.readers.read(queue, 0, 32, 10**6, frozenset((99,)))
    assert (result.status, result.next_offset) == (ReadStatus.NO_MATCH, 8000)
    result = store.readers.read(queue, 0, 32, 10**6, None, nothing)
    assert (result.status, result.next_offset, tested) == (ReadStatus.NO_MATCH, 800, 800)
    codes = frozenset((tags_code("A"), tags_code("B"), tags_code("C"), 0))
    result = store.readers.read(queue, 0, 32, 10**6, codes, nothing)
    assert (result.status, result.next_offset, tested) == (ReadStatus.NO_MATCH, 800, 1600)


async def test_a_predicate_sees_a_view_of_each_record(open_store: OpenStore) -> None:
    store = await open_store()
    fill(store, 20)

    def even(record: RecordView) -> bool:
        return record.queue_offset % 2 == 0 and record.property("N") is None

    result = store.readers.read(store.queue("T", 0), 0, 5, 10**6, None, even)
    assert [int(body.split(b"/")[0]) for body in bodies(result.pieces)] == [0, 2, 4, 6, 8]
    assert result.next_offset == 9


async def test_a_near_read_ends_where_the_disk_would_have_to_be_waited_for() -> None:
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(flush="async", page_bytes=1024), ManualClock(), disk)
    sent = fill(store, 40)
    await store.close()
    disk.cached = True
    store = await Store.open(Path("/data"), small_config(flush="async", page_bytes=1024), ManualClock(), disk)
    queue = store.queue("T", 0)
    assert store.readers.read_near(queue, 0, 1, 1) is not None
    disk.cached = False
    some = store.readers.read(queue, 0, 40, 10**6)
    assert 0 < some.count < 10
    assert store.readers.read_near(queue, some.next_offset, 1, 1) is None
    rest = await store.readers.read_far(queue, some.next_offset, 40, 10**6)
    assert bodies(some.pieces) + bodies(rest.pieces) == sent
    store.crash()


@pytest.mark.usefixtures("all_cached")
@pytest.mark.usefixtures("all_cached")
async def test_unwritten_records_are_not_read_from_the_file(open_store: OpenStore) -> None:
    """The file has zeros there; they must not be cached when a damaged entry points there."""
    store = await open_store(small_config(page_bytes=1024, flush="async"))
    sent = fill(store, 5)
    behind = store.tail.page_end
    assert behind < store.tail.segment.end
    assert (store.pages.load_now(behind), store.pages.load(behind)) == (None, None)
    sent += fill(store, 200)
    assert drain(store, store.queue("T", 0)) == sent


@pytest.mark.usefixtures("all_cached")
async def test_what_the_page_cache_holds_is_near(open_store: OpenStore) -> None:
    store = await open_store(small_config(page_bytes=1024, cache_bytes=1024))
    sent = fill(store, 200)
    queue = store.queue("T", 0)
    assert all(store.readers.read_near(queue, offset, 1, 1) is not None for offset in range(200))
    assert drain(store, queue) == sent


@pytest.mark.usefixtures("nothing_cached")
async def test_far_reads_are_the_same_as_near_ones(open_store: OpenStore) -> None:
    store = await open_store()
    sent = fill(store, 200)
    queue = store.queue("T", 0)
    store.queues.save(queue, store.durable)
    offset, found, far = 0, [], 0
    while offset < 200:
        if store.readers.read_near(queue, offset, 1, 1) is not None:
            result = store.readers.read(queue, offset, 7, 10**6)
        else:
            result = await store.readers.read_far(queue, offset, 7, 10**6)
            far += 1
        assert result.end_offset == 200
        found += bodies(result.pieces)
        offset = result.next_offset
    assert found == sent
    assert far > 3


async def test_a_batch_is_in_one_segment_or_refused(open_store: OpenStore) -> None:
    store = await open_store()
    fill(store, 20)
    batch = [message(b"y" * 150) for _ in range(12)]
    placed = append_batch(store, batch, 0)
    assert [p.queue_offset for p in placed] == list(range(20, 32))
    assert placed[0].position == 4096
    assert placed[-1].end < 8192
    before = store.appended
    with pytest.raises(Refused, match="a group of 40 messages"):
        append_batch(store, batch[:1] * 40, 0)
    too_large = Message("T", b"", b"p" * 40_000)
    with pytest.raises(Refused):
        append_batch(store, [message(), too_large], 0)
    assert store.appended == before
    assert store.queue("T", 0).next_offset == 32


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (Message("T", b"x" * 101), "the body has 101 bytes; the maximum is 100"),
        (Message("T", b"", b"x" * 32768), "the properties have 32768 bytes"),
        (Message("T", b"", b"k\x01\x00\x02"), r"contain U\+0000"),
        (Message("a/b", b""), "cannot be a directory"),
        (Message("..", b""), "cannot be a directory"),
        (Message("T", b"", b"x" * 4096), "a segment has 4096"),
    ],
)
async def test_what_cannot_be_stored_is_refused_with_the_limit(open_store: OpenStore, bad: Message, text: str) -> None:
    store = await open_store(small_config(message_bytes_max=100))
    with pytest.raises(Refused, match=text) as caught:
        store.writer.append(bad, 0)
    assert caught.value.reason is Reason.ILLEGAL
    assert store.appended == 0


async def test_every_kind_of_record_passes_through(open_store: OpenStore) -> None:
    store = await open_store()
    v6 = Message("T", b"6", born_host=bytes(16) + b"\x00\x00\x00\x01", sys_flag=0x20)
    long_topic = Message("%RETRY%" + "g" * 140, b"long")
    store.writer.append(v6, 0)
    store.writer.append(long_topic, 0)
    store.writer.store_host = bytes(20)
    store.writer.append(message("host6"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    assert drain(store, store.queue("T", 0)) == [b"6", b"host6"]
    assert drain(store, store.queue(long_topic.topic, 0)) == [b"long"]


async def test_prepared_and_rolled_back_records_are_in_no_queue(open_store: OpenStore) -> None:
    store = await open_store()
    placed = [store.writer.append(Message("T", b"%d" % kind, sys_flag=kind), 0) for kind in (4, 8, 12, 0)]
    store.committer.commit()
    store.flusher.flush_now()
    assert [p.queue_offset for p in placed] == [0, 0, 0, 1]
    assert drain(store, store.queue("T", 0)) == [b"8", b"0"]
    assert store.lookup.record_at(placed[0].position) is not None


async def test_an_orderly_stop_loses_nothing_and_reads_nothing_again(open_store: OpenStore) -> None:
    store = await open_store()
    sent = {(topic, q): fill(store, 60, topic, q) for topic in ("A", "B") for q in (0, 1)}
    await store.close()
    store = await open_store()
    assert store.statistics().recovered_records == 0
    for (topic, queue_id), wanted in sent.items():
        queue = store.queues.find(topic, queue_id)
        assert queue is not None
        assert drain(store, queue) == wanted
    more = fill(store, 60, "A", 1)
    await store.close()
    store = await open_store()
    assert drain(store, store.queue("A", 1)) == sent["A", 1] + more
    assert store.readers.damaged_records == 0


async def test_what_was_appended_is_counted(open_store: OpenStore) -> None:
    store = await open_store()
    placed = [store.writer.append(message(bytes(300)), 0) for _ in range(30)]  # over three segments
    store.committer.commit()
    placed += append_batch(store, [message(b"a"), message(b"bc")], 0)
    counted = store.statistics()
    assert (counted.appended_messages, counted.commits) == (30, 3)
    store.committer.commit()
    counted = store.statistics()
    assert counted.appended_messages == 32
    assert counted.appended_bytes == sum(each.end - each.position for each in placed)


async def test_closing_writes_what_nobody_waited_for(open_store: OpenStore) -> None:
    store = await open_store()
    store.writer.append(message("late"), 0)
    await store.close()
    await store.close()
    store = await open_store()
    assert drain(store, store.queue("T", 0)) == [b"late"]


async def test_the_error_of_a_second_opener_names_the_first(open_store: OpenStore) -> None:
    import os

    await open_store()
    with pytest.raises(StoreLocked, match=f"in use by process {os.getpid()}"):
        await open_store()


async def test_saving_in_the_background_keeps_little_in_memory(
    open_store: OpenStore, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    store = await open_store(small_config(queue_file_entries=300))
    await nursery.start(store.upkeep.run)
    sent = fill(store, 500)
    queue = store.queue("T", 0)
    while queue.dirty:  # noqa: ASYNC110 - the clock does not wait for the thread that writes
        await trio.sleep(1)
    assert (queue.saved, queue.tail_offset, len(queue.tail)) == (500, 500, 0)
    assert drain(store, queue) == sent
    assert store.statistics().open_files <= 8
    nursery.cancel_scope.cancel()


async def test_a_deleted_topic_stays_deleted_and_starts_empty_when_created_again(open_store: OpenStore) -> None:
    store = await open_store()
    fill(store, 30, "A")
    kept = fill(store, 30, "B")
    store.deletions.delete_topic("A")
    assert store.queues.find("A", 0) is None
    assert store.topics_on_disk() == ["B"]
    again = fill(store, 5, "A")
    assert drain(store, store.queue("A", 0)) == again
    await store.close()
    store = await open_store()
    assert drain(store, store.queue("A", 0)) == again
    assert drain(store, store.queue("B", 0)) == kept


@pytest.mark.parametrize("count_max", [1, 7, 32, 200])
async def test_none_of_several_tags_is_skipped(open_store: OpenStore, count_max: int) -> None:
    """One tag fills the answer long before the next message of the other."""
    store = await open_store(small_config(flush="async"))
    tags = [*"A" * 100, "B", *"AC" * 20, "B"]
    for tag in tags:
        store.writer.append(message(b"x", "T", tag), 0)
    store.committer.commit()
    queue = store.queue("T", 0)
    codes = frozenset((tags_code("A"), tags_code("B")))
    found: list[int] = []
    offset = 0
    while offset < len(tags):
        result = store.readers.read(queue, offset, count_max, 10**6, codes)
        assert result.count <= count_max
        assert result.next_offset > offset
        found += [record.queue_offset for piece in result.pieces for record in decode_records(piece)]
        offset = result.next_offset
    assert found == [offset for offset, tag in enumerate(tags) if tag != "C"]


async def test_a_read_of_one_message_ends_after_it(open_store: OpenStore) -> None:
    store = await open_store(small_config(flush="async"))
    for tag in "ACCA":
        store.writer.append(message(b"x", "T", tag), 0)
    store.committer.commit()
    result = store.readers.read(store.queue("T", 0), 0, 1, 1000, frozenset((tags_code("A"),)))
    assert (result.count, result.next_offset) == (1, 1)


def fill_up(disk: FakeDisk) -> None:
    """Make every further write fail."""
    disk.free_bytes = 0


async def test_senders_learn_of_messages_that_a_failed_delete_takes_back() -> None:
    """Sends and a delete of another topic in one socket read: the server's commit behind them must not succeed."""
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(flush="async", segment_bytes=65536), ManualClock(), disk)
    for topic in "UV":
        store.writer.append(message(b"x", topic), 0)
    store.committer.commit()
    store.writer.append(message(b"y" * 6000, "T"), 0)
    fill_up(disk)
    with pytest.raises(Refused):
        store.deletions.delete_topic("V")
    with pytest.raises(Refused):
        store.committer.commit()
    store.committer.commit()
    assert store.queue("T", 0).next_offset == 0
    store.crash()


async def test_a_topic_that_could_not_be_deleted_stays_whole_for_good() -> None:
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(flush="async"), ManualClock(), disk)
    for topic in "TTTV":
        store.writer.append(message(b"x", topic), 0)
    store.writer.append(message(b"x" * 3400, "V"), 0)  # no room in the segment for the record of a deletion
    store.committer.commit()
    store.flusher.flush_now()
    fill_up(disk)
    with pytest.raises(Refused):
        store.deletions.delete_topic("T")
    disk.free_bytes = None
    store.upkeep.retention.look()
    store.writer.append(message(b"x", "T"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    store.deletions.delete_topic("V")
    store.crash()
    store = await Store.open(Path("/data"), small_config(flush="async"), ManualClock(), disk)
    assert len(drain(store, store.queue("T", 0))) == 4
    store.crash()


@pytest.mark.usefixtures("all_cached")
async def test_a_read_of_records_that_lie_far_apart_copies_few_pages(open_store: OpenStore) -> None:
    """A page is copied from the page cache for each of them, on the event loop; the next read continues."""
    store = await open_store(small_config(flush="async", page_bytes=1 << 20, cache_bytes=0, segment_bytes=32 << 20))
    queue = store.queue("T", 0)
    for number in range(20):
        store.writer.append(message(b"%d" % number), 0)
        store.writer.append(message(bytes((1 << 20) - 1000)), 1)
    store.committer.commit()
    store.flusher.flush_now()
    counts: list[int] = []
    while sum(counts) < 20:
        result = store.readers.read_near(queue, sum(counts), 100, 100 << 20)
        assert result is not None
        assert bodies(result.pieces) == [b"%d" % n for n in range(sum(counts), result.next_offset)]
        counts.append(result.count)
    assert max(counts) < 10
