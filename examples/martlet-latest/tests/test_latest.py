"""The newest message of each key is known after a restart, and after retention removed its record."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.message import Message, encode_properties
from martlet.state import Projection
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import ManualClock, small_config
from martlet_latest import Latest, LatestConfig, LatestPlugin

SNAPSHOT = "/data/config/latest.snapshot"
STORE = small_config(flush="async", flush_interval_ms=10, disk_clean_ratio=0.9, retention_interval_ms=1000)


@asynccontextmanager
async def broker_on(disk: FakeDisk) -> AsyncIterator[Broker]:
    plugin = LatestPlugin(LatestConfig(["prices"]))

    def projections(broker: Broker) -> Sequence[Projection]:
        broker.capabilities = dict(plugin.martlet_capabilities(broker))  # the broker calls this hook first
        return plugin.martlet_projections(broker)

    async with serving(Path("/data"), store=STORE, disk=disk, clock=ManualClock(), projections=projections) as running:
        running.broker.topics.ensure("prices", 2)
        yield running.broker


def publish(broker: Broker, key: str, body: bytes) -> None:
    broker.publish(Message("prices", body, encode_properties({"TAGS": key})))
    broker.store.committer.commit()


def latest(broker: Broker, key: str) -> bytes | None:
    found = broker.capability(Latest)
    assert found is not None
    record = found.read("prices", key)
    return None if record is None else bytes(record.body)


async def test_the_newest_message_of_a_key_is_found() -> None:
    async with broker_on(FakeDisk()) as broker:
        publish(broker, "gold", b"1")
        publish(broker, "gold", b"2")
        publish(broker, "tin", b"3")
        assert [latest(broker, key) for key in ("gold", "tin", "lead")] == [b"2", b"3", None]
        publish(broker, "gold", b"")
        assert latest(broker, "gold") is None


@pytest.mark.parametrize("keep_snapshot", [True, False])
async def test_it_is_found_after_a_restart(keep_snapshot: bool) -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        publish(broker, "gold", b"1")
        publish(broker, "tin", b"2")
        publish(broker, "tin", b"")
    assert SNAPSHOT in disk.files
    if not keep_snapshot:
        disk.unlink(SNAPSHOT)
    async with broker_on(disk) as broker:
        assert [latest(broker, key) for key in ("gold", "tin")] == [b"1", None]


async def test_it_outlives_retention(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        publish(broker, "gold", b"precious")
        for number in range(60):
            publish(broker, "tin", b"%d" % number * 50)
        await trio.sleep(1)
        await broker.store.upkeep.checkpointer.checkpoint()
        disk.used_ratio = 0.95
        await trio.sleep(5)
        assert broker.store.first_position > 0
        disk.used_ratio = 0.1
        await wait_all_tasks_blocked()
        assert latest(broker, "gold") == b"precious"
    disk.unlink(SNAPSHOT)
    async with broker_on(disk) as broker:
        assert latest(broker, "gold") == b"precious"


async def with_old_price(broker: Broker) -> Latest:
    """Publish an old price of gold, and return the projection, which has applied it."""
    publish(broker, "gold", b"old")
    await wait_all_tasks_blocked()
    projection = broker.capability(Latest)
    assert projection is not None
    return projection


@pytest.mark.parametrize("after", ["after a restart", "after a replay"])
@pytest.mark.parametrize("newer", [b"new", b""])
async def test_a_copy_does_not_replace_a_newer_message(newer: bytes, after: str) -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        projection = await with_old_price(broker)
        broker.publish(Message("prices", newer, encode_properties({"TAGS": "gold"})))  # in the other queue
        steps = projection.roll(0, broker.store.written)
        next(steps)  # the newer message is not applied yet
        broker.store.committer.commit()
        await wait_all_tasks_blocked()
        for _ in steps:
            pass
        broker.store.committer.commit()
        await wait_all_tasks_blocked()
        assert latest(broker, "gold") == (newer or None)
    if after == "after a replay":
        disk.unlink(SNAPSHOT)
    async with broker_on(disk) as broker:
        assert latest(broker, "gold") == (newer or None)


async def test_a_message_without_a_newer_one_is_copied_at_once() -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        projection = await with_old_price(broker)
        before = broker.store.written
        for _ in projection.roll(0, before):
            pass
        broker.store.committer.commit()
        await wait_all_tasks_blocked()
        assert projection.floor() >= before
        assert latest(broker, "gold") == b"old"
