"""A broker with a real store, spoken to through bytes but without sockets."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from martlet.broker import Broker
from martlet.config import fill
from martlet.contracts import Buffer, Identity, LoginOrigin
from martlet.net.addresses import pack_host
from martlet.runtime.clock import Clock
from martlet.runtime.ids import Ids
from martlet.runtime.stats import Stats
from martlet.settings import BrokerConfig
from martlet.state.journal import NEXT_COMMIT
from martlet.store import RealDisk, Store, StoreConfig
from martlet.store.disk.files import Disk
from martlet.tables.groups import Groups
from martlet.tables.topics import Topics
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPace
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.handlers.unheld import refuse_unheld
from martlet_remoting.wire.codec import FrameBuffer, encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command, Frame
from martlet_remoting.wire.runs import AckRun, SendRun

NO_HEADER: Mapping[str, object] = {}


class FakeClock:
    """A wall clock that tests move; from `run` on it also goes as trio's clock does."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000
        self._began: float | None = None

    def run(self) -> None:
        self._began = trio.current_time()

    def now_ms(self) -> int:
        if self._began is None:
            return self.ms
        return self.ms + round((trio.current_time() - self._began) * 1000)


async def keep_nothing(data: bytes) -> None:
    """Where a name server saves its texts that need not outlive it."""


def joined(frame: Frame) -> bytes:
    """The bytes of *frame*."""
    return frame if isinstance(frame, bytes) else b"".join(frame)


async def finish(rest: Awaitable[None]) -> None:
    await rest


class FakePeer:
    """The server's side of one client: keeps what is sent, runs what is started."""

    def __init__(self, harness: "Harness", number: int, host: str) -> None:
        self.address = f"{host}:{40000 + number}"
        self.host = pack_host(host, 40000 + number)
        self.identity = Identity()
        self.encrypted = False
        self.client = ""
        self.harness = harness
        self.sent: list[bytes] = []
        self.piece_bytes: list[int] = []
        self.held_until = 0
        self.holds_commit = False  # until what this round appends is durable
        self.woken = False
        self.closed_with: str | None = None
        self.paced = RecordingPace()

    def pace(self) -> RecordingPace:
        return self.paced

    def login_origin(self, client_id: str = "") -> LoginOrigin:
        return LoginOrigin(self.address.rpartition(":")[0], "remoting", client_id=client_id)

    def introduce(self, client: str, details: str = "") -> None:
        self.client = client

    def send(self, *pieces: Buffer) -> None:
        self.piece_bytes += map(len, pieces)
        self.sent.append(b"".join(map(bytes, pieces)))

    def hold_until(self, position: int) -> None:
        if position == NEXT_COMMIT:
            self.holds_commit = True
        else:
            self.held_until = max(self.held_until, position)

    def before_commit(self, work: Callable[[], None]) -> None:
        if self.harness.in_round:
            self.harness.before_commit.append(work)
        else:
            work()

    def wake(self) -> None:
        self.woken = True

    def wake_last(self) -> None:
        self.woken = True

    def has_room(self) -> bool:
        return True

    def start_tls(self) -> None:
        raise AssertionError("RocketMQ's protocol never upgrades to TLS")

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self.harness.nursery.start_soon(work, *args)

    def close(self, reason: str) -> None:
        self.closed_with = reason


class FakeClient:
    """One connection: what it sends goes through the codec, and so does what comes back."""

    def __init__(self, harness: "Harness", number: int, *, fast: bool, host: str) -> None:
        self.harness = harness
        self.peer = FakePeer(harness, number, host)
        self.connection = RemotingConnection(harness.config.frame_bytes_max, harness.config.idle_s, 0.0)
        self.handler = RemotingHandler(harness.state, self.peer, self.connection, fast=fast)
        self.language = "JAVA"
        self.answers: dict[int, Command] = {}
        self.requests: list[Command] = []
        self._frames = FrameBuffer()
        self._opaque = 0

    def send(
        self, code: int, ext: Mapping[str, object] = NO_HEADER, body: bytes = b"", *, flag: int = 0, version: int = 479
    ) -> int:
        """Send a request and return its number; answers are taken at the next `Harness.step`."""
        self._opaque += 1
        self.send_command(Command(code, ext, body, self._opaque, flag, None, self.language, version))
        return self._opaque

    def send_command(self, command: Command) -> None:
        self.connection.receive_data(encode_command(command), trio.current_time())
        for event in self.connection.events():
            self.handle(event)

    def handle(self, event: Command | SendRun | AckRun) -> None:
        """Give *event* to the handler; what is left of a long one is done by the next `Harness.step`."""
        rest = self.handler.handle(event)
        if rest is not None:
            self.harness.nursery.start_soon(finish, rest)

    async def ask(
        self, code: int, ext: Mapping[str, object] = NO_HEADER, body: bytes = b"", *, version: int = 479
    ) -> Command:
        """Send a request and return its answer; it must come without anything else happening."""
        opaque = self.send(code, ext, body, version=version)
        await self.harness.step()
        assert opaque in self.answers, f"request {code} was not answered"
        return self.answers.pop(opaque)

    def receive(self) -> None:
        """Take what the broker sent."""
        sent, self.peer.sent = self.peer.sent, []
        for frame in sent:
            self._frames.receive_data(frame)
            for command in self._frames.commands():
                if command.is_response:
                    assert command.opaque not in self.answers, "a request was answered twice"
                    self.answers[command.opaque] = command
                else:
                    self.requests.append(command)

    def close(self) -> None:
        self.handler.closed("")
        self.harness.clients.remove(self)

    async def heartbeat(self, client_id: str, group: str, *topics: str, **more: object) -> Command:
        """Join consumer group *group* with all messages of *topics*."""
        subscriptions = [
            {"topic": topic, "subString": "*", "expressionType": "TAG", "subVersion": 1, "tagsSet": [], "codeSet": []}
            for topic in topics
        ]
        return await self.heartbeat_with(client_id, group, subscriptions, **more)

    async def heartbeat_with(
        self, client_id: str, group: str, subscriptions: list[dict[str, object]], **more: object
    ) -> Command:
        consumer = {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
            "subscriptionDataSet": subscriptions,
            "unitMode": False,
            **more,
        }
        return await self.heartbeat_body({"clientID": client_id, "consumerDataSet": [consumer], "producerDataSet": []})

    async def heartbeat_body(self, body: Mapping[str, object]) -> Command:
        import orjson

        return await self.ask(RequestCode.HEART_BEAT, body=orjson.dumps(body))


class Harness:
    """Broker, store and connections of one test."""

    def __init__(self, broker: Broker, config: RemotingConfig, clock: FakeClock, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.store = broker.store
        self.clock = clock
        self.config = config
        self.nursery = nursery
        self.state = RemotingState(broker, config)
        broker.set_stages([("remoting", refuse_unheld(broker))])
        nursery.start_soon(self.state.members.run)
        self.clients: list[FakeClient] = []
        self.in_round = False
        self.before_commit: list[Callable[[], None]] = []

    @contextmanager
    def round(self) -> Iterator[None]:
        """Several reads of one round; without it each read is a round of its own."""
        self.in_round = True
        yield
        self.end_round()

    def end_round(self) -> None:
        """Do what comes before the commit of a round."""
        self.in_round = False
        works, self.before_commit = self.before_commit, []
        for work in works:
            work()

    def client(self, *, fast: bool = False, host: str = "127.0.0.1") -> FakeClient:
        found = FakeClient(self, len(self.clients), fast=fast, host=host)
        self.clients.append(found)
        return found

    async def step(self) -> None:
        """What the server does after a socket read: commit, flush, collect, let answers leave."""
        for _ in range(3):
            self.store.committer.commit()
            await self.store.flusher.wait_flushed(self.store.written)
            await trio.testing.wait_all_tasks_blocked()
            while self.broker.turns.off_loop:  # a thread reads for a request
                await trio.lowlevel.checkpoint()
                await trio.testing.wait_all_tasks_blocked()
            self.collect()
        for client in self.clients:
            assert client.peer.held_until <= self.store.readable
            client.receive()

    def collect(self, budget_bytes: int = 1 << 20) -> None:
        while woken := [client for client in self.clients if client.peer.woken]:
            for client in woken:
                client.peer.woken = False
                client.handler.collect(budget_bytes)

    def topic(self, name: str, queues: int = 4, perm: int = 6) -> str:
        self.broker.topics.update(name, queues, queues, perm)
        return name


def opaques_of_cut(data: bytes, size: int) -> list[int]:
    """The numbers of the requests in *data*, received *size* bytes at a time; one request is taken of each run."""
    connection = RemotingConnection(1 << 20, 120.0, 0.0)
    connection.takes_runs = True
    found: list[int] = []
    for start in range(0, len(data), size):
        connection.receive_data(data[start : start + size], 0.0)
        for event in connection.events():
            if isinstance(event, Command):
                found.append(event.opaque)
            else:
                event.taken = 1
                found.append(event.acks[0][0].opaque if isinstance(event, AckRun) else event.sends[0][-3])
    assert connection.buffered_bytes == 0
    return found


def long_ext(topic: str, **more: object) -> dict[str, object]:
    """The header of a send with long field names."""
    return {
        "producerGroup": "P",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "1",
        "sysFlag": "0",
        "bornTimestamp": "1700000000000",
        "flag": "0",
        "properties": "",
        "reconsumeTimes": "0",
        "unitMode": "false",
        "maxReconsumeTimes": "0",
        "batch": "false",
        **more,
    }


def send_ext(topic: str, queue_id: int = 0, properties: str = "", **more: object) -> dict[str, object]:
    """The header of a SEND_MESSAGE_V2."""
    return {
        "a": "P",
        "b": topic,
        "c": "TBW102",
        "d": "4",
        "e": str(queue_id),
        "f": "0",
        "g": "1700000000000",
        "h": "0",
        "i": properties,
        "j": "0",
        "k": "false",
        "m": "false",
        **more,
    }


def pull_ext(topic: str, offset: int, queue_id: int = 0, **more: object) -> dict[str, object]:
    """The header of a pull that carries its subscription and may not wait."""
    return {
        "consumerGroup": "G",
        "topic": topic,
        "queueId": str(queue_id),
        "queueOffset": str(offset),
        "maxMsgNums": "32",
        "sysFlag": "4",
        "commitOffset": "0",
        "suspendTimeoutMillis": "15000",
        "subscription": "*",
        "subVersion": "0",
        "expressionType": "TAG",
        **more,
    }


OpenHarness = Callable[..., Awaitable[Harness]]


@pytest.fixture
async def open_harness(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[OpenHarness]:
    """Makes a harness; keywords are keys of ``[remoting]``, and ``broker`` and ``store`` are tables of keys.

    With *cached* its disk is in memory, and no message has to be read in a thread.
    """
    stores: list[Store] = []

    async def make(
        *,
        broker: Mapping[str, object] = NO_HEADER,
        store: Mapping[str, object] = NO_HEADER,
        cached: bool = False,
        **keys: object,
    ) -> Harness:
        clock = FakeClock()
        config = fill(RemotingConfig, keys, "remoting")
        disk: Disk = RealDisk()
        if cached:
            disk = FakeDisk()
            disk.cached = True
        configs = fill(BrokerConfig, broker, "broker"), fill(StoreConfig, store, "store")
        made = await _broker(tmp_path, clock, *configs, disk)
        stores.append(made.store)
        await nursery.start(made.store.upkeep.run)
        return Harness(made, config, clock, nursery)

    yield make
    for opened in stores:
        await opened.flusher.flush()  # the store still runs, and may be in the middle of one
        await opened.close()


async def _broker(directory: Path, clock: Clock, config: BrokerConfig, store_config: StoreConfig, disk: Disk) -> Broker:
    import random

    opened = await Store.open(directory / "data", store_config, clock, disk)
    opened.writer.store_host = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")
    topics = Topics(opened, clock, auto_create=config.auto_create_topics, auto_create_queues=config.auto_create_queues)
    topics.ensure("TBW102", 8, 7)
    groups = Groups(clock, auto_create=config.auto_create_groups, offsets_max=config.offsets_max)
    broker = Broker(config, opened, topics, groups, clock, Ids(random.Random(7)), Stats())
    await broker.projections.replay()
    return broker


@pytest.fixture
async def harness(open_harness: OpenHarness) -> Harness:
    """A harness with default settings but asynchronous flush."""
    return await open_harness(store={"flush": "async"})
