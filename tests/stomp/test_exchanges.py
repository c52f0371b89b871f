"""RabbitMQ's exchanges are topics, and its /amq/queue/NAME is a queue that must be there."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_0, stomp_broker

from martlet_stomp.mapping.destinations import Kind, parse_destination
from martlet_stomp.wire.errors import StompError


@pytest.mark.parametrize(
    ("text", "topic", "shown"),
    [
        ("/exchange/amq.topic/orders.eu", "orders%2Eeu", "/topic/orders.eu"),
        ("/exchange/logs/info.x", "logs%2Finfo%2Ex", "/exchange/logs/info.x"),
        ("/exchange/logs", "logs", "/exchange/logs"),
        ("/exchange/amq.direct/key", "amq%2Edirect%2Fkey", "/exchange/amq.direct/key"),
        ("/exchange/amq.fanout", "amq%2Efanout", "/exchange/amq.fanout"),
        ("/exchange/amq.fanout/ignored", "amq%2Efanout", "/exchange/amq.fanout"),
    ],
)
async def test_the_topic_of_an_exchange(tmp_path: Path, text: str, topic: str, shown: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(text)
        await talk.publish(text, b"x")
        (message,) = await talk.messages(1)
        assert (message["destination"], message.body) == (shown, b"x")
        assert [record.body for record in stomp.records(topic)] == [b"x"]


async def test_an_exchange_with_a_pattern_has_what_matches(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(), await stomp.connect()
        await talk.subscribe("/exchange/amq.topic/orders.#", name="topic")
        await talk.subscribe("/exchange/logs/*.error", name="logs")
        await sender.publish("/topic/orders.eu", b"1")
        await sender.publish("/exchange/logs/disk.error", b"2")
        await sender.publish("/exchange/logs/disk.info", b"3")
        messages = sorted(await talk.messages(2), key=lambda message: message.body)
        assert [(message["subscription"], message["destination"], message.body) for message in messages] == [
            ("topic", "/topic/orders.eu", b"1"),
            ("logs", "/exchange/logs/disk.error", b"2"),
        ]
        await stomp.idle()
        assert await talk.rest() == []


@pytest.mark.parametrize("text", ["/exchange/", "/exchange/amq.topic", "/exchange/amq.headers/x", "/exchange//x"])
def test_what_is_no_exchange_here_is_an_error(text: str) -> None:
    with pytest.raises(StompError):
        parse_destination(text)


@pytest.mark.parametrize("text", ["/exchange/logs", "/exchange/amq.topic/a", "/exchange/amq.topic/a.#"])
async def test_a_client_of_1_0_ends_it_by_its_destination(tmp_path: Path, text: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_0)
        for command in ("SUBSCRIBE", "UNSUBSCRIBE"):
            await talk.send(talk.frame(command, destination=text, receipt=command))
            await talk.receipt(command)
        assert stomp.subscriptions() == 0


async def test_amq_queue_is_a_queue_that_is_there(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish("/queue/orders", b"1")
        await talk.publish("/amq/queue/orders", b"2")
        await talk.subscribe("/amq/queue/orders", "client-individual")
        messages = await talk.messages(2)
        assert [(message["destination"], message.body) for message in messages] == [
            ("/queue/orders", b"1"),
            ("/queue/orders", b"2"),
        ]
        await talk.ack(*messages)


@pytest.mark.parametrize("command", ["SUBSCRIBE", "SEND"])
@pytest.mark.parametrize("transaction", [{}, {"transaction": "t"}])
async def test_amq_queue_creates_none(tmp_path: Path, command: str, transaction: dict[str, str]) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        headers = {"id": "0", "receipt": "r", **(transaction if command == "SEND" else {})}
        await talk.send(talk.frame("BEGIN", transaction="t"))
        await talk.send(talk.frame(command, destination="/amq/queue/orders", **headers))
        error = await talk.error()
        assert (error["receipt-id"], error["message"]) == ("r", "there is no queue '/queue/orders'")
        assert stomp.broker.topics.get("orders") is None


def test_amq_queue_has_the_name_of_the_queue() -> None:
    found = parse_destination("/amq/queue/a.b")
    assert (found.kind, found.topic, found.text) == (Kind.QUEUE, "a%2Eb", "/queue/a.b")
