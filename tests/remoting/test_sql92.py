"""SQL92 subscriptions of RocketMQ clients: pulls, heartbeats, and where a faulty expression is reported."""

import logging
from typing import Any

import orjson
import pytest
import trio
from trio.testing import MockClock

from martlet.config import fill
from martlet.records.codec import decode_records
from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, pull_ext, send_ext
from .pop_talk import ack, committed, let_pass, pop, pop_ext, run

PULL = RequestCode.PULL_MESSAGE
PATIENCE_S = 120.0
FAULTY = "price > 5 AND"
POINTS = "is invalid at character 14, its end: expected a value"


@pytest.fixture
async def sql(harness: Harness) -> Harness:
    """A harness with the plugin."""
    filters = Sql92Plugin(fill(Sql92Config, {}, "filter_sql92")).martlet_filters(harness.broker)
    harness.broker.filters = dict(filters)
    return harness


async def fill_prices(harness: Harness, topic: str, *prices: int, body_bytes: int = 1) -> None:
    client = harness.client()
    for price in prices:
        ext = send_ext(topic, 0, f"price\x01{price}\x02TAGS\x01T{price}\x02")
        assert (
            await client.ask(RequestCode.SEND_MESSAGE_V2, ext, b"%d" % price + b" " * body_bytes)
        ).code == ResponseCode.SUCCESS


def by_sql(topic: str, expression: str, offset: int = 0, **more: object) -> dict[str, object]:
    return pull_ext(topic, offset) | {"subscription": expression, "expressionType": "SQL92"} | more


def subscription(topic: str, expression: str, version: int = 1) -> list[dict[str, object]]:
    return [{"topic": topic, "subString": expression, "expressionType": "SQL92", "subVersion": version}]


def prices(answer: Command) -> list[int]:
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [int(record.body) for record in decode_records(answer.body)]


async def pull(client: FakeClient, topic: str, offset: int = 0) -> Command:
    """Pull by the subscription of group ``G``'s heartbeats."""
    return await client.ask(PULL, pull_ext(topic, offset, sysFlag="0", subVersion="1"))


async def test_a_pull_gets_the_matching_messages_and_continues_after_the_others(sql: Harness) -> None:
    topic = sql.topic("T")
    await fill_prices(sql, topic, 1, 10, 2, 20, 3)
    client = sql.client()
    answer = await client.ask(PULL, by_sql(topic, "price >= 10 AND TAGS <> 'T20'"))
    assert (prices(answer), answer.ext["nextBeginOffset"]) == ([10], "5")
    answer = await client.ask(PULL, by_sql(topic, "price > 100", 2))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_RETRY_IMMEDIATELY, "5")


async def test_a_subscription_from_a_heartbeat_selects(sql: Harness) -> None:
    topic = sql.topic("T")
    await fill_prices(sql, topic, 1, 10, 2, 20)
    client = sql.client()
    await client.heartbeat_with("c", "G", subscription(topic, "price > 5"))
    assert prices(await pull(client, topic)) == [10, 20]


async def test_a_held_pull_waits_for_a_message_that_matches(sql: Harness, autojump_clock: MockClock) -> None:
    topic = sql.topic("T")
    client = sql.client()
    opaque = client.send(PULL, by_sql(topic, "price > 5", sysFlag="6"))
    await sql.step()
    await fill_prices(sql, topic, 1, 2)
    assert client.answers == {}
    await fill_prices(sql, topic, 7)
    await sql.step()
    answer = client.answers.pop(opaque)
    assert (prices(answer), answer.ext["nextBeginOffset"]) == ([7], "3")


async def test_a_faulty_expression_is_refused_with_its_place(sql: Harness) -> None:
    topic = sql.topic("T")
    client = sql.client()
    answer = await client.ask(PULL, by_sql(topic, FAULTY))
    assert answer.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED
    assert str(answer.remark).startswith("parse the consumer's subscription failed; SQL92 expression")
    assert POINTS in str(answer.remark)
    body = orjson.dumps({"subscriptionData": subscription(topic, FAULTY)[0]})
    answer = await client.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body)
    assert (answer.code, POINTS in str(answer.remark)) == (ResponseCode.SUBSCRIPTION_PARSE_FAILED, True)


async def test_a_heartbeat_with_a_faulty_expression_joins_and_is_logged_once(
    sql: Harness, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    topic, other = sql.topic("T"), sql.topic("Other")
    await fill_prices(sql, topic, 1)
    await fill_prices(sql, other, 2)
    client = sql.client()
    with caplog.at_level(logging.WARNING, "martlet.remoting"):
        for _ in range(3):
            both = subscription(topic, FAULTY) + subscription(other, "price > 1")
            answer = await client.heartbeat_with("me@1", "G", both)
            assert answer.code == ResponseCode.SUCCESS
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("group 'G' gets no messages of topic 'T': client 'me@1' (JAVA) at 127.0.0.1:")
    assert FAULTY in line
    assert line.endswith(POINTS)
    assert sql.state.statistics()["faulty_subscriptions"] == 1
    answer = await pull(client, topic)
    assert (answer.code, POINTS in str(answer.remark)) == (ResponseCode.SUBSCRIPTION_PARSE_FAILED, True)
    assert prices(await pull(client, other)) == [2]
    # The corrected expression has a newer version.
    await client.heartbeat_with("me@1", "G", subscription(topic, "price > 0", 2))
    assert prices(await pull(client, topic)) == [1]


async def test_a_client_cannot_fill_the_log_with_faulty_expressions(
    sql: Harness, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    topic = sql.topic("T")
    client = sql.client()
    with caplog.at_level(logging.WARNING, "martlet.remoting"):
        for version in range(100):
            await client.heartbeat_with("c", "G", subscription(topic, FAULTY, version))
        assert len(caplog.records) == 1
        for version in range(1, 100):
            await client.heartbeat_with("c", "G", subscription(topic, f"{version} {FAULTY}", version + 100))
    assert len(caplog.records) <= 20
    assert sql.state.statistics()["faulty_subscriptions"] == 100


async def test_without_the_plugin_its_name_is_in_every_refusal(
    harness: Harness, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    topic = harness.topic("T")
    client = harness.client()
    says = (
        "The broker does not support consumer to filter message by SQL92; add plugin 'filter_sql92' to plugins.enabled"
    )
    answer = await client.ask(PULL, by_sql(topic, "a = 1"))
    assert (answer.code, str(answer.remark).startswith(says)) == (ResponseCode.SYSTEM_ERROR, True)
    body = orjson.dumps({"subscriptionData": subscription(topic, "a = 1")[0]})
    answer = await client.ask(RequestCode.CHECK_CLIENT_CONFIG, body=body)
    assert (answer.code, str(answer.remark).startswith(says)) == (ResponseCode.SYSTEM_ERROR, True)
    with caplog.at_level(logging.WARNING, "martlet.remoting"):
        await client.heartbeat_with("c", "G", subscription(topic, "a = 1"))
    assert says in caplog.text
    answer = await pull(client, topic)
    assert (answer.code, str(answer.remark).startswith(says)) == (ResponseCode.SYSTEM_ERROR, True)


async def test_expressions_that_differ_only_near_their_end_are_not_confused(sql: Harness) -> None:
    topic = sql.topic("T")
    await fill_prices(sql, topic, 7)
    client = sql.client()
    long = " OR ".join(["price = 1"] * 60)
    assert len(long) > 512
    for last, code in ((7, ResponseCode.SUCCESS), (8, ResponseCode.PULL_RETRY_IMMEDIATELY)):
        assert (await client.ask(PULL, by_sql(topic, f"{long} OR price = {last}"))).code == code


@pytest.mark.usefixtures("nothing_cached")
async def test_records_far_behind_the_tail_are_selected_in_a_thread(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async", "page_bytes": 4096, "cache_bytes": 0})
    harness.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(harness.broker))
    topic = harness.topic("T")
    await fill_prices(harness, topic, *range(40), body_bytes=1000)
    wanted = harness.broker.selection("SQL92", "price BETWEEN 10 AND 12", exact=False)
    assert (
        harness.store.readers.read_near(harness.store.queue(topic, 0), 0, 32, 1 << 20, None, wanted.predicate) is None
    )
    client = harness.client()
    opaque = client.send(PULL, by_sql(topic, "price BETWEEN 10 AND 12"))
    with trio.fail_after(PATIENCE_S):
        while opaque not in client.answers:
            await harness.step()
    assert prices(client.answers.pop(opaque)) == [10, 11, 12]


async def test_a_pop_gets_the_matching_messages_and_their_retries(
    sql: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(sql, nursery)
    topic = sql.topic("T", 1)
    await fill_prices(sql, topic, 1, 10, 2, 20, 3)
    client = sql.client()
    by_price: dict[str, Any] = {"expType": "SQL92", "exp": "price > 5"}
    ten, twenty = await pop(client, topic, **by_price)
    assert [int(message.body) for message in (ten, twenty)] == [10, 20]
    await ack(client, ten)
    assert committed(sql, topic) == 3, "the one that was skipped before the next is consumed with it"
    await let_pass(sql, 31)
    (again,) = await pop(client, topic, **by_price)
    assert (int(again.body), again.times) == (20, 1)
    await ack(client, again)
    assert await pop(client, topic, **by_price) == []
    assert committed(sql, topic) == 5
    answer = await client.ask(RequestCode.POP_MESSAGE, pop_ext(topic, expType="SQL92", exp=FAULTY))
    assert (answer.code, POINTS in str(answer.remark)) == (ResponseCode.SUBSCRIPTION_PARSE_FAILED, True)
