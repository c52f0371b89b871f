"""Every operation of every protocol, under every kind of denial: it is refused, and nothing of it happens."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any, Final, TypeAlias, cast

import orjson
import pytest
import trio
import trio.testing
from tests.remoting.conftest import long_ext, pull_ext, send_ext

from martlet.broker import Broker
from martlet.contracts import Identity, Protocol
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.plugins.loader import guarded_authorizer
from martlet.store import StoreConfig
from martlet.store.format.notes import OWN_PREFIX
from martlet.tables.topics import BROKER_TOPICS, EVENT_TOPIC
from martlet.testing.peers import MemoryPeer, Serving, serving
from martlet_feed import FeedConfig, FeedPlugin
from martlet_line.config import LineConfig
from martlet_line.plugin import protocol as line_protocol
from martlet_remoting.config import RemotingConfig
from martlet_remoting.plugin import RemotingPlugin
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_topics.codec import encode_frame
from martlet_topics.config import TopicsConfig
from martlet_topics.plugin import TopicsPlugin

Opinion: TypeAlias = Callable[[Identity, str, str], object]

PATIENCE_S: Final = 60
UNIQUE: Final = "UNIQ_KEY\x01AC110001\x02"


@dataclass(frozen=True)
class Operation:
    """What a client of *protocol* sends, and a question that authorizers are asked before it happens."""

    protocol: str
    sends: bytes
    action: str
    name: str
    frames: int = 1  # answers

    def __str__(self) -> str:
        shown = self.sends[:14].decode("ascii", "replace").strip() if self.protocol != "remoting" else "request"
        return f"{self.protocol}-{shown}-{self.action}-{self.name}"


def request(code: int, ext: Mapping[str, object] = {}, body: bytes = b"", opaque: int = 1) -> bytes:
    return encode_command(Command(code, ext, body, opaque))


def topics_run(verb: str, *names: bytes) -> bytes:
    data = b"".join(encode_frame(name, b"x") for name in names)
    return b"%b 1 %d %d\n" % (verb.encode(), len(names), len(data)) + data


def heartbeat(group: str, topic: str) -> bytes:
    consumer = {"groupName": group, "subscriptionDataSet": [{"topic": topic}]}
    return request(RequestCode.HEART_BEAT, {}, orjson.dumps({"clientID": "c", "consumerDataSet": [consumer]}))


SENDS = [send_ext("t", properties=UNIQUE) for _ in range(6)]
BATCH = request(RequestCode.SEND_BATCH_MESSAGE, send_ext("t", m="true"), pack(">iiiii", 23, 0, 0, 0, 1) + b"x\0\0")
PLACE = {"consumerGroup": "G", "topic": "t", "queueId": "0", "commitOffset": "1"}
RESET = {"group": "G", "topic": "t", "timestamp": "-1", "isForce": "true"}
NEW_TOPIC = {
    "topic": "t",
    "defaultTopic": "TBW102",
    "readQueueNums": "7",
    "writeQueueNums": "7",
    "perm": "6",
    "topicFilterType": "SINGLE_TAG",
    "order": "false",
}
OPERATIONS: Final = [
    Operation("line", b"PUB t x\n", "publish", "t"),
    Operation("line", b"SUB t\n", "read", "t"),
    Operation("line", b"SUB t as N\n", "read", "t"),
    Operation("line", b"SUB t group G\n", "read", "t"),
    Operation("line", b"SUB t group G\n", "read", "%RETRY%G"),
    Operation("feed", b"FEED t\n", "read", "t"),
    Operation("topics", topics_run("RUN", b"a"), "publish", "named/a"),
    Operation("topics", topics_run("RUN", b"a"), "publish", "named"),
    Operation("topics", topics_run("TX", b"b", b"a", b"c"), "publish", "named/a"),
    Operation("topics", b"SUB a/+ 1\n", "read", "named/a/+"),
    Operation("topics", b"SUB # 0\n", "read", "named"),
    Operation("remoting", request(RequestCode.SEND_MESSAGE, long_ext("t", queueId="0"), b"x"), "publish", "t"),
    Operation("remoting", request(RequestCode.SEND_MESSAGE_V2, SENDS[0], b"x"), "publish", "t"),
    Operation(
        "remoting",
        b"".join(request(RequestCode.SEND_MESSAGE_V2, ext, b"x", n) for n, ext in enumerate(SENDS)),
        "publish",
        "t",
        len(SENDS),
    ),
    Operation("remoting", BATCH, "publish", "t"),
    Operation(
        "remoting",
        request(RequestCode.SEND_MESSAGE_V2, send_ext("named", properties=f"{UNIQUE}TAGS\x01a\x02"), b"x"),
        "publish",
        "named/a",
    ),
    Operation("remoting", request(RequestCode.PULL_MESSAGE, pull_ext("t", 0)), "read", "t"),
    Operation("remoting", request(RequestCode.PULL_MESSAGE, pull_ext("t", 0)), "read", "%RETRY%G"),
    Operation("remoting", request(RequestCode.PULL_MESSAGE, pull_ext("named", 0)), "read", "named"),
    Operation("remoting", heartbeat("G", "t"), "read", "t"),
    Operation("remoting", heartbeat("G", "t"), "read", "%RETRY%G"),
    Operation("remoting", request(RequestCode.UPDATE_CONSUMER_OFFSET, PLACE), "read", "%RETRY%G"),
    Operation("remoting", request(RequestCode.UPDATE_AND_CREATE_TOPIC, NEW_TOPIC), "manage", "t"),
    Operation("remoting", request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "t"}), "manage", "t"),
    Operation("remoting", request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RESET), "manage", "%RETRY%G"),
]


def no(identity: Identity, action: str, name: str) -> object:
    return False


def no_opinion(identity: Identity, action: str, name: str) -> object:
    return None


def raises(identity: Identity, action: str, name: str) -> object:
    raise ZeroDivisionError("a defect")


def refuses(identity: Identity, action: str, name: str) -> object:
    raise Refused(Reason.NO_PERMISSION, "go away")


def nonsense(identity: Identity, action: str, name: str) -> object:
    return "no"  # which is true


# Each with the error that the client gets.
TOLD: Final[dict[Opinion, str]] = {
    no: "may not ",
    no_opinion: "may not ",
    raises: "plugin 'rules' failed in its authorizer; ZeroDivisionError: a defect",
    refuses: "go away",
    nonsense: "plugin 'rules' failed in its authorizer; TypeError: it returned 'no'; return bool or None",
}


def denying(operation: Operation, deny: Opinion) -> Callable[..., Any]:
    """An authorizer that answers the operation's question as *deny* does, and allows the rest."""
    topic = operation.name.partition("/")[0]

    def is_meant(name: str) -> bool:
        # Where nobody has an opinion about a name, that about its topic decides, and the other way round.
        return name == operation.name or (deny is no_opinion and name.partition("/")[0] == topic)

    def ask(identity: Identity, action: str, name: str) -> object:
        return deny(identity, action, name) if action == operation.action and is_meant(name) else True

    return cast(Callable[..., Any], guarded_authorizer("rules", cast(Any, ask)))


class Served:
    """A broker with all protocols."""

    def __init__(self, running: Serving, protocols: Mapping[str, Protocol]) -> None:
        self.running = running
        self.broker: Broker = running.broker
        self.protocols = protocols

    async def connect(self, protocol: str) -> MemoryPeer:
        peer = self.running.connect(self.protocols[protocol])
        if protocol == "topics":
            await peer.send(b"HELLO\n")
            assert await peer.receive_line() == b"OK new"
        return peer

    async def ask(self, operation: Operation) -> list[str]:
        """Send what a client sends, on a connection of its own; return why it was refused, empty where it was not."""
        peer = await self.connect(operation.protocol)
        await peer.send(operation.sends)
        with trio.fail_after(PATIENCE_S):
            if operation.protocol == "remoting":
                return await remarks(peer, operation.frames)
            line = (await peer.receive_line()).decode()
        return [line.partition(" ")[2] if line.startswith(("ERR ", "ERROR ")) else ""]

    def state(self) -> list[object]:
        """What an operation could have changed."""
        broker = self.broker
        return [
            broker.store.appended,
            broker.subscriptions.statistics()["subscriptions"],
            len(broker.sessions),
            sorted(broker.groups.names()),
            [topic.as_json() for topic in broker.topics],
            broker.groups.offsets.committed("G", "t"),
            broker.groups.offsets.pending_reset("G", "t", 0),
        ]


async def remarks(peer: MemoryPeer, count: int) -> list[str]:
    frames, found = FrameBuffer(), list[str]()
    while len(found) < count:
        frames.receive_data(await peer.receive_some())
        found += [str(each.remark or each.code) if each.code else "" for each in frames.commands()]
    return found


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Served]:
    topics = TopicsPlugin(TopicsConfig(listen="127.0.0.1:0", topic="named", queues=1))
    remoting = RemotingPlugin(RemotingConfig(listen="127.0.0.1:0", vip=False))
    feed = FeedPlugin(FeedConfig(listen="127.0.0.1:0"))
    store = StoreConfig(flush="async", disk_full_ratio=1.0)
    async with serving(directory, store=store, projections=topics.martlet_projections) as running:
        broker = running.broker
        broker.topics.ensure("t", 1)
        protocols = {
            "line": line_protocol(LineConfig(listen="127.0.0.1:0"), broker),
            "feed": feed.martlet_protocols(broker)[0],
            "topics": topics.protocol(broker),
            "remoting": remoting.martlet_protocols(broker)[0],
        }
        broker.publish(Message("t", b"secret", b"", 0))
        broker.publish(Message("named", b"secret", b"TAGS\x01x\x02", 0))
        broker.store.committer.commit()
        yield Served(running, protocols)


@pytest.mark.parametrize("deny", TOLD, ids=lambda deny: deny.__name__)
async def test_what_is_denied_is_refused_and_changes_nothing(
    tmp_path: Path,
    deny: Opinion,
) -> None:
    async with served(tmp_path) as made:
        for operation in OPERATIONS:
            made.broker.authorizers = (denying(operation, deny),)
            before = made.state()
            for why in await made.ask(operation):
                assert TOLD[deny] in why, (str(operation), why)
            assert made.state() == before, str(operation)


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
async def test_each_operation_happens_where_nobody_denies_it_and_no_more_once_the_rules_change(
    tmp_path: Path, operation: Operation
) -> None:
    async with served(tmp_path) as made:
        made.broker.groups.ensure("G")
        rules: list[Callable[..., Any]] = [lambda identity, action, name: True]
        made.broker.authorizers = (lambda identity, action, name: rules[-1](identity, action, name),)
        assert not any(await made.ask(operation))
        rules.append(denying(operation, no))
        made.broker.rules.changed()
        await trio.testing.wait_all_tasks_blocked(0.01)  # what still waits has ended, and left its session
        before = made.state()[0]
        assert all("may not " in why for why in await made.ask(operation))
        assert made.state()[0] == before


INTERNAL: Final = sorted({*BROKER_TOPICS - {EVENT_TOPIC}, f"{OWN_PREFIX}journal.topics", f"{OWN_PREFIX}store"})


@pytest.mark.parametrize("topic", INTERNAL)
async def test_no_protocol_opens_a_topic_of_the_broker_itself(tmp_path: Path, topic: str) -> None:
    async with served(tmp_path) as made:
        if topic in BROKER_TOPICS:
            made.broker.topics.ensure(topic, 1)
        for each in OPERATIONS:
            if each.protocol == "topics" or b"t" not in each.sends or each.action == "manage":
                continue
            renamed = renamed_for(each, topic)
            before = made.state()[0]
            assert all(await made.ask(renamed)), str(renamed)
            assert made.state()[0] == before


def renamed_for(operation: Operation, topic: str) -> Operation:
    """*operation* with another topic."""
    if operation.protocol != "remoting":
        sends = operation.sends.replace(b" t", b" " + topic.encode())
        return Operation(operation.protocol, sends, operation.action, topic)
    frames = FrameBuffer()
    frames.receive_data(operation.sends)
    sends = b""
    for command in frames.commands():
        ext = {key: topic if key in ("topic", "b") else value for key, value in command.ext.items()}
        body = command.body.replace(b'"topic":"t"', f'"topic":"{topic}"'.encode())
        sends += request(command.code, ext, body, command.opaque)
    return Operation("remoting", sends, operation.action, topic, operation.frames)
