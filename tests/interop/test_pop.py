"""Stock Java consumers in POP mode: they share queues, retry, and what a dead one held goes to the others."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import fetch, rocketmq, wire
from .conftest import Target
from .java import Java, Jvm, PushConsumer, message
from .process import eventually
from .store_exchange import OurBroker, RealBroker

Name = Callable[[str], str]
POP_MESSAGE = 200050
ACK_MESSAGE = 200051
INVISIBLE_MS = 5000  # the least that the Java client asks for


def in_pop_mode(java: Java, target: Target, topic: str, group: str, queues: int = 4) -> None:
    """Create a topic, and have its group pop it."""
    java.queries().create_topic(topic, target.address, queues=queues)
    words = ("setConsumeMode", "-b", target.address, "-t", topic, "-g", group, "-q", "0", "-m", "POP")
    assert "success" in java.mqadmin(*words)


def popping(java: Java, group: str, topic: str, **more: object) -> PushConsumer:
    """Start a consumer that pops, and wait until it has begun."""
    consumer = java.push(group, topic, client_rebalance=False, **more)
    eventually(lambda: True if any(q.queue == -1 and q.topic == topic for q in consumer.queues()) else None)
    return consumer


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Jvm]:
    """A JVM that the test kills."""
    jvm = Jvm(fetch.CLIENT_VERSIONS[-1], tmp_path / "doomed", {"rocketmq.client.rebalance.waitInterval": "1000"})
    yield jvm
    if jvm.running:
        jvm.kill()


def test_a_consumer_pops_every_message_once(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("popped"), name("group")
    in_pop_mode(newest, target, topic, group)
    consumer = popping(newest, group, topic)
    bodies = [f"{i}".encode() for i in range(100)]
    newest.producer().send(*(message(topic, body) for body in bodies))
    seen = consumer.wait(lambda seen: {m.body for m in seen} == set(bodies))
    assert all("POP_CK" in m.properties for m in seen)
    wire.wait_committed(target.address, group, topic, 100, 4)
    assert Counter(m.body for m in consumer.seen) == Counter(bodies)


def test_a_consumer_selects_by_tag(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("tagged"), name("group")
    in_pop_mode(newest, target, topic, group, queues=1)
    consumer = popping(newest, group, topic, expression="A || C")
    newest.producer().send(*(message(topic, f"{i}", tags="ABC"[i % 3]) for i in range(30)))
    consumer.wait_bodies([f"{i}".encode() for i in range(30) if i % 3 != 1])
    wire.wait_committed(target.address, group, topic, 30, 1)
    assert {m.tags for m in consumer.seen} == {"A", "C"}


def test_a_failed_message_comes_again_with_its_number_of_failures(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("retried"), name("group")
    in_pop_mode(newest, target, topic, group, queues=1)
    consumer = popping(newest, group, topic, failures=1)
    newest.producer().send(message(topic, "once more"))
    first, again = consumer.wait(2)[:2]
    assert (first.reconsume_times, first.accepted) == (0, False)
    assert (again.reconsume_times, again.accepted) == (1, True)
    wire.wait_committed(target.address, group, topic, 1, 1)


def test_what_a_killed_consumer_held_goes_to_the_other(newest: Java, doomed: Jvm, target: Target, name: Name) -> None:
    topic, group = name("shared"), name("group")
    in_pop_mode(newest, target, topic, group, queues=2)
    lost = Java(doomed, target.name_server)
    dying = popping(lost, group, topic, failures=-1, invisible_ms=60_000)
    bodies = [f"{i}".encode() for i in range(40)]
    newest.producer().send(*(message(topic, body) for body in bodies))
    dying.wait_bodies(bodies)
    doomed.kill()
    heir = popping(newest, group, topic, invisible_ms=INVISIBLE_MS)
    more = [f"more {i}".encode() for i in range(10)]
    newest.producer("later").send(*(message(topic, body) for body in more))
    seen = heir.wait_bodies(bodies + more)
    assert Counter(m.body for m in seen) == Counter(bodies + more)
    assert all((m.reconsume_times > 0) == (m.body in set(bodies)) for m in seen)
    wire.wait_committed(target.address, group, topic, 50, 2)


def test_two_consumers_share_one_queue(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("one"), name("group")
    in_pop_mode(newest, target, topic, group, queues=1)
    members = [popping(newest, group, topic), popping(newest, group, topic)]
    sent: list[bytes] = []
    producer = newest.producer()

    def both() -> bool | None:
        body = f"{len(sent)}".encode()
        producer.send(message(topic, body))
        sent.append(body)
        return True if all(member.seen for member in members) else None

    eventually(both)
    eventually(lambda: True if {m.body for c in members for m in c.seen} == set(sent) else None)
    wire.wait_committed(target.address, group, topic, len(sent), 1)
    assert Counter(m.body for c in members for m in c.seen) == Counter(sent)


def test_messages_that_were_popped_and_not_acknowledged_come_from_rocketmq_after_a_move(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm
) -> None:
    ours = martlet()
    clients = Java(jvm, ours.name_server)
    clients.queries().create_topic("Moved", ours.address, queues=1)
    clients.producer().send(*(message("Moved", f"{i}") for i in range(5)))
    where = {"consumerGroup": "movers", "topic": "Moved", "queueId": "0"}
    pop = {"maxMsgNums": "4", "invisibleTime": "600000", "pollTime": "0", "bornTime": "0", "initMode": "0"}
    answer = wire.ask(ours.address, POP_MESSAGE, {**where, **pop})
    assert answer is not None
    assert answer.fields["msgOffsetInfo"] == "0 0 0,1,2,3"
    for offset in (0, 2):
        handle = f"0 {answer.fields['popTime']} 600000 0 0 broker-a 0 {offset}"
        acked = wire.ask(ours.address, ACK_MESSAGE, {**where, "extraInfo": handle, "offset": str(offset)})
        assert acked is not None
        assert (acked.code, acked.remark) == (0, "")
    clients.close()
    assert ours.stop() == 0
    real_broker()
    clients = Java(jvm, names.address)
    seen = clients.push("movers", "Moved").wait_bodies([b"1", b"2", b"3", b"4"])
    assert b"0" not in {m.body for m in seen}
    clients.close()
