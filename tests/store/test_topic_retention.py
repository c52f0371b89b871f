"""A topic with its own retention: what has expired reaches nobody again, whatever happens to files and clocks.

The product of (kind of stop) x (damaged derived file) x (kind of reader), then clocks, and what must not be lost.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import cast

import pytest
import trio
from msgspec.structs import replace
from tests.store.test_derived_files import DAMAGES, set_content
from trio.testing import MockClock

from martlet.app import saving
from martlet.app.config import Config, PluginsConfig
from martlet.app.startup import build, run
from martlet.offline.directory import verify
from martlet.records.codec import decode_records
from martlet.runtime.stats import Stats
from martlet.runtime.steps import finish_now
from martlet.settings import BrokerConfig
from martlet.store import Queue, ReadStatus, Store
from martlet.store.queues.order import Order
from martlet.store.queues.queue_journal import EXPIRY, HEAD, KIND_EXPIRY, encode_queue, replay
from martlet.store.queues.queues import QueueFiles, Queues
from martlet.store.upkeep.topic_retention import QUEUES_A_TURN
from martlet.tables.topics import RESERVE_TIME
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, bodies, drain, message, small_config

HOUR_MS = 3_600_000
ROOT = "/data/store"
CONFIG = small_config(segment_bytes=8192, delete_when="04")
QUEUES = (0, 1)


async def opened(disk: FakeDisk, clock: ManualClock, hours: int = 2) -> Store:
    """Open the store of *disk*, in which topic T keeps messages for *hours*."""
    store = await Store.open(Path(ROOT), CONFIG, clock, disk)
    store.writer.store_host = HOST
    store.upkeep.topic_retention.set_hours("T", hours, loaded=True)
    return store


async def sweep(store: Store) -> None:
    """Let messages expire, while the flusher runs."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.flusher.run, 0.0)
        await store.upkeep.topic_retention.sweep()
        nursery.cancel_scope.cancel()


def send(store: Store, clock: ManualClock, *names: str, hours: float = 0, topics: str = "TU") -> None:
    """Store a message of each name in both queues of each topic, and let *hours* pass."""
    for topic in topics:
        for queue_id in QUEUES:
            for name in names:
                store.writer.append(message(name, topic, "tag", f"key-{name}", f"{topic}{queue_id}{name}"), queue_id)
    store.committer.commit()
    store.flusher.flush_now()
    clock.ms += int(hours * HOUR_MS)


# What each kind of reader finds of the messages in a queue of T.


def by_reading(store: Store, queue: Queue) -> set[str]:
    return {body.decode() for body in drain(store, queue)}


def by_offset(store: Store, queue: Queue) -> set[str]:
    found: set[str] = set()
    for offset in range(queue.next_offset):
        result = store.readers.read(queue, offset, 1, 1 << 20)
        if result.next_offset == offset + 1 and result.status is ReadStatus.FOUND:
            found |= {body.decode() for body in bodies(result.pieces)}
        else:
            assert (result.status, result.next_offset) == (ReadStatus.TOO_SMALL, queue.first_offset)
    return found


def by_time(store: Store, queue: Queue) -> set[str]:
    store.upkeep.repairs.repair_now(queue)  # it waits for damaged blocks
    first = finish_now(store.lookup.offset_by_time(queue, 0))
    assert finish_now(store.lookup.earliest_store_ms(queue)) == finish_now(store.lookup.store_ms_at(queue, first)) > 0
    assert first == 0 or finish_now(store.lookup.store_ms_at(queue, first - 1)) == -1
    found: set[str] = set()
    while first < queue.next_offset:
        result = store.readers.read(queue, first, 100, 1 << 20)
        found |= {body.decode() for body in bodies(result.pieces)}
        first = result.next_offset
    return found


def by_key(store: Store, queue: Queue) -> set[str]:
    assert store.keys is not None
    while store.keys.drain(1000):
        pass
    found = finish_now(store.lookup.query_keys(queue.topic, b"key-new", 64, 0, 2**62)).records
    found += finish_now(store.lookup.query_keys(queue.topic, b"key-old", 64, 0, 2**62)).records
    return {record.body.decode() for data in found for record in decode_records(data)}


READERS: dict[str, Callable[[Store, Queue], set[str]]] = {
    "in order": by_reading,
    "by offset": by_offset,
    "by time": by_time,
    "by key": by_key,
}
TARGETS = ("consumequeue/", "consumequeue/T/0/", "queues.", "checkpoint", "index/", "abort")
STOPS = ("orderly", "killed", "killed after a checkpoint", "power cut")


async def stopped(stop: str, clock: ManualClock) -> tuple[FakeDisk, FakeDisk]:
    """A disk with "old" expired and "new" not after *stop*, and an older copy of it."""
    disk = FakeDisk()
    store = await opened(disk, clock)
    send(store, clock, *["old"] * 30, hours=1)
    await store.upkeep.checkpointer.checkpoint()
    older = disk.after_power_cut(Cut.KILLED, Random(0))
    send(store, clock, *["old"] * 3, hours=3)
    send(store, clock, "new", "new")
    await sweep(store)
    assert store.queue("T", 0).first_offset == 33
    if stop == "killed after a checkpoint":
        await store.upkeep.checkpointer.checkpoint()
    if stop == "orderly":
        await store.close()
    else:
        store.crash()
    return disk.after_power_cut(Cut.TORN if stop == "power cut" else Cut.KILLED, Random(1)), older


def spoil(disk: FakeDisk, older: FakeDisk, target: str, damage: str) -> None:
    full, random = f"{ROOT}/{target}", Random(f"{target}{damage}")
    for path in sorted(path for path in disk.files if path.startswith(full)):
        data = bytearray(disk.files[path].data)
        if damage == "removed":
            disk.unlink(path)
            continue
        if damage == "stale":
            data = bytearray(older.files[path].data) if path in older.files else data
        elif damage == "flipped" and data:
            data[random.randrange(len(data.rstrip(b"\x00")) or 1)] ^= 1 << random.randrange(8)
        elif damage == "zeroed":
            data = bytearray(len(data))
        elif damage == "truncated":
            del data[random.randrange(len(data) + 1) :]
        elif damage == "emptied":
            data.clear()
        set_content(disk, path, bytes(data))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("stop", STOPS)
async def test_what_has_expired_stays_so_whatever_is_damaged(stop: str, target: str, reader: str) -> None:
    """Before the first sweep, and with a clock that says nothing is old."""
    for damage in DAMAGES:
        clock = ManualClock()
        disk, older = await stopped(stop, clock)
        spoil(disk, older, target, damage)
        clock.ms -= 1000 * HOUR_MS
        store = await opened(disk, clock)
        queue = store.queue("T", 0)
        if (target, damage, reader) == ("index/", "flipped", "by key"):
            store.crash()
            continue  # the broker notices it and rebuilds the index, as for all topics
        assert READERS[reader](store, queue) == {"new"}, damage
        assert (queue.first_offset, queue.next_offset) == (33, 35), damage
        assert READERS[reader](store, store.queue("U", 0)) == {"old", "new"}, damage
        assert store.readers.damaged_records == 0
        store.crash()


@pytest.mark.parametrize("stop", STOPS)
async def test_a_store_with_expired_messages_is_verified_without_findings(stop: str) -> None:
    disk, _ = await stopped(stop, ManualClock())
    found = await verify(ROOT, Config(store=CONFIG), disk)
    assert [each for each in found.findings if each.kind not in ("start", "change")] == []
    assert not any("removed segments" in each.text for each in found.findings)


async def test_a_rebuild_that_begins_in_the_middle_of_the_log_keeps_what_has_expired() -> None:
    clock, disk = ManualClock(), FakeDisk()
    store = await opened(disk, clock)
    for _ in range(8):
        send(store, clock, *["old"] * 20)
    clock.ms += 3 * HOUR_MS
    send(store, clock, "new")
    await sweep(store)
    await store.upkeep.checkpointer.checkpoint()
    first = store.queue("T", 0).first_offset
    store.segments.remove_first()
    store.upkeep.retention._update_after_removal()
    assert 0 < store.queue("T", 0).stored_from < store.queue("T", 0).first_offset == first
    await store.close()
    for target in ("checkpoint", "consumequeue/T/"):
        spoil(disk, disk, target, "removed")
        again = await opened(disk, clock)
        assert drain(again, again.queue("T", 0)) == [b"new"]
        assert again.queue("T", 0).first_offset == first
        await again.close()


async def test_where_damage_lost_what_had_expired_its_offsets_are_not_given_out_again() -> None:
    clock = ManualClock()
    disk, _ = await stopped("killed", clock)
    store = await opened(disk, clock)
    await store.close()
    spoil(disk, disk, "checkpoint", "removed")
    path = f"{ROOT}/commitlog/{0:020}"
    data = bytearray(disk.files[path].data)
    data[: len(data) // 2] = bytes(len(data) // 2)
    set_content(disk, path, bytes(data))
    store = await opened(disk, clock)
    queue = store.queue("T", 0)
    assert (queue.first_offset, queue.next_offset) == (33, 35)
    assert drain(store, queue) == [b"new", b"new"]
    store.crash()


async def test_new_messages_are_read_where_damage_lost_all_that_had_expired() -> None:
    clock, disk = ManualClock(), FakeDisk()
    store = await opened(disk, clock)
    send(store, clock, *["old"] * 30, hours=3)
    noted = store.written
    await sweep(store)
    await store.close()
    spoil(disk, disk, "checkpoint", "removed")
    for start in range(0, noted, 8192):
        path = f"{ROOT}/commitlog/{start:020}"
        data = bytearray(disk.files[path].data)
        count = min(noted - start, len(data))
        data[:count] = bytes(count)
        set_content(disk, path, bytes(data))
    for _ in range(2):
        store = await opened(disk, clock)
        queue = store.queue("T", 0)
        assert queue.first_offset == 30
        send(store, clock, "new")
        assert drain(store, queue)[-1:] == [b"new"]
        await store.close()
    assert (queue.first_offset, queue.next_offset) == (30, 32)


def test_a_topic_that_rocketmq_created_again_begins_with_its_first_message() -> None:
    """RocketMQ leaves no note of a deletion: two records with lower offsets say that there was one."""
    queues = Queues(cast(QueueFiles, None))
    order, queue = Order(queues, lambda position: None), queues.get("T", 0)
    order.foreign = True
    queue.begin_at(12)
    queue.expire_to(10)
    for offset in range(3):
        order.take(queue, offset, 1000 + 100 * offset, 100, 0)
    assert (queue.first_offset, queue.next_offset) == (0, 3)


def test_the_journal_of_queues_has_the_newest_offset_before_which_messages_have_expired() -> None:
    queue, other = Queue("T", 1), Queue("T", 2)
    entries = [encode_queue(other, 0, whole=True)]
    for expired_to in (5, 9, 0):
        queue.expired_to = expired_to
        entries.append(encode_queue(queue, 0, whole=False))
        states = replay(b"".join(entries))["T"]
        assert (states[1].expired_to, states[2].expired_to) == (expired_to, 0)
    lost = HEAD.pack(KIND_EXPIRY, 1) + b"T" + EXPIRY.pack(7, 1)
    for damaged in (b"".join([*entries, lost]), lost, (entries[1])[:-1]):
        with pytest.raises(ValueError, match="the journal of queues"):
            replay(damaged)


async def test_a_topic_that_is_created_again_begins_with_its_first_message() -> None:
    clock = ManualClock()
    disk, _ = await stopped("killed", clock)
    store = await opened(disk, clock)
    store.deletions.delete_topic("T")
    send(store, clock, "again")
    await store.close()
    for damaged in ("", "checkpoint"):
        if damaged:
            spoil(disk, disk, damaged, "removed")
        store = await opened(disk, clock)
        assert drain(store, store.queue("T", 0)) == [b"again"]
        assert store.queue("T", 0).first_offset == 0
        await store.close()


async def test_messages_expire_within_a_minute_while_the_store_runs(mock_clock: MockClock) -> None:
    mock_clock.autojump_threshold = 0
    clock = ManualClock()
    store = await opened(FakeDisk(), clock, 24)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        for name in ("1", "2", "3"):
            send(store, clock, name, hours=10)
            await trio.sleep(61)
        assert drain(store, store.queue("T", 0)) == [b"2", b"3"]
        assert drain(store, store.queue("U", 0)) == [b"1", b"2", b"3"]
        store.upkeep.topic_retention.set_hours("T", 5)
        await trio.testing.wait_all_tasks_blocked()
        assert drain(store, store.queue("T", 0)) == []
        statistics = store.statistics()
        assert (statistics.expired_messages, statistics.topics_with_retention) == (6, 1)
        store.upkeep.topic_retention.set_hours("T", 0)
        send(store, clock, "4", hours=100)
        await trio.sleep(1000)
        assert drain(store, store.queue("T", 0)) == [b"4"]
        nursery.cancel_scope.cancel()
    store.crash()


async def test_a_retention_set_after_another_sweep_takes_effect(mock_clock: MockClock) -> None:
    """As at a start without one: that sweeps once while the store waits for the first."""
    mock_clock.autojump_threshold = 0
    clock = ManualClock()
    store = await opened(FakeDisk(), clock, 0)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        await trio.testing.wait_all_tasks_blocked()
        await store.upkeep.topic_retention.sweep()
        send(store, clock, "1", hours=10)
        store.upkeep.topic_retention.set_hours("T", 5)
        await trio.sleep(61)
        assert drain(store, store.queue("T", 0)) == []
        nursery.cancel_scope.cancel()
    store.crash()


async def test_no_topic_with_a_retention_costs_no_sweep_and_no_note() -> None:
    clock = ManualClock()
    store = await opened(FakeDisk(), clock, 0)
    send(store, clock, "1", hours=1000)
    before = store.appended
    await sweep(store)
    assert (store.appended, drain(store, store.queue("T", 0))) == (before, [b"1"])
    store.upkeep.topic_retention.set_hours("T", 2000)
    await sweep(store)
    assert store.appended == before, "nor does one that has nothing to expire"
    store.crash()


async def test_a_sweep_of_many_queues_gives_others_their_turns() -> None:
    clock, count = ManualClock(), 4 * QUEUES_A_TURN
    store = await Store.open(Path("/many"), replace(CONFIG, segment_bytes=1 << 22, flush="async"), clock, FakeDisk())
    store.writer.store_host = HOST
    store.upkeep.topic_retention.set_hours("T", 2)
    for queue_id in range(count):
        store.writer.append(message("old", "T"), queue_id)
    store.committer.commit()
    store.flusher.flush_now()
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    clock.ms += 3 * HOUR_MS
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        await sweep(store)
        assert turns > count  # to look into the log
        assert store.statistics().expired_messages == count
        turns = 0
        await sweep(store)
        assert 4 <= turns < 100
        nursery.cancel_scope.cancel()
    store.crash()


# ---- the clock


async def test_a_clock_that_was_set_back_makes_nothing_expire() -> None:
    clock = ManualClock()
    store = await opened(FakeDisk(), clock)
    send(store, clock, "1", hours=-5000)
    await sweep(store)
    send(store, clock, "2", hours=5000)
    await sweep(store)
    assert drain(store, store.queue("T", 0)) == [b"1", b"2"]
    for left in ([b"2", b"3"], [b"3"]):  # the age of the second is that of the third
        clock.ms += 3 * HOUR_MS
        send(store, clock, "3")
        await sweep(store)
        assert drain(store, store.queue("T", 0)) == left
    store.crash()


@pytest.mark.parametrize("restarts", [0, 3])
async def test_a_clock_that_jumped_ahead_makes_nothing_expire_at_once(
    restarts: int, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock, disk = ManualClock(), FakeDisk()
    store = await opened(disk, clock)
    names = [f"{number}" for number in range(40)]
    send(store, clock, *names, hours=1)
    right_ms = clock.ms
    clock.ms += 400 * 24 * HOUR_MS
    for _ in range(restarts):
        await store.close()
        store = await opened(disk, clock)
        await sweep(store)
    for _ in range(100):
        await sweep(store)
    assert len(drain(store, store.queue("T", 0))) == 40
    assert store.statistics().overdue_topics == 1
    said = [each.getMessage() for each in caplog.records if "past its reserve.time" in each.getMessage()]
    assert len(said) == max(restarts, 1)
    assert said[0].startswith("messages of topic T are 400.0 days past its reserve.time: the clock jumped")
    clock.ms = right_ms
    await sweep(store)
    assert (len(drain(store, store.queue("T", 0))), store.statistics().overdue_topics) == (40, 0)
    store.crash()


async def test_what_is_overdue_after_a_long_stop_expires_as_slowly_as_it_came(mock_clock: MockClock) -> None:
    clock = ManualClock()
    store = await opened(FakeDisk(), clock)
    send(store, clock, *[f"{number}" for number in range(40)], hours=100)
    await sweep(store)
    left = [40]
    for _ in range(8):
        mock_clock.jump(900)
        clock.ms += 900_000
        await sweep(store)
        left.append(len(drain(store, store.queue("T", 0))))
    assert left == [40, 35, 30, 25, 20, 15, 10, 5, 0]
    assert store.statistics().overdue_topics == 0 or left[-1] == 0
    store.crash()


async def test_a_retention_that_was_just_set_applies_at_once_to_all_that_is_old() -> None:
    clock = ManualClock()
    store = await opened(FakeDisk(), clock, 0)
    send(store, clock, "old", hours=70)
    send(store, clock, "new", hours=1)
    store.upkeep.topic_retention.set_hours("T", 2)
    await sweep(store)
    assert drain(store, store.queue("T", 0)) == [b"new"]
    store.crash()


async def test_messages_with_impossible_times_expire_with_those_after_them() -> None:
    """The clock was wrong for a while, in the far past and in the future; the messages around it are as old as ever."""
    clock = ManualClock()
    store = await opened(FakeDisk(), clock, 24)
    right_ms = clock.ms
    queue = store.queue("T", 0)
    stored = {0: (3, 0), 10: (50, -(10**12)), 20: (3, 0), 30: (50, 10**11), 40: (3, 0)}
    for hours, first in ((0, 0), (10, 0), (20, 0), (23, 0), (25, 3), (30, 3), (35, 3), (40, 3), (45, 56), (65, 109)):
        clock.ms = right_ms + hours * HOUR_MS
        await sweep(store)
        assert queue.first_offset == first, hours
        count, wrong_ms = stored.get(hours, (0, 0))
        clock.ms += wrong_ms
        send(store, clock, *[f"{hours}"] * count)
    store.crash()


# ---- what must not be lost


async def test_the_records_of_expired_messages_stay_readable_by_position() -> None:
    """A retained message, a pending timer or a half message may be one of them."""
    clock = ManualClock()
    store = await opened(FakeDisk(), clock)
    placed = store.writer.append(message("old", "T", keys="k"), 0)
    send(store, clock, "later", hours=3)
    await sweep(store)
    data = store.lookup.known_record(placed.position)
    assert data is not None
    assert store.upkeep.topic_retention.has_expired(data)
    assert await store.lookup.record_far(placed.position) is None, "but clients do not find it"
    assert store.upkeep.topic_retention.removed_to("T") > placed.end
    assert store.upkeep.topic_retention.removed_to("U") == 0
    store.crash()


async def test_on_a_full_disk_messages_expire_and_are_noted_once_there_is_space() -> None:
    clock, disk = ManualClock(), FakeDisk()
    store = await opened(disk, clock)
    send(store, clock, "old", hours=3)
    small = store.writer.append(message(b"", "V"), 0)
    store.writer.append(message(b"x" * (4096 - 20 - small.end - (small.end - small.position)), "V"), 0)
    store.committer.commit()  # the next record needs a block
    store.flusher.flush_now()
    disk.free_bytes = 0
    await sweep(store)
    queue = store.queue("T", 0)
    assert (drain(store, queue), queue.first_offset) == ([], 1)
    before = store.appended
    disk.free_bytes = None
    await sweep(store)
    assert store.appended > before
    store.crash()
    clock.ms -= 1000 * HOUR_MS
    again = await opened(disk.after_power_cut(Cut.KILLED, Random(0)), clock)
    assert drain(again, again.queue("T", 0)) == []
    again.crash()


async def test_what_expires_is_logged_now_and_then(mock_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "martlet.store")
    clock = ManualClock()
    store = await opened(FakeDisk(), clock)
    for _ in range(4):
        send(store, clock, "1", hours=3)
        await sweep(store)
    mock_clock.jump(3601)
    send(store, clock, "1", hours=3)
    await sweep(store)
    said = [each.getMessage() for each in caplog.records if "have expired" in each.getMessage()]
    assert said == [f"{count} messages of topic T are older than 2 hours and have expired" for count in (2, 8)]
    store.crash()


async def test_a_retention_beyond_that_of_the_log_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    store = await opened(FakeDisk(), ManualClock(), 100)
    assert "topic T keeps messages for 72 hours, not for the 100 of its reserve.time" in caplog.text
    store.crash()


# ---- starts of a broker


async def saved_broker(disk: FakeDisk, clock: ManualClock) -> Config:
    """Stop a broker with a topic T of two hours, and a message in it that is one hour old; return its configuration."""
    config = Config(broker=BrokerConfig(data=ROOT), store=CONFIG, plugins=PluginsConfig([], []))
    store = await Store.open(Path(ROOT), CONFIG, clock, disk)
    store.writer.store_host = HOST
    broker = build(config, store, clock, Stats())
    broker.topics.update("T", 2, 2, attributes={RESERVE_TIME: "2"})
    send(store, clock, "old", hours=1)
    saving.save(broker)
    await store.close()
    return config


@pytest.mark.parametrize("hours", [0, 2])
async def test_what_expired_while_the_broker_was_stopped_is_gone_before_the_ports_open(hours: int) -> None:
    clock, disk = ManualClock(), FakeDisk()
    config = await saved_broker(disk, clock)
    clock.ms += hours * HOUR_MS
    stop, at_ready = trio.Event(), list[FakeDisk]()

    def ready(addresses: dict[str, str]) -> None:
        at_ready.append(disk.after_power_cut(Cut.LOST, Random(0)))
        stop.set()

    assert await run(config, ready=ready, clock=clock, disk=disk, stop=stop)
    for each in (disk, *at_ready):
        store = await Store.open(Path(ROOT), CONFIG, ManualClock(), each)
        assert (drain(store, store.queue("T", 0)), drain(store, store.queue("U", 0))) == ([b"old"][hours:], [b"old"])
        store.crash()


async def test_what_rocketmq_served_again_expires_again() -> None:
    """It keeps the attribute of a topic and knows none of our marks; here, it is as if the store were RocketMQ's."""
    clock, disk = ManualClock(), FakeDisk()
    config = await saved_broker(disk, clock)
    clock.ms += 2 * HOUR_MS
    for path in [path for path in disk.files if "/queues." in path or path.endswith(("/checkpoint", "/abort"))]:
        disk.unlink(path)
    store = await Store.open(Path(ROOT), CONFIG, clock, disk)
    broker = build(config, store, clock, Stats())
    topic = broker.topics.get("T")
    assert topic is not None
    assert topic.attributes == {RESERVE_TIME: "2"}
    assert drain(store, store.queue("T", 0)) == [b"old"]
    await sweep(store)
    assert drain(store, store.queue("T", 0)) == []
    store.crash()
