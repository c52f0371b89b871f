"""Enhanced authentication: AUTH before CONNACK and in an open connection (MQTT 5 sections 3.15 and 4.12)."""

import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.mqtt.normative import statement
from tests.mqtt.users import ScramClient, Users, closed_broker
from tests.wire_clients.mqtt import MqttBroker, MqttClient

from martlet.contracts import Challenge, Exchange, Identity, Proved
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
    Will,
)
from martlet_mqtt.wire.properties import Properties, Property

SCRAM = "SCRAM-SHA-256"
CONTINUE = ReasonCode.CONTINUE_AUTHENTICATION
AGAIN = ReasonCode.RE_AUTHENTICATE
Closed = tuple[MqttBroker, Users]


@pytest.fixture
async def closed(tmp_path: Path) -> AsyncIterator[Closed]:
    async with closed_broker(tmp_path, ann="publish mqtt/#; read mqtt/#", bob="read mqtt/#") as found:
        yield found


def said(data: bytes | None = None, method: str = SCRAM) -> Properties:
    values: dict[Property, Any] = {Property.AUTHENTICATION_METHOD: method}
    if data is not None:
        values[Property.AUTHENTICATION_DATA] = data
    return Properties(values)


def data_of(packet: Packet) -> bytes:
    """The data of a packet of the broker, which has to repeat the method."""
    assert isinstance(packet, Auth | Connack)
    assert packet.properties.text(Property.AUTHENTICATION_METHOD) == SCRAM
    return packet.properties.data(Property.AUTHENTICATION_DATA) or b""


async def ask(talk: MqttClient, data: bytes, **more: Any) -> bytes:
    """Begin to connect, and return the broker's challenge."""
    await talk.send(Connect("c", V5, properties=said(data), **more))
    answer = await talk.expect(Auth)
    assert answer.reason == CONTINUE
    return data_of(answer)


async def log_in(mqtt: MqttBroker, user: str = "ann", **more: Any) -> MqttClient:
    """Return a connection of *user*."""
    talk, scram = mqtt.open(), ScramClient(user, user)
    challenge = await ask(talk, scram.first, **more)
    await talk.send(Auth(CONTINUE, said(scram.final(challenge))))
    answer = await talk.expect(Connack)
    assert answer.reason == ReasonCode.SUCCESS
    scram.check(data_of(answer))
    return talk


def refusal(packet: Packet | None) -> int:
    assert isinstance(packet, Connack | Disconnect), packet
    return packet.reason


@statement(V5, "MQTT-4.12.0-2", "MQTT-4.12.0-5")
async def test_a_client_and_the_broker_prove_that_they_know_the_password(closed: Closed) -> None:
    mqtt, _ = closed
    talk = await log_in(mqtt)
    assert mqtt.context.clients["c"].identity == Identity("ann")
    assert await talk.publish("a", b"x", 1) == 0
    assert mqtt.context.counters.stored == 1


async def test_the_user_name_and_the_password_are_not_looked_at(closed: Closed) -> None:
    mqtt, _ = closed
    await log_in(mqtt, user_name="bob", password=b"a guess")
    assert mqtt.context.clients["c"].identity == Identity("ann")


async def test_a_client_may_leave_the_first_word_to_the_broker(closed: Closed) -> None:
    mqtt, _ = closed
    talk, scram = mqtt.open(), ScramClient("ann", "ann")
    await talk.send(Connect("c", V5, properties=said()))
    assert data_of(await talk.expect(Auth)) == b""
    await talk.send(Auth(CONTINUE, said(scram.first)))
    challenge = data_of(await talk.expect(Auth))
    await talk.send(Auth(CONTINUE, said(scram.final(challenge))))
    scram.check(data_of(await talk.expect(Connack)))


@pytest.mark.parametrize(("user", "password"), [("ann", "a guess"), ("nobody", "nobody")])
@statement(V5, "MQTT-4.12.0-4", "MQTT-3.1.4-2")
async def test_who_proves_nothing_is_refused(
    closed: Closed, user: str, password: str, caplog: pytest.LogCaptureFixture
) -> None:
    mqtt, _ = closed
    talk, scram = mqtt.open(), ScramClient(user, password)
    challenge = await ask(talk, scram.first, will=Will("a", b"gone"))
    with caplog.at_level(logging.WARNING):
        await talk.send(Auth(CONTINUE, said(scram.final(challenge))), Publish("a", b"x"))
        last = await talk.closed()
    assert refusal(last) == ReasonCode.NOT_AUTHORIZED
    assert not mqtt.context.clients
    assert mqtt.broker.store.appended == 0
    assert mqtt.broker.authentication.refused == 1
    [line] = [record.getMessage() for record in caplog.records if record.name == "martlet.mqtt"]
    assert line.startswith("refused client 'c' of user '' at ")
    assert line.endswith(f"user '{user}' or the password is wrong")


@statement(V5, "MQTT-4.12.0-1")
async def test_a_method_that_nobody_offers_is_refused(closed: Closed) -> None:
    mqtt, _ = closed
    for method in ("PLAIN", "", "SCRAM-SHA-256-PLUS"):
        talk = mqtt.open()
        await talk.send(Connect("c", V5, properties=said(b"x" if method else None, method)))
        last = await talk.closed()
        assert refusal(last) == ReasonCode.BAD_AUTHENTICATION_METHOD
        assert isinstance(last, Connack)
        assert f"{method!r} is unknown; offered: SCRAM-SHA-256" in (last.properties.text(Property.REASON_STRING) or "")


BEFORE_CONNACK: dict[str, tuple[Packet, ReasonCode]] = {
    "another method": (Auth(CONTINUE, said(b"x", "PLAIN")), ReasonCode.BAD_AUTHENTICATION_METHOD),
    "no method": (Auth(CONTINUE), ReasonCode.PROTOCOL_ERROR),
    "success": (Auth(ReasonCode.SUCCESS, said(b"x")), ReasonCode.PROTOCOL_ERROR),
    "again": (Auth(AGAIN, said(b"x")), ReasonCode.PROTOCOL_ERROR),
    "ping": (Pingreq(), ReasonCode.PROTOCOL_ERROR),
    "publish": (Publish("a", b"x"), ReasonCode.PROTOCOL_ERROR),
    "subscribe": (Subscribe(1, (FilterSubscription("a"),)), ReasonCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("what", BEFORE_CONNACK)
@statement(V5, "MQTT-3.15.2-1", "MQTT-3.2.0-1")
async def test_before_connack_only_the_next_step_may_come(closed: Closed, what: str) -> None:
    mqtt, _ = closed
    packet, reason = BEFORE_CONNACK[what]
    talk, scram = mqtt.open(), ScramClient("ann", "ann")
    challenge = await ask(talk, scram.first)
    await talk.send(packet, Auth(CONTINUE, said(scram.final(challenge))))
    last = await talk.closed()
    assert isinstance(last, Connack)
    assert last.reason == reason
    assert not mqtt.context.clients


async def test_a_client_may_give_up(closed: Closed) -> None:
    mqtt, _ = closed
    talk = mqtt.open()
    await ask(talk, ScramClient("ann", "ann").first, will=Will("a", b"gone"))
    await talk.send(Disconnect(ReasonCode.DISCONNECT_WITH_WILL))
    assert await talk.closed() is None
    assert mqtt.broker.store.appended == 0


async def test_the_time_to_connect_goes_on_during_the_exchange(tmp_path: Path, autojump_clock: Any) -> None:
    options = {"config": MqttConfig(connect_s=5)}
    async with closed_broker(tmp_path, options=options, ann="") as (mqtt, _):
        talk = mqtt.open()
        await ask(talk, ScramClient("ann", "ann").first)
        last = await talk.closed()
        assert isinstance(last, Connack)
        assert last.reason == ReasonCode.UNSPECIFIED_ERROR
        assert "did not connect within 5 s" in (last.properties.text(Property.REASON_STRING) or "")


# in an open connection


async def prove_again(talk: MqttClient, user: str, password: str) -> None:
    scram = ScramClient(user, password)
    await talk.send(Auth(AGAIN, said(scram.first)))
    answer = await talk.expect(Auth)
    assert answer.reason == CONTINUE
    await talk.send(Auth(CONTINUE, said(scram.final(data_of(answer)))))


@statement(V5, "MQTT-4.12.0-5")
async def test_a_client_proves_again_who_it_is_while_packets_go_on(closed: Closed) -> None:
    mqtt, _ = closed
    talk = await log_in(mqtt)
    await talk.subscribe("a", qos=1)
    for _ in range(2):
        scram = ScramClient("ann", "ann")
        await talk.send(Auth(AGAIN, said(scram.first)))
        challenge = data_of(await talk.expect(Auth))
        await talk.send(Publish("a", b"meanwhile"), Pingreq())
        await talk.expect(Pingresp)
        assert await talk.payloads(1) == [b"meanwhile"]
        await talk.send(Auth(CONTINUE, said(scram.final(challenge))))
        done = await talk.expect(Auth)
        assert done.reason == ReasonCode.SUCCESS
        scram.check(data_of(done))
    assert await talk.rest() == []


@pytest.mark.parametrize(("user", "password"), [("ann", "a guess"), ("bob", "bob"), ("nobody", "nobody")])
@statement(V5, "MQTT-4.12.1-2")
async def test_who_fails_to_prove_it_again_is_disconnected_and_its_will_is_published(
    closed: Closed, user: str, password: str
) -> None:
    mqtt, _ = closed
    watcher = await log_in_as(mqtt, "watcher", "bob")
    await watcher.subscribe("gone")
    talk = await log_in(mqtt, will=Will("gone", b"will"))
    await prove_again(talk, user, password)
    last = await talk.closed()
    assert isinstance(last, Disconnect)
    assert last.reason == ReasonCode.NOT_AUTHORIZED
    assert await watcher.payloads(1) == [b"will"]
    assert set(mqtt.context.clients) == {"watcher"}


async def log_in_as(mqtt: MqttBroker, client_id: str, user: str) -> MqttClient:
    return await mqtt.connect(client_id, user_name=user, password=user.encode())


WHILE_OPEN: dict[str, tuple[list[Packet], ReasonCode]] = {
    "another method": ([Auth(AGAIN, said(b"x", "PLAIN"))], ReasonCode.BAD_AUTHENTICATION_METHOD),
    "no method": ([Auth(AGAIN)], ReasonCode.PROTOCOL_ERROR),
    "nothing to continue": ([Auth(CONTINUE, said(b"x"))], ReasonCode.PROTOCOL_ERROR),
    "success": ([Auth(ReasonCode.SUCCESS, said(b"x"))], ReasonCode.PROTOCOL_ERROR),
    "two at once": ([Auth(AGAIN, said(b"n,,n=ann,r=x"))] * 2, ReasonCode.PROTOCOL_ERROR),
}


@pytest.mark.parametrize("what", WHILE_OPEN)
@statement(V5, "MQTT-3.15.2-1")
async def test_auth_that_fits_nothing_ends_the_connection(closed: Closed, what: str) -> None:
    mqtt, _ = closed
    packets, reason = WHILE_OPEN[what]
    talk = await log_in(mqtt)
    await talk.send(*packets)
    last = await talk.closed()
    assert isinstance(last, Disconnect)
    assert last.reason == reason


async def test_auth_breaks_the_protocol_where_connect_had_no_method(closed: Closed) -> None:
    mqtt, _ = closed
    talk = await log_in_as(mqtt, "c", "ann")
    await talk.send(Auth(AGAIN, said(ScramClient("ann", "ann").first)))
    assert refusal(await talk.closed()) == ReasonCode.PROTOCOL_ERROR


@statement(V5, "MQTT-3.1.2-24")
async def test_a_challenge_that_is_too_large_for_the_client_is_not_sent(closed: Closed) -> None:
    mqtt, _ = closed
    talk = mqtt.open()
    properties = Properties(
        {
            Property.AUTHENTICATION_METHOD: SCRAM,
            Property.AUTHENTICATION_DATA: ScramClient("ann", "ann").first,
            Property.MAXIMUM_PACKET_SIZE: 60,
        }
    )
    await talk.send(Connect("c", V5, properties=properties))
    last = await talk.closed()
    assert last is None or refusal(last) == ReasonCode.PACKET_TOO_LARGE
    assert not mqtt.context.clients


# other mechanisms


def endless() -> Exchange:
    def proceed(data: bytes) -> Challenge | Proved:
        return Challenge(b"more")

    return proceed


def proving(name: str, data: bytes = b"") -> Callable[[], Exchange]:
    return lambda: lambda answer: Proved(Identity(name), data)


async def test_a_mechanism_of_one_step_and_one_without_end(closed: Closed) -> None:
    mqtt, _ = closed
    mqtt.broker.authentication.mechanisms = {"ONE": proving("ann"), "ENDLESS": endless}
    talk = mqtt.open()
    await talk.send(Connect("c", V5, properties=said(b"x", "ONE")))
    answer = await talk.expect(Connack)
    assert answer.properties.text(Property.AUTHENTICATION_METHOD) == "ONE"
    assert answer.properties.data(Property.AUTHENTICATION_DATA) is None
    talk = mqtt.open()
    await talk.send(Connect("d", V5, properties=said(b"x", "ENDLESS")))
    await talk.send(*[Auth(CONTINUE, said(b"x", "ENDLESS"))] * 20)
    last = await talk.closed()
    assert refusal(last) == ReasonCode.NOT_AUTHORIZED


@pytest.mark.parametrize("name", ["x\ny", "\x7f"])
async def test_nobody_gets_a_name_with_control_characters(closed: Closed, name: str) -> None:
    mqtt, _ = closed
    mqtt.broker.authentication.mechanisms = {"ONE": proving(name)}
    talk = mqtt.open()
    await talk.send(Connect("c", V5, properties=said(b"x", "ONE")))
    assert refusal(await talk.closed()) == ReasonCode.BAD_USER_NAME_OR_PASSWORD
    talk = mqtt.open()
    await talk.send(Connect("c", V5, user_name=name, password=b"x"))
    assert refusal(await talk.closed()) == ReasonCode.BAD_USER_NAME_OR_PASSWORD
    assert not mqtt.context.clients
