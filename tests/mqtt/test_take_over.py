"""Clients that come for an identifier in use, that wait to be accepted, or that go in any state: nothing is left."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.contracts import Challenge, Credentials, Exchange, Identity, LoginOrigin, Nobody, Password, Proved
from martlet.testing.clock import TrioClock
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Auth, Connack, Connect, Disconnect, Will
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

EXPIRY = Properties({Property.SESSION_EXPIRY: 1000})
USER = Identity("user")


def prove(data: bytes) -> Challenge | Proved:
    return Proved(USER, b"") if data == b"proof" else Challenge(b"prove it")


@asynccontextmanager
async def asking(directory: Path) -> AsyncIterator[tuple[MqttBroker, dict[bytes, trio.Event]]]:
    """A broker that accepts a password when its event is set."""
    checked: dict[bytes, trio.Event] = {}

    async def check(password: Password, origin: LoginOrigin) -> Identity:
        await checked.setdefault(password.password, trio.Event()).wait()
        return USER

    def identify(credentials: Credentials, origin: LoginOrigin) -> Identity | None:
        return None if isinstance(credentials, Nobody) else USER

    async def proceed(exchange: Exchange, data: bytes, origin: LoginOrigin) -> Challenge | Proved:
        return exchange(data)  # without a thread, during which the clock of the test would jump

    async with mqtt_broker(directory, clock=TrioClock()) as mqtt:
        authentication: Any = mqtt.broker.authentication
        authentication.authenticators = (identify,)
        authentication.mechanisms = {"ask": lambda: prove}
        authentication.authenticate_password, authentication.proceed = check, proceed
        yield mqtt, checked


def connect_of(password: bytes | None = None, *, version: int = V5, clean: bool = False) -> Connect:
    will = Will("will", password or b"gone", 1)
    properties = EXPIRY if version == V5 else NO_PROPERTIES
    user = "user" if password is not None else None
    return Connect("c", version, clean, will=will, properties=properties, user_name=user, password=password)


async def watching(mqtt: MqttBroker) -> MqttClient:
    checked: Any = mqtt.broker.authentication
    before, checked.authenticators = checked.authenticators, ()
    watcher = await mqtt.connect("watcher", V4, keep_alive_s=0)
    await watcher.subscribe("will")
    checked.authenticators = before
    return watcher


async def payloads(watcher: MqttClient) -> list[bytes]:
    return [each.payload for each in await watcher.rest()]


def left_of(mqtt: MqttBroker) -> tuple[object, ...]:
    """What is left of clients other than the watcher."""
    attached, cursors = mqtt.broker.sessions.statistics()["attached"], mqtt.broker.cursors.statistics()["cursors"]
    return attached, cursors, sorted(mqtt.context.clients), dict(mqtt.broker.sessions.live.by_key)


NOTHING: tuple[object, ...] = (0, 1, ["watcher"], {})


@pytest.mark.parametrize("version", [V4, V5])
@pytest.mark.parametrize("order", ["12", "21"])
async def test_who_is_accepted_later_has_the_session(
    tmp_path: Path, autojump_clock: MockClock, order: str, version: int
) -> None:
    async with asking(tmp_path) as (mqtt, checked):
        watcher = await watching(mqtt)
        talks = {each: mqtt.open(version) for each in "12"}
        for each, talk in talks.items():
            await talk.send(connect_of(each.encode(), version=version))
            await wait_all_tasks_blocked()
        earlier, later = order[0], order[1]
        for each in order:
            checked[each.encode()].set()
            answer = await talks[each].expect(Connack)
            assert (answer.reason, answer.session_present) == (0, each == later)
        last = await talks[earlier].closed()
        if version == V5:
            assert isinstance(last, Disconnect)
            assert last.reason == ReasonCode.SESSION_TAKEN_OVER
        assert await payloads(watcher) == [earlier.encode()]
        assert left_of(mqtt)[0] == 1
        await talks[later].disconnect()
        await trio.sleep(3000)
        assert await payloads(watcher) == []


async def test_a_session_of_another_user_is_not_taken_over(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with asking(tmp_path) as (mqtt, checked):
        watcher = await watching(mqtt)
        checked[b"1"] = trio.Event()
        checked[b"1"].set()
        owner, answer = await mqtt.answer(connect_of(b"1"))
        assert answer.reason == 0
        _, answer = await mqtt.answer(connect_of())
        assert answer.reason == ReasonCode.NOT_AUTHORIZED
        assert await owner.rest() == []
        owner.hang_up()
        await trio.sleep(10)
        assert await payloads(watcher) == [b"1"]
        _, answer = await mqtt.answer(connect_of())
        assert answer.reason == ReasonCode.NOT_AUTHORIZED
        await mqtt.settle()
        assert left_of(mqtt) == NOTHING


async def say_nothing(mqtt: MqttBroker, talk: MqttClient) -> None:
    pass


async def say_half_of_connect(mqtt: MqttBroker, talk: MqttClient) -> None:
    await talk.wire.send(encode_packet(connect_of(), V5)[:9])


async def wait_for_the_password(mqtt: MqttBroker, talk: MqttClient) -> None:
    await talk.send(connect_of(b"never"))


async def be_challenged(mqtt: MqttBroker, talk: MqttClient) -> None:
    found = Properties({Property.AUTHENTICATION_METHOD: "ask", Property.SESSION_EXPIRY: 1000})
    await talk.send(Connect("c", V5, will=Will("will", b"gone", 1), properties=found))
    assert isinstance(await talk.receive(), Auth)


async def be_refused(mqtt: MqttBroker, talk: MqttClient) -> None:
    await talk.send(Connect("c\x01", V5, will=Will("will", b"gone", 1), properties=EXPIRY))
    assert (await talk.expect(Connack)).reason == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID


@pytest.mark.parametrize("how", ["hangs up", "waits"])
@pytest.mark.parametrize("state", [say_nothing, say_half_of_connect, wait_for_the_password, be_challenged, be_refused])
async def test_a_client_that_is_not_accepted_leaves_nothing(
    tmp_path: Path, autojump_clock: MockClock, state: Any, how: str
) -> None:
    async with asking(tmp_path) as (mqtt, _):
        watcher, talk = await watching(mqtt), mqtt.open()
        await state(mqtt, talk)
        await wait_all_tasks_blocked()
        assert left_of(mqtt)[0] == 0
        if how == "hangs up":
            talk.hang_up()
        await trio.sleep(100)
        assert await payloads(watcher) == []
        assert left_of(mqtt) == NOTHING
    # and a broker that stops does not wait for it


async def test_a_client_may_give_up_while_it_is_challenged(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with asking(tmp_path) as (mqtt, _):
        watcher, talk = await watching(mqtt), mqtt.open()
        await be_challenged(mqtt, talk)
        await talk.send(Disconnect())
        assert await talk.closed() is None
        await trio.sleep(100)
        assert await payloads(watcher) == []
        assert left_of(mqtt) == NOTHING


async def test_a_client_that_is_taken_over_while_it_proves_itself_again_is_told_once(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with asking(tmp_path) as (mqtt, _):
        watcher, talk = await watching(mqtt), mqtt.open()
        await be_challenged(mqtt, talk)
        method = {Property.AUTHENTICATION_METHOD: "ask"}
        proof = Properties({**method, Property.AUTHENTICATION_DATA: b"proof"})
        await talk.send(Auth(ReasonCode.CONTINUE_AUTHENTICATION, proof))
        assert (await talk.expect(Connack)).reason == 0
        again = mqtt.open()
        await be_challenged(mqtt, again)
        await talk.send(Auth(ReasonCode.RE_AUTHENTICATE, Properties(method)))
        await again.send(Auth(ReasonCode.CONTINUE_AUTHENTICATION, proof))
        assert (await again.expect(Connack)).session_present is False  # a clean start
        found = [await talk.receive()]
        if isinstance(found[0], Auth):
            found = [await talk.receive()]
        assert isinstance(found[0], Disconnect)
        assert found[0].reason == ReasonCode.SESSION_TAKEN_OVER
        assert await talk.closed() is None
        assert await payloads(watcher) == [b"gone"]
        await again.disconnect()
        await trio.sleep(3000)
        assert await payloads(watcher) == []
        assert left_of(mqtt) == NOTHING


@pytest.mark.parametrize("is_same", [True, False])
async def test_clients_that_come_and_go_leave_nothing(tmp_path: Path, autojump_clock: MockClock, is_same: bool) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher, count = await watching(mqtt), 0
        for number in range(300):
            values = number % 2, number // 2 % 2, number // 4 % 2
            will = Will("will", b"gone", 1, properties=Properties({Property.WILL_DELAY: 7 * values[1]}))
            name = "c" if is_same else f"c{number}"
            talk = await mqtt.connect(name, expiry_s=5 * values[0], clean=bool(values[2]), will=will)
            if number % 3:
                await talk.disconnect()
            else:
                talk.hang_up()
                count += 1
            while len(mqtt.context.clients) > 1:
                await trio.lowlevel.checkpoint()
        await trio.sleep(300)
        assert left_of(mqtt) == NOTHING
        assert len(mqtt.broker.sessions) == 0
        wills = mqtt.wills
        assert (wills._latest, wills._overdue, wills._unwanted) == ({}, {}, set())
        came = len(await watcher.rest())
        assert came == mqtt.context.counters.wills
        assert came <= count if is_same else came == count
