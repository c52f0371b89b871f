"""Where a subscription begins: it brings nothing from before SUBSCRIBE as live, and all that is published after it."""

from pathlib import Path

import pytest
from tests.mqtt.mqtt_talk import ASYNC, Running, Talk, mqtt_broker

from martlet.store import StoreConfig
from martlet_mqtt.codes import PacketType
from martlet_mqtt.packets import Ack, Pingreq, Pingresp, Publish, Subscribe, Subscription
from martlet_mqtt.properties import Property

SYNC = StoreConfig(flush="sync")


async def until(talk: Talk, last: bytes) -> list[Publish]:
    """Return the messages that come before the one with the payload *last*; acknowledge them."""
    came: list[Publish] = []
    while True:
        packet = await talk.receive()
        if not isinstance(packet, Publish):
            continue
        await talk.acknowledge(packet)
        if packet.payload == last:
            return came
        came.append(packet)


@pytest.mark.parametrize("store", [ASYNC, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("topic_filter", ["a/b", "a/#"])
async def test_what_is_published_before_in_the_same_segment_is_not_live(
    tmp_path: Path, store: StoreConfig, qos: int, topic_filter: str
) -> None:
    async with mqtt_broker(tmp_path, store=store) as mqtt:
        me, other, third = (
            await mqtt.connect("me", expiry_s=100),
            await mqtt.connect("other"),
            await mqtt.connect("third"),
        )
        await other.subscribe("a/b", qos=1)
        await me.send(
            Publish("a/b", b"before", 1, packet_id=1),
            Subscribe(2, (Subscription(topic_filter, qos),)),
            Publish("a/b", b"after", 1, packet_id=3),
        )
        await third.publish("a/b", b"end", 1)
        assert [each.payload for each in await until(me, b"end")] == [b"after"]
        assert [each.payload for each in await until(other, b"end")] == [b"before", b"after"]


@pytest.mark.parametrize("store", [ASYNC, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("handling", [0, 1, 2])
@pytest.mark.parametrize("topic_filter", ["a/b", "a/+"])
async def test_what_was_retained_before_comes_once_as_retained_or_not_at_all(
    tmp_path: Path, store: StoreConfig, handling: int, topic_filter: str
) -> None:
    async with mqtt_broker(tmp_path, store=store) as mqtt:
        me, other = await mqtt.connect("me"), await mqtt.connect("other")
        await me.send(
            Publish("a/b", b"kept", 1, packet_id=1, retain=True),
            Subscribe(2, (Subscription(topic_filter, 1, retain_handling=handling),)),
        )
        came = [
            packet for packet in [await me.receive() for _ in range(2 + (handling < 2))] if isinstance(packet, Publish)
        ]
        await other.publish("a/b", b"end", 1)
        came += await until(me, b"end")
        assert [(each.payload, each.retain) for each in came] == [(b"kept", True)] * (handling < 2)


async def behind(mqtt: Running, backlog: int, received: int) -> Talk:
    """Return a client that returns to a session with filters of QoS 0 and 1, *backlog* messages behind."""
    me, other = await mqtt.connect("me", expiry_s=100), await mqtt.connect("other")
    await me.subscribe(Subscription("kept", 1), Subscription("live/#", 0))
    await me.disconnect()
    for number in range(backlog):
        await other.publish("kept", b"%d" % number, 1)
        await other.publish("live/x", b"missed", 0)
    values = {Property.RECEIVE_MAXIMUM: received}
    return await mqtt.connect("me", clean=False, expiry_s=100, present=True, values=values)


async def test_filters_of_qos_0_bring_what_is_published_while_a_resumed_session_is_behind(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await me.send(Pingreq())
        await me.expect(Pingresp)
        for number in range(5):
            await other.publish("live/x", b"live %d" % number, 1)
        await other.publish("kept", b"end", 1)
        for packet in await me.messages(5):  # what came before PINGRESP
            await me.send(Ack(PacketType.PUBACK, packet.packet_id))
        came = [each.payload for each in await until(me, b"end")]
        assert came == [b"%d" % number for number in range(5, 30)] + [b"live %d" % number for number in range(5)]


async def test_a_filter_of_qos_0_that_is_new_to_a_session_behind_brings_what_is_published_from_then_on(
    tmp_path: Path,
) -> None:
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await other.publish("new/x", b"old", 1)
        await me.subscribe("new/#", qos=0)
        await other.publish("new/x", b"new", 1)
        await other.publish("kept", b"end", 1)
        for packet in await me.messages(5):
            await me.send(Ack(PacketType.PUBACK, packet.packet_id))
        assert [each.payload for each in await until(me, b"end")][-2:] == [b"29", b"new"]
