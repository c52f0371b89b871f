"""Topics: each subscription gets what is published from then on."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_0, stomp_broker

from martlet.message import put_property
from martlet.store import StoreConfig
from martlet_stomp.config import StompConfig
from martlet_stomp.outbound.sources import HELD_MAX
from martlet_stomp.wire.packets import Version

TOPIC = "/topic/news"

every_version = pytest.mark.parametrize("version", Version)


@every_version
async def test_every_subscription_gets_what_comes_after_it(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        one, two, three = [await stomp.connect(version) for _ in range(3)]
        await one.subscribe(TOPIC)
        await one.publish(TOPIC, b"1")
        await two.subscribe(TOPIC)
        await two.subscribe(TOPIC, name="again")
        await three.publish(TOPIC, b"2", b"3")
        assert await one.bodies(3) == [b"1", b"2", b"3"]
        messages = await two.messages(4)
        assert sorted((message["subscription"], message.body) for message in messages) == [
            ("0", b"2"),
            ("0", b"3"),
            ("again", b"2"),
            ("again", b"3"),
        ]
        assert await three.rest() == []


async def test_nothing_comes_after_unsubscribe(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(TOPIC)
        await talk.subscribe(TOPIC, name="other")
        await talk.unsubscribe()
        await talk.publish(TOPIC, b"1")
        assert [message["subscription"] for message in await talk.rest()] == ["other"]


async def test_a_queue_and_a_topic_of_one_name_have_the_same_messages(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/a", name="topic")
        await talk.subscribe("/queue/a", name="queue")
        await talk.publish("/queue/a", b"1")
        await talk.publish("/topic/a", b"2")
        came = [(message["subscription"], message["destination"], message.body) for message in await talk.rest()]
        assert sorted(came) == [
            ("queue", "/queue/a", b"1"),
            ("queue", "/queue/a", b"2"),
            ("topic", "/topic/a", b"1"),
            ("topic", "/topic/a", b"2"),
        ]


@pytest.mark.parametrize("ack", ["client", "client-individual"])
@every_version
async def test_acknowledgements_say_how_many_more_messages_may_come(tmp_path: Path, version: Version, ack: str) -> None:
    async with stomp_broker(tmp_path, StompConfig(prefetch=2)) as stomp:
        talk, sender = await stomp.connect(version), await stomp.connect()
        await talk.subscribe(TOPIC, ack)
        await sender.publish(TOPIC, *(b"%d" % number for number in range(6)))
        messages = await talk.rest()
        assert [message.body for message in messages] == [b"0", b"1"]
        await talk.ack(messages[1])
        count = 2 if ack == "client" else 1
        messages = [messages[0], *await talk.rest()]
        assert [message.body for message in messages[1:]] == [b"2", b"3"][:count]
        await talk.nack(messages[-1])
        assert len(await talk.rest()) == count
        talk.hang_up()
        other = await stomp.connect(version)
        await other.subscribe(TOPIC, ack)
        assert await other.rest() == []


async def test_an_acknowledgement_of_an_unknown_message_is_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for ack in ("client", "client-individual"):
            talk = await stomp.connect()
            await talk.subscribe(TOPIC, ack)
            await talk.publish(TOPIC, b"1")
            (message,) = await talk.messages(1)
            await talk.ack(message)
            await talk.send(talk.settling("ACK", message, receipt="r"))
            assert (await talk.error())["receipt-id"] == "r"


@pytest.mark.parametrize("kind", ["/topic/", "/queue/", ""])
@pytest.mark.parametrize("name", ["a.*", "*", "a.>", "#", "a.#.b", "a/*"])
async def test_wildcards_where_there_are_none_are_an_error(tmp_path: Path, kind: str, name: str) -> None:
    """They would be a queue or a topic of exactly that name, in which nobody looks for messages."""
    async with stomp_broker(tmp_path) as stomp:
        for command, headers in (("SUBSCRIBE", {"id": "0"}), ("SEND", {})):
            if (command, kind) == ("SUBSCRIBE", "/topic/"):
                continue  # tests/stomp/test_patterns.py
            talk = await stomp.connect()
            await talk.send(talk.frame(command, destination=f"{kind}{name}", **headers))
            assert "has a wildcard" in (await talk.error())["message"]
        talk = await stomp.connect()
        await talk.publish(f"{kind}a.b*c", b"a star that is no level")


async def test_a_deleted_topic_ends_the_connection_with_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for destination in ("/topic/a", "/queue/a"):
            talk = await stomp.connect()
            await talk.subscribe(destination)
            stomp.broker.topics.delete("a")
            error = await talk.error()
            assert f"'{destination}' was deleted" in error["message"]


async def test_messages_of_other_protocols_come_with_their_properties(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/a")
        properties = b"TAGS\x01t\x02KEYS\x01k\x02UNIQ_KEY\x01u\x02WAIT\x01true\x02own name\x01v\x02"
        for name in (b"CONTENT_TYPE", b"MQTT_QOS"):
            properties = put_property(properties, name, b"1")
        await stomp.publish("a", b"plain", properties)
        (message,) = await talk.messages(1)
        assert dict(message.headers) == {
            "subscription": "0",
            "message-id": message["message-id"],
            "destination": "/topic/a",
            "TAGS": "t",
            "KEYS": "k",
            "own name": "v",
            "content-type": "1",
            "content-length": "5",
            "timestamp": message["timestamp"],
        }


async def test_a_compressed_body_is_decompressed_and_a_damaged_one_is_left_out(tmp_path: Path) -> None:
    from martlet.records.compression import compress

    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/queue/a", "client")
        body, sys_flag = compress(b"x" * 5000)
        await stomp.publish("a", body, sys_flag=sys_flag)
        await stomp.publish("a", b"no zlib", sys_flag=sys_flag)
        await stomp.publish("a", b"plain")
        messages = await talk.messages(2)
        assert [message.body for message in messages] == [b"x" * 5000, b"plain"]
        assert stomp.context.statistics()["unreadable"] == 1
        await talk.ack(messages[1])
        await stomp.settle()
        assert stomp.broker.shared_groups.unsettled == 0


@pytest.mark.parametrize("header", ["activemq.noLocal", "no-local"])
@pytest.mark.parametrize("destination", [TOPIC, "/topic/mqtt/news/#"])
async def test_a_subscription_may_leave_out_what_its_connection_sends(
    tmp_path: Path, header: str, destination: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        one, two = await stomp.connect(), await stomp.connect()
        for talk in (one, two):
            await talk.subscribe(destination, **{header: "true"})
        await two.subscribe(destination, name="all")
        place = destination.replace("#", "today")
        await one.publish(place, b"1")
        await two.publish(place, b"2")
        assert [message.body for message in await one.rest()] == [b"2"]
        came = sorted((message["subscription"], message.body) for message in await two.rest())
        assert came == [("0", b"1"), ("all", b"1"), ("all", b"2")]


@pytest.mark.parametrize(("asked", "held"), [("0", HELD_MAX), ("4", 4), ("999999999", HELD_MAX)])
async def test_what_a_client_may_hold_of_a_topic_is_bounded(tmp_path: Path, asked: str, held: int) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(TOPIC, "client-individual", prefetch_count=asked)
        await talk.rest()
        (handler,) = stomp.context.clients
        (found,) = handler.described_subscriptions()
        assert (found["prefetch"], found["held"]) == (held, 0)


async def test_a_client_of_1_0_subscribes_twice_without_an_id(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(V1_0), await stomp.connect()
        for receipt in "12":
            await talk.send(talk.frame("SUBSCRIBE", destination="/topic/a", receipt=receipt))
            await talk.receipt(receipt)
        await sender.publish("/topic/a", b"x")
        assert await talk.bodies(2) == [b"x", b"x"]
        for number, left in enumerate((1, 0)):
            await talk.send(talk.frame("UNSUBSCRIBE", destination="/topic/a", receipt=f"end {number}"))
            await talk.receipt(f"end {number}")
            await sender.publish("/topic/a", b"y")
            await stomp.idle()
            await talk.send(talk.frame("SEND", destination="/topic/other", receipt=f"probe {number}"))
            await talk.receipt(f"probe {number}")
            assert len(talk.came) == left
            talk.came.clear()
        await talk.send(talk.frame("UNSUBSCRIBE", destination="/topic/a", receipt="none"))
        assert (await talk.error())["receipt-id"] == "none"


async def test_acknowledgements_of_two_subscriptions_without_an_id_are_their_own(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_0)
        for receipt in "12":
            await talk.send(talk.frame("SUBSCRIBE", destination="/queue/a", ack="client", receipt=receipt))
            await talk.receipt(receipt)
        await talk.publish("/queue/a", b"1", b"2")
        messages = await talk.messages(2)
        for message in reversed(messages):
            await talk.send(talk.frame("ACK", message_id=message["message-id"], receipt=message["message-id"]))
            await talk.receipt(message["message-id"])
        assert stomp.context.counters.acknowledged == 2


@pytest.mark.parametrize("destination", [TOPIC, "/topic/mqtt/a/b", "/topic/mqtt/a/#"])
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("store", [StoreConfig(flush="async"), StoreConfig(flush="sync")], ids=["async", "sync"])
async def test_what_is_sent_before_in_the_same_segment_does_not_come(
    tmp_path: Path, destination: str, durable: bool, store: StoreConfig
) -> None:
    async with stomp_broker(tmp_path, store=store) as stomp:
        talk, other = await stomp.connect(client_id="me"), await stomp.connect()
        target = destination.replace("#", "b")
        await other.subscribe(target)
        headers = {"activemq.subscriptionName": "kept"} if durable else {}
        await talk.send(
            talk.frame("SEND", b"before", destination=target),
            talk.frame("SUBSCRIBE", destination=destination, id="0", **headers),
            talk.frame("SEND", b"after", destination=target),
        )
        assert await talk.bodies(1) == [b"after"]
        assert await other.bodies(2) == [b"before", b"after"]
