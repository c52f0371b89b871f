"""Quotas of remoting clients: slowed, or refused with code 2 and the reason; none of their messages is lost."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from struct import pack

import orjson
import pytest
import trio
from tests.limits import Progress, give, used
from tests.stored import records_of
from tests.wire_clients.remoting import RemotingClient, remoting_of
from trio.testing import MockClock

from martlet.access import Quotas
from martlet.broker import Broker
from martlet.contracts import Identity, Protocol, Quota
from martlet.message import Message, encode_properties
from martlet.records.codec import decode_records
from martlet.store import StoreConfig
from martlet.testing.peers import Serving, serving
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import long_ext, pull_ext, send_ext
from .pop_talk import waiting_ext
from .signing import sign, tell

BODY = bytes(1000)
BUSY = ResponseCode.SYSTEM_BUSY


class Room:
    """A broker with a remoting port, and a topic with one queue."""

    def __init__(self, running: Serving, port: Protocol) -> None:
        self.running = running
        self.broker: Broker = running.broker
        self.port = port

    def client(self) -> RemotingClient:
        return RemotingClient.of(self.running, self.port)

    async def store(self, count: int, body: bytes = b"") -> None:
        """Store numbered messages as the broker itself."""
        for number in range(count):
            self.broker.publish(Message("T", b"%d " % number + body))
        self.broker.store.committer.commit()
        await self.broker.store.flusher.wait_flushed(self.broker.store.appended)


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    ports: list[Protocol] = []

    def make_ports(broker: Broker) -> list[Protocol]:
        ports.append(remoting_of(broker))
        return ports

    async with serving(tmp_path, store=StoreConfig(flush="async"), ports=make_ports) as running:
        running.broker.topics.ensure("T", 1)
        yield Room(running, ports[0])


def usual(number: int, body: bytes = BODY) -> Command:
    """A send that may be in a run."""
    ext = send_ext("T", 0, encode_properties({"UNIQ_KEY": f"{number:032d}"}).decode())
    return Command(RequestCode.SEND_MESSAGE_V2, ext, b"%d " % number + body, number)


def unusual(number: int, body: bytes = BODY) -> Command:
    """A send that is handled by itself."""
    return Command(RequestCode.SEND_MESSAGE, long_ext("T", queueId="0"), b"%d " % number + body, number)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def words(data: bytes) -> list[bytes]:
    return [record.body.split(b" ")[0] for record in decode_records(data)]


def stored(room: Room) -> list[bytes]:
    return [record.body.split(b" ")[0] for record in records_of(room.broker.store, "T")]


def signed(user: str, ext: Mapping[str, object], body: bytes = b"") -> dict[str, object]:
    return sign(user, ext, body)


# producers


@pytest.mark.parametrize("make", [usual, unusual])
async def test_a_producer_is_slowed_down_to_its_messages_a_second(
    room: Room, make: type[Command], autojump_clock: MockClock
) -> None:
    give(room.broker, Quota(messages_in=10))
    client = room.client()
    progress = Progress(10, step=50)  # the first read brings more than a later one
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send_command, *[make(number) for number in range(80)])
        for _ in range(80):
            assert (await client.receive()).code == 0
            progress.came()
    progress.check_end()
    assert stored(room) == numbers(80)
    assert used(room.broker)[1] == 0


async def test_a_producer_is_slowed_down_to_its_bytes_a_second(room: Room, autojump_clock: MockClock) -> None:
    give(room.broker, Quota(bytes_in=10_000))
    client = room.client()
    progress = Progress(10_000, step=50_000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.send_command, *map(usual, range(80)))
        for _ in range(80):
            assert (await client.receive()).code == 0
            progress.came(1000)
    assert 5.5 < progress.seconds < 10


@pytest.mark.parametrize("make", [usual, unusual])
@pytest.mark.parametrize("count", [1, 14])
async def test_a_send_above_the_rate_is_refused_with_its_reason(
    room: Room, make: type[Command], count: int, autojump_clock: MockClock
) -> None:
    give(room.broker, Quota(messages_in=10, refuses=True))
    client = room.client()
    answers = []
    for first in range(0, 14, count):
        await client.send_command(*[make(number, b"") for number in range(first, first + count)])  # type: ignore[arg-type]
        answers += [await client.receive() for _ in range(count)]
    assert [answer.code for answer in answers] == [0] * 10 + [BUSY] * 4
    text = "clients without a name: may send 10 messages a second, and that is used up; try again later"
    assert answers[-1].remark == text
    assert stored(room) == numbers(10)
    assert used(room.broker) == (0, 4)
    await trio.sleep(0.25)
    await client.send_command(*[make(number, b"") for number in range(3)])  # type: ignore[arg-type]
    assert [(await client.receive()).code for _ in range(3)] == [0, 0, BUSY]


async def test_a_batch_is_stored_whole_or_refused_whole(room: Room, autojump_clock: MockClock) -> None:
    give(room.broker, Quota(messages_in=10, refuses=True))
    client = room.client()
    batch = b"".join(pack(">iiiii", 23, 0, 0, 0, 1) + b"x\0\0" for _ in range(15))
    for code in (0, BUSY):
        answer = await client.ask(RequestCode.SEND_BATCH_MESSAGE, send_ext("T", m="true"), batch)
        assert answer.code == code, answer
    assert len(stored(room)) == 15


# consumers


async def pulled(client: RemotingClient, count: int, progress: Progress, flags: str = "4") -> list[bytes]:
    got: list[bytes] = []
    while len(got) < count:
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", len(got), sysFlag=flags))
        if answer.code == 0:
            got += words(answer.body)
            progress.came(len(got) - progress.count)
    return got


@pytest.mark.parametrize("flags", ["4", "6"])
async def test_pulls_are_answered_later(room: Room, flags: str, autojump_clock: MockClock) -> None:
    """Those that may be held, and those that may not."""
    await room.store(60)
    give(room.broker, Quota(messages_out=10))
    progress = Progress(10, step=3)
    assert await pulled(room.client(), 60, progress, flags) == numbers(60)
    progress.check_end()


async def test_bytes_of_pulls_are_limited(room: Room, autojump_clock: MockClock) -> None:
    await room.store(60, BODY)
    give(room.broker, Quota(bytes_out=10_000))
    began = trio.current_time()
    assert await pulled(room.client(), 60, Progress(1e9)) == numbers(60)
    assert 5 < trio.current_time() - began < 9


async def test_other_requests_are_answered_while_a_pull_waits(room: Room, autojump_clock: MockClock) -> None:
    await room.store(60)
    give(room.broker, Quota(messages_out=1))
    client = room.client()
    began = trio.current_time()
    assert (await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0))).code == 0
    await client.send(RequestCode.PULL_MESSAGE, pull_ext("T", 1))
    assert (await client.ask(RequestCode.SEND_MESSAGE_V2, usual(1).ext, b"x")).code == 0
    assert trio.current_time() - began < 0.1
    assert words((await client.receive()).body) == [b"1"]
    assert trio.current_time() - began == pytest.approx(1, abs=0.1)


async def test_a_held_pull_waits_for_its_turn_when_a_message_comes(room: Room, autojump_clock: MockClock) -> None:
    await room.store(30)
    give(room.broker, Quota(messages_out=10))
    client = room.client()
    began = trio.current_time()
    assert len(words((await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0))).body)) == 10
    await client.send(RequestCode.PULL_MESSAGE, pull_ext("T", 30, sysFlag="6"))
    await room.store(1)
    assert words((await client.receive()).body) == [b"0"]
    assert trio.current_time() - began == pytest.approx(0.1, abs=0.05)


async def test_pulls_of_two_clients_take_turns(room: Room, autojump_clock: MockClock) -> None:
    await room.store(400)
    give(room.broker, Quota(messages_out=20))
    got = [0, 0]

    async def pull(number: int) -> None:
        client = room.client()
        while True:
            answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", got[number], consumerGroup=f"G{number}"))
            got[number] += len(words(answer.body))

    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pull, 0)
            nursery.start_soon(pull, 1)
    assert sum(got) == pytest.approx(220, abs=12)
    assert abs(got[0] - got[1]) <= 25


async def test_a_pull_that_its_client_has_given_up_takes_nothing(room: Room, autojump_clock: MockClock) -> None:
    """Otherwise a client with many queues and a small quota would get only answers that it does not expect any more."""
    await room.store(10)
    give(room.broker, Quota(messages_out=1))
    client = room.client()
    began = trio.current_time()
    for number in range(10):
        await client.send(RequestCode.PULL_MESSAGE, pull_ext("T", number, sysFlag="6", suspendTimeoutMillis="1000"))
    answers = [await client.receive() for _ in range(10)]
    assert [answer.code for answer in answers[:6]] == [0] * 6
    assert {answer.code for answer in answers[8:]} == {ResponseCode.PULL_NOT_FOUND}
    assert trio.current_time() - began < 8


async def test_a_pull_above_the_rate_is_refused_with_its_reason(room: Room, autojump_clock: MockClock) -> None:
    await room.store(30)
    give(room.broker, Quota(messages_out=10, refuses=True))
    client = room.client()
    assert words((await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0))).body) == numbers(10)
    for flags in ("4", "6"):
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 10, sysFlag=flags))
        assert answer.code == BUSY
        text = "clients without a name: may receive 10 messages a second, and that is used up; try again later"
        assert answer.remark == text
    await trio.sleep(0.5)
    assert len(words((await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 10))).body)) == 5


async def test_pops_are_answered_later(room: Room, autojump_clock: MockClock) -> None:
    await room.store(60)
    give(room.broker, Quota(messages_out=10))
    await check_slow(partial(room.client().ask, RequestCode.POP_MESSAGE, waiting_ext("T")))


async def check_slow(receive: Callable[[], Awaitable[Command]]) -> None:
    """See that *receive* returns 60 messages, ten a second."""
    progress, got = Progress(10, step=3), list[bytes]()
    while len(got) < 60:
        got += words((await receive()).body)
        progress.came(len(got) - progress.count)
    assert got == numbers(60)
    progress.check_end()


async def test_a_pop_above_the_rate_is_refused_and_takes_nothing(room: Room, autojump_clock: MockClock) -> None:
    await room.store(20)
    give(room.broker, Quota(messages_out=10, refuses=True))
    client = room.client()
    assert words((await client.ask(RequestCode.POP_MESSAGE, waiting_ext("T"))).body) == numbers(10)
    for code in (RequestCode.POP_MESSAGE, RequestCode.PEEK_MESSAGE):
        answer = await client.ask(code, waiting_ext("T"))
        assert (answer.code, "may receive 10 messages" in (answer.remark or "")) == (BUSY, True)
    await trio.sleep(1)
    assert words((await client.ask(RequestCode.POP_MESSAGE, waiting_ext("T"))).body) == numbers(20)[10:]


async def test_another_client_pops_what_a_slowed_one_may_not_have(room: Room, autojump_clock: MockClock) -> None:
    room.broker.authentication.authenticators = (tell,)
    give(room.broker, ann=[Quota(messages_out=1)])
    await room.store(1)
    ann, bob = room.client(), room.client()
    answer = await ann.ask(RequestCode.POP_MESSAGE, signed("ann", waiting_ext("T")))
    assert words(answer.body) == [b"0"]
    await ann.send(RequestCode.POP_MESSAGE, signed("ann", waiting_ext("T")))
    await bob.send(RequestCode.POP_MESSAGE, signed("bob", waiting_ext("T")))
    began = trio.current_time()
    await trio.sleep(0.1)
    await room.store(1)
    assert words((await bob.receive()).body) == [b"0"]
    assert trio.current_time() - began < 0.6


async def test_frames_of_a_bulk_read_come_later(room: Room, autojump_clock: MockClock) -> None:
    await room.store(60)
    give(room.broker, Quota(messages_out=10))
    client = room.client()
    await client.send(RequestCode.BULK_READ, {"topic": "T", "queueId": 0, "offset": 0})
    await check_slow(client.receive)


async def test_a_bulk_read_above_the_rate_is_refused(room: Room, autojump_clock: MockClock) -> None:
    await room.store(60)
    give(room.broker, Quota(messages_out=10, refuses=True))
    client = room.client()
    await client.send(RequestCode.BULK_READ, {"topic": "T", "queueId": 0, "offset": 0})
    assert words((await client.receive()).body) == numbers(10)
    answer = await client.ask(RequestCode.BULK_READ, {"topic": "T", "queueId": 0, "offset": 0})
    assert (answer.code, "may receive 10 messages" in (answer.remark or "")) == (BUSY, True)
    assert words((await client.receive()).body) == [b"10", b"11"], "one that has begun goes on when it is due"


# who shares what


async def test_each_user_who_signs_on_a_connection_has_an_own_quota(room: Room, autojump_clock: MockClock) -> None:
    room.broker.authentication.authenticators = (tell,)
    give(room.broker, ann=[Quota(messages_in=5, refuses=True)], bob=[Quota(messages_in=7, refuses=True)])
    client = room.client()
    codes: dict[str, list[int]] = {"ann": [], "bob": []}
    for number in range(10):
        for user, found in codes.items():
            ext = signed(user, send_ext("T", 0, encode_properties({"UNIQ_KEY": f"{number:032d}"}).decode()), b"x")
            found.append((await client.ask(RequestCode.SEND_MESSAGE_V2, ext, b"x")).code)
    assert codes == {"ann": [0] * 5 + [BUSY] * 5, "bob": [0] * 7 + [BUSY] * 3}
    assert room.broker.quotas.statistics()["identities"] == 2


async def test_a_user_has_one_quota_on_all_connections(room: Room, autojump_clock: MockClock) -> None:
    room.broker.authentication.authenticators = (tell,)
    give(room.broker, ann=[Quota(messages_in=5, refuses=True)])
    codes = []
    for number in range(10):
        ext = signed("ann", send_ext("T", 0, encode_properties({"UNIQ_KEY": f"{number:032d}"}).decode()), b"x")
        codes.append((await room.client().ask(RequestCode.SEND_MESSAGE_V2, ext, b"x")).code)
    assert codes == [0] * 5 + [BUSY] * 5


# counts


@pytest.mark.parametrize("make", [usual, unusual])
async def test_each_request_of_too_many_connections_is_refused(
    room: Room, make: type[Command], autojump_clock: MockClock
) -> None:
    give(room.broker, Quota(connections=1))
    first, second = room.client(), room.client()
    assert (await first.ask(RequestCode.SEND_MESSAGE_V2, usual(1).ext, b"x")).code == 0
    await second.send_command(*[make(number, b"") for number in range(8)])  # type: ignore[arg-type]
    for number in range(8):
        answer = await second.receive()
        assert (answer.opaque, answer.code) == (number, BUSY)
        assert answer.remark == "clients without a name: 1 connections are open, and the quota is 1"
    assert len(stored(room)) == 1


async def test_a_connection_that_was_refused_may_go_on_when_another_has_ended(
    room: Room, autojump_clock: MockClock
) -> None:
    give(room.broker, Quota(connections=1))
    peer = room.running.connect(room.port)
    first, second = RemotingClient(peer.send, peer.receive_some), room.client()
    assert (await first.ask(RequestCode.SEND_MESSAGE_V2, usual(1).ext, b"x")).code == 0
    assert (await second.ask(RequestCode.SEND_MESSAGE_V2, usual(2).ext, b"x")).code == BUSY
    peer.close()
    await trio.sleep(1)
    assert (await second.ask(RequestCode.SEND_MESSAGE_V2, usual(2).ext, b"x")).code == 0


async def beat(client: RemotingClient, **topics: str) -> Command:
    """Send a heartbeat of the groups *topics*, with the topics of each."""
    consumers = [
        {"groupName": group, "subscriptionDataSet": [{"topic": topic} for topic in names]}
        for group, names in topics.items()
    ]
    return await client.ask(RequestCode.HEART_BEAT, {}, orjson.dumps({"clientID": "c", "consumerDataSet": consumers}))


async def test_a_heartbeat_with_too_many_topics_is_refused(room: Room, autojump_clock: MockClock) -> None:
    give(room.broker, Quota(subscriptions=4))
    first, second = room.client(), room.client()
    assert (await beat(first, G="TUV")).code == 0
    assert (await beat(first, G="TUV")).code == 0, "it is the same as before"
    answer = await beat(second, H="TU")
    assert (answer.code, answer.remark) == (
        BUSY,
        "clients without a name: 3 subscriptions are open and 2 requested, and the quota is 4",
    )
    assert (await beat(first, G="T")).code == 0
    assert (await beat(second, H="TU")).code == 0


async def test_a_heartbeat_with_too_many_groups_is_refused(room: Room, autojump_clock: MockClock) -> None:
    give(room.broker, Quota(shared_groups=2))
    first, second = room.client(), room.client()
    assert (await beat(first, G="T", H="T")).code == 0
    assert (await beat(second, G="T")).code == 0
    answer = await beat(second, G="T", K="T")
    assert (answer.code, answer.remark) == (
        BUSY,
        "clients without a name: 2 shared groups are in use, and the quota is 2",
    )
    assert (await beat(first, G="T")).code == 0
    assert (await beat(second, G="T", K="T")).code == 0


async def test_a_silent_client_that_the_broker_does_not_read_is_not_closed(
    room: Room, autojump_clock: MockClock
) -> None:
    """For longer than the 120 s that a client may be silent."""
    give(room.broker, Quota(messages_in=1))
    client = room.client()
    began = trio.current_time()
    await client.send_command(*[usual(number, b"") for number in range(10)])
    for _ in range(10):
        assert (await client.receive()).code == 0
    peer = next(iter(room.running.server._peers.values()))
    peer.pace().slow_reading(began + 500)
    await client.send_command(usual(10, b""), usual(11, b""))
    await trio.sleep(450)
    assert [(await client.receive()).code for _ in range(2)] == [0, 0]
    assert isinstance(room.broker.quotas, Quotas)
    assert room.broker.quotas.admit(Identity(), peer).applies
