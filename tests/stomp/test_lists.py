"""Lists of destinations, as with ActiveMQ: a message goes to all of them, and a subscription has all of them."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_0, stomp_broker

from martlet_stomp.mapping.destinations import LIST_MAX, parse_destinations
from martlet_stomp.wire.errors import StompError

LIST = "/queue/a,/topic/b,/queue/c.d"
TOPICS = ("a", "b", "c%2Ed")


async def test_a_message_goes_to_all_destinations(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/b", name="b")
        await talk.publish(LIST, b"1", b"2", colour="red")
        for topic in TOPICS:
            assert [record.body for record in stomp.records(topic)] == [b"1", b"2"]
        assert [(message["destination"], message["colour"]) for message in await talk.messages(2)] == [
            ("/topic/b", "red")
        ] * 2
        assert stomp.context.counters.stored == 6


@pytest.mark.parametrize(("end", "bodies"), [("COMMIT", [b"x"]), ("ABORT", [])])
async def test_a_list_is_sent_to_in_a_transaction(tmp_path: Path, end: str, bodies: list[bytes]) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("BEGIN", transaction="t"))
        await talk.send(talk.frame("SEND", b"x", destination=LIST, transaction="t"))
        await talk.send(talk.frame(end, transaction="t", receipt="r"))
        await talk.receipt("r")
        for topic in TOPICS:
            assert [record.body for record in stomp.records(topic)] == bodies


async def test_all_destinations_get_a_message_or_none(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SEND", b"x", destination="/queue/a,/queue/%RETRY%g", receipt="r"))
        assert (await talk.error())["receipt-id"] == "r"
        assert stomp.records("a") == []

        def authorize(identity: object, action: str, name: str) -> bool:
            return name != "b"

        stomp.broker.rules.authorizers = (authorize,)
        talk = await stomp.connect()
        await talk.send(talk.frame("SEND", b"x", destination="/queue/a,/queue/b", receipt="r"))
        assert (await talk.error())["receipt-id"] == "r"
        assert stomp.records("a") == stomp.records("b") == []


@pytest.mark.parametrize("ack", ["auto", "client-individual"])
async def test_a_subscription_has_all_destinations(tmp_path: Path, ack: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(), await stomp.connect()
        await sender.publish("/queue/a", b"before")
        await talk.subscribe(LIST, ack, "s")
        for destination in LIST.split(","):
            await sender.publish(destination, b"x")
        messages = await talk.messages(4)
        assert {message["subscription"] for message in messages} == {"s"}
        assert sorted((message["destination"], message.body) for message in messages) == [
            ("/queue/a", b"before"),
            ("/queue/a", b"x"),
            ("/queue/c.d", b"x"),
            ("/topic/b", b"x"),
        ]
        if ack != "auto":
            await talk.ack(*messages)
        await talk.unsubscribe("s")
        await sender.publish("/queue/a", b"waits")
        await stomp.idle()
        assert await talk.rest() == []
        await talk.subscribe("/queue/a")
        assert await talk.bodies(1) == [b"waits"]


async def test_nothing_is_left_of_a_list_whose_client_is_gone(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        names = [f"q{number}" for number in range(LIST_MAX)]
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination=",".join(f"/queue/{name}" for name in names)))
        talk.hang_up()
        await stomp.idle()
        shared_groups = [
            stomp.broker.shared_groups.find(name, "queue", stomp.context.policy)
            for name in names
            if stomp.broker.topics.get(name) is not None
        ]
        assert [
            len(shared_group) for shared_group in shared_groups if shared_group is not None and len(shared_group)
        ] == []
        assert not stomp.context.clients


async def test_a_list_may_name_a_destination_twice(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/a,/topic/a")
        await talk.publish("/topic/a", b"x")
        await stomp.idle()
        assert [message.body for message in await talk.rest()] == [b"x"]


async def test_a_client_of_1_0_ends_it_by_the_list(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_0)
        for command in ("SUBSCRIBE", "UNSUBSCRIBE"):
            await talk.send(talk.frame(command, destination=LIST, receipt=command))
            await talk.receipt(command)
        assert stomp.subscriptions() == 0


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"destination": LIST, "ack": "client"}, "cannot be cumulative"),
        ({"destination": LIST, "browser": "true"}, "only a queue can be browsed"),
        ({"destination": "/topic/a,/topic/b", "durable": "true"}, "a durable subscription is to one topic"),
        ({"destination": "/topic/a,/topic/b.>"}, "has a wildcard"),
    ],
)
async def test_what_a_list_cannot_be_is_an_error(tmp_path: Path, headers: dict[str, str], error: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="0", receipt="r", **headers))
        found = await talk.error()
        assert (found["receipt-id"], error in found.body.decode()) == ("r", True), found.body


async def test_a_long_list_lets_others_have_their_turn(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        names = ",".join(f"/queue/q{number}" for number in range(LIST_MAX))
        frames = [talk.frame("SEND", b"x", destination=names) for _ in range(30)]
        waits = 0
        wait = stomp.broker.turns.wait

        async def counted() -> None:
            nonlocal waits
            waits += 1
            await wait()

        stomp.broker.turns.wait = counted  # type: ignore[method-assign]
        await talk.send(*frames, talk.frame("SEND", destination="/queue/end", receipt="r"))
        await talk.receipt("r")
        assert waits >= 2
        assert len(stomp.records("q99")) == 30


def test_lists_are_limited_and_of_queues_and_topics() -> None:
    assert len(parse_destinations(",".join(["/queue/a"] * LIST_MAX))) == LIST_MAX
    for text in (",".join(["/queue/a"] * (LIST_MAX + 1)), "/temp-queue/a,/queue/b"):
        with pytest.raises(StompError):
            parse_destinations(text)
    assert [each.name for each in parse_destinations("/topic/mqtt/a,/topic/b", ("mqtt",))] == ["a,/topic/b"]
    assert [each.topic for each in parse_destinations("/queue/a,b")] == ["a%2Cb"]
