"""Clients that accept small packets only, or that are slow: what the broker itself sends respects that."""

from pathlib import Path

import orjson
import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet_mqtt.admin.control import PREFIX
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import (
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import Property

OFTEN = MqttConfig(sys_interval_s=1)


async def small(mqtt: MqttBroker, size: int) -> MqttClient:
    return await mqtt.connect("small", values={Property.MAXIMUM_PACKET_SIZE: size}, keep_alive_s=3600)


async def test_figures_that_are_too_large_for_a_client_are_left_out(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, OFTEN) as mqtt:
        talk = await small(mqtt, 40)
        await talk.subscribe("$SYS/#", qos=0)
        await trio.sleep(5)
        found = [(each.topic, each.payload) for each in await talk.rest()]
        assert "$SYS/broker/uptime" in dict(found)
        assert max(2 + 2 + len(topic) + 1 + len(payload) for topic, payload in found) <= 40
        assert mqtt.context.counters.oversize > 20


async def test_figures_are_sent_in_slices(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, OFTEN) as mqtt:
        for number in range(100):
            talk = await mqtt.connect(f"c{number}", keep_alive_s=3600)
            await talk.subscribe("$SYS/#", qos=0)
        await trio.sleep(3)
        before = mqtt.broker.turns.slices
        await trio.sleep(1)
        assert mqtt.broker.turns.slices - before >= 100 * 10 // 256


async def test_a_client_that_reads_slowly_gets_the_newest_figures_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with mqtt_broker(tmp_path, OFTEN) as mqtt:
        talk = MqttClient(mqtt.running.connect(mqtt.protocol, 256))
        await talk.send(Connect("slow", V5, keep_alive_s=3600))
        await talk.expect(Connack)
        await talk.send(Subscribe(1, (FilterSubscription("$SYS/broker/uptime", 0),)))
        await talk.expect(Suback)
        await trio.sleep(1000)
        old = await talk.rest()
        assert len(old) < 100
        new = await talk.messages(1)
        found = [int(each.payload.split()[0]) for each in (*old, *new)]
        assert found[-1] - found[-2] > 800


async def test_a_figure_that_waits_is_not_sent_after_unsubscribe(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, OFTEN) as mqtt:
        talk = await mqtt.connect("c", keep_alive_s=3600)
        await talk.send(
            Subscribe(1, (FilterSubscription("$SYS/broker/uptime", 0),)), Unsubscribe(2, ("$SYS/broker/uptime",))
        )
        await talk.expect(Suback)
        await talk.expect(Unsuback)
        await trio.sleep(10)
        assert {each.retain for each in await talk.rest()} <= {True}  # one may leave in between


@pytest.mark.parametrize("refused", [False, True])
async def test_an_answer_to_many_filters_that_is_too_large_ends_the_connection(tmp_path: Path, refused: bool) -> None:
    many = tuple(f"f/{number}" for number in range(100))
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await small(mqtt, 60)
        assert await talk.subscribe("a/#/b" if refused else "a/b", "c") == (0x8F if refused else 2, 2)
        await talk.send(
            Unsubscribe(1, many) if refused else Subscribe(1, tuple(FilterSubscription(each, 0) for each in many))
        )
        last = await talk.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.PACKET_TOO_LARGE


async def test_answers_to_an_administrator_fit_the_client(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        filters = [f"some/filter/{number:03}" for number in range(50)]
        other = await mqtt.connect("other")
        await other.subscribe(*filters)
        talk = await small(mqtt, 600)
        await talk.send(Publish(f"{PREFIX}subscriptions", b"", 0))
        rows: list[str] = []
        done = False
        while not done:
            (packet,) = await talk.messages(1)
            assert len(packet.payload) + len(packet.topic) < 600
            answer = orjson.loads(packet.payload)
            rows += [row["filter"] for row in answer["rows"]]
            done = answer["done"]
        assert rows == filters
        talk = await small(mqtt, 100)
        await talk.send(Publish(f"{PREFIX}clients", b"", 0))
        assert all("rows" not in orjson.loads(each.payload) for each in await talk.rest())
