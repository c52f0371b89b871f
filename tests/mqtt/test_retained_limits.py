"""How many retained messages and bytes of them there may be, and what is not retained."""

from collections.abc import Generator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import trio
from tests.wire_clients.mqtt import V4, V5, MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.runtime.steps import finish_now, per_slice
from martlet.store import Store
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock, small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.shared.retained import LOOK_US, Entry, Retained
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Connect, Publish, Will
from martlet_mqtt.wire.properties import Properties, Property

QUOTA = ReasonCode.QUOTA_EXCEEDED


async def retain(talk: MqttClient, name: str, payload: bytes) -> int:
    return await talk.publish(name, payload, 1, retain=True)


def properties_bytes(name: str) -> int:
    return len(f"TAGS\x01{name}\x02MQTT_RETAIN\x011\x02MQTT_CLIENT\x01p\x02")


def counted(mqtt: MqttBroker) -> tuple[int, int]:
    return len(mqtt.context.retained), mqtt.context.retained.bytes


async def test_the_largest_message_can_be_retained_with_its_copy(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, payload = await mqtt.connect("p", V5), b"x" * mqtt.broker.config.message_bytes_max
        assert await retain(talk, "a" * 200, payload[:-64]) == ReasonCode.SUCCESS
        assert counted(mqtt)[0] == 1


async def test_bytes_are_counted_with_properties_and_freed_again(tmp_path: Path) -> None:
    more = properties_bytes("a")
    config = MqttConfig(retained_bytes_max=1000 + 2 * more)
    async with mqtt_broker(tmp_path, config) as mqtt:
        talk = await mqtt.connect("p")
        assert await retain(talk, "a", bytes(600)) == 0
        assert await retain(talk, "b", bytes(401)) == QUOTA
        assert await retain(talk, "b", bytes(400)) == 0
        assert counted(mqtt) == (2, 1000 + 2 * more)
        assert await retain(talk, "b", bytes(401)) == QUOTA
        assert await retain(talk, "b", bytes(300)) == 0
        assert await retain(talk, "a", b"") == 0
        assert counted(mqtt) == (1, 300 + more)
        assert await retain(talk, "none", b"") == 0
        assert await retain(talk, "a", bytes(700)) == 0
    async with mqtt_broker(tmp_path, config) as mqtt:
        assert counted(mqtt) == (2, 1000 + 2 * more)
        talk = await mqtt.connect("p")
        assert await retain(talk, "c", b"x") == QUOTA
        await talk.subscribe("#", qos=0)
        assert sorted(map(len, await talk.payloads(2))) == [300, 700]


async def test_what_one_read_brings_is_counted_before_it_is_durable(tmp_path: Path) -> None:
    config = MqttConfig(retained_bytes_max=10 * (100 + properties_bytes("0")), retained_max=8)
    async with mqtt_broker(tmp_path, config) as mqtt:
        talk = await mqtt.connect("p")
        names = [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        await talk.send(*(Publish(f"{name}", bytes(100), 1, True, packet_id=at) for at, name in enumerate(names, 1)))
        reasons = [(await talk.expect(Ack)).reason for _ in names]
        assert reasons == [0] * 12 + [QUOTA] * 2
        assert counted(mqtt)[0] == 8
        await talk.send(*(Publish(f"{name}", bytes(150), 1, True, packet_id=at) for at, name in enumerate(range(8), 1)))
        reasons = [(await talk.expect(Ack)).reason for _ in range(8)]
        assert reasons == [0] * 5 + [QUOTA] * 3  # each takes 50 bytes more, and there was room for 2 whole ones
        assert counted(mqtt)[1] <= config.retained_bytes_max


@pytest.mark.parametrize("seed", range(5))
async def test_the_count_is_that_of_what_is_there(tmp_path: Path, seed: int) -> None:
    """Over restarts, and after retention has copied messages."""
    chance, sizes = Random(seed), dict[str, int]()
    store = small_config(flush="async", segment_bytes=1 << 16, page_bytes=1 << 12)
    for _ in range(3):
        async with mqtt_broker(tmp_path, store=store) as mqtt:
            talk = await mqtt.connect("p")
            for _ in range(60):
                name, size = str(chance.randrange(9)), chance.choice((0, 1, 10, 2000))
                assert await retain(talk, name, bytes(size)) == 0
                sizes[name] = size + properties_bytes(name) if size else 0
            present = {name: size for name, size in sizes.items() if size}
            assert counted(mqtt) == (len(present), sum(present.values()))
            await mqtt.broker.projections.keeper.release(mqtt.broker.store.readable)
            await mqtt.settle()
            assert counted(mqtt) == (len(present), sum(present.values()))


async def test_lower_limits_do_not_keep_a_message_from_being_replaced_by_a_smaller_one(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("p")
        for name in "abc":
            assert await retain(talk, name, bytes(100)) == 0
    async with mqtt_broker(tmp_path, MqttConfig(retained_max=1, retained_bytes_max=10)) as mqtt:
        talk = await mqtt.connect("p")
        assert await retain(talk, "a", bytes(101)) == QUOTA
        assert await retain(talk, "d", b"x") == QUOTA
        assert await retain(talk, "a", bytes(99)) == 0
        assert await retain(talk, "b", b"") == 0
        assert counted(mqtt) == (2, 199 + 2 * properties_bytes("a"))


async def test_figures_tell_how_much_is_retained(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("p")
        for name in "abc":
            await retain(talk, name, bytes(50))
        await talk.subscribe(
            "$SYS/broker/store/#", "$SYS/broker/messages/stored", "$SYS/broker/retained messages/count"
        )
        found = {each.topic.removeprefix("$SYS/broker/"): each.payload for each in await talk.messages(4)}
        assert found == {
            "store/messages/count": b"3",
            "store/messages/bytes": b"%d" % (150 + 3 * properties_bytes("a")),
            "messages/stored": b"3",
            "retained messages/count": b"3",
        }


@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"])
async def test_a_message_cannot_be_both_delayed_and_retained(tmp_path: Path, name: str) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk, other = await mqtt.connect("p"), await mqtt.connect("other")
        await other.subscribe("#", qos=0)
        delayed = Properties({}, ((name, "3"),))
        for qos in (1, 2):
            await talk.send(Publish("a", b"x", qos, True, packet_id=4, properties=delayed))
            answer = await talk.expect(Ack)
            assert answer.reason == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
            assert "RETAIN" in str(answer.properties.text(Property.REASON_STRING))
        assert counted(mqtt) == (0, 0)
        will = Will("will", b"x", retain=True, properties=delayed)
        refused, connack = await mqtt.answer(Connect("w", will=will))
        assert connack.reason == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
        assert await refused.closed() is None
        assert await other.rest() == []


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_client_that_retains_too_much_learns_it(tmp_path: Path, version: int) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(retained_bytes_max=10)) as mqtt:
        talk = await mqtt.connect("p", version)
        await talk.send(Publish("a", b"x", 1, True, packet_id=4))
        answer = await talk.expect(Ack)
        assert (answer.kind, answer.reason) == (PacketType.PUBACK, QUOTA if version == V5 else 0)
        if version == V5:
            assert "mqtt.retained_bytes_max is 10" in str(answer.properties.text(Property.REASON_STRING))
        await trio.lowlevel.checkpoint()
        assert counted(mqtt) == (0, 0)


async def test_a_message_that_has_expired_makes_room_for_another_one(tmp_path: Path, autojump_clock: MockClock) -> None:
    config, clock = MqttConfig(retained_max=2), TrioClock()
    async with mqtt_broker(tmp_path, config, clock=clock) as mqtt:
        talk = await mqtt.connect("p")
        for name, expiry_s in ("a", 1000), ("b", 1000), ("b", 10_000):
            properties = Properties({Property.MESSAGE_EXPIRY: expiry_s})
            assert await talk.publish(name, b"x", 1, retain=True, properties=properties) == 0
        assert await retain(talk, "c", b"x") == QUOTA
        await trio.sleep(900)
        assert await retain(talk, "c", b"x") == QUOTA
        await trio.sleep(200)
        assert counted(mqtt)[0] == 1
        assert await retain(talk, "c", b"x") == 0
        assert await retain(talk, "d", b"x") == QUOTA
    async with mqtt_broker(tmp_path, config, clock=clock) as mqtt:
        talk = await mqtt.connect("p")
        assert await retain(talk, "d", b"x") == QUOTA
        assert sorted(mqtt.context.retained.matches("#")) == ["b", "c"]
        await trio.sleep(10_000)
        assert sorted(mqtt.context.retained.matches("#")) == ["c"]


async def test_what_expired_before_a_kill_is_removed_after_it(tmp_path: Path, autojump_clock: MockClock) -> None:
    disk, clock, store = FakeDisk(), TrioClock(), small_config(flush="async")
    async with mqtt_broker(tmp_path, store=store, disk=disk, clock=clock) as mqtt:
        talk = await mqtt.connect("p")
        expiry = Properties({Property.MESSAGE_EXPIRY: 50})
        assert await talk.publish("a", b"x", 1, retain=True, properties=expiry) == 0
        assert await retain(talk, "b", b"x") == 0
        await trio.sleep(100)
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    async with mqtt_broker(tmp_path, store=store, disk=disk, clock=clock) as mqtt:
        await trio.sleep(1)
        assert list(mqtt.context.retained.matches("#")) == ["b"]
        assert mqtt.context.retained.bytes == len("x") + properties_bytes("b")


def many(count: int) -> tuple[Retained, ManualClock]:
    clock = ManualClock()
    found = Retained(cast(Store, Unread()), clock)
    for number in range(count):
        found._put_entry(f"{number}", Entry(100 * number, 0, 10, clock.ms + 1000 if number % 2 else 0))
    return found, clock


class Unread:
    """A store whose records are gone."""

    def __init__(self) -> None:
        self.lookup = self
        self.read: list[int] = []

    def known_record(self, position: int) -> None:
        self.read.append(position)


def slices(steps: Generator[Any, None, None]) -> int:
    """Do *steps*; return how many slices there were."""
    count = 0
    for yielded in steps:
        if yielded is None:
            count += 1
        else:
            yielded()
    return count


def test_retention_copies_what_it_must_and_looks_at_the_rest_in_slices() -> None:
    found, clock = many(10_000)
    assert slices(found.roll(0, 500)) == 10_000 // per_slice(LOOK_US)
    store = cast(Unread, found._store)
    assert store.read == [0, 100, 200, 300, 400]
    clock.ms += 2000
    store.read.clear()
    slices(found.roll(0, 500))
    assert store.read == [0, 200, 400]
    assert found.position("1") == -1
    assert len(found) == 10_000 - 2


def test_the_oldest_position_is_known_without_a_search() -> None:
    found, _ = many(3)
    assert found.floor() == 0
    found._put_entry("0", Entry(900, 900, 1, 0))
    assert found.floor() == 100
    found._remove("1")
    assert found.floor() == 200
    restored, _ = many(0)
    finish_now(restored.restore(b"".join(finish_now(found.freeze())), 0))
    assert restored.floor() == 200
    assert [restored.position(name) for name in ("0", "1", "2")] == [900, -1, 200]
    restored._put_entry("2", Entry(1000, 1000, 1, 0))
    assert restored.floor() == 900


def test_a_sweep_removes_what_has_expired_in_slices() -> None:
    found, clock = many(10_000)
    assert slices(found.sweep()) == 10_000 // per_slice(LOOK_US)
    assert len(found) == 10_000
    clock.ms += 1000
    slices(found.sweep())
    assert (len(found), found.bytes) == (5_000, 50_000)
    assert slices(found.sweep()) == 0  # nothing is left that expires
