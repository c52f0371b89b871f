"""Who may publish, subscribe and receive what: asked for each filter and each name, on every path."""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.mqtt.users import Users, closed_broker
from tests.wire_clients.mqtt import V4, V5, MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.contracts import Identity, Network, Question, Verdict
from martlet.sessions.session import Session
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.packets import Ack, Connack, Connect, Disconnect, FilterSubscription, Packet, Publish, Will
from martlet_mqtt.wire.properties import Properties, Property

DENIED = ReasonCode.NOT_AUTHORIZED
ALL = "publish mqtt/#; read mqtt/#; read $SYS/#; read $share*"


class Room:
    """A broker with users; ``denied`` are the (user, name) that nothing may be read of, whatever the rules say."""

    def __init__(self, mqtt: MqttBroker, users: Users) -> None:
        self.mqtt = mqtt
        self.users = users
        self._denied: set[tuple[str, str]] = set()
        mqtt.broker.authorizers = (self._opinion, *mqtt.broker.authorizers)

    def _opinion(self, identity: Identity, action: str, name: str) -> bool | None:
        return False if action == "read" and (identity.name, name.partition("/")[2]) in self._denied else None

    def deny(self, user: str, *names: str) -> None:
        self._denied = {(user, name) for name in names}
        self.mqtt.broker.rules.changed()

    async def connect(self, user: str, client_id: str = "", version: int = V5, **more: Any) -> MqttClient:
        return await self.mqtt.connect(
            client_id or f"of {user}", version, user_name=user, password=user.encode(), **more
        )


@asynccontextmanager
async def room_of(directory: Path, *, options: Any = None, **rules: str) -> AsyncIterator[Room]:
    async with closed_broker(directory, options=options, **rules) as (mqtt, users):
        yield Room(mqtt, users)


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with room_of(
        tmp_path,
        ann=ALL,
        bob=ALL,
        door="publish mqtt/home/{user}/#; read mqtt/home/+/command",
        anonymous="read mqtt/news",
    ) as found:
        yield found


def reason_of(packet: Packet | None) -> int:
    assert isinstance(packet, Connack | Disconnect), packet
    return packet.reason


# to connect


async def test_a_wrong_password_is_refused(room: Room) -> None:
    for version, reason in ((V4, 4), (V5, ReasonCode.BAD_USER_NAME_OR_PASSWORD)):
        for user, password in (("ann", b"bob"), ("ann", None), ("nobody", b"x"), (None, b"ann")):
            if user is None and version == V4:
                continue
            talk = room.mqtt.open(version)
            await talk.send(Connect("c", version, user_name=user, password=password))
            assert reason_of(await talk.closed()) == reason
    assert not room.mqtt.context.clients


async def test_a_client_without_a_user_is_anonymous(room: Room) -> None:
    talk = await room.mqtt.connect("c")
    assert await talk.subscribe("news", "other", "#") == (2, DENIED, DENIED)


async def test_a_session_belongs_to_its_user(room: Room) -> None:
    await room.connect("ann", "c", expiry_s=100)
    for user in ("bob", ""):
        _, answer = await room.mqtt.answer(
            Connect("c", V5, user_name=user or None, password=user.encode() if user else None)
        )
        assert answer.reason == DENIED
    assert room.mqtt.context.clients["c"].identity == Identity("ann")


async def test_a_will_that_may_not_be_published_is_refused_with_its_client(room: Room) -> None:
    _, answer = await room.mqtt.answer(
        Connect("c", V5, user_name="door", password=b"door", will=Will("home/window/state", b"x"))
    )
    assert answer.reason == DENIED
    assert "may not publish to 'home/window/state'" in (answer.properties.text(Property.REASON_STRING) or "")


async def test_a_will_is_asked_about_again_when_it_is_published(room: Room) -> None:
    watcher = await room.connect("ann")
    await watcher.subscribe("#")
    for rules, expected in ((ALL, [b"will"]), ("read mqtt/#", [])):
        room.users.write(ann=ALL, bob=ALL, door=ALL)
        talk = await room.connect("door", will=Will("gone", b"will"))
        room.users.write(ann=ALL, bob=ALL, door=rules)
        talk.hang_up()
        await talk.closed()
        await watcher.publish("fence", b"fence", 1)
        assert await watcher.payloads(len(expected) + 1) == [*expected, b"fence"]


@pytest.mark.parametrize("groups", [(), ("staff", "night")])
@pytest.mark.parametrize("delay_s", [0, 1])
async def test_a_will_is_asked_about_as_its_client_is(
    tmp_path: Path, autojump_clock: MockClock, groups: tuple[str, ...], delay_s: int
) -> None:
    """By the groups of its token, and the address that it came from."""
    asked: list[Question] = []

    class Decider:
        networks: Collection[Network] = ()

        def decide(self, question: Question) -> Verdict:
            if question.name == "mqtt/gone":
                asked.append(question)
            return Verdict(allowed=True)

    async with mqtt_broker(tmp_path) as mqtt:
        mqtt.broker.authentication.authenticators = (lambda credentials, origin: Identity("ann", groups, 1 << 50),)
        mqtt.broker.authorizers = (Decider(),)
        will = Will("gone", b"will", properties=Properties({Property.WILL_DELAY: delay_s}))
        talk = await mqtt.connect("c", V5, user_name="ann", password=b"ann", will=will, expiry_s=100)
        mqtt.broker.rules.changed()
        talk.hang_up()
        await talk.closed()
        await trio.sleep(2)
    assert len(asked) == 2
    assert asked[0].address
    assert asked[1].address == asked[0].address
    assert [(each.identity.name, each.identity.groups) for each in asked] == [("ann", groups)] * 2


# to publish


async def single(talk: MqttClient, name: str) -> int:
    return await talk.publish(name, b"x", 1, properties=Properties({Property.CONTENT_TYPE: "t"}))


async def by_alias(talk: MqttClient, name: str) -> int:
    await talk.send(Publish(name, b"x", 0, properties=Properties({Property.TOPIC_ALIAS: 1})))
    return await talk.publish("", b"x", 1, properties=Properties({Property.TOPIC_ALIAS: 1}))


async def in_a_run(talk: MqttClient, name: str) -> int:
    await talk.send(*[Publish(each, b"x", 1, packet_id=7) for each in ("home/door/a", name, "home/door/b")])
    answers = [await talk.expect(Ack) for _ in range(3)]
    assert [answers[0].reason, answers[2].reason] == [0, 0]
    return answers[1].reason


async def retained(talk: MqttClient, name: str) -> int:
    return await talk.publish(name, b"x", 1, retain=True)


async def twice(talk: MqttClient, name: str) -> int:
    return await talk.publish(name, b"x", 2)


@pytest.mark.parametrize("way", [single, by_alias, in_a_run, retained, twice])
async def test_a_name_that_may_not_be_published_to_is_refused_on_every_path(
    room: Room, way: Callable[[MqttClient, str], Any]
) -> None:
    watcher = await room.connect("ann")
    await watcher.subscribe("#")
    talk = await room.connect("door")
    for _ in range(2):  # the second time the answers are known
        assert await way(talk, "home/window/state") == DENIED
        assert await way(talk, "home/door/state") == 0
    await watcher.publish("fence", b"fence", 1)
    names = set()
    while "fence" not in names:
        names.add((await watcher.messages(1))[0].topic)
    assert "home/window/state" not in names
    assert "home/door/state" in names
    assert "home/window/state" not in room.mqtt.context.retained


async def test_a_client_of_mqtt_3_is_not_told_that_its_message_was_dropped(room: Room) -> None:
    watcher = await room.connect("ann")
    await watcher.subscribe("#")
    talk = await room.connect("door", version=V4)
    for qos in (1, 2):
        assert await talk.publish("home/window/state", b"x", qos) == 0
    await watcher.publish("fence", b"fence", 1)
    assert await watcher.payloads(1) == [b"fence"]
    assert room.mqtt.context.counters.refused == 2


# to subscribe


async def test_a_filter_is_allowed_if_a_rule_allows_all_that_it_selects(room: Room) -> None:
    talk = await room.connect("door")
    filters = ("home/+/command", "home/door/command", "home/#", "#", "home/door/state", "$SYS/#", "$share/g/home/#")
    assert await talk.subscribe(*filters, qos=1) == (1, 1, DENIED, DENIED, DENIED, DENIED, DENIED)
    talk = await room.connect("door", version=V4)
    assert await talk.subscribe(*filters, qos=1) == (1, 1, 0x80, 0x80, 0x80, 0x80, 0x80)


# to receive


async def test_what_may_not_be_read_is_not_delivered(room: Room) -> None:
    room.deny("bob", "a/secret")
    bob, ann = await room.connect("bob"), await room.connect("ann")
    await bob.subscribe("a/#", qos=1)
    for name in ("a/1", "a/secret", "a/2"):
        await ann.publish(name, name.encode(), 1)
    assert await bob.payloads(2) == [b"a/1", b"a/2"]


async def test_nor_are_retained_messages(room: Room) -> None:
    room.deny("bob", "a/secret")
    bob, ann = await room.connect("bob"), await room.connect("ann")
    for name in ("a/1", "a/secret", "a/2"):
        await ann.publish(name, name.encode(), 1, retain=True)
    await room.mqtt.settle()
    await bob.subscribe("a/#", qos=1)
    assert sorted(await bob.payloads(2)) == [b"a/1", b"a/2"]
    assert await bob.rest() == []


async def test_nor_is_what_a_session_missed(room: Room) -> None:
    bob, ann = await room.connect("bob", expiry_s=100), await room.connect("ann")
    await bob.subscribe("a/#", qos=1)
    await bob.disconnect()
    for name in ("a/1", "a/secret", "a/2"):
        await ann.publish(name, name.encode(), 1)
    room.deny("bob", "a/secret")
    bob = await room.connect("bob", clean=False, expiry_s=100, present=True)
    assert await bob.payloads(2) == [b"a/1", b"a/2"]


@pytest.mark.parametrize("qos", [1, 2])
async def test_nor_is_what_is_in_flight(room: Room, qos: int) -> None:
    bob, ann = await room.connect("bob", expiry_s=100), await room.connect("ann")
    await bob.subscribe("a/#", qos=qos)
    for name in ("a/1", "a/secret", "a/2"):
        await ann.publish(name, name.encode(), qos)
    assert len(await bob.payloads(3)) == 3  # not acknowledged
    bob.hang_up()
    await bob.closed()
    room.deny("bob", "a/secret")
    bob = await room.connect("bob", clean=False, expiry_s=100, present=True)
    if qos == 2:  # then only its identifier is in flight
        assert await bob.expect(Ack) == Ack(PacketType.PUBREL, 2)
        await bob.send(Ack(PacketType.PUBCOMP, 2))
    found = await bob.messages(2)
    assert [packet.payload for packet in found] == [b"a/1", b"a/2"]
    for packet in found:
        await bob.acknowledge(packet)
    assert await bob.rest() == []
    session = session_of(room, "of bob")
    assert not session.flight


def session_of(room: Room, client_id: str) -> Session:
    found = room.mqtt.client(client_id).session
    assert found is not None
    return found


async def test_nor_are_figures(room: Room) -> None:
    room.deny("bob", "broker/version")
    bob = await room.connect("bob")
    assert await bob.subscribe("$SYS/broker/+") == (2,)
    names = {packet.topic for packet in await bob.rest()}
    assert "$SYS/broker/uptime" in names
    assert "$SYS/broker/version" not in names


async def test_everything_in_the_topic_is_without_figures(room: Room) -> None:
    room.users.write(ann="read mqtt/#", bob="read $SYS/broker/uptime")
    ann, bob = await room.connect("ann"), await room.connect("bob")
    assert await ann.subscribe("$SYS/#", "$SYS/broker/uptime", "#") == (DENIED, DENIED, 2)
    assert await bob.subscribe("$SYS/#", "$SYS/broker/uptime", "#") == (DENIED, 2, DENIED)


async def test_requests_need_the_permission_to_manage_the_broker(room: Room) -> None:
    ann = await room.connect("ann")
    assert await ann.publish("$CONTROL/martlet/v1/clients", b"", 1) == 0
    [answer] = await ann.messages(1)
    assert b"'ann' may not update the cluster" in answer.payload


# rules that change


async def test_a_client_that_may_no_longer_follow_a_filter_is_disconnected(room: Room) -> None:
    bob, ann = await room.connect("bob", expiry_s=100), await room.connect("ann")
    await bob.subscribe("a/#", "b/#", qos=1)
    room.users.write(ann=ALL, bob="read mqtt/a/#")
    last = await bob.closed()
    assert reason_of(last) == DENIED
    for name in ("a/1", "b/1"):
        await ann.publish(name, name.encode(), 1)
    bob = await room.connect("bob", clean=False, expiry_s=100, present=True)
    assert await bob.payloads(1) == [b"a/1"]
    assert await bob.rest() == []


async def test_a_changed_rule_holds_for_the_next_message_that_is_published(room: Room) -> None:
    ann = await room.connect("ann")
    assert await ann.publish("a", b"x", 1) == 0
    room.users.write(ann="publish mqtt/b")
    assert await ann.publish("a", b"x", 1) == DENIED
    assert await ann.publish("b", b"x", 1) == 0


async def test_what_waits_for_a_client_is_asked_about_by_the_new_rules(tmp_path: Path) -> None:
    options = {"config": MqttConfig(in_flight_max=1)}
    async with room_of(tmp_path, options=options, ann=ALL, bob=ALL) as room:
        bob, ann = await room.connect("bob"), await room.connect("ann")
        await bob.subscribe("a/#", qos=1)
        for name in ("a/1", "a/secret", "a/2"):
            await ann.publish(name, name.encode(), 1)
        [first] = await bob.messages(1)
        room.deny("bob", "a/secret")
        await bob.acknowledge(first)
        assert await bob.payloads(1) == [b"a/2"]


# shared subscriptions


async def drain(talk: MqttClient, mqtt: MqttBroker) -> list[bytes]:
    """Acknowledge what comes, until nothing more does; return the payloads."""
    found: list[bytes] = []
    while True:
        await mqtt.settle()
        packets = await talk.rest()
        if not packets:
            return found
        for packet in packets:
            await talk.acknowledge(packet)
            found.append(packet.payload)


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_member_of_a_group_gets_what_it_may_read_and_others_the_rest(room: Room, qos: int) -> None:
    room.deny("bob", "a/secret")
    bob, ann, writer = await room.connect("bob"), await room.connect("ann"), await room.connect("ann", "writer")
    for each in (bob, ann):
        assert await each.subscribe("$share/g/a/#", qos=qos) == (qos,)
    names = [f"a/{index}" if index % 3 else "a/secret" for index in range(60)]
    for index, name in enumerate(names):
        await writer.publish(name, f"{name} {index}".encode(), 1)
    got: dict[str, list[bytes]] = {"ann": [], "bob": []}
    while sum(map(len, got.values())) < len(names):
        got["bob"] += await drain(bob, room.mqtt)
        got["ann"] += await drain(ann, room.mqtt)
    assert sorted(got["ann"] + got["bob"]) == sorted(f"{name} {index}".encode() for index, name in enumerate(names))
    assert not [each for each in got["bob"] if each.startswith(b"a/secret")]
    assert room.mqtt.broker.shared_groups.statistics()["withheld"] == 0


async def test_what_no_member_may_read_is_for_nobody(room: Room) -> None:
    room.deny("bob", "a/secret")
    bob, writer = await room.connect("bob"), await room.connect("ann")
    await bob.subscribe("$share/g/a/#", qos=1)
    for name in ("a/secret", "a/1", "a/secret", "a/2"):
        await writer.publish(name, name.encode(), 1)
    found = await bob.messages(2)
    assert [packet.payload for packet in found] == [b"a/1", b"a/2"]
    for packet in found:
        await bob.acknowledge(packet)
    assert await bob.rest() == []
    statistics = room.mqtt.broker.shared_groups.statistics()
    assert (statistics["withheld"], statistics["unsettled"]) == (2, 0)


async def test_what_a_member_leaves_behind_goes_to_nobody_who_may_not_read_it(room: Room) -> None:
    room.deny("bob", "a/secret")
    ann, writer = await room.connect("ann"), await room.connect("ann", "writer")
    await ann.subscribe("$share/g/a/#", qos=1)
    for name in ("a/secret", "a/1"):
        await writer.publish(name, name.encode(), 1)
    assert len(await ann.payloads(2)) == 2
    bob = await room.connect("bob")
    await bob.subscribe("$share/g/a/#", qos=1)
    ann.hang_up()
    await ann.closed()
    [packet] = await bob.messages(1)
    assert packet.payload == b"a/1"
    await bob.acknowledge(packet)
    assert await bob.rest() == []
    statistics = room.mqtt.broker.shared_groups.statistics()
    assert (statistics["withheld"], statistics["unsettled"]) == (1, 0)


async def test_a_message_that_waits_for_a_member_is_asked_about_by_the_new_rules(tmp_path: Path) -> None:
    async with room_of(tmp_path, ann=ALL, bob=ALL) as room:
        room.deny("bob", "a/secret")
        ann = await room.connect("ann", values={Property.RECEIVE_MAXIMUM: 1})
        bob, writer = await room.connect("bob"), await room.connect("ann", "writer")
        for each in (ann, bob):
            await each.subscribe("$share/g/a/#", qos=1)
        await writer.publish("a/secret", b"first", 1)
        [first] = await ann.messages(1)  # so that ann takes nothing more
        await writer.publish("a/secret", b"second", 1)
        assert await drain(bob, room.mqtt) == []
        room.deny("ann", "a/secret")  # so that bob may
        await ann.acknowledge(first)
        assert await bob.payloads(1) == [b"second"]
        assert await ann.rest() == []


async def test_a_group_needs_the_permission_for_its_filter_and_for_itself(tmp_path: Path) -> None:
    async with room_of(
        tmp_path,
        ann="read mqtt/a/#; read $share/mqtt/g/*",
        bob="read mqtt/a/#",
        eve="read $share/mqtt/g/*; read mqtt/b/#",
    ) as room:
        ann, bob, eve = [await room.connect(user) for user in ("ann", "bob", "eve")]
        assert await ann.subscribe("$share/g/a/+", "$share/h/a/+", "$share/g/b/+") == (2, DENIED, DENIED)
        assert await bob.subscribe("$share/g/a/+") == (DENIED,)
        assert await eve.subscribe("$share/g/a/+") == (DENIED,)


async def test_a_member_that_may_no_longer_take_part_is_disconnected(room: Room) -> None:
    bob, ann = await room.connect("bob"), await room.connect("ann")
    await bob.subscribe(FilterSubscription("$share/g/a/#", 1))
    room.users.write(ann=ALL, bob="read mqtt/a/#")
    await ann.publish("a/1", b"x", 1)
    assert reason_of(await bob.closed()) == DENIED
