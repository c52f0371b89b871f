"""Pending timed messages in a store that both brokers use, one after the other."""

import time
from collections import Counter

import trio

from martlet_remoting.client import Message, Producer

from . import rocketmq
from .java import Java, Jvm
from .store_exchange import TOPIC, OurBroker, RealBroker


def send(name_server: str, topic: str, prefix: str, delays_ms: dict[str, int]) -> None:
    """Send a message for each delay, counted from now; with our client, since Java's takes no TIMER_ property."""

    async def work() -> None:
        async with Producer(name_server, "timing") as producer:
            now_ms = int(time.time() * 1000)
            for word, delay_ms in delays_ms.items():
                body = f"{prefix} {word}".encode()
                await producer.send(Message(topic, body, deliver_at_ms=now_ms + delay_ms))

    trio.run(work)


def read(clients: Java, count: int, *, more_s: float = 4.0) -> Counter[bytes]:
    """Return the bodies of the first *count* messages and of all that come soon after."""
    consumer = clients.lite("another_reader", TOPIC, assign=True)
    got = consumer.poll_until(count)
    for each in got:
        assert each.stored_ms >= int(each.properties["TIMER_DELIVER_MS"])
    time.sleep(more_s)
    return Counter(each.body for each in clients.lite("third_reader", TOPIC, assign=True).poll_until(count))


def test_pending_timers_go_to_rocketmq_and_back(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm
) -> None:
    ours = martlet()
    clients = Java(jvm, ours.name_server)
    send(ours.name_server, TOPIC, "ours", {"soon": 500, "pending": 25_000, "later": 60_000})
    assert read(clients, 1, more_s=0) == Counter([b"ours soon"])
    clients.close()
    assert ours.stop() == 0
    theirs = real_broker()
    clients = Java(jvm, names.address)
    send(names.address, TOPIC, "theirs", {"soon": 500, "later": 60_000})
    expected = Counter([b"ours soon", b"theirs soon", b"ours pending"])
    assert read(clients, 3) == expected
    clients.close()
    theirs.stop()
    ours.start()
    clients = Java(jvm, ours.name_server)
    expected += Counter([b"ours later", b"theirs later"])
    assert read(clients, 5) == expected
    clients.close()
