"""The option no local: a client does not get its own messages (MQTT 5 section 3.8.3.1)."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import ASYNC, MqttClient, mqtt_broker

from martlet.store import StoreConfig
from martlet_mqtt.wire.packets import Ack, FilterSubscription, Publish, Suback, Subscribe, Will

SYNC = StoreConfig(flush="sync")


async def subscribed(talk: MqttClient) -> list[bytes]:
    """Return the payloads that come before SUBACK."""
    came: list[bytes] = []
    while not isinstance(packet := await talk.receive(), Suback):
        if isinstance(packet, Publish):
            came.append(packet.payload)
    return came


async def collect(talk: MqttClient, last: bytes) -> list[bytes]:
    """Return the payloads that come up to *last*, without it; other packets are passed over."""
    came: list[bytes] = []
    while True:
        packet = await talk.receive()
        if isinstance(packet, Publish):
            if packet.payload == last:
                return came
            came.append(packet.payload)
        else:
            assert isinstance(packet, Ack)


@pytest.mark.parametrize("store", [ASYNC, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_what_was_sent_right_before_the_subscription_does_not_come_back(
    tmp_path: Path, store: StoreConfig, qos: int
) -> None:
    async with mqtt_broker(tmp_path, store=store) as mqtt:
        me, other = await mqtt.connect("me"), await mqtt.connect("other")
        await me.send(
            Publish("a", b"mine", qos, packet_id=1 if qos else 0),
            Subscribe(2, (FilterSubscription("a", qos, no_local=True),)),
            Publish("a", b"marked", qos, packet_id=3 if qos else 0),
        )
        assert await subscribed(me) == []
        await other.publish("a", b"of another", 1)
        await other.publish("a", b"end", 1)
        assert await collect(me, b"end") == [b"of another"]


async def test_other_subscriptions_still_bring_what_was_sent_before(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        me, other = await mqtt.connect("me"), await mqtt.connect("other")
        await me.subscribe("a/+", qos=1)
        await other.send(*[Publish(f"a/{index}", b"%d" % index, 1, packet_id=index + 1) for index in range(3)])
        await me.send(
            Publish("a/x", b"mine", 1, packet_id=1),
            Subscribe(2, (FilterSubscription("a/#", 1, no_local=True),)),
        )
        came = await subscribed(me)
        for _ in range(3):
            await other.expect(Ack)
        await other.publish("a/x", b"end", 1, packet_id=9)
        assert sorted([*came, *await collect(me, b"end")]) == [b"0", b"1", b"2", b"mine"]


async def test_neither_does_the_own_will(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, me = await mqtt.connect("watcher"), await mqtt.connect("me", expiry_s=100, will=Will("a", b"will", 1))
        for talk in (watcher, me):
            await talk.subscribe(FilterSubscription("a", 1, no_local=True))
        me.hang_up()
        assert [packet.payload for packet in await watcher.messages(1)] == [b"will"]
        me = await mqtt.connect("me", clean=False, expiry_s=100, present=True)
        await watcher.publish("a", b"end", 1)
        assert await collect(me, b"end") == []
