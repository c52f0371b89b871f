"""Consumers that take the queues that the broker tells them: Java 5.x with setClientRebalance(false)."""

from collections import Counter
from collections.abc import Callable

from .conftest import Target
from .java import Java, PushConsumer, message
from .process import eventually

Name = Callable[[str], str]


def told(java: Java, group: str, topic: str, **more: object) -> PushConsumer:
    return java.push(group, topic, client_rebalance=False, **more)


def wait_queues(consumer: PushConsumer, topic: str, wanted: set[int]) -> None:
    eventually(lambda: True if {q.queue for q in consumer.queues() if q.topic == topic} == wanted else None)


def test_it_gets_every_message_and_its_retries(newest: Java, name: Name) -> None:
    topic = name("told")
    bodies = [f"{i}".encode() for i in range(20)]
    newest.producer(queues=4).send(*(message(topic, body) for body in bodies))
    consumer = told(newest, name("group"), topic, failures=1)
    seen = consumer.wait(lambda seen: {m.body for m in seen if m.accepted} == set(bodies))
    assert Counter(m.body for m in seen) == Counter(bodies * 2)
    assert {m.reconsume_times for m in seen} == {0, 1}


def test_members_share_the_queues_as_they_come_and_go(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("told"), name("group")
    newest.queries().create_topic(topic, target.address, queues=6)
    one = told(newest, group, topic)
    wait_queues(one, topic, {0, 1, 2, 3, 4, 5})
    two, three = told(newest, group, topic), told(newest, group, topic)
    # Members are in the order of their client ids, which these tests do not choose.
    everybody = [one, two, three]
    shares = [{0, 1}, {2, 3}, {4, 5}]

    def held(members: list[PushConsumer]) -> list[list[int]]:
        return sorted(sorted(q.queue for q in member.queues() if q.topic == topic) for member in members)

    eventually(lambda: True if held(everybody) == sorted(map(sorted, shares)) else None)
    bodies = [f"{i}".encode() for i in range(60)]
    newest.producer().send(*(message(topic, body) for body in bodies))
    eventually(lambda: True if {m.body for c in everybody for m in c.seen} == set(bodies) else None)
    assert all(member.seen for member in everybody)
    one.stop()
    eventually(lambda: True if held([two, three]) == [[0, 1, 2], [3, 4, 5]] else None)
    two.stop()
    wait_queues(three, topic, {0, 1, 2, 3, 4, 5})
    more = [f"more {i}".encode() for i in range(20)]
    newest.producer("later").send(*(message(topic, body) for body in more))
    three.wait_bodies(more)


def test_a_told_member_and_one_that_chooses_agree(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("mixed"), name("group")
    newest.queries().create_topic(topic, target.address, queues=4)
    members = [told(newest, group, topic), newest.push(group, topic)]

    def held() -> list[list[int]]:
        return sorted(sorted(q.queue for q in member.queues() if q.topic == topic) for member in members)

    eventually(lambda: True if held() == [[0, 1], [2, 3]] else None)
    bodies = [f"{i}".encode() for i in range(40)]
    newest.producer().send(*(message(topic, body) for body in bodies))
    eventually(lambda: True if {m.body for c in members for m in c.seen} == set(bodies) else None)
    assert all(member.seen for member in members)


def test_the_admin_tool_sets_pull_mode(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("mode"), name("group")
    newest.producer(queues=1).send(message(topic, "first"))
    newest.push(group, topic).wait_bodies([b"first"])
    words = ("setConsumeMode", "-b", target.address, "-t", topic, "-g", group, "-q", "0")
    assert "success" in newest.mqadmin(*words, "-m", "PULL")
    newest.producer("later").send(message(topic, "second"))
    told(newest, name("other"), topic).wait_bodies([b"first", b"second"])
