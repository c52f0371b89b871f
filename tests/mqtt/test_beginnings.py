"""Where a subscription begins: it brings nothing from before SUBSCRIBE as live, and all that is published after it."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from tests.mqtt.test_mqtt_crash import talking
from tests.wire_clients.mqtt import ASYNC, MqttBroker, MqttClient, mqtt_broker, mqtt_process

from martlet.runtime.steps import finish_now
from martlet.store import StoreConfig
from martlet_mqtt.wire.codes import PacketType
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
)
from martlet_mqtt.wire.properties import Properties, Property

SYNC = StoreConfig(flush="sync")


async def until(talk: MqttClient, last: bytes) -> list[Publish]:
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
            Subscribe(2, (FilterSubscription(topic_filter, qos),)),
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
            Subscribe(2, (FilterSubscription(topic_filter, 1, retain_handling=handling),)),
        )
        came = [
            packet for packet in [await me.receive() for _ in range(2 + (handling < 2))] if isinstance(packet, Publish)
        ]
        await other.publish("a/b", b"end", 1)
        came += await until(me, b"end")
        assert [(each.payload, each.retain) for each in came] == [(b"kept", True)] * (handling < 2)


async def behind(mqtt: MqttBroker, backlog: int, received: int) -> MqttClient:
    """Return a client that returns to a session with filters of QoS 0 and 1, *backlog* messages behind."""
    me, other = await mqtt.connect("me", expiry_s=100), await mqtt.connect("other")
    await me.subscribe(FilterSubscription("kept", 1), FilterSubscription("live/#", 0))
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


# a session that leaves before it is where a new filter begins


async def again(mqtt: MqttBroker, received: int = 1000) -> MqttClient:
    """Return the client "me", which continues its session."""
    values = {Property.RECEIVE_MAXIMUM: received}
    return await mqtt.connect("me", clean=False, expiry_s=100, present=True, values=values)


async def the_rest(mqtt: MqttBroker, me: MqttClient) -> list[tuple[bytes, bool]]:
    """Return what comes before a message that is published now: payloads, and whether each is a retained message."""
    await (await mqtt.connect()).publish("kept", b"end", 1)
    return [(each.payload, each.retain) for each in await until(me, b"end") if not each.payload.isdigit()]


async def leave(me: MqttClient) -> None:
    """Disconnect, with messages under way."""
    await me.send(Disconnect())
    await me.closed()


LIVE = [(b"after", False), (b"later", False)]
Change = Callable[[MqttBroker, MqttClient, MqttClient], Awaitable[None]]


async def nothing(mqtt: MqttBroker, me: MqttClient, other: MqttClient) -> None:
    pass


async def upgrade(mqtt: MqttBroker, me: MqttClient, other: MqttClient) -> None:
    await me.subscribe("new/#", qos=2)


async def from_qos_0(mqtt: MqttBroker, me: MqttClient, other: MqttClient) -> None:
    await me.subscribe("new/#", qos=0)
    await me.subscribe("new/#", qos=1)


async def over_qos_0(mqtt: MqttBroker, me: MqttClient, other: MqttClient) -> None:
    await me.subscribe("new/#", qos=1)
    await me.subscribe("new/#", qos=0)
    await me.subscribe("new/#", qos=1)


async def anew(mqtt: MqttBroker, me: MqttClient, other: MqttClient) -> None:
    await me.subscribe("new/#", qos=1)
    await me.unsubscribe("new/#")
    await other.publish("new/x", b"in between", 1)


async def two(mqtt: MqttBroker, me: MqttClient, other: MqttClient) -> None:
    await me.subscribe("new/x", "$share/g/new/x", qos=1)
    await me.unsubscribe("$share/g/new/x")


@pytest.mark.parametrize("store", [ASYNC, SYNC], ids=["async", "sync"])
@pytest.mark.parametrize("before", [nothing, from_qos_0, over_qos_0, anew, two])
@pytest.mark.parametrize("change", [nothing, upgrade])
async def test_a_new_filter_of_a_session_behind_brings_nothing_from_before_it_to_one_that_returns(
    tmp_path: Path, store: StoreConfig, before: Change, change: Change
) -> None:
    async with mqtt_broker(tmp_path, store=store) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await other.publish("new/x", b"before", 1)
        await before(mqtt, me, other)
        await me.subscribe(FilterSubscription("new/#", 1, retain_handling=2))
        await change(mqtt, me, other)
        await other.publish("new/x", b"after", 1)
        await leave(me)
        me = await again(mqtt, 2)  # and leaves again before it is there
        await me.rest()
        me.hang_up()
        await other.publish("new/x", b"later", 1)
        assert await the_rest(mqtt, await again(mqtt)) == LIVE


async def test_a_filter_that_is_raised_from_qos_0_brings_what_is_published_from_then_on_to_a_session_that_returns(
    tmp_path: Path,
) -> None:
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await leave(me)
        await other.publish("live/x", b"missed", 1)
        me = await again(mqtt, 5)
        await me.subscribe("live/#", qos=1)
        await other.publish("live/x", b"after", 1)
        await leave(me)
        await other.publish("live/x", b"later", 1)
        assert await the_rest(mqtt, await again(mqtt)) == LIVE


@pytest.mark.parametrize("handling", [0, 1, 2])
@pytest.mark.parametrize("store", [ASYNC, SYNC], ids=["async", "sync"])
async def test_a_session_that_returns_gets_what_was_retained_before_a_new_filter_once(
    tmp_path: Path, store: StoreConfig, handling: int
) -> None:
    async with mqtt_broker(tmp_path, store=store) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await other.publish("new/x", b"kept", 1, retain=True)
        await me.subscribe(FilterSubscription("new/#", 1, retain_handling=handling))
        await other.publish("new/x", b"after", 1)
        await leave(me)
        await other.publish("new/x", b"later", 1)
        assert sorted(await the_rest(mqtt, await again(mqtt))) == sorted(LIVE + [(b"kept", True)] * (handling < 2))


@pytest.mark.parametrize("handling", [0, 1])
async def test_a_filter_that_is_repeated_before_it_begins_keeps_its_beginning(tmp_path: Path, handling: int) -> None:
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await other.publish("new/x", b"before", 1, retain=True)
        await me.subscribe(FilterSubscription("new/#", 1, retain_handling=2))
        await other.publish("new/x", b"after", 1)
        await leave(me)
        me = await again(mqtt, 5)
        await me.subscribe(FilterSubscription("new/#", 1, retain_handling=handling))
        await leave(me)
        await other.publish("new/x", b"later", 1)
        assert sorted(await the_rest(mqtt, await again(mqtt))) == sorted(LIVE + [(b"before", True)] * (handling == 0))


async def test_another_connection_takes_a_session_over_before_a_new_filter_begins(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await other.publish("new/x", b"before", 1)
        await me.subscribe("new/#", qos=1)
        await other.publish("new/x", b"after", 1)
        me = await again(mqtt)
        await other.publish("new/x", b"later", 1)
        assert await the_rest(mqtt, me) == LIVE


@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("is_rebuilt", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_new_filter_of_a_session_behind_begins_where_it_did_after_a_restart(
    tmp_path: Path, is_rolled: bool, is_rebuilt: bool, leaves: bool
) -> None:
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        me, other = await behind(mqtt, 30, 5), await mqtt.connect("other")
        await other.publish("new/x", b"before", 1)
        await me.subscribe("new/#", qos=1)
        await other.publish("new/x", b"after", 1)
        if leaves:
            await leave(me)
        if is_rolled:  # their notes are written again
            finish_now(mqtt.broker.sessions.table.roll(0, mqtt.broker.store.appended))
            await mqtt.settle()
    if is_rebuilt:
        (tmp_path / "config" / "sessions.snapshot").unlink()
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        await (await mqtt.connect()).publish("new/x", b"later", 1)
        assert await the_rest(mqtt, await again(mqtt)) == LIVE


async def test_what_is_published_before_in_the_segment_of_a_client_that_leaves_at_once_is_not_live(
    tmp_path: Path,
) -> None:
    async with mqtt_broker(tmp_path, store=SYNC) as mqtt:
        me = await mqtt.connect("me", expiry_s=100)
        await me.send(
            Publish("kept", b"before", 1, packet_id=1), Subscribe(2, (FilterSubscription("kept", 1),)), Disconnect()
        )
        await me.closed()
        assert await the_rest(mqtt, await again(mqtt)) == []


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_new_filter_of_a_session_behind_begins_where_it_did_after_kill_9(tmp_path: Path, flush: str) -> None:
    async def first(address: str) -> None:
        async with talking(address) as me, talking(address) as other:
            for client_id, talk in (("me", me), ("other", other)):
                values = Properties({Property.SESSION_EXPIRY: 100, Property.RECEIVE_MAXIMUM: 5})
                await talk.send(Connect(client_id, clean_start=True, properties=values))
                await talk.expect(Connack)
            await me.subscribe("kept", qos=1)
            for number in range(30):
                await other.publish("kept", b"%d" % number, 1)
            await other.publish("new/x", b"before", 1)
            await me.subscribe("new/#", qos=1)
            await other.publish("new/x", b"after", 1)
            await other.publish("kept", b"end", 1)

    async def second(address: str) -> None:
        async with talking(address) as me:
            values = Properties({Property.SESSION_EXPIRY: 100})
            await me.send(Connect("me", clean_start=False, properties=values))
            assert (await me.expect(Connack)).session_present
            came = [each.payload for each in await until(me, b"end")]
            assert came == [*(b"%d" % number for number in range(30)), b"after"]

    for part in (first, second):
        with mqtt_process(tmp_path, flush) as process:
            trio.run(part, process.addresses["mqtt"])
