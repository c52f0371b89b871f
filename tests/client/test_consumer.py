"""A push consumer gets every message at least once, keeps its place, and shares with its group."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import trio
from trio.testing import MockClock

from martlet.records.codec import hash_code
from martlet_client import (
    BrokerError,
    ByConfig,
    ConsumeFrom,
    MessageModel,
    MessageQueue,
    Outcome,
    PushConsumer,
    ReceivedMessage,
    Sql,
)
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import decode_pull_header, decode_send_header
from martlet_remoting.wire.packets import Command

from .fake import Cluster, Reply
from .listening import PATIENCE_S, Listener, wait_for

GROUP = "G"

first = functools.partial(PushConsumer, consume_from=ConsumeFrom.FIRST)


def commits(cluster: Cluster, topic: str = "T") -> dict[int, int]:
    return {queue: offset for (_, name, queue), offset in cluster.broker.offsets.items() if name == topic}


async def test_every_message_is_consumed_and_committed(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in range(40):
        cluster.broker.put("T", number % 4, b"%d" % number)
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await listener.wait_count(40)
        await trio.sleep(6)
        assert commits(cluster) == {0: 10, 1: 10, 2: 10, 3: 10}
        cluster.broker.put("T", 0, b"more")
        await listener.wait_count(41)
    assert commits(cluster) == {0: 11, 1: 10, 2: 10, 3: 10}
    assert sorted(listener.bodies) == sorted([b"%d" % number for number in range(40)] + [b"more"])


async def test_group_goes_on_where_it_left(cluster: Cluster, autojump_clock: MockClock) -> None:
    for body in (b"0", b"1", b"2"):
        cluster.broker.put("T", 0, body)
    before = Listener()
    async with first(cluster.settings(), GROUP, before, {"T": "*"}):
        await before.wait_count(3)
    cluster.broker.put("T", 0, b"3")
    after = Listener()
    async with first(cluster.settings(), GROUP, after, {"T": "*"}):
        await after.wait_count(1)
    assert after.bodies == [b"3"]


@pytest.mark.parametrize(("start", "expected"), [(ConsumeFrom.LAST, [b"new"]), (ConsumeFrom.FIRST, [b"new", b"old"])])
async def test_new_group_starts_where_it_is_told(
    cluster: Cluster, autojump_clock: MockClock, start: ConsumeFrom, expected: list[bytes]
) -> None:
    cluster.broker.put("T", 0, b"old")
    listener = Listener()
    async with PushConsumer(cluster.settings(), GROUP, listener, {"T": "*"}, consume_from=start):
        await trio.sleep(1)
        cluster.broker.put("T", 0, b"new")
        await listener.wait_count(len(expected))
    assert sorted(listener.bodies) == expected


async def test_new_group_may_start_at_a_time(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"old")
    cluster.broker.put("T", 0, b"new")
    cluster.broker.overrides[RequestCode.SEARCH_OFFSET_BY_TIMESTAMP] = lambda command: Reply(
        0, {"offset": 1 if command.integer("timestamp") == 1_700_000_000_077 and command.integer("queueId") == 0 else 0}
    )
    listener = Listener()
    async with PushConsumer(
        cluster.settings(),
        GROUP,
        listener,
        {"T": "*"},
        consume_from=ConsumeFrom.TIMESTAMP,
        consume_from_ms=1_700_000_000_077,
    ):
        await listener.wait_count(1)
        await trio.sleep(1)
    assert listener.bodies == [b"new"]


async def test_only_subscribed_tags_are_delivered(cluster: Cluster, autojump_clock: MockClock) -> None:
    """The broker compares hashes: Aa and BB have the same, only the client can tell them apart."""
    assert hash_code(b"Aa") == hash_code(b"BB")
    for tag in ("Aa", "BB", "C", ""):
        cluster.broker.put("T", 0, tag.encode() or b"none", tag)
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "Aa || C"}):
        await listener.wait_count(2)
    assert sorted(listener.bodies) == [b"Aa", b"C"]
    assert commits(cluster)[0] == 4
    subscription = orjson.loads(cluster.broker.asked(RequestCode.HEART_BEAT)[0].body)["consumerDataSet"][0]
    (tags,) = [data for data in subscription["subscriptionDataSet"] if data["topic"] == "T"]
    assert (tags["tagsSet"], tags["codeSet"]) == (["Aa", "C"], [67, 2112])


async def test_sql_is_checked_with_the_broker_before_anything(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x", "ignored by the client")
    cluster.broker.overrides[RequestCode.CHECK_CLIENT_CONFIG] = lambda command: Reply()
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": Sql("price > 5")}):
        await listener.wait_count(1)
    (checked,) = cluster.broker.asked(RequestCode.CHECK_CLIENT_CONFIG)
    data = orjson.loads(checked.body)["subscriptionData"]
    assert (data["topic"], data["expressionType"], data["subString"]) == ("T", "SQL92", "price > 5")
    cluster.broker.overrides[RequestCode.CHECK_CLIENT_CONFIG] = lambda command: Reply(1, remark="no SQL92 here")
    with pytest.raises(BrokerError, match="no SQL92 here"):
        async with first(cluster.settings(), GROUP, listener, {"T": Sql("price > 5")}):
            pytest.fail("the consumer was opened")


async def test_subscriptions_may_change_while_consuming(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.topics["U"] = 2
    cluster.broker.put("T", 0, b"a", "A")
    cluster.broker.put("U", 0, b"u")
    listener = Listener()
    async with first(cluster.settings("me"), GROUP, listener, {"T": "A"}) as consumer:
        await listener.wait_count(1)
        await consumer.subscribe("U")
        await listener.wait_count(2)
        await consumer.subscribe("T", "B")
        await wait_for(lambda: sum(queue.topic == "T" for queue in consumer.assigned) == 4)
        for tag in ("A", "B"):
            cluster.broker.put("T", 0, tag.lower().encode() + b"2", tag)
        await listener.wait_count(3)
        await consumer.unsubscribe("T")
        await consumer.unsubscribe("never was")
        cluster.broker.put("T", 0, b"b3", "B")
        cluster.broker.put("U", 1, b"u2")
        await listener.wait_count(4)
        await trio.sleep(60)
        assert {queue.topic for queue in consumer.assigned} == {"U", "%RETRY%G"}
        told = orjson.loads(cluster.broker.asked(RequestCode.HEART_BEAT)[-1].body)["consumerDataSet"][0]
        assert {data["topic"] for data in told["subscriptionDataSet"]} == {"U", "%RETRY%G"}
    assert listener.bodies == [b"a", b"u", b"b2", b"u2"]
    assert commits(cluster)[0] == 3


def raising(message: ReceivedMessage) -> Outcome | None:
    if message.reconsume_times == 0:
        raise RuntimeError("not now")
    return None


def retrying(message: ReceivedMessage) -> Outcome | None:
    return Outcome.RETRY if message.reconsume_times == 0 else Outcome.SUCCESS


@pytest.mark.parametrize("outcome", [raising, retrying])
async def test_failed_message_comes_again(
    cluster: Cluster, autojump_clock: MockClock, outcome: Callable[[ReceivedMessage], Outcome | None]
) -> None:
    cluster.broker.put("T", 1, b"x")
    listener = Listener(outcome)
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}, max_reconsume_times=5, retry_delay_level=2):
        await listener.wait_count(2)
    assert [(message.topic, message.reconsume_times) for message in listener.messages] == [("T", 0), ("T", 1)]
    assert listener.messages[1].queue.topic == "%RETRY%G"
    (back,) = cluster.broker.asked(RequestCode.CONSUMER_SEND_MSG_BACK)
    assert (back.text("group"), back.integer("delayLevel"), back.integer("maxReconsumeTimes")) == ("G", 2, 5)
    assert commits(cluster)[1] == 1
    assert commits(cluster, "%RETRY%G") == {0: 1}


async def test_message_the_broker_will_not_take_back_goes_to_the_retry_topic(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    cluster.broker.put("T", 1, b"x", properties=b"UNIQ_KEY\x01ID\x02colour\x01red\x02")
    cluster.broker.overrides[RequestCode.CONSUMER_SEND_MSG_BACK] = lambda command: Reply(1, remark="no")
    listener = Listener(retrying)
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await listener.wait_count(2)
    again = listener.messages[1]
    assert (again.topic, again.reconsume_times, again.body, again.properties["colour"]) == ("T", 1, b"x", "red")
    assert (again.properties["ORIGIN_MESSAGE_ID"], again.properties["DELAY"]) == ("ID", "3")
    header = decode_send_header(cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)[0])
    assert (header.topic, header.reconsume_times, header.max_reconsume_times) == ("%RETRY%G", 1, 16)


async def test_message_nobody_takes_back_is_tried_again_here(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 1, b"x")
    cluster.broker.overrides[RequestCode.CONSUMER_SEND_MSG_BACK] = lambda command: Reply(1)
    cluster.broker.overrides[RequestCode.SEND_MESSAGE_V2] = lambda command: Reply(1)
    listener = Listener(retrying)
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await listener.wait_count(1)
        await trio.sleep(4)
        assert commits(cluster).get(1, 0) == 0
        await listener.wait_count(2)
    assert [message.reconsume_times for message in listener.messages] == [0, 1]
    assert commits(cluster)[1] == 1


async def test_damaged_message_is_given_back_and_not_delivered(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"good")
    cluster.broker.put("T", 0, b"damaged")
    records = cluster.broker.queues["T", 0]
    records[1] = records[1].replace(b"damaged", b"dam_ged")
    listener = Listener()
    given_back = cluster.broker.asked
    cluster.broker.overrides[RequestCode.CONSUMER_SEND_MSG_BACK] = lambda command: Reply()
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await listener.wait_count(1)
        await wait_for(lambda: len(given_back(RequestCode.CONSUMER_SEND_MSG_BACK)) == 1)
    assert listener.bodies == [b"good"]
    assert commits(cluster)[0] == 2


async def test_slow_listener_stops_the_pulls(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in range(500):
        cluster.broker.put("T", 0, b"%d" % number)
    release = trio.Event()

    async def slow(message: ReceivedMessage) -> None:
        await release.wait()

    async with first(
        cluster.settings(), GROUP, slow, {"T": "*"}, concurrency=3, cached_messages_max=50, pull_messages=20
    ) as consumer:
        await trio.sleep(60)
        assert consumer.statistics()["running"] == 3
        # A pull begins below the limit, and brings 20.
        assert 50 <= consumer.statistics()["cached"] < 70
        release.set()
        await wait_for(lambda: consumer.statistics()["succeeded"] == 500)
        assert consumer.statistics()["cached"] == 0


async def test_cached_bytes_are_limited_too(cluster: Cluster, autojump_clock: MockClock) -> None:
    for _ in range(100):
        cluster.broker.put("T", 0, b"x" * 10_000)

    async def stuck(message: ReceivedMessage) -> None:
        await trio.sleep(1)

    async with first(
        cluster.settings(), GROUP, stuck, {"T": "*"}, concurrency=1, cached_bytes_max=35_000, pull_messages=2
    ) as consumer:
        await trio.sleep(10)
        assert consumer.statistics()["cached"] in (4, 5)  # a pull begins below the limit and brings two


async def test_two_members_share_the_queues_and_one_inherits(cluster: Cluster, autojump_clock: MockClock) -> None:
    one, two = Listener(), Listener()
    async with first(cluster.settings("c1"), GROUP, one, {"T": "*"}) as left:
        await wait_for(lambda: len(left.assigned) == 5)
        async with first(cluster.settings("c2"), GROUP, two, {"T": "*"}) as right:
            mine = [MessageQueue("T", "broker-a", number) for number in range(4)]
            await wait_for(lambda: [q for q in left.assigned if q.topic == "T"] == mine[:2])
            await wait_for(lambda: [q for q in right.assigned if q.topic == "T"] == mine[2:])
            for number in range(40):
                cluster.broker.put("T", number % 4, b"%d" % number)
            await one.wait_count(20)
            await two.wait_count(20)
        await wait_for(lambda: [q for q in left.assigned if q.topic == "T"] == mine)
        cluster.broker.put("T", 3, b"last")
        await one.wait_count(21)
    assert sorted(one.bodies + two.bodies) == sorted([b"%d" % number for number in range(40)] + [b"last"])


async def test_allocation_is_the_callers_choice(cluster: Cluster, autojump_clock: MockClock) -> None:
    only = MessageQueue("T", "broker-a", 2)
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}, allocation=ByConfig([only])) as consumer:
        await wait_for(lambda: only in consumer.assigned)
        cluster.broker.put("T", 1, b"not mine")
        cluster.broker.put("T", 2, b"mine")
        await listener.wait_count(1)
    assert listener.bodies == [b"mine"]


async def test_lost_connection_is_made_again_and_the_broker_told(cluster: Cluster, autojump_clock: MockClock) -> None:
    listener = Listener()
    async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}):
        await wait_for(lambda: "me" in cluster.broker.members[GROUP])
        await cluster.broker.drop_connections()
        cluster.broker.put("T", 0, b"x")
        await listener.wait_count(1)
        assert "me" in cluster.broker.members[GROUP]


async def test_departure_is_complete_when_the_program_is_interrupted(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    cluster.broker.put("T", 0, b"x")
    listener = Listener()
    with trio.CancelScope() as scope:
        async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}):
            await listener.wait_count(1)
            scope.cancel()
            await trio.sleep_forever()
    assert commits(cluster)[0] == 1
    (gone,) = cluster.broker.asked(RequestCode.UNREGISTER_CLIENT)
    assert (gone.text("clientID"), gone.text("consumerGroup")) == ("me", "G")


async def test_close_waits_for_listeners_that_are_running(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x")
    started = trio.Event()

    async def listener(message: ReceivedMessage) -> None:
        started.set()
        await trio.sleep(2)

    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await started.wait()
    assert commits(cluster)[0] == 1


async def test_closing_consumer_takes_no_more_queues(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x")
    started, learned = trio.Event(), trio.Event()

    async def listener(message: ReceivedMessage) -> None:
        started.set()
        await trio.sleep(2)

    async def more_queues(consumer: PushConsumer) -> None:
        await trio.sleep(1)
        cluster.topics["T"] = 8
        assert len((await consumer.network.fetch_route("T")).read_queues("T")) == 8
        learned.set()

    async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}) as consumer:
        await started.wait()
        cluster.nursery.start_soon(more_queues, consumer)
    pulled = {command.integer("queueId") for command in cluster.broker.asked(RequestCode.PULL_MESSAGE)}
    assert learned.is_set()
    assert pulled == {0, 1, 2, 3}


async def test_moved_offset_is_followed(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x")
    cluster.broker.offsets["G", "T", 0] = 99
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await wait_for(lambda: commits(cluster)[0] == 1)
        cluster.broker.put("T", 0, b"y")
        await listener.wait_count(1)
    assert listener.bodies == [b"y"]


async def test_plain_function_listens_in_a_thread(cluster: Cluster) -> None:
    cluster.broker.put("T", 0, b"x")
    got: list[bytes] = []
    seen = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def listener(message: ReceivedMessage) -> None:
        got.append(message.body)
        token.run_sync_soon(seen.set)

    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        with trio.fail_after(PATIENCE_S):
            await seen.wait()
    assert got == [b"x"]


# Ordered consumption


async def test_ordered_queue_stands_still_on_a_failure(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in range(5):
        cluster.broker.put("T", 0, b"%d" % number)
    failures = iter([False, True, True])
    listener = Listener(lambda message: Outcome.RETRY if next(failures, False) else Outcome.SUCCESS)
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}, orderly=True, suspend_s=2.0):
        start = trio.current_time()
        await listener.wait_count(7)
        assert trio.current_time() - start >= 4.0
    assert listener.bodies == [b"0", b"1", b"1", b"1", b"2", b"3", b"4"]
    assert [message.reconsume_times for message in listener.messages][:4] == [0, 0, 1, 2]
    assert cluster.broker.asked(RequestCode.CONSUMER_SEND_MSG_BACK) == []
    assert commits(cluster)[0] == 5


async def test_ordered_queue_waits_for_its_lock(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x")
    key = GROUP, MessageQueue("T", "broker-a", 0)
    cluster.broker.locks[key] = "somebody"
    listener = Listener()
    async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}, orderly=True):
        await trio.sleep(50)
        assert listener.messages == []
        del cluster.broker.locks[key]
        await listener.wait_count(1)
        assert cluster.broker.locks[key] == "me"
    assert key not in cluster.broker.locks


async def test_ordered_queue_pauses_while_its_lock_is_lost(cluster: Cluster, autojump_clock: MockClock) -> None:
    key = GROUP, MessageQueue("T", "broker-a", 0)
    listener = Listener()
    async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}, orderly=True):
        await wait_for(lambda: cluster.broker.locks.get(key) == "me")
        cluster.broker.locks[key] = "somebody"
        await trio.sleep(31)
        cluster.broker.put("T", 0, b"x")
        await trio.sleep(60)
        assert listener.messages == []
        del cluster.broker.locks[key]
        await listener.wait_count(1)


async def test_ordered_message_is_given_up_at_the_limit(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"bad")
    cluster.broker.put("T", 0, b"good")
    listener = Listener(
        lambda message: Outcome.RETRY if message.queue.topic == "T" and message.body == b"bad" else None
    )
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}, orderly=True, max_reconsume_times=2):
        await listener.wait_count(5)
    assert [message.body for message in listener.messages if message.queue.topic == "T"] == [b"bad"] * 3 + [b"good"]
    header = decode_send_header(cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)[0])
    assert (header.topic, header.reconsume_times, header.max_reconsume_times) == ("%RETRY%G", 3, 2)


async def test_ordered_queue_is_handed_over_after_its_listener_ended(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    for number in range(3):
        cluster.broker.put("T", 3, b"%d" % number)
    running = 0

    async def listener(message: ReceivedMessage) -> None:
        nonlocal running
        running += 1
        assert running == 1, "two members were in the same queue"
        await trio.sleep(10)
        running -= 1
        done.append(message.body)

    done: list[bytes] = []
    async with first(cluster.settings("c1"), GROUP, listener, {"T": "*"}, orderly=True) as one:
        await wait_for(lambda: running == 1)
        async with first(cluster.settings("c2"), GROUP, listener, {"T": "*"}, orderly=True):
            await wait_for(lambda: len(one.assigned) < 5)
            await wait_for(lambda: len(set(done)) == 3)
    assert sorted(set(done)) == [b"0", b"1", b"2"]


# Broadcasting


async def test_broadcast_reaches_every_member(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x")
    one, two = Listener(), Listener(lambda message: Outcome.RETRY)
    async with (
        first(cluster.settings("c1"), GROUP, one, {"T": "*"}, model=MessageModel.BROADCASTING),
        first(cluster.settings("c2"), GROUP, two, {"T": "*"}, model=MessageModel.BROADCASTING),
    ):
        await one.wait_count(1)
        await two.wait_count(1)
        await trio.sleep(20)
    assert (one.bodies, two.bodies) == ([b"x"], [b"x"])
    assert cluster.broker.offsets == {}
    assert cluster.broker.asked(RequestCode.CONSUMER_SEND_MSG_BACK) == []


async def test_broadcast_offsets_are_kept_in_a_file(
    cluster: Cluster, autojump_clock: MockClock, tmp_path: Path
) -> None:
    for body in (b"before", b"after"):
        cluster.broker.put("T", 0, body)
        listener = Listener()
        async with first(
            cluster.settings(), GROUP, listener, {"T": "*"}, model=MessageModel.BROADCASTING, offsets_folder=tmp_path
        ):
            await listener.wait_count(1)
        assert listener.bodies == [body]
    table = fastjson.loads((tmp_path / "offsets.json").read_bytes())
    assert isinstance(table, dict)
    assert table["offsetTable"][MessageQueue("T", "broker-a", 0)] == 2


# What brokers ask


async def test_offset_reset_by_the_broker_jumps_back(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in range(4):
        cluster.broker.put("T", 0, b"%d" % number)
    listener = Listener()
    async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}):
        await listener.wait_count(4)
        body = fastjson.dumps({"offsetTable": {MessageQueue("T", "broker-a", 0): 2}})
        ext: dict[str, object] = {"topic": "T", "group": GROUP, "timestamp": 0, "isForce": True}
        await cluster.broker.members[GROUP]["me"].tell(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, body)
        await listener.wait_count(6)
    assert sorted(listener.bodies[4:]) == [b"2", b"3"]
    assert commits(cluster)[0] == 4


async def test_status_and_running_info_are_answered(cluster: Cluster, autojump_clock: MockClock) -> None:
    queue = MessageQueue("T", "broker-a", 0)
    cluster.broker.put("T", 0, b"x")
    listener = Listener()
    async with first(cluster.settings("me"), GROUP, listener, {"T": "A"}):
        await wait_for(lambda: "me" in cluster.broker.members[GROUP])
        await trio.sleep(1)
        connection = cluster.broker.members[GROUP]["me"]
        status = await connection.ask(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {"topic": "T", "group": GROUP})
        table = fastjson.loads(status.body)
        assert isinstance(table, dict)
        assert table["messageQueueTable"][queue] == 1
        ext: dict[str, object] = {"consumerGroup": GROUP, "clientId": "me"}
        info = fastjson.loads((await connection.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, ext)).body)
        assert isinstance(info, dict)
        assert info["mqTable"][queue]["commitOffset"] == 1
        assert info["properties"]["PROP_CONSUMEORDERLY"] == "false"
        ext["consumerGroup"] = "other"
        wrong = await connection.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
        assert wrong.code == ResponseCode.SYSTEM_ERROR
        unknown = await connection.ask(RequestCode.CHECK_TRANSACTION_STATE, {})
        assert unknown.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [(lambda message: None, "CR_SUCCESS"), (retrying, "CR_LATER"), (raising, "CR_THROW_EXCEPTION")],
)
async def test_one_message_is_consumed_directly(
    cluster: Cluster,
    autojump_clock: MockClock,
    outcome: Callable[[ReceivedMessage], Outcome | None],
    expected: str,
) -> None:
    cluster.broker.put("Elsewhere", 0, b"x")
    (record,) = cluster.broker.queues["Elsewhere", 0]
    listener = Listener(outcome)
    async with first(cluster.settings("me"), GROUP, listener, {"T": "*"}):
        await wait_for(lambda: "me" in cluster.broker.members[GROUP])
        connection = cluster.broker.members[GROUP]["me"]
        ext: dict[str, object] = {"consumerGroup": GROUP, "clientId": "me", "brokerName": "broker-a"}
        answer = await connection.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, ext, record)
    assert orjson.loads(answer.body)["consumeResult"] == expected
    assert listener.bodies == [b"x"]


async def test_pulls_say_what_the_broker_needs(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x")
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "A || B"}, pull_messages=7):
        await trio.sleep(1)
    pulls = [decode_pull_header(command) for command in cluster.broker.asked(RequestCode.PULL_MESSAGE)]
    begin = next(pull for pull in pulls if pull.topic == "T" and pull.queue_id == 0)
    assert (begin.offset, begin.messages_max, begin.sys_flag, begin.suspend_ms) == (0, 7, 2, 15_000)
    later = next(pull for pull in pulls if pull.topic == "T" and pull.offset == 1)
    assert (later.commit_offset, later.sys_flag) == (1, 3)
    assert {pull.expression for pull in pulls} == {""}, "brokers have it from heartbeats"


async def test_unknown_group_at_the_broker_is_mended_by_a_heartbeat(
    cluster: Cluster, autojump_clock: MockClock
) -> None:
    listener = Listener()
    refusals = iter([True])

    def refuse_once(command: Command) -> Reply | None:
        if next(refusals, False):
            return Reply(ResponseCode.SUBSCRIPTION_NOT_EXIST, remark="the consumer's group info not exist")
        del cluster.broker.overrides[RequestCode.PULL_MESSAGE]
        return Reply(ResponseCode.SYSTEM_BUSY)

    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await wait_for(lambda: bool(cluster.broker.asked(RequestCode.PULL_MESSAGE)))
        before = len(cluster.broker.asked(RequestCode.HEART_BEAT))
        cluster.broker.overrides[RequestCode.PULL_MESSAGE] = refuse_once
        cluster.broker.put("T", 0, b"x")
        await listener.wait_count(1)
        assert len(cluster.broker.asked(RequestCode.HEART_BEAT)) > before


async def test_a_consumer_may_start_before_its_brokers(cluster: Cluster, autojump_clock: MockClock) -> None:
    await cluster.stop()
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "*"}):
        await trio.sleep(100)
        cluster.restart()
        cluster.broker.put("T", 0, b"first")
        began = trio.current_time()
        await listener.wait_count(1)
        assert trio.current_time() - began <= 6


async def test_a_consumer_with_the_port_of_a_broker_does_not_start(cluster: Cluster, autojump_clock: MockClock) -> None:
    with pytest.raises(BrokerError, match="this is the port of a broker"):
        async with first(cluster.settings(name_server="a:1"), GROUP, Listener(), {"T": "*"}):
            pass


async def test_an_outage_is_one_line_and_its_end_another(
    cluster: Cluster, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener()
    async with first(cluster.settings(), GROUP, listener, {"T": "*", "U": "*"}):
        cluster.broker.put("T", 0, b"before")
        await listener.wait_count(1)
        for _ in range(2):
            caplog.clear()
            await cluster.stop()
            await trio.sleep(300)
            cluster.restart()
            cluster.broker.put("T", 1, b"after")
            await listener.wait_count(len(listener.bodies) + 1)
            await trio.sleep(60)
            lines = sorted(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
            assert [("again after" in line, line.split()[0]) for line in lines] == [
                (True, "broker"),
                (False, "broker"),
                (True, "name"),
                (False, "name"),
            ], lines
