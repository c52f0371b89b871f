"""What clients missed that came back after retention had removed messages: counted, listed and logged."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from tests.mqtt.retained_talk import append, applied, remove_old_segments
from tests.stored import records_of
from tests.wire_clients.mqtt import MqttBroker, MqttClient, leave, mqtt_broker

from martlet.store import Queue
from martlet.store.queues.queues import BlockDamaged
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.admin.control import PREFIX
from martlet_mqtt.config import MqttConfig

DATA = Path("/data")
STORE = small_config(
    flush="async", segment_bytes=1 << 14, page_bytes=1 << 12, cache_bytes=1 << 16, disk_clean_ratio=0.9
)
DAY_S = 86_400


@asynccontextmanager
async def broker(disk: FakeDisk, config: MqttConfig | None = None) -> AsyncIterator[MqttBroker]:
    async with mqtt_broker(DATA, config, store=STORE, disk=disk) as mqtt:
        yield mqtt


async def leave_session(mqtt: MqttBroker, client_id: str, *filters: str, qos: int = 1) -> None:
    talk = await mqtt.connect(client_id, expiry_s=DAY_S)
    if filters:
        await talk.subscribe(*filters, qos=qos)
    await leave(mqtt, talk, client_id)


async def fill(mqtt: MqttBroker, name: str = "filler", count: int = 12) -> None:
    """Append more than a segment; the names are in different queues."""
    for number in range(count):
        append(mqtt, f"{name}/{number}", bytes(3000), retain=False)
    await applied(mqtt)


def stored(mqtt: MqttBroker, topic: str = "mqtt") -> list[int]:
    """The log positions of the messages that *topic* still has."""
    return [record.position for record in records_of(mqtt.broker.store, topic)]


def position_of(mqtt: MqttBroker, client_id: str) -> int:
    return mqtt.broker.sessions.table.position(f"mqtt {client_id}")[0]


def removed(positions: list[int], start: int, first: int) -> int:
    return sum(start <= each < first for each in positions)


async def come_back(mqtt: MqttBroker, client_id: str) -> tuple[MqttClient, object]:
    """Connect again; return also what the list of clients says that it missed."""
    talk = await mqtt.connect(client_id, clean=False, expiry_s=DAY_S, present=True)
    return talk, (await listed(mqtt))[client_id]["missed"]


async def listed(mqtt: MqttBroker) -> dict[str, dict[str, Any]]:
    administrator = await mqtt.connect("administrator")
    await administrator.publish(f"{PREFIX}clients", b"", 1)
    (answer,) = await administrator.messages(1)
    await administrator.disconnect()
    return {row["client"]: row for row in orjson.loads(answer.payload)["rows"]}


def counted(mqtt: MqttBroker) -> tuple[int, int]:
    counters = mqtt.context.counters
    return counters.missed, counters.missed_sessions


@pytest.mark.parametrize("killed", ["", "connected", "away", "removed"])
async def test_a_client_missed_what_retention_removed_from_its_queues(
    killed: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the broker is killed while it is connected, while it is away, or after the removal."""
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        await fill(mqtt, "early", 3)
        if killed == "connected":
            talk = await mqtt.connect("c", expiry_s=DAY_S)
            await talk.subscribe("wanted/#", qos=1)
            await applied(mqtt)
            disk = disk.after_power_cut(Cut.KILLED, Random(1))
        else:
            await leave_session(mqtt, "c", "wanted/#")
    async with broker(disk) as mqtt:
        await fill(mqtt, "wanted")
        await applied(mqtt)
        if killed == "away":
            disk = disk.after_power_cut(Cut.KILLED, Random(2))
    async with broker(disk) as mqtt:
        start, positions = position_of(mqtt, "c"), stored(mqtt)
        first = await remove_old_segments(mqtt, disk)
        if killed == "removed":
            disk = disk.after_power_cut(Cut.KILLED, Random(3))
    async with broker(disk) as mqtt:
        count = removed(positions, start, first)
        assert count > 3
        talk, missed = await come_back(mqtt, "c")
        assert (missed, counted(mqtt)) == (count, (count, 1))
        await leave(mqtt, talk, "c")
        assert (
            f"before the return of client 'c' of user '' at 127.0.0.1:1; retention removed {count} messages"
            in caplog.text
        )
        talk, missed = await come_back(mqtt, "c")
        assert (missed, counted(mqtt)) == (0, (count, 1))


async def test_a_client_that_leaves_again_at_once_has_not_missed_it_twice() -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        await leave_session(mqtt, "c", "wanted/#")
        await fill(mqtt, "wanted", 30)
        await remove_old_segments(mqtt, disk)
        _, missed = await come_back(mqtt, "c")
        assert missed
        await applied(mqtt)
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker(disk) as mqtt:
        assert (await come_back(mqtt, "c"))[1] == 0
        assert counted(mqtt) == (0, 0)


async def test_what_a_session_had_read_partly_is_counted_from_there() -> None:
    """The client is slow: its session is in the middle of all queues when it leaves."""
    disk = FakeDisk()
    async with broker(disk, MqttConfig(in_flight_max=3)) as mqtt:
        talk = await mqtt.connect("slow", expiry_s=DAY_S)
        await talk.subscribe("#", qos=1)
        await fill(mqtt, count=20)
        for packet in await talk.messages(3):
            await talk.acknowledge(packet)
        await talk.messages(3)
        await leave(mqtt, talk, "slow")
        await fill(mqtt, "later")
        start, positions = position_of(mqtt, "slow"), stored(mqtt)
        assert min(positions) < start < max(positions)
        first = await remove_old_segments(mqtt, disk)
        assert first > start
        _, missed = await come_back(mqtt, "slow")
        assert missed == removed(positions, start, first)


async def test_each_removal_adds_to_what_a_session_missed() -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        await leave_session(mqtt, "c", "#")
        await fill(mqtt)
        start, positions = position_of(mqtt, "c"), stored(mqtt)
        first = await remove_old_segments(mqtt, disk)
        for _ in range(3):
            await fill(mqtt)
            positions = [*(each for each in positions if each < first), *stored(mqtt)]
            first = await remove_old_segments(mqtt, disk)
        _, missed = await come_back(mqtt, "c")
        assert missed == removed(positions, start, first)


async def test_a_client_that_got_everything_or_wants_nothing_old_missed_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        await leave_session(mqtt, "no filters")
        await leave_session(mqtt, "new messages only", "#", qos=0)
        await leave_session(mqtt, "shared", "$share/g/#")
        talk = await mqtt.connect("connected", expiry_s=DAY_S)
        await talk.subscribe("others", qos=1)
        await fill(mqtt, count=20)
        await leave_session(mqtt, "late", "#")
        await fill(mqtt, count=1)
        await remove_old_segments(mqtt, disk)
        await leave(mqtt, talk, "connected")
        for client_id in ("no filters", "new messages only", "shared", "connected", "late"):
            assert (await come_back(mqtt, client_id))[1] == 0, client_id
        assert counted(mqtt) == (0, 0)
        assert "before the return" not in caplog.text


async def test_a_client_that_was_connected_when_the_broker_was_killed_missed_only_what_came_later() -> None:
    """Its session is noted where the client is, before retention removes what it has read."""
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        talk = await mqtt.connect("c", expiry_s=DAY_S)
        await talk.subscribe("others", qos=1)
        await fill(mqtt, count=20)
        first = await remove_old_segments(mqtt, disk)
        assert position_of(mqtt, "c") >= first
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker(disk) as mqtt:
        assert (await come_back(mqtt, "c"))[1] == 0


async def test_only_topics_that_a_session_reads_are_counted() -> None:
    disk = FakeDisk()
    async with broker(disk, MqttConfig(rules=["b/#=bees", "c/#=cats"], queues=3)) as mqtt:
        for client_id, filters in {"bees": ["b/+"], "two": ["b/1", "c/#"], "all": ["#"], "none": ["d/#"]}.items():
            await leave_session(mqtt, client_id, *filters)
        for name, count in (("b", 10), ("c", 20)):
            for number in range(count):
                append(mqtt, f"{name}/{number}", bytes(2000), retain=False)
        await applied(mqtt)
        await fill(mqtt, "e")
        positions = {topic: stored(mqtt, topic) for topic in ("bees", "cats", "mqtt")}
        first = await remove_old_segments(mqtt, disk)
        counts = {topic: removed(found, 0, first) for topic, found in positions.items()}
        assert min(counts.values()) > 0
        expected = {
            "bees": counts["bees"],
            "two": counts["bees"] + counts["cats"],
            "all": sum(counts.values()),
            "none": counts["mqtt"],
        }
        for client_id, count in expected.items():
            assert (await come_back(mqtt, client_id))[1] == count
        assert counted(mqtt) == (sum(expected.values()), 4)


async def test_it_is_not_known_what_a_session_of_an_older_version_missed(caplog: pytest.LogCaptureFixture) -> None:
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        await leave_session(mqtt, "c", "#")
        await fill(mqtt, count=20)
        mqtt.broker.sessions.table.find_passed = None  # as before there was one
        await remove_old_segments(mqtt, disk)
        _, missed = await come_back(mqtt, "c")
        assert missed is None
        assert counted(mqtt) == (0, 1)
        assert "retention removed an unknown number of messages of its topics" in caplog.text


async def test_a_damaged_queue_does_not_keep_retention_from_removing(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()

    def find_damage(queues: object, queue: Queue, *_: object) -> list[int]:
        raise BlockDamaged(queue)

    async with broker(disk) as mqtt:
        await leave_session(mqtt, "c", "#")
        await fill(mqtt, count=20)
        monkeypatch.setattr("martlet.sessions.missed_messages._find_offsets", find_damage)
        assert await remove_old_segments(mqtt, disk) > 0
        assert (await come_back(mqtt, "c"))[1] is None


async def test_the_number_is_stored_only_when_it_is_needed() -> None:
    """An offline session takes no more memory before retention reaches it."""
    disk = FakeDisk()
    async with broker(disk) as mqtt:
        table = mqtt.broker.sessions.table
        await leave_session(mqtt, "old", "#")
        await fill(mqtt, count=20)
        await leave_session(mqtt, "new", "#")
        await fill(mqtt, count=1)
        await mqtt.broker.projections.keeper.release(mqtt.broker.store.segments.items[0].end)
        await applied(mqtt)
        assert table.position("mqtt old")[1]
        assert not table.position("mqtt new")[1]
        talk, _ = await come_back(mqtt, "old")
        for packet in await talk.messages(21):
            await talk.acknowledge(packet)
        await leave(mqtt, talk, "old")
        await applied(mqtt)
        assert not table.position("mqtt old")[1]
