"""Temporary queues and topics: destinations of one connection, where others answer."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.stomp.test_selectors import selecting
from tests.wire_clients.stomp import V1_0, V1_2, stomp_broker

from martlet.access import Gate
from martlet.contracts import Identity
from martlet.message import Message
from martlet.store.append.items import AppendItem, AppendResult
from martlet_stomp.config import StompConfig
from martlet_stomp.wire.packets import Version

MINE = "/temp-queue/answers"

every_version = pytest.mark.parametrize("version", Version)


@every_version
async def test_a_request_is_answered(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(version), await stomp.connect(version)
        await server.subscribe("/queue/work")
        await client.subscribe(MINE, name="mine")
        await client.publish("/queue/work", b"question", reply_to=MINE, correlation_id="7")
        (question,) = await server.messages(1)
        assert question["reply-to"].startswith("/remote-temp-queue/")
        await server.publish(question["reply-to"], b"answer", correlation_id=question["correlation-id"], colour="red")
        (answer,) = await client.messages(1)
        assert answer.body == b"answer"
        assert {name: answer[name] for name in ("subscription", "destination", "correlation-id", "colour")} == {
            "subscription": "mine",
            "destination": MINE,
            "correlation-id": "7",
            "colour": "red",
        }
        assert "TAGS" not in answer.headers


async def test_replies_that_are_read_at_once_are_stored_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As other messages are: not one by one, also if their headers differ."""
    runs: list[int] = []
    publish_all = Gate.publish_all

    def counted(gate: Gate, items: Sequence[AppendItem | Message]) -> AppendResult:
        runs.append(len(items))
        return publish_all(gate, items)

    async with stomp_broker(tmp_path) as stomp:
        clients = [await stomp.connect() for _ in range(3)]
        server = await stomp.connect()
        await server.subscribe("/queue/work", name="work")
        for client in clients:
            await client.publish("/queue/work", b"question", reply_to=MINE)
        addresses = [question["reply-to"] for question in await server.messages(3)]
        frames = [
            server.frame("SEND", b"%d" % number, destination=addresses[number % 3], **{"correlation-id": str(number)})
            for number in range(90)
        ]
        alike = [server.frame("SEND", b"%d" % number, destination=addresses[0]) for number in range(90)]
        monkeypatch.setattr(Gate, "publish_all", counted)
        await server.send(*frames, server.frame("SEND", b"x", destination="/queue/other", receipt="r"))
        await server.receipt("r")
        await server.send(*alike, server.frame("SEND", b"y", destination=addresses[0], receipt="r"))
        await server.receipt("r")
        assert runs == [91, 91]
        assert await clients[1].bodies(30) == [b"%d" % number for number in range(1, 90, 3)]
        assert await clients[0].bodies(121) == [b"%d" % number for number in (*range(0, 90, 3), *range(90))] + [b"y"]


@pytest.mark.parametrize("mine", [MINE, "/temp-topic/answers"])
async def test_a_reply_to_is_enough_to_get_the_answers(tmp_path: Path, mine: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(), await stomp.connect()
        await server.subscribe("/queue/work")
        await client.publish("/queue/work", b"1", b"2", reply_to=mine)
        for question in await server.messages(2):
            await server.publish(question["reply-to"], b"answer " + question.body)
        answers = await client.messages(2)
        # As with RabbitMQ, the subscription is called as the destination is.
        assert [(answer["subscription"], answer["destination"]) for answer in answers] == [(mine, mine)] * 2
        assert [answer.body for answer in answers] == [b"answer 1", b"answer 2"]
        await client.unsubscribe(mine)
        await server.publish(question["reply-to"], b"too late")
        assert await client.rest() == []


async def test_a_subscription_replaces_the_one_that_reply_to_made(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.publish("/queue/work", b"question", reply_to=MINE)
        await client.subscribe(MINE, name="own")
        await client.publish("/queue/work", b"question", reply_to=MINE)
        await client.publish(MINE, b"answer")
        assert [message["subscription"] for message in await client.rest()] == ["own"]


async def test_no_reply_is_lost_when_a_subscription_replaces_the_one_that_reply_to_made(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(), await stomp.connect()
        await server.subscribe("/queue/work")
        await client.publish("/queue/work", b"question", reply_to=MINE)
        (question,) = await server.messages(1)
        replies = [b"%d" % number + b"x" * 4000 for number in range(300)]
        await server.publish(question["reply-to"], *replies[:200])
        await stomp.idle()  # the client takes some of them, and reads nothing more
        await client.send(client.frame("SUBSCRIBE", id="own", destination=MINE))
        await server.publish(question["reply-to"], *replies[200:])
        messages = await client.messages(len(replies))
        assert [message.body for message in messages] == replies
        assert {message["subscription"] for message in messages} == {MINE, "own"}


async def test_the_id_of_the_subscription_that_reply_to_makes_must_be_free(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe("/queue/other", name=MINE)
        await client.send(client.frame("SEND", b"x", destination="/queue/work", reply_to=MINE, receipt="r"))
        error = await client.error()
        assert error["receipt-id"] == "r"
        assert b"use another id" in error.body
        assert stomp.records("work") == []


@pytest.mark.parametrize("topic", ["stomp_temp", "mqtt"])
async def test_they_go_on_after_an_administrator_deleted_their_topic(tmp_path: Path, topic: str) -> None:
    destination = MINE if topic == "stomp_temp" else "/topic/mqtt/a"
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe(destination)
        await client.publish(destination, b"1")
        assert await client.bodies(1) == [b"1"]
        for body in (b"2", b"3"):
            stomp.broker.topics.delete(topic)
            await client.publish(destination, body)
            assert await client.bodies(1) == [body]


@pytest.mark.parametrize("prefix", ["/temp-queue/", "/temp-topic/"])
async def test_their_names_are_limited(tmp_path: Path, prefix: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        longest = prefix + "ä" * 127
        client, server = await stomp.connect(), await stomp.connect()
        await server.subscribe("/queue/work")
        headers = {f"header{number}": "x" * 3900 for number in range(8)}
        await client.publish("/queue/work", b"question", reply_to=longest, correlation_id="1", **headers)
        (question,) = await server.messages(1)
        assert {name: question[name] for name in headers} == headers
        await server.publish(question["reply-to"], b"answer", correlation_id="1")
        assert (await client.messages(1))[0]["destination"] == longest
        for frame in (
            client.frame("SUBSCRIBE", id="0", destination=f"{longest}ö", receipt="r"),
            client.frame("SEND", destination=f"{longest}ö", receipt="r"),
            client.frame("SEND", destination="/queue/work", reply_to=f"{longest}ö", receipt="r"),
        ):
            client = await stomp.connect()
            await client.send(frame)
            error = await client.error()
            assert error["receipt-id"] == "r"
            assert b"use at most 255" in error.body


async def test_subscriptions_for_replies_count_like_others(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, StompConfig(subscriptions_max=2)) as stomp:
        client = await stomp.connect()
        await client.publish("/queue/work", b"x", reply_to=MINE)
        await client.publish("/queue/work", b"x", reply_to=MINE)
        await client.subscribe("/queue/other")
        await client.send(client.frame("SEND", b"x", destination="/queue/work", reply_to="/temp-topic/a", receipt="r"))
        error = await client.error()
        assert error["receipt-id"] == "r"
        assert b"stomp.subscriptions_max" in error.body


async def test_a_temporary_queue_has_one_subscription(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe(MINE, name="0")
        await client.send(client.frame("SUBSCRIBE", id="1", destination=MINE, receipt="r"))
        error = await client.error()
        assert error["receipt-id"] == "r"
        assert "already" in error["message"]


async def test_all_subscriptions_of_a_temporary_topic_get_each_message(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe("/temp-topic/a", name="0")
        await client.subscribe("/temp-topic/a", name="1")
        await client.publish("/temp-topic/a", b"x")
        assert sorted(message["subscription"] for message in await client.rest()) == ["0", "1"]


async def test_names_are_those_of_the_connection(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        one, two = await stomp.connect(), await stomp.connect()
        await one.subscribe(MINE)
        await two.subscribe(MINE)
        await one.subscribe("/temp-topic/answers", name="topic")
        await one.publish(MINE, b"one")
        await two.publish(MINE, b"two")
        assert [message.body for message in await one.rest()] == [b"one"]
        assert [message.body for message in await two.rest()] == [b"two"]


async def test_names_may_have_any_characters(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(), await stomp.connect()
        names = [f"/temp-queue/{name}" for name in ("a/b", "+", "#", "a b", "ä:%2F", "$x", "a/+/#")]
        for name in names:
            await client.publish("/queue/work", b"", reply_to=name)
        await server.subscribe("/queue/work")
        for question in await server.messages(len(names)):
            await server.publish(question["reply-to"], b"answer")
        assert [answer["destination"] for answer in await client.rest()] == names


async def test_what_is_for_a_connection_that_is_gone_is_dropped(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(), await stomp.connect()
        await client.publish("/queue/work", b"question", reply_to=MINE)
        await client.disconnect()
        await server.subscribe("/queue/work")
        (question,) = await server.messages(1)
        await server.publish(question["reply-to"], b"answer")  # its receipt comes
        await server.send(
            server.frame("BEGIN", transaction="t"),
            server.frame("SEND", b"answer", destination=question["reply-to"], transaction="t"),
            server.frame("SEND", b"done", destination="/queue/done", transaction="t"),
            server.frame("COMMIT", transaction="t", receipt="committed"),
        )
        await server.receipt("committed")
        assert stomp.context.statistics()["unanswered"] == 2
        assert stomp.records(stomp.context.config.temporary) == []
        assert [record.body for record in stomp.records("done")] == [b"done"]


async def test_answers_can_be_sent_in_a_transaction(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(), await stomp.connect()
        await server.subscribe("/queue/work", "client-individual")
        await client.publish("/queue/work", b"question", reply_to=MINE)
        (question,) = await server.messages(1)
        await server.send(
            server.frame("BEGIN", transaction="t"),
            server.frame("SEND", b"answer", destination=question["reply-to"], transaction="t"),
            server.settling("ACK", question, transaction="t"),
        )
        assert await server.rest() == await client.rest() == []
        await server.send(server.frame("COMMIT", transaction="t", receipt="committed"))
        await server.receipt("committed")
        assert [answer.body for answer in await client.rest()] == [b"answer"]


async def test_a_request_can_be_sent_in_a_transaction(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(), await stomp.connect()
        await server.subscribe("/queue/work")
        await client.send(
            client.frame("BEGIN", transaction="t"),
            client.frame("SEND", b"question", destination="/queue/work", reply_to=MINE, transaction="t"),
            client.frame("COMMIT", transaction="t"),
        )
        (question,) = await server.messages(1)
        await server.publish(question["reply-to"], b"answer")
        assert await client.bodies(1) == [b"answer"]


@every_version
@pytest.mark.parametrize("ack", ["client", "client-individual"])
async def test_a_client_may_hold_as_many_messages_as_it_says(tmp_path: Path, version: Version, ack: str) -> None:
    if version is V1_0 and ack == "client-individual":
        return
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect(version)
        await client.subscribe(MINE, ack, prefetch_count="2")
        await client.publish(MINE, *[b"%d" % number for number in range(5)])
        first = await client.rest()
        assert [message.body for message in first] == [b"0", b"1"]
        await client.ack(*(first[1:] if ack == "client" else first))
        assert [message.body for message in await client.rest()] == [b"2", b"3"]


@pytest.mark.parametrize("how", ["NACK", "abort", "commit"])
async def test_an_acknowledgement_only_makes_room_for_more(tmp_path: Path, how: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe(MINE, "client-individual", prefetch_count="1")
        await client.publish(MINE, b"1", b"2")
        (message,) = await client.rest()
        assert message.body == b"1"
        if how == "NACK":
            await client.nack(message)
        else:
            await client.send(
                client.frame("BEGIN", transaction="t"),
                client.settling("ACK", message, transaction="t"),
                client.frame(how.upper(), transaction="t"),
            )
        assert [message.body for message in await client.rest()] == ([] if how == "abort" else [b"2"])


async def test_answers_can_be_selected(tmp_path: Path) -> None:
    async with selecting(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe(MINE, selector="colour = 'red'")
        for colour in ("blue", "red", "green"):
            await client.publish(MINE, colour.encode(), colour=colour)
        assert [message.body for message in await client.rest()] == [b"red"]


async def test_only_its_connection_reads_it(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client, server = await stomp.connect(), await stomp.connect()
        await client.publish("/queue/work", b"question", reply_to=MINE)
        await server.subscribe("/queue/work")
        (question,) = await server.messages(1)
        await server.send(server.frame("SUBSCRIBE", id="1", destination=question["reply-to"]))
        assert b"only its owner reads it" in (await server.error()).body


@pytest.mark.parametrize("destination", ["/topic/stomp_temp", "/queue/stomp_temp", "stomp_temp"])
async def test_the_topic_with_all_of_them_is_out_of_reach(tmp_path: Path, destination: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for command, headers in (
            ("SUBSCRIBE", {"id": "0"}),
            ("SUBSCRIBE", {"id": "0", "browser": "true"}),
            ("SEND", {}),
        ):
            client = await stomp.connect()
            await client.subscribe(MINE, name="mine")
            await client.send(client.frame(command, destination=destination, receipt="r", **headers))
            error = await client.error()
            assert error["receipt-id"] == "r"
            assert b"use /temp-queue/NAME" in error.body


@pytest.mark.parametrize("name", ["a", "a/", "/a", "a/b/c", "a/+", "a/#"])
async def test_an_address_that_the_broker_did_not_make_is_an_error(tmp_path: Path, name: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.send(client.frame("SEND", b"x", destination=f"/remote-temp-queue/{name}", receipt="r"))
        error = await client.error()
        assert error["receipt-id"] == "r"


async def test_users_need_permissions(tmp_path: Path) -> None:
    """Ann may read her temporary destinations, bob may answer her, and eve nothing."""
    allowed = {
        ("anonymous", "publish", "work"),
        ("ann", "publish", "work"),
        ("bob", "read", "work"),
        ("eve", "read", "work"),
    }

    def opinion(identity: Identity, action: str, name: str) -> bool | None:
        who = identity.name
        if (who, action, name) in allowed:
            return True
        if name.startswith("stomp_temp/ann/"):
            return {"ann": action == "read", "bob": action == "publish"}.get(who, False)
        return True if name == "$share/stomp/queue" else None

    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.authorizers = (opinion,)
        stomp.broker.topics.ensure("work", 1)
        ann, bob, eve = [await stomp.connect_as(name) for name in ("ann", "bob", "eve")]
        await ann.subscribe(MINE)
        await bob.subscribe("/queue/work")
        await ann.publish("/queue/work", b"question", reply_to=MINE)
        (question,) = await bob.messages(1)
        await bob.publish(question["reply-to"], b"answer")
        assert await ann.bodies(1) == [b"answer"]
        await eve.send(eve.frame("SEND", b"x", destination=question["reply-to"], receipt="r"))
        error = await eve.error()
        assert "may not publish" in error["message"]
        assert error["receipt-id"] == "r"
        eve = await stomp.connect_as("eve")
        await eve.send(eve.frame("SUBSCRIBE", id="0", destination=MINE))
        assert "may not subscribe to" in (await eve.error())["message"]


async def test_their_messages_do_not_come_after_a_restart(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.publish("/queue/work", b"question", reply_to=MINE)
        await client.publish(MINE, b"old")
    async with stomp_broker(tmp_path, seed=1) as stomp:  # with other sessions
        client, server = await stomp.connect(V1_2), await stomp.connect()
        await client.subscribe(MINE)
        await server.subscribe("/queue/work")
        (question,) = await server.messages(1)
        await server.publish(question["reply-to"], b"answer")
        await client.publish(MINE, b"new")
        assert [message.body for message in await client.rest()] == [b"new"]
