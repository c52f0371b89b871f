import gc
import math

import pytest
import trio
from trio.testing import MockClock

from martlet.contracts import Identity, Predicate, RecordView
from martlet.delivery.listeners import CODES_MAX
from martlet.delivery.routing.selection import EVERYTHING
from martlet.errors import Reason, Refused, StoreError
from martlet.message import Message, encode_properties
from martlet.plugins.loader import guarded_filter
from martlet.records.codec import decode_records
from martlet.store import ReadOptions, ReadResult, ReadStatus
from martlet.store.queue_reader import QueueRead
from martlet.store.read.readers import Readers
from martlet.tables.groups import Group
from martlet_remoting.consumers.long_poll import RELEASED_A_TURN, TAGS_MATCHED, Pull
from martlet_remoting.handlers.pull import ANSWER_BYTES, finish
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, pull_ext, send_ext

PULL = RequestCode.PULL_MESSAGE
FOUND, NOT_FOUND, RETRY, MOVED = 0, 19, 20, 21
SUSPEND = "6"  # the pull carries its subscription and may wait
PATIENCE_S = 120.0
TOO_MANY_TAGS = " || ".join(f"tag{number}" for number in range(TAGS_MATCHED + 1))


async def fill(harness: Harness, topic: str, *tags: str, queue_id: int = 0, body: bytes = b"x") -> None:
    """Store one message for each of *tags*."""
    client = harness.client()
    for tag in tags:
        properties = f"TAGS\x01{tag}\x02" if tag else ""
        assert (await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext(topic, queue_id, properties), body)).code == 0
    client.close()


async def with_backlog(open_harness: OpenHarness, count: int) -> tuple[Harness, str]:
    """A harness whose store keeps nothing in memory but the end of the log, and its topic with *count* messages."""
    harness = await open_harness(store={"flush": "async", "page_bytes": 4096, "cache_bytes": 0})
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * count, body=bytes(1000))
    return harness, topic


def pull_that_was_read(client: FakeClient, topic: str, offset: int, result: ReadResult) -> Pull:
    """A pull of queue 0 for which a thread has read *result*; it is answered at the next collect."""
    context = client.handler.context
    gate = client.harness.broker.gate(Identity())
    queue = client.harness.store.queue(topic, 0)
    pull = Pull(context.pulls, 4711, "G", queue, offset, 32, 1 << 18, EVERYTHING, gate, gate.consume("G", topic))
    request = QueueRead(queue, offset, ReadOptions(32, 1 << 18))
    request.result = result
    context.pulls.reader._line.results[pull] = request
    context.pulls.queue_up(pull)
    return pull


def offsets(answer: Command) -> tuple[int, int, int]:
    """Next, lowest and highest offset; every pull answer has all of them as text."""
    assert answer.ext["suggestWhichBrokerId"] == "0"
    return tuple(int(str(answer.ext[name])) for name in ("nextBeginOffset", "minOffset", "maxOffset"))  # type: ignore[return-value]


def bodies(answer: Command) -> list[bytes]:
    return [record.body for record in decode_records(answer.body)]


@pytest.mark.parametrize("code", [RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE])
async def test_available_messages_are_answered_as_stored(harness: Harness, code: int) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A", "B", "C")
    answer = await harness.client().ask(code, pull_ext(topic, 1))
    assert (answer.code, answer.remark, offsets(answer)) == (FOUND, "FOUND", (3, 0, 3))
    assert [record.queue_offset for record in decode_records(answer.body)] == [1, 2]


@pytest.mark.parametrize(
    ("stored", "offset", "code", "remark", "wanted"),
    [
        (0, 0, NOT_FOUND, "NO_MESSAGE_IN_QUEUE", (0, 0, 0)),
        (0, 5, MOVED, "NO_MESSAGE_IN_QUEUE", (0, 0, 0)),
        (3, -1, MOVED, "OFFSET_TOO_SMALL", (0, 0, 3)),
        (3, 3, NOT_FOUND, "OFFSET_OVERFLOW_ONE", (3, 0, 3)),
        (3, 4, MOVED, "OFFSET_OVERFLOW_BADLY", (3, 0, 3)),
    ],
)
async def test_every_offset_is_answered_with_the_next_one(
    harness: Harness, stored: int, offset: int, code: int, remark: str, wanted: tuple[int, int, int]
) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * stored)
    answer = await harness.client().ask(PULL, pull_ext(topic, offset))
    assert (answer.code, answer.remark, offsets(answer), answer.body) == (code, remark, wanted, b"")


@pytest.mark.parametrize(
    ("status", "code", "remark"),
    [
        (ReadStatus.REMOVED, RETRY, "MESSAGE_WAS_REMOVING"),
        (ReadStatus.HOLE, RETRY, "OFFSET_FOUND_NULL"),
        (ReadStatus.NO_QUEUE, MOVED, "NO_MATCHED_LOGIC_QUEUE"),
    ],
)
async def test_rare_findings_of_the_store_have_their_codes(
    harness: Harness, status: ReadStatus, code: int, remark: str
) -> None:
    client = harness.client()
    pull = pull_that_was_read(client, harness.topic("T"), 5, ReadResult(status, 9, 2, 20))
    await harness.step()
    answer = client.answers[pull.opaque]
    assert (answer.code, answer.remark) == (code, remark)
    assert offsets(answer) == ((0 if code == MOVED else 9), 2, 20)


async def test_filtered_messages_move_the_offset(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A", "B", "", "B")
    client = harness.client()
    answer = await client.ask(PULL, pull_ext(topic, 0, subscription="A || C"))
    assert (answer.code, offsets(answer)[0], len(decode_records(answer.body))) == (FOUND, 4, 1)
    answer = await client.ask(PULL, pull_ext(topic, 1, subscription="A"))
    assert (answer.code, answer.remark, offsets(answer), answer.body) == (RETRY, "NO_MATCHED_MESSAGE", (4, 0, 4), b"")


async def test_a_long_way_without_a_wanted_tag_is_passed_over_in_few_pulls(harness: Harness) -> None:
    topic = harness.topic("T")
    for number in range(20_000):
        harness.store.writer.append(Message(topic, b"x", b"TAGS\x01%b\x02" % (b"B" if number == 17_000 else b"A")), 0)
    await harness.step()
    client = harness.client()
    offset, answers = 0, []
    for _ in range(4):
        answer = await client.ask(PULL, pull_ext(topic, offset, subscription="B"))
        offset = offsets(answer)[0]
        answers.append((answer.code, offset, [record.queue_offset for record in decode_records(answer.body)]))
    assert [code for code, _, _ in answers] == [RETRY, RETRY, FOUND, NOT_FOUND]
    assert answers[2][1:] == (20_000, [17_000])
    assert answers[3][1:] == (20_000, [])


async def test_tags_beyond_ascii_are_distinguished(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "größe", "名前", "🐦", "other")
    client = harness.client()
    for number, tag in enumerate(("größe", "名前", "🐦")):
        answer = await client.ask(PULL, pull_ext(topic, 0, subscription=tag))
        assert [record.queue_offset for record in decode_records(answer.body)] == [number]


async def test_an_answer_keeps_to_its_limits(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, pull_messages_max=4, pull_bytes_max=4000)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 6)
    await fill(harness, topic, *["A"] * 4, queue_id=1, body=bytes(1700))
    client = harness.client()
    for wanted, expected in (("32", 4), ("2", 2), ("0", 1), ("-5", 1)):
        answer = await client.ask(PULL, pull_ext(topic, 0, maxMsgNums=wanted))
        assert (len(bodies(answer)), offsets(answer)[0]) == (expected, expected)
    answer = await client.ask(PULL, pull_ext(topic, 0, 1))
    assert len(bodies(answer)) == 2


async def test_one_message_over_the_limit_comes_alone(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, pull_bytes_max=1000)
    topic = harness.topic("T")
    await fill(harness, topic, "A", "A", body=bytes(100_000))
    answer = await harness.client().ask(PULL, pull_ext(topic, 0))
    assert len(bodies(answer)) == 1


@pytest.mark.parametrize(
    ("ext", "code", "says"),
    [
        ({"topic": "Nowhere"}, 17, "topic[Nowhere] not exist"),
        ({"topic": "WriteOnly"}, 16, "pulling message is forbidden"),
        ({"queueId": "4"}, 29, "topicConfig.readQueueNums:[4]"),
        ({"queueId": "-1"}, 29, "queueId[-1] is illegal"),
        ({"consumerGroup": "Stopped"}, 16, "consumeEnable"),
        ({"consumerGroup": "a/b"}, 29, "illegal characters"),
        ({"subscription": "||"}, 23, "parse the consumer's subscription failed"),
        (
            {"expressionType": "SQL92", "subscription": "a > 1"},
            1,
            "does not support consumer to filter message by SQL92; add plugin 'filter_sql92' to plugins.enabled",
        ),
        ({"sysFlag": "0"}, 24, "group info not exist"),
    ],
)
async def test_what_may_not_be_pulled_is_refused(
    harness: Harness, ext: dict[str, object], code: int, says: str
) -> None:
    topic = harness.topic("T")
    harness.topic("WriteOnly", perm=2)
    harness.broker.groups.update(Group("Stopped", consume_enable=False))
    answer = await harness.client().ask(PULL, pull_ext(topic, 0) | ext)
    assert answer.code == code
    assert says in str(answer.remark)


async def test_an_unknown_group_is_refused_where_groups_are_not_made(open_harness: OpenHarness) -> None:
    harness = await open_harness(broker={"auto_create_groups": False}, store={"flush": "async"})
    answer = await harness.client().ask(PULL, pull_ext(harness.topic("T"), 0))
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "broker.auto_create_groups" in str(answer.remark)


async def test_a_pull_without_a_subscription_uses_that_of_heartbeats(harness: Harness) -> None:
    topic, other = harness.topic("T"), harness.topic("Other")
    await fill(harness, topic, "A", "B")
    client = harness.client()

    async def pull(topic: str, **more: object) -> Command:
        return await client.ask(PULL, pull_ext(topic, 0) | {"sysFlag": "0"} | more)

    assert (await pull(topic)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    wanted: list[dict[str, object]] = [{"topic": topic, "subString": "B", "subVersion": "17"}]
    await client.heartbeat_with("c1", "G", wanted)
    answer = await pull(topic, subVersion="17")
    assert [record.queue_offset for record in decode_records(answer.body)] == [1]
    # Go clients always say 0.
    assert (await pull(topic, subVersion="0")).code == FOUND
    assert (await pull(topic, subVersion="18")).code == ResponseCode.SUBSCRIPTION_NOT_LATEST
    assert (await pull(other)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST
    harness.broker.groups.set_forbidden("G", topic, readable=False)
    answer = await pull(topic)
    assert (answer.code, answer.ext["forbiddenType"]) == (ResponseCode.NO_PERMISSION, "5")
    await client.ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "G"})
    assert (await pull(topic)).code == ResponseCode.SUBSCRIPTION_NOT_EXIST


async def test_a_group_may_be_forbidden_to_broadcast(harness: Harness) -> None:
    topic = harness.topic("T")
    harness.broker.groups.update(Group("G", consume_broadcast_enable=False))
    client = harness.client()
    await client.heartbeat("c1", "G", topic, messageModel="BROADCASTING")
    answer = await client.ask(PULL, pull_ext(topic, 0, sysFlag="0"))
    assert (answer.code, answer.ext["forbiddenType"]) == (ResponseCode.NO_PERMISSION, "4")


async def test_authorizers_are_asked_before_a_pull(harness: Harness) -> None:
    topic = harness.topic("T")
    harness.broker.authorizers = (lambda identity, action, topic: action != "read",)
    assert (await harness.client().ask(PULL, pull_ext(topic, 0))).code == ResponseCode.NO_PERMISSION


async def test_a_filter_language_of_a_plugin_is_used(harness: Harness) -> None:
    def compile_expression(expression: str) -> Predicate:
        if expression == "bad":
            raise Refused(Reason.ILLEGAL, "column 1: bad")

        def wanted(record: RecordView) -> bool:
            return record.property("TAGS") == expression

        return wanted

    harness.broker.filters["SQL92"] = compile_expression
    topic = harness.topic("T")
    await fill(harness, topic, "A", "B", "A")
    client = harness.client()
    sql: dict[str, object] = {"expressionType": "SQL92"}
    answer = await client.ask(PULL, pull_ext(topic, 0, subscription="A") | sql)
    assert [record.queue_offset for record in decode_records(answer.body)] == [0, 2]
    answer = await client.ask(PULL, pull_ext(topic, 0, subscription="bad") | sql)
    assert (answer.code, "column 1: bad" in str(answer.remark)) == (ResponseCode.SUBSCRIPTION_PARSE_FAILED, True)
    # From heartbeats as well.
    await client.heartbeat_with(
        "c", "G", [{"topic": topic, "subString": "B", "expressionType": "SQL92", "subVersion": 1}]
    )
    answer = await client.ask(PULL, pull_ext(topic, 0, sysFlag="0"))
    assert [record.queue_offset for record in decode_records(answer.body)] == [1]
    # Retries passed it when they were first delivered.
    harness.topic("%RETRY%G", 1)
    await fill(harness, "%RETRY%G", "B")
    answer = await client.ask(PULL, pull_ext("%RETRY%G", 0, subscription="A") | sql)
    assert len(decode_records(answer.body)) == 1


async def test_a_pull_brings_the_commit_along(harness: Harness) -> None:
    topic = harness.topic("T")
    harness.broker.groups.ensure("G")
    await fill(harness, topic, "A")
    client = harness.client()
    for flags, offset, committed in (("6", "11", -1), ("5", "11", 11), ("7", "12", 12), ("4", "13", 12)):
        await client.ask(PULL, pull_ext(topic, 0, sysFlag=flags, commitOffset=offset))
        assert harness.broker.groups.offsets.get("G", topic, 0) == committed
    await client.ask(PULL, pull_ext(topic, 0, sysFlag="7", commitOffset="-3"))
    assert harness.broker.groups.offsets.get("G", topic, 0) == 12


async def test_a_reset_reaches_the_next_pull_once(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A", "B", "C")
    client = harness.client()
    harness.broker.groups.offsets.reset("G", topic, {0: 1})
    answer = await client.ask(PULL, pull_ext(topic, 3))
    assert (answer.code, answer.remark, offsets(answer)) == (MOVED, "OFFSET_RESET", (1, 0, 3))
    assert (await client.ask(PULL, pull_ext(topic, 3))).code == NOT_FOUND


async def test_a_oneway_pull_is_not_answered(harness: Harness) -> None:
    client = harness.client()
    client.send(PULL, pull_ext(harness.topic("T"), 0), flag=2)
    await harness.step()
    assert client.answers == {}


@pytest.mark.usefixtures("nothing_cached")
async def test_old_messages_are_read_in_a_thread(open_harness: OpenHarness) -> None:
    harness, topic = await with_backlog(open_harness, 40)
    queue = harness.store.queue(topic, 0)
    assert harness.store.readers.read_near(queue, 0, 1, 1) is None
    client = harness.client()
    numbers = [client.send(PULL, pull_ext(topic, offset, maxMsgNums="4")) for offset in (0, 4, 8)]
    assert client.peer.sent == []
    with trio.fail_after(PATIENCE_S):
        while len(client.answers) < 3:
            await harness.step()
    for number, offset in zip(numbers, (0, 4, 8), strict=True):
        answer = client.answers[number]
        assert [record.queue_offset for record in decode_records(answer.body)] == list(range(offset, offset + 4))


@pytest.mark.usefixtures("nothing_cached")
async def test_what_a_slow_client_does_not_take_is_not_read_for_it(open_harness: OpenHarness) -> None:
    harness, topic = await with_backlog(open_harness, 60)
    client = harness.client()
    numbers = [client.send(PULL, pull_ext(topic, offset, maxMsgNums="1")) for offset in range(40)]
    desk = client.handler.context.pulls
    with trio.fail_after(PATIENCE_S):
        while desk.reader.working:
            await trio.lowlevel.checkpoint()
        assert len(desk.ready) == 4
        assert len(desk.reading) == 36
        while len(client.answers) < 40:
            await harness.step()
    for offset, number in enumerate(numbers):
        assert [record.queue_offset for record in decode_records(client.answers[number].body)] == [offset]


@pytest.mark.usefixtures("nothing_cached")
async def test_a_far_read_that_fails_keeps_nothing_alive(
    open_harness: OpenHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def damaged(*arguments: object) -> ReadResult:
        raise StoreError("the log is damaged")

    harness, topic = await with_backlog(open_harness, 40)
    monkeypatch.setattr(Readers, "read_far", damaged)
    client = harness.client()
    gc.collect()
    gc.disable()
    try:
        assert (await client.ask(PULL, pull_ext(topic, 0))).code == ResponseCode.SYSTEM_ERROR
        assert not any(isinstance(kept, Pull) for kept in gc.get_objects())
    finally:
        gc.enable()


def compile_raising(expression: str) -> Predicate:
    if expression == "never":
        raise KeyError("grammar")

    def wanted(record: RecordView) -> bool:
        return (record.property(expression) or "")[0] == "A"  # fails where the property is missing

    return wanted


async def test_a_filter_that_raises_is_named_and_ends_no_connection(harness: Harness) -> None:
    harness.broker.filters["LIKE"] = guarded_filter("toys", "LIKE", compile_raising)
    topic = harness.topic("T")
    await fill(harness, topic, "A", "")
    client, other = harness.client(), harness.client()
    like: dict[str, object] = {"expressionType": "LIKE", "subscription": "TAGS"}
    answer = await client.ask(PULL, pull_ext(topic, 0) | like)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert answer.remark == "plugin 'toys' failed in its filter LIKE; IndexError: string index out of range"
    answer = await client.ask(PULL, pull_ext(topic, 0) | like | {"subscription": "never"})
    assert (answer.code, "plugin 'toys' failed" in str(answer.remark)) == (
        ResponseCode.SUBSCRIPTION_PARSE_FAILED,
        True,
    )
    # A waiting pull is answered when a message arrives.
    number = client.send(PULL, wait_ext(topic, 2) | like)
    waiting = other.send(PULL, wait_ext(topic, 2))
    await fill(harness, topic, "")
    await harness.step()
    assert client.answers.pop(number).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert (client.peer.closed_with, len(harness.state.parked)) == (None, 0)
    assert bodies(other.answers.pop(waiting)) == [b"x"]


async def test_a_filter_that_raises_in_a_thread_is_answered(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Readers, "read_near", lambda *arguments: None)
    harness.broker.filters["LIKE"] = guarded_filter("toys", "LIKE", compile_raising)
    topic = harness.topic("T")
    await fill(harness, topic, "", "A")
    client = harness.client()
    like: dict[str, object] = {"expressionType": "LIKE", "subscription": "TAGS"}
    numbers = [client.send(PULL, pull_ext(topic, 0) | like), client.send(PULL, pull_ext(topic, 1) | like)]
    with trio.fail_after(PATIENCE_S):
        while len(client.answers) < 2:
            await harness.step()
    assert client.answers[numbers[0]].code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert bodies(client.answers[numbers[1]]) == [b"x"]


# waiting


def wait_ext(topic: str, offset: int, **more: object) -> dict[str, object]:
    return pull_ext(topic, offset) | {"sysFlag": SUSPEND} | more


@pytest.fixture
async def waiting(harness: Harness, nursery: trio.Nursery) -> Harness:
    """A harness in which held pulls expire."""
    nursery.start_soon(harness.state.timeouts.run)
    return harness


def parked(client: FakeClient) -> int:
    return len(client.handler.context.pulls.held)


async def test_a_held_pull_is_answered_when_a_message_arrives(waiting: Harness) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    number = client.send(PULL, wait_ext(topic, 0))
    await waiting.step()
    assert (client.answers, parked(client), len(waiting.state.parked)) == ({}, 1, 1)
    await fill(waiting, topic, "A", queue_id=1)
    await waiting.step()
    assert client.answers == {}
    await fill(waiting, topic, "A")
    await waiting.step()
    answer = client.answers.pop(number)
    assert (answer.code, offsets(answer), bodies(answer)) == (FOUND, (1, 0, 1), [b"x"])
    assert (parked(client), len(waiting.state.parked), len(waiting.state.timeouts)) == (0, 0, 0)


async def test_a_held_pull_is_answered_when_its_time_is_over(waiting: Harness, autojump_clock: MockClock) -> None:
    topic = waiting.topic("T")
    await fill(waiting, topic, "A")
    client = waiting.client()
    number = client.send(PULL, wait_ext(topic, 1, suspendTimeoutMillis="15000"))
    await trio.sleep(14.9)
    await waiting.step()
    assert client.answers == {}
    await trio.sleep(0.5)
    await waiting.step()
    answer = client.answers.pop(number)
    assert (answer.code, answer.remark, offsets(answer)) == (NOT_FOUND, "OFFSET_OVERFLOW_ONE", (1, 0, 1))
    assert len(waiting.state.parked) == 0


async def test_a_pull_is_held_no_longer_than_the_limit(waiting: Harness, autojump_clock: MockClock) -> None:
    client = waiting.client()
    client.send(PULL, wait_ext(waiting.topic("T"), 0, suspendTimeoutMillis="86400000"))
    await trio.sleep(waiting.config.suspend_ms_max / 1000 + 0.5)
    await waiting.step()
    assert len(client.answers) == 1


@pytest.mark.parametrize("more", [{"sysFlag": "4"}, {"suspendTimeoutMillis": "0"}, {"suspendTimeoutMillis": "-1"}])
async def test_a_pull_that_may_not_wait_is_answered_at_once(waiting: Harness, more: dict[str, object]) -> None:
    client = waiting.client()
    answer = await client.ask(PULL, wait_ext(waiting.topic("T"), 0) | more)
    assert answer.code == NOT_FOUND


async def test_only_an_empty_end_makes_a_pull_wait(waiting: Harness) -> None:
    topic = waiting.topic("T")
    await fill(waiting, topic, "A")
    client = waiting.client()
    for offset, expression, code in ((5, "*", MOVED), (-1, "*", MOVED), (0, "B", RETRY)):
        assert (await client.ask(PULL, wait_ext(topic, offset, subscription=expression))).code == code


async def test_messages_that_are_not_wanted_do_not_end_the_wait(waiting: Harness, autojump_clock: MockClock) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    number = client.send(PULL, wait_ext(topic, 0, subscription="B"))
    await fill(waiting, topic, "A", "A")
    await waiting.step()
    assert (client.answers, parked(client)) == ({}, 1)
    await fill(waiting, topic, "B")
    await waiting.step()
    answer = client.answers.pop(number)
    assert [record.queue_offset for record in decode_records(answer.body)] == [2]
    # And when the time is over before one is wanted, what was passed over is not read again.
    number = client.send(PULL, wait_ext(topic, 3, subscription="B"))
    await fill(waiting, topic, "A", "A")
    await waiting.step()
    await trio.sleep(16)
    await waiting.step()
    answer = client.answers.pop(number)
    assert (answer.code, answer.remark, offsets(answer)) == (RETRY, "NO_MATCHED_MESSAGE", (5, 0, 5))


async def test_a_message_wakes_only_the_pulls_that_may_want_it(waiting: Harness) -> None:
    topic = waiting.topic("T")
    expressions = {"B": False, "B || C": False, "A": True, "A || B": True, "*": True, TOO_MANY_TAGS: True}
    clients = {expression: [waiting.client() for _ in range(20)] for expression in expressions}
    for expression, group in clients.items():
        for client in group:
            client.send(PULL, wait_ext(topic, 0, subscription=expression))
    await waiting.step()
    sender = waiting.client()
    sender.send(RequestCode.SEND_MESSAGE_V2, send_ext(topic, 0, "TAGS\x01A\x02"), b"x")
    waiting.store.committer.commit()
    woken = {expression: [client.peer.woken for client in group] for expression, group in clients.items()}
    assert woken == {expression: [wanted] * 20 for expression, wanted in expressions.items()}
    await waiting.step()
    answered = {expression for expression, group in clients.items() if all(client.answers for client in group)}
    assert answered == {"A", "A || B", "*"}
    assert len(waiting.state.parked) == 60  # one of them was parked again


async def test_a_woken_pull_continues_after_the_unwanted_messages(waiting: Harness) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    number = client.send(PULL, wait_ext(topic, 0, subscription="B"))
    [pull] = client.handler.context.pulls.held
    await fill(waiting, topic, "A", "A", "A")
    await fill(waiting, topic, "B", "A")
    assert pull.offset == 3
    await waiting.step()
    answer = client.answers.pop(number)
    assert (answer.code, [record.queue_offset for record in decode_records(answer.body)]) == (FOUND, [3])


async def test_many_new_messages_at_once_wake_every_pull(waiting: Harness) -> None:
    """Looking up all their tags would take longer than waking every pull."""
    topic = waiting.topic("T")
    client, other = waiting.client(), waiting.client()
    numbers = [each.send(PULL, wait_ext(topic, 0, subscription=tag)) for each, tag in ((client, "B"), (other, "C"))]
    for tag in ["A"] * (CODES_MAX - 1) + ["B", "A"]:
        properties = encode_properties({"TAGS": tag})
        waiting.broker.publish(Message(topic, b"x", properties, queue_id=0))
    waiting.store.committer.commit()
    assert (client.peer.woken, other.peer.woken) == (True, True)
    await waiting.step()
    answer = client.answers.pop(numbers[0])
    assert [record.queue_offset for record in decode_records(answer.body)] == [CODES_MAX - 1]
    assert (other.answers, parked(other)) == ({}, 1)
    await fill(waiting, topic, "C")
    await waiting.step()
    assert len(decode_records(other.answers.pop(numbers[1]).body)) == 1


async def test_what_arrives_after_a_thread_found_nothing_is_not_missed(waiting: Harness) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    pull = pull_that_was_read(client, topic, 0, ReadResult(ReadStatus.EMPTY, 0, 0, 0))
    pull.must_answer = False
    pull.suspend_until = math.inf
    assert (client.peer.woken, parked(client)) == (True, 0)
    await fill(waiting, topic, "A")  # before the next collect
    with trio.fail_after(PATIENCE_S):
        while not client.answers:
            await waiting.step()
    assert bodies(client.answers.pop(pull.opaque)) == [b"x"]
    assert len(waiting.state.parked) == 0


async def test_nobody_is_woken_before_the_record_may_be_read(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "sync"})
    topic = harness.topic("T")
    client, sender = harness.client(), harness.client()
    number = client.send(PULL, wait_ext(topic, 0))
    sender.send(RequestCode.SEND_MESSAGE_V2, send_ext(topic), b"x")
    harness.store.committer.commit()
    assert not client.peer.woken
    await harness.step()
    assert client.answers[number].code == FOUND


async def test_all_pulls_that_wait_for_a_queue_are_answered(waiting: Harness) -> None:
    topic = waiting.topic("T")
    clients = [waiting.client() for _ in range(5)]
    for client in clients:
        client.send(PULL, wait_ext(topic, 0))
        client.send(PULL, wait_ext(topic, 0))
    await fill(waiting, topic, "A")
    await waiting.step()
    assert [len(client.answers) for client in clients] == [2] * 5


async def test_a_client_that_goes_takes_its_pulls_along(waiting: Harness, autojump_clock: MockClock) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    client.send(PULL, wait_ext(topic, 0))
    client.close()
    assert (len(waiting.state.parked), len(waiting.state.timeouts)) == (0, 0)
    await fill(waiting, topic, "A")
    await trio.sleep(20)
    assert client.peer.sent == []


async def test_a_queue_is_watched_only_while_somebody_waits(waiting: Harness, autojump_clock: MockClock) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    client.send(PULL, wait_ext(topic, 0))
    queue = waiting.store.queue(topic, 0)
    assert len(queue.watchers or ()) == 1
    waiting.state.parked.sweep()
    assert len(queue.watchers or ()) == 1
    await trio.sleep(20)
    waiting.state.parked.sweep()
    assert len(queue.watchers or ()) == 0


async def test_a_connection_has_a_limit_of_held_pulls_that_says_what_it_is(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, parked_peer_max=2)
    topic = harness.topic("T")
    client = harness.client()
    for _ in range(2):
        client.send(PULL, wait_ext(topic, 0))
    busy = await client.ask(PULL, wait_ext(topic, 0))
    assert (busy.code, "remoting.parked_peer_max is 2" in str(busy.remark)) == (ResponseCode.SYSTEM_BUSY, True)
    assert parked(client) == 2


async def crowd(open_harness: OpenHarness, connections: int, pulls: int, host: str) -> tuple[Harness, list[FakeClient]]:
    """A broker that is full of the pulls of so many connections from *host*."""
    harness = await open_harness(store={"flush": "async"}, parked_max=connections * pulls)
    topic = harness.topic("T")
    clients = [harness.client(host=host) for _ in range(connections)]
    for client in clients * pulls:
        client.send(PULL, wait_ext(topic, 0))
    await harness.step()
    assert harness.state.statistics()["parked_pulls"] == connections * pulls
    assert not any(client.answers for client in clients)
    return harness, clients


async def hold_beside(harness: Harness, greedy: list[FakeClient], client: FakeClient, pulls: int) -> None:
    """Hold *pulls* pulls of *client* while the others repeat each refused pull."""
    for _ in range(pulls):
        client.send(PULL, wait_ext("T", 0))
        await harness.step()
        for other in greedy:
            for number in list(other.answers):
                answer = other.answers.pop(number)
                assert answer.code == ResponseCode.SYSTEM_BUSY
                assert "remoting.parked_max is" in str(answer.remark)
                other.send(PULL, wait_ext("T", 0))
        await harness.step()


async def test_few_connections_with_many_pulls_let_others_wait(open_harness: OpenHarness) -> None:
    harness, greedy = await crowd(open_harness, 4, 100, "127.0.0.1")
    client = harness.client()
    await hold_beside(harness, greedy, client, 50)
    assert (client.answers, parked(client)) == ({}, 50)
    counters = harness.state.statistics()
    assert counters["parked_pulls"] == 400
    assert counters["parked_pulls_given_up"] == harness.state.counters.refusals[ResponseCode.SYSTEM_BUSY] > 50


async def test_many_connections_of_one_address_let_other_addresses_wait(open_harness: OpenHarness) -> None:
    harness, greedy = await crowd(open_harness, 100, 4, "10.0.0.1")
    client = harness.client(host="10.0.0.2")
    await hold_beside(harness, greedy, client, 30)
    assert (client.answers, parked(client)) == ({}, 30)


async def test_a_large_share_is_not_given_up_for_a_larger_one(open_harness: OpenHarness) -> None:
    """Many clients behind one address hold a few pulls each; one client with very many gets no larger share."""
    harness, fleet = await crowd(open_harness, 100, 4, "10.0.0.1")
    greedy = harness.client(host="10.0.0.2")
    for _ in range(2000):
        greedy.send(PULL, wait_ext("T", 0))
    await harness.step()
    assert parked(greedy) < 60
    assert sum(map(parked, fleet)) > 340


async def test_pulls_count_by_the_expression_they_bring(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, parked_peer_max=600)
    topic = harness.topic("T")
    client = harness.client()
    for number in range(3):
        client.send(PULL, wait_ext(topic, 0, subscription=f"{number}||" * 5000))
    await harness.step()
    assert (parked(client), [answer.code for answer in client.answers.values()]) == (2, [ResponseCode.SYSTEM_BUSY])
    client.close()
    assert harness.state.statistics()["parked_pulls"] == 0


@pytest.mark.usefixtures("nothing_cached")
async def test_pulls_on_their_way_count_as_waiting(open_harness: OpenHarness) -> None:
    """Pulls that are ready or wait for a read from disk count too, for a client that does not read its answers."""
    harness, topic = await with_backlog(open_harness, 40)
    slow = harness.client()
    harness.state.parked._limit = 20
    for offset in range(20):
        slow.send(PULL, pull_ext(topic, offset, maxMsgNums="1"))
    desk = slow.handler.context.pulls
    with trio.fail_after(PATIENCE_S):
        while desk.reader.working:
            await trio.lowlevel.checkpoint()
    assert (len(desk.ready), len(desk.reading), desk.waiting) == (4, 16, 20)
    other = harness.client()
    number = other.send(PULL, wait_ext(topic, 40))
    assert (parked(other), desk.waiting) == (1, 19)
    with trio.fail_after(PATIENCE_S):
        while len(slow.answers) < 20:
            await harness.step()
    assert sorted(answer.code for answer in slow.answers.values()) == [0] * 19 + [ResponseCode.SYSTEM_BUSY]
    assert (number in other.answers, harness.state.statistics()["parked_pulls"]) == (False, 1)


async def very_many(harness: Harness, topic: str, *expressions: str) -> list[FakeClient]:
    """Clients whose pulls wait for queue 0 of *topic*, 1,000 for each of *expressions*."""
    clients = [harness.client() for _ in expressions]
    for client, expression in zip(clients, expressions, strict=True):
        for _ in range(1000):
            client.send(PULL, wait_ext(topic, 0, subscription=expression))
    await harness.step()
    assert len(harness.state.parked) == 1000 * len(clients)
    return clients


async def release_all(harness: Harness) -> list[int]:
    """Do what `ParkedPulls.run` does; return how many pulls each turn released."""
    held, counts = harness.state.parked, list[int]()
    while held.is_releasing:
        before = len(held)
        held.release_some()
        counts.append(before - len(held))
    await harness.step()
    return counts


async def test_very_many_pulls_of_a_queue_look_again_some_in_each_turn(harness: Harness) -> None:
    topic = harness.topic("T")
    clients = await very_many(harness, topic, "*", "*", "*")
    await fill(harness, topic, "A")
    assert len(harness.state.parked) == 3000
    assert await release_all(harness) == [RELEASED_A_TURN, RELEASED_A_TURN, 3000 - 2 * RELEASED_A_TURN]
    assert [answer.code for client in clients for answer in client.answers.values()] == [FOUND] * 3000


async def test_messages_that_come_while_very_many_pulls_look_again_are_not_missed(harness: Harness) -> None:
    topic = harness.topic("T")
    clients = await very_many(harness, topic, "A", "B", "A || B")
    await fill(harness, topic, "A")
    harness.state.parked.release_some()
    await fill(harness, topic, "B")
    await release_all(harness)
    assert [len(client.answers) for client in clients] == [1000] * 3
    assert {answer.code for client in clients for answer in client.answers.values()} == {FOUND}
    assert (len(harness.state.parked), len(harness.state.timeouts)) == (0, 0)


async def test_very_many_pulls_that_want_nothing_of_it_wait_on(harness: Harness) -> None:
    topic = harness.topic("T")
    clients = await very_many(harness, topic, "B", "C")
    await fill(harness, topic, *["A"] * (CODES_MAX + 1))
    await release_all(harness)
    assert [(client.answers, parked(client)) for client in clients] == [({}, 1000)] * 2
    await fill(harness, topic, "B", "C")
    await release_all(harness)
    assert [len(client.answers) for client in clients] == [1000] * 2


async def test_nothing_remains_of_pulls_that_leave_while_very_many_are_released(harness: Harness) -> None:
    topic = harness.topic("T")
    clients = await very_many(harness, topic, "*", "*")
    await fill(harness, topic, "A")
    for client in clients:
        client.close()
    assert await release_all(harness) == [0]
    assert (len(harness.state.parked), harness.state.statistics()["parked_pulls"]) == (0, 0)


async def test_a_connection_answers_a_bounded_number_of_pulls_at_once(waiting: Harness) -> None:
    [client] = await very_many(waiting, waiting.topic("T"), "*")
    await trio.sleep(16)
    client.peer.woken = False
    client.handler.collect(256 * ANSWER_BYTES)
    client.receive()
    assert (len(client.answers), client.peer.woken) == (256, True)
    await waiting.step()
    assert [answer.code for answer in client.answers.values()] == [NOT_FOUND] * 1000


async def test_a_reset_ends_the_wait(waiting: Harness) -> None:
    topic = waiting.topic("T")
    await fill(waiting, topic, "A", "B")
    client = waiting.client()
    number = client.send(PULL, wait_ext(topic, 2))
    waiting.broker.groups.offsets.reset("G", topic, {0: 1})
    waiting.state.parked.wake_topic(topic)
    await waiting.step()
    assert (client.answers[number].code, offsets(client.answers[number])[0]) == (MOVED, 1)


async def test_a_held_pull_of_a_deleted_topic_says_so_at_once(waiting: Harness) -> None:
    deleted, kept = waiting.topic("T"), waiting.topic("U")
    client = waiting.client()
    numbers = [client.send(PULL, wait_ext(deleted, 0, queueId=queue_id)) for queue_id in (0, 1)]
    client.send(PULL, wait_ext(kept, 0))
    admin = waiting.client()
    assert (await admin.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": deleted})).code == 0
    assert [client.answers.pop(number).code for number in numbers] == [ResponseCode.TOPIC_NOT_EXIST] * 2
    assert (client.answers, parked(client), len(waiting.state.parked)) == ({}, 1, 1)


async def test_a_pull_does_not_wait_for_a_topic_that_took_the_name_of_its_own(waiting: Harness) -> None:
    client = waiting.client()
    number = client.send(PULL, wait_ext(waiting.topic("T"), 0))
    waiting.broker.topics.delete("T")
    await fill(waiting, waiting.topic("T"), "A")
    await waiting.step()
    assert client.answers.pop(number).code == ResponseCode.TOPIC_NOT_EXIST
    assert bodies(await client.ask(PULL, wait_ext("T", 0))) == [b"x"]


async def test_at_the_end_every_held_pull_is_answered_and_none_held_any_more(waiting: Harness) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    number = client.send(PULL, wait_ext(topic, 0))
    await waiting.step()
    waiting.state.parked.answer_all()
    await waiting.step()
    assert client.answers.pop(number).code == NOT_FOUND
    assert (await client.ask(PULL, wait_ext(topic, 0))).code == NOT_FOUND


def stop(harness: Harness, client: FakeClient) -> None:
    harness.state.parked.answer_all()
    finish(client.handler.context)
    client.receive()


async def test_at_the_end_a_pull_that_was_just_woken_is_answered_and_not_held_again(waiting: Harness) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    number = client.send(PULL, wait_ext(topic, 0, subscription=TOO_MANY_TAGS))
    assert parked(client) == 1
    waiting.broker.publish(Message(topic, b"x", b"TAGS\x01A\x02", 0))
    waiting.store.committer.commit()
    assert (parked(client), len(client.handler.context.pulls.ready)) == (0, 1)
    stop(waiting, client)
    answer = client.answers.pop(number)
    assert (answer.code, offsets(answer)) == (RETRY, (1, 0, 1))
    assert len(waiting.state.parked) == 0


@pytest.mark.usefixtures("nothing_cached")
async def test_at_the_end_pulls_that_a_thread_reads_for_are_answered(open_harness: OpenHarness) -> None:
    harness, topic = await with_backlog(open_harness, 40)
    client = harness.client()
    numbers = [client.send(PULL, pull_ext(topic, offset)) for offset in (0, 4, 8)]
    desk = client.handler.context.pulls
    assert len(desk.reading) == 3
    stop(harness, client)
    for number, offset in zip(numbers, (0, 4, 8), strict=True):
        answer = client.answers.pop(number)
        assert (answer.code, offsets(answer), answer.body) == (NOT_FOUND, (offset, 0, 40), b"")
    with trio.fail_after(PATIENCE_S):
        while desk.reader.working:
            await trio.lowlevel.checkpoint()
    await harness.step()
    assert (len(desk.ready), client.answers) == (0, {})
    assert (await client.ask(PULL, pull_ext(topic, 2))).code == NOT_FOUND


async def test_at_the_end_a_damaged_log_leaves_no_pull_unanswered(
    waiting: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    numbers = [client.send(PULL, wait_ext(topic, 0)) for _ in range(2)]

    def damaged(*arguments: object) -> ReadResult:
        raise StoreError("the log is damaged")

    monkeypatch.setattr(Readers, "read_near", damaged)
    stop(waiting, client)
    assert [client.answers.pop(number).code for number in numbers] == [ResponseCode.SYSTEM_ERROR] * 2


async def test_a_small_budget_answers_the_rest_later(waiting: Harness) -> None:
    topic = waiting.topic("T")
    client = waiting.client()
    for _ in range(4):
        client.send(PULL, wait_ext(topic, 0))
    sender = waiting.client()
    sender.send(RequestCode.SEND_MESSAGE_V2, send_ext(topic), bytes(5000))
    waiting.store.committer.commit()
    client.peer.woken = False
    client.handler.collect(8000)
    assert (len(client.peer.sent), client.peer.woken) == (2, True)
    await waiting.step()
    assert len(client.answers) == 4


async def test_nothing_is_pulled_by_the_vip_port(harness: Harness) -> None:
    client = harness.client(fast=True)
    answer = await client.ask(PULL, pull_ext(harness.topic("T"), 0))
    assert answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


async def test_a_client_that_may_not_pull_creates_no_group(harness: Harness) -> None:
    harness.broker.authorizers = (lambda identity, action, topic: False,)
    assert (await harness.client().ask(PULL, pull_ext(harness.topic("T"), 0))).code == ResponseCode.NO_PERMISSION
    assert harness.broker.groups.get("G") is None


@pytest.mark.parametrize(
    ("asked", "count"),
    [(1, 1), (2600, 2), (5000, 3), (1 << 20, 3), (0, 5), (-1, 5), ((1 << 31) - 1, 5)],
)
async def test_a_pull_may_name_the_size_of_its_answer(open_harness: OpenHarness, asked: int, count: int) -> None:
    harness = await open_harness(store={"flush": "async"}, pull_bytes_max=6500, pull_bytes_asked_max=4000)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 9, body=bytes(1000))
    answer = await harness.client().ask(PULL, pull_ext(topic, 0, maxMsgBytes=str(asked)))
    assert len(bodies(answer)) == count


# groups that nobody has created


async def test_a_pull_with_any_name_makes_no_group(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A")
    client, before = harness.client(), len(harness.broker.groups.names())
    for number in range(300):
        answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, 0, consumerGroup=f"made-up-{number}"))
        assert answer.code == 0
    await harness.state.rates.sample()
    assert len(harness.broker.groups.names()) == before
    assert harness.state.rates.found == 300
    assert not any("made-up" in key for _, key in harness.state.rates._series)
    answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, 0, consumerGroup="no blanks"))
    assert answer.code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize(("offset", "made"), [("0", False), ("1", True), ("2", False), ("-1", False)])
async def test_a_pull_that_commits_what_it_consumed_makes_its_group(harness: Harness, offset: str, made: bool) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A")
    ext = pull_ext(topic, 0, consumerGroup="Own", sysFlag="5", commitOffset=offset)
    assert (await harness.client().ask(RequestCode.PULL_MESSAGE, ext)).code == 0
    assert (harness.broker.groups.get("Own") is not None) == made
    assert harness.broker.groups.offsets.get("Own", topic, 0) == (1 if made else -1)
