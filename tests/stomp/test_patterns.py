"""Wildcards over topics: a subscription has the messages of all topics whose names match."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_0, StompBroker, StompClient, stomp_broker

from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_stomp.config import StompConfig
from martlet_stomp.outbound.patterns import compile_pattern
from martlet_stomp.wire.errors import StompError

NAMES = ["a", "a.b", "a.b.c", "a.b.c.d", "b", "b.a", "a/b", "ab.c"]


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("a.*", ["a.b"]),
        ("*.b", ["a.b"]),
        ("*.b.*", ["a.b.c"]),
        ("a.>", ["a", "a.b", "a.b.c", "a.b.c.d", "a/b"]),
        ("a.#", ["a", "a.b", "a.b.c", "a.b.c.d", "a/b"]),
        ("a.*.>", ["a.b", "a.b.c", "a.b.c.d"]),
        ("#.a", ["a", "b.a"]),
        ("#.c", ["a.b.c", "ab.c"]),
        ("a.#.d", ["a.b.c.d"]),
        ("#.b.#", ["a.b", "a.b.c", "a.b.c.d", "b", "b.a", "a/b"]),
        ("a/*", ["a/b"]),
        ("*", ["a", "b"]),
        (">", NAMES),
        ("#", NAMES),
    ],
)
def test_what_a_pattern_matches(pattern: str, matching: list[str]) -> None:
    matches = compile_pattern(pattern).fullmatch
    assert [name for name in NAMES if matches(name)] == matching


@pytest.mark.parametrize("pattern", ["a.>.b", "#.#.#.#"])
def test_a_pattern_that_cannot_be_understood_is_an_error(pattern: str) -> None:
    with pytest.raises(StompError):
        compile_pattern(pattern)


async def settled(stomp: StompBroker, talk: StompClient) -> list[tuple[str, bytes]]:
    """Return what has come, in the order of destinations."""
    await stomp.idle()
    return sorted((message["destination"], message.body) for message in await talk.rest())


@pytest.mark.parametrize("ack", ["auto", "client-individual"])
async def test_a_subscription_has_the_messages_of_topics_that_are_there_and_of_later_ones(
    tmp_path: Path, ack: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(), await stomp.connect()
        await sender.publish("/topic/orders.eu", b"before")
        await sender.publish("/topic/stock.eu", b"other")
        await talk.subscribe("/topic/orders.>", ack, "s")
        await sender.publish("/topic/orders.eu", b"1")
        await sender.publish("/topic/orders.us.ny", b"2", b"3")
        await sender.publish("/topic/stock.us", b"other")
        await sender.publish("/topic/orders.us.ny", b"4")
        messages = await talk.messages(4)
        assert {message["subscription"] for message in messages} == {"s"}
        assert sorted((message["destination"], message.body) for message in messages) == [
            ("/topic/orders.eu", b"1"),
            ("/topic/orders.us.ny", b"2"),
            ("/topic/orders.us.ny", b"3"),
            ("/topic/orders.us.ny", b"4"),
        ]
        if ack != "auto":
            await talk.ack(*messages)
        await talk.unsubscribe("s")
        await sender.publish("/topic/orders.eu", b"5")
        await sender.publish("/topic/orders.new", b"6")
        assert await settled(stomp, talk) == []


async def test_each_message_comes_once_to_each_subscription(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(), await stomp.connect()
        await talk.subscribe("/topic/a.*", name="0")
        await talk.subscribe("/topic/a.#", name="1")
        await sender.publish("/topic/a.b", b"x")
        messages = await talk.messages(2)
        assert sorted(message["subscription"] for message in messages) == ["0", "1"]
        assert await settled(stomp, talk) == []


async def test_a_topic_that_is_deleted_and_created_again_is_read_again(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, sender = await stomp.connect(), await stomp.connect()
        await talk.subscribe("/topic/a.>")
        for body in (b"1", b"2"):
            await sender.publish("/topic/a.b", body)
            assert await talk.bodies(1) == [body]
            assert stomp.broker.topics.delete("a%2Eb")
            await stomp.idle()
        await sender.publish("/topic/a.c", b"3")
        assert await talk.bodies(1) == [b"3"]


async def test_a_retroactive_subscription_has_what_the_topics_have(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish("/topic/a.b", b"1")
        await talk.subscribe("/topic/a.>", **{"activemq.retroactive": "true"})
        assert await talk.bodies(1) == [b"1"]


async def test_a_selector_counts_for_all_topics(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(stomp.broker))
        talk = await stomp.connect()
        await talk.publish("/topic/a.b", b"before")
        await talk.subscribe("/topic/a.>", selector="colour = 'red'")
        for topic in ("/topic/a.b", "/topic/a.c"):
            await talk.publish(topic, b"red", colour="red")
            await talk.publish(topic, b"blue", colour="blue")
        assert await settled(stomp, talk) == [("/topic/a.b", b"red"), ("/topic/a.c", b"red")]


async def test_topics_that_a_user_may_not_read_are_left_out(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect_as("root")
        for topic in ("/topic/a.open", "/topic/a.closed"):
            await sender.publish(topic, b"before")
        allowed = {"a%2Eopen", "a%2Enew", "probe"}

        def authorize(identity: object, action: str, name: str) -> bool:
            return getattr(identity, "name", "") == "root" or action == "publish" or name in allowed

        stomp.broker.rules.authorizers = (authorize,)
        talk = await stomp.connect_as("ann")
        await talk.subscribe("/topic/a.>")
        for topic in ("/topic/a.open", "/topic/a.closed", "/topic/a.new", "/topic/a.hidden"):
            await sender.publish(topic, b"x")
        assert await settled(stomp, talk) == [("/topic/a.new", b"x"), ("/topic/a.open", b"x")]


async def test_topics_of_the_broker_are_never_matched(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/>", name="all")
        await talk.subscribe("/temp-queue/mine", name="mine")
        await talk.publish("/temp-queue/mine", b"secret")
        for topic in ("%RETRY%g", "%DLQ%g", "rmq_sys_x"):
            stomp.broker.topics.ensure(topic, 1)
            await stomp.publish(topic, b"x")
        await stomp.idle()
        assert [(message["subscription"], message.body) for message in await talk.rest()] == [("mine", b"secret")]


@pytest.mark.parametrize(
    ("headers", "error"),
    [
        ({"destination": "/topic/a.>", "ack": "client"}, "cannot be cumulative"),
        ({"destination": "/topic/a.>", "durable": "true"}, "a durable subscription is to one topic"),
        ({"destination": "/topic/a.>", "browser": "true"}, "only a queue can be browsed"),
        ({"destination": "/topic/a.>.b"}, "is not at the end"),
        ({"destination": "/queue/a.>"}, "only SUBSCRIBE to a topic may have"),
    ],
)
async def test_what_a_subscription_with_wildcards_cannot_be_is_an_error(
    tmp_path: Path, headers: dict[str, str], error: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="0", receipt="r", **headers))
        found = await talk.error()
        assert (found["receipt-id"], error in found.body.decode()) == ("r", True), found.body
        await stomp.idle()
        assert not stomp.context.new_topics._table


async def test_an_id_is_used_once(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for first, second in (("/topic/a.>", "/topic/b"), ("/topic/b", "/topic/a.>"), ("/topic/a.>", "/topic/a.*")):
            talk = await stomp.connect()
            await talk.subscribe(first)
            await talk.send(talk.frame("SUBSCRIBE", id="0", destination=second, receipt="r"))
            assert "already" in (await talk.error())["message"]


async def test_a_client_of_1_0_ends_it_by_its_destination(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(V1_0)
        for command in ("SUBSCRIBE", "UNSUBSCRIBE"):
            await talk.send(talk.frame(command, destination="/topic/a.>", receipt=command))
            await talk.receipt(command)
        await talk.publish("/topic/a.b", b"x")
        await stomp.idle()
        await talk.send(talk.frame("SEND", destination="/topic/other", receipt="probe"))
        await talk.receipt("probe")
        assert talk.came == []


async def test_the_topics_of_a_connection_are_limited(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, StompConfig(subscriptions_max=3)) as stomp:
        sender = await stomp.connect()
        for number in range(4):
            await sender.publish(f"/topic/many.{number}", b"x")
        await sender.publish("/topic/few.0", b"x")
        talk = await stomp.connect()
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination="/topic/many.*", receipt="r"))
        error = await talk.error()
        assert (error["receipt-id"], "stomp.subscriptions_max" in error.body.decode()) == ("r", True)
        talk = await stomp.connect()
        await talk.subscribe("/topic/few.*")
        for number in range(1, 4):
            await sender.publish(f"/topic/few.{number}", b"x")
        assert "stomp.subscriptions_max" in (await talk.error()).body.decode()
        await stomp.idle()
        assert not stomp.context.new_topics._table


async def test_many_topics_are_begun_with_in_turns(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for number in range(300):
            stomp.broker.topics.ensure(f"t%2E{number}", 1)
        talk, sender = await stomp.connect(), await stomp.connect()
        await talk.subscribe("/topic/t.*")
        for number in range(280, 320):
            await sender.publish(f"/topic/t.{number}", b"x")
        messages = await talk.messages(40)
        assert {message["destination"] for message in messages} == {f"/topic/t.{number}" for number in range(280, 320)}
        talk.hang_up()
        await stomp.idle()
        assert not stomp.context.new_topics._known
