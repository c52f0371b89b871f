"""Refused CONNECT: the client gets the reason, and neither its connection nor its session leaves anything behind."""

from errno import ENOSPC
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, mqtt_broker
from trio.testing import MockClock

from martlet.settings import DeliveryConfig
from martlet.tables.topics import READ, WRITE
from martlet.testing.clock import TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Publish,
    Suback,
    Subscribe,
    Will,
)
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

DATA = Path("/data")
LARGE = Will("will", bytes(65_500), 1, properties=Properties({Property.CONTENT_TYPE: "x" * 100}))
SMALL = small_config(segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)
EXPIRY = Properties({Property.SESSION_EXPIRY: 1000})


def connect_of(version: int, will: Will | None, client_id: str = "c", *, clean: bool = False) -> Connect:
    return Connect(client_id, version, clean, will=will, properties=EXPIRY if version == V5 else NO_PROPERTIES)


def holds(mqtt: MqttBroker) -> tuple[object, ...]:
    """What the broker holds for clients."""
    sessions, cursors = mqtt.broker.sessions.statistics(), mqtt.broker.cursors.statistics()
    return sessions["attached"], len(mqtt.context.clients), cursors["cursors"], len(mqtt.broker.sessions.live.by_key)


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_will_that_is_too_large_for_a_session_is_refused(tmp_path: Path, version: int) -> None:
    will = LARGE if version == V5 else Will("w" * 100, bytes(65_500), 1)
    async with mqtt_broker(tmp_path, MqttConfig(connect_bytes_max=1 << 20)) as mqtt:
        talk = await mqtt.connect("c", version, clean=False, expiry_s=1000)
        before = holds(mqtt)
        for client_id in ("c", "another"):
            other, answer = await mqtt.answer(connect_of(version, will, client_id))
            assert answer.reason == (ReasonCode.PACKET_TOO_LARGE if version == V5 else 3)
            assert await other.closed() is None
        assert holds(mqtt) == before
        assert await talk.rest() == [], "it goes on"
        other, answer = await mqtt.answer(connect_of(version, Will("will", bytes(60_000), 1)))
        assert (answer.reason, answer.session_present) == (0, True)
        assert holds(mqtt)[:2] == before[:2]


@pytest.mark.parametrize("delivery", [DeliveryConfig(session_bytes_max=1024), DeliveryConfig(sessions_bytes_max=1024)])
async def test_a_will_for_which_there_is_no_room_is_refused(tmp_path: Path, delivery: DeliveryConfig) -> None:
    async with mqtt_broker(tmp_path, delivery=delivery) as mqtt:
        talk = await mqtt.connect("c", expiry_s=1000)
        before = holds(mqtt)
        for client_id in ("c", "another"):
            _, answer = await mqtt.answer(connect_of(V5, Will("will", bytes(1000), 1), client_id))
            assert answer.reason == ReasonCode.QUOTA_EXCEEDED
        assert holds(mqtt) == before
        assert await talk.rest() == [], "it goes on"
        await talk.disconnect()
        _, answer = await mqtt.answer(connect_of(V5, Will("will", bytes(500), 1)))
        assert (answer.reason, answer.session_present) == (0, True)


async def test_a_client_that_is_refused_late_leaves_the_session_as_it_was(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """It cannot read the topic, which is found out when it has the session."""
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        will = Will("will", b"gone", 1, properties=Properties({Property.WILL_DELAY: 100}))
        talk = await mqtt.connect("c", expiry_s=1000, will=will)
        await talk.subscribe(FilterSubscription("a", 1))
        talk.hang_up()
        await trio.sleep(10)
        await mqtt.settle()
        before = holds(mqtt)
        topic = mqtt.broker.topics.get("mqtt")
        assert topic is not None
        mqtt.broker.topics.update("mqtt", perm=WRITE)
        never = Will("will", b"of a connection that was never accepted", 1)
        _, answer = await mqtt.answer(connect_of(V5, never))
        assert answer.reason == ReasonCode.NOT_AUTHORIZED
        await mqtt.settle()
        assert holds(mqtt) == before
        mqtt.broker.topics.update("mqtt", perm=READ | WRITE)
        assert mqtt.context.counters.wills == 0
        watcher = await mqtt.connect("watcher", V4, keep_alive_s=0)
        await watcher.subscribe("will")
        await trio.sleep(300)
        assert [each.payload for each in await watcher.rest()] == [b"gone"]
        _, answer = await mqtt.answer(connect_of(V5, None))
        assert answer.session_present


def without_text(packet: Packet | None) -> object:
    if isinstance(packet, Connack | Disconnect):
        return type(packet), packet.reason
    return packet


@pytest.mark.parametrize("version", [V4, V5])
@pytest.mark.parametrize("is_stored", [True, False])
async def test_if_the_commit_of_connect_fails_the_answer_is_connack(
    autojump_clock: MockClock, version: int, is_stored: bool
) -> None:
    """The packets of one read are answered as far as nothing was lost: first by CONNACK in any case."""
    disk = FakeDisk()
    async with mqtt_broker(DATA, store=SMALL, disk=disk, clock=TrioClock()) as mqtt:
        talk = mqtt.open(version)
        mqtt.broker.store.committer.before_commit.append(lambda: disk.fail_next("write", ENOSPC))
        connect = connect_of(version, None, clean=not is_stored)
        if not is_stored:
            connect = Connect("c", version, True)
        packets = (connect, Subscribe(1, (FilterSubscription("a", 0),)), Publish("b", b"x", 2, packet_id=7))
        await talk.send(*packets)
        found: list[object] = []
        try:
            while True:
                found.append(without_text(await talk.receive()))
        except EOFError:
            pass
        if is_stored:
            expected: list[object] = [(Connack, ReasonCode.QUOTA_EXCEEDED if version == V5 else 3)]
        elif version == V5:
            expected = [(Connack, 0), Suback(1, (0,)), (Disconnect, ReasonCode.QUOTA_EXCEEDED)]
        else:
            expected = [(Connack, 0), Suback(1, (0,))]
        assert found == expected
        await trio.sleep(100)
        assert holds(mqtt) == (0, 0, 0, 0)
        talk = mqtt.open(version)
        await talk.send(*packets)
        assert without_text(await talk.receive()) == (Connack, 0)
        assert await talk.receive() == Suback(1, (0,))
        assert await talk.expect(Ack) == Ack(PacketType.PUBREC, 7)
