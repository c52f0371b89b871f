"""Virtual topics, as with ActiveMQ: each application has what is sent to the topic, and its consumers share that."""

import random
from pathlib import Path

import pytest
from tests.wire_clients.stomp import ASYNC, StompBroker, StompClient, stomp_broker

from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_stomp.mapping.destinations import Kind, parse_destination
from martlet_stomp.mapping.groups import destination_of_group, queue_group

TOPIC = "/topic/VirtualTopic.orders"
BILLING, STOCK = "/queue/Consumer.billing.VirtualTopic.orders", "/queue/Consumer.stock.VirtualTopic.orders"


async def consumer(stomp: StompBroker, queue: str, ack: str = "client-individual") -> StompClient:
    talk = await stomp.connect()
    await talk.subscribe(queue, ack)
    return talk


async def test_each_application_has_every_message_and_its_consumers_share_them(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect()
        await sender.publish(TOPIC, b"before")
        billing = [await consumer(stomp, BILLING, "auto") for _ in range(2)]
        stock, plain = await consumer(stomp, STOCK, "auto"), await consumer(stomp, TOPIC, "auto")
        bodies = [b"%d" % number for number in range(10)]
        await sender.publish(TOPIC, *bodies)
        messages = await stock.messages(10)
        assert [message.body for message in messages] == bodies
        assert {message["destination"] for message in messages} == {STOCK}
        assert await plain.bodies(10) == bodies
        came = [[message.body for message in await talk.rest()] for talk in billing]
        assert sorted(came[0] + came[1]) == bodies
        assert await stock.rest() == []


async def test_messages_wait_for_an_application_over_a_restart(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await consumer(stomp, BILLING)
        await talk.publish(TOPIC, b"1", b"2")
        await talk.ack((await talk.messages(2))[0])
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect()
        await sender.publish(TOPIC, b"3")
        talk = await consumer(stomp, BILLING)
        assert [(message.body, message.headers.get("redelivered")) for message in await talk.messages(2)] == [
            (b"2", "true"),
            (b"3", None),
        ]


@pytest.mark.parametrize("cut", list(Cut))
async def test_an_application_misses_nothing_after_its_first_receipt(cut: Cut) -> None:
    disk, store, after = FakeDisk(), small_config(flush="sync"), FakeDisk()
    async with stomp_broker(Path("/data"), disk=disk, store=store) as stomp:
        sender = await stomp.connect()
        await sender.publish(TOPIC, b"before")
        await consumer(stomp, BILLING)
        after = disk.after_power_cut(cut, random.Random(7))
    async with stomp_broker(Path("/data"), disk=after, store=store) as stomp:
        sender = await stomp.connect()
        await sender.publish(TOPIC, b"missed")
        talk = await consumer(stomp, BILLING)
        assert [message.body for message in await talk.rest()] == [b"missed"]


async def test_an_application_is_not_forgotten_when_it_is_unused(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        await (await consumer(stomp, BILLING)).disconnect()
        assert not stomp.broker.shared_groups.unused.make_room()
        sender = await stomp.connect()
        await sender.publish(TOPIC, b"missed")
        talk = await consumer(stomp, BILLING)
        assert await talk.bodies(1) == [b"missed"]


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        ({"command": "SEND", "destination": BILLING}, f"send to '{TOPIC}'"),
        ({"command": "SUBSCRIBE", "destination": BILLING, "auto-delete": "true"}, "subscribe without auto-delete"),
        ({"command": "SUBSCRIBE", "destination": BILLING, "browser": "true"}, "nobody ever consumed it"),
        ({"command": "SUBSCRIBE", "destination": "/queue/Consumer.a.VirtualTopic.>"}, "wildcard"),
    ],
)
async def test_what_a_virtual_topic_cannot_do_is_an_error(tmp_path: Path, frame: dict[str, str], error: str) -> None:
    async with stomp_broker(tmp_path, store=ASYNC) as stomp:
        talk = await stomp.connect()
        headers = {name: value for name, value in frame.items() if name != "command"}
        await talk.send(talk.frame(frame["command"], id="0", receipt="r", **headers))
        found = await talk.error()
        assert (found["receipt-id"], error in found.body.decode()) == ("r", True), found.body


async def test_a_browser_is_shown_what_waits_for_the_application(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect()
        await sender.publish(TOPIC, b"before")
        talk = await consumer(stomp, BILLING)
        await sender.publish(TOPIC, b"1", b"2")
        await talk.ack((await talk.messages(2))[0])
        browser = await stomp.connect()
        await browser.subscribe(BILLING, browser="true")
        messages = await browser.messages(2)
        assert [message.body for message in messages] == [b"2", b""]
        assert messages[1]["browser"] == "end"


async def test_a_list_of_queues_has_the_applications_and_one_can_be_deleted(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, admin = await consumer(stomp, BILLING), await stomp.connect()
        await admin.subscribe("/control/queues", name="list")
        rows = (await admin.messages(2))[0].body
        assert b'"destination":"%b","durable":null' % BILLING.encode() in rows
        await talk.disconnect()
        await admin.subscribe(f"/control/delete{BILLING}", name="delete")
        await admin.messages(2)
        await admin.publish(TOPIC, b"missed")
        talk = await consumer(stomp, BILLING)
        assert await talk.rest() == []


@pytest.mark.parametrize("queue", [BILLING, "/queue/Consumer.A b%/c.VirtualTopic.a.b"])
def test_the_group_of_an_application_says_which_queue_it_is(queue: str) -> None:
    destination = parse_destination(queue)
    assert destination.application
    assert destination_of_group(destination.topic, queue_group(destination)) == queue


@pytest.mark.parametrize(
    "text", ["/topic/Consumer.a.VirtualTopic.b", "/queue/Consumer.VirtualTopic.b", "/queue/Consumer.a.VirtualTopic"]
)
def test_other_names_are_no_virtual_topics(text: str) -> None:
    found = parse_destination(text)
    assert not found.application
    assert found.topic == text.rpartition("/")[2].replace(".", "%2E")
    assert found.kind in (Kind.QUEUE, Kind.TOPIC)
