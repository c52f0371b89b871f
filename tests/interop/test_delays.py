"""Messages with a delay level, sent and received by stock clients, and pending ones in stores that both brokers use."""

from collections import Counter
from collections.abc import Callable

import pytest

from . import rocketmq
from .java import Java, Jvm, Received, message
from .store_exchange import TOPIC, OurBroker, RealBroker

Name = Callable[[str], str]
DELAYS_MS = [1000 * int(word.removesuffix("s")) for word in rocketmq.DELAY_LEVELS.split()]


def check(got: Received, topic: str, level: int) -> None:
    """See that *got* is the copy that RocketMQ delivers, and that it was not early."""
    assert got.stored_ms - got.born_ms >= DELAYS_MS[level - 1]
    assert (got.topic, got.tags, got.keys, got.reconsume_times) == (topic, "T", "k", 0)
    shown = {name: got.properties.get(name) for name in ("DELAY", "REAL_TOPIC", "REAL_QID", "p")}
    assert shown == {"DELAY": str(level), "REAL_TOPIC": topic, "REAL_QID": str(got.queue), "p": "v"}


def test_a_delayed_message_arrives_after_its_delay(java: Java, name: Name) -> None:
    topic = name("delayed")
    producer = java.producer(queues=2)
    producer.send(message(topic, "plain"))
    levels = {b"two": 2, b"one": 1}
    sent = {}
    for body, level in levels.items():
        more = {"tags": "T", "keys": "k", "properties": {"p": "v"}, "delay_level": level}
        [sent[body]] = producer.send(message(topic, body, **more))
    assert {one.status for one in sent.values()} == {"SEND_OK"}
    consumer = java.push(name("group"), topic, **{"from": "FIRST_OFFSET"})
    seen = consumer.wait(3)
    assert {got.body for got in seen} == {b"plain", b"one", b"two"}
    for got in seen:
        if got.body == b"plain":
            continue
        check(got, topic, levels[got.body])
        assert got.msg_id == sent[got.body].msg_id
        assert got.queue == sent[got.body].queue


def test_a_level_above_the_table_counts_as_the_highest(newest: Java, name: Name) -> None:
    topic = name("highest")
    producer = newest.producer(queues=1)
    producer.send(message(topic, "x", tags="T", keys="k", properties={"p": "v"}, delay_level=99))
    [got] = newest.push(name("group"), topic, **{"from": "FIRST_OFFSET"}).wait(1)
    check(got, topic, len(DELAYS_MS))


def send(clients: Java, prefix: str, *levels: int) -> None:
    producer = clients.producer(queues=4)
    for level in levels:
        for number in range(5):
            producer.send(message(TOPIC, f"{prefix} {level} {number}", delay_level=level))


def read(clients: Java, count: int) -> list[Received]:
    return clients.lite("another_reader", TOPIC, assign=True).poll_until(count)


def bodies(prefix: str, *levels: int) -> Counter[bytes]:
    return Counter(f"{prefix} {level} {number}".encode() for level in levels for number in range(5))


def check_all(got: list[Received], *expected: Counter[bytes]) -> None:
    """See that each message of *expected* arrived once, in time, and nothing else."""
    together = sum(expected, Counter[bytes]())
    assert Counter(each.body for each in got) == together
    for each in got:
        assert each.stored_ms - each.born_ms >= DELAYS_MS[int(each.body.split()[1]) - 1]


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_pending_messages_go_to_and_fro(
    killed: bool, real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm
) -> None:
    ours = martlet()
    clients = Java(jvm, ours.name_server)
    send(clients, "ours", 1, 12)
    check_all(read(clients, 5), bodies("ours", 1))
    clients.close()
    assert ours.stop() == 0
    real = real_broker()
    clients = Java(jvm, names.address)
    send(clients, "real", 1, 14)
    check_all(read(clients, 15), bodies("ours", 1, 12), bodies("real", 1))
    clients.close()
    real.stop()
    ours.start()
    clients = Java(jvm, ours.name_server)
    send(clients, "again", 1, 9)
    read(clients, 20)
    if killed:
        clients.close()
        ours.kill()
        ours.start()
        clients = Java(jvm, ours.name_server)
    read(clients, 30)
    send(clients, "last", 1)  # what is delivered twice comes before
    expected = bodies("ours", 1, 12), bodies("real", 1, 14), bodies("again", 1, 9), bodies("last", 1)
    check_all(read(clients, 35), *expected)
    clients.close()
    assert ours.stop() == 0
