"""The pure-Python client against the target, and beside the Java client in one group."""

import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace
from tests.client.listening import PATIENCE_S, Listener, wait_for, wait_until

from martlet_client import (
    Admin,
    ClientSettings,
    ConsumeFrom,
    Message,
    MessageModel,
    MessageNotFound,
    MessageRefused,
    Outcome,
    PopConsumer,
    Producer,
    PullConsumer,
    PullStatus,
    PushConsumer,
    ReceivedMessage,
    RouteNotFound,
    SendFailed,
    SendStatus,
    select_by_hash,
)
from martlet_remoting.wire.codes import RequestCode

from .conftest import RocketMQ, Target
from .fetch import CLIENT_VERSIONS
from .java import Java, Jvm
from .martlet_process import Martlet
from .other_clients import Program, Run, consume_words, deliveries
from .process import eventually

Name = Callable[[str], str]


def patient(target: Target) -> ClientSettings:
    """Settings of clients that wait for an answer: 3 s are too short when a busy machine stalls."""
    return ClientSettings(
        target.name_server, request_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S, close_timeout_s=PATIENCE_S
    )


def producer_of(target: Target, group: str, default_queues: int = 4) -> Producer:
    return Producer(patient(target), group, send_timeout_s=PATIENCE_S, default_queues=default_queues)


async def fill(target: Target, topic: str, count: int, queues: int = 4, tags: str = "") -> None:
    """Create *topic* and send *count* messages to it."""
    async with Admin(patient(target)) as admin, producer_of(target, "fill") as producer:
        await admin.create_topic(topic, queues=queues)
        for number in range(count):
            await producer.send(Message(topic, b"%d" % number, tags=tags, keys=f"key{number}"))


async def test_popped_messages_are_acknowledged_or_come_again(target: Target, name: Name) -> None:
    topic, group = name("popped"), name("group")
    await fill(target, topic, 20, queues=2)
    wanted = {b"%d" % number for number in range(20)}
    done: Counter[bytes] = Counter()
    again: set[bytes] = set()
    async with PopConsumer(patient(target), group) as consumer:
        while set(done) != wanted:
            found = await consumer.receive(topic, messages_max=8, invisible_s=60, wait_s=5)
            failed = [each for each in found if each.body in (b"3", b"4") and not each.message.reconsume_times]
            again |= {each.body for each in found if each.message.reconsume_times}
            for each in failed:
                assert (await consumer.change_invisible(each, 1)).handle != each.handle
            finished = [each for each in found if each not in failed]
            await consumer.ack(*finished)
            done.update(each.body for each in finished)
        assert again == {b"3", b"4"}
        assert done == Counter(wanted)


async def test_messages_popped_in_order_wait_for_earlier_ones(target: Target, name: Name) -> None:
    topic = name("ordered")
    await fill(target, topic, 3, queues=1)
    async with PopConsumer(patient(target), name("group")) as consumer:
        receive = partial(consumer.receive, topic, messages_max=1, invisible_s=60, in_order=True)
        [first] = await receive()
        assert (first.body, await receive()) == (b"0", [])
        await consumer.change_invisible(first, 1)
        [first] = await receive(wait_s=20)
        assert first.body == b"0"
        for expected in (b"1", b"2"):
            await consumer.ack(first)
            [first] = await receive()
            assert first.body == expected


async def test_a_popped_message_that_is_never_acknowledged_becomes_a_dead_letter(
    target: Target, target_kind: str, name: Name
) -> None:
    topic, group = name("poisoned"), name("group")
    await fill(target, topic, 1, queues=1)
    async with (
        Admin(patient(target)) as admin,
        PopConsumer(patient(target), group) as consumer,
        PullConsumer(patient(target), name("dead")) as reader,
    ):
        await admin.create_group(group, retry_max_times=1)
        times = []
        for _ in range(2):
            [popped] = await consumer.receive(topic, invisible_s=60, wait_s=20)
            times.append(popped.message.reconsume_times)
            await consumer.change_invisible(popped, 0.1)
        assert times == [0, 1]
        if target_kind == "rocketmq":  # it delivers the message without end
            assert await consumer.receive(topic, invisible_s=60, wait_s=20)
            return

        async def dead_lettered() -> bool:
            return [message.body for message in await dead_letters(reader, group)] == [b"0"]

        await wait_until(dead_lettered)
        assert await consumer.receive(topic) == []


async def test_every_kind_of_send_is_read_back(target: Target, name: Name) -> None:
    topic = name("kinds")
    await fill(target, topic, 0)
    async with producer_of(target, "kinds") as producer:
        plain = await producer.send(Message(topic, b"plain", tags="A", properties={"colour": "r\u00f6t"}))
        large = await producer.send(Message(topic, b"large" * 10_000))
        chosen = await producer.send(Message(topic, b"chosen"), selector=select_by_hash, argument=7)
        batch = await producer.send_batch([Message(topic, b"batch%d" % number) for number in range(3)])
        await producer.send_oneway(Message(topic, b"oneway"))
        assert {plain.status, large.status, chosen.status, batch.status} == {SendStatus.OK}
    listener = Listener()
    async with PushConsumer(patient(target), name("kinds"), listener, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
        await listener.wait_count(7)
    expected = [b"plain", b"large" * 10_000, b"chosen", b"batch0", b"batch1", b"batch2", b"oneway"]
    assert Counter(listener.bodies) == Counter(expected)
    found = {message.body: message for message in listener.messages}
    assert found[b"plain"].message_id == plain.message_id
    assert found[b"plain"].offset_message_id == plain.offset_message_id
    assert (found[b"plain"].tags, found[b"plain"].properties["colour"]) == ("A", "r\u00f6t")
    assert found[b"chosen"].queue == chosen.queue
    assert [found[b"batch%d" % number].queue_offset for number in range(3)] == [
        batch.queue_offset + number for number in range(3)
    ]


async def test_unknown_topic_is_created_by_the_first_message(target: Target, name: Name) -> None:
    topic = name("made")
    async with producer_of(target, "made", default_queues=3) as producer:
        await producer.send(Message(topic, b"x"))
    with trio.fail_after(PATIENCE_S):
        async with Admin(patient(target)) as admin:
            while True:
                try:
                    route = await admin.topic_route(topic)
                except RouteNotFound:
                    await trio.sleep(0.1)
                else:
                    break
    assert len(route.write_queues(topic)) == 3


async def test_tags_select(target: Target, name: Name) -> None:
    topic = name("tags")
    await fill(target, topic, 5, tags="Aa")
    await fill(target, topic, 5, tags="BB")
    listener = Listener()
    async with PushConsumer(patient(target), name("tags"), listener, {topic: "BB"}, consume_from=ConsumeFrom.FIRST):
        await listener.wait_count(5)
    assert {message.tags for message in listener.messages} == {"BB"}


async def test_members_share_and_inherit(target: Target, name: Name) -> None:
    topic, group = name("share"), name("share")
    await fill(target, topic, 0)
    one, two = Listener(), Listener()
    async with PushConsumer(patient(target), group, one, {topic: "*"}) as left:
        async with PushConsumer(patient(target), group, two, {topic: "*"}) as right:
            for member in (left, right):
                await wait_for(lambda member=member: sum(q.topic == topic for q in member.assigned) == 2)  # type: ignore[misc]
            await fill(target, topic, 40)
            await wait_for(lambda: len(one.places | two.places) == 40)
            assert min(len(one.places), len(two.places)) >= 10
        await wait_for(lambda: sum(q.topic == topic for q in left.assigned) == 4)
        await fill(target, topic, 4)
        await wait_for(lambda: len(one.places | two.places) == 44)


async def test_java_and_python_members_share_a_group(target: Target, newest: Java, name: Name) -> None:
    topic, group = name("both"), name("both")
    await fill(target, topic, 0)
    mine = Listener()
    async with PushConsumer(patient(target), group, mine, {topic: "*"}) as python:
        java = await trio.to_thread.run_sync(newest.push, group, topic)

        async def halved() -> bool:
            theirs = {queue.queue for queue in await trio.to_thread.run_sync(java.queues) if queue.topic == topic}
            ours = {queue.queue_id for queue in python.assigned if queue.topic == topic}
            return len(ours) == len(theirs) == 2 and ours | theirs == {0, 1, 2, 3}

        await wait_until(halved)
        await fill(target, topic, 40)
        wanted = {b"%d" % number for number in range(40)}
        await wait_for(lambda: {*mine.bodies, *(message.body for message in java.seen)} == wanted)
        assert Counter(mine.bodies + [message.body for message in java.seen]) == Counter(wanted)
        # What it did last, the Java client may not have told yet when it goes.
        await trio.to_thread.run_sync(java.stop)
        await wait_for(lambda: sum(queue.topic == topic for queue in python.assigned) == 4)
        await fill(target, topic, 4)
        await wait_for(lambda: sum(message.queue_offset == 10 for message in mine.messages) == 4)


async def test_a_new_group_gets_all_of_a_topic_that_is_created_later(target: Target, name: Name) -> None:
    topic, group = name("later"), name("later")
    listener = Listener()
    async with PushConsumer(patient(target), group, listener, {topic: "*"}, consume_from=ConsumeFrom.LAST):
        await fill(target, topic, 10)
        await listener.wait_count(10)
    assert sorted(listener.bodies) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("start", ConsumeFrom)
async def test_a_new_group_gets_all_of_a_young_topic_wherever_it_starts(
    target: Target, name: Name, start: ConsumeFrom
) -> None:
    """The broker has offset 0 in memory, and says that the group is there."""
    topic, group = name("young"), name("young")
    await fill(target, topic, 10)
    in_an_hour_ms = int((time.time() + 3600) * 1000) if start is ConsumeFrom.TIMESTAMP else 0
    listener = Listener()
    async with PushConsumer(
        patient(target), group, listener, {topic: "*"}, consume_from=start, consume_from_ms=in_an_hour_ms
    ):
        await listener.wait_count(10)
    assert sorted(listener.bodies) == [b"%d" % number for number in range(10)]


async def test_a_reset_lets_a_new_group_skip_what_a_young_topic_holds(target: Target, name: Name) -> None:
    topic, group = name("skip"), name("skip")
    await fill(target, topic, 10, queues=2)
    async with Admin(patient(target)) as admin:
        await admin.create_group(group)
        assert sorted((await admin.reset_offsets(group, topic)).values()) == [5, 5]
    listener = Listener()
    async with PushConsumer(patient(target), group, listener, {topic: "*"}):
        await fill(target, topic, 4, queues=2)
        await listener.wait_count(4)
    assert {message.queue_offset for message in listener.messages} == {5, 6}


@pytest.fixture
def forgetful(target_kind: str, tmp_path: Path) -> Iterator[Target]:
    """A broker of its own with a log of small files, which it may delete at once."""
    broker: RocketMQ | Martlet
    if target_kind == "rocketmq":
        broker = RocketMQ(tmp_path, {"mappedFileSizeCommitLog": str(1 << 20), "fileReservedTime": "0"})
    else:
        ratios = {"disk_used_ratio_max": "0.0001", "disk_clean_ratio": "0.0001"}
        settings = {"segment_bytes": str(1 << 20), "retention_interval_ms": "100", **ratios}
        broker = Martlet(tmp_path, {f"store.{key}": value for key, value in settings.items()})
    yield broker
    broker.close()


async def lose_the_first(broker: Target, topic: str) -> None:
    """Create *topic* with one queue and 20 messages, and let the broker delete the first of them."""
    async with (
        Admin(patient(broker)) as admin,
        Producer(patient(broker), "fill", send_timeout_s=PATIENCE_S, compress_over_bytes=1 << 20) as producer,
        PullConsumer(patient(broker), "offsets") as offsets,
    ):
        await admin.create_topic(topic, queues=1)
        for _ in range(20):
            await producer.send(Message(topic, bytes(200_000)))
        (queue,) = await offsets.queues(topic)
        (address,) = (await admin.cluster()).masters().values()

        async def forgotten() -> bool:
            await admin.network.ask(address, RequestCode.DELETE_EXPIRED_COMMITLOG, {})
            return await offsets.min_offset(queue) > 0

        await wait_until(forgotten)


async def test_last_skips_what_a_queue_holds_that_has_lost_its_first_message(forgetful: Target, name: Name) -> None:
    topic = name("old")
    await lose_the_first(forgetful, topic)
    async with (
        producer_of(forgetful, "new") as producer,
        PullConsumer(patient(forgetful), name("last")) as offsets,
    ):
        (queue,) = await offsets.queues(topic)
        first, last = Listener(), Listener()

        async def begun() -> bool:
            return await offsets.committed(queue) == 20

        async with (
            PushConsumer(patient(forgetful), name("first"), first, {topic: "*"}, consume_from=ConsumeFrom.FIRST),
            PushConsumer(patient(forgetful), name("last"), last, {topic: "*"}, consume_from=ConsumeFrom.LAST),
        ):
            await wait_until(begun)
            await producer.send(Message(topic, b"new"))
            await last.wait_count(1)
            await wait_for(lambda: b"new" in first.bodies)
    assert last.bodies == [b"new"]
    assert 1 < len(first.messages) < 21


async def test_a_timestamp_start_skips_what_is_older(forgetful: Target, jvms: Callable[[str], Jvm], name: Name) -> None:
    topic = name("old")
    await lose_the_first(forgetful, topic)
    async with producer_of(forgetful, "new") as producer:
        older = await producer.send(Message(topic, b"older"))
        start_s = int(time.time()) + 1  # Java takes whole seconds
        await wait_until(passed(start_s))
        await producer.send(Message(topic, b"newer"))
    moment = time.strftime("%Y%m%d%H%M%S", time.localtime(start_s))
    listener = Listener()
    javas = [Java(jvms(version), forgetful.name_server) for version in CLIENT_VERSIONS]
    start = {"from": "TIMESTAMP", "from_time": moment}
    try:
        pushes = [partial(java.push, name(f"java_{java.jvm.version[0]}"), topic, **start) for java in javas]
        consumers = [await trio.to_thread.run_sync(push) for push in pushes]
        async with PushConsumer(
            patient(forgetful),
            name("python"),
            listener,
            {topic: "*"},
            consume_from=ConsumeFrom.TIMESTAMP,
            consume_from_ms=start_s * 1000,
        ):
            await listener.wait_count(1)
        seen = [await trio.to_thread.run_sync(consumer.wait, 1) for consumer in consumers]
    finally:
        for java in javas:
            await trio.to_thread.run_sync(java.close)
    assert listener.bodies == [b"newer"]
    assert [[each.body for each in found] for found in seen] == [[b"newer"]] * len(javas)
    assert [found[0].offset for found in seen] == [older.queue_offset + 1] * len(javas)


def test_new_groups_of_other_clients_start_where_they_ask(
    go: Program, node: Program, forgetful: Target, monkeypatch: pytest.MonkeyPatch, name: Name
) -> None:
    monkeypatch.setenv("TZ", "UTC")  # Go takes the time as UTC, Node as local
    topic = name("old")
    trio.run(lose_the_first, forgetful, topic)
    trio.run(send_one, forgetful, topic, b"older")
    start_s = int(time.time()) + 1
    eventually(lambda: True if time.time() >= start_s else None)
    trio.run(send_one, forgetful, topic, b"newer")
    moment = time.strftime("%Y%m%d%H%M%S", time.gmtime(start_s))
    runs: dict[tuple[str, str], Run] = {}
    for start in ("first", "last", moment):
        monkeypatch.setenv("INTEROP_FROM", start)
        for language, program in (("go", go), ("node", node)):
            group = name(f"{language}_{start}")
            words = consume_words(language, forgetful.name_server, group, topic, count="1000000")
            runs[language, start] = program.start(*words)

    def bodies(language: str, start: str) -> list[str]:
        return [line["body"] for line in deliveries(runs[language, start].lines())]

    def all_begun() -> bool | None:
        """A group that begins at the end has begun if it gets what is sent now."""
        trio.run(send_one, forgetful, topic, b"now")
        return True if all("now" in bodies(*which) for which in runs) else None

    eventually(all_begun)
    for language in ("go", "node"):
        first = bodies(language, "first")
        assert {"older", "newer"} <= set(first)
        assert len(first) > first.count("now") + 2
        assert set(bodies(language, "last")) == {"now"}
        assert set(bodies(language, moment)) == {"newer", "now"}


async def send_one(broker: Target, topic: str, body: bytes) -> None:
    async with producer_of(broker, "one") as producer:
        await producer.send(Message(topic, body))


def passed(second: int) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return time.time() >= second

    return look


async def test_group_goes_on_where_it_left(target: Target, name: Name) -> None:
    topic, group = name("place"), name("place")
    await fill(target, topic, 10)
    before, after = Listener(), Listener()
    async with PushConsumer(patient(target), group, before, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
        await before.wait_count(10)
    await fill(target, topic, 3, tags="new")
    async with PushConsumer(patient(target), group, after, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
        await wait_for(lambda: sum(message.tags == "new" for message in after.messages) == 3)
    assert len(after.messages) == 3
    async with Admin(patient(target)) as admin:
        assert sum(lag.lag for lag in await admin.group_lag(group, topic)) == 0


async def test_retry_comes_back_and_ends_among_the_dead(target: Target, name: Name) -> None:
    topic, group = name("retry"), name("retry")
    await fill(target, topic, 1)
    listener = Listener(lambda message: Outcome.RETRY)
    async with PushConsumer(
        patient(target),
        group,
        listener,
        {topic: "*"},
        consume_from=ConsumeFrom.FIRST,
        max_reconsume_times=1,
        retry_delay_level=1,
    ):
        await listener.wait_count(2)
        assert [(message.topic, message.reconsume_times) for message in listener.messages] == [(topic, 0), (topic, 1)]
        assert listener.messages[0].message_id == listener.messages[1].message_id
        async with PullConsumer(patient(target), name("dead")) as reader:

            async def dead_lettered() -> bool:
                return [message.body for message in await dead_letters(reader, group)] == [b"0"]

            await wait_until(dead_lettered)


async def dead_letters(reader: PullConsumer, group: str) -> list[ReceivedMessage]:
    try:
        queues = await reader.queues(f"%DLQ%{group}")
    except RouteNotFound:
        return []
    return [message for queue in queues async for message in reader.read(queue)]


async def test_ordered_queue_keeps_its_order_through_failures(target: Target, name: Name) -> None:
    topic = name("order")
    await fill(target, topic, 40)
    failures = iter([False] * 5 + [True] * 3)
    listener = Listener(lambda message: Outcome.RETRY if next(failures, False) else None)
    async with PushConsumer(
        patient(target),
        name("order"),
        listener,
        {topic: "*"},
        orderly=True,
        suspend_s=0.1,
        consume_from=ConsumeFrom.FIRST,
    ):
        await listener.wait_count(43)
    for queue in {message.queue for message in listener.messages}:
        offsets = [message.queue_offset for message in listener.messages if message.queue == queue]
        assert offsets == sorted(offsets)
    assert len(listener.places) == 40


async def test_broadcast_reaches_every_member(target: Target, name: Name) -> None:
    topic, group = name("all"), name("all")
    await fill(target, topic, 3)
    one, two = Listener(), Listener()
    start, model = ConsumeFrom.FIRST, MessageModel.BROADCASTING
    async with (
        PushConsumer(patient(target), group, one, {topic: "*"}, model=model, consume_from=start),
        PushConsumer(patient(target), group, two, {topic: "*"}, model=model, consume_from=start),
    ):
        await one.wait_count(3)
        await two.wait_count(3)
    assert one.places == two.places
    assert len(one.places) == 3


async def test_pull_seek_and_commit(target: Target, name: Name) -> None:
    topic, group = name("pull"), name("pull")
    start_ms = time.time_ns() // 1_000_000
    await fill(target, topic, 10, queues=1)
    async with PullConsumer(patient(target), group) as consumer:
        (queue,) = await consumer.queues(topic)
        assert [message.body async for message in consumer.read(queue)] == [b"%d" % number for number in range(10)]
        assert (await consumer.min_offset(queue), await consumer.max_offset(queue)) == (0, 10)
        consumer.seek(queue, 8)
        assert [message.body for message in (await consumer.poll(queue)).messages] == [b"8", b"9"]
        await consumer.commit(queue)
        assert await consumer.committed(queue) == 10
        assert (await consumer.pull(queue, 10)).status is PullStatus.NO_NEW_MESSAGE
        moved = await consumer.pull(queue, 99)
        assert (moved.status, moved.next_offset) == (PullStatus.OFFSET_MOVED, 10)
        assert await consumer.search_offset(queue, start_ms) == 0
        assert await consumer.search_offset(queue, start_ms + 3_600_000) == 10


async def test_messages_are_found_again(target: Target, name: Name) -> None:
    topic = name("find")
    await fill(target, topic, 3)
    async with producer_of(target, "find") as producer, Admin(patient(target)) as admin:
        result = await producer.send(Message(topic, b"found", keys=["one", "two"]))
        assert (await admin.message(result.offset_message_id)).body == b"found"

        async def indexed() -> bool:
            return bool(await admin.messages_by_key(topic, "two"))

        await wait_until(indexed)
        assert [message.body for message in await admin.messages_by_key(topic, "one")] == [b"found"]
        assert (await admin.message(result.message_id, topic)).queue == result.queue
        with pytest.raises(MessageNotFound):
            await admin.message("7F0000010000000000000000FFFFFFFF")


async def test_offset_reset_reaches_a_running_consumer(target: Target, name: Name) -> None:
    topic, group = name("reset"), name("reset")
    await fill(target, topic, 6, queues=2)
    listener = Listener()
    async with PushConsumer(patient(target), group, listener, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
        await listener.wait_count(6)
        async with Admin(patient(target)) as admin:

            async def caught_up() -> bool:
                return sum(lag.lag for lag in await admin.group_lag(group, topic)) == 0

            await wait_until(caught_up)
            table = await admin.reset_offsets(group, topic, 0)
        assert sorted(table.values()) == [0, 0]
        await listener.wait_count(12)


async def test_the_admin_tool_asks_a_running_consumer(target: Target, newest: Java, name: Name) -> None:
    topic, group = name("asked"), name("asked")
    await fill(target, topic, 1, queues=1)
    listener = Listener()
    settings = replace(patient(target), client_id=f"python-{group}")
    async with PushConsumer(settings, group, listener, {topic: "*"}, consume_from=ConsumeFrom.FIRST) as consumer:
        await listener.wait_count(1)
        place = listener.messages[0].offset_message_id
        ask = partial(trio.to_thread.run_sync, newest.mqadmin)
        said = await ask("consumerStatus", "-g", group, "-i", consumer.client_id)
        assert re.search(r"PROP_CONSUMEORDERLY +: false", said), said
        assert re.search(rf"^{topic} +\S+ +0 +1 *$", said, re.MULTILINE), said
        assert re.search(rf"Topic: {topic} +ClassFilter: false +SubExpression: \*", said), said
        said = await ask("consumerStatus", "-g", group)
        assert "Rebalance OK" in said
        said = await ask("queryMsgById", "-t", topic, "-i", place, "-g", group, "-d", consumer.client_id)
        assert "consumeResult=CR_SUCCESS" in said
        await listener.wait_count(2)


async def test_administration_sees_what_is_there(target: Target, name: Name) -> None:
    topic, group = name("admin"), name("admin")
    await fill(target, topic, 6, queues=2)
    listener = Listener()
    async with Admin(patient(target)) as admin:
        assert topic in await admin.topics()
        assert [stats.max_offset - stats.min_offset for stats in await admin.topic_stats(topic)] == [3, 3]
        cluster = await admin.cluster()
        (address,) = cluster.masters().values()
        assert (await admin.broker_config(address))["brokerName"] in cluster.brokers
        assert "bootTimestamp" in await admin.broker_runtime(address)
        async with PushConsumer(patient(target), group, listener, {topic: "*"}) as consumer:
            (member,) = await admin.group_members(group)
            assert (member.client_id, member.language) == (consumer.client_id, "PYTHON")
        assert await admin.group_members(group) == []
        await admin.create_group(name("made"))
        assert name("made") in await admin.groups()
        await admin.delete_topic(topic)
        with pytest.raises(RouteNotFound):
            await admin.topic_route(topic)


async def test_wrong_names_are_refused_on_either_side(target: Target) -> None:
    async with producer_of(target, "wrong") as producer, Admin(patient(target)) as admin:
        with pytest.raises(MessageRefused, match="forbidden"):
            await producer.send(Message("a b", b"x"))
        # RocketMQ's producers try this code again, but a refusal stays a refusal.
        with pytest.raises(
            SendFailed, match=r"1 attempt:.*Sending message to topic\[SCHEDULE_TOPIC_XXXX\] is forbidden"
        ):
            await producer.send(Message("SCHEDULE_TOPIC_XXXX", b"x"))
        with pytest.raises(RouteNotFound):
            await admin.topic_stats("NobodyMadeThisTopic")
