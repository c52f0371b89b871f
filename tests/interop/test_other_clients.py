"""Clients in other languages: the C++, the Go and the Node client, each in a process of its own."""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from martlet_client import ConsumeFrom, blocking

from . import wire
from .conftest import Target
from .fetch import CLIENT_VERSIONS
from .java import Java, Jvm, LitePull, Received, message
from .other_clients import Line, Program, consume_words, deliveries
from .process import eventually
from .test_python_client import patient

Name = Callable[[str], str]

COUNT = 8
ENDLESS = f"{10**9}"


def reader(java: Java, topic: str) -> LitePull:
    return java.lite(f"reader_{topic}", topic, assign=True)


def read(java: Java, topic: str, count: int) -> Counter[bytes]:
    return Counter(m.body for m in reader(java, topic).poll_until(count))


def test_the_cpp_client_sends_in_every_way(cpp: Program, newest: Java, target: Target, name: Name) -> None:
    topic = name("cpp")
    said = cpp.run("produce", target.name_server, topic, f"{COUNT}")
    assert {line["status"] for line in said if line["how"] != "oneway"} == {"OK"}
    expected = Counter(f"{how} {i}".encode() for how in ("sync", "orderly", "oneway") for i in range(COUNT))
    expected[b"large " * 100_000] += 1
    got = read(newest, topic, expected.total() + 1)
    # Its batches do not say that they are batches (the header's batch flag is not set), so a broker stores one message.
    [(batch, once)] = (got - expected).items()
    assert once == 1
    assert [batch.count(b"batch %d" % i) for i in range(COUNT)] == [1] * COUNT
    assert expected - got == Counter()


@pytest.mark.parametrize("how", ["", "orderly"])
def test_the_cpp_client_consumes(cpp: Program, newest: Java, target: Target, name: Name, how: str) -> None:
    topic = name("to_cpp")
    producer = newest.producer(queues=2)
    producer.send(message(topic, "first", tags="T", keys="k0", properties={"number": "0"}))
    child = cpp.start("consume", target.name_server, name("group"), topic, "9", "*", *([how] if how else []))
    child.wait_lines(1)
    for i in range(1, COUNT):
        producer.send(message(topic, f"{i}", tags="T", keys=f"k{i}", properties={"number": f"{i}"}))
    producer.send(message(topic, "large " * 100_000, tags="T", keys="k8", properties={"number": "8"}))
    got = deliveries(child.finish())
    assert {line["number"] for line in got} == {f"{i}" for i in range(9)}
    assert {(line["topic"], line["tags"]) for line in got} == {(topic, "T")}
    assert {line["number"]: line["keys"] for line in got} == {f"{i}": f"k{i}" for i in range(9)}
    assert {line["body_bytes"] for line in got if line["number"] == "8"} == {600_000}


def test_the_cpp_client_hears_a_broadcast(cpp: Program, newest: Java, target: Target, name: Name) -> None:
    """It starts at the end of each queue, so pings tell when it listens."""
    topic = name("cpp_broadcast")
    producer = newest.producer(queues=1)
    producer.send(message(topic, "ping"))
    child = cpp.start("consume", target.name_server, name("group"), topic, ENDLESS, "A || P", "broadcasting")
    child.wait_lines(1)

    def ping() -> bool | None:
        producer.send(message(topic, "ping", tags="P"))
        return True if len(child.lines()) > 1 else None

    eventually(ping)
    producer.send(*(message(topic, f"{i}", tags="A") for i in range(9)))
    wanted = [f"{i}" for i in range(9)]

    def heard() -> list[str] | None:
        bodies = [line["body"] for line in deliveries(child.lines()) if line["tags"] == "A"]
        return bodies if len(bodies) >= len(wanted) else None

    assert sorted(eventually(heard)) == wanted


def test_the_cpp_client_filters_by_tag(cpp: Program, newest: Java, target: Target, name: Name) -> None:
    topic = name("cpp_tags")
    sent = [message(topic, f"{tag}{i}", tags=tag, properties={"number": f"{i}"}) for i in range(4) for tag in "ABC"]
    newest.producer(queues=1).send(*sent)
    got = deliveries(cpp.run("consume", target.name_server, name("group"), topic, "8", "A || C"))
    assert {line["body"] for line in got} == {f"{tag}{i}" for i in range(4) for tag in "AC"}


def go_bodies(line: Line) -> list[bytes]:
    """Return the bodies of the messages that a line of the Go program's `produce` is about."""
    if line["how"] == "large":
        return [b"large " * 100_000]
    numbers = range(COUNT) if line["how"] == "batch" else [line["number"]]
    return [f"{line['how']} {number}".encode() for number in numbers]


def test_the_go_client_sends_in_every_way(go: Program, newest: Java, target: Target, name: Name) -> None:
    topic = name("go")
    queries = newest.queries()
    queries.create_topic(topic, target.address, queues=4)
    said = go.run("produce", target.name_server, topic, f"{COUNT}")
    results = [line for line in deliveries(said) if line["how"] != "oneway"]
    assert {line["status"] for line in results} == {0}
    [batch] = [line for line in results if line["how"] == "batch"]
    assert len(batch["offset_msg_id"].split(",")) == COUNT
    sent = Counter(f"oneway {i}".encode() for i in range(COUNT)) + Counter(
        b for line in results for b in go_bodies(line)
    )
    assert Counter(line["how"] for line in results) == {"sync": COUNT, "async": COUNT, "batch": 1, "large": 1}
    consumer = reader(newest, topic)
    got = consumer.poll_bodies(sent)
    got += consumer.poll_until(sum(queries.offsets(queue)["max"] for queue in consumer.queues()) - len(got))
    assert all(got_at(got, line["queue"], line["offset"]) == go_bodies(line)[0] for line in results)
    repeated = Counter(b for line in said if line.get("event") == "again" for b in go_bodies(line))
    assert sent <= Counter(m.body for m in got) <= sent + repeated


def got_at(messages: Sequence[Received], queue: int, offset: int) -> bytes:
    [body] = [m.body for m in messages if (m.queue, m.offset) == (queue, offset)]
    return body


@pytest.mark.parametrize("how", ["concurrent", "orderly", "broadcasting"])
def test_the_go_client_consumes(go: Program, newest: Java, target: Target, name: Name, how: str) -> None:
    topic = name("to_go")
    producer = newest.producer(queues=2)
    producer.send(message(topic, "first", tags="T", keys="k0", properties={"number": "0"}))
    child = go.start("consume", target.name_server, name("group"), topic, f"{COUNT + 1}", "*", how, "0")
    child.wait_lines(1)
    for i in range(1, COUNT):
        producer.send(message(topic, f"{i}", tags="T", keys=f"k{i}", properties={"number": f"{i}"}))
    producer.send(message(topic, "large " * 100_000, tags="T", keys="k8", properties={"number": "8"}))
    got = deliveries(child.finish())
    assert {line["number"] for line in got} == {f"{i}" for i in range(9)}
    assert {(line["topic"], line["tags"]) for line in got} == {(topic, "T")}
    assert {line["body_bytes"] for line in got if line["number"] == "8"} == {600_000}


def test_the_go_client_filters_by_tag(go: Program, newest: Java, target: Target, name: Name) -> None:
    topic = name("go_tags")
    newest.producer(queues=1).send(*(message(topic, f"{tag}{i}", tags=tag) for i in range(4) for tag in "ABC"))
    words = ("consume", target.name_server, name("group"), topic, "8", "A || C", "concurrent", "0")
    assert {line["body"] for line in deliveries(go.run(*words))} == {f"{tag}{i}" for i in range(4) for tag in "AC"}


def test_the_go_client_is_given_a_failed_message_again(go: Program, newest: Java, target: Target, name: Name) -> None:
    topic = name("go_retry")
    newest.producer(queues=1).send(message(topic, "again"))
    got = deliveries(go.run("consume", target.name_server, name("group"), topic, "1", "*", "concurrent", "2"))
    assert {line["body"] for line in got} == {"again"}
    assert [line["reconsume_times"] for line in got] == [0, 1, 2]


def test_the_cpp_client_is_given_a_failed_message_again(cpp: Program, newest: Java, target: Target, name: Name) -> None:
    topic = name("cpp_retry")
    newest.producer(queues=1).send(message(topic, "again", properties={"number": "0"}))
    said = cpp.run("consume", target.name_server, name("group"), topic, "1", "*", "2")
    assert [line["reconsume_times"] for line in said if line.get("event") == "failure"] == [0, 1]
    [accepted] = deliveries(said)
    assert (accepted["body"], accepted["reconsume_times"]) == ("again", 2)


def test_the_node_client_is_given_a_failed_message_again(
    node: Program, newest: Java, target: Target, name: Name
) -> None:
    topic = name("node_retry")
    newest.producer(queues=1).send(message(topic, "again"))
    got = deliveries(node.run(target.name_server, name("group"), topic, "1", "2"))
    assert [(line["body"], line["reconsume_times"]) for line in got] == [("again", 0), ("again", 1), ("again", 2)]


def test_the_node_client_may_commit_that_it_has_consumed_nothing(
    node: Program, newest: Java, target: Target, name: Name
) -> None:
    topic, group = name("node_commit"), name("group")
    newest.queries().create_topic(topic, target.address, queues=2)
    run = node.start(target.name_server, group, topic, "1", "0")

    def commits() -> list[Line]:
        return [line for line in run.lines() if line.get("event") == "commit" and line["topic"] == topic]

    eventually(lambda: True if {line["queue"] for line in commits() if line["offset"] == -1} == {0, 1} else None)
    place = {"consumerGroup": group, "topic": topic, "queueId": "0"}
    answer = wire.ask(target.address, wire.UPDATE_CONSUMER_OFFSET, {**place, "commitOffset": "-1"})
    assert answer is not None
    assert answer.code == 0
    newest.producer().send(message(topic, "first"))
    assert [line["body"] for line in deliveries(run.finish())] == ["first"]


@pytest.mark.parametrize("language", ["cpp", "go", "node"])
def test_every_client_reads_the_records_of_a_batch(
    language: str, request: pytest.FixtureRequest, newest: Java, target: Target, name: Name
) -> None:
    """Martlet stores a batch as an atomic group, whose records have bits in sysFlag that RocketMQ does not know."""
    program: Program = request.getfixturevalue(language)
    topic, group = name("batch"), name("group")
    sent = [message(topic, f"{i}" * (1 + 4 * i), keys=f"k{i}") for i in range(COUNT)]
    newest.producer(queues=1).send(*sent, how="batch")
    words = {
        "cpp": ("consume", target.name_server, group, topic, f"{COUNT}", "*"),
        "go": ("consume", target.name_server, group, topic, f"{COUNT}", "*", "concurrent", "0"),
        "node": (target.name_server, group, topic, f"{COUNT}", "0"),
    }
    got = deliveries(program.run(*words[language]))
    assert {line["body"] for line in got} == {f"{i}" * (1 + 4 * i) for i in range(COUNT)}


@pytest.mark.parametrize("language", ["cpp", "go", "node"])
def test_a_reset_reaches_every_running_client(
    language: str, request: pytest.FixtureRequest, newest: Java, target: Target, name: Name
) -> None:
    program: Program = request.getfixturevalue(language)
    topic, group = name(f"{language}_reset"), name("group")
    newest.producer(queues=1).send(*(message(topic, f"{i}") for i in range(COUNT)))
    place = (target.name_server, group, topic, ENDLESS)
    words = {
        "cpp": ("consume", *place, "*"),
        "go": ("consume", *place, "*", "concurrent", "0"),
        "node": (*place, "0"),
    }
    child = program.start(*words[language])

    def delivered(times: int) -> bool | None:
        got = Counter(line["body"] for line in deliveries(child.lines()))
        return True if got == {f"{i}": times for i in range(COUNT)} else None

    eventually(lambda: delivered(1))
    wire.wait_committed(target.address, group, topic, COUNT, queues=1)
    assert "#offset" in newest.mqadmin("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
    eventually(lambda: delivered(2))


def test_a_reset_is_pushed_to_running_clients(
    cpp: Program, go: Program, jvms: Callable[[str], Jvm], newest: Java, target: Target, target_kind: str, name: Name
) -> None:
    """The broker sends the offsets instead of using them itself; Node ignores what a broker sends it."""
    older = Java(jvms(CLIENT_VERSIONS[0]), target.name_server)
    sent = [f"{i}" for i in range(COUNT)]
    topics = {language: name(language) for language in ("older", "newest", "cpp", "go", "python")}
    groups = {language: name(f"{language}_group") for language in topics}
    newest.producer(queues=1).send(*(message(topic, body) for topic in topics.values() for body in sent))
    consumers = {
        which: java.push(groups[which], topics[which]) for which, java in (("older", older), ("newest", newest))
    }
    runs = {
        which: program.start(*consume_words(which, target.name_server, groups[which], topics[which], ENDLESS))
        for which, program in (("cpp", cpp), ("go", go))
    }

    heard: list[str] = []
    python = blocking.PushConsumer(
        patient(target),
        groups["python"],
        lambda received: heard.append(received.body.decode()),
        {topics["python"]: "*"},
        consume_from=ConsumeFrom.FIRST,
    )

    def counts() -> dict[str, Counter[str]]:
        """Return how often each group was given each message."""
        got = {which: Counter(m.body.decode() for m in consumer.seen) for which, consumer in consumers.items()}
        got["python"] = Counter(heard)
        return got | {which: Counter(line["body"] for line in deliveries(run.lines())) for which, run in runs.items()}

    def more_than(before: dict[str, Counter[str]], which: str) -> bool:
        return all(counts()[which][body] > before[which][body] for body in sent)

    with python:
        none = {which: Counter[str]() for which in topics}
        eventually(lambda: True if all(more_than(none, which) for which in topics) else None)
        change = ("updateBrokerConfig", "-b", target.address, "-k", "useServerSideResetOffset", "-v")
        assert "success" in newest.mqadmin(*change, "false")
        try:
            for which, topic in topics.items():
                wire.wait_committed(target.address, groups[which], topic, COUNT, queues=1)
            before = counts()
            for which, topic in topics.items():
                assert "#offset" in newest.mqadmin("resetOffsetByTime", "-g", groups[which], "-t", topic, "-s", "0")
        finally:
            newest.mqadmin(*change, "true")
        reached = [
            which for which in topics if which != "cpp" or target_kind == "martlet"
        ]  # RocketMQ sends it Java's form
        eventually(lambda: True if all(more_than(before, which) for which in reached) else None)
    older.leave()


@pytest.mark.parametrize("language", ["cpp", "go"])
def test_the_admin_tool_asks_running_clients(
    language: str, request: pytest.FixtureRequest, newest: Java, target: Target, name: Name
) -> None:
    program: Program = request.getfixturevalue(language)
    topic, group = name(f"{language}_asked"), name("group")
    [sent] = newest.producer(queues=1).send(message(topic, "x"))
    child = program.start(*consume_words(language, target.name_server, group, topic, ENDLESS))
    eventually(lambda: True if deliveries(child.lines()) else None)
    [client] = re.findall(r"(?m)^(\S+@\S+) +\S+:\d+ ", newest.mqadmin("consumerConnection", "-g", group))
    said = newest.mqadmin("consumerStatus", "-g", group, "-i", client)
    assert re.search(rf"(?m)^{topic} +\S+ +0 +1 *$", said), said
    assert re.search(rf"Topic: {topic} +ClassFilter: false +SubExpression: \*", said), said
    if language == "go":  # C++ consumes nothing that a broker sends it
        words = ("-t", topic, "-i", sent.offset_msg_id, "-g", group, "-d", client)
        assert "consumeResult=CR_SUCCESS" in newest.mqadmin("queryMsgById", *words)
        assert [line["body"] for line in deliveries(child.lines())] == ["x", "x"]


def test_the_admin_tool_asks_running_java_clients(java: Java, name: Name) -> None:
    topic, group = name("asked"), name("group")
    [sent] = java.producer(queues=1).send(message(topic, "x"))
    consumer = java.push(group, topic)
    consumer.wait(1)
    [client] = re.findall(r"(?m)^(\S+@\S+) +\S+:\d+ ", java.mqadmin("consumerConnection", "-g", group))
    assert re.search(rf"(?m)^{topic} +\S+ +0 +1 ", java.mqadmin("consumerStatus", "-g", group, "-i", client))
    words = ("queryMsgByUniqueKey", "-t", topic, "-i", sent.msg_id, "-g", group, "-d", client)
    assert "consumeResult=CR_SUCCESS" in java.mqadmin(*words)
    assert [m.body for m in consumer.wait(2)] == [b"x", b"x"]
