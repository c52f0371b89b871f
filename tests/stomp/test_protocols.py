"""Messages of STOMP clients for those of MQTT and RocketMQ, and the other way: bodies, and what is hidden."""

import json
from pathlib import Path

import pytest
from tests.remoting.conftest import pull_ext
from tests.stomp.all_protocols import all_protocols, properties_of
from tests.wire_clients.remoting import RemotingClient
from tests.wire_clients.stomp import StompClient

from martlet.message import Record, encode_properties
from martlet.records.codec import decode_records
from martlet.records.compression import compress
from martlet.testing.stores import ManualClock
from martlet_mqtt.wire.properties import Properties, Property
from martlet_remoting.wire.codes import RequestCode

NAMED = "/topic/mqtt/home/door"
LONG = {f"header{number}": "x" * 4000 for number in range(10)}
LONG_USERS = tuple(LONG.items())
BODIES = [b"", b"text", b"\0\n\0", bytes(range(256)), b"x" * 70_000]


async def pull(talk: RemotingClient, topic: str) -> list[Record]:
    """Return the messages of *topic* as a RocketMQ consumer gets them."""
    answer = await talk.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, 0))
    assert answer.code == 0, answer.remark
    return list(decode_records(answer.body))


@pytest.mark.parametrize("body", BODIES, ids=len)
async def test_bodies_come_as_they_were_sent(tmp_path: Path, body: bytes) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, mqtt, rocketmq = await protocols.stomp.connect(), await protocols.mqtt.connect("m"), protocols.remoting()
        await stomp.subscribe("/topic/mqtt/#")
        await mqtt.subscribe("#", qos=1)
        await stomp.publish("/topic/mqtt/a", body, content_length=str(len(body)))
        await mqtt.publish("a", body, 1)
        assert (await rocketmq.publish("mqtt", body or b"-", {"TAGS": "a"})).code == 0
        expected = [body, body, body or b"-"]
        assert await stomp.bodies(3) == expected
        assert await mqtt.payloads(3) == expected
        assert sorted(record.body for record in protocols.stomp.records("mqtt")) == sorted(expected)


async def test_a_rocketmq_consumer_gets_what_a_stomp_client_sends(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, rocketmq = await protocols.stomp.connect(), protocols.remoting()
        await stomp.publish("/queue/orders", b"x", KEYS="k1 k2", TAGS="paid", colour="red", empty="")
        (record,) = await pull(rocketmq, "orders")
        assert record.body == b"x"
        found = dict(properties_of(record))
        assert json.loads(found.pop("STOMP_BLOCK")) == {"empty": ""}
        assert found == {"KEYS": "k1 k2", "TAGS": "paid", "colour": "red"}
        key = {"topic": "orders", "key": "k2", "maxNum": "8", "beginTimestamp": "0", "endTimestamp": str(1 << 60)}
        answer = await rocketmq.ask(RequestCode.QUERY_MESSAGE, dict(key))
        assert [each.body for each in decode_records(answer.body)] == [b"x"]


async def test_a_compressed_body_of_rocketmq_is_decompressed(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        talk = await protocols.stomp.connect()
        await talk.subscribe("/queue/orders")
        body, flag = compress(b"order " * 1000)
        await protocols.stomp.publish("orders", body, encode_properties({"TAGS": "t"}), sys_flag=flag)
        (message,) = await talk.messages(1)
        assert (message.body, message["content-length"]) == (b"order " * 1000, "6000")


# what belongs to one protocol


async def test_what_stomp_alone_understands_is_hidden_from_mqtt(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await mqtt.subscribe("#", qos=1)
        await stomp.publish(NAMED, b"block", reply_to="/queue/a", empty="", UNIQ_KEY="own", colour="red")
        await stomp.publish(NAMED, b"tail", content_type="text/plain", **LONG)
        block, tail = await mqtt.messages(2)
        assert (block.payload, block.properties.user) == (b"block", (("colour", "red"),))
        assert (tail.payload, tail.properties.user) == (b"tail", ())
        for record in protocols.stomp.records("mqtt"):
            assert properties_of(record).keys() & {"STOMP_BLOCK", "STOMP_BODY_BYTES"}


async def test_what_mqtt_alone_understands_is_hidden_from_stomp(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await stomp.subscribe(NAMED)
        twice = (("colour", "red"), ("colour", "blue"), ("empty", ""))
        await mqtt.publish("home/door", b"block", 2, properties=Properties({Property.PAYLOAD_FORMAT: 1}, twice))
        await mqtt.publish("home/door", b"tail", 1, retain=True, properties=Properties({}, LONG_USERS))
        block, tail = await stomp.messages(2)
        assert (block.body, tail.body) == (b"block", b"tail")
        usual = {"subscription", "message-id", "destination", "content-length", "timestamp"}
        assert block.headers.keys() - usual == {"colour"}
        assert block["colour"] == "red"
        assert tail.headers.keys() == usual


async def test_a_user_property_with_a_name_of_stomp_means_nothing_to_stomp(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await stomp.subscribe(NAMED)
        await mqtt.subscribe("#", qos=1)
        users = (("STOMP_BODY_BYTES", "1"), ("STOMP_BLOCK", '{"colour":"blue"}'), ("STOMP_REPLY_TO", "/queue/a"))
        await mqtt.publish("home/door", b"payload", 1, properties=Properties({}, users))
        (message,) = await stomp.messages(1)
        assert message.body == b"payload"
        assert not message.headers.keys() & {"colour", "reply-to", "STOMP_BLOCK"}
        (published,) = await mqtt.messages(1)
        assert published.properties.user == users


async def test_a_header_with_a_name_of_mqtt_means_nothing_to_mqtt(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await mqtt.subscribe("#", qos=1)
        await stomp.subscribe(NAMED)
        headers = {"MQTT_QOS": "0", "MQTT_RETAIN": "1", "MQTT_PAYLOAD_BYTES": "1", "MQTT_CLIENT": "m"}
        await stomp.publish(NAMED, b"body", **headers)
        (published,) = await mqtt.messages(1)
        assert (published.payload, published.qos, published.retain) == (b"body", 1, False)
        (message,) = await stomp.messages(1)
        assert {name: message[name] for name in headers} == headers


# expiry, order, durability


@pytest.mark.parametrize("header", ["expires", "expiration"])
async def test_nobody_gets_what_has_expired(tmp_path: Path, header: str) -> None:
    clock = ManualClock()
    async with all_protocols(tmp_path, clock=clock) as protocols:
        stomp, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        durable = {"durable": "true", "auto_delete": "false"}
        await stomp.subscribe(NAMED, **durable)
        await stomp.disconnect()
        stomp = await protocols.stomp.connect()
        await stomp.publish(NAMED, b"short", **{header: "1000" if header == "expiration" else str(clock.ms + 1000)})
        short = Properties({Property.MESSAGE_EXPIRY: 1})
        await mqtt.publish("home/door", b"short, too", 1, properties=short)
        await mqtt.publish("home/door", b"long", 1, properties=Properties({Property.MESSAGE_EXPIRY: 100}))
        clock.ms += 2000
        await stomp.subscribe(NAMED, **durable)
        (message,) = await stomp.messages(1)
        assert (message.body, message["expires"]) == (b"long", str(clock.ms + 98_000))
        assert await stomp.rest() == []


async def test_messages_of_one_name_stay_in_order_across_protocols(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        mqtt = await protocols.mqtt.connect("m")  # the topic has several queues then
        stomp = await protocols.stomp.connect()
        await stomp.subscribe("/queue/mqtt/#", name="queue")
        await stomp.subscribe("/topic/mqtt/#", name="topic")
        await mqtt.subscribe("#", qos=1)
        sent = []
        for number in range(20):
            sent.append(b"%d" % number)
            if number % 2:
                await stomp.publish(NAMED, sent[-1])
            else:
                await mqtt.publish("home/door", sent[-1], 1)
        came = await stomp.messages(40)
        for name in ("queue", "topic"):
            assert [each.body for each in came if each["subscription"] == name] == sent
        assert await mqtt.payloads(20) == sent


async def test_a_transaction_reaches_mqtt_clients_when_it_is_committed(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, mqtt = await protocols.stomp.connect(), await protocols.mqtt.connect("m")
        await mqtt.subscribe("#", qos=1)
        await transact(stomp, "ABORT", b"never")
        await transact(stomp, "COMMIT", b"1", b"2")
        assert await mqtt.payloads(2) == [b"1", b"2"]
        assert await mqtt.rest() == []


async def transact(talk: StompClient, end: str, *bodies: bytes) -> None:
    await talk.send(
        talk.frame("BEGIN", transaction="t"),
        *(talk.frame("SEND", body, destination=NAMED, transaction="t") for body in bodies),
        talk.frame(end, transaction="t", receipt="end"),
    )
    await talk.receipt("end")


async def test_a_consumer_of_stomp_and_one_of_rocketmq_each_get_every_message(tmp_path: Path) -> None:
    async with all_protocols(tmp_path) as protocols:
        stomp, rocketmq = await protocols.stomp.connect(), protocols.remoting()
        await stomp.subscribe("/queue/orders", "client")
        await stomp.publish("/queue/orders", b"1", b"2")
        await stomp.ack(*(await stomp.messages(2)))
        assert [record.body for record in await pull(rocketmq, "orders")] == [b"1", b"2"]
        assert (await rocketmq.publish("orders", b"3", {"TAGS": "t"})).code == 0
        assert await stomp.bodies(1) == [b"3"]
