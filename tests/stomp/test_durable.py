"""Durable subscriptions: messages of a topic wait for a client that is not connected."""

from pathlib import Path
from typing import Any

import pytest
from tests.wire_clients.stomp import V1_0, V1_2, StompBroker, StompClient, stomp_broker

from martlet_stomp.wire.packets import Version

TOPIC = "/topic/news"
BODIES = [b"%d" % number for number in range(6)]

every_version = pytest.mark.parametrize("version", Version)


async def activemq(
    stomp: StompBroker, version: Version = V1_2, ack: str = "client-individual", **more: Any
) -> StompClient:
    """Return a client with a durable subscription as with ActiveMQ."""
    talk = await stomp.connect(version, client_id="ann")
    await talk.subscribe(TOPIC, ack, **{"activemq.subscriptionName": "news", **more})
    return talk


async def rabbitmq(
    stomp: StompBroker, version: Version = V1_2, ack: str = "client-individual", **more: Any
) -> StompClient:
    """Return a client with a durable subscription as with RabbitMQ."""
    talk = await stomp.connect(version)
    await talk.subscribe(TOPIC, ack, "own name", durable="true", auto_delete="false", **more)
    return talk


kinds = pytest.mark.parametrize("subscriber", [activemq, rabbitmq])


@kinds
@every_version
async def test_messages_wait_for_the_client(tmp_path: Path, version: Version, subscriber: Any) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect()
        await sender.publish(TOPIC, b"before")
        talk = await subscriber(stomp, version)
        await sender.publish(TOPIC, *BODIES[:2])
        first, second = await talk.messages(2)
        assert (first["destination"], first.body, second.body) == (TOPIC, b"0", b"1")
        await talk.ack(first)
        await talk.disconnect()
        await sender.publish(TOPIC, *BODIES[2:4])
        talk = await subscriber(stomp, version)
        messages = await talk.messages(3)
        assert [(message.body, message.headers.get("redelivered")) for message in messages] == [
            (b"1", "true"),
            (b"2", None),
            (b"3", None),
        ]
        assert await talk.rest() == []


@kinds
@pytest.mark.parametrize("ack", ["auto", "client"])
async def test_they_wait_over_a_restart(tmp_path: Path, ack: str, subscriber: Any) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await subscriber(stomp, ack=ack)
        await talk.publish(TOPIC, *BODIES[:3])
        messages = await talk.messages(3)
        if ack == "client":
            await talk.ack(messages[1])
        await talk.disconnect()
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect()
        await sender.publish(TOPIC, *BODIES[3:])
        talk = await subscriber(stomp, ack=ack)
        left = BODIES[3:] if ack == "auto" else BODIES[2:]
        assert await talk.bodies(len(left)) == left


@kinds
async def test_plain_unsubscribe_keeps_it_and_durable_unsubscribe_ends_it(tmp_path: Path, subscriber: Any) -> None:
    async with stomp_broker(tmp_path) as stomp:
        name = "0" if subscriber is activemq else "own name"
        headers = {"activemq.subscriptionName": "news"} if subscriber is activemq else {"durable": "true"}
        talk = await subscriber(stomp)
        await talk.unsubscribe(name)
        await talk.publish(TOPIC, b"1")
        assert await talk.rest() == []
        talk.hang_up()
        talk = await subscriber(stomp)
        assert await talk.bodies(1) == [b"1"]
        await talk.unsubscribe(name, **headers)
        await talk.publish(TOPIC, b"2")
        talk.hang_up()
        talk = await subscriber(stomp)
        assert await talk.rest() == []
        await talk.publish(TOPIC, b"3")
        assert await talk.bodies(1) == [b"3"]


@kinds
async def test_it_can_be_ended_without_being_used(tmp_path: Path, subscriber: Any) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await subscriber(stomp)
        await talk.disconnect()
        other = await stomp.connect(client_id="ann")
        await other.publish(TOPIC, b"1")
        headers = {"activemq.subscriptionName": "news"} if subscriber is activemq else {"durable": "true"}
        await other.unsubscribe("own name", **headers)
        talk = await subscriber(stomp)
        assert await talk.rest() == []


@kinds
async def test_another_connection_takes_it_over(tmp_path: Path, subscriber: Any) -> None:
    async with stomp_broker(tmp_path) as stomp:
        old = await subscriber(stomp)
        await old.publish(TOPIC, b"1")
        assert await old.bodies(1) == [b"1"]
        new = await subscriber(stomp)
        assert await new.bodies(1) == [b"1"]
        assert "another connection uses" in (await old.error())["message"]
        await new.publish(TOPIC, b"2")
        assert await new.bodies(1) == [b"2"]


@kinds
async def test_another_connection_ends_it(tmp_path: Path, subscriber: Any) -> None:
    async with stomp_broker(tmp_path) as stomp:
        old = await subscriber(stomp)
        other = await stomp.connect(client_id="ann")
        headers = {"activemq.subscriptionName": "news"} if subscriber is activemq else {"durable": "true"}
        await other.unsubscribe("own name", **headers)
        assert "another connection ended" in (await old.error())["message"]


async def test_a_connection_uses_it_once(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await activemq(stomp)
        again = {"id": "2", "destination": TOPIC, "activemq.subscriptionName": "news"}
        await talk.send(talk.frame("SUBSCRIBE", **again))
        assert "uses this durable subscription already" in (await talk.error())["message"]
        assert not stomp.context.durable


async def test_without_a_client_id_the_connections_of_a_user_have_one_by_that_name(tmp_path: Path) -> None:
    news = {"activemq.subscriptionName": "news"}
    async with stomp_broker(tmp_path) as stomp:
        first = await stomp.connect_as("ann")
        await first.subscribe(TOPIC, **news)
        other = await stomp.connect_as("bob")
        await other.subscribe(TOPIC, **news)
        second = await stomp.connect_as("ann")
        await second.subscribe(TOPIC, **news)
        assert "another connection uses its durable subscription" in (await first.error())["message"]
        await second.publish(TOPIC, b"1")
        for talk in (second, other):
            assert await talk.bodies(1) == [b"1"]


async def test_names_of_other_clients_and_other_topics_are_others(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks = []
        for client_id in ("ann", "bob", "ann/news", ""):
            talk = await stomp.connect(client_id=client_id)
            await talk.subscribe(TOPIC, **{"activemq.subscriptionName": "news"})
            talks.append(talk)
        await talks[0].subscribe("/topic/other", name="2", **{"activemq.subscriptionName": "news"})
        await talks[0].subscribe(TOPIC, name="3", **{"activemq.subscriptionName": "bob"})
        await talks[0].publish(TOPIC, b"1")
        assert await talks[0].bodies(2) == [b"1"] * 2
        for talk in talks[1:]:
            assert await talk.bodies(1) == [b"1"]


async def test_without_auto_delete_false_it_is_durable_and_with_true_it_is_not(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for auto_delete, is_kept in (("", True), ("true", False)):
            headers = {"durable": "true"} | ({"auto_delete": auto_delete} if auto_delete else {})
            talk = await stomp.connect()
            await talk.subscribe(TOPIC, name=f"s{auto_delete}", **headers)
            await talk.disconnect()
            talk = await stomp.connect()
            await talk.publish(TOPIC, b"1")
            await talk.subscribe(TOPIC, name=f"s{auto_delete}", **headers)
            assert [message.body for message in await talk.rest()] == [b"1"] * is_kept


async def test_a_queue_needs_no_durable_subscription(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        one, two = await stomp.connect(V1_0, client_id="ann"), await stomp.connect(client_id="ann")
        for talk in (one, two):
            await talk.subscribe("/queue/a", durable="true", **{"activemq.subscriptionName": "news"})
        await one.publish("/queue/a", *BODIES)
        messages = [*await one.rest(), *await two.rest()]
        assert sorted(message.body for message in messages) == BODIES


async def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(client_id="x" * 500)
        headers = {"id": "1", "destination": TOPIC, "activemq.subscriptionName": "y" * 500}
        await talk.send(talk.frame("SUBSCRIBE", **headers))
        assert "shorten them" in (await talk.error()).body.decode()
