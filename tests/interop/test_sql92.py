"""SQL92: every expression of the table against RocketMQ and Martlet, and stock consumers that subscribe by one."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.filter_sql92.table import Case, cases

from martlet_client import BrokerError, Outcome, PushConsumer, ReceivedMessage, Sql

from . import fetch, wire
from .conftest import RocketMQ, Target
from .java import Failed, Java, message
from .martlet_process import Martlet
from .other_clients import Line, Program, deliveries
from .process import eventually
from .test_pop import in_pop_mode, popping
from .test_python_client import patient

Name = Callable[[str], str]

TOPIC = "Table"
GROUP = "table"
CHECK_CLIENT_CONFIG = 46
PARSE_FAILED = 23
NO_MATCH = 20
PREFIX = "SQL92:"  # tells the programs over the clients that an expression is not a list of tags
COUNT = 60
WANTED = "number BETWEEN 20 AND 39 AND colour IN ('red', 'blue')"
FAULTY = "number > 5 AND"
POINTS = "is invalid at character 15, its end: expected a value"


# the table


def store_properties(address: str, given: Sequence[tuple[tuple[str, str], ...]]) -> None:
    """Store one message with each set of properties: the first in queue 0, the next in queue 1, ..."""
    create = {"topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": f"{len(given)}", "perm": "6"}
    create |= {
        "writeQueueNums": f"{len(given)}",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    answer = wire.ask(address, wire.UPDATE_AND_CREATE_TOPIC, create)
    assert answer is not None
    assert answer.code == 0, answer.remark
    send = {"producerGroup": "P", "topic": TOPIC, "defaultTopic": "TBW102", "defaultTopicQueueNums": "1", "flag": "0"}
    send |= {"sysFlag": "0", "bornTimestamp": "0", "reconsumeTimes": "0", "unitMode": "false", "batch": "false"}
    for queue, properties in enumerate(given):
        text = "".join(f"{name}\x01{value}\x02" for name, value in properties)
        answer = wire.ask(address, wire.SEND_MESSAGE, send | {"queueId": f"{queue}", "properties": text}, b"x")
        assert answer is not None
        assert answer.code == 0, answer.remark


def pull(address: str, queue: int, expression: str) -> wire.Answer:
    fields = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": f"{queue}", "queueOffset": "0", "maxMsgNums": "32"}
    fields |= {"sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0", "subVersion": "0"}
    fields |= {"subscription": expression, "expressionType": "SQL92"}
    answer = wire.ask(address, wire.PULL_MESSAGE, fields)
    assert answer is not None
    return answer


def check(address: str, expression: str) -> wire.Answer:
    """Ask whether *expression* compiles, as Java consumers do at their start."""
    data = {"topic": TOPIC, "subString": expression, "expressionType": "SQL92", "subVersion": 0}
    body = {"clientId": "c", "group": GROUP, "namespace": None, "subscriptionData": data}
    answer = wire.ask(address, CHECK_CLIENT_CONFIG, {}, json.dumps(body).encode())
    assert answer is not None
    return answer


def verdicts(address: str, table: Sequence[Case]) -> dict[str, str]:
    """Return what a broker does with each expression: it refuses it, selects the message, or skips it."""
    given = list(dict.fromkeys(case.properties for case in table))
    store_properties(address, given)
    eventually(lambda: True if pull(address, len(given) - 1, "TRUE").code == 0 else None)
    found: dict[str, str] = {}
    for case in table:
        if check(address, case.text).code == PARSE_FAILED:
            found[str(case)] = "refuses"
        else:
            answer = pull(address, given.index(case.properties), case.text)
            found[str(case)] = {0: "selects", NO_MATCH: "skips"}.get(answer.code, f"{answer.code} {answer.remark}")
    return found


def difference(found: dict[str, str], expected: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {name: (found[name], expected[name]) for name in expected if found[name] != expected[name]}


def test_rocketmq_agrees_with_the_table(tmp_path: Path) -> None:
    table = cases()
    assert len(table) >= 500
    broker = RocketMQ(tmp_path, {"enablePropertyFilter": "true"})
    try:
        found = verdicts(broker.address, table)
    finally:
        broker.close()
    expected = {
        str(c): "refuses" if c.rocketmq_refuses else "selects" if c.rocketmq_selects else "skips" for c in table
    }
    assert difference(found, expected) == {}


def test_martlet_agrees_with_the_table(tmp_path: Path) -> None:
    table = cases()
    broker = Martlet(tmp_path)
    try:
        found = verdicts(broker.address, table)
        refused = {c for c in table if c.refused_at}
        places = {str(c): f"at character {c.refused_at}" in check(broker.address, c.text).remark for c in refused}
    finally:
        broker.close()
    expected = {str(c): "refuses" if c.refused_at else "selects" if c.verdict else "skips" for c in table}
    assert difference(found, expected) == {}
    assert [name for name, right in places.items() if not right] == []


# stock consumers


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    monkeypatch.setenv("INTEROP_LOG_LEVEL", "warn")
    program = Program([str(fetch.go_program())], tmp_path)
    yield program
    program.close()


def numbered(topic: str) -> list[dict[str, Any]]:
    colours = ("red", "green", "blue")
    return [
        message(topic, f"{n}", tags="T", properties={"number": f"{n}", "colour": colours[n % 3]}) for n in range(COUNT)
    ]


MATCHING = sorted(f"{n}" for n in range(20, 40) if n % 3 != 1)


def words(
    language: str, target: Target, group: str, topic: str, count: int, expression: str, failures: int
) -> list[str]:
    """The arguments of a consumer over the Go or the Node client."""
    if language == "go":
        return ["consume", target.name_server, group, topic, f"{count}", expression, "concurrent", f"{failures}"]
    return [target.name_server, group, topic, f"{count}", f"{failures}", expression]


@pytest.mark.parametrize("language", ["go", "node"])
def test_other_clients_get_the_matching_messages_and_their_retries(
    language: str, request: pytest.FixtureRequest, newest: Java, target: Target, name: Name
) -> None:
    program: Program = request.getfixturevalue(language)
    topic, group = name(f"sql_{language}"), name("group")
    newest.queries().create_topic(topic, target.address, queues=2)
    newest.producer().send(*numbered(topic))
    run = program.start(*words(language, target, group, topic, len(MATCHING), PREFIX + WANTED, 1))
    got = deliveries(run.finish())
    # A retry has another topic, and is not filtered again.
    assert sorted(line["body"] for line in got if line["reconsume_times"] == 0) == MATCHING
    assert sorted(line["body"] for line in got if line["reconsume_times"] == 1) == MATCHING


def test_java_gets_the_matching_messages_and_commits_the_others(java: Java, target: Target, name: Name) -> None:
    topic, group = name("sql_java"), name("group")
    java.queries().create_topic(topic, target.address, queues=2)
    producer = java.producer()
    producer.send(*numbered(topic))
    consumer = java.push(group, topic, expression=PREFIX + WANTED)
    assert sorted(m.body.decode() for m in consumer.wait(len(MATCHING))) == MATCHING
    wire.wait_committed(target.address, group, topic, COUNT, 2, consumer.commit)
    consumer.stop()
    producer.send(message(topic, "later", properties={"number": "33", "colour": "red"}))
    again = java.push(group, topic, expression=PREFIX + WANTED)
    assert [m.body for m in again.wait(1)] == [b"later"], "the skipped ones do not come again"


def test_a_java_lite_consumer_gets_the_matching_messages(java: Java, target: Target, name: Name) -> None:
    topic = name("sql_lite")
    java.queries().create_topic(topic, target.address, queues=2)
    java.producer().send(*numbered(topic))
    consumer = java.lite(name("group"), topic, expression=PREFIX + WANTED)
    assert sorted(m.body.decode() for m in consumer.poll_until(len(MATCHING))) == MATCHING


def test_java_pops_the_matching_messages(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("sql_pop"), name("group")
    in_pop_mode(newest, target, topic, group, queues=2)
    consumer = popping(newest, group, topic, expression=PREFIX + WANTED)
    producer = newest.producer()
    producer.send(*numbered(topic))
    last = message(topic, "last", properties={"number": "33", "colour": "red"})
    producer.send(last, last, last, last)  # in both queues, after all others
    seen = consumer.wait(lambda seen: {m.body for m in seen} >= {b"last", *map(str.encode, MATCHING)})
    assert {m.body.decode() for m in seen} == {"last", *MATCHING}


async def test_python_gets_the_matching_messages_and_their_retries(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("sql_python"), name("group")
    await trio.to_thread.run_sync(lambda: newest.producer(queues=2).send(*numbered(topic)))
    first: list[str] = []
    second: list[str] = []
    done = trio.Event()

    async def listen(received: ReceivedMessage) -> Outcome:
        (second if received.reconsume_times else first).append(received.body.decode())
        if len(second) == len(MATCHING):
            done.set()
        return Outcome.SUCCESS if received.reconsume_times else Outcome.RETRY

    async with PushConsumer(patient(target), group, listen, {topic: Sql(WANTED)}):
        await done.wait()
    assert (sorted(first), sorted(second)) == (MATCHING, MATCHING)


# faulty expressions


def test_java_is_refused_at_its_start(java: Java, target: Target, target_kind: str, name: Name) -> None:
    topic = name("faulty_java")
    java.queries().create_topic(topic, target.address, queues=1)
    with pytest.raises(Failed) as refused:
        java.push(name("group"), topic, expression=PREFIX + FAULTY)
    assert (POINTS if target_kind == "martlet" else "Encountered") in str(refused.value)


async def test_python_is_refused_at_its_start(newest: Java, target: Target, target_kind: str, name: Name) -> None:
    topic = name("faulty_python")
    await trio.to_thread.run_sync(partial(newest.queries().create_topic, topic, target.address, queues=1))
    with pytest.raises(BrokerError) as refused:
        async with PushConsumer(patient(target), name("group"), lambda message: None, {topic: Sql(FAULTY)}):
            pass
    assert refused.value.code == PARSE_FAILED
    assert (POINTS if target_kind == "martlet" else "Encountered") in str(refused.value)


@pytest.mark.parametrize("language", ["go", "node"])
def test_other_clients_and_the_broker_report_a_faulty_expression(
    language: str, request: pytest.FixtureRequest, newest: Java, target: Target, target_kind: str, name: Name
) -> None:
    """These clients start and go on asking; what the broker answers reaches their log or their error event."""
    program: Program = request.getfixturevalue(language)
    topic, group = name(f"faulty_{language}"), name("group")
    newest.queries().create_topic(topic, target.address, queues=1)
    newest.producer().send(message(topic, "x", properties={"number": "7"}))
    run = program.start(*words(language, target, group, topic, 1, PREFIX + FAULTY, 0))
    if target_kind == "rocketmq" and language == "node":
        # It sends the expression with each pull, and such a pull selects everything in RocketMQ if it is faulty.
        assert [line["body"] for line in deliveries(run.finish())] == ["x"]
        return
    says = POINTS if target_kind == "martlet" else "filter data"

    def reported() -> bool | None:
        said: list[Line] = [line for line in run.lines() if line.get("event") == "error"]
        return True if says in run.complaints.read_text() + json.dumps(said) else None

    eventually(reported)
    assert deliveries(run.lines()) == []
    if isinstance(target, Martlet):
        lines = [line for line in target.process.output().splitlines() if f"group '{group}'" in line]
        assert len(lines) == 1
        assert f"gets no messages of topic '{topic}'" in lines[0]
        assert lines[0].endswith(POINTS)
        assert FAULTY in lines[0]
