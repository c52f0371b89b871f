"""The remoting connection and handler in a real server, over links in memory and in virtual time."""

import contextlib
import errno
import random
import struct
from typing import cast

import orjson
import pytest
import trio
from tests.wire_clients.remoting import RemotingClient
from trio.testing import MockClock

from martlet.contracts import Handler, Peer, Protocol
from martlet.net.server import Server
from martlet.records.codec import decode_records
from martlet.runtime.stats import Stats
from martlet.settings import ServerConfig
from martlet.store.disk.files import Files
from martlet.testing.links import Caller, Conditions, MemoryLink
from martlet_remoting.handler import REQUESTS_A_TURN, RemotingHandler
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.packets import Command

from .conftest import Harness, OpenHarness, long_ext, pull_ext, send_ext

SEND, PULL = RequestCode.SEND_MESSAGE_V2, RequestCode.PULL_MESSAGE


class Client(RemotingClient):
    """One connection to the server."""

    def __init__(self, served: "Served", conditions: Conditions | None) -> None:
        self.link = MemoryLink(conditions)
        self.caller = Caller(self.link.near)
        super().__init__(self.caller.send, self.caller.receive)
        number = len(served.clients)
        served.clients.append(self)
        served.server.serve(served.protocol(), self.link.far, f"10.0.0.1:{number}", bytes((10, 0, 0, 1, 0, 0, 0, 1)))

    async def send_together(self, *requests: tuple[int, dict[str, object], bytes]) -> None:
        """Send requests that the server reads at once; they are numbered from 1."""
        await self.send_command(*(Command(*request, number) for number, request in enumerate(requests, 1)))
        self._opaque += len(requests)

    async def closed_after(self) -> float:
        """Wait until the server closes; return how long that took."""
        begin = trio.current_time()
        with contextlib.suppress(EOFError):
            while True:
                await self.receive()
        return trio.current_time() - begin


class Served:
    """A harness with a server around it."""

    def __init__(self, harness: Harness, config: ServerConfig) -> None:
        self.harness = harness
        self.server = Server(config, harness.store, Stats())
        self.clients: list[Client] = []

    def protocol(self) -> Protocol:
        harness = self.harness

        def handle(peer: Peer, connection: object) -> Handler:
            return RemotingHandler(harness.state, peer, cast(RemotingConnection, connection))

        def connect(now: float) -> RemotingConnection:
            config = harness.config
            return RemotingConnection(config.frame_bytes_max, config.idle_s, now, "remoting.frame_bytes_max")

        return Protocol("remoting", "127.0.0.1:0", connect, handle)

    def dial(self, conditions: Conditions | None = None) -> Client:
        return Client(self, conditions)

    def unsent(self) -> int:
        return cast(int, self.server.statistics()["unsent_bytes"])


async def serve(harness: Harness, config: ServerConfig | None = None) -> Served:
    served = Served(harness, config or ServerConfig())
    await harness.nursery.start(served.server.run, ())
    harness.nursery.start_soon(harness.state.timeouts.run)
    harness.topic("T")
    return served


async def test_a_silent_client_is_closed_and_one_that_waits_is_not(
    open_harness: OpenHarness, autojump_clock: MockClock
) -> None:
    served = await serve(await open_harness(store={"flush": "async"}, idle_s=20))
    mute, silent, waiting = served.dial(), served.dial(), served.dial()
    await silent.ask(RequestCode.GET_MIN_OFFSET, {"topic": "T", "queueId": "0"})
    number = await waiting.send(PULL, pull_ext("T", 0, sysFlag="6", suspendTimeoutMillis="50000"))
    for client in (mute, silent):
        assert await client.closed_after() <= 20.5
    begin = trio.current_time()
    answer = await waiting.receive()
    assert (answer.opaque, answer.code) == (number, ResponseCode.PULL_NOT_FOUND)
    assert trio.current_time() - begin > 25
    assert await waiting.closed_after() <= 20.5


class RequestsATurn(trio.abc.Instrument):
    """How many requests were handled, in all and at most between two switches of tasks."""

    def __init__(self, harness: Harness) -> None:
        self._counters = harness.state.counters
        self._before = self._counters.requests
        self.all = self.most = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        handled = self._counters.requests - self._before
        self._before += handled
        self.all += handled
        self.most = max(self.most, handled)


async def test_a_read_of_very_many_sends_is_handled_over_many_turns(
    open_harness: OpenHarness, autojump_clock: MockClock
) -> None:
    harness = await open_harness(store={"flush": "async"})
    served, count = await serve(harness), 5 * REQUESTS_A_TURN
    client = served.dial(Conditions(capacity_bytes=1 << 22))
    turns = RequestsATurn(harness)
    trio.lowlevel.add_instrument(turns)
    sends = [(SEND, send_ext("T", 0, f"UNIQ_KEY\x01{number:032X}\x02"), b"x") for number in range(count)]
    await client.send_together(*sends)
    assert [(await client.receive()).opaque for _ in range(count)] == list(range(1, count + 1))
    trio.lowlevel.remove_instrument(turns)
    assert turns.all == count
    assert turns.most == REQUESTS_A_TURN


async def test_a_broken_connection_makes_its_group_rebalance(harness: Harness, autojump_clock: MockClock) -> None:
    served = await serve(harness)
    first, second = served.dial(), served.dial()
    for client, name in ((first, "c1"), (second, "c2")):
        body = orjson.dumps({"clientID": name, "consumerDataSet": [{"groupName": "G"}]})
        assert (await client.ask(RequestCode.HEART_BEAT, {}, body)).code == 0
    # One notice for its own coming was passed over by ask, the next is for c2's, the last for its end.
    assert (await first.receive()).code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    second.link.cut()
    assert (await first.receive()).code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    answer = await first.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
    assert orjson.loads(answer.body) == {"consumerIdList": ["c1"]}


@pytest.mark.parametrize("code", [SEND, PULL, RequestCode.GET_MIN_OFFSET])
async def test_fields_that_cannot_be_read_end_their_connection_alone(
    harness: Harness, autojump_clock: MockClock, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(harness)
    hostile, other = served.dial(), served.dial()
    header = b'{"code":%d,"extFields":{"b":"\xff","topic":"\xff"},"opaque":1}' % code
    await hostile.caller.send(struct.pack(">ii", 4 + len(header), len(header)) + header)
    assert await hostile.closed_after() == 0
    assert [r.exc_info for r in caplog.records] == [None]
    assert "extFields is not JSON" in caplog.text
    assert (await other.ask(SEND, send_ext("T"), b"body")).code == 0


async def test_bytes_cut_anywhere_and_late_come_to_the_same(harness: Harness, autojump_clock: MockClock) -> None:
    served = await serve(harness)
    rough = served.dial(Conditions(capacity_bytes=700, latency_s=0.01, jitter_s=0.05, chance=random.Random(3)))
    for number in range(20):
        answer = await rough.ask(SEND, send_ext("T", 0, f"UNIQ_KEY\x01K{number}\x02"), b"%d" % number * 100)
        assert (answer.code, answer.ext["queueOffset"]) == (0, str(number))
    found = await rough.ask(PULL, pull_ext("T", 0))
    assert [record.property("UNIQ_KEY") for record in decode_records(found.body)] == [f"K{n}" for n in range(20)]


async def test_a_consumer_that_never_reads_holds_little_and_harms_nobody(
    harness: Harness, autojump_clock: MockClock
) -> None:
    limit = 200_000
    served = await serve(harness, ServerConfig(unsent_bytes_max=limit))
    sender = served.dial()
    for _ in range(40):
        assert (await sender.ask(SEND, send_ext("T"), bytes(10_000))).code == 0
    stuck = served.dial()
    with trio.move_on_after(5):
        for _ in range(2000):
            await stuck.send(PULL, pull_ext("T", 0))
            await stuck.send(PULL, pull_ext("T", 40, sysFlag="6"))
    await trio.testing.wait_all_tasks_blocked()
    # What is over when it is first seen is one answer.
    assert limit < served.unsent() < limit + harness.config.pull_bytes_max + 100_000
    for _ in range(50):
        assert (await sender.ask(SEND, send_ext("T"), b"x")).code == 0
    other = served.dial()
    assert (await other.ask(PULL, pull_ext("T", 0))).code == 0
    assert served.unsent() < 2 * limit + harness.config.pull_bytes_max + 100_000
    stuck.link.cut()
    await trio.testing.wait_all_tasks_blocked()
    assert (await other.ask(PULL, pull_ext("T", 0))).code == 0
    assert (served.unsent(), len(harness.state.parked)) == (0, 0)


# In real time: virtual time would pass by while a thread waits for the disk.
@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_every_waiting_consumer_gets_every_message_once_and_in_order(
    open_harness: OpenHarness, flush: str
) -> None:
    harness = await open_harness(store={"flush": flush})
    served = await serve(harness)
    count = 60

    async def consume(client: Client, found: list[int]) -> None:
        while len(found) < count:
            answer = await client.ask(PULL, pull_ext("T", len(found), sysFlag="6"))
            found += [int(record.body) for record in decode_records(answer.body)]

    consumed: list[list[int]] = [[] for _ in range(5)]
    async with trio.open_nursery() as nursery:
        for found in consumed:
            nursery.start_soon(consume, served.dial(), found)
        sender = served.dial()
        for number in range(count):
            if number % 7:
                await sender.send(SEND, send_ext("T"), b"%d" % number)
            else:
                await sender.ask(SEND, send_ext("T"), b"%d" % number)
    assert consumed == [list(range(count))] * 5


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_sends_that_meet_a_full_disk_first_are_refused(
    open_harness: OpenHarness, monkeypatch: pytest.MonkeyPatch, flush: str
) -> None:
    harness = await open_harness(store={"flush": flush})
    served = await serve(harness)
    client = served.dial()
    assert (await client.ask(SEND, send_ext("T", 0), b"before")).code == 0
    write = Files.write

    def full(files: Files, path: str, data: bytes, at: int) -> None:
        if "/commitlog/" in path:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write(files, path, data, at)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "write", full)
        place: dict[str, object] = {"topic": "T", "queueId": "0"}
        begins, ends = (RequestCode.GET_MIN_OFFSET, place, b""), (RequestCode.GET_MAX_OFFSET, place, b"")
        usual = (SEND, send_ext("T", 0, "UNIQ_KEY\x01U1\x02"), b"x")
        other = (RequestCode.SEND_MESSAGE, long_ext("T", queueId="0"), b"x")
        await client.send_together(usual, begins, other, begins, ends)
        answers = {answer.opaque: answer for answer in [await client.receive() for _ in range(5)]}
        refused = ResponseCode.SERVICE_NOT_AVAILABLE
        # The end would be that of messages which are not stored.
        assert [answers[number].code for number in range(1, 6)] == [refused, 0, refused, 0, refused]
        assert "is full" in str(answers[1].remark)
        assert answers[1].ext["MSG_REGION"] == answers[3].ext["MSG_REGION"] == "DefaultRegion"
        assert [answers[number].ext["offset"] for number in (2, 4)] == ["0", "0"]
        assert (await client.ask(*ends)).ext["offset"] == "1"
        again = await client.ask(*usual)
        assert (again.code, again.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, answers[1].remark)
    harness.store.admission.refusal = ""
    stored = await client.ask(*usual)
    assert (stored.code, stored.ext["queueOffset"]) == (0, "1")
