"""One quota for all protocols: what a user sends by one of them is gone for the others."""

from pathlib import Path

import orjson
import pytest
import trio
from tests.limits import give, know, used
from tests.remoting.conftest import pull_ext, send_ext
from tests.stomp.all_protocols import Protocols, all_protocols
from tests.wire_clients.mqtt import MqttClient
from trio.testing import MockClock

from martlet.access import Quotas
from martlet.contracts import Identity, LoginOrigin, Quota
from martlet.errors import Reason, Refused
from martlet.message import Message, encode_properties
from martlet.store.append.items import AppendItem
from martlet.tables.topics import RETRY_PREFIX
from martlet.testing.peers import RecordingPeer, serving
from martlet_mqtt.wire.codes import ReasonCode
from martlet_remoting.wire.codes import RequestCode, ResponseCode

EXCEEDED, BUSY = ReasonCode.QUOTA_EXCEEDED, ResponseCode.SYSTEM_BUSY
ANN = Identity("ann")


async def connect_mqtt(protocols: Protocols, user: str) -> MqttClient:
    return await protocols.mqtt.connect(user, user_name=user, password=user.encode())


async def test_users_of_different_protocols_share_the_quota_of_their_group(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with all_protocols(tmp_path) as protocols:
        know(protocols.broker)
        group = Quota("staff", messages_in=10, refuses=True)
        give(protocols.broker, group, ann=[group], bob=[group], eve=[])
        ann, eve = await connect_mqtt(protocols, "ann"), await connect_mqtt(protocols, "eve")
        bob, nobody = await protocols.stomp.connect(login="bob", passcode="bob"), protocols.remoting()
        protocols.broker.topics.ensure("T", 1)

        async def send(number: int) -> int:
            ext = send_ext("T", 0, encode_properties({"UNIQ_KEY": f"{number:032d}"}).decode())
            return (await nobody.ask(RequestCode.SEND_MESSAGE_V2, ext, b"x")).code

        assert [await ann.publish("a", b"x", 1) for _ in range(4)] == [0] * 4
        await bob.publish("/queue/a", *[b"x"] * 4)
        assert [await send(number) for number in range(3)] == [0, 0, BUSY]
        assert await ann.publish("a", b"x", 1) == EXCEEDED
        await bob.send(bob.frame("SEND", b"x", destination="/queue/a"))
        assert "group 'staff': may send 10 messages a second" in (await bob.error())["message"]
        assert await eve.publish("a", b"x", 1) == 0
        assert used(protocols.broker) == (0, 3)
        await trio.sleep(1)
        assert [await send(number) for number in range(11)] == [0] * 10 + [BUSY]
        assert await ann.publish("a", b"x", 1) == EXCEEDED


async def test_a_user_is_slowed_on_all_protocols_together(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with all_protocols(tmp_path) as protocols:
        give(protocols.broker, Quota(messages_in=10, messages_out=10))
        mqtt, stomp = await protocols.mqtt.connect("a"), await protocols.stomp.connect()
        await stomp.subscribe("/topic/mqtt/a")
        began = trio.current_time()
        for _ in range(20):
            assert await mqtt.publish("a", b"x", 1) == 0
        await stomp.publish("/queue/b", b"x")
        assert trio.current_time() - began == pytest.approx(1.1, abs=0.2), "it waits for what MQTT has sent"
        assert len(await stomp.bodies(20)) == 20
        assert trio.current_time() - began == pytest.approx(1.2, abs=0.4)


async def test_a_connection_by_any_protocol_counts(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with all_protocols(tmp_path) as protocols:
        give(protocols.broker, Quota(connections=3, subscriptions=3))
        mqtt, stomp, remoting = await protocols.mqtt.connect("a"), await protocols.stomp.connect(), protocols.remoting()
        consumer = {"groupName": "G", "subscriptionDataSet": [{"topic": "T"}]}
        heartbeat = orjson.dumps({"clientID": "c", "consumerDataSet": [consumer]})
        assert (await remoting.ask(RequestCode.HEART_BEAT, {}, heartbeat)).code == 0
        assert (await protocols.remoting().ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0))).code == BUSY
        assert (await protocols.stomp.answer())[1].command == "ERROR"
        await stomp.subscribe("/topic/a")
        assert await mqtt.subscribe("a", "b", qos=0) == (0, EXCEEDED)


# the gate


def message(topic: str = "t") -> Message:
    """A message of 100 bytes."""
    return Message(topic, b"x" * 70, b"TAGS\x01" + b"y" * 24 + b"\x02")


@pytest.mark.parametrize("way", ["publish", "messages", "tuples", "atomic", "give back", "reply"])
async def test_bytes_are_those_of_bodies_and_properties_however_they_come(
    tmp_path: Path, way: str, autojump_clock: MockClock
) -> None:
    async with serving(tmp_path) as running:
        broker, peer = running.broker, RecordingPeer()
        queue = broker.topics.ensure("t", 1).queue(0)
        broker.topics.ensure(f"{RETRY_PREFIX}g", 1)
        give(broker, ann=[Quota(bytes_in=100)])
        gate = broker.gate(ANN, LoginOrigin(), peer)
        sent = message()
        item: AppendItem = (queue, sent.body, sent.properties, 0, 0, 0, 0, bytes(8), 0, 0)
        broker.replies.add("test", lambda gate, address, reply: gate.publish(reply))
        for _ in range(2):
            match way:
                case "publish":
                    gate.publish(sent)
                case "messages":
                    gate.publish_all([sent])
                case "tuples":
                    gate.publish_all([item])
                case "atomic":
                    gate.publish_all([sent], atomic=True)
                case "give back":
                    gate.give_back("g", message(f"{RETRY_PREFIX}g"))
                case "reply":
                    gate.reply("test:x", sent)
        assert peer.paced.read_at - trio.current_time() == pytest.approx(1.0, abs=0.02)


async def test_what_the_store_refuses_is_not_counted(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as running:
        give(running.broker, ann=[Quota(messages_in=2, refuses=True)])
        gate = running.broker.gate(ANN, LoginOrigin(), RecordingPeer())
        for _ in range(5):
            with pytest.raises(Refused) as caught:
                gate.publish(message("missing"))
            assert caught.value.reason is Reason.NO_TOPIC
        running.broker.topics.ensure("t", 1)
        gate.publish(message())


async def test_notes_without_messages_are_not_counted(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with serving(tmp_path) as running:
        give(running.broker, ann=[Quota(messages_in=1, refuses=True)])
        gate = running.broker.gate(ANN, LoginOrigin(), RecordingPeer())
        journal = running.broker.journal("test")
        for _ in range(5):
            gate.publish_all([], atomic=True, notes=[(journal, b"note")])
        running.broker.topics.ensure("t", 1)
        gate.publish(message())
        with pytest.raises(Refused, match="may send 1 messages a second"):
            gate.publish_all([message()], atomic=True)


async def test_messages_without_permission_and_above_the_rate_are_told_apart(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with serving(tmp_path) as running:
        broker = running.broker
        for topic in ("t", "u"):
            broker.topics.ensure(topic, 1)
        give(broker, ann=[Quota(messages_in=3, refuses=True)])
        broker.authorizers = (lambda identity, action, name: name == "t",)
        gate = broker.gate(ANN, LoginOrigin(), RecordingPeer())
        result = gate.publish_all([message("t"), message("u"), message("t"), message("t"), message("t")])
        reasons = [getattr(each, "reason", None) for each in result.outcomes()]
        assert reasons == [None, Reason.NO_PERMISSION, None, Reason.QUOTA, Reason.QUOTA]


async def test_a_gate_without_a_peer_has_no_quota(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        running.broker.topics.ensure("t", 1)
        give(running.broker, ann=[Quota(messages_in=1, connections=1, refuses=True)])
        for _ in range(5):
            running.broker.gate(ANN).publish(message())
        assert running.broker.quotas.statistics() == Quotas().statistics()


async def test_a_change_of_the_rules_asks_for_the_quotas_of_all_who_are_connected(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with serving(tmp_path) as running:
        broker, asked = running.broker, list[str]()

        def answer(identity: Identity) -> list[Quota]:
            asked.append(identity.name)
            return []

        broker.quotas.sources = (answer,)
        names = {f"user-{number}" for number in range(2000)}
        for name in names:
            broker.gate(Identity(name), LoginOrigin(), RecordingPeer())
        asked.clear()
        broker.rules.changed()
        while len(asked) < len(names):
            await trio.lowlevel.checkpoint()
        assert set(asked) == names
