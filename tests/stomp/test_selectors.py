"""Selectors: a subscription gets the messages whose headers match."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.wire_clients.stomp import StompBroker, StompClient, stomp_broker

from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_stomp.mapping.selectors import select, translated

QUEUE, TOPIC = "/queue/cars", "/topic/cars"
# Half of them are more than can be parked, or kept for the consumer of a group that is full.
MANY = 4000


@asynccontextmanager
async def selecting(directory: Path) -> AsyncIterator[StompBroker]:
    async with stomp_broker(directory) as stomp:
        stomp.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(stomp.broker))
        yield stomp


async def publish(talk: StompClient, destination: str, *colours: str) -> None:
    for number, colour in enumerate(colours):
        await talk.publish(destination, colour.encode(), colour=colour, number=str(number))


async def test_a_topic_brings_what_matches(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(TOPIC, selector="colour = 'red'", name="red")
        await talk.subscribe(TOPIC, selector="number > 0 AND colour <> 'red'", name="later")
        await publish(talk, TOPIC, "red", "blue", "red", "green")
        came = sorted((message["subscription"], message.body) for message in await talk.rest())
        assert came == [("later", b"blue"), ("later", b"green"), ("red", b"red"), ("red", b"red")]


@pytest.mark.parametrize("ack", ["auto", "client", "client-individual"])
async def test_each_consumer_of_a_queue_has_its_own_selector(tmp_path: Path, ack: str) -> None:
    async with selecting(tmp_path) as stomp:
        red, others = await stomp.connect(), await stomp.connect()
        await red.subscribe(QUEUE, ack, selector="colour = 'red'")
        await others.subscribe(QUEUE, ack, selector="colour <> 'red'")
        await publish(red, QUEUE, "red", "blue", "red", "green", "blue")
        messages = await red.messages(2)
        assert [message.body for message in messages] == [b"red"] * 2
        assert await others.bodies(3) == [b"blue", b"green", b"blue"]
        if ack == "client":
            await red.ack(messages[1])


@pytest.mark.parametrize("end", ["UNSUBSCRIBE", "hang up"])
async def test_what_an_exclusive_consumer_does_not_select_goes_to_others_once_it_is_gone(
    tmp_path: Path, end: str
) -> None:
    async with selecting(tmp_path) as stomp:
        red, other = await stomp.connect(), await stomp.connect()
        await red.subscribe(QUEUE, "client", selector="colour = 'red'", exclusive="true")
        await other.subscribe(QUEUE)
        await publish(red, QUEUE, "blue", "red", "green")
        await red.messages(1)
        assert await other.rest() == []
        if end == "UNSUBSCRIBE":
            await red.unsubscribe()
        else:
            red.hang_up()
        assert sorted(message.body for message in await other.rest()) == [b"blue", b"green", b"red"]


async def test_messages_that_no_consumer_selects_wait_for_one_that_does(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        red = await stomp.connect()
        await red.subscribe(QUEUE, selector="colour = 'red'")
        await publish(red, QUEUE, "blue", "red", "green", "red")
        assert await red.bodies(2) == [b"red"] * 2
        await red.disconnect()
        green = await stomp.connect()
        await green.subscribe(QUEUE, "client", selector="colour = 'green'")
        (message,) = await green.messages(1)
        assert (message.body, message.headers.get("redelivered")) == (b"green", None)
        last = await stomp.connect()
        await last.subscribe(QUEUE, "client")
        assert await last.bodies(1) == [b"blue"]
        assert await last.rest() == []


async def test_a_slow_consumer_holds_up_no_other_one(tmp_path: Path) -> None:
    """What it selects is kept for it, many more messages than it may hold, and comes to it in order."""
    async with selecting(tmp_path) as stomp:
        slow, fast, sender = [await stomp.connect() for _ in range(3)]
        await slow.subscribe(QUEUE, "client-individual", selector="colour = 'red'", prefetch_count="1")
        await fast.subscribe(QUEUE, "client-individual", selector="colour = 'blue'")
        frames = [
            sender.frame("SEND", b"%d" % number * 50, destination=QUEUE, colour="red" if number % 2 else "blue")
            for number in range(MANY)
        ]
        await sender.send(*frames, sender.frame("SEND", b"end", destination=QUEUE, colour="blue", receipt="sent"))
        await sender.receipt("sent")
        for number in range(0, MANY, 2):
            (message,) = await fast.messages(1)
            assert message.body == b"%d" % number * 50
            await fast.send(fast.settling("ACK", message))
        assert await fast.bodies(1) == [b"end"]
        for number in range(1, MANY, 2):
            (message,) = await slow.messages(1)
            assert (message.body, slow.came) == (b"%d" % number * 50, [])
            await slow.send(slow.settling("ACK", message))
        assert await slow.rest() == []


async def test_a_durable_subscription_keeps_what_matches(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        more = {"selector": "colour = 'red'", "activemq.subscriptionName": "s"}
        talk = await stomp.connect(client_id="ann")
        await talk.subscribe(TOPIC, **more)
        await talk.disconnect()
        talk = await stomp.connect(client_id="ann")
        await publish(talk, TOPIC, "blue", "red")
        await talk.subscribe(TOPIC, **more)
        assert [message.body for message in await talk.rest()] == [b"red"]


async def test_a_durable_subscription_with_another_selector_continues_where_it_was(tmp_path: Path) -> None:
    """What does not match when it is read is skipped for good, also what was sent and not acknowledged."""
    async with selecting(tmp_path) as stomp:

        async def come_back(**selector: str) -> tuple[StompClient, list[bytes]]:
            talk = await stomp.connect(client_id="ann")
            await talk.subscribe(TOPIC, "client-individual", **{"activemq.subscriptionName": "s", **selector})
            return talk, [message.body for message in await talk.rest()]

        sender = await stomp.connect()
        talk, _ = await come_back(selector="colour = 'red'")
        await publish(sender, TOPIC, "blue", "red")
        assert await talk.bodies(1) == [b"red"]
        await talk.disconnect()
        await publish(sender, TOPIC, "red", "blue")
        talk, bodies = await come_back(selector="colour = 'blue'")
        assert bodies == [b"blue"]
        await talk.disconnect()
        talk, bodies = await come_back()
        assert bodies == [b"blue"]


@pytest.mark.parametrize("destination", [QUEUE, TOPIC])
async def test_a_selector_that_cannot_be_compiled_is_an_error(tmp_path: Path, destination: str) -> None:
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        headers = {"id": "0", "destination": destination, "receipt": "r"}
        await talk.send(talk.frame("SUBSCRIBE", selector="colour =", **headers))
        error = await talk.error()
        assert (error["receipt-id"], "expected a value" in error.body.decode()) == ("r", True)


async def test_without_a_plugin_for_the_language_it_is_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination=QUEUE, selector="colour = 'red'"))
        assert "'SQL92' is not installed" in (await talk.error())["message"]


async def test_an_empty_selector_selects_everything(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, selector=" ")
        await talk.publish(QUEUE, b"x")
        assert await talk.bodies(1) == [b"x"]


async def test_headers_are_selected_by_their_own_names_and_those_of_jms(tmp_path: Path) -> None:
    selectors = (
        "\"content-type\" = 'text/plain'",
        "JMSType = 'order' AND JMSPriority > 3",
        "JMSCorrelationID = 'c'",
        "\"reply-to\" = '/queue/b'",
    )
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        for number, selector in enumerate(selectors):
            await talk.subscribe(TOPIC, selector=selector, name=str(number))
        headers = {"content_type": "text/plain", "type": "order", "priority": "4", "correlation_id": "c"}
        await talk.publish(TOPIC, b"x", reply_to="/queue/b", **headers)
        await talk.publish(TOPIC, b"y", priority="4")
        came = sorted((message["subscription"], message.body) for message in await talk.rest())
        assert came == [(str(number), b"x") for number in range(4)]


def test_only_names_are_translated() -> None:
    text = """JMSType = 'JMSType' AND "JMSType" = '''JMSType' OR xJMSType = JMSTypes"""
    assert translated(text) == """type = 'JMSType' AND type = '''JMSType' OR xJMSType = JMSTypes"""
    assert translated('"content-type" LIKE \'a%\' OR "own name" = 1') == "CONTENT_TYPE LIKE 'a%' OR \"own name\" = 1"


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ("JMSPriority >= 7", [b"high"]),
        ("JMSPriority = 4", [b"low", b"plain"]),
        ("priority IS NULL", [b"low", b"plain"]),
        ("JMSDeliveryMode = 'PERSISTENT'", [b"high"]),
        ("JMSDeliveryMode = 'NON_PERSISTENT'", [b"low", b"plain"]),
        ("JMSExpiration > 0", [b"low"]),
        ("JMSExpiration = 0", [b"high", b"plain"]),
        ("JMSTimestamp > 1000 AND JMSTimestamp < 2000", [b"low"]),
        ('"timestamp" > 2000', [b"high", b"plain"]),
        ("JMSMessageID = 'cars-0-1'", [b"low"]),
        ("\"message-id\" = 'cars-0-2'", [b"plain"]),
        ('NOT "JMSPriority" = 4', [b"high"]),
        ("JMSPriority = 4 AND JMSType IN ('a', 'b') OR colour = 'none'", [b"low"]),
    ],
)
@pytest.mark.parametrize("destination", [QUEUE, TOPIC])
async def test_what_a_message_has_without_a_header_is_selected(
    tmp_path: Path, destination: str, selector: str, wanted: list[bytes]
) -> None:
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(destination, selector=selector)
        await talk.publish(destination, b"high", priority="7", persistent="true")
        await talk.publish(destination, b"low", expires="4000000000000", timestamp="1500", type="a")
        await talk.publish(destination, b"plain")
        assert [message.body for message in await talk.rest()] == wanted


async def test_equal_selectors_of_other_protocols_keep_their_meaning(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        stored = stomp.broker.selection("SQL92", "JMSPriority = 4")
        assert select(stomp.broker, "JMSPriority = 4").name != stored.name
        assert select(stomp.broker, "colour = 4") is stomp.broker.selection("SQL92", "colour = 4")


@pytest.mark.parametrize("name", ["JMSRedelivered", "JMSXDeliveryCount", "JMSDestination", '"redelivered"'])
async def test_what_no_message_has_when_it_is_selected_is_an_error(tmp_path: Path, name: str) -> None:
    async with selecting(tmp_path) as stomp:
        talk = await stomp.connect()
        headers = {"id": "0", "destination": TOPIC, "receipt": "r"}
        await talk.send(talk.frame("SUBSCRIBE", selector=f"{name} = 'x'", **headers))
        error = await talk.error()
        assert f"selector asks for {name.strip(chr(34))}" in error["message"]
        assert error["receipt-id"] == "r"
