"""A projection sees every readable record of its topics once and in log order, and continues after any restart."""

from collections.abc import Sequence
from errno import EIO
from random import Random
from typing import Any

import pytest
import trio
from tests.state.tally import FORMAT, ROOT, Tally, send, start, started, stop
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.errors import PluginError, StoreError
from martlet.records.layout import RecordView
from martlet.runtime.steps import Steps, finish_now, per_slice
from martlet.runtime.turns import Turns
from martlet.state import Projections, log_order, pack_rows
from martlet.state.journal import Journal
from martlet.state.log_order import LOOK_US, LOOKS_A_LOAD, LogOrder
from martlet.store import Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock, message, small_config

FILE = "/data/store/config/tally.snapshot"


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


async def test_records_are_applied_once_they_are_readable(disk: FakeDisk) -> None:
    running = await start(disk, flush="sync")
    send(running.store, "A", "a1", "a2")
    assert running.tally.totals() == {}
    running.store.flusher.flush_now()
    assert running.tally.totals() == {"A": (2, {"a1", "a2"})}
    running.store.crash()


async def test_records_of_several_topics_and_queues_come_in_log_order(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    for number in range(200):  # `Tally.apply` raises when one is out of order
        send(running.store, "AB"[number % 2], f"m{number}", queue_id=number % 3)
    running.check()
    assert running.tally.applied == 200
    running.store.crash()


@pytest.mark.parametrize("merged", [2048, 3, 1])
async def test_a_replay_merges_by_position(disk: FakeDisk, merged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_order, "MERGED", merged)
    running = await start(disk, flush="async")
    random = Random(3)
    for number in range(600):
        send(running.store, random.choice("AAAAAB"), f"m{number}", queue_id=random.choice((0, 0, 0, 1, 2)))
    await stop(running)
    disk.unlink(FILE)
    again = await start(disk)
    assert again.tally.applied == 600
    again.check()
    again.store.crash()


async def test_a_queue_with_few_records_does_not_get_ahead(disk: FakeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_order, "AHEAD", 8)
    monkeypatch.setattr(log_order, "AHEAD_LEAST", 4)
    running = await start(disk, flush="async")
    for number in range(200):  # queue 1 has its next record far behind what is read ahead of queue 0
        send(running.store, "A", f"m{number}", queue_id=int(number % 50 == 49))
    await stop(running)
    disk.unlink(FILE)
    again = await start(disk)  # `Tally.apply` raises when one is out of order
    assert again.tally.applied == 200
    again.check()
    again.store.crash()


@pytest.mark.parametrize(("runs", "merged"), [(1, 2048), (256, 2048), (256, 2), (1, 2)])
async def test_a_record_that_two_followed_queues_index_comes_once(
    disk: FakeDisk, runs: int, merged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_order, "RUN_RECORDS", runs)
    monkeypatch.setattr(log_order, "MERGED", merged)
    topics = frozenset(("A", "%LMQ%x", "%LMQ%y"))
    expected: set[str] = set()
    async with started(disk, Tally(topics), flush="async") as running:
        running.store.writer.light_queues = True
        for number in range(300):  # `Tally.apply` raises when one comes twice
            made = message(f"m{number}", "AC"[number % 2], unique=f"m{number}")
            names = [name for name, each in (("%LMQ%x", 3), ("%LMQ%y", 5)) if number % each == 0]
            if names:
                made.properties += f"INNER_MULTI_DISPATCH\x01{','.join(names)}\x02".encode()
            running.store.writer.append(made, 0)
            running.store.committer.commit()
            if names or number % 2 == 0:
                expected.add(f"m{number}")
        await wait_all_tasks_blocked()
        assert {row[1] for row in running.tally.records.values()} == expected
    for gone in ([], [FILE]):
        for path in gone:
            disk.unlink(path)
        again = await start(disk, Tally(topics), flush="async")
        assert {row[1] for row in again.tally.records.values()} == expected
        assert again.tally.applied == (len(expected) if gone else 0)
        again.store.crash()


async def test_what_is_read_while_its_topic_is_deleted_comes_through_a_light_queue(disk: FakeDisk) -> None:
    running = await start(disk, Tally(frozenset(("A", "B", "%LMQ%x"))), flush="async", cache_bytes=0, page_bytes=256)
    store = running.store
    store.writer.light_queues = True
    order = LogOrder(store)
    for number in range(30):
        made = message(f"m{number}", "AB"[number % 2], unique=f"m{number}")
        made.properties += b"INNER_MULTI_DISPATCH\x01%LMQ%x\x02" if number % 3 == 0 else b""
        store.writer.append(made, 0)
    store.committer.commit()
    for topic in ("A", "B", "%LMQ%x"):
        order.add(store.queue(topic, 0))
    taken = order._load_next() and order._next_entries()
    assert taken
    run = order._read_far(taken)
    order.remove_topic("A")  # as if its deletion came while a thread read
    order._advance(taken, run)
    assert [bytes(record.body) for record in run] == [b"m%d" % n for n in range(30) if n % 2 or n % 3 == 0]
    store.crash()


async def test_other_topics_are_not_applied(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    send(running.store, "Other", "x")
    assert running.tally.applied == 0
    running.store.crash()


async def test_after_an_orderly_stop_nothing_is_applied_again(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "a1", "a2", "a3")
    await stop(running)
    again = await start(disk, flush="async")
    assert (again.tally.restored, again.tally.applied) == (3, 0)
    send(again.store, "A", "a4")
    again.check()
    assert again.tally.applied == 1
    again.store.crash()


async def test_a_snapshot_is_taken_after_so_many_bytes(disk: FakeDisk) -> None:
    async with started(disk, flush="sync", snapshot_bytes=2000) as running:
        while f"{FILE}" not in disk.files:
            send(running.store, "A", "x" * 100)
            await wait_all_tasks_blocked()
        running.store.flusher.flush_now()
        found = disk.after_power_cut(Cut.KILLED, Random(0))
    again = await start(found)
    assert again.tally.restored > 5
    again.check()
    again.store.crash()


async def test_a_snapshot_waits_until_its_records_are_durable(disk: FakeDisk, autojump_clock: MockClock) -> None:
    async with started(disk, flush="async", flush_interval_ms=60_000, snapshot_bytes=100) as running:
        send(running.store, "A", "x" * 100)
        assert running.tally.applied == 1
        await trio.sleep(10)
        assert running.store.durable < running.store.readable
        assert FILE not in disk.files
        await trio.sleep(60)
        assert FILE in disk.files


async def test_a_snapshot_that_cannot_be_written_is_tried_again(
    disk: FakeDisk, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(disk, flush="sync", snapshot_bytes=100) as running:
        await wait_all_tasks_blocked()
        disk.fail_next("rename", 28)
        send(running.store, "A", "x" * 100)
        await trio.sleep(1)
        assert FILE not in disk.files
        assert "config/tally.snapshot cannot be written" in caplog.text
        await trio.sleep(61)
        send(running.store, "A", "y")
        await trio.sleep(1)
        assert FILE in disk.files


async def test_a_topic_that_is_deleted_is_forgotten(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "a1")
    send(running.store, "B", "b1")
    running.store.deletions.delete_topic("A")
    assert running.tally.totals() == {"B": (1, {"b1"})}
    send(running.store, "A", "a2")
    running.check()
    running.store.crash()


@pytest.mark.parametrize("after", [0, 1, 5])
async def test_a_topic_deleted_after_the_snapshot_is_forgotten_at_the_start(disk: FakeDisk, after: int) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "a1", "a2")
    send(running.store, "B", "b1")
    await stop(running)
    running = await start(disk, flush="async")
    running.store.deletions.delete_topic("A")
    send(running.store, "A", *(f"new{number}" for number in range(after)))
    running.store.flusher.flush_now()
    running.store.crash()
    again = await start(disk.after_power_cut(Cut.KILLED, Random(0)))
    assert again.tally.restored == 3
    again.check()
    again.store.crash()


async def test_a_queue_without_records_may_be_missing_at_the_start(disk: FakeDisk) -> None:
    """It exists once somebody asks for it, so that it is missing says nothing about its topic."""
    running = await start(disk)
    running.store.queue("A", 1)
    send(running.store, "B", "b1")
    send(running.store, "A", "a1")
    running.store.flusher.flush_now()
    await stop(running)
    again = await start(disk)
    assert again.store.queues.find("A", 1) is None
    assert again.tally.restored == 2
    again.check()
    again.store.crash()


async def test_a_queue_that_is_made_later_is_followed(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "a1", queue_id=7)
    assert running.tally.applied == 1
    running.store.crash()


async def test_a_projection_that_fails_is_stopped_and_nothing_else(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(disk, flush="async")
    told: list[str] = []
    running.projections.on_failed = lambda plugin, error: told.append(f"{plugin}: {error!r}")
    running.tally.fails_at = b"bad"
    send(running.store, "A", "good")
    send(running.store, "A", "bad")
    send(running.store, "A", "later")
    assert running.tally.applied == 1
    assert told == ["toy: ValueError('this record does not please')"]
    assert "projection 'tally' of plugin 'toy' failed to apply the records from position" in caplog.text
    assert running.projections.statistics()["tally"]["failed"] is True  # type: ignore[index]
    await stop(running)
    assert FILE not in disk.files
    again = await start(disk)  # it was mended
    again.check()
    assert again.tally.applied == 3
    again.store.crash()


@pytest.mark.parametrize("after", [0, 1])
async def test_a_projection_that_cannot_begin_is_stopped(disk: FakeDisk, after: int) -> None:
    """Without a snapshot, and with one."""

    class Broken(Tally):
        def restore(self, data: bytes, first_position: int) -> Steps[None]:
            raise ValueError("no state today")

    running = await start(disk, flush="async")
    send(running.store, "A", "a1")
    await stop(running)
    if not after:
        disk.unlink(FILE)
    again = await start(disk, Broken())
    assert again.projections.statistics()["tally"]["failed"] is True  # type: ignore[index]
    assert again.tally.applied == 0
    send(again.store, "A", "a2")
    again.store.crash()


async def test_a_projection_that_follows_other_topics_is_computed_again(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(disk, flush="async")
    send(running.store, "C", "c1")
    send(running.store, "A", "a1")
    await stop(running)
    again = await start(disk, Tally(frozenset(("A", "B", "C"))))
    assert again.tally.totals() == {"A": (1, {"a1"}), "C": (1, {"c1"})}
    assert "it follows topics ['A', 'B']; the projection follows ['A', 'B', 'C']" in caplog.text
    again.store.crash()


async def test_state_of_an_unknown_format_is_computed_again(disk: FakeDisk) -> None:
    class Newer(Tally):
        def restore(self, data: bytes, first_position: int) -> Steps[None]:
            if data:
                raise StoreError("format 3 is unknown; expected 4")
            yield from super().restore(data, first_position)

    running = await start(disk, flush="async")
    send(running.store, "A", "a1")
    await stop(running)
    again = await start(disk, Newer())
    again.check()
    assert again.tally.applied == 1
    again.store.crash()


async def test_a_snapshot_is_restored_in_slices(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", *map(str, range(100)))
    await stop(running)
    again = await start(disk)
    again.check()
    assert again.tally.restored == 100
    assert again.projections._turns.slices > 100, "a slice of `Tally.restore` is one row"
    again.store.crash()


async def test_state_that_cannot_be_read_to_its_end_leaves_nothing_behind(disk: FakeDisk) -> None:
    class Choosy(Tally):
        def restore(self, data: bytes, first_position: int) -> Steps[None]:
            yield from super().restore(data, first_position)
            if data:
                raise StoreError("row 3 has no topic")

    running = await start(disk, flush="async")
    send(running.store, "A", "a1", "a2", "a3")
    await stop(running)
    again = await start(disk, Choosy())
    again.check()
    assert again.tally.applied == 3
    again.store.crash()


async def test_a_snapshot_has_what_was_there_when_it_was_begun() -> None:
    class Generating(Tally):
        def freeze(self) -> Steps[Sequence[bytes]]:
            frozen = self.records.copy()  # in the first slice, as this is a generator
            return (yield from pack_rows(FORMAT, frozen.items()))

    for tally in (Tally(), Generating()):
        running = await start(FakeDisk(), tally, flush="async")
        send(running.store, "A", "before")
        position, steps = running.projections._driven[0].snapshot()
        send(running.store, "A", "after")
        content = b"".join(finish_now(steps))
        assert position < running.store.readable
        assert b"before" in content
        assert b"after" not in content
        running.store.crash()


async def test_a_damaged_record_is_skipped_and_said(disk: FakeDisk, caplog: pytest.LogCaptureFixture) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "good1", "wrong", "good2")
    await stop(running)
    disk.unlink(FILE)
    data = disk.files["/data/store/commitlog/00000000000000000000"].data
    at = data.find(b"wrong")
    data[at] ^= 1
    again = await start(disk)
    assert again.tally.totals() == {"A": (2, {"good1", "good2"})}
    assert "is damaged; skipping it" in caplog.text
    again.store.crash()


async def test_a_record_with_a_damaged_topic_is_not_applied(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "good1", "wrong", "good2")
    await stop(running)
    disk.unlink(FILE)
    data = disk.files["/data/store/commitlog/00000000000000000000"].data
    data[data.find(b"wrong") + len(b"wrong") + 1] ^= 1
    again = await start(disk)
    assert again.tally.totals() == {"A": (2, {"good1", "good2"})}
    again.store.crash()


async def test_a_damaged_block_of_a_queue_is_rebuilt_first(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    for number in range(100):
        send(running.store, "A", f"m{number}")
    await stop(running)
    disk.unlink(FILE)
    queue_file = disk.files["/data/store/consumequeue/A/0/00000000000000000320"]
    queue_file.data[3] ^= 1
    again = await start(disk)
    assert again.tally.applied == 100
    again.check()
    again.store.crash()


async def test_two_projections_of_one_name_are_refused(disk: FakeDisk) -> None:
    running = await start(disk)
    with pytest.raises(PluginError, match="projection 'tally' of plugin 'other' cannot be added; plugin 'toy' has one"):
        running.projections.add("other", Tally())
    running.store.crash()


class Counting(Tally):
    """Keeps how many records came in each call."""

    def __init__(self, topics: frozenset[str] = frozenset(("A", "B")), name: str = "tally") -> None:
        super().__init__(topics)
        self.name = name
        self.calls: list[int] = []

    def apply(self, records: Sequence[RecordView]) -> None:
        self.calls.append(len(records))
        self.applied += len(records)


SIZES: dict[str, Any] = {"segment_bytes": 1 << 22, "page_bytes": 1 << 20, "cache_bytes": 1 << 22, "flush": "sync"}


async def test_many_records_that_become_readable_at_once_are_applied_in_turns(disk: FakeDisk) -> None:
    tally = Counting()
    async with started(disk, tally, **SIZES) as running:
        send(running.store, "A", *map(str, range(3000)))
        running.store.flusher.flush_now()
        assert tally.calls == [256] * 2
        await wait_all_tasks_blocked()
        assert tally.applied == 3000
        assert max(tally.calls) == 256


async def test_many_queues_with_a_few_records_each_are_read_in_few_runs(disk: FakeDisk) -> None:
    sizes = {**SIZES, "flush": "async"}
    running = await start(disk, Counting(), **sizes)
    for number in range(900):
        send(running.store, "A", f"m{number}", queue_id=number % 300)
    await stop(running)
    disk.unlink(FILE)
    tally = Counting()
    again = await start(disk, tally, **sizes)
    assert (sum(tally.calls), len(tally.calls)) == (900, 4)
    again.store.crash()


async def test_very_many_queues_are_looked_at_some_in_each_turn_and_later_records_keep_their_order(
    disk: FakeDisk,
) -> None:
    running = await start(disk, **{**SIZES, "flush": "async"})
    store, queues = running.store, 1000
    for number in range(queues):
        send(store, "Q", f"m{number}", queue_id=number)
    order, runs = LogOrder(store), list[list[RecordView] | None]()
    for number in range(queues):
        order.add(store.queue("Q", number))
    runs.append(order.next_run_nowait())
    # The pass was at the first queue already, and comes to the last one later.
    send(store, "Q", "early", queue_id=0)
    send(store, "Q", "late", queue_id=queues - 1)
    while not order.at_end:
        runs.append(order.next_run_nowait())
    slices = runs.index(next(run for run in runs if run))
    assert slices == queues * (1 + LOOKS_A_LOAD + 1) // per_slice(LOOK_US)
    bodies = [bytes(record.body).decode() for run in runs if run for record in run]
    assert bodies == [*[f"m{number}" for number in range(queues)], "early", "late"]
    store.crash()


async def test_a_projection_that_follows_very_many_queues_is_up_to_date_after_some_turns(disk: FakeDisk) -> None:
    tally = Counting()
    async with started(disk, tally, **SIZES) as running:
        for number in range(1000):
            running.store.writer.append(message(f"m{number}", "A", "t", "", f"m{number}"), number)
        running.store.committer.commit()
        running.store.flusher.flush_now()
        assert tally.calls == []
        await wait_all_tasks_blocked()
        assert tally.applied == 1000


async def test_a_topic_that_is_deleted_while_its_queues_are_looked_at_is_left_out(disk: FakeDisk) -> None:
    running = await start(disk, **{**SIZES, "flush": "async"})
    store = running.store
    for number in range(1000):
        send(store, "Q", f"m{number}", queue_id=number)
    send(store, "R", "kept")
    order = LogOrder(store)
    for number in range(1000):
        order.add(store.queue("Q", number))
    order.add(store.queue("R", 0))
    assert order.next_run_nowait() is None
    order.remove_topic("Q")
    run = order.next_run_nowait()
    assert run is not None
    assert [bytes(record.body) for record in run] == [b"kept"]
    assert order.at_end
    store.crash()


async def test_records_are_applied_after_the_disk_failed_to_read(
    disk: FakeDisk, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(disk, Tally(), flush="async", cache_bytes=0, page_bytes=256) as running:
        for number in range(3000):
            running.store.writer.append(message(f"m{number}", "A", unique=f"m{number}"), 0)
        running.store.committer.commit()
        disk.fail_next("read", EIO)
        await trio.sleep(30)
        assert running.tally.applied == 3000
        running.check()
    assert "projection 'tally' cannot read the log, retrying in 5 s" in caplog.text


@pytest.mark.parametrize(("after", "directory"), [(0, "consumequeue/A/0"), (3, "commitlog")])
async def test_a_start_that_cannot_read_the_log_names_the_file(disk: FakeDisk, after: int, directory: str) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", *(f"m{number}" for number in range(20)))
    await stop(running)
    disk.unlink(FILE)
    store = await Store.open(ROOT, small_config(cache_bytes=0), ManualClock(), disk)
    projections = Projections(store, Turns())
    projections.add("toy", Tally())
    disk.fail_next("read", EIO, after=after)
    with pytest.raises(
        StoreError, match=f"file '/data/store/{directory}/0{{20}}' cannot be read for projection 'tally'"
    ):
        await projections.replay()
    store.crash()


async def test_a_snapshot_that_cannot_be_read_only_makes_the_start_slower(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "a", "b")
    await stop(running)
    store = await Store.open(ROOT, small_config(), ManualClock(), disk)
    tally = Tally()
    projections = Projections(store, Turns())
    projections.add("toy", tally)
    disk.fail_next("read", EIO)
    await projections.replay()
    assert tally.applied == 2
    assert "config/tally.snapshot cannot be read" in caplog.text
    store.crash()


class Unrendered(Tally):
    """Fails to render its state."""

    def freeze(self) -> Steps[Sequence[bytes]]:
        yield
        raise ValueError("no ink")


async def test_a_projection_that_cannot_render_its_state_only_makes_the_next_start_slower(
    disk: FakeDisk, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(disk, Unrendered(), flush="sync", snapshot_bytes=100)
    send(running.store, "A", "x" * 100)
    await trio.sleep(1)
    reason = "plugin 'toy' failed to render it; ValueError: no ink"
    await stop(running)
    assert f"config/tally.snapshot cannot be written, so the next start takes longer; {reason}" in caplog.text
    assert FILE not in disk.files
    again = await start(disk)
    assert again.tally.applied == 1
    again.store.crash()


async def test_a_log_that_cannot_be_read_at_shutdown_only_makes_the_next_start_slower(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    config: dict[str, Any] = {"cache_bytes": 0, "page_bytes": 256, "flush": "async"}
    running = await start(disk, Tally(), Counting(name="other"), **config)
    for number in range(3000):
        running.store.writer.append(message(f"m{number}", "A", unique=f"m{number}"), 0)
    running.store.committer.commit()
    assert running.tally.applied < 3000
    disk.fail_next("read", EIO)
    await stop(running)
    assert "config/tally.snapshot cannot be written, so the next start takes longer; [Errno 5]" in caplog.text
    assert "/data/store/config/other.snapshot" in disk.files
    again = await start(disk)
    assert again.tally.applied == 3000
    again.store.crash()


async def test_projections_share_what_is_applied_at_once(disk: FakeDisk) -> None:
    tallies = [Counting(name=name) for name in ("one", "two", "three")]
    async with started(disk, *tallies, **SIZES) as running:
        send(running.store, "A", *map(str, range(1000)))
        running.store.flusher.flush_now()
        assert [tally.calls for tally in tallies] == [[256]] * 3
        await wait_all_tasks_blocked()
        assert [tally.applied for tally in tallies] == [1000] * 3


async def test_notes_of_a_journal_come_in_short_runs(disk: FakeDisk) -> None:
    tally = Counting(frozenset(("martlet.journal.j",)))
    async with started(disk, tally, **SIZES) as running:
        journal = Journal(running.store, "j")
        for number in range(20_000):
            journal.note(b"note %d" % number)
        running.store.committer.commit()
        running.store.flusher.flush_now()
        assert tally.calls == [1] * 2, "a record is as long as a run may be"
        await wait_all_tasks_blocked()
        assert tally.applied > 20


async def test_records_are_applied_while_a_snapshot_waits_for_the_disk(disk: FakeDisk) -> None:
    tally = Counting()
    running = await start(disk, tally, snapshot_bytes=1000, **{**SIZES, "flush": "async"})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(running.projections.run)
        for _ in range(2):
            send(running.store, "A", *map(str, range(3000)))
            await wait_all_tasks_blocked()
        assert tally.applied == 6000
        assert FILE not in disk.files, "nothing is durable yet"
        running.store.flusher.flush_now()
        await wait_all_tasks_blocked()
        assert FILE in disk.files
        nursery.cancel_scope.cancel()
    running.store.crash()


async def test_statistics_say_where_each_is(disk: FakeDisk) -> None:
    running = await start(disk, flush="async")
    send(running.store, "A", "a1")
    assert running.projections.statistics()["tally"] == {
        "position": running.store.readable,
        "snapshot_bytes": 0,
        "since_snapshot_bytes": running.store.readable,
        "failed": False,
    }
    running.store.crash()


class Holding(Tally):
    """Its messages wait for its plugin, except *released* ones."""

    def __init__(self, released: int = 0) -> None:
        super().__init__()
        self.released = released

    def held(self) -> int:
        return len(self.records) - self.released


async def test_a_start_without_a_plugin_logs_how_many_messages_wait_for_it(
    disk: FakeDisk, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(disk, Holding())
    send(running.store, "A", "a1", "a2", "a3")
    await stop(running)
    await stop(await start(disk, Holding()))
    assert caplog.text == ""
    await start_without_projections(disk)
    assert "3 messages of 'tally' wait for plugin 'toy', which is not enabled; enable it" in caplog.text
    # A number that changes without a record is saved as well.
    for released, text in ((1, "2 messages of 'tally' wait for plugin 'toy'"), (3, "")):
        caplog.clear()
        await stop(await start(disk, Holding(released)))
        await start_without_projections(disk)
        assert text in caplog.text
        assert bool(text) == bool(caplog.text)


async def start_without_projections(disk: FakeDisk) -> None:
    store = await Store.open(ROOT, small_config(), ManualClock(), disk)
    await Projections(store, Turns()).replay()
    assert await store.close()
