"""What depends on time: keep alive, expiry of messages and sessions, delayed wills, metrics."""

from pathlib import Path
from random import Random

import pytest
import trio
from tests.wire_clients.mqtt import mqtt_broker
from trio.testing import MockClock

from martlet.message import Message
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Connect, Disconnect, FilterSubscription, Publish, Will
from martlet_mqtt.wire.properties import Properties, Property

SMALL = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16)


async def test_a_silent_client_is_disconnected_after_one_and_a_half_times_its_keep_alive(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        newest, older = await mqtt.connect("a", keep_alive_s=10), await mqtt.connect("b", V4, keep_alive_s=10)
        began = trio.current_time()
        await trio.sleep(14)
        assert await older.rest() == []
        last = await newest.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.KEEP_ALIVE_TIMEOUT
        assert 15 <= trio.current_time() - began < 20
        assert await older.closed() is None
        assert 29 <= trio.current_time() - began < 35


async def test_a_client_that_does_not_connect_is_disconnected(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(connect_s=5)) as mqtt:
        talk = mqtt.open()
        await talk.wire.send(b"\x10")
        assert await talk.closed() is None
        assert trio.current_time() < 20


async def test_what_has_expired_is_not_delivered_and_the_rest_is_counted_down(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        away = await mqtt.connect("away", expiry_s=1000)
        await away.subscribe("#", qos=1)
        away.hang_up()
        publisher = await mqtt.connect("p")
        for expiry_s in (10, 100):
            properties = Properties({Property.MESSAGE_EXPIRY: expiry_s})
            await publisher.publish(f"e/{expiry_s}", b"x", 1, retain=True, properties=properties)
        await trio.sleep(30)
        away = await mqtt.connect("away", clean=False, expiry_s=1000, present=True)
        (found,) = await away.messages(1)
        assert found.topic == "e/100"
        assert found.properties.number(Property.MESSAGE_EXPIRY, 0) in (69, 70)
        await away.acknowledge(found)
        late = await mqtt.connect("late", V4)
        await late.subscribe("e/+")
        (found,) = await late.messages(1)
        assert (found.topic, found.retain) == ("e/100", True)
        assert await away.rest() == []


async def test_a_session_ends_after_its_expiry(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(session_expiry_max_s=500), clock=TrioClock()) as mqtt:
        talk = await mqtt.connect("a", expiry_s=100)
        await talk.disconnect()
        await trio.sleep(90)
        talk = await mqtt.connect("a", clean=False, expiry_s=100, present=True)
        await talk.disconnect(properties=Properties({Property.SESSION_EXPIRY: 10}))
        await trio.sleep(11)
        talk = await mqtt.connect("a", clean=False, expiry_s=5000, present=False)
        await talk.disconnect()
        await trio.sleep(490)
        talk = await mqtt.connect("a", clean=False, expiry_s=5000, present=True)
        await talk.disconnect()
        await trio.sleep(600)
        _, answer = await mqtt.answer(Connect("a", V5, False))
        assert (answer.reason, answer.session_present) == (ReasonCode.SUCCESS, False)


async def test_a_session_that_was_to_end_at_once_cannot_be_prolonged(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("a")
        await talk.send(Disconnect(properties=Properties({Property.SESSION_EXPIRY: 10})))
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.PROTOCOL_ERROR


def delayed(delay_s: int) -> Will:
    return Will("will", b"gone", 1, properties=Properties({Property.WILL_DELAY: delay_s}))


async def test_a_will_waits_for_its_delay_and_not_beyond_its_session(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await mqtt.connect("w")
        await watcher.subscribe("will")
        talk = await mqtt.connect("a", expiry_s=1000, will=delayed(100))
        talk.hang_up()
        await trio.sleep(90)
        assert await watcher.rest() == []
        talk = await mqtt.connect("a", clean=False, expiry_s=1000, will=delayed(100), present=True)
        await trio.sleep(200)
        assert await watcher.rest() == [], "the client came back"
        talk.hang_up()
        await trio.sleep(110)
        assert await watcher.payloads(1) == [b"gone"]
        talk = await mqtt.connect("b", expiry_s=20, will=delayed(1000))
        talk.hang_up()
        await trio.sleep(25)
        assert await watcher.payloads(1) == [b"gone"]
        talk = await mqtt.connect("c", expiry_s=1000, will=delayed(500))
        talk.hang_up()
        await mqtt.connect("c", present=False)
        assert await watcher.payloads(1) == [b"gone"], "a clean start ends the session"
        assert await watcher.rest() == []


@pytest.mark.parametrize("expiry_s", [0, 1000])
@pytest.mark.parametrize("delay_s", [0, 50])
async def test_a_will_is_published_once_after_the_broker_was_killed(
    expiry_s: int, delay_s: int, autojump_clock: MockClock
) -> None:
    disk, clock, directory = FakeDisk(), TrioClock(), Path("/data")
    async with mqtt_broker(directory, store=SMALL, disk=disk, clock=clock) as mqtt:
        watcher = await mqtt.connect("w", expiry_s=10_000)
        await watcher.subscribe("will")
        await mqtt.connect("a", expiry_s=expiry_s, will=delayed(delay_s))
        await mqtt.settle()
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    for turn in range(2):
        async with mqtt_broker(directory, store=SMALL, disk=disk, clock=clock) as mqtt:
            watcher = await mqtt.connect("w", clean=False, expiry_s=10_000, present=True)
            await trio.sleep(200)
            found = await watcher.rest()
            assert [packet.payload for packet in found] == ([] if turn else [b"gone"])
            for packet in found:
                await watcher.acknowledge(packet)
            assert await watcher.rest() == []
            await mqtt.settle()
            disk = disk.after_power_cut(Cut.KILLED, Random(2))


async def test_figures_have_mosquittos_names(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        talk, everything = await mqtt.connect("a"), await mqtt.connect("b")
        await everything.subscribe("#")
        await talk.subscribe(FilterSubscription("$SYS/broker/clients/+", 1))
        first = {packet.topic: packet for packet in await talk.rest()}
        assert first["$SYS/broker/clients/connected"].payload == b"2"
        assert all(packet.retain and not packet.qos for packet in first.values())
        await mqtt.connect("c")
        await trio.sleep(11)
        later = {packet.topic: packet.payload for packet in await talk.rest()}
        assert later["$SYS/broker/clients/connected"] == b"3"
        assert "$SYS/broker/clients/expired" not in later, "it has not changed"
        assert await everything.rest() == []
        await talk.unsubscribe("$SYS/broker/clients/+")
        await talk.subscribe("$SYS/#")
        names = {packet.topic for packet in await talk.rest()}
        for name in ("uptime", "version", "messages/received", "load/publish/sent/5min", "retained messages/count"):
            assert f"$SYS/broker/{name}" in names
        await talk.send(Publish("$SYS/broker/uptime", b"x"))
        assert await talk.rest() == []


async def test_administrators_list_and_disconnect_clients(tmp_path: Path) -> None:
    import orjson

    async with mqtt_broker(tmp_path) as mqtt:
        talk, other = await mqtt.connect("admin"), await mqtt.connect("other", expiry_s=10)
        await other.subscribe(FilterSubscription("a/+", 1, no_local=True), identifier=7)
        away = await mqtt.connect("away", expiry_s=10)
        away.hang_up()
        await other.publish("kept", b"x", 1, retain=True)
        await mqtt.settle()

        async def ask(command: str, payload: bytes = b"") -> dict[str, object]:
            await talk.publish(f"$CONTROL/martlet/v1/{command}", payload)
            (packet,) = await talk.messages(1)
            assert packet.topic == "$CONTROL/martlet/v1/response"
            found: dict[str, object] = orjson.loads(packet.payload)
            return found

        clients = (await ask("clients"))["rows"]
        assert isinstance(clients, list)
        assert {row["client"]: row["connected"] for row in clients} == {"admin": True, "other": True, "away": False}
        assert (await ask("subscriptions", b'{"client": "other"}'))["rows"] == [
            {
                "client": "other",
                "filter": "a/+",
                "qos": 1,
                "no_local": True,
                "retain_as_published": False,
                "retain_handling": 0,
                "identifier": 7,
                "selector": None,
            }
        ]
        retained = (await ask("retained"))["rows"]
        assert isinstance(retained, list)
        assert [row["name"] for row in retained] == ["kept"]
        assert "error" in await ask("nonsense")
        assert "error" in await ask("clients", b"no JSON")
        assert (await ask("kick", b'{"client": "other"}'))["rows"] == [{"client": "other", "kicked": True}]
        last = await other.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.ADMINISTRATIVE_ACTION
        _, answer = await mqtt.answer(Connect("other", V5, False))
        assert answer.session_present


@pytest.mark.parametrize("expires_ms", ["9" * 17, "9" * 18, "9" * 30])
async def test_a_time_of_expiry_that_mqtt_cannot_say_reaches_subscribers(tmp_path: Path, expires_ms: str) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        talks = [await mqtt.connect(f"c{version}", version) for version in (V4, V5)]
        for talk in talks:
            await talk.subscribe("a")
        properties = f"TAGS\x01a\x02EXPIRES_MS\x01{expires_ms}\x02".encode()
        mqtt.broker.publish(Message("mqtt", b"for ever", properties, 0))
        for talk in talks:
            assert await talk.payloads(1) == [b"for ever"]
            assert await talk.rest() == []
