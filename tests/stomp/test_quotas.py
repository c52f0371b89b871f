"""Quotas of STOMP clients: slowed, or refused with ERROR; none of their messages is lost."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from tests.limits import Progress, give, used
from tests.wire_clients.stomp import Frame, StompBroker, StompClient, stomp_broker
from trio.testing import MockClock

from martlet.contracts import Quota

BODY = b"x" * 1000


@pytest.fixture
async def stomp(tmp_path: Path) -> AsyncIterator[StompBroker]:
    async with stomp_broker(tmp_path) as found:
        yield found


def sends(talk: StompClient, count: int, body: bytes = BODY, destination: str = "/queue/a", first: int = 0) -> bytes:
    frames = [
        talk.frame("SEND", b"%d " % number + body, destination=destination, receipt=f"{number}")
        for number in range(first, first + count)
    ]
    return b"".join(frames)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def words(frames: list[Frame]) -> list[bytes]:
    return [each.body.split(b" ")[0] for each in frames]


async def send_80(talk: StompClient, progress: Progress, each: int) -> None:
    """Send 80 messages at once; each makes *progress* when it is acknowledged."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk.send, sends(talk, 80))
        for number in range(80):
            await talk.receipt(str(number))
            progress.came(each)


async def test_a_sender_is_slowed_down_to_its_messages_a_second(stomp: StompBroker, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(messages_in=10))
    talk = await stomp.connect()
    progress = Progress(10, step=8)
    await send_80(talk, progress, 1)
    progress.check_end()
    await stomp.settle()
    assert len(stomp.records("a")) == 80
    assert used(stomp.broker)[1] == 0


async def test_a_sender_is_slowed_down_to_its_bytes_a_second(stomp: StompBroker, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(bytes_in=10_000))
    talk = await stomp.connect()
    progress = Progress(10_000, step=8000)
    await send_80(talk, progress, len(BODY))
    assert 5.5 < progress.seconds < 9


@pytest.mark.parametrize("count", [1, 11])
@pytest.mark.parametrize("destination", ["/queue/a", "/queue/a,/queue/b"])
async def test_a_message_above_the_rate_is_refused_with_error(
    stomp: StompBroker, count: int, destination: str, autojump_clock: MockClock
) -> None:
    """What came before it is stored and acknowledged."""
    is_list = "," in destination
    give(stomp.broker, Quota(messages_in=20 if is_list else 10, refuses=True))
    talk = await stomp.connect()
    for first in range(0, 11, count):
        await talk.send(sends(talk, count, b"", destination, first))
    for number in range(10):
        await talk.receipt(str(number))
    error = await talk.error()
    assert "a second, and that is used up; try again later" in error["message"] + error.body.decode()
    assert error["receipt-id"] == "10"
    await stomp.settle()
    assert len(stomp.records("a")) == 10
    assert used(stomp.broker) == (0, 1)
    talk = await stomp.connect()
    await talk.send(sends(talk, 1, b"", first=10))
    await talk.error()  # a new connection does not help
    await trio.sleep(0.2)
    talk = await stomp.connect()
    await talk.publish("/queue/a", b"10")


async def test_a_transaction_is_stored_whole_or_refused_whole(stomp: StompBroker, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(messages_in=10, refuses=True))
    for attempt in range(2):
        talk = await stomp.connect()
        await talk.send(talk.frame("BEGIN", transaction="t"))
        await talk.send(*[talk.frame("SEND", b"x", destination="/queue/a", transaction="t") for _ in range(15)])
        await talk.send(talk.frame("COMMIT", transaction="t", receipt="done"))
        if attempt:
            assert (await talk.error())["receipt-id"] == "done"
        else:
            await talk.receipt("done")
            await talk.disconnect()
    await stomp.settle()
    assert len(stomp.records("a")) == 15


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize(
    ("source", "ack"),
    [
        ("/queue/a", "auto"),
        ("/queue/a", "client-individual"),
        ("/topic/a", "auto"),
        ("/topic/a", "client"),
        ("/topic/mqtt/a/#", "auto"),
    ],
)
async def test_a_consumer_gets_its_messages_later(
    stomp: StompBroker, source: str, ack: str, refuses: bool, autojump_clock: MockClock
) -> None:
    give(stomp.broker, Quota(messages_out=10, refuses=refuses))
    talk, sender = await stomp.connect(), await stomp.connect()
    await talk.subscribe(source, ack)
    progress = Progress(10, step=3)
    await sender.send(sends(sender, 60, b"", source.replace("#", "x")))
    for number in range(60):
        await sender.receipt(str(number))
    assert progress.seconds < 0.5, "who sends is not slowed"
    got = []
    for _ in range(60):
        got += await talk.messages(1)
        progress.came()
        if ack != "auto":
            await talk.ack(got[-1])
    assert words(got) == numbers(60)
    progress.check_end()
    assert await talk.rest() == []
    assert used(stomp.broker)[1] == 0


@pytest.mark.parametrize("source", ["/queue/a", "/topic/a", "/topic/mqtt/a/#"])
async def test_bytes_to_a_consumer_are_limited(stomp: StompBroker, source: str, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(bytes_out=10_000))
    talk, sender = await stomp.connect(), await stomp.connect()
    await talk.subscribe(source)
    began = trio.current_time()
    await sender.send(sends(sender, 60, destination=source.replace("#", "x")))
    assert words(await talk.messages(60)) == numbers(60)
    assert 5 < trio.current_time() - began < 9


async def test_several_subscriptions_of_a_client_share_its_quota(stomp: StompBroker, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(messages_out=10))
    talk, sender = await stomp.connect(), await stomp.connect()
    for name in "abc":
        await talk.subscribe(f"/queue/{name}", name=name)
    progress = Progress(10, step=3)
    for name in "abc":
        await sender.send(sends(sender, 20, b"", f"/queue/{name}"))
    by_source: dict[str, list[bytes]] = {}
    for _ in range(60):
        (message,) = await talk.messages(1)
        progress.came()
        by_source.setdefault(message["subscription"], []).append(message.body.split(b" ")[0])
    assert by_source == dict.fromkeys("abc", numbers(20))
    progress.check_end()


async def test_messages_of_a_queue_go_to_another_consumer_meanwhile(
    stomp: StompBroker, autojump_clock: MockClock
) -> None:
    talk = await stomp.connect_as("ann")
    give(stomp.broker, ann=[Quota(messages_out=1)])
    await talk.disconnect()
    slow, other = await stomp.connect_as("ann"), await stomp.connect_as("bob")
    sender = await stomp.connect_as("bob")
    for each in slow, other:
        await each.subscribe("/queue/a")
    began, got = trio.current_time(), set[bytes]()

    async def take(talk: StompClient) -> None:
        while len(got) < 40:
            got.update(words(await talk.messages(1)))
        nursery.cancel_scope.cancel()

    await sender.send(sends(sender, 40, b""))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take, slow)
        nursery.start_soon(take, other)
    assert got == set(numbers(40))
    assert trio.current_time() - began < 10


# heart-beats


async def test_a_client_that_the_broker_does_not_read_misses_no_heart_beat(
    stomp: StompBroker, autojump_clock: MockClock
) -> None:
    give(stomp.broker, Quota(messages_in=1))
    talk = await stomp.connect(heart_beat="1000,1000")
    began = trio.current_time()
    await talk.send(*[talk.frame("SEND", destination="/queue/a") for _ in range(60)])
    beats = 0
    with trio.move_on_after(55):
        while True:
            data = await talk.wire.receive_some()
            assert not data.strip(b"\n"), data
            beats += len(data)
    assert 50 <= beats <= 60, "and the broker sends its own"
    error = await talk.error()
    assert "nothing was heard for 2 s" in error["message"]
    assert trio.current_time() - began == pytest.approx(60 + 2, abs=0.5), "then it counts from the end of the pause"


# counts


async def test_too_many_connections_are_refused_with_error(stomp: StompBroker, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(connections=2))
    first = await stomp.connect()
    await stomp.connect()
    talk, answer = await stomp.answer()
    assert answer.command == "ERROR"
    assert answer["message"] == "clients without a name: 2 connections are open, and the quota is 2"
    assert await talk.is_closed()
    await first.disconnect()
    await stomp.connect()
    assert len(stomp.context.clients) == 2


async def test_too_many_subscriptions_are_refused_with_error(stomp: StompBroker, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(subscriptions=3))
    talk, other = await stomp.connect(), await stomp.connect()
    await talk.subscribe("/topic/a", name="1")
    await talk.subscribe("/topic/b", name="2")
    await other.subscribe("/topic/c", name="1")
    await other.unsubscribe("1")
    await other.subscribe("/topic/c", name="2")
    await other.send(other.frame("SUBSCRIBE", id="3", destination="/topic/d", receipt="r"))
    error = await other.error()
    assert error["receipt-id"] == "r"
    assert "3 subscriptions are open and 1 requested, and the quota is 3" in error["message"]
    await talk.subscribe("/topic/d", name="3")


async def test_too_many_shared_groups_are_refused_with_error(stomp: StompBroker, autojump_clock: MockClock) -> None:
    give(stomp.broker, Quota(shared_groups=2))
    talk, other = await stomp.connect(), await stomp.connect()
    await talk.subscribe("/queue/a", name="1")
    await talk.subscribe("/queue/b", name="2")
    await other.subscribe("/queue/a", name="1")
    await other.subscribe("/topic/c", name="2")
    await other.send(other.frame("SUBSCRIBE", id="3", destination="/queue/c", receipt="r"))
    assert "2 shared groups are in use, and the quota is 2" in (await other.error())["message"]
    await talk.unsubscribe("2")
    await talk.subscribe("/queue/c", name="3")
