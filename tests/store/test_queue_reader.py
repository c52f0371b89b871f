"""Near reads answer at once; far ones go through one task of the peer, and none of their answers is lost."""

from collections.abc import Awaitable, Callable, Hashable
from errno import EIO
from pathlib import Path

import pytest
import trio
import trio.testing

from martlet.errors import Reason, Refused, StoreError
from martlet.store import Queue, QueueReader, ReadResult, Store
from martlet.store.read.readers import Readers
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock, bodies, message, small_config

COUNT = 40


class Consumer:
    """A peer with tasks that run when the test says so, and its reader."""

    def __init__(self, store: Store, ahead_max: int = 4) -> None:
        self.store = store
        self.queue = store.queue("T", 0)
        self.ready: list[Hashable] = []
        self.tasks: list[Callable[[], Awaitable[None]]] = []
        self.busy = False
        self.reader = QueueReader(store.readers, self.ready.append, ahead_max)

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        if self.busy:
            raise Refused(Reason.BUSY, "64 are under way")
        self.tasks.append(work)

    async def work(self) -> None:
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            await task()

    def read(self, place: Hashable, offset: int, count: int = 1, budget_bytes: int = 1 << 20) -> list[bytes] | None:
        result = self.reader.read(self.start, place, self.queue, offset, count, budget_bytes)
        return None if result is None else bodies(result.pieces)


async def far_store(disk: FakeDisk | None = None) -> Store:
    """A store that holds the end of its log only."""
    config = small_config(flush="async", page_bytes=1024, cache_bytes=0)
    store = await Store.open(Path("/data"), config, ManualClock(), disk or FakeDisk())
    for number in range(COUNT):
        store.writer.append(message(b"%0200d" % number), 0)
    store.committer.commit()
    return store


def body(number: int) -> list[bytes]:
    return [b"%0200d" % number]


async def test_what_is_near_is_answered_at_once() -> None:
    consumer = Consumer(await far_store())
    assert consumer.read("a", COUNT - 1) == body(COUNT - 1)
    assert (consumer.tasks, consumer.ready, consumer.reader.must_wait) == ([], [], False)


async def test_what_is_far_is_read_by_one_task_in_the_order_it_was_asked() -> None:
    consumer = Consumer(await far_store())
    assert [consumer.read(place, place) for place in (3, 1, 2)] == [None] * 3
    assert consumer.read(1, 1) is None
    assert len(consumer.tasks) == 1
    assert consumer.reader.must_wait
    await consumer.work()
    assert consumer.ready == [3, 1, 2]
    assert [consumer.read(place, place) for place in (1, 2, 3)] == [body(1), body(2), body(3)]
    assert (consumer.tasks, consumer.reader.must_wait) == ([], False)


async def test_answers_that_are_not_fetched_stop_the_task_until_one_is() -> None:
    consumer = Consumer(await far_store(), ahead_max=2)
    for place in range(5):
        assert consumer.read(place, place) is None
    await consumer.work()
    assert consumer.ready == [0, 1]
    assert consumer.read(0, 0) == body(0)
    await consumer.work()
    assert consumer.ready == [0, 1, 2]
    consumer.reader.keep_only([4])
    assert consumer.read(4, 4) is None
    await consumer.work()
    assert consumer.ready == [0, 1, 2, 3, 4]


async def test_an_answer_for_another_offset_is_no_answer() -> None:
    consumer = Consumer(await far_store())
    assert consumer.read("a", 0) is None
    assert consumer.read("a", 5) is None  # moved before the thread began
    await consumer.work()
    assert consumer.read("a", 6) is None  # and after it was done
    await consumer.work()
    assert consumer.read("a", 6) == body(6)
    assert consumer.ready == ["a", "a"]


async def test_a_read_is_cut_to_what_may_come_now() -> None:
    consumer = Consumer(await far_store())
    assert consumer.read("a", 0, 4) is None
    await consumer.work()
    result = consumer.reader.read(consumer.start, "a", consumer.queue, 0, 2, 1 << 20)
    assert result is not None
    assert bodies(result.pieces) == body(0) + body(1)
    assert (result.count, result.next_offset, result.size) == (2, 2, sum(map(len, result.pieces)))


async def test_a_peer_that_may_start_nothing_stalls_the_reader_until_the_next_read() -> None:
    consumer = Consumer(await far_store())
    consumer.busy = True
    assert consumer.read("a", 0) is None
    assert (consumer.tasks, consumer.reader.must_wait) == ([], True)
    consumer.busy = False
    assert consumer.read("a", 0) is None
    await consumer.work()
    assert (consumer.read("a", 0), consumer.reader.stalled) == (body(0), None)


async def test_an_error_of_the_disk_fails_one_read_with_a_sentence_and_stops_no_other() -> None:
    disk = FakeDisk()
    consumer = Consumer(await far_store(disk))
    assert consumer.read("a", 0) is None
    assert consumer.read("b", 1) is None
    disk.fail_next("read", EIO)
    await consumer.work()
    assert consumer.ready == ["a", "b"]
    with pytest.raises(StoreError, match=r"message 0 of consume queue 'T/0' cannot be read; .*Input/output error"):
        consumer.read("a", 0)
    assert consumer.read("b", 1) == body(1)


@pytest.mark.parametrize("after", [0, 1], ids=["entries", "records"])
async def test_an_error_of_the_disk_before_the_thread_reads_is_no_error_yet(after: int) -> None:
    disk = FakeDisk()
    store = await far_store(disk)
    await store.close()
    store = await Store.open(Path("/data"), small_config(page_bytes=1024, cache_bytes=0), ManualClock(), disk)
    disk.cached = True
    consumer = Consumer(store)
    disk.fail_next("read", EIO, after=after)
    assert consumer.read("a", 0) is None
    await consumer.work()
    assert consumer.read("a", 0) == body(0)
    store.crash()


async def test_a_failed_read_raises_once_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Consumer(await far_store())
    read_far = Readers.read_far

    async def fail_first(readers: Readers, queue: Queue, offset: int, *more: object) -> ReadResult:
        if not offset:
            raise StoreError("the log is damaged")
        return await read_far(readers, queue, offset, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Readers, "read_far", fail_first)
    assert consumer.read("a", 0) is None
    assert consumer.read("b", 1) is None
    await consumer.work()
    with pytest.raises(StoreError, match="the log is damaged"):
        consumer.read("a", 0)
    assert consumer.read("b", 1) == body(1)


async def test_a_read_that_is_forgotten_meanwhile_calls_nobody() -> None:
    consumer = Consumer(await far_store())
    assert consumer.read("a", 0) is None
    consumer.reader.forget("a")
    await consumer.work()
    assert consumer.ready == []
    assert consumer.read("a", 0) is None


async def test_another_task_continues_after_a_cancelled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Consumer(await far_store())
    assert consumer.read("a", 0) is None

    async def never(*arguments: object) -> object:
        await trio.sleep_forever()

    with monkeypatch.context() as patched:
        patched.setattr(FakeDisk, "off_loop", never)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(consumer.work)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert (consumer.ready, consumer.reader.must_wait) == (["a"], False)
    assert consumer.read("a", 0) is None
    await consumer.work()
    assert consumer.read("a", 0) == body(0)
