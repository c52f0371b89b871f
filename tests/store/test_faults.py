"""A disk that is full or fails: refusals that heal, failures that stop, reads that go on."""

import contextlib
import errno
import random
from functools import partial
from pathlib import Path

import pytest
import trio

from martlet.app.config import Config, PluginsConfig
from martlet.app.startup import run
from martlet.errors import Reason, Refused, StoreError, StoreFailed
from martlet.runtime.steps import finish_now
from martlet.settings import BrokerConfig
from martlet.store import Store, StoreConfig
from martlet.store.disk.files import read_file
from martlet.store.upkeep.checkpointer import Checkpointer
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, drain, message, small_config

DIRECTORY = Path("/data/store")


async def open_on(disk: FakeDisk, config: StoreConfig | None = None) -> Store:
    store = await Store.open(DIRECTORY, config or small_config(), ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def send(store: Store, body: bytes) -> bool:
    """Whether one message was stored, as a broker finds out: by an append, a commit and a flush."""
    try:
        store.writer.append(message(body, keys=body.decode()), 0)
        store.committer.commit()
    except Refused as refused:
        return refused.reason is not Reason.UNAVAILABLE
    store.flusher.flush_now()
    return True


@pytest.mark.parametrize("free_blocks", range(1, 60, 2))
async def test_a_full_disk_refuses_and_heals_wherever_it_fills_up(free_blocks: int) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    kept = [b"%d" % n for n in range(5) if send(store, b"%d" % n)]
    assert len(kept) == 5
    disk.free_bytes = free_blocks * 4096
    attempts = 0
    while attempts < 400:
        attempts += 1
        body = b"%d-" % attempts + b"x" * 200
        if not send(store, body):
            break
        kept.append(body)
        store.queues.save(store.queue("T", 0), store.durable) if attempts % 7 == 0 and disk.free_bytes > 8192 else None
    assert attempts < 400, "the disk was large enough for all"
    with pytest.raises(Refused, match=r"is full.*file_reserved_hours"):
        store.writer.append(message(b"still full"), 0)
    assert drain(store, store.queue("T", 0)) == kept
    store.flusher.flush_now()
    disk.free_bytes = 10**9
    store.upkeep.retention.look()
    assert send(store, b"again")
    kept.append(b"again")
    assert drain(store, store.queue("T", 0)) == kept
    await store.close()
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == kept
    assert (store.readers.damaged_records, store.recovered.cut_bytes) == (0, 0)
    store.crash()


async def test_nothing_of_a_refused_batch_is_found_after_a_kill() -> None:
    disk = FakeDisk()
    store = await open_on(disk, small_config(segment_bytes=65536, page_bytes=4096))
    assert send(store, b"kept")
    disk.free_bytes = 8192
    for number in range(100):
        store.writer.append(message(b"%d" % number + b"y" * 300), 0)
    with pytest.raises(Refused, match="is full"):
        store.committer.commit()
    assert store.queue("T", 0).next_offset == 1
    store.crash()
    disk.free_bytes = None
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == [b"kept"]
    assert store.recovered.cut_bytes == 0
    store.crash()


@pytest.mark.parametrize("call", ["create", "write"])
@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_all_that_was_written_is_readable_if_a_full_disk_stops_a_new_segment(flush: str, call: str) -> None:
    """An answer may wait for the end of the segment before, and nothing else is written while the disk is full."""
    disk = FakeDisk()
    store = await open_on(disk, small_config(flush=flush))
    store.writer.append(message(b"x" * 3000), 0)
    store.committer.commit()
    disk.fail_next(call, errno.ENOSPC, after=int(call == "write"))  # the first write is that of the segment's end
    with contextlib.suppress(Refused):
        store.writer.append(message(b"x" * 3000), 0)
        store.committer.commit()
    assert "is full" in store.admission.refusal
    store.flusher.flush_now()
    assert store.written == store.segments.items[0].end
    assert store.readable == store.written
    store.crash()


async def test_appends_are_refused_above_the_limit_and_accepted_again_well_below_it() -> None:
    disk = FakeDisk()
    store = await open_on(disk, small_config(disk_full_ratio=0.9))
    for ratio, accepted in [(0.89, True), (0.91, False), (0.89, False), (0.87, True), (0.89, True)]:
        disk.used_ratio = ratio
        store.upkeep.retention.look()
        assert send(store, b"x") is accepted
    disk.used_ratio = 0.95
    store.upkeep.retention.look()
    with pytest.raises(Refused, match=r"95% full, above the limit of 90% \(store.disk_full_ratio\)"):
        store.writer.append(message(), 0)
    assert store.statistics().refused
    store.crash()


async def test_a_full_disk_heals_while_the_store_runs(autojump_clock: trio.testing.MockClock) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        disk.free_bytes = 0
        assert not send(store, b"x")
        await trio.sleep(30)
        assert not send(store, b"x")
        disk.free_bytes = 10**6
        await trio.sleep(2)
        assert send(store, b"y")
        nursery.cancel_scope.cancel()
    store.crash()


@pytest.mark.parametrize("number", range(12))
async def test_a_failed_fsync_stops_the_store_for_good(number: int) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    disk.fail_next("sync", errno.EIO, after=number)
    acknowledged: list[bytes] = []
    refused: list[bytes] = []

    async def publish() -> None:
        for n in range(40):
            body = b"%d" % n
            try:
                placed = store.writer.append(message(body), 0)
                store.committer.commit()
                await store.flusher.wait_flushed(placed.end)
            except (StoreFailed, Refused):
                refused.append(body)
            else:
                acknowledged.append(body)

    with pytest.RaisesGroup(StoreFailed):
        async with trio.open_nursery() as nursery:
            await nursery.start(store.upkeep.run)
            await publish()
    assert len(acknowledged) == number
    assert len(refused) == 40 - number
    assert drain(store, store.queue("T", 0)) == acknowledged
    with pytest.raises(StoreFailed, match="Input/output error"):
        store.writer.append(message(), 0)
    assert store.flusher.failed is not None
    await store.close()
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0))[:number] == acknowledged
    assert send(store, b"later")
    store.crash()


async def test_a_failed_write_stops_the_store_for_good() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    assert send(store, b"first")
    disk.fail_next("write", errno.EIO)
    store.writer.append(message(b"second"), 0)
    with pytest.raises(StoreFailed):
        store.committer.commit()
    with pytest.raises(StoreFailed):
        store.writer.append(message(b"third"), 0)
    assert drain(store, store.queue("T", 0)) == [b"first"]
    await store.close()
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == [b"first"]
    store.crash()


async def test_a_failing_index_write_is_a_failure_too(autojump_clock: trio.testing.MockClock) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    with pytest.RaisesGroup(StoreFailed):
        async with trio.open_nursery() as nursery:
            await nursery.start(store.upkeep.run)
            assert send(store, b"x")
            disk.fail_next("write", errno.EIO)
            await trio.sleep(60)
    assert store.flusher.failed is not None
    store.crash()


@pytest.mark.parametrize("number", range(8))
async def test_a_checkpoint_that_found_no_space_is_made_up_for(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.store.upkeep.checkpointer.INDEX_SECONDS", 0.0)
    disk = FakeDisk()
    config = small_config(index_slots=8192)  # several pages of slots
    store = await open_on(disk, config)
    kept = [b"%d" % n for n in range(20) if send(store, b"%d" % n)]
    disk.fail_next("write", errno.ENOSPC, after=number)
    with contextlib.suppress(OSError):
        await store.upkeep.checkpointer.checkpoint()
    disk.failures.clear()
    kept += [b"later"] * send(store, b"later")
    await store.upkeep.checkpointer.checkpoint()
    found = await open_on(disk.after_power_cut(Cut.LOST, random.Random(0)), config)
    assert drain(found, found.queue("T", 0)) == kept
    for body in kept:
        assert len(finish_now(found.lookup.query_keys("T", body, 10, 0, 2**62)).records) == 1
    found.crash()
    store.crash()


@pytest.mark.parametrize("number", range(2))  # of a queue's entries, of the key index's
async def test_a_checkpoint_whose_sync_failed_for_want_of_space_is_the_last(
    number: int, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("martlet.store.upkeep.checkpointer.INDEX_SECONDS", 0.0)
    disk = FakeDisk()
    store = await open_on(disk)
    assert send(store, b"x")
    with pytest.RaisesGroup(StoreFailed):
        async with trio.open_nursery() as nursery:
            disk.fail_next("sync", errno.ENOSPC, after=number)
            await nursery.start(store.upkeep.run)
            await trio.sleep(60)
            nursery.cancel_scope.cancel()
    await store.close()
    found = await open_on(disk.after_power_cut(Cut.LOST, random.Random(0)))
    assert drain(found, found.queue("T", 0)) == [b"x"]
    found.crash()


def refuses(store: Store) -> bool:
    with pytest.raises(Refused, match=r"is full.*file_reserved_hours"):
        store.writer.append(message(b"no"), 0)
    return bool(store.statistics().refused)


@pytest.mark.parametrize("free_blocks", range(4))
@pytest.mark.parametrize("stop", ["killed before a checkpoint", "killed", "orderly", "killed at the start"])
async def test_a_broker_that_died_on_a_full_disk_starts_and_is_read(stop: str, free_blocks: int) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    kept = [b"%d" % n for n in range(100) if send(store, b"%d" % n)]
    if stop != "killed before a checkpoint":
        await store.upkeep.checkpointer.checkpoint()
    if stop == "killed at the start":
        disk.files["/data/store/abort"].data.clear()
    if stop == "orderly":
        await store.close()
    else:
        store.crash()
    disk.free_bytes = free_blocks * 4096
    for _ in range(3):  # a second and third death there change nothing
        store = await open_on(disk)
        assert drain(store, store.queue("T", 0)) == kept
        assert len(finish_now(store.lookup.query_keys("T", b"7", 10, 0, 2**62)).records) == 1
        if store.statistics().refused:
            store.upkeep.retention.look()
            assert refuses(store)
        store.crash()
    disk.free_bytes = 10**9
    store = await open_on(disk)
    assert send(store, b"again")
    store.crash()
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == [*kept, b"again"]
    store.crash()


@pytest.mark.parametrize("cut", [Cut.KILLED, Cut.LOST])
@pytest.mark.parametrize("orderly", [False, True])
async def test_a_start_on_a_full_disk_heals_without_a_loss(
    orderly: bool, cut: Cut, autojump_clock: trio.testing.MockClock
) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    kept = [b"%d" % n for n in range(100) if send(store, b"%d" % n)]
    if orderly:
        await store.close()
    else:
        store.crash()
    disk.free_bytes = 0
    store = await open_on(disk)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await trio.sleep(30)
        assert refuses(store)
        assert drain(store, store.queue("T", 0)) == kept
        disk.free_bytes = 10**9
        await trio.sleep(5)
        assert send(store, b"healed")
        nursery.cancel_scope.cancel()
    found = await open_on(disk.after_power_cut(cut, random.Random(0)))
    assert drain(found, found.queue("T", 0)) == [*kept, b"healed"]
    assert found.statistics().recovered_records >= 1, "what was appended since the start was read again"
    found.crash()
    store.crash()


async def test_a_queue_without_files_cannot_be_rebuilt_on_a_full_disk() -> None:
    """The start fails, names the disk, and the next one with space loses nothing."""
    disk = FakeDisk()
    store = await open_on(disk)
    kept = [b"%d" % n for n in range(100) if send(store, b"%d" % n)]
    await store.close()
    for path in [path for path in disk.files if path.startswith("/data/store/consumequeue/")]:
        disk.unlink(path)
    disk.free_bytes = 0
    with pytest.raises(OSError, match="No space left on device: '/data/store/consumequeue/T/0/"):
        await open_on(disk)
    disk.free_bytes = None
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == kept
    store.crash()


@pytest.mark.parametrize("turns", range(12))
async def test_a_checkpoint_that_is_cancelled_hides_nothing_from_the_next(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("martlet.store.upkeep.checkpointer.JOURNAL_BATCH", 1)
    disk = FakeDisk()
    store = await open_on(disk)
    for number in range(40):
        store.writer.append(message(b"%d" % number), number % 8)
    store.committer.commit()
    store.flusher.flush_now()

    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def cancel() -> None:
            for _ in range(turns):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

        await store.upkeep.checkpointer.checkpoint()
    await store.close()
    store = await open_on(disk)
    assert [len(drain(store, store.queue("T", queue_id))) for queue_id in range(8)] == [5] * 8
    store.crash()


async def used(disk: FakeDisk) -> None:
    """Open, fill some segments, remove a topic, checkpoint, and stop in order."""
    store = await open_on(disk)
    try:
        for number in range(40):
            store.writer.append(message(b"%d" % number * 100, keys=str(number)), number % 3)
            store.committer.commit()
        store.flusher.flush_now()
        await store.upkeep.checkpointer.checkpoint()
        store.data_directory.write_file("config/topics.json", b"{}")
        store.deletions.delete_topic("T")
        store.upkeep.retention.look()
        await store.close()
    finally:
        store.crash()


@pytest.mark.parametrize(
    "call", ["create", "read", "write", "truncate", "sync", "sync_directory", "rename", "unlink", "make_directory"]
)
async def test_every_error_of_the_disk_names_what_it_hit(call: str) -> None:
    before = FakeDisk()
    await used(before)
    told: list[str] = []
    for number in range(200):
        disk = before.after_power_cut(Cut.KILLED, random.Random(0))
        disk.fail_next(call, errno.EIO, after=number)
        try:
            await used(disk)
        except (OSError, StoreFailed) as error:
            told.append(str(error))
        if disk.failures:
            break
    assert told
    assert [text for text in told if str(DIRECTORY) not in text] == []


async def test_a_stop_on_a_full_disk_is_recorded_as_not_orderly() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    assert send(store, b"x")
    disk.free_bytes = 0
    assert not await store.close()
    disk.free_bytes = None
    store = await open_on(disk)
    assert drain(store, store.queue("T", 0)) == [b"x"]
    assert await store.close()


async def test_a_stop_after_a_failed_write_is_recorded_as_not_orderly() -> None:
    disk = FakeDisk()
    store = await open_on(disk, small_config(flush="async"))
    store.writer.append(message("written, and not durable"), 0)
    store.committer.commit()
    disk.fail_next("write", errno.EIO)
    store.writer.append(message("lost"), 0)
    with pytest.raises(StoreFailed):
        store.committer.commit()
    assert not await store.close()


@pytest.mark.parametrize("full", [False, True])
async def test_a_broker_reports_whether_everything_is_on_disk(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint, stop = Checkpointer.write_checkpoint, trio.Event()

    def write(checkpointer: Checkpointer, *, orderly: bool = False) -> None:
        if orderly and full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_checkpoint(checkpointer, orderly=orderly)

    monkeypatch.setattr(Checkpointer, "write_checkpoint", write)
    settings = Config(broker=BrokerConfig(data=str(DIRECTORY)), store=small_config(), plugins=PluginsConfig(enabled=[]))
    assert await run(settings, ready=lambda addresses: stop.set(), disk=FakeDisk(), stop=stop) is not full


def without_plugins() -> Config:
    return Config(broker=BrokerConfig(data=str(DIRECTORY)), store=small_config(), plugins=PluginsConfig(enabled=[]))


async def test_a_broker_starts_on_a_full_disk_with_a_table_to_write(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    assert send(store, b"x")  # of a topic that no table lists
    assert await store.close()
    disk.free_bytes = 0
    ready, stop = trio.Event(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(run, without_plugins(), ready=lambda addresses: ready.set(), disk=disk, stop=stop))
        await ready.wait()
        assert "config/topics.json cannot be written; [Errno 28]" in caplog.text
        assert "writes are refused: the disk of " in caplog.text
        disk.free_bytes = None
        await trio.sleep(10)
        assert b'"T"' in (read_file(disk, f"{DIRECTORY}/config/topics.json") or b"")
        stop.set()


async def test_a_stop_on_a_full_disk_fails_and_says_which_changes_are_lost() -> None:
    disk, stop = FakeDisk(), trio.Event()
    store = await open_on(disk)
    assert send(store, b"x")
    assert await store.close()
    disk.free_bytes = 0
    with pytest.raises(
        StoreError, match=r"the last changes are lost: config/topics\.json cannot be written; \[Errno 28"
    ):
        await run(without_plugins(), ready=lambda addresses: stop.set(), disk=disk, stop=stop)
    disk.free_bytes = None
    assert await (await open_on(disk)).close(), "the directory was released"


async def test_a_stop_on_a_full_disk_without_changes_succeeds() -> None:
    disk, stop = FakeDisk(), trio.Event()
    assert await run(without_plugins(), ready=lambda addresses: stop.set(), disk=disk, stop=stop)
    stop = trio.Event()

    def fill_up(addresses: dict[str, str]) -> None:
        disk.free_bytes = 0
        stop.set()

    assert await run(without_plugins(), ready=fill_up, disk=disk, stop=stop)


async def test_a_full_disk_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    store = await open_on(disk, small_config(disk_full_ratio=0.9))
    for ratio in (0.91, 0.95):
        disk.used_ratio = ratio
        store.upkeep.retention.look()
    assert caplog.text.count("writes are refused: the disk of ") == 1
    disk.used_ratio = 0.5
    store.upkeep.retention.look()
    disk.free_bytes = 0
    for _ in range(2):
        assert not send(store, b"x")
    assert caplog.text.count("writes are refused: the disk of ") == 2
    store.crash()


async def test_what_is_written_during_a_flush_is_not_durable_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    first = store.writer.append(message(b"first"), 0)
    store.committer.commit()
    sync = FakeDisk.sync

    def write_meanwhile(disk: FakeDisk, fd: int) -> None:
        sync(disk, fd)
        store.writer.append(message(b"second"), 0)
        store.committer.commit()

    with monkeypatch.context() as patch:
        patch.setattr(FakeDisk, "sync", write_meanwhile)
        await store.flusher.flush()
    assert store.durable == first.end < store.written
    assert drain(store, store.queue("T", 0)) == [b"first"]
    store.crash()
