"""The Java lite pull consumer and the questions a tool asks: by id, by key, by time."""

import time
from collections import Counter
from collections.abc import Callable

import pytest

from . import wire
from .conftest import Target
from .java import Failed, Java, Queue, found, message
from .process import eventually

Name = Callable[[str], str]


def bodies(count: int, prefix: str = "") -> list[bytes]:
    return [f"{prefix}{i}".encode() for i in range(count)]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def test_a_subscribed_lite_consumer_reads_and_commits(java: Java, target: Target, name: Name) -> None:
    topic, group = name("lite"), name("group")
    java.producer(queues=2).send(*(message(topic, body) for body in bodies(20)))
    consumer = java.lite(group, topic)
    assert Counter(m.body for m in consumer.poll_until(20)) == Counter(bodies(20))
    consumer.commit()
    assert sum(eventually(lambda: committed_all(consumer.queues(), consumer.committed, 20))) == 20
    consumer.stop()
    wire.wait_committed(target.address, group, topic, 20, queues=2)
    java.producer().send(message(topic, "more"))
    assert [m.body for m in java.lite(group, topic).poll_until(1)] == [b"more"]


def committed_all(queues: list[Queue], committed: Callable[[Queue], int], count: int) -> list[int] | None:
    offsets = [max(0, committed(queue)) for queue in queues]
    return offsets if sum(offsets) == count else None


def test_a_lite_consumer_seeks_to_any_place(java: Java, name: Name) -> None:
    topic = name("seek")
    java.producer(queues=1).send(*(message(topic, body) for body in bodies(10)))
    consumer = java.lite(name("group"), topic, assign=True)
    [queue] = consumer.queues()
    assert [m.body for m in consumer.poll_until(10)] == bodies(10)
    consumer.seek(queue, 7)
    assert [m.body for m in consumer.poll_until(3)] == bodies(10)[7:]
    consumer.seek(queue, "begin")
    assert [m.body for m in consumer.poll_until(10)] == bodies(10)
    consumer.seek(queue, "end")
    java.producer().send(message(topic, "tail"))
    assert [m.body for m in consumer.poll_until(1)] == [b"tail"]


def test_a_seek_out_of_range_is_refused(java: Java, name: Name) -> None:
    topic = name("range")
    java.producer(queues=1).send(*(message(topic, body) for body in bodies(3)))
    consumer = java.lite(name("group"), topic, assign=True)
    [queue] = consumer.queues()
    with pytest.raises(Failed) as refused:
        consumer.seek(queue, 4)
    assert "min offset = 0, max offset = 3" in refused.value.message


def test_a_lite_consumer_filters_by_tag(java: Java, name: Name) -> None:
    topic = name("lite_tags")
    java.producer(queues=1).send(*(message(topic, f"{tag}{i}", tags=tag) for i in range(3) for tag in "AB"))
    consumer = java.lite(name("group"), topic, expression="B")
    assert [m.body for m in consumer.poll_until(3)] == bodies(3, "B")


def test_a_poll_wakes_when_a_message_arrives(java: Java, name: Name) -> None:
    topic = name("wake")
    producer = java.producer(queues=1)
    producer.send(message(topic, "first"))
    consumer = java.lite(name("group"), topic, assign=True)
    consumer.poll_until(1)
    for i in range(5):
        producer.send(message(topic, f"{i}"))
        assert [m.body for m in consumer.poll_until(1)] == [b"%d" % i]


def test_an_offset_is_found_by_time(java: Java, name: Name) -> None:
    topic = name("time")
    producer = java.producer(queues=1)
    marks: list[int] = []
    for body in bodies(4):
        eventually(lambda: True if not marks or now_ms() > marks[-1] + 20 else None)
        producer.send(message(topic, body))
        marks.append(now_ms())
    consumer = java.lite(name("group"), topic, assign=True)
    [queue] = consumer.queues()
    got = consumer.poll_until(4)
    assert [consumer.offset_at(queue, m.stored_ms) for m in got] == [0, 1, 2, 3]
    assert consumer.offset_at(queue, got[1].stored_ms + 1) == 2
    assert consumer.offset_at(queue, 0) == 0
    queries = java.queries()
    assert queries.offset_at(queue, got[2].stored_ms) == 2
    assert queries.offsets(queue) == {"min": 0, "max": 4, "earliest_ms": got[0].stored_ms}


def test_a_time_after_the_last_message_answers_the_last_place(java: Java, name: Name) -> None:
    topic = name("after")
    java.producer(queues=1).send(*(message(topic, body) for body in bodies(3)))
    consumer = java.lite(name("group"), topic, assign=True)
    got = consumer.poll_until(3)
    [queue] = consumer.queues()
    assert consumer.offset_at(queue, got[-1].stored_ms + 3_600_000) == 3


def test_a_message_is_found_by_either_id(java: Java, name: Name, target: Target) -> None:
    topic = name("ids")
    sent = java.producer(queues=1).send(*(message(topic, body, keys=f"k-{body.decode()}") for body in bodies(3)))
    queries = java.queries()
    by_offset = queries.view(topic, sent[1].offset_msg_id)
    assert (by_offset.body, by_offset.queue, by_offset.offset) == (b"1", sent[1].queue, 1)
    by_unique = eventually(lambda: found(lambda: queries.view(topic, sent[2].msg_id)))
    assert (by_unique.body, by_unique.offset) == (b"2", 2)


def test_messages_are_found_by_key(java: Java, name: Name) -> None:
    topic = name("keys")
    java.producer(queues=2).send(
        *(message(topic, f"{i}", keys=f"order-{i % 3} all") for i in range(9)), message(topic, "none")
    )
    queries = java.queries()

    def look(key: str, count: int) -> list[bytes] | None:
        got = found(lambda: queries.by_key(topic, key))
        return sorted(m.body for m in got) if got is not None and len(got) == count else None

    assert eventually(lambda: look("order-1", 3)) == [b"1", b"4", b"7"]
    assert eventually(lambda: look("all", 9)) == bodies(9)
    assert len(queries.by_key(topic, "all", count_max=4)) == 4
    with pytest.raises(Failed) as nothing:
        queries.by_key(topic, "order-3")
    assert nothing.value.code == 208


def test_a_message_id_that_is_not_there_is_an_error(java: Java, name: Name) -> None:
    topic = name("missing")
    [sent] = java.producer(queues=1).send(message(topic, "x"))
    beyond = sent.offset_msg_id[:16] + "00000000FFFFFF00"
    with pytest.raises(Failed):
        java.queries().view(topic, beyond)
