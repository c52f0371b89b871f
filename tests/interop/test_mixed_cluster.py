"""Martlet and RocketMQ in one cluster: either one's broker with either one's name server, sharing a topic."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import rocketmq, wire
from .java import Java, Jvm, Queue, Received, found, message
from .martlet_process import Martlet
from .process import eventually
from .test_pop import popping, set_mode

COUNT = 40


@pytest.fixture
def java(jvms: Callable[[str], Jvm]) -> Iterator[Callable[[str], Java]]:
    """A function from a name server's address to clients of it."""
    made: list[Java] = []

    def make(name_server: str) -> Java:
        made.append(Java(jvms("5.5.0"), name_server))
        return made[-1]

    yield make
    for clients in made:
        clients.close()


@pytest.fixture
def martlet(tmp_path: Path) -> Iterator[Callable[..., Martlet]]:
    """Starts Martlets that end with the test."""
    made: list[Martlet] = []

    def start(name: str, **settings: str) -> Martlet:
        said = {"broker.name": name, **{key.replace("__", "."): value for key, value in settings.items()}}
        made.append(Martlet(tmp_path / name, said))
        return made[-1]

    yield start
    for process in made:
        process.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Callable[..., rocketmq.Broker]]:
    """Starts real brokers that end with the test."""
    made: list[rocketmq.Broker] = []

    def start(name: str, name_server: str) -> rocketmq.Broker:
        made.append(rocketmq.Broker(tmp_path / name, name_server, {"brokerName": name}))
        return made[-1]

    yield start
    for broker in made:
        broker.kill()


def knows(name_server: str, expected: dict[str, str]) -> None:
    """Wait until a name server answers these brokers, name -> address."""

    def look() -> bool | None:
        known = rocketmq.brokers_known(name_server)
        return True if {name: ids.get("0") for name, ids in known.items()} == expected else None

    eventually(look)


def exchange(java: Java, topic: str, queues: list[Queue]) -> set[str]:
    """Send to every queue and consume from all of them, by push and by query; return whose messages came.

    One consumer chooses its queues itself; the other takes the queues that some broker assigns to it.
    """
    producer = java.producer()
    looker = java.lite(f"looker_{topic}", topic, assign=False)
    eventually(lambda: True if queues == found(looker.queues) else None)
    for queue in queues:
        producer.send(
            *(message(topic, f"{queue.broker} {queue.queue} {i}", keys=f"{i}") for i in range(COUNT)), to=queue
        )
    wanted = [f"{q.broker} {q.queue} {i}".encode() for q in queues for i in range(COUNT)]
    consumer = java.push(f"group_{topic}", topic)
    assert Counter(m.body for m in consumer.wait_bodies(wanted)) == Counter(wanted)
    assert [q for q in consumer.queues() if q.topic == topic] == queues
    told = java.push(f"told_{topic}", topic, client_rebalance=False)
    assert Counter(m.body for m in told.wait_bodies(wanted)) == Counter(wanted)
    assert [q for q in told.queues() if q.topic == topic] == queues
    queries = java.queries()
    brokers = {q.broker for q in queues}
    seven = eventually(lambda: all_found(found(lambda: queries.by_key(topic, "7")), len(queues)))
    assert {m.body.split()[0].decode() for m in seven} == brokers
    return {m.body.split()[0].decode() for m in consumer.seen}


def pop_all(java: Java, topic: str, queues: list[Queue], addresses: list[str]) -> None:
    """Let a new group pop what `exchange` sent; see that it gets everything once, from all brokers."""
    group = f"popping_{topic}"
    for address in addresses:
        set_mode(java, address, topic, group, "POP")
    consumer = popping(java, group, topic)
    wanted = [f"{q.broker} {q.queue} {i}".encode() for q in queues for i in range(COUNT)]
    assert Counter(m.body for m in consumer.wait_bodies(wanted)) == Counter(wanted)
    assert all("POP_CK" in m.properties for m in consumer.seen)
    brokers = {q.broker for q in queues}
    eventually(lambda: True if {q.broker for q in consumer.queues() if q.topic == topic} == brokers else None)
    for address in addresses:
        wire.wait_committed(address, group, topic, COUNT * len(queues) // len(addresses), len(queues))


def time_and_recall(java: Java, topic: str, queues: list[Queue]) -> None:
    """Send timed messages to every queue and recall one of each; see that exactly the others come, none early."""
    producer, began_ms = java.producer(), int(time.time() * 1000)
    delays_ms: dict[bytes, int] = {}
    for queue in queues:
        [recalled] = producer.send(message(topic, "recalled", setDelayTimeMs=8000), to=queue)
        assert producer.recall(topic, recalled.recall_handle or "") == recalled.msg_id
        for word, delay_ms in {"soon": 1000, "last": 10_000}.items():
            body = f"{word} {queue.broker} {queue.queue}"
            producer.send(message(topic, body, setDelayTimeMs=delay_ms), to=queue)
            delays_ms[body.encode()] = delay_ms
    consumer = java.push(f"timed_{topic}", topic)
    consumer.wait_bodies(delays_ms)
    came = [each for each in consumer.seen if "TIMER_DELAY_MS" in each.properties]
    assert Counter(each.body for each in came) == Counter(list(delays_ms))
    assert all(each.stored_ms >= began_ms + delays_ms[each.body] for each in came)


def all_found(messages: list[Received] | None, count: int) -> list[Received] | None:
    return messages if messages is not None and len(messages) == count else None


def test_a_martlet_broker_registers_with_a_real_name_server(
    names: rocketmq.NameServer, martlet: Callable[..., Martlet], java: Callable[[str], Java]
) -> None:
    broker = martlet("ours", remoting__nameservers=f'["{names.address}"]')
    knows(names.address, {"ours": broker.address})
    clients = java(names.address)
    clients.queries().create_topic("Through", broker.address, queues=2)
    assert exchange(clients, "Through", [Queue("Through", "ours", 0), Queue("Through", "ours", 1)]) == {"ours"}
    assert broker.stop() == 0
    knows(names.address, {})


def test_a_real_broker_registers_with_martlets_name_server(
    martlet: Callable[..., Martlet], real: Callable[..., rocketmq.Broker], java: Callable[[str], Java]
) -> None:
    host = martlet("host")
    broker = real("theirs", host.name_server)
    knows(host.name_server, {"host": host.address, "theirs": broker.address})
    clients = java(host.name_server)
    clients.queries().create_topic("Through", broker.address, queues=2)
    assert exchange(clients, "Through", [Queue("Through", "theirs", 0), Queue("Through", "theirs", 1)]) == {"theirs"}
    broker.stop()
    knows(host.name_server, {"host": host.address})


@pytest.mark.parametrize("whose", ["real", "ours"])
def test_both_brokers_share_a_topic(
    whose: str,
    names: rocketmq.NameServer,
    martlet: Callable[..., Martlet],
    real: Callable[..., rocketmq.Broker],
    java: Callable[[str], Java],
) -> None:
    if whose == "real":
        ours = martlet("ours", remoting__nameservers=f'["{names.address}"]')
        name_server = names.address
    else:
        ours = martlet("ours")
        name_server = ours.name_server
    theirs = real("theirs", name_server)
    knows(name_server, {"ours": ours.address, "theirs": theirs.address})
    clients = java(name_server)
    for broker in (ours, theirs):
        clients.queries().create_topic("Shared", broker.address, queues=2)
    queues = [Queue("Shared", name, i) for name in ("ours", "theirs") for i in range(2)]
    assert exchange(clients, "Shared", queues) == {"ours", "theirs"}
    if whose == "ours":
        time_and_recall(clients, "Shared", queues)
    else:
        pop_all(clients, "Shared", queues, [ours.address, theirs.address])


def test_martlets_share_a_topic_behind_one_name_server(
    martlet: Callable[..., Martlet], java: Callable[[str], Java]
) -> None:
    one = martlet("one")
    two = martlet("two", remoting__nameservers=f'["{one.name_server}"]')
    knows(one.name_server, {"one": one.address, "two": two.address})
    clients = java(one.name_server)
    for broker in (one, two):
        clients.queries().create_topic("Shared", broker.address, queues=2)
    queues = [Queue("Shared", name, i) for name in ("one", "two") for i in range(2)]
    assert exchange(clients, "Shared", queues) == {"one", "two"}
