"""Browsers look at a queue and leave it as it is; an exclusive consumer has a queue alone."""

from pathlib import Path

import pytest
from tests.stomp.test_selectors import selecting
from tests.wire_clients.stomp import StompClient, stomp_broker
from trio.testing import wait_all_tasks_blocked

from martlet.message import Message
from martlet_stomp.wire.packets import Version

QUEUE = "/queue/orders"
BODIES = [b"%d" % number for number in range(6)]


async def browse(talk: StompClient, destination: str = QUEUE, **headers: str) -> list[bytes]:
    """Return the bodies of what a browser is shown."""
    await talk.subscribe(destination, name="look", browser="true", **headers)
    found: list[bytes] = []
    while True:
        (message,) = await talk.messages(1)
        assert message["subscription"] == "look"
        assert message["destination"] == destination
        if message.headers.get("browser") == "end":
            assert message.body == b""
            return found
        found.append(message.body)


@pytest.mark.parametrize("version", Version)
async def test_a_browser_sees_all_messages_and_takes_none(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.publish(QUEUE, *BODIES)
        assert await browse(talk) == BODIES
        await talk.publish(QUEUE, b"later")
        assert await talk.rest() == []
        await talk.unsubscribe("look")
        await talk.subscribe(QUEUE)
        assert await talk.bodies(7) == [*BODIES, b"later"]


async def test_an_empty_queue_ends_at_once(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        assert await browse(talk) == []


async def test_what_is_settled_is_not_shown_and_what_is_held_is(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.topics.ensure("orders", 2)
        for number in range(6):
            await stomp.publish("orders", b"%d" % number, queue_id=number % 2)
        consumer, talk = await stomp.connect(), await stomp.connect()
        await consumer.subscribe(QUEUE, "client-individual", prefetch_count="5")
        messages = await consumer.messages(5)
        settled = messages[:1] + messages[2:4]
        await consumer.ack(*settled)
        shown = await browse(talk, ack="client")
        assert sorted(shown) == sorted({*BODIES} - {message.body for message in settled})


async def test_a_browser_reads_what_is_no_longer_in_memory(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish(QUEUE, *[b"x" * 1000] * 3000)
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        assert len(await browse(talk)) == 3000


async def test_what_comes_after_a_slow_browser_began_is_not_shown(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.topics.ensure("orders", 2)
        for number in range(3000):
            stomp.broker.publish(Message("orders", b"%04d" % number + b"x" * 1000, queue_id=number % 2))
        await stomp.settle()
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, name="look", browser="true")
        await wait_all_tasks_blocked()  # now the client reads nothing
        for queue_id in (0, 1):
            await stomp.publish("orders", b"later", queue_id=queue_id)
        messages = await talk.messages(3001)
        assert messages.pop()["browser"] == "end"
        assert sorted(message.body[:4] for message in messages) == [b"%04d" % number for number in range(3000)]
        assert await talk.rest() == []


async def test_a_browser_may_have_a_selector(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        for colour in ("red", "blue", "red"):
            await talk.publish(QUEUE, colour.encode(), colour=colour)
        assert await browse(talk, selector="colour = 'red'") == [b"red", b"red"]


async def test_a_topic_cannot_be_browsed(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination="/topic/a", browser="true"))
        assert "cannot be browsed" in (await talk.error())["message"]


@pytest.mark.parametrize("header", ["activemq.exclusive", "exclusive"])
async def test_an_exclusive_consumer_gets_everything_until_it_goes(tmp_path: Path, header: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        plain, first, second = [await stomp.connect() for _ in range(3)]
        await plain.subscribe(QUEUE)
        for talk in (first, second):
            await talk.subscribe(QUEUE, **{header: "true"})
        await plain.publish(QUEUE, *BODIES[:2])
        assert await first.bodies(2) == BODIES[:2]
        await first.disconnect()
        await plain.publish(QUEUE, *BODIES[2:4])
        assert await second.bodies(2) == BODIES[2:4]
        await second.disconnect()
        await plain.publish(QUEUE, *BODIES[4:])
        assert await plain.bodies(2) == BODIES[4:]
