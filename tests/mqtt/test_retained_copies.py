"""Retention appends retained messages again before it removes their segments: the copies never replace newer ones."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import ENOSPC
from pathlib import Path
from random import Random

import pytest
from tests.mqtt.retained_talk import append, applied, come_back, kept, roll
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker

from martlet.errors import Refused
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config

DATA = Path("/data")
SNAPSHOT = "/data/config/mqtt-retained.snapshot"
AFTER = ("in the same run", "after a restart", "after a replay", "after kill -9")


@asynccontextmanager
async def broker(disk: FakeDisk, flush: str = "sync") -> AsyncIterator[MqttBroker]:
    store = small_config(flush=flush, segment_bytes=1 << 15, page_bytes=1 << 12, cache_bytes=1 << 16)
    async with mqtt_broker(DATA, store=store, disk=disk) as mqtt:
        yield mqtt


def without_snapshot(disk: FakeDisk) -> FakeDisk:
    for path in [path for path in disk.files if path.startswith(SNAPSHOT)]:
        disk.unlink(path)
    return disk


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("newer", [b"new", b""])
@pytest.mark.parametrize("state", ["appended", "written", "readable"])
async def test_a_copy_does_not_replace_a_newer_message_that_is_not_applied(
    state: str, newer: bytes, after: str
) -> None:
    expected = {"a": newer} if newer else {}
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        append(mqtt, "a", b"old")
        await applied(mqtt)
        projections, store = mqtt.broker.projections, mqtt.broker.store
        (driven,) = [each for each in projections._driven if each.projection is mqtt.context.retained]
        append(mqtt, "a", newer)
        if state != "appended":
            store.committer.commit()
        if state == "readable":
            driven.order.busy = True  # as while it reads from disk
            await mqtt.settle()
        roll(mqtt, store.readable)
        driven.order.busy = False
        projections._work.set()
        await applied(mqtt)
        if after == "in the same run":
            assert await kept(mqtt) == expected
        found = disk.after_power_cut(Cut.KILLED, Random(1))
    if after != "in the same run":
        disk = found if after == "after kill -9" else disk
        async with broker(disk if after != "after a replay" else without_snapshot(disk)) as mqtt:
            assert await kept(mqtt) == expected


@pytest.mark.parametrize("after", AFTER)
async def test_a_copy_is_no_new_message_for_a_session_that_is_older(after: str) -> None:
    """Its subscription brings what was published while the client was away, and the rest comes as retained messages."""
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        append(mqtt, "a", b"kept")
        await applied(mqtt)
        talk = await mqtt.connect("c", expiry_s=1000)
        await talk.subscribe("a", qos=1)
        await talk.acknowledge((await talk.messages(1))[0])
        await talk.disconnect()
        await copied(mqtt)
        if after == "in the same run":
            assert await come_back(mqtt) == [(b"kept", True)]
        found = disk.after_power_cut(Cut.KILLED, Random(1))
    if after != "in the same run":
        disk = found if after == "after kill -9" else disk
        async with broker(disk if after != "after a replay" else without_snapshot(disk)) as mqtt:
            assert await come_back(mqtt) == [(b"kept", True)]


async def copied(mqtt: MqttBroker) -> None:
    """Have retention append all retained messages again, twice."""
    for _ in range(2):
        before = mqtt.context.retained.floor()
        roll(mqtt, mqtt.broker.store.appended)
        await applied(mqtt)
        assert mqtt.context.retained.floor() > before


@pytest.mark.parametrize("newer", [b"new", b""])
@pytest.mark.parametrize("fails", ["before", "during"])
async def test_a_message_whose_newer_one_is_not_stored_is_copied(fails: str, newer: bytes) -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        store, retained = mqtt.broker.store, mqtt.context.retained
        append(mqtt, "a", b"old")
        await applied(mqtt)
        before, end = retained.position("a"), store.appended
        append(mqtt, "a", newer)
        disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            store.committer.commit() if fails == "before" else roll(mqtt, end)
        if fails == "during":
            with pytest.raises(Refused):  # the client must not get its answer
                store.committer.commit()
        store.upkeep.retention.look()
        roll(mqtt, end)
        await applied(mqtt)
        assert retained.position("a") > before
        assert await kept(mqtt) == {"a": b"old"}
