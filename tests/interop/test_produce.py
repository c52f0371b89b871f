"""The Java producer: every way to send, and what it is told."""

from collections.abc import Callable

from .java import Java, Queue, Received, Sent, message

Name = Callable[[str], str]


def consumed(java: Java, topic: str, count: int) -> list[Received]:
    """Read a topic from its beginning with a consumer of no group's offsets."""
    return java.lite(f"reader_{topic}", topic, assign=True).poll_until(count)


def test_a_synchronous_send_answers_with_its_place_in_the_log(java: Java, name: Name) -> None:
    topic = name("sync")
    producer = java.producer(queues=4)
    sent = producer.send(*(message(topic, f"body {i}", tags="A", keys=f"key-{i}") for i in range(20)))
    assert {s.status for s in sent} == {"SEND_OK"}
    assert len({s.msg_id for s in sent}) == 20
    got = consumed(java, topic, 20)
    places = {(m.queue, m.offset, m.msg_id, m.offset_msg_id) for m in got}
    assert places == {(s.queue, s.offset, s.msg_id, s.offset_msg_id) for s in sent}
    for queue in {s.queue for s in sent}:
        offsets = [s.offset for s in sent if s.queue == queue]
        assert offsets == list(range(len(offsets))), "offsets of a queue count from 0 without a gap"


def test_what_is_sent_arrives_whole(java: Java, name: Name) -> None:
    topic = name("whole")
    properties = {"colour": "röt", "path": "a=b;c|d", "number": "17"}
    body = bytes(range(256))
    [sent] = java.producer().send(message(topic, body, tags="TagA", keys="k1 k2", properties=properties))
    [got] = consumed(java, topic, 1)
    assert got.body == body
    assert (got.tags, got.keys) == ("TagA", "k1 k2")
    assert {key: got.properties[key] for key in properties} == properties
    assert got.msg_id == sent.msg_id
    assert got.properties["UNIQ_KEY"] == sent.msg_id
    assert got.reconsume_times == 0
    assert got.born_ms <= got.stored_ms


def test_asynchronous_sends_all_answer(java: Java, name: Name) -> None:
    topic = name("async")
    producer = java.producer(queues=4)
    producer.send(message(topic, "first"))
    sent = producer.send(*(message(topic, f"{i}") for i in range(200)), how="async")
    assert {s.status for s in sent} == {"SEND_OK"}
    got = consumed(java, topic, 201)
    assert sorted(m.body for m in got) == sorted([b"first", *(b"%d" % i for i in range(200))])


def test_oneway_sends_arrive(java: Java, name: Name) -> None:
    topic = name("oneway")
    producer = java.producer()
    producer.send(message(topic, "first"))
    producer.send(*(message(topic, f"{i}") for i in range(50)), how="oneway")
    got = consumed(java, topic, 51)
    assert {m.body for m in got} == {b"first", *(b"%d" % i for i in range(50))}


def test_a_batch_is_stored_message_by_message(java: Java, name: Name) -> None:
    topic = name("batch")
    batch = [message(topic, f"{i}", tags="T", keys=f"b{i}", properties={"n": str(i)}) for i in range(10)]
    [sent] = java.producer().send(*batch, how="batch")
    assert sent.status == "SEND_OK"
    ids = sent.msg_id.split(",")
    offset_ids = sent.offset_msg_id.split(",")
    assert len(ids) == len(offset_ids) == 10
    got = sorted(consumed(java, topic, 10), key=lambda m: m.offset)
    assert [m.body for m in got] == [b"%d" % i for i in range(10)]
    assert [m.offset for m in got] == list(range(sent.offset, sent.offset + 10))
    assert [m.msg_id for m in got] == ids
    assert [m.offset_msg_id for m in got] == offset_ids
    assert [(m.tags, m.keys, m.properties["n"]) for m in got] == [("T", f"b{i}", str(i)) for i in range(10)]
    assert len({m.queue for m in got}) == 1


def test_a_selector_decides_the_queue(java: Java, name: Name) -> None:
    topic = name("select")
    producer = java.producer(queues=4)
    producer.send(message(topic, "first"))
    for how in ("sync", "async"):
        for number in range(4):
            sent = producer.send(message(topic, "a"), message(topic, "b"), how=how, select=number)
            assert {s.queue for s in sent} == {number}
    producer.send(message(topic, "one way"), how="oneway", select=3)
    assert [m.queue for m in consumed(java, topic, 18) if m.body == b"one way"] == [3]


def test_a_message_goes_to_the_queue_that_is_named(java: Java, name: Name) -> None:
    topic = name("to")
    producer = java.producer(queues=4)
    producer.send(message(topic, "first"))
    queues = producer.queues(topic)
    assert [q.queue for q in queues] == [0, 1, 2, 3]
    for queue in queues:
        [sent] = producer.send(message(topic, "x"), to=queue)
        assert Queue(topic, sent.broker, sent.queue) == queue


def test_a_large_body_travels_compressed_and_arrives_whole(java: Java, name: Name) -> None:
    topic = name("large")
    body = b"compress me well " * 100_000
    java.producer().send(message(topic, body))
    [got] = consumed(java, topic, 1)
    assert got.body == body
    assert got.stored_size < len(body) / 50, "the client compressed it and the broker stored it as it came"


def test_a_body_at_the_limit_is_taken(java: Java, name: Name) -> None:
    topic = name("limit")
    body = b"x" * (4 * 1024 * 1024 - 1024)
    producer = java.producer(compress_over=1 << 30)
    producer.send(message(topic, body))
    [got] = consumed(java, topic, 1)
    assert got.body == body


def refusals(sent: list[Sent]) -> list[int]:
    return [s.error.code if s.error is not None else 0 for s in sent]


def test_a_body_over_the_limit_is_refused_with_message_illegal(java: Java, name: Name) -> None:
    topic = name("over")
    producer = java.producer(compress_over=1 << 30, size_max=16 << 20, retries=0)
    producer.send(message(topic, "first"))
    body = b"x" * (4 * 1024 * 1024 + 1024)
    assert refusals(producer.try_send(message(topic, body))) == [13]
    assert [m.body for m in consumed(java, topic, 1)] == [b"first"]
