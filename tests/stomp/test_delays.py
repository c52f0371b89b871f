"""Headers that delay a message: it comes when it is due, if timers are on, and is an error otherwise."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.stomp.all_protocols import Protocols, all_protocols, properties_of, timer_plugin
from tests.wire_clients.stomp import StompClient
from trio.testing import MockClock

from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import small_config

QUEUE, NAMED = "/queue/orders", "/topic/mqtt/home/door"
DELAYS = [
    ("AMQ_SCHEDULED_DELAY", 12_000),
    ("x-delay", 12_000),
    ("TIMER_DELAY_SEC", 12),
    ("TIMER_DELAY_MS", 12_000),
    ("TIMER_DELIVER_MS", START_MS + 12_000),
    ("DELAY", 3),  # the third level, 10 s
]
USUAL = {"subscription", "message-id", "destination", "content-length", "timestamp"}

each_delay = pytest.mark.parametrize(("header", "value"), DELAYS)


@asynccontextmanager
async def delaying() -> AsyncIterator[Protocols]:
    store = small_config(segment_bytes=1 << 16, page_bytes=1 << 13, cache_bytes=1 << 16)
    async with all_protocols(
        Path("/data"), timer=timer_plugin(), store=store, clock=TrioClock(), disk=FakeDisk()
    ) as protocols:
        yield protocols


def keyword(header: str) -> str:
    """Return *header* as `tests.wire_clients.stomp.frame` takes it."""
    return header.replace("-", "_") if header.islower() else header


async def publish(talk: StompClient, destination: str, header: str, value: int, **more: str) -> None:
    await talk.publish(destination, b"later", **{keyword(header): str(value)}, **more)


@each_delay
@pytest.mark.parametrize("destination", [QUEUE, "/topic/orders", NAMED])
async def test_a_message_comes_when_it_is_due(
    autojump_clock: MockClock, destination: str, header: str, value: int
) -> None:
    async with delaying() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(destination)
        await publish(talk, destination, header, value, colour="red")
        await talk.publish(destination, b"now")
        assert await talk.bodies(1) == [b"now"]
        await trio.sleep(9.9)
        assert await talk.rest() == []
        await trio.sleep(5)
        (later,) = await talk.rest()
        assert (later.body, later["destination"], later["colour"]) == (b"later", destination, "red")
        assert later.headers.keys() - USUAL == {"colour"}
        await trio.sleep(30)
        assert await talk.rest() == []


@each_delay
async def test_without_timers_the_error_says_what_to_do(tmp_path: Path, header: str, value: int) -> None:
    async with all_protocols(tmp_path) as protocols:
        for transaction in ({}, {"transaction": "t"}):
            talk = await protocols.stomp.connect()
            await talk.send(
                talk.frame("BEGIN", transaction="t"),
                talk.frame(
                    "SEND", b"x", destination=QUEUE, receipt="r", **{keyword(header): str(value)}, **transaction
                ),
            )
            error = await talk.error()
            assert error["receipt-id"] == "r"
            assert b"add timer to plugins.enabled" in error.body
        assert protocols.stomp.records("orders") == []


@pytest.mark.parametrize("header", ["AMQ_SCHEDULED_DELAY", "x_delay"])
async def test_a_delay_of_nothing_needs_no_timers(tmp_path: Path, header: str) -> None:
    async with all_protocols(tmp_path) as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        await talk.publish(QUEUE, b"now", **{header: "0"})
        (message,) = await talk.messages(1)
        assert message.headers.keys() == USUAL


async def test_a_time_to_live_begins_when_the_message_is_due(autojump_clock: MockClock) -> None:
    async with delaying() as protocols:
        talk = await protocols.stomp.connect()
        await talk.publish(QUEUE, b"1", AMQ_SCHEDULED_DELAY="12000", expiration="5000")
        await talk.publish(QUEUE, b"2", AMQ_SCHEDULED_DELAY="12000", expires=str(START_MS + 5000))
        await trio.sleep(14)
        await talk.subscribe(QUEUE)
        assert [message.body for message in await talk.rest()] == [b"1"]


async def test_a_delayed_request_is_answered(autojump_clock: MockClock) -> None:
    async with delaying() as protocols:
        asker, replier = await protocols.stomp.connect(), await protocols.stomp.connect()
        await replier.subscribe(QUEUE)
        await asker.publish(QUEUE, b"what?", x_delay="12000", reply_to="/temp-queue/mine", correlation_id="1")
        assert await replier.rest() == []
        await trio.sleep(15)
        (request,) = await replier.rest()
        await replier.publish(request["reply-to"], b"that", correlation_id="1", x_delay="3000")
        assert await asker.rest() == []
        await trio.sleep(5)
        (message,) = await asker.rest()
        assert (message.body, message["destination"], message["correlation-id"]) == (b"that", "/temp-queue/mine", "1")


@pytest.mark.parametrize("end", ["COMMIT", "ABORT"])
async def test_a_delayed_message_of_a_transaction_waits_from_its_end(autojump_clock: MockClock, end: str) -> None:
    async with delaying() as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe(QUEUE)
        await talk.send(
            talk.frame("BEGIN", transaction="t"),
            talk.frame("SEND", b"x", destination=QUEUE, transaction="t", AMQ_SCHEDULED_DELAY="12000"),
            talk.frame(end, transaction="t", receipt="end"),
        )
        await talk.receipt("end")
        await trio.sleep(9.9)
        assert await talk.rest() == []
        await trio.sleep(5)
        assert [message.body for message in await talk.rest()] == ([b"x"] if end == "COMMIT" else [])


async def test_mqtt_clients_get_a_delayed_message_when_it_is_due(autojump_clock: MockClock) -> None:
    async with delaying() as protocols:
        talk, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await mqtt.subscribe("#", qos=1)
        await talk.publish(NAMED, b"later", x_delay="12000", colour="red")
        await trio.sleep(9.9)
        await protocols.stomp.idle()
        assert await mqtt.rest() == []
        (message,) = await mqtt.messages(1)
        assert (message.topic, message.payload) == ("home/door", b"later")
        assert ("colour", "red") in message.properties.user
        (record,) = protocols.stomp.records("mqtt")
        assert properties_of(record)["TAGS"] == "home/door"
