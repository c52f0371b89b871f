"""The kinds of messages with the Go, the Node, the C++ and the Python client; test_other_clients has the plain ones."""

import base64
import re
import time
from collections import defaultdict
from collections.abc import Callable

import pytest
from tests.client.listening import Listener

from martlet_client import ConsumeFrom, Message, PushConsumer

from .conftest import Target
from .java import Java, Jvm, Received, message
from .other_clients import Line, Program, Run, consume_words, deliveries, send_words
from .process import eventually
from .store_exchange import OurBroker
from .test_delays import DELAYS_MS
from .test_delays import check as check_delayed
from .test_python_client import fill, patient, producer_of

Name = Callable[[str], str]
KEYS, EACH = ("a", "b", "c", "d", "e"), 6
HOUR_MS = 3_600_000


@pytest.fixture
def program(language: str, request: pytest.FixtureRequest) -> Program:
    found: Program = request.getfixturevalue(language)
    return found


def now_ms() -> int:
    return int(time.time() * 1000)


def create(java: Java, target: Target, topic: str, queues: int = 4) -> str:
    java.queries().create_topic(topic, target.address, queues=queues)
    return topic


def stored(java: Java, topic: str, count: int) -> list[Received]:
    return java.lite(f"reader_{topic}", topic, assign=True).poll_until(count)


# plain


def test_what_the_node_client_sends_it_consumes(node: Program, newest: Java, target: Target, name: Name) -> None:
    topic, group = create(newest, target, name("node"), 2), name("group")
    consumer = node.start(*consume_words("node", target.name_server, group, topic, f"{EACH}"))
    sent = [message(topic, f"{i}", tags="T", keys=f"k{i}", properties={"p": f"{i}"}) for i in range(EACH)]
    results = node.run(*send_words("node", target.name_server, "sync", *sent))
    assert {line["status"] for line in results} == {"SEND_OK"}
    got = stored(newest, topic, EACH)
    assert {(m.body, m.tags, m.keys, m.properties["p"]) for m in got} == {
        (b"%d" % i, "T", f"k{i}", f"{i}") for i in range(EACH)
    }
    assert {(m.queue, m.offset) for m in got} == {(int(line["queue"]), line["offset"]) for line in results}
    assert sorted(line["body"] for line in deliveries(consumer.finish())) == [f"{i}" for i in range(EACH)]


# delay levels and times


@pytest.mark.parametrize("language", ["cpp", "go", "node"])
def test_a_delayed_message_of_another_client_arrives_after_its_delay(
    language: str, program: Program, newest: Java, target: Target, name: Name
) -> None:
    topic = create(newest, target, name("delayed"))
    levels = {"two": 2, "one": 1}
    consumer = program.start(*consume_words(language, target.name_server, name("group"), topic, f"{len(levels)}"))
    sent = [
        message(topic, body, tags="T", keys="k", properties={"p": "v"}, delay_level=level)
        for body, level in levels.items()
    ]
    assert len(program.run(*send_words(language, target.name_server, "sync", *sent))) == len(levels)
    for got in stored(newest, topic, len(levels)):
        check_delayed(got, topic, levels[got.body.decode()])
    assert {line["body"] for line in deliveries(consumer.finish())} == set(levels)


@pytest.mark.parametrize("language", ["cpp", "go", "node"])
def test_timed_messages_of_another_client_arrive_at_their_time(
    language: str, program: Program, newest: Java, target: Target, name: Name
) -> None:
    """None of them has a method for it; a property is all it takes."""
    topic = create(newest, target, name("timed"))
    at_ms = now_ms() + 3000
    times = {"TIMER_DELAY_MS": 1200, "TIMER_DELAY_SEC": 2, "TIMER_DELIVER_MS": at_ms}
    sent = [message(topic, key, properties={key: str(value)}) for key, value in times.items()]
    program.run(*send_words(language, target.name_server, "sync", *sent))
    got = {each.body.decode(): each for each in stored(newest, topic, len(times))}
    assert set(got) == set(times)
    after_ms = {key: each.stored_ms - each.born_ms for key, each in got.items()}
    assert after_ms["TIMER_DELAY_MS"] >= 1200
    assert after_ms["TIMER_DELAY_SEC"] >= 2000
    assert got["TIMER_DELIVER_MS"].stored_ms >= at_ms


@pytest.mark.parametrize("language", ["cpp", "go", "node"])
def test_a_timed_message_of_another_client_is_recalled_by_its_id(
    language: str, program: Program, newest: Java, target: Target, target_kind: str, name: Name
) -> None:
    """None of them reads the handle in the answer, but topic, time and unique key make one."""
    topic, at_ms = create(newest, target, name("timed")), now_ms() // 1000 * 1000 + HOUR_MS
    timed = {"TIMER_DELIVER_MS": str(at_ms)}
    if language == "node":  # it gives messages no key; the broker would, and the client could not know it
        timed["UNIQ_KEY"] = name("key")
    [sent] = program.run(*send_words(language, target.name_server, "sync", message(topic, "x", properties=timed)))
    producer = newest.producer()
    [own] = producer.send(message(topic, "own", setDelayTimeMs=HOUR_MS))
    assert own.recall_handle
    _, _, broker, *_ = base64.urlsafe_b64decode(own.recall_handle).decode().split()
    unique = timed.get("UNIQ_KEY", sent["msg_id"])
    handle = base64.urlsafe_b64encode(f"v1 {topic} {broker} {at_ms} {unique}".encode()).decode()
    assert producer.recall(topic, own.recall_handle) == own.msg_id
    assert producer.recall(topic, handle) == unique
    assert producer.recall(topic, handle) == unique  # nothing is left to recall, which is no error


async def test_a_delayed_message_of_the_python_client_arrives_after_its_delay(target: Target, name: Name) -> None:
    topic = name("delayed")
    await fill(target, topic, 0)
    listener = Listener()
    async with producer_of(target, "delaying") as producer:
        for level in (2, 1):
            await producer.send(Message(topic, b"%d" % level, delay_level=level))
    async with PushConsumer(patient(target), name("group"), listener, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
        await listener.wait_count(2)
    assert sorted(listener.bodies) == [b"1", b"2"]
    for got in listener.messages:
        assert got.store_ms - got.born_ms >= DELAYS_MS[int(got.body) - 1]


async def test_a_timed_message_of_the_python_client_arrives_unless_it_is_recalled(target: Target, name: Name) -> None:
    topic = name("timed")
    await fill(target, topic, 0)
    listener = Listener()
    async with producer_of(target, "timing") as producer:
        recalled = await producer.send(Message(topic, b"recalled", delay_ms=3_600_000))
        await producer.send(Message(topic, b"timed", delay_ms=1500))
        await producer.recall(topic, recalled.recall_handle)
        async with PushConsumer(patient(target), name("group"), listener, {topic: "*"}, consume_from=ConsumeFrom.FIRST):
            await listener.wait_count(1)
    [got] = listener.messages
    assert got.body == b"timed"
    assert got.store_ms - got.born_ms >= 1500


# in order


def in_order(topic: str) -> list[dict[str, object]]:
    return [message(topic, f"{key} {i}", sharding_key=key) for i in range(EACH) for key in KEYS]


def check_order(got: list[Line]) -> None:
    """See that each key came in one queue and in its order."""
    by_key: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for line in got:
        key, number = line["body"].split()
        by_key[key].append((line["queue"], int(number)))
    for places in by_key.values():
        [queue] = {queue for queue, _ in places}
        assert places == [(queue, number) for number in range(EACH)]
    assert set(by_key) == set(KEYS)


@pytest.mark.parametrize("language", ["cpp", "go"])
def test_messages_of_a_key_stay_in_order_from_end_to_end(
    language: str, program: Program, newest: Java, target: Target, name: Name
) -> None:
    topic = create(newest, target, name("in_order"))
    program.run(*send_words(language, target.name_server, "orderly", *in_order(topic)))
    words = consume_words(language, target.name_server, name("group"), topic, f"{len(KEYS) * EACH}", "orderly")
    check_order(deliveries(program.run(*words)))


# failures


@pytest.mark.parametrize("language", ["cpp", "go", "node"])
def test_a_message_that_always_fails_becomes_a_dead_letter(
    language: str, program: Program, newest: Java, target: Target, target_kind: str, name: Name
) -> None:
    """The group allows one retry, which matters for the C++ client: the others say themselves how many they want."""
    topic, group = create(newest, target, name("dead"), 1), name("group")
    newest.mqadmin("updateSubGroup", "-b", target.address, "-g", group, "-r", "1")
    newest.producer().send(message(topic, "poison", keys="k"))
    run = program.start(*consume_words(language, target.name_server, group, topic, "1", failures=-1))
    dead = f"%DLQ%{group}"
    if (language, target_kind) == ("cpp", "rocketmq"):
        # It does not send originTopic, without which RocketMQ fails to make a dead letter: the message is lost.
        eventually(lambda: True if len(failures(language, run)) == 2 else None)
        return
    eventually(lambda: True if dead in newest.mqadmin("topicList") else None)
    [letter] = stored(newest, dead, 1)
    assert (letter.body, letter.keys, letter.properties["RETRY_TOPIC"]) == (b"poison", "k", topic)
    assert [line["reconsume_times"] for line in failures(language, run)] == [0, 1]


def failures(language: str, run: Run) -> list[Line]:
    lines = run.lines()
    return [line for line in lines if line.get("event") == "failure"] if language == "cpp" else deliveries(lines)


def test_every_client_climbs_the_whole_ladder(
    martlet: OurBroker, jvm: Jvm, cpp: Program, go: Program, node: Program
) -> None:
    """16 retries and a dead letter. Each pause is a second here; tests/timer/test_ladder.py has the real ones."""
    ours = martlet(settings={"timer.levels": " ".join(["1s"] * 18)})
    java = Java(jvm, ours.name_server)
    runs: dict[str, Run] = {}
    for language, program in (("cpp", cpp), ("go", go), ("node", node), ("java", None)):
        topic, group = f"poison_{language}", f"group_{language}"
        create(java, ours, topic, 1)
        java.producer().send(message(topic, "poison"))
        if program is None:
            consumer = java.push(group, topic, failures=-1)
        else:
            words = consume_words(language, ours.name_server, group, topic, "1", failures=99)
            runs[language] = program.start(*words)
    wanted = {f"%DLQ%group_{language}" for language in (*runs, "java")}
    eventually(lambda: True if wanted <= set(java.mqadmin("topicList").split()) else None)
    for language in (*runs, "java"):
        [letter] = stored(java, f"%DLQ%group_{language}", 1)
        assert (letter.body, letter.properties["RETRY_TOPIC"]) == (b"poison", f"poison_{language}")
    climbed = {"java": [each.reconsume_times for each in consumer.wait(17)]}
    for language, run in runs.items():
        climbed[language] = [line["reconsume_times"] for line in failures(language, run)]
    assert climbed == {language: list(range(17)) for language in climbed}
    java.close()


# broadcast


def test_the_node_client_hears_a_broadcast(node: Program, newest: Java, target: Target, name: Name) -> None:
    """Two members begin at the end of each queue, so pings tell when both listen."""
    topic, group = create(newest, target, name("broadcast"), 2), name("group")
    words = consume_words("node", target.name_server, group, topic, f"{10**9}", "broadcasting")
    members = [node.start(*words) for _ in range(2)]
    producer = newest.producer()

    def heard(run: Run) -> set[str]:
        return {line["body"] for line in deliveries(run.lines())}

    def pinged() -> bool | None:
        producer.send(message(topic, "ping", properties={}), select=0)
        producer.send(message(topic, "ping"), select=1)
        queues = [{line["queue"] for line in deliveries(run.lines())} for run in members]
        return True if queues == [{0, 1}, {0, 1}] else None

    eventually(pinged)
    producer.send(*(message(topic, f"{i}") for i in range(9)))
    wanted = {f"{i}" for i in range(9)}
    assert eventually(lambda: True if all(heard(run) >= wanted for run in members) else None)


# requests


def test_go_answers_java(go: Program, newest: Java, target: Target, name: Name) -> None:
    topic = create(newest, target, name("ask"))
    go.start(*consume_words("go", target.name_server, name("group"), topic, f"{10**9}", "replying"))
    asking = newest.producer(name("asking"))
    assert [asking.request(message(topic, f"{i}"))[0] for i in range(3)] == [b"re: 0", b"re: 1", b"re: 2"]


def test_java_answers_go(go: Program, newest: Java, target: Target, name: Name) -> None:
    topic = create(newest, target, name("ask"))
    newest.push(name("group"), topic, replying=True)
    said = go.run(*send_words("go", target.name_server, "request", *(message(topic, f"{i}") for i in range(3))))
    assert [line["body"] for line in deliveries(said)] == ["re: 0", "re: 1", "re: 2"]


# traces


def test_the_trace_of_a_message_of_the_go_client_names_its_producer_and_its_consumer(
    go: Program, newest: Java, target: Target, name: Name
) -> None:
    topic, group = create(newest, target, name("traced"), 1), name("tracing")
    go.start(*consume_words("go", target.name_server, group, topic, f"{10**9}", "traced"))
    sender = go.start(*send_words("go", target.name_server, "traced", message(topic, "followed", keys="k")))
    sender.wait_lines(1)
    [sent] = deliveries(sender.lines())

    def look() -> str | None:
        said = newest.mqadmin("queryMsgTraceById", "-i", sent["msg_id"])
        return said if "Pub" in said and group in said else None

    said_by_tool = eventually(look)
    assert re.search(r"^Pub +go_sender .* success *$", said_by_tool, re.MULTILINE)
    assert re.search(rf"^Sub +{group} .* success *$", said_by_tool, re.MULTILINE)
