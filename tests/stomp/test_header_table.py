"""The table of headers in docs/stomp.md, row by row: from STOMP to the record and to MQTT, and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.stomp.all_protocols import Protocols, all_protocols, properties_of, values_of
from tests.wire_clients.stomp import Frame, StompClient

from martlet.message import encode_properties
from martlet.testing.stores import ManualClock
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Properties, Property

PAGE = Path(__file__).parents[2] / "docs" / "stomp.md"
NAMED = "/topic/mqtt/home/door"
CLOCK = ManualClock()
EXPIRES = str(CLOCK.ms + 60_000)
REQUEST = {"CLUSTER": "DefaultCluster", "TTL": "86400000"}
# What each message has at least.
FRAME = ("content-length", "destination", "message-id", "subscription", "timestamp")


@dataclass(frozen=True)
class Row:
    """What a message has with these headers; ``received`` is what comes out of STOMP, if that is something else."""

    headers: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[Property, object] = field(default_factory=dict)
    users: tuple[tuple[str, str], ...] = ()
    received: Mapping[str, str] | None = None

    @property
    def comes_out(self) -> Mapping[str, str]:
        return self.headers if self.received is None else self.received


ROWS = {
    "`destination` with a name, such as `/topic/mqtt/home/door`": Row(),
    "`content-type`": Row(
        {"content-type": "text/plain"}, {"CONTENT_TYPE": "text/plain"}, {Property.CONTENT_TYPE: "text/plain"}
    ),
    "`correlation-id`": Row(
        {"correlation-id": "c: 1"}, {"CORRELATION_ID": "c: 1"}, {Property.CORRELATION_DATA: b"c: 1"}
    ),
    "`reply-to`": Row(
        {"reply-to": "/queue/answers", "correlation-id": "7"},
        {
            "STOMP_REPLY_TO": "/queue/answers",
            "REPLY_TO_CLIENT": "stomp:text:/queue/answers",
            "CORRELATION_ID": "7",
            **REQUEST,
        },
        {Property.RESPONSE_TOPIC: "$REPLY/stomp:text:%2Fqueue%2Fanswers", Property.CORRELATION_DATA: b"7"},
    ),
    "`reply-to` with a name": Row(
        {"reply-to": "/topic/mqtt/answers/7"},
        {
            "STOMP_REPLY_TO": "/topic/mqtt/answers/7",
            "REPLY_TO": "answers/7",
            "REPLY_TO_CLIENT": "stomp:none:/topic/mqtt/answers/7",
            "CORRELATION_ID": "=",
            **REQUEST,
        },
        {Property.RESPONSE_TOPIC: "answers/7"},
    ),
    "`expires` (ms since 1970), as in ActiveMQ": Row(
        {"expires": EXPIRES}, {"EXPIRES_MS": EXPIRES}, {Property.MESSAGE_EXPIRY: 60}
    ),
    "`expiration` (ms from now), as in RabbitMQ; received as `expires`": Row(
        {"expiration": "60000"},
        {"EXPIRES_MS": EXPIRES},
        {Property.MESSAGE_EXPIRY: 60},
        received={"expires": EXPIRES},
    ),
    "`KEYS`": Row({"KEYS": "k1 k2"}, {"KEYS": "k1 k2"}, users=(("KEYS", "k1 k2"),)),
    "any other, such as `priority`, `persistent` and `type`": Row(
        {"priority": "7", "persistent": "true", "type": "order", "Colour": "dark: blue"},
        {"priority": "7", "persistent": "true", "type": "order", "Colour": "dark: blue"},
        users=(("priority", "7"), ("persistent", "true"), ("type", "order"), ("Colour", "dark: blue")),
    ),
}
# Rows that are not alike in all directions have tests of their own, here, in test_delays.py, test_repeats.py and
# test_queues.py.
OTHERS = [
    "`DLQ_ORIGIN_MESSAGE_ID` of a dead letter",
    "`AMQ_SCHEDULED_DELAY`, `x-delay` (ms)",
    "`AMQ_SCHEDULED_PERIOD` (ms), `AMQ_SCHEDULED_REPEAT`, `AMQ_SCHEDULED_CRON`",
    "`DELAY`, `TIMER_DELAY_SEC`, `TIMER_DELAY_MS`, `TIMER_DELIVER_MS`",
    "`TAGS`",
    "`timestamp` (ms since 1970)",
    "`original-destination` of a dead letter",
]

each_row = pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))


def headers_of(message: Frame) -> dict[str, str]:
    """Return the headers that belong to *message* alone."""
    return {name: value for name, value in message.headers.items() if name not in FRAME}


async def stomp_client(protocols: Protocols) -> StompClient:
    talk = await protocols.stomp.connect()
    await talk.subscribe(NAMED)
    return talk


def test_every_row_of_the_table_is_tested() -> None:
    table = PAGE.read_text().partition("| STOMP header |")[2].partition("\n\n")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert sorted(rows) == sorted([*ROWS, *OTHERS])


@each_row
async def test_from_stomp_to_the_record_and_to_everybody(tmp_path: Path, row: Row) -> None:
    async with all_protocols(tmp_path, clock=CLOCK) as protocols:
        stomp, mqtt = await stomp_client(protocols), await protocols.mqtt.connect("m")
        await mqtt.subscribe("home/+")
        await stomp.publish(NAMED, b"open", **row.headers)
        (record,) = protocols.stomp.records("mqtt")
        assert properties_of(record) == {"TAGS": "home/door", **row.properties}
        (published,) = await mqtt.messages(1)
        assert (published.topic, published.payload) == ("home/door", b"open")
        assert values_of(published) == row.values
        assert sorted(published.properties.user) == sorted(row.users)
        (message,) = await stomp.messages(1)
        assert (message["destination"], message.body) == (NAMED, b"open")
        assert headers_of(message) == row.comes_out


@each_row
async def test_from_a_record_of_rocketmq_to_stomp(tmp_path: Path, row: Row) -> None:
    async with all_protocols(tmp_path, clock=CLOCK) as protocols:
        stomp, rocketmq = await stomp_client(protocols), protocols.remoting()
        await stomp.publish("/topic/mqtt/other", b"")
        assert (
            await rocketmq.publish("mqtt", b"open", {"TAGS": "home/door", **row.properties, "WAIT": "true"})
        ).code == 0
        (message,) = await stomp.messages(1)
        assert (message["destination"], message.body) == (NAMED, b"open")
        assert headers_of(message) == row.comes_out


@each_row
async def test_from_mqtt_to_stomp(tmp_path: Path, row: Row) -> None:
    if Property.RESPONSE_TOPIC in row.values:
        return  # tests/stomp/test_requests.py
    async with all_protocols(tmp_path, clock=CLOCK) as protocols:
        stomp, mqtt = await stomp_client(protocols), await protocols.mqtt.connect("m")
        await mqtt.publish("home/door", b"open", 1, properties=Properties(row.values, row.users))
        (message,) = await stomp.messages(1)
        assert (message["destination"], message.body) == (NAMED, b"open")
        assert headers_of(message) == row.comes_out


async def test_tags_are_those_of_rocketmq_and_in_a_topic_with_names_a_header(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        talk, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await mqtt.subscribe("#")
        await talk.subscribe("/queue/orders", name="orders")
        await talk.subscribe(NAMED, name="named")
        for destination, tags in (("/queue/orders", "paid"), (NAMED, "home/door")):
            await talk.publish(destination, b"x", TAGS="paid")
            (record,) = protocols.stomp.records("orders" if destination != NAMED else "mqtt")
            assert properties_of(record)["TAGS"] == tags
            assert (await talk.messages(1))[0]["TAGS"] == "paid"
        (published,) = await mqtt.messages(1)
        assert isinstance(published, Publish)
        assert (published.topic, published.properties.user) == ("home/door", ())
        assert (await protocols.remoting().publish("orders", b"y", {"TAGS": "sent"})).code == 0
        assert (await talk.messages(1))[0]["TAGS"] == "sent"


async def test_a_dead_letter_says_where_it_was(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        talk, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await talk.subscribe("/queue/stomp_dead_letters", name="dead")
        await talk.subscribe("/queue/orders", "client-individual", name="orders")
        await talk.publish("/queue/orders", b"x")
        await talk.nack((await talk.messages(1))[0], requeue="false")
        (dead,) = await talk.messages(1)
        assert dead["original-destination"] == "/queue/orders"
        (record,) = protocols.stomp.records("stomp_dead_letters")
        assert properties_of(record)["DLQ_ORIGIN_TOPIC"] == "orders"
        await mqtt.subscribe("a")
        await protocols.stomp.publish("mqtt", b"x", encode_properties({"TAGS": "a", "DLQ_ORIGIN_TOPIC": "orders"}))
        (published,) = await mqtt.messages(1)
        assert published.properties.user == (("DLQ_ORIGIN_TOPIC", "orders"),)


async def test_a_message_says_when_it_was_sent_unless_its_sender_does(tmp_path: Path) -> None:
    async with all_protocols(tmp_path, clock=CLOCK) as protocols:
        talk, rocketmq = await protocols.stomp.connect(), protocols.remoting()
        await talk.subscribe("/queue/orders")
        await talk.publish("/queue/orders", b"x")
        await talk.publish("/queue/orders", b"x", expires=EXPIRES)
        await talk.publish("/queue/orders", b"x", timestamp="1700000000")
        assert (await rocketmq.publish("orders", b"x", {})).code == 0
        await protocols.stomp.publish("orders", b"x", born_ms=77)
        came = [message["timestamp"] for message in await talk.messages(5)]
        assert came[:3] == [str(CLOCK.ms), str(CLOCK.ms), "1700000000"]
        assert came[4] == "77"
        (_, _, _, sent, _) = protocols.stomp.records("orders")
        assert came[3] == str(sent.born_ms)
