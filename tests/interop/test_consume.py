"""The Java push consumer: who gets which message, in which order, and how often."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest

from . import fetch, wire
from .conftest import Target
from .java import Java, Jvm, Producer, PushConsumer, Received, message
from .process import eventually

Name = Callable[[str], str]


def bodies(count: int, prefix: str = "") -> list[bytes]:
    return [f"{prefix}{i}".encode() for i in range(count)]


def together(consumers: list[PushConsumer], wanted: Iterable[bytes]) -> list[Received]:
    """Return what several consumers saw once every body in *wanted* is there."""
    awaited = set(wanted)

    def look() -> list[Received] | None:
        seen = [m for consumer in consumers for m in consumer.seen]
        return seen if awaited <= {m.body for m in seen} else None

    return eventually(look)


def share_evenly(consumers: list[PushConsumer], topic: str, queues: int) -> None:
    """Wait until each consumer holds its share of the queues and no queue has two holders."""

    def look() -> bool | None:
        held = [[q for q in consumer.queues() if q.topic == topic] for consumer in consumers]
        return (
            True
            if all(len(h) == queues // len(consumers) for h in held) and len(set(chain.from_iterable(held))) == queues
            else None
        )

    eventually(look)


def test_a_group_shares_the_messages_of_a_topic(java: Java, name: Name) -> None:
    topic, group = name("shared"), name("group")
    producer = java.producer(queues=4)
    producer.send(message(topic, "first"))
    one = java.push(group, topic)
    one.wait_bodies([b"first"])
    two = java.push(group, topic)
    share_evenly([one, two], topic, 4)
    producer.send(*(message(topic, body) for body in bodies(100)))
    got = Counter(m.body for m in together([one, two], bodies(100)))
    # The second member may ask where to begin before the first has told that it consumed the first message.
    assert got.pop(b"first") in (1, 2)
    assert got == Counter(bodies(100))
    assert len(one.seen) > 10
    assert len(two.seen) > 10


def send_until_taken(producer: Producer, topic: str, wanted: list[bytes]) -> None:
    """Send; a producer learns some time later how many queues there are, and is refused in those that are gone."""
    left = list(wanted)

    def look() -> bool | None:
        (result,) = producer.try_send(message(topic, left[0]))
        if result.error is None:
            del left[0]
        return None if left else True

    eventually(look)


@pytest.mark.parametrize("orderly", [False, True])
def test_a_topic_with_fewer_queues_brings_what_was_in_the_others(
    java: Java, target: Target, target_kind: str, name: Name, orderly: bool
) -> None:
    """RocketMQ's broker takes the queues away at once, with what nobody has consumed."""
    topic, group = name("fewer"), name("group")
    admin, producer = java.queries(), java.producer(queues=8)
    admin.create_topic(topic, target.address, queues=8)
    producer.send(*(message(topic, body) for body in bodies(40, "a")))
    consumer = java.push(group, topic, orderly=orderly)
    consumer.wait_bodies(bodies(40, "a"))
    consumer.stop()
    producer.send(*(message(topic, body) for body in bodies(40, "b")))
    admin.create_topic(topic, target.address, queues=2)
    late = java.push(group, topic, orderly=orderly)
    left = late.wait_bodies(bodies(40, "b") if target_kind == "martlet" else [])
    assert target_kind == "rocketmq" or Counter(m.body for m in left) == Counter(bodies(40, "b"))
    send_until_taken(producer, topic, bodies(20, "c"))
    late.wait_bodies(bodies(20, "c"))
    admin.create_topic(topic, target.address, queues=6)
    send_until_taken(producer, topic, bodies(20, "d"))
    late.wait_bodies(bodies(20, "d"))


def test_two_groups_each_get_everything(java: Java, name: Name) -> None:
    topic = name("topic")
    producer = java.producer(queues=2)
    producer.send(*(message(topic, body) for body in bodies(20)))
    one, two = java.push(name("one"), topic), java.push(name("two"), topic)
    for consumer in (one, two):
        assert Counter(m.body for m in consumer.wait_bodies(bodies(20))) == Counter(bodies(20))


def test_broadcasting_gives_everything_to_every_member(java: Java, name: Name) -> None:
    topic, group = name("broadcast"), name("group")
    producer = java.producer(queues=4)
    producer.send(message(topic, "first"))
    members = [java.push(group, topic, broadcasting=True) for _ in range(2)]
    producer.send(*(message(topic, body) for body in bodies(40)))
    for member in members:
        seen = member.wait_bodies([b"first", *bodies(40)])
        assert Counter(m.body for m in seen) == Counter([b"first", *bodies(40)])


@pytest.mark.parametrize("orderly", [False, True], ids=["concurrent", "orderly"])
def test_a_group_goes_on_where_it_stopped(java: Java, target: Target, name: Name, orderly: bool) -> None:
    topic, group = name("resume"), name("group")
    producer = java.producer(queues=2)
    producer.send(*(message(topic, body) for body in bodies(10, "a")))
    before = java.push(group, topic, orderly=orderly)
    before.wait_bodies(bodies(10, "a"))
    wire.wait_committed(target.address, group, topic, 10, queues=2, tell=before.commit)
    before.stop()
    producer.send(*(message(topic, body) for body in bodies(10, "b")))
    after = java.push(group, topic, orderly=orderly)
    seen = after.wait_bodies(bodies(10, "b"))
    assert Counter(m.body for m in seen) == Counter(bodies(10, "b"))


def test_an_orderly_consumer_sees_each_queue_in_order(java: Java, name: Name) -> None:
    topic = name("orderly")
    producer = java.producer(queues=4)
    for i in range(80):
        producer.send(message(topic, f"{i}"), select=i % 4)
    consumer = java.push(name("group"), topic, orderly=True)
    by_queue: dict[int, list[int]] = defaultdict(list)
    for m in consumer.wait_bodies(bodies(80)):
        by_queue[m.queue].append(int(m.body))
    assert by_queue == {queue: list(range(queue, 80, 4)) for queue in range(4)}


def test_an_orderly_consumer_retries_a_message_before_the_next(java: Java, name: Name) -> None:
    topic = name("orderly_retry")
    producer = java.producer(queues=1)
    producer.send(*(message(topic, body) for body in bodies(3)))
    consumer = java.push(name("group"), topic, orderly=True, failures=2)
    seen = consumer.wait(9)
    assert [m.body for m in seen] == [body for body in bodies(3) for _ in range(3)]


def test_only_the_tags_asked_for_are_delivered(java: Java, name: Name) -> None:
    topic = name("tags")
    producer = java.producer(queues=2)
    sent = [message(topic, f"{tag or 'none'}{i}", tags=tag) for i in range(5) for tag in ("A", "B", "C", None)]
    producer.send(*sent)
    two = java.push(name("two"), topic, expression="A || C")
    one = java.push(name("one"), topic, expression="B")
    everything = java.push(name("all"), topic)
    everything.wait(20)
    wanted = [*bodies(5, "A"), *bodies(5, "C")]
    assert Counter(m.body for m in two.wait_bodies(wanted)) == Counter(wanted)
    assert Counter(m.body for m in one.wait_bodies(bodies(5, "B"))) == Counter(bodies(5, "B"))
    assert {m.tags for m in one.seen} == {"B"}


def test_tags_with_equal_hash_codes_are_told_apart(java: Java, name: Name) -> None:
    topic = name("collision")
    # "Aa".hashCode() == "BB".hashCode(): the broker's index cannot tell them apart, the client does.
    java.producer(queues=1).send(
        *(message(topic, tag, tags=tag) for tag in ("BB", "Aa", "BB", "Aa")), message(topic, "end")
    )
    consumer = java.push(name("group"), topic, expression="Aa")
    assert [m.body for m in consumer.wait(2)] == [b"Aa", b"Aa"]


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_a_new_group_starts_where_it_asks(java: Java, name: Name, first: bool) -> None:
    """A young queue (offset 0 still in memory) is read from its beginning even by a group that asks for the last."""
    topic = name("from")
    producer = java.producer(queues=1)
    producer.send(*(message(topic, body) for body in bodies(5)))
    consumer = java.push(name("group"), topic, **{"from": "FIRST_OFFSET" if first else "LAST_OFFSET"})
    assert sorted(m.body for m in consumer.wait(5)) == bodies(5)


def test_a_failed_message_is_tried_again(java: Java, name: Name) -> None:
    topic, group = name("retry"), name("group")
    producer = java.producer(queues=1)
    [sent] = producer.send(message(topic, "again", tags="T", keys="k", properties={"p": "v"}))
    consumer = java.push(group, topic, failures=1)
    first, second = consumer.wait(2)[:2]
    assert (first.reconsume_times, second.reconsume_times) == (0, 1)
    assert (second.topic, second.body, second.tags, second.keys) == (topic, b"again", "T", "k")
    assert second.properties["p"] == "v"
    assert second.msg_id == first.msg_id == sent.msg_id
    assert second.properties["RETRY_TOPIC"] == topic
    assert second.properties["ORIGIN_MESSAGE_ID"] == sent.offset_msg_id
    assert second.accepted


def test_a_message_that_fails_several_times_comes_after_pauses_that_grow(java: Java, name: Name) -> None:
    topic = name("ladder")
    java.producer(queues=1).send(message(topic, "again"))
    seen = java.push(name("group"), topic, failures=3).wait(lambda seen: seen[-1].accepted if seen else False)
    assert [m.reconsume_times for m in seen] == [0, 1, 2, 3]
    # The copy is stored in the retry topic when the delay of its level is over: level 3 after the first failure.
    pauses = [later.stored_ms - earlier.stored_ms for earlier, later in pairwise(seen)]
    assert [pause >= due for pause, due in zip(pauses, (1000, 2000, 3000), strict=True)] == [True] * 3


def test_a_message_that_always_fails_becomes_a_dead_letter(java: Java, name: Name, target: Target) -> None:
    topic, group = name("dead"), name("group")
    [sent] = java.producer(queues=1).send(message(topic, "poison", tags="T", keys="k", properties={"p": "v"}))
    consumer = java.push(group, topic, failures=-1, retries_max=1)
    attempts = consumer.wait(2)[:2]
    assert [m.reconsume_times for m in attempts] == [0, 1]
    dead = f"%DLQ%{group}"
    eventually(lambda: True if dead in java.mqadmin("topicList") else None)
    [letter] = java.lite(name("undertaker"), dead, assign=True).poll_until(1)
    assert (letter.topic, letter.body, letter.tags, letter.keys) == (dead, b"poison", "T", "k")
    assert letter.properties["RETRY_TOPIC"] == topic
    assert letter.properties["ORIGIN_MESSAGE_ID"] == sent.offset_msg_id
    assert letter.properties["p"] == "v"
    assert letter.reconsume_times == 2
    assert len(consumer.seen) == 2


def test_a_message_that_always_fails_in_order_becomes_a_dead_letter(java: Java, name: Name) -> None:
    topic, group = name("dead_orderly"), name("group")
    java.producer(queues=1).send(message(topic, "poison"), message(topic, "fine"))
    consumer = java.push(group, topic, orderly=True, failures=-1, retries_max=1)
    consumer.wait(lambda seen: b"fine" in {m.body for m in seen})
    consumer.heal()
    dead = f"%DLQ%{group}"
    eventually(lambda: True if dead in java.mqadmin("topicList") else None)
    letter = java.lite(name("undertaker"), dead, assign=True).poll_until(1)[0]
    assert letter.body == b"poison"
    assert letter.properties["RETRY_TOPIC"] == topic


@pytest.fixture(params=fetch.CLIENT_VERSIONS)
def patient(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Jvm]]:
    """Makes JVMs whose clients never share out queues on their own, only when the broker tells them to."""
    made: list[Jvm] = []

    def make() -> Jvm:
        properties = {"rocketmq.client.rebalance.waitInterval": "600000"}
        made.append(Jvm(request.param, tmp_path / f"{len(made)}", properties))
        return made[-1]

    yield make
    for jvm in made:
        if jvm.running:
            jvm.stop()


def test_a_dead_consumers_queues_go_to_the_living(patient: Callable[[], Jvm], target: Target, name: Name) -> None:
    topic, group = name("survivor"), name("group")
    survivor, victim = Java(patient(), target.name_server), Java(patient(), target.name_server)
    producer = survivor.producer(queues=4)
    producer.send(message(topic, "first"))
    one = survivor.push(group, topic)
    one.wait_bodies([b"first"])
    two = victim.push(group, topic)
    share_evenly([one, two], topic, 4)
    producer.send(*(message(topic, body) for body in bodies(40, "a")))
    together([one, two], bodies(40, "a"))
    victim.jvm.kill()
    share_evenly([one], topic, 4)
    producer.send(*(message(topic, body) for body in bodies(40, "b")))
    seen = one.wait_bodies(bodies(40, "b"))
    assert Counter(m.body for m in seen if m.body.startswith(b"b")) == Counter(bodies(40, "b"))
    survivor.close()


def test_a_leaving_consumers_queues_go_to_the_others(patient: Callable[[], Jvm], target: Target, name: Name) -> None:
    topic, group = name("leaver"), name("group")
    clients = Java(patient(), target.name_server)
    producer = clients.producer(queues=4)
    producer.send(message(topic, "first"))
    one, two = clients.push(group, topic), clients.push(group, topic)
    share_evenly([one, two], topic, 4)
    two.stop()
    share_evenly([one], topic, 4)
    producer.send(*(message(topic, body) for body in bodies(20)))
    seen = one.wait_bodies(bodies(20))
    assert Counter(m.body for m in seen if m.body != b"first") == Counter(bodies(20))
    clients.close()


def test_consumption_moves_to_a_new_offset_on_reset(java: Java, name: Name) -> None:
    topic, group = name("reset"), name("group")
    producer = java.producer(queues=1)
    producer.send(*(message(topic, body) for body in bodies(5, "old")))
    consumer = java.push(group, topic)
    old = consumer.wait_bodies(bodies(5, "old"))
    last_ms = max(m.stored_ms for m in old)
    eventually(lambda: True if now_ms() > last_ms + 5 else None)
    middle = now_ms()
    producer.send(*(message(topic, body) for body in bodies(5, "new")))
    consumer.wait_bodies(bodies(5, "new"))
    moved = java.queries().reset(topic, group, middle)
    assert moved == {0: 5}
    seen = consumer.wait(lambda seen: Counter(m.body for m in seen) >= Counter(bodies(5, "new") * 2))
    assert Counter(m.body for m in seen) == Counter([*bodies(5, "old"), *bodies(5, "new") * 2])


def now_ms() -> int:
    return time.time_ns() // 1_000_000
