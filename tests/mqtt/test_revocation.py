"""A change of the rules ends the connections of clients that may no longer follow a filter, without a message."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.mqtt.test_access import ALL, Room, drain, reason_of, room_of
from tests.wire_clients.mqtt import V4, V5, MqttClient

from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.packets import Ack, Pingreq, Pingresp
from martlet_mqtt.wire.properties import Property

DENIED = ReasonCode.NOT_AUTHORIZED
PATIENCE_S = 60
# The right of "bob" that each filter needs, and what he may do without it.
RIGHTS = {
    "a/#": ALL.replace("read mqtt/#", "read mqtt/b/#"),
    "$SYS/broker/uptime": ALL.replace("read $SYS/#; ", ""),
    "$share/g/a/#": ALL.replace("; read $share*", ""),
}


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with room_of(tmp_path, ann=ALL, bob=ALL) as found:
        yield found


async def last_packet(talk: MqttClient) -> Any:
    """Return the last packet of the broker, which ends the connection."""
    with trio.fail_after(PATIENCE_S):
        return await talk.closed()


async def ended(talk: MqttClient, version: int = V5) -> None:
    """Wait until the broker has ended the connection, and check its last packet."""
    last = await last_packet(talk)
    if version == V5:
        assert reason_of(last) == DENIED
    else:
        assert not isinstance(last, Ack)


@pytest.mark.parametrize("version", [V4, V5])
@pytest.mark.parametrize("topic_filter", RIGHTS)
async def test_an_idle_client_is_disconnected(room: Room, topic_filter: str, version: int) -> None:
    talks = {user: await room.connect(user, version=version) for user in ("ann", "bob")}
    for talk in talks.values():
        await talk.subscribe("b/#", topic_filter, qos=1)
        await talk.rest()  # the last metrics
    room.users.write(ann=ALL, bob=RIGHTS[topic_filter])
    await ended(talks["bob"], version)
    assert await talks["ann"].rest() == []


@pytest.mark.parametrize("topic_filter", RIGHTS)
async def test_a_client_that_acknowledges_nothing_is_disconnected(tmp_path: Path, topic_filter: str) -> None:
    """Its window is full, so nothing is collected for it."""
    async with room_of(tmp_path, ann=ALL, bob=ALL) as room:
        values = {Property.RECEIVE_MAXIMUM: 1}
        bob, ann = await room.connect("bob", values=values), await room.connect("ann")
        await bob.subscribe("c", topic_filter, qos=1)
        for name in ("c", "a/1", "a/2"):
            await ann.publish(name, b"x", 1)
        await bob.messages(1)
        right = RIGHTS[topic_filter].replace("read mqtt/b/#", "read mqtt/c")
        room.users.write(ann=ALL, bob=right)
        assert reason_of(await last_packet(bob)) == DENIED


@pytest.mark.parametrize("topic_filter", RIGHTS)
async def test_a_client_that_still_gets_retained_messages_is_disconnected(tmp_path: Path, topic_filter: str) -> None:
    options = {"config": MqttConfig(in_flight_max=1)}
    async with room_of(tmp_path, options=options, ann=ALL, bob=ALL) as room:
        ann = await room.connect("ann")
        for number in range(3):
            await ann.publish(f"c/{number}", b"kept", 1, retain=True)
        await room.mqtt.settle()
        bob = await room.connect("bob")
        await bob.subscribe(topic_filter, "c/#", qos=1)
        while not (await bob.messages(1))[0].retain:
            pass
        right = RIGHTS[topic_filter].replace("read mqtt/b/#", "read mqtt/c/#")
        room.users.write(ann=ALL, bob=right)
        assert reason_of(await last_packet(bob)) == DENIED


async def test_an_idle_member_leaves_and_what_it_holds_goes_to_a_permitted_one(room: Room) -> None:
    bob, ann, writer = await room.connect("bob"), await room.connect("ann"), await room.connect("ann", "writer")
    for each in (bob, ann):
        await each.subscribe("$share/g/a/#", qos=1)
    payloads = [b"%d" % number for number in range(20)]
    for payload in payloads:
        await writer.publish("a/1", payload, 1)
    first = await drain(ann, room.mqtt)
    held = [packet.payload for packet in await bob.rest()]  # not acknowledged
    assert held
    room.users.write(ann=ALL, bob=RIGHTS["$share/g/a/#"])
    await ended(bob)
    while "of bob" in room.mqtt.context.clients:
        await trio.lowlevel.checkpoint()
    assert sorted(first + await drain(ann, room.mqtt)) == sorted(payloads)


async def test_a_session_that_was_disconnected_or_offline_returns_without_the_denied_filter(room: Room) -> None:
    names = {"online": await room.connect("bob", "online", expiry_s=100)}
    names["offline"] = await room.connect("bob", "offline", expiry_s=100)
    for talk in names.values():
        await talk.subscribe("a/#", "b/#", qos=1)
    await names["offline"].disconnect()
    ann = await room.connect("ann")
    room.users.write(ann=ALL, bob="read mqtt/b/#")
    await ended(names["online"])
    for name in ("a/1", "b/1"):
        await ann.publish(name, name.encode(), 1)
    for client_id in names:
        bob = await room.connect("bob", client_id, clean=False, expiry_s=100, present=True)
        assert await bob.payloads(1) == [b"b/1"]
        assert await bob.rest() == []


async def test_a_client_that_may_still_follow_misses_nothing_and_gets_nothing_twice(room: Room) -> None:
    bob, ann = await room.connect("bob"), await room.connect("ann")
    await bob.subscribe("a/#", "$share/g/b/#", qos=1)
    sent: list[bytes] = []
    for number in range(60):
        name, payload = "ab"[number % 2] + "/1", b"%d" % number
        await ann.publish(name, payload, 1)
        sent.append(payload)
        if number % 7 == 0:
            room.users.write(ann=ALL, bob=ALL)
    assert sorted(await drain(bob, room.mqtt)) == sorted(sent)


async def test_a_client_without_subscriptions_stays(room: Room) -> None:
    bob = await room.connect("bob")
    room.users.write(ann=ALL, bob="read mqtt/b")
    await bob.send(Pingreq())
    await bob.expect(Pingresp)


async def test_a_right_that_comes_back_at_once_disconnects_nobody(room: Room) -> None:
    bob = await room.connect("bob")
    await bob.subscribe(*RIGHTS, qos=1)
    await bob.rest()
    for right in (*RIGHTS.values(), ALL):
        room.users.write(ann=ALL, bob=right)
    while room.mqtt.broker.revocation.is_visiting:
        await trio.lowlevel.checkpoint()
    assert await bob.rest() == []


def options_of(**keys: Any) -> dict[str, Any]:
    return {"config": MqttConfig(**keys)}


async def test_a_client_with_very_many_filters_is_disconnected(tmp_path: Path) -> None:
    async with room_of(tmp_path, ann=ALL, bob=ALL, options=options_of(filters_max=2000)) as room:
        bob = await room.connect("bob")
        await bob.subscribe(*[f"a/{number}" for number in range(500)], "b/last", qos=1)
        room.users.write(ann=ALL, bob="read mqtt/a/#")
        assert reason_of(await last_packet(bob)) == DENIED
