"""What a subscription of QoS 1 or 2 has not brought of the retained messages follows on the next connection."""

from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from tests.mqtt.retained_talk import append, applied
from tests.wire_clients.mqtt import V5, MqttBroker, MqttClient, mqtt_broker

from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.mapping.frames import Grant
from martlet_mqtt.outbound.stored_subscriptions import Rest, grant_of, options_of, rest_of
from martlet_mqtt.wire.packets import Connack, Connect, FilterSubscription, Publish, Suback, Subscribe
from martlet_mqtt.wire.properties import Properties, Property

DATA = Path("/data")
STORE = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 14, cache_bytes=1 << 20)
COUNT = 300
FEW = {Property.RECEIVE_MAXIMUM: 5}
POSITIONS = st.integers(0, 1 << 62)
GRANTS = st.builds(
    Grant,
    st.builds(FilterSubscription, st.just("f"), st.integers(0, 2), st.booleans(), st.booleans(), st.integers(0, 2)),
    st.sampled_from([0, 1, 300, 268_435_455]),
    st.sampled_from(["", "a = 'ä'"]),
)


@given(GRANTS, st.none() | st.builds(Rest, POSITIONS.map(lambda each: each - 1), POSITIONS, POSITIONS, st.text("aä/")))
def test_a_session_stores_subscriptions_with_what_is_due(grant: Grant, rest: Rest | None) -> None:
    stored = options_of(grant, rest)
    assert (grant_of("f", stored), rest_of(stored)) == (grant, rest)


async def retain_many(mqtt: MqttBroker, qos: int = 1) -> None:
    for number in range(COUNT):
        append(mqtt, f"a/{number:03}", b"%d" % number, qos=qos)
    await applied(mqtt)


async def come_back(mqtt: MqttBroker) -> MqttClient:
    return await mqtt.connect("c", clean=False, expiry_s=1000, values=FEW, present=True)


async def take(talk: MqttClient, count: int) -> list[Publish]:
    """Acknowledge *count* messages, and return these and all others that come."""
    found: list[Publish] = []
    while len(found) < count:
        found += await talk.messages(1)
        await talk.acknowledge(found[-1])
    await trio.testing.wait_all_tasks_blocked()
    return found + await talk.rest()


async def drain(talk: MqttClient) -> list[Publish]:
    """Return all that comes until there is nothing more, acknowledged."""
    found: list[Publish] = []
    while messages := await take(talk, 0):
        for message in messages:
            await talk.acknowledge(message)
        found += messages
    return found


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("end", ["kill -9", "stop", "disconnection"])
async def test_each_comes_once_over_many_connections(end: str, qos: int) -> None:
    disk, found = FakeDisk(), list[Publish]()
    async with mqtt_broker(DATA, store=STORE, disk=disk) as mqtt:
        await retain_many(mqtt, qos)
        talk = await mqtt.connect("c", expiry_s=1000, values=FEW)
        await talk.subscribe("a/+", qos=2)
        for count in (1, 70, 10):
            found += await take(talk, count)
            talk.hang_up()
            while end == "disconnection" and "c" in mqtt.context.clients:
                await trio.lowlevel.checkpoint()
            if end != "disconnection":
                break
            talk = await come_back(mqtt)
        else:
            found += await drain(talk)
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    for count in (70, 10, 0) if end != "disconnection" else ():
        disk = killed if end == "kill -9" else disk
        async with mqtt_broker(DATA, store=STORE, disk=disk) as mqtt:
            talk = await come_back(mqtt)
            found += await take(talk, count) if count else await drain(talk)
            killed = disk.after_power_cut(Cut.KILLED, Random(1))
    assert all(message.retain for message in found)
    assert [int(message.payload) for message in found if not message.is_duplicate] == list(range(COUNT))
    assert sum(message.is_duplicate for message in found) == 3 * 5


async def test_what_changes_while_the_client_is_away_is_no_part_of_it() -> None:
    """It comes as what it is: a new message, once."""
    async with mqtt_broker(DATA, store=STORE, disk=FakeDisk()) as mqtt:
        await retain_many(mqtt)
        talk = await mqtt.connect("c", expiry_s=1000, values=FEW)
        await talk.subscribe("a/+", qos=1)
        first = await take(talk, 10)
        for message in first[10:]:
            await talk.acknowledge(message)
        count = len(first) + len(await take(talk, 0))
        await talk.disconnect()
        append(mqtt, "a/000", b"new of the first")
        append(mqtt, "a/200", b"new of the rest")
        append(mqtt, "a/201", b"")
        append(mqtt, "a/202x", b"another name")
        await applied(mqtt)
        found = await drain(await come_back(mqtt))
        new = [message.payload for message in found if not message.retain]
        assert new == [b"new of the first", b"new of the rest", b"", b"another name"]
        old = [int(message.payload) for message in found if message.retain and not message.is_duplicate]
        assert old == [number for number in range(count, COUNT) if number not in (200, 201)]
        assert await drain(await come_back(mqtt)) == []


async def test_what_must_follow_the_missed_messages_does_on_a_later_connection() -> None:
    async with mqtt_broker(DATA, store=STORE, disk=FakeDisk()) as mqtt:
        append(mqtt, "a/old", b"old")
        await applied(mqtt)
        talk = await mqtt.connect("c", expiry_s=1000, values=FEW)
        await talk.subscribe("a/+", qos=1)
        assert [message.payload for message in await drain(talk)] == [b"old"]
        await talk.disconnect()
        missed = [b"%d" % number for number in range(20)]
        for payload in missed:
            append(mqtt, f"a/{int(payload) % 3}", payload)
        await applied(mqtt)
        talk = mqtt.open()
        await talk.send(
            Connect("c", V5, False, properties=Properties({Property.SESSION_EXPIRY: 1000, **FEW})),
            Subscribe(1, (FilterSubscription("a/+", 1),)),
        )
        await talk.expect(Connack)
        await talk.expect(Suback)
        found = await take(talk, 8)
        await talk.disconnect()
        found += [message for message in await drain(await come_back(mqtt)) if not message.is_duplicate]
        assert [message.payload for message in found] == [b"old", *missed, b"18", b"19", b"17"]
        assert [message.retain for message in found] == [True, *[False] * 20, *[True] * 3]


@pytest.mark.parametrize(
    ("again", "expected"),
    [
        (FilterSubscription("a/+", 1, retain_handling=0), COUNT),
        (FilterSubscription("a/+", 1, retain_handling=1), COUNT - 5),
        (FilterSubscription("a/+", 1, retain_handling=2), COUNT - 5),
        (FilterSubscription("a/+", 0, retain_handling=2), 0),
    ],
)
async def test_another_subscribe_keeps_what_is_due_unless_it_asks_for_all(
    again: FilterSubscription, expected: int
) -> None:
    async with mqtt_broker(DATA, store=STORE, disk=FakeDisk()) as mqtt:
        await retain_many(mqtt)
        talk = await mqtt.connect("c", expiry_s=1000, values=FEW)
        await talk.subscribe("a/+", qos=1)
        assert len(await take(talk, 0)) == 5
        await talk.disconnect()
        talk = await come_back(mqtt)
        assert await talk.subscribe(again) == (again.qos,)
        found = await take(talk, 0)
        await talk.disconnect()
        found += await drain(await come_back(mqtt))
        assert sum(not message.is_duplicate for message in found) == expected


async def test_nothing_of_it_follows_once_it_is_unsubscribed() -> None:
    async with mqtt_broker(DATA, store=STORE, disk=FakeDisk()) as mqtt:
        await retain_many(mqtt)
        talk = await mqtt.connect("c", expiry_s=1000, values=FEW)
        await talk.subscribe("a/+", qos=1)
        await take(talk, 0)
        await talk.disconnect()
        talk = await come_back(mqtt)
        await talk.unsubscribe("a/+")
        await take(talk, 0)
        await talk.disconnect()
        found = await drain(await come_back(mqtt))
        assert len(found) == 5
        assert all(message.is_duplicate for message in found)
