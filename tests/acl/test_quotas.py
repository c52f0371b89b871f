"""Quotas of the files in effect: for clients of each protocol, and at once after each change."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import trio
from tests.acl.brokers import PASSWORD, PROPERTIES, SECRET, AclBroker, acl_broker, signed, write_files
from tests.remoting.conftest import pull_ext, send_ext
from tests.wire_clients.mqtt import MqttClient
from tests.wire_clients.remoting import RemotingClient
from tests.wire_clients.stomp import StompClient, connected
from trio.testing import MockClock

from martlet_acl.config import AclConfig
from martlet_acl.files import POLICIES
from martlet_acl.policy.quotas import LIMITS
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect
from martlet_remoting.wire.codes import RequestCode, ResponseCode

USERS: Final[dict[str, object]] = {"ann": {"groups": ["shop"]}, "bob": {}, "root": {"administrator": True}}
GROUPS: Final = {"shop": ["staff"]}
RULES: Final = {"everybody": ["allow all on *"]}
# Whose quota it is, and its name in statistics when ann has used it up.
NAMES: Final = {"user:ann": "user 'ann'", "group:staff": "group 'staff'", "everybody": "user 'ann'"}
BODY: Final = b"x" * 100


class Mqtt:
    """Ann as a client of MQTT; each method returns whether the broker has accepted what it does."""

    talk: MqttClient

    def __init__(self, broker: AclBroker) -> None:
        self._broker = broker

    async def log_in(self, name: str) -> bool:
        self.talk = MqttClient(self._broker.running.connect(self._broker.ports["mqtt"]), V5)
        await self.talk.send(Connect(name, V5, True, user_name="ann", password=PASSWORD.format("ann").encode()))
        return self._said((await self.talk.expect(Connack)).reason)

    async def send(self) -> bool:
        return self._said(await self.talk.publish("T", BODY, 1))

    async def subscribe(self, name: str) -> bool:
        return self._said(*await self.talk.subscribe(name, qos=0))

    async def join(self, name: str) -> bool:
        return await self.subscribe(f"$share/{name}/T")

    async def receive(self, count: int) -> None:
        await self.talk.payloads(count)

    def _said(self, reason: int) -> bool:
        assert reason in (0, ReasonCode.NO_MATCHING_SUBSCRIBERS, ReasonCode.QUOTA_EXCEEDED)
        return reason != ReasonCode.QUOTA_EXCEEDED


class Stomp:
    """Ann as a client of STOMP."""

    talk: StompClient

    def __init__(self, broker: AclBroker) -> None:
        self._broker = broker

    async def log_in(self, name: str) -> bool:
        wire = self._broker.running.connect(self._broker.ports["stomp"])
        self.talk, answer = await connected(wire, login="ann", passcode=PASSWORD.format("ann"))
        return answer.command == "CONNECTED"

    async def send(self) -> bool:
        return await self._do(self.talk.frame("SEND", BODY, destination="/topic/T", receipt="r"))

    async def subscribe(self, name: str) -> bool:
        return await self._do(self.talk.frame("SUBSCRIBE", id=name, destination=f"/topic/{name}", receipt="r"))

    async def join(self, name: str) -> bool:
        return await self._do(self.talk.frame("SUBSCRIBE", id=name, destination=f"/queue/{name}", receipt="r"))

    async def receive(self, count: int) -> None:
        await self.talk.messages(count)

    async def _do(self, frame: bytes) -> bool:
        await self.talk.send(frame)
        while (answer := await self.talk.receive()).command == "MESSAGE":
            pass
        return answer.command == "RECEIPT"


class Remoting:
    """Ann as a client of RocketMQ, whose requests are signed."""

    talk: RemotingClient

    def __init__(self, broker: AclBroker) -> None:
        self._broker = broker
        self._groups: dict[str, list[str]] = {}

    async def log_in(self, name: str) -> bool:
        self.talk = self._broker.remoting()
        return await self._beat()

    async def send(self) -> bool:
        return await self._do(RequestCode.SEND_MESSAGE_V2, send_ext("T", 0, PROPERTIES), BODY)

    async def subscribe(self, name: str) -> bool:
        self._groups.setdefault("G", []).append(name)
        return await self._beat()

    async def join(self, name: str) -> bool:
        self._groups[name] = ["T"]
        return await self._beat()

    async def receive(self, count: int) -> None:
        for number in range(count):
            assert await self._do(RequestCode.PULL_MESSAGE, pull_ext("T", number, sysFlag="6", maxMsgNums="1"))

    async def _beat(self) -> bool:
        consumers = [
            {"groupName": group, "subscriptionDataSet": [{"topic": topic} for topic in topics]}
            for group, topics in self._groups.items()
        ]
        body = orjson.dumps({"clientID": "c", "consumerDataSet": consumers})
        return await self._do(RequestCode.HEART_BEAT, {}, body)

    async def _do(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> bool:
        answer = await self.talk.ask(code, signed(ext, body, "ann", SECRET.format("ann")), body)
        assert answer.code in (0, ResponseCode.SYSTEM_BUSY), answer
        return answer.code == 0


Client = Mqtt | Stomp | Remoting
CLIENTS: Final[Mapping[str, type[Client]]] = {"mqtt": Mqtt, "stomp": Stomp, "remoting": Remoting}


@asynccontextmanager
async def opened(directory: Path, **more: Any) -> AsyncIterator[AclBroker]:
    write_files(directory, USERS, RULES, groups=GROUPS, **more)
    async with acl_broker(directory, AclConfig(watch_s=0, audit_file="")) as broker:
        broker.broker.topics.ensure("T", 1)
        yield broker


def used(broker: AclBroker, what: str) -> list[str]:
    """Return the names whose quotas have refused or slowed something."""
    found = broker.broker.quotas.statistics()[f"{what}_by_name"]
    assert isinstance(found, dict)
    return list(found)


async def exceed(client: Client, limit: str) -> None:
    """Use up a quota of one, or of a few bytes, and see that the next thing is refused."""
    assert await client.log_in("first")
    match limit:
        case "messages_in" | "bytes_in":
            assert await client.send()
            assert not await client.send()
        case "connections":
            assert not await client.log_in("second")
        case "subscriptions":
            assert await client.subscribe("a")
            assert not await client.subscribe("b")
        case "shared_groups":
            assert await client.join("a")
            assert not await client.join("b")


@pytest.mark.parametrize("subject", NAMES)
@pytest.mark.parametrize("limit", ["messages_in", "bytes_in", "connections", "subscriptions", "shared_groups"])
@pytest.mark.parametrize("protocol", CLIENTS)
async def test_what_is_above_a_limit_is_refused(
    tmp_path: Path, protocol: str, limit: str, subject: str, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path, quotas={subject: {limit: 1, "refuses": True}}) as broker:
        await exceed(CLIENTS[protocol](broker), limit)
        assert used(broker, "refused") == [NAMES[subject]]
        assert used(broker, "slowed_ms") == []


@pytest.mark.parametrize(
    ("limit", "value"), [("messages_in", 1), ("bytes_in", 100), ("messages_out", 1), ("bytes_out", 100)]
)
@pytest.mark.parametrize("protocol", CLIENTS)
async def test_what_is_above_a_rate_is_slowed_down(
    tmp_path: Path, protocol: str, limit: str, value: int, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path, quotas={"group:staff": {limit: value}}) as broker:
        sender, receiver = CLIENTS[protocol](broker), CLIENTS[protocol](broker)
        assert await sender.log_in("first")
        assert await receiver.log_in("second")
        assert await receiver.subscribe("T")
        began = trio.current_time()
        await send_all(sender, 4)
        sent_s = trio.current_time() - began
        await receiver.receive(4)
        assert trio.current_time() - began > 1.5
        assert (sent_s > 1.5) == limit.endswith("in")
        assert used(broker, "slowed_ms") == ["group 'staff'"]
        assert used(broker, "refused") == []


# changes


LIMITED: Final = {"messages_in": 1, "refuses": True}


async def by_command(broker: AclBroker, directory: Path, subject: str, quota: Mapping[str, int | bool]) -> None:
    if quota:
        await broker.administration.change_quota(subject, quota)
    else:
        await broker.administration.delete_quota(subject)


async def by_hand(broker: AclBroker, directory: Path, subject: str, quota: Mapping[str, int | bool]) -> None:
    path = trio.Path(directory / POLICIES)
    document = json.loads(await path.read_text())
    document["quotas"] = {subject: quota} if quota else {}
    await path.write_text(json.dumps(document))
    await trio.to_thread.run_sync(broker.plugin.martlet_reload)


@pytest.mark.parametrize("change", [by_command, by_hand])
@pytest.mark.parametrize("subject", NAMES)
async def test_a_change_is_in_effect_at_once_for_who_is_connected(tmp_path: Path, subject: str, change: Any) -> None:
    async with opened(tmp_path) as broker:
        ann = Mqtt(broker)
        assert await ann.log_in("a")
        assert [await ann.send() for _ in range(5)] == [True] * 5
        await change(broker, tmp_path, subject, LIMITED)
        assert [await ann.send() for _ in range(3)] == [True, False, False]
        assert used(broker, "refused") == [NAMES[subject]]
        await change(broker, tmp_path, subject, {"connections": 1, "messages_in": 0})
        assert not await Mqtt(broker).log_in("b")
        await change(broker, tmp_path, subject, {})
        assert await Mqtt(broker).log_in("b")
        assert [await ann.send() for _ in range(5)] == [True] * 5


@pytest.mark.parametrize("change", [by_command, by_hand])
@pytest.mark.parametrize("after", [{}, {"messages_in": 100_000, "messages_out": 100_000}])
@pytest.mark.parametrize("protocol", CLIENTS)
async def test_a_raised_quota_ends_pauses_at_once(
    tmp_path: Path, protocol: str, after: Mapping[str, int], change: Any, autojump_clock: MockClock
) -> None:
    async with opened(tmp_path, quotas={"group:staff": {"messages_in": 1, "messages_out": 1}}) as broker:
        sender, receiver = CLIENTS[protocol](broker), CLIENTS[protocol](broker)
        assert await sender.log_in("first")
        assert await receiver.log_in("second")
        assert await receiver.subscribe("T")
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receiver.receive, 20)
            nursery.start_soon(send_all, sender, 20)
            await trio.sleep(5)
            await change(broker, tmp_path, "group:staff", after)
        assert 5 <= trio.current_time() - began < 6


async def send_all(client: Client, count: int) -> None:
    for _ in range(count):
        assert await client.send()


async def test_who_joins_a_group_shares_its_quota_at_once(tmp_path: Path) -> None:
    async with opened(tmp_path, quotas={"group:others": LIMITED}) as broker:
        ann = Mqtt(broker)
        assert await ann.log_in("a")
        assert [await ann.send() for _ in range(5)] == [True] * 5
        await broker.administration.put_group("staff", ["others"])
        assert [await ann.send() for _ in range(3)] == [True, False, False]
        await broker.administration.delete_group("others")
        assert [await ann.send() for _ in range(5)] == [True] * 5


async def test_while_it_observes_there_are_no_quotas(tmp_path: Path) -> None:
    async with opened(tmp_path, quotas={"user:ann": dict.fromkeys(LIMITS, 1) | {"refuses": True}}) as broker:
        await broker.administration.set_observing(observe=True)
        ann = Mqtt(broker)
        assert await ann.log_in("a")
        assert await Mqtt(broker).log_in("b")
        assert [await ann.send() for _ in range(5)] == [True] * 5
        await broker.administration.set_observing(observe=False)
        assert [await ann.send() for _ in range(3)] == [True, False, False]
        assert not await Mqtt(broker).log_in("c")


async def test_administrators_have_the_quota_of_everybody(tmp_path: Path) -> None:
    async with opened(tmp_path, quotas={"everybody": {"connections": 1}}) as broker:
        password = PASSWORD.format("root").encode()
        assert await broker.mqtt_login("root", password, "a") is not None
        talk = MqttClient(broker.running.connect(broker.ports["mqtt"]), V5)
        await talk.send(Connect("b", V5, True, user_name="root", password=password))
        assert (await talk.expect(Connack)).reason == ReasonCode.QUOTA_EXCEEDED


async def test_anonymous_clients_share_one_quota(tmp_path: Path) -> None:
    write_files(tmp_path, USERS, {"anonymous": ["allow all on *"]}, quotas={"anonymous": LIMITED, "everybody": {}})
    async with acl_broker(tmp_path, AclConfig(watch_s=0, audit_file="")) as broker:
        broker.broker.topics.ensure("T", 1)
        answers = [await broker.remoting_send(broker.remoting(), "T") for _ in range(2)]
        assert [answer.code for answer in answers] == [0, ResponseCode.SYSTEM_BUSY]
        assert used(broker, "refused") == ["clients without a name"]
