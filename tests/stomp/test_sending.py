"""SEND: what is stored, when it is acknowledged, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.wire_clients.stomp import V1_0, V1_1, V1_2, stomp_broker

from martlet.contracts import Stage
from martlet.message import Message, decode_properties
from martlet.settings import BrokerConfig
from martlet.store import StoreConfig
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import MemoryPeer
from martlet.testing.stores import ManualClock
from martlet_stomp.config import StompConfig
from martlet_stomp.wire.packets import Version

every_version = pytest.mark.parametrize("version", Version)


@every_version
async def test_a_receipt_follows_each_frame_that_asks_for_one(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        receipts = ["1", "two words", "3:4" if version is not V1_0 else "3", ""]
        frames = [talk.frame("SEND", b"x", destination="/queue/a", receipt=receipt) for receipt in receipts]
        await talk.send(talk.frame("SEND", b"x", destination="/queue/a"), *frames)
        for receipt in receipts:
            await talk.receipt(receipt)
        assert len(stomp.records("a")) == 5


async def test_a_receipt_comes_after_the_message_is_durable(tmp_path: Path) -> None:
    disk = FakeDisk()
    async with stomp_broker(Path("/data"), disk=disk, store=StoreConfig(flush="sync")) as stomp:
        talk, synced = await stomp.connect(), list[int]()
        stomp.broker.store.readable_end.on_moved.insert(0, lambda: synced.append(talk_waiting()))

        def talk_waiting() -> int:
            wire = talk.wire
            assert isinstance(wire, MemoryPeer)
            return wire.waiting()

        await talk.send(talk.frame("SEND", b"x", destination="/queue/a", receipt="r"))
        await talk.receipt("r")
        assert synced == [0], "something was sent before the disk had it"
        assert len(stomp.records("a")) == 1


async def test_messages_of_a_client_stay_in_order_in_a_topic_with_many_queues(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.topics.ensure("a", 8)
        talk = await stomp.connect()
        await talk.publish("/queue/a", *(b"%d" % number for number in range(50)))
        await talk.publish("/queue/a", *(b"%d" % number for number in range(50, 60)), colour="blue")
        records = stomp.records("a")
        assert [record.body for record in records] == [b"%d" % number for number in range(60)]
        assert len({record.queue_id for record in records}) == 1


@pytest.mark.parametrize(
    ("destination", "topic"),
    [
        ("/queue/orders", "orders"),
        ("/topic/orders", "orders"),
        ("orders", "orders"),
        ("/queue/orders.new", "orders%2Enew"),
        ("/queue/a/b c", "a%2Fb%20c"),
        ("/topic/größe", "gr%C3%B6%C3%9Fe"),
        ("/queue/A-b_c|d%25", "A-b_c|d%25"),
    ],
)
async def test_the_topic_of_a_destination(tmp_path: Path, destination: str, topic: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish(destination, b"x")
        assert [record.body for record in stomp.records(topic)] == [b"x"]
        await talk.subscribe(f"/queue/{topic}")
        assert (await talk.messages(1))[0]["destination"] == f"/queue/{topic}"


@pytest.mark.parametrize(
    ("destination", "why"),
    [
        ("/elsewhere/a/b", "is unknown"),
        ("/queue/", "has no name"),
        ("/topic/", "has no name"),
        ("/queue/" + "x" * 128, "128 characters; use 127"),
        ("/queue/" + "." * 43, "129 characters"),
        ("/queue/\x01", "control character"),
        ("/queue/SCHEDULE_TOPIC_XXXX", "forbidden"),
        ("/queue/%RETRY%group", "only by the broker"),
        ("/queue/%DLQ%group", "only by the broker"),
        ("/topic/mqtt/", "has no name in topic mqtt"),
        ("/topic/mqtt/a/+", "wildcard"),
        ("/topic/mqtt/a/#", "wildcard"),
        ("/topic/mqtt/$SYS/a", "begins with $"),
    ],
)
async def test_a_destination_that_may_not_be_sent_to_is_an_error(tmp_path: Path, destination: str, why: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        destinations = "/queue/a", destination, "/queue/a"
        frames = [talk.frame("SEND", b"x", destination=each, receipt=str(n)) for n, each in enumerate(destinations, 1)]
        await talk.send(*frames)
        await talk.receipt("1")
        error = await talk.error()
        assert error["receipt-id"] == "2"
        assert why in error.body.decode()
        assert len(stomp.records("a")) == 1


async def test_a_journal_of_the_broker_is_out_of_reach(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        journal = stomp.broker.journal("sessions").topic
        talk = await stomp.connect()
        await talk.publish(f"/queue/{journal}", b"x")
        assert stomp.records(journal) == []
        await talk.subscribe(f"/queue/{journal}")
        assert await talk.bodies(1) == [b"x"]


async def test_a_topic_that_nobody_created_is_an_error_where_topics_are_not_created(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, broker=BrokerConfig(auto_create_topics=False)) as stomp:
        for made in ("SEND", "SUBSCRIBE"):
            talk = await stomp.connect()
            await talk.send(talk.frame(made, destination="/queue/a", id="0", receipt="r"))
            error = await talk.error()
            assert "topic[a] does not exist" in error["message"]
            assert error["receipt-id"] == "r"


async def test_topics_get_the_configured_number_of_queues(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, StompConfig(queues=3)) as stomp:
        talk = await stomp.connect()
        await talk.publish("/queue/a", b"x")
        await talk.subscribe("/queue/b")
        for name in ("a", "b"):
            topic = stomp.broker.topics.get(name)
            assert topic is not None
            assert (topic.read_queues, topic.write_queues) == (3, 3)


async def test_a_body_that_is_too_large_is_an_error_and_those_before_are_stored(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, broker=BrokerConfig(message_bytes_max=10)) as stomp:
        talk = await stomp.connect()
        sizes = (10, 5, 11, 3)
        frames = [talk.frame("SEND", b"x" * size, destination="/queue/a", receipt=str(size)) for size in sizes]
        await talk.send(*frames)
        await talk.receipt("10")
        await talk.receipt("5")
        error = await talk.error()
        assert (error["receipt-id"], error["message"]) == ("11", "message body is 11 bytes")
        assert [len(record.body) for record in stomp.records("a")] == [10, 5]


async def test_messages_pass_the_stages(tmp_path: Path) -> None:
    def stamp(message: Message) -> Message:
        message.body += b"!"
        return message

    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.set_stages([("some", Stage(stamp, ("colour",)))])
        talk = await stomp.connect()
        await talk.send(
            talk.frame("SEND", b"1", destination="/queue/a"),
            talk.frame("SEND", b"2", destination="/queue/a", colour="red"),
            talk.frame("SEND", b"3", destination="/queue/a", receipt="r"),
        )
        await talk.receipt("r")
        assert [record.body for record in stomp.records("a")] == [b"1", b"2!", b"3"]
        stomp.broker.set_stages([("every", Stage(stamp))])
        await talk.publish("/queue/a", b"4", b"5")
        assert [record.body for record in stomp.records("a")][3:] == [b"4!", b"5!"]


async def test_a_full_disk_is_an_error_for_the_receipts_that_it_breaks() -> None:
    disk = FakeDisk()
    async with stomp_broker(Path("/data"), disk=disk) as stomp:
        talk = await stomp.connect()
        await talk.publish("/queue/a", b"1")
        disk.free_bytes = 0
        await talk.send(talk.frame("SEND", b"x" * 3_000_000, destination="/queue/a", receipt="r"))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        disk.free_bytes = None


# headers


def properties_of(stomp: Any, topic: str = "a") -> dict[str, str]:
    (record,) = stomp.records(topic)
    return decode_properties(record.properties)


async def test_headers_become_properties_that_other_protocols_know(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish(
            "/queue/a",
            b"x",
            content_type="text/plain",
            correlation_id="c 1",
            reply_to="/queue/b",
            expires="4102444800000",
            persistent="true",
            priority="7",
            type="order",
            Colour="blue: dark",
            KEYS="k1 k2",
            TAGS="t",
        )
        assert properties_of(stomp) == {
            "CONTENT_TYPE": "text/plain",
            "CORRELATION_ID": "c 1",
            "STOMP_REPLY_TO": "/queue/b",
            "REPLY_TO_CLIENT": "stomp:text:/queue/b",
            "CLUSTER": "DefaultCluster",
            "TTL": "86400000",
            "EXPIRES_MS": "4102444800000",
            "persistent": "true",
            "priority": "7",
            "type": "order",
            "Colour": "blue: dark",
            "KEYS": "k1 k2",
            "TAGS": "t",
        }
        await talk.subscribe("/queue/a")
        (message,) = await talk.messages(1)
        for name, value in {"correlation-id": "c 1", "reply-to": "/queue/b", "expires": "4102444800000"}.items():
            assert message[name] == value
        assert (message["Colour"], message["KEYS"], message["TAGS"]) == ("blue: dark", "k1 k2", "t")


@every_version
async def test_headers_that_no_property_can_hold_come_out_as_they_were(tmp_path: Path, version: Version) -> None:
    odd = {
        "empty": "",
        "control": "a\x01b\x02c",
        "UNIQ_KEY": "own",
        "EXPIRES_MS": "1",
        "MQTT_QOS": "2",
        "DLQ_ORIGIN_TOPIC": "t",
        "STOMP_BLOCK": "{}",
        "plain": "text",
    }
    if version is not V1_0:
        odd |= {"lines": "one\ntwo", "a:b": "c:d", "back": "\\"}
    if version is V1_2:
        odd["return"] = "\r\n"
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.publish("/queue/a", b"x", **odd)
        await talk.subscribe("/queue/a")
        (message,) = await talk.messages(1)
        assert {name: message[name] for name in odd} == odd
        properties = properties_of(stomp)
        assert properties["plain"] == "text"
        assert json.loads(properties["STOMP_BLOCK"])["UNIQ_KEY"] == "own"
        assert "EXPIRES_MS" not in properties


async def test_headers_longer_than_a_record_allows_come_out_as_they_were(tmp_path: Path) -> None:
    long = {f"header{number}": "x" * 4000 for number in range(10)}
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish("/queue/a", b"body", KEYS="k", content_type="text/plain", **long)
        await talk.subscribe("/queue/a")
        (message,) = await talk.messages(1)
        assert message.body == b"body"
        assert {name: message[name] for name in long} == long
        assert (message["content-type"], message["KEYS"]) == ("text/plain", "k")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("expires", "soon"),
        ("expiration", "-1"),
        ("x_delay", "1.5"),
        ("AMQ_SCHEDULED_DELAY", ""),
        ("AMQ_SCHEDULED_CRON", "* * * * *"),
        ("AMQ_SCHEDULED_CRON", "soon"),
        ("AMQ_SCHEDULED_PERIOD", "soon"),
        ("AMQ_SCHEDULED_REPEAT", "often"),
        ("AMQ_SCHEDULED_DELAY", "1000"),
        ("TIMER_DELAY_MS", "1000"),
    ],
)
async def test_a_header_that_the_broker_cannot_obey_is_an_error(tmp_path: Path, header: str, value: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SEND", b"x", destination="/queue/a", receipt="r", **{header: value}))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert stomp.records("a") == []


@pytest.mark.parametrize("header", ["expires", "expiration"])
async def test_an_expired_message_is_not_delivered(tmp_path: Path, header: str) -> None:
    clock = ManualClock()
    async with stomp_broker(tmp_path, clock=clock) as stomp:
        talk = await stomp.connect()
        value = "1000" if header == "expiration" else str(clock.ms + 1000)
        await talk.publish("/queue/a", b"1", b"2", **{header: value})
        await talk.publish("/queue/a", b"3")
        await talk.publish("/queue/a", b"4", **{header: "0"})
        clock.ms += 500
        await talk.subscribe("/queue/a", "client", prefetch_count="1")
        (message,) = await talk.messages(1)
        assert message.body == b"1"
        assert message["expires"] == str(clock.ms + 500)
        clock.ms += 600
        await talk.ack(message)
        (message,) = await talk.messages(1)
        assert message.body == b"3"
        await talk.ack(message)
        assert await talk.bodies(1) == [b"4"]
        assert stomp.context.statistics()["expired"] == 1


async def test_headers_of_the_frame_are_not_those_of_the_message(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        own = {"message_id": "x", "subscription": "9", "ack": "y", "redelivered": "true", "delivery_count": "5"}
        await talk.publish("/queue/a", b"x", **own)
        await talk.subscribe("/queue/a")
        (message,) = await talk.messages(1)
        assert (message["message-id"], message["subscription"]) == ("a-0-0", "0")
        assert not message.headers.keys() & {"ack", "redelivered", "delivery-count", "receipt", "transaction"}


async def test_versions_escape_the_same_header_each_in_its_way(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect()
        expected = {V1_0: b"lines:a\\nb:c\rd\n", V1_1: b"lines:a\\nb\\cc\rd\n", V1_2: b"lines:a\\nb\\cc\\rd\n"}
        for version, line in expected.items():
            talk = await stomp.connect(version)
            await talk.subscribe("/topic/a")
            await sender.publish("/topic/a", b"x", lines="a\nb:c\rd")
            data = await talk.wire.receive_some()
            assert line in data


async def test_a_client_that_sends_ever_new_headers_takes_no_more_memory(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/queue/a")
        for start in range(0, 5000, 500):
            numbers = range(start, start + 500)
            await talk.send(*[talk.frame("SEND", b"", destination="/queue/a", number=str(each)) for each in numbers])
            assert [message["number"] for message in await talk.messages(500)] == list(map(str, numbers))
            await trio.lowlevel.checkpoint()
        assert len(stomp.context.templates.table) <= 4096
