"""The end of a login: DISCONNECT with its reason, the will is published, and the session waits for its client."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.mqtt.test_access import ALL, Room, drain, room_of
from tests.mqtt.test_normative_auth import AGAIN, said
from tests.wire_clients.mqtt import V4, V5, MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.contracts import Challenge, Exchange, Identity, Proved
from martlet.testing.clock import TrioClock
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.connection import Limits, MqttConnection, State
from martlet_mqtt.wire.packets import Auth, Connack, Connect, Disconnect, Packet, Pingreq, Pingresp, Will
from martlet_mqtt.wire.properties import Property

WHY = "bob was disabled"
METHOD = "TOKEN"


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with room_of(tmp_path, ann=ALL, bob=ALL) as found:
        yield found


def end(room: Room, user: str = "bob") -> None:
    room.mqtt.broker.end_clients(lambda identity: identity.name == user, WHY)


def why(packet: Packet | None) -> tuple[int, str | None]:
    assert isinstance(packet, Connack | Disconnect), packet
    return packet.reason, packet.properties.text(Property.REASON_STRING)


@pytest.mark.parametrize("version", [V4, V5])
async def test_all_connections_of_a_user_end_and_no_others(room: Room, version: int) -> None:
    bobs = [await room.connect("bob", client_id, version=version) for client_id in ("b1", "b2")]
    ann = await room.connect("ann", version=version)
    end(room)
    for talk in bobs:
        last = await talk.closed()
        if version == V5:
            assert why(last) == (ReasonCode.ADMINISTRATIVE_ACTION, WHY)
        else:
            assert last is None
    await ann.send(Pingreq())
    await ann.expect(Pingresp)
    assert list(room.mqtt.context.clients) == ["of ann"]


@pytest.mark.parametrize("version", [V4, V5])
async def test_the_will_is_published_and_the_session_stays(room: Room, version: int) -> None:
    ann = await room.connect("ann")
    await ann.subscribe("gone", qos=1)
    keeps: dict[str, Any] = {"expiry_s": 100} if version == V5 else {"clean": False}
    bob = await room.connect("bob", version=version, will=Will("gone", b"bob", 1), **keeps)
    await bob.subscribe("a/#", qos=1)
    end(room)
    await bob.closed()
    assert await ann.payloads(1) == [b"bob"]
    await ann.publish("a/1", b"missed", 1)
    bob = await room.connect("bob", version=version, **{**keeps, "clean": False}, present=True)
    assert await bob.payloads(1) == [b"missed"]


async def test_what_a_member_of_a_group_holds_goes_to_another_one(room: Room) -> None:
    bob, ann, writer = await room.connect("bob"), await room.connect("ann"), await room.connect("ann", "writer")
    for each in (bob, ann):
        await each.subscribe("$share/g/a/#", qos=1)
    payloads = [b"%d" % number for number in range(20)]
    for payload in payloads:
        await writer.publish("a/1", payload, 1)
    first = await drain(ann, room.mqtt)
    end(room)
    await bob.closed()
    while "of bob" in room.mqtt.context.clients:
        await trio.lowlevel.checkpoint()
    assert sorted(first + await drain(ann, room.mqtt)) == sorted(payloads)


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_login_in_progress_is_refused(room: Room, version: int) -> None:
    talk = room.mqtt.open(version)
    checked, may_end = trio.Event(), trio.Event()

    async def wait(work: Callable[[], Any]) -> Any:
        checked.set()
        await may_end.wait()
        return work()

    room.mqtt.broker.authentication.line._in_thread = wait
    await talk.send(Connect("c", version, user_name="bob", password=b"bob"))
    await checked.wait()
    end(room)
    may_end.set()
    last = await talk.closed()
    if version == V5:
        assert why(last) == (ReasonCode.BAD_USER_NAME_OR_PASSWORD, WHY)
    else:
        assert isinstance(last, Connack)
        assert last.reason == 4
    assert not room.mqtt.context.clients


@pytest.mark.parametrize("reason", [ReasonCode.ADMINISTRATIVE_ACTION, ReasonCode.MAXIMUM_CONNECT_TIME])
async def test_connack_has_no_codes_for_the_end_of_a_login(room: Room, reason: ReasonCode) -> None:
    for version, expected in ((V4, 5), (V5, ReasonCode.NOT_AUTHORIZED)):
        connection = MqttConnection(Limits(), room.mqtt.context.names, 0.0)
        connection.version = version
        talk = room.mqtt.open(version)
        talk.wire = Said(connection.refusal(reason, WHY, State.ACCEPTING))  # type: ignore[assignment]
        assert (await talk.expect(Connack)).reason == expected


class Said:
    """A wire with only these bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def receive_exactly(self, size: int) -> bytes:
        data, self._data = self._data[:size], self._data[size:]
        return data


# expiry


class Tokens:
    """A mechanism whose clients are who they say, for as many seconds as they say: ``ann 10``."""

    def __init__(self, mqtt: MqttBroker) -> None:
        self.mqtt = mqtt
        mqtt.broker.authentication.mechanisms = {METHOD: self._begin}

    def _begin(self) -> Exchange:
        now_ms = self.mqtt.broker.clock.now_ms()  # the clock of the test does not go in threads

        def prove(data: bytes) -> Challenge | Proved:
            name, seconds, *groups = data.decode().split()
            return Proved(Identity(name, tuple(groups), now_ms + int(seconds) * 1000))

        return prove

    async def connect(self, said_: str, client_id: str = "c", **more: Any) -> MqttClient:
        values = {Property.AUTHENTICATION_METHOD: METHOD, Property.AUTHENTICATION_DATA: said_.encode()}
        return await self.mqtt.connect(client_id, values=values, **more)


@pytest.fixture
async def tokens(tmp_path: Path) -> AsyncIterator[Tokens]:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        yield Tokens(mqtt)


async def alive(talk: MqttClient) -> None:
    await talk.send(Pingreq())
    await talk.expect(Pingresp)


async def test_a_login_that_expires_ends_the_connection(tokens: Tokens, autojump_clock: MockClock) -> None:
    ann, bob = await tokens.connect("ann 10", "a", expiry_s=1000), await tokens.connect("bob 1000", "b")
    await ann.subscribe("x", qos=1)
    begun = trio.current_time()
    expected = ReasonCode.MAXIMUM_CONNECT_TIME, "the login of 'ann' has expired; log in again"
    assert why(await ann.closed()) == expected
    assert trio.current_time() - begun == pytest.approx(10, abs=0.1)
    await bob.publish("x", b"missed", 1)
    ann = await tokens.connect("ann 10", "a", clean=False, present=True, expiry_s=1000)
    assert await ann.payloads(1) == [b"missed"]


async def test_a_new_proof_over_the_same_connection_has_its_own_expiry(
    tokens: Tokens, autojump_clock: MockClock
) -> None:
    ann = await tokens.connect("ann 10")
    for _ in range(3):
        await trio.sleep(9)
        await ann.send(Auth(AGAIN, said(b"ann 10", METHOD)))
        assert (await ann.expect(Auth)).reason == ReasonCode.SUCCESS
    await trio.sleep(9.9)
    await alive(ann)
    assert why(await ann.closed())[0] == ReasonCode.MAXIMUM_CONNECT_TIME


@pytest.mark.parametrize("proof", [b"bob 10", b"ann 10 admins"])
async def test_a_new_proof_of_somebody_else_or_of_other_groups_ends_the_connection(
    tokens: Tokens, autojump_clock: MockClock, proof: bytes
) -> None:
    ann = await tokens.connect("ann 10")
    await ann.send(Auth(AGAIN, said(proof, METHOD)))
    reason, text = why(await ann.closed())
    assert reason == ReasonCode.NOT_AUTHORIZED
    assert "connect again" in str(text)


async def test_a_client_with_a_new_proof_takes_its_own_session_over(tokens: Tokens, autojump_clock: MockClock) -> None:
    first = await tokens.connect("ann 10")
    await tokens.connect("ann 500")
    assert why(await first.closed())[0] == ReasonCode.SESSION_TAKEN_OVER
