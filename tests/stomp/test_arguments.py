"""Arguments of ActiveMQ and RabbitMQ in SUBSCRIBE and SEND: honoured, or refused with ERROR, and never ignored."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_0, V1_2, stomp_broker

from martlet_stomp.wire.arguments import check_send_arguments, check_subscribe_arguments
from martlet_stomp.wire.codec import Head
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.events import event_of
from martlet_stomp.wire.packets import Subscribe, Version

QUEUE, TOPIC = "/queue/orders", "/topic/orders"
REFUSED = {
    "x-message-ttl": "1000",
    "x-expires": "1000",
    "x-max-length": "5",
    "x-max-length-bytes": "5",
    "x-dead-letter-exchange": "dead",
    "x-max-priority": "10",
    "x-queue-type": "stream",
    "x-stream-offset": "first",
    "x-overflow": "drop-head",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["SUBSCRIBE", "SEND"])
async def test_an_argument_of_a_queue_that_is_not_honoured_is_an_error(tmp_path: Path, command: str, name: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        more = {"id": "0"} if command == "SUBSCRIBE" else {}
        await talk.send(talk.frame(command, destination=QUEUE, receipt="r", **more, **{name: REFUSED[name]}))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert error["message"] == f"{command} has {name}:'{REFUSED[name]}', which the broker does not do"
        assert stomp.broker.topics.get("orders") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activemq.priority", "10"),
        ("activemq.maximumPendingMessageLimit", "10"),
        ("activemq.typo", "true"),
        ("x-typo", "1"),
        ("x-priority", "3"),
        ("x-queue-name", "mine"),
        ("transformation", "jms-map-json"),
    ],
)
def test_an_argument_of_a_consumer_that_is_not_honoured_is_an_error(name: str, value: str) -> None:
    with pytest.raises(StompError, match=f"SUBSCRIBE has {name}:'{value}'"):
        check_subscribe_arguments({"destination": QUEUE, name: value})


@pytest.mark.parametrize(
    "name",
    [
        *("activemq.dispatchAsync", "activemq.exclusive", "activemq.noLocal", "activemq.retroactive", "auto-delete"),
        *("browser", "durable", "exclusive", "no-local", "x-cancel-on-ha-failover", "x-single-active-consumer"),
    ],
)
@pytest.mark.parametrize("destination", [QUEUE, TOPIC])
@pytest.mark.parametrize("value", ["maybe", "", "1"])
async def test_a_flag_that_is_neither_true_nor_false_is_an_error(
    tmp_path: Path, name: str, destination: str, value: str
) -> None:
    for good in "true", "FALSE", " true ":
        check_subscribe_arguments({"destination": destination, name: good})
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination=destination, **{name: value}))
        error = await talk.error()
        assert error["message"] == f"SUBSCRIBE has {name}:'{value}'"
        assert b"use true or false" in error.body


@pytest.mark.parametrize("version", [V1_0, V1_2])
async def test_unsubscribe_checks_its_flag_too(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.send(talk.frame("UNSUBSCRIBE", id="0", durable="maybe"))
        assert (await talk.error())["message"] == "UNSUBSCRIBE has durable:'maybe'"


def test_a_retroactive_subscription_may_have_blanks() -> None:
    headers = {"id": "0", "destination": TOPIC, "activemq.retroactive": " true "}
    event = event_of(Head("SUBSCRIBE", headers), V1_2)
    assert isinstance(event, Subscribe)
    assert event.is_retroactive


@pytest.mark.parametrize(
    ("name", "value"), [("x-queue-mode", "maybe"), ("x-queue-version", "9"), ("x-queue-leader-locator", "here")]
)
def test_a_wrong_value_of_a_queues_argument_is_an_error(name: str, value: str) -> None:
    with pytest.raises(StompError, match=f"SUBSCRIBE has {name}:'{value}'"):
        check_subscribe_arguments({"destination": QUEUE, name: value})


def test_what_the_broker_does_anyway_may_be_asked_for() -> None:
    check_subscribe_arguments(
        {
            "activemq.dispatchAsync": "true",
            "activemq.maximumPendingMessageLimit": "-1",
            "activemq.priority": "0",
            "x-queue-mode": "lazy",
            "x-queue-type": "quorum",
        }
    )
    check_send_arguments((("x-queue-type", "classic"), ("x-delay", "5")))


async def test_headers_of_a_message_may_begin_like_arguments(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE)
        await talk.publish(QUEUE, b"x", **{"x-request-id": "7", "activemq.mine": "a"})
        (message,) = await talk.messages(1)
        assert (message["x-request-id"], message["activemq.mine"]) == ("7", "a")


async def test_a_retroactive_subscription_begins_with_the_first_message(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish(TOPIC, b"1", b"2")
        await talk.subscribe(TOPIC, name="late")
        await talk.subscribe(TOPIC, name="retroactive", **{"activemq.retroactive": "true"})
        await talk.publish(TOPIC, b"3")
        came = [(message["subscription"], message.body) for message in await talk.rest()]
        assert [body for name, body in came if name == "late"] == [b"3"]
        assert [body for name, body in came if name == "retroactive"] == [b"1", b"2", b"3"]


async def test_a_retroactive_durable_subscription_begins_once_with_the_first_message(tmp_path: Path) -> None:
    headers = {"activemq.retroactive": "true", "activemq.subscriptionName": "s"}
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(client_id="c")
        await talk.publish(TOPIC, b"1", b"2")
        await talk.subscribe(TOPIC, **headers)
        assert await talk.bodies(2) == [b"1", b"2"]
        await talk.disconnect()
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(client_id="c")
        await talk.publish(TOPIC, b"3")
        await talk.subscribe(TOPIC, **headers)
        assert [message.body for message in await talk.rest()] == [b"3"]


@pytest.mark.parametrize("destination", ["/topic/mqtt/home/+", "/temp-topic/a", "/temp-queue/a"])
async def test_what_has_no_first_message_cannot_be_retroactive(tmp_path: Path, destination: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        headers = {"id": "0", "destination": destination, "receipt": "r", "activemq.retroactive": "true"}
        await talk.send(talk.frame("SUBSCRIBE", **headers))
        assert "activemq.retroactive is for a whole topic" in (await talk.error()).body.decode()


async def test_a_single_active_consumer_gets_everything(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        one, two = await stomp.connect(), await stomp.connect()
        for talk in (one, two):
            await talk.subscribe(QUEUE, **{"x-single-active-consumer": "true"})
        await two.publish(QUEUE, b"1", b"2", b"3", b"4")
        assert await one.bodies(4) == [b"1", b"2", b"3", b"4"]
        one.hang_up()
        await two.publish(QUEUE, b"5")
        assert await two.bodies(1) == [b"5"]
