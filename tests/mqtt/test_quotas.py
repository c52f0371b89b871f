"""Quotas of MQTT clients: slowed, or refused in the words of MQTT; none of their messages is lost."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from tests.limits import Progress, give, know, used
from tests.wire_clients.mqtt import V4, V5, MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.contracts import Quota
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Connack, Connect, Disconnect, Pingreq, Pingresp, Publish
from martlet_mqtt.wire.properties import Properties, Property

BODY = bytes(1000)
EXCEEDED = ReasonCode.QUOTA_EXCEEDED


@pytest.fixture
async def mqtt(tmp_path: Path) -> AsyncIterator[MqttBroker]:
    async with mqtt_broker(tmp_path) as found:
        yield found


def publishes(count: int, qos: int = 1, body: bytes = BODY, first: int = 0) -> list[Publish]:
    return [
        Publish(f"a/{number % 3}", b"%d " % number + body, qos, packet_id=number + 1 if qos else 0)
        for number in range(first, first + count)
    ]


async def accepted(talk: MqttClient, progress: Progress, count: int, size: float = 1) -> None:
    """Take *count* acknowledgements."""
    for _ in range(count):
        answer = await talk.expect(Ack)
        assert (answer.kind, answer.reason) == (PacketType.PUBACK, 0)
        progress.came(size)


async def take(talk: MqttClient, progress: Progress, count: int) -> list[bytes]:
    """Receive and acknowledge *count* messages; return the first words of their payloads."""
    words = []
    for _ in range(count):
        (packet,) = await talk.messages(1)
        progress.came()
        if packet.qos:
            await talk.acknowledge(packet)
        words.append(packet.payload.split(b" ")[0])
    return words


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_publisher_is_slowed_down_to_its_messages_a_second(
    mqtt: MqttBroker, version: int, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(messages_in=10))
    talk, reader = await mqtt.connect("a", version), mqtt.open()
    progress = Progress(10, step=8)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk.send, *publishes(80))
        await accepted(talk, progress, 80)
    progress.check_end()
    slowed_ms, refused = used(mqtt.broker)
    assert slowed_ms > 6000
    assert refused == 0
    del reader


async def test_a_publisher_is_slowed_down_to_its_bytes_a_second(mqtt: MqttBroker, autojump_clock: MockClock) -> None:
    give(mqtt.broker, Quota(bytes_in=10_000))
    talk = await mqtt.connect("a")
    progress = Progress(10_000, step=8000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk.send, *publishes(80))
        await accepted(talk, progress, 80, 1000)
    assert 5.5 < progress.seconds < 9


async def test_small_messages_that_came_in_one_read_are_paid_for_before_the_next(
    mqtt: MqttBroker, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(messages_in=10))
    talk = await mqtt.connect("a")
    began = trio.current_time()
    await talk.send(*publishes(100, 0, b""), Pingreq())
    await talk.expect(Pingresp)
    assert trio.current_time() - began == pytest.approx(9, abs=0.3)


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 7])
async def test_a_message_above_the_rate_is_refused_with_its_reason(
    mqtt: MqttBroker, qos: int, count: int, autojump_clock: MockClock
) -> None:
    """Alone, and in a run of packets."""
    give(mqtt.broker, Quota(messages_in=10, refuses=True), bob=[])
    talk, reader = await mqtt.connect("a"), await mqtt.connect("b")
    await reader.subscribe("#")
    for first in range(0, 14, count):
        await talk.send(*publishes(count, qos, b"", first))
    reasons = [(await talk.expect(Ack)).reason for _ in range(14 if qos else 0)]
    assert reasons == ([0] * 10 + [EXCEEDED] * 4 if qos else [])
    await talk.rest()
    got = [packet.payload for packet in await reader.rest()]
    assert got == [each + b" " for each in numbers(10)]
    assert used(mqtt.broker) == (0, 4)
    await trio.sleep(0.25)
    assert [await talk.publish("a", b"more", 1) for _ in range(3)] == [0, 0, EXCEEDED]


async def test_a_refusal_tells_the_limit(mqtt: MqttBroker, autojump_clock: MockClock) -> None:
    give(mqtt.broker, Quota(messages_in=1, refuses=True))
    talk = await mqtt.connect("a")
    await talk.send(*publishes(1), *publishes(1, first=1))
    assert (await talk.expect(Ack)).reason == 0
    text = (await talk.expect(Ack)).properties.text(Property.REASON_STRING)
    assert text == "clients without a name: may send 1 messages a second, and that is used up; try again later"


@pytest.mark.parametrize("count", [1, 11])
async def test_a_client_of_mqtt_3_must_connect_again_so_that_nothing_is_lost(
    mqtt: MqttBroker, count: int, autojump_clock: MockClock
) -> None:
    """It cannot be told, and it would believe an acknowledgement."""
    give(mqtt.broker, Quota(messages_in=10, refuses=True))
    talk = await mqtt.connect("a", V4, clean=False)
    for first in range(0, 11, count):
        await talk.send(*publishes(count, 1, b"", first))
    for number in range(10):
        assert (await talk.expect(Ack)).packet_id == number + 1
    assert await talk.closed() is None
    await trio.sleep(1)
    talk = await mqtt.connect("a", V4, clean=False)
    await talk.send(*publishes(2, 1, b"", 10))
    assert [(await talk.expect(Ack)).packet_id for _ in range(2)] == [11, 12]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("refuses", [False, True])
async def test_a_subscriber_gets_its_messages_later(
    mqtt: MqttBroker, qos: int, refuses: bool, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(messages_out=10, refuses=refuses))
    talk, sender = await mqtt.connect("a"), await mqtt.connect("b")
    await talk.subscribe("a/#", qos=qos)
    progress = Progress(10, step=3)
    for packet in publishes(60, 1, b""):
        await sender.publish(packet.topic, packet.payload, 1)
    assert progress.seconds < 0.5, "who sends is not slowed"
    assert await take(talk, progress, 60) == numbers(60)
    progress.check_end()
    assert await talk.rest() == []
    assert used(mqtt.broker)[1] == 0


async def test_bytes_to_a_subscriber_are_limited(mqtt: MqttBroker, autojump_clock: MockClock) -> None:
    give(mqtt.broker, Quota(bytes_out=10_000))
    talk, sender = await mqtt.connect("a"), await mqtt.connect("b")
    await talk.subscribe("a/#", qos=0)
    began = trio.current_time()
    await sender.send(*publishes(60, 0))
    got = await talk.messages(60)
    assert [packet.payload.split(b" ")[0] for packet in got] == numbers(60)
    assert 5 < trio.current_time() - began < 9


async def test_a_shared_subscription_gives_what_a_slowed_member_may_not_have_to_others(
    mqtt: MqttBroker, autojump_clock: MockClock
) -> None:
    know(mqtt.broker)
    give(mqtt.broker, ann=[Quota(messages_out=1)])
    slow = await mqtt.connect("a", user_name="ann", password=b"ann")
    other, sender = await mqtt.connect("b"), await mqtt.connect("c")
    for talk in slow, other:
        await talk.subscribe("$share/g/a/#", qos=1)
    began = trio.current_time()
    for packet in publishes(40, 1, b""):
        await sender.publish(packet.topic, packet.payload, 1)
    got: set[bytes] = set()
    async with trio.open_nursery() as nursery:
        for talk in slow, other:
            nursery.start_soon(collect, talk, got, 40, nursery.cancel_scope)
    assert got == set(numbers(40))
    assert trio.current_time() - began < 10


async def collect(talk: MqttClient, got: set[bytes], count: int, done: trio.CancelScope) -> None:
    while len(got) < count:
        (packet,) = await talk.messages(1)
        await talk.acknowledge(packet)
        got.add(packet.payload.split(b" ")[0])
    done.cancel()


@pytest.mark.parametrize("qos", [0, 1])
async def test_retained_messages_count_too(mqtt: MqttBroker, qos: int, autojump_clock: MockClock) -> None:
    sender = await mqtt.connect("b")
    for number in range(40):
        await sender.publish(f"r/{number:02d}", b"x", 1, retain=True)
    give(mqtt.broker, Quota(messages_out=10))
    talk = await mqtt.connect("a")
    progress = Progress(10, step=3)
    await talk.subscribe("r/#", qos=qos)
    await take(talk, progress, 40)
    progress.check_end()


async def test_a_session_gets_what_it_has_missed_at_its_rate(mqtt: MqttBroker, autojump_clock: MockClock) -> None:
    give(mqtt.broker, Quota(messages_out=10))
    talk = await mqtt.connect("a", expiry_s=1000)
    await talk.subscribe("a/#", qos=1)
    await talk.disconnect()
    sender = await mqtt.connect("b")
    for packet in publishes(40, 1, b""):
        await sender.publish(packet.topic, packet.payload, 1)
    progress = Progress(10, step=3)
    talk = await mqtt.connect("a", clean=False, expiry_s=1000)
    assert await take(talk, progress, 40) == numbers(40)
    progress.check_end()


# who shares what


async def test_two_connections_of_a_user_take_turns_and_others_are_not_slowed(
    mqtt: MqttBroker, autojump_clock: MockClock
) -> None:
    know(mqtt.broker)
    give(mqtt.broker, ann=[Quota(messages_in=20)])
    talks = [await mqtt.connect(name, user_name="ann", password=b"ann") for name in ("a", "b")]
    other = await mqtt.connect("c")
    counts = [0, 0]

    async def send(number: int) -> None:
        async with trio.open_nursery() as sending:
            sending.start_soon(talks[number].send, *publishes(200))
            for _ in range(200):
                await talks[number].expect(Ack)
                counts[number] += 1

    async with trio.open_nursery() as nursery:
        for number in range(2):
            nursery.start_soon(send, number)
        await trio.sleep(5)
        began = trio.current_time()
        for _ in range(50):
            assert await other.publish("a", BODY, 1) == 0
        assert trio.current_time() - began < 0.5
        await trio.sleep(5)
        assert sum(counts) == pytest.approx(220, abs=30)
        assert abs(counts[0] - counts[1]) <= 25
        nursery.cancel_scope.cancel()


async def test_two_users_share_the_quota_of_their_group(mqtt: MqttBroker, autojump_clock: MockClock) -> None:
    know(mqtt.broker)
    group = Quota("staff", messages_in=10, refuses=True)
    give(mqtt.broker, ann=[group], bob=[Quota(messages_in=5, refuses=True), group], eve=[])
    ann, bob, eve = [await mqtt.connect(name, user_name=name, password=name.encode()) for name in ("ann", "bob", "eve")]
    assert [await bob.publish("a", b"x", 1) for _ in range(6)] == [0] * 5 + [EXCEEDED]
    assert [await ann.publish("a", b"x", 1) for _ in range(6)] == [0] * 5 + [EXCEEDED]
    assert [await eve.publish("a", b"x", 1) for _ in range(20)] == [0] * 20


@pytest.mark.parametrize("refuses", [False, True])
async def test_connecting_again_does_not_help(mqtt: MqttBroker, refuses: bool, autojump_clock: MockClock) -> None:
    give(mqtt.broker, Quota(messages_in=10, refuses=refuses))
    began = trio.current_time()
    accepted_count = 0
    for number in range(30):
        talk = await mqtt.connect(f"c{number}")
        await talk.send(*publishes(4, 1, b""))
        for _ in range(4):
            accepted_count += (await talk.expect(Ack)).reason == 0
        talk.hang_up()
        if refuses:
            await trio.sleep(0.1)
    assert accepted_count <= 10 * (trio.current_time() - began + 1) + 4
    assert accepted_count >= (39 if refuses else 120)


# keep alive


async def test_a_client_that_the_broker_does_not_read_misses_no_keep_alive(
    mqtt: MqttBroker, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(messages_in=1))
    talk = await mqtt.connect("a", keep_alive_s=2)
    began = trio.current_time()
    await talk.send(*publishes(60, 0, b""))  # in one read
    await trio.sleep(50)
    assert "a" in mqtt.context.clients
    await talk.send(Pingreq())
    await talk.expect(Pingresp)
    assert trio.current_time() - began == pytest.approx(60, abs=0.5)
    await trio.sleep(2)
    await talk.send(*publishes(30, 0, b""))
    last = await talk.closed()
    assert isinstance(last, Disconnect)
    assert last.reason == ReasonCode.KEEP_ALIVE_TIMEOUT
    assert trio.current_time() - began == pytest.approx(60 + 2 + 30 + 3, abs=0.5), (
        "and then it counts from the end of the pause"
    )


async def test_a_slowed_subscriber_is_answered_meanwhile(mqtt: MqttBroker, autojump_clock: MockClock) -> None:
    give(mqtt.broker, Quota(messages_out=1))
    talk, sender = await mqtt.connect("a", keep_alive_s=2), await mqtt.connect("b")
    await talk.subscribe("#", qos=0)
    await sender.send(*publishes(20, 0, b""))
    for _ in range(20):
        await trio.sleep(1)
        await talk.send(Pingreq())
        before = trio.current_time()
        await talk.expect(Pingresp)
        assert trio.current_time() - before < 0.1
    assert len(await talk.messages(20)) == 20


# counts


@pytest.mark.parametrize(("version", "reason"), [(V4, 3), (V5, EXCEEDED)])
async def test_too_many_connections_are_refused_with_connack(
    mqtt: MqttBroker, version: int, reason: int, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(connections=2))
    first = await mqtt.connect("a", version)
    await mqtt.connect("b", version)
    talk, answer = await mqtt.answer(Connect("c", version, True))
    assert answer.reason == reason
    assert await talk.closed() is None
    if version == V5:
        text = answer.properties.text(Property.REASON_STRING)
        assert text == "clients without a name: 2 connections are open, and the quota is 2"
    await first.disconnect()
    await mqtt.connect("c", version)
    assert used(mqtt.broker) == (0, 1)


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_client_that_takes_its_session_over_needs_no_second_connection(
    mqtt: MqttBroker, version: int, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(connections=1))
    first = await mqtt.connect("a", version, clean=False, expiry_s=100)
    again = await mqtt.connect("a", version, clean=False, expiry_s=100, present=True)
    await first.closed()
    assert await again.publish("x", b"y", 1) == 0
    assert mqtt.broker.quotas.statistics()["identities"] == 1


async def test_a_connection_that_is_refused_for_something_else_is_not_counted(
    mqtt: MqttBroker, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(connections=1))
    too_small = Properties({Property.MAXIMUM_PACKET_SIZE: 5})
    for _ in range(3):
        talk = mqtt.open()
        await talk.send(Connect("", V5, True, properties=too_small))
        await talk.closed()
    await mqtt.connect("a")
    assert mqtt.broker.quotas.statistics()["identities"] == 1


@pytest.mark.parametrize(("version", "code"), [(V4, 0x80), (V5, EXCEEDED)])
async def test_too_many_subscriptions_are_refused_with_suback(
    mqtt: MqttBroker, version: int, code: int, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(subscriptions=3))
    talk, other = await mqtt.connect("a", version), await mqtt.connect("b", version)
    assert await talk.subscribe("a", "b", qos=0) == (0, 0)
    assert await other.subscribe("a", "b", "c", qos=0) == (0, code, code)
    assert await talk.subscribe("a", qos=1) == (1,), "it has this one already"
    await talk.unsubscribe("a")
    assert await other.subscribe("b", "c", qos=0) == (0, code)
    other.hang_up()
    assert await talk.subscribe("c", "d", qos=0) == (0, 0)


async def test_the_subscriptions_of_a_session_count_while_its_client_is_connected(
    mqtt: MqttBroker, autojump_clock: MockClock
) -> None:
    give(mqtt.broker, Quota(subscriptions=3))
    talk = await mqtt.connect("a", expiry_s=1000)
    await talk.subscribe("a", "b", "c")
    other = await mqtt.connect("b")
    assert await other.subscribe("x", qos=0) == (EXCEEDED,)
    await talk.disconnect()
    assert await other.subscribe("x", qos=0) == (0,)
    talk = await mqtt.connect("a", clean=False, expiry_s=1000)
    assert await talk.subscribe("d", qos=0) == (EXCEEDED,), "its own stay, and no more are added"
    assert await other.publish("a", b"1", 1) == 0
    assert await talk.payloads(1) == [b"1"]


async def test_too_many_shared_groups_are_refused_with_suback(mqtt: MqttBroker, autojump_clock: MockClock) -> None:
    give(mqtt.broker, Quota(shared_groups=2))
    talk, other = await mqtt.connect("a"), await mqtt.connect("b")
    assert await talk.subscribe("$share/g/a", "$share/h/a", "a", qos=0) == (0, 0, 0)
    assert await other.subscribe("$share/g/a", "$share/i/a", qos=0) == (0, EXCEEDED)
    await talk.unsubscribe("$share/g/a", "$share/h/a")
    assert await other.subscribe("$share/i/a", "$share/j/a", qos=0) == (0, EXCEEDED)
    other.hang_up()
    await trio.sleep(1)
    assert await talk.subscribe("$share/i/a", "$share/j/a", qos=0) == (0, 0)


async def test_wills_and_metrics_do_not_count(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(sys_interval_s=1)) as mqtt:
        give(mqtt.broker, Quota(messages_in=1, messages_out=1, refuses=True))
        talk = await mqtt.connect("a")
        await talk.subscribe("$SYS/broker/#", qos=0)
        assert len(await talk.messages(30)) == 30
        assert trio.current_time() < 20
        assert isinstance((await mqtt.answer(Connect("z", V5, True)))[1], Connack)
        assert used(mqtt.broker) == (0, 0)
