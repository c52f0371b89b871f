"""Light message queues: a store with them goes from Martlet to RocketMQ and back, and stock consumers read them."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from martlet.message import Record
from martlet.records.codec import decode_records

from . import rocketmq, wire
from .java import Java, Jvm, message
from .martlet_process import Martlet
from .process import eventually
from .store_exchange import TOPIC, OurBroker, RealBroker

COUNT = 30
DISPATCH = "INNER_MULTI_DISPATCH"


def names_of(number: int) -> list[str]:
    """The light topics of message *number*."""
    return [name for name, each in (("%LMQ%every", 1), ("%LMQ%third", 3), ("%LMQ%a.b", 7)) if number % each == 0]


def fill(clients: Java, prefix: str) -> None:
    """Send messages that light queues index, to the four queues of a topic, and others between them."""
    producer = clients.producer(queues=4)
    for number in range(COUNT):
        producer.send(message(TOPIC, f"{prefix} {number}", tags="AB"[number % 2], properties=named(number)))
        producer.send(message(TOPIC, f"{prefix} plain"))


def named(number: int) -> dict[str, str]:
    return {DISPATCH: ",".join(names_of(number))}


def expected(prefixes: Iterable[str], name: str) -> list[bytes]:
    return [f"{prefix} {n}".encode() for prefix in prefixes for n in range(COUNT) if name in names_of(n)]


def pull(address: str, name: str, offset: int, expression: str = "*") -> tuple[list[Record], int]:
    """Pull from a light queue by hand; return the records, and where to go on."""
    fields = {"consumerGroup": "by_hand", "topic": name, "queueId": "0", "queueOffset": str(offset), "maxMsgNums": "32"}
    fields |= {"sysFlag": "4", "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": expression}
    answer = wire.ask(address, wire.PULL_MESSAGE, {**fields, "subVersion": "0", "expressionType": "TAG"})
    assert answer is not None
    return decode_records(answer.body), int(answer.fields["nextBeginOffset"])


def read(address: str, name: str, count: int) -> list[Record]:
    """The first *count* records of a light queue; RocketMQ indexes them a moment after the send."""
    found: list[Record] = []
    offset = 0

    def more() -> bool | None:
        nonlocal offset
        records, offset = pull(address, name, offset)
        found.extend(records)
        return True if len(found) >= count else None

    eventually(more)
    return found


def check(address: str, *prefixes: str) -> None:
    """Each light queue holds what was sent with its name, in order, and each record says its place there."""
    for name in ("%LMQ%every", "%LMQ%third", "%LMQ%a.b"):
        wanted = expected(prefixes, name)
        records = read(address, name, len(wanted))
        assert [record.body for record in records] == wanted
        for offset, record in enumerate(records):
            said = dict(
                zip(
                    record.property(DISPATCH).split(","),
                    record.property("INNER_MULTI_QUEUE_OFFSET").split(","),
                    strict=True,
                )
            )
            assert said[name] == str(offset)
        tagged, _ = pull(address, name, 0, "A")
        assert {record.property("TAGS") for record in tagged} == {"A"}


def filled(jvm: Jvm, name_server: str, prefix: str) -> None:
    clients = Java(jvm, name_server)
    fill(clients, prefix)
    clients.close()


@pytest.mark.parametrize("record_crcs", [False, True], ids=["plain", "record_crcs"])
def test_a_store_with_light_queues_goes_to_rocketmq_and_back(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm, record_crcs: bool
) -> None:
    ours = martlet(light=True, record_crcs=record_crcs)
    filled(jvm, ours.name_server, "ours")
    check(ours.address, "ours")
    assert ours.stop() == 0
    real = real_broker(light=True, record_crcs=record_crcs)
    check(real.address, "ours")
    filled(jvm, names.address, "theirs")
    check(real.address, "ours", "theirs")
    real.stop()
    ours.start()
    check(ours.address, "ours", "theirs")
    filled(jvm, ours.name_server, "ours again")
    check(ours.address, "ours", "theirs", "ours again")
    ours.kill()
    real.start()
    check(real.address, "ours", "theirs", "ours again")
    filled(jvm, names.address, "theirs again")
    check(real.address, "ours", "theirs", "ours again", "theirs again")


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_store_with_light_queues_that_rocketmq_wrote_opens_in_martlet(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, end: str
) -> None:
    real = real_broker(light=True)
    filled(jvm, names.address, "theirs")
    check(real.address, "theirs")
    for name in ("%LMQ%every", "%LMQ%third"):
        commit(real.address, name, 2)
    if end == "stopped":
        real.stop()
    else:
        wait_saved(data, 2)
        real.kill()
    ours = martlet()  # with light queues off: the log says enough
    check(ours.address, "theirs")
    assert committed(ours.address, "%LMQ%every") == committed(ours.address, "%LMQ%third") == 2
    assert ours.stop() == 0
    ours.settings["remoting.light_queues"] = "true"
    ours.start()
    filled(jvm, ours.name_server, "ours")
    check(ours.address, "theirs", "ours")
    commit(ours.address, "%LMQ%every", 5)
    assert ours.stop() == 0
    real.start()
    check(real.address, "theirs", "ours")
    assert (committed(real.address, "%LMQ%every"), committed(real.address, "%LMQ%third")) == (5, 2)


def wait_saved(data: Path, offset: int) -> None:
    """Return when RocketMQ has written what was committed."""
    path = data / "config" / "lmqConsumerOffset.json"
    eventually(lambda: True if path.exists() and path.read_text().count(f"0:{offset}") == 2 else None)


def commit(address: str, name: str, offset: int) -> None:
    fields = {"consumerGroup": "by_hand", "topic": name, "queueId": "0", "commitOffset": str(offset)}
    answer = wire.ask(address, wire.UPDATE_CONSUMER_OFFSET, fields)
    assert answer is not None
    assert answer.code == 0


def committed(address: str, name: str) -> int:
    fields = {"consumerGroup": "by_hand", "topic": name, "queueId": "0", "setZeroIfNotFound": "false"}
    answer = wire.ask(address, wire.QUERY_CONSUMER_OFFSET, fields)
    assert answer is not None
    return int(answer.fields["offset"])


def test_stock_push_consumers_read_light_queues(martlet: OurBroker, jvm: Jvm) -> None:
    ours: Martlet = martlet(light=True)
    clients = Java(jvm, ours.name_server)
    fill(clients, "first")
    consumer = clients.push("light_group", "%LMQ%third")
    seen = consumer.wait(COUNT // 3)
    assert [m.body for m in sorted(seen, key=lambda m: m.offset)] == expected(["first"], "%LMQ%third")
    assert {m.topic for m in seen} == {TOPIC}
    fill(clients, "second")
    consumer.wait_bodies(expected(["first", "second"], "%LMQ%third"))
    wire.wait_committed(ours.address, "light_group", "%LMQ%third", COUNT // 3 * 2, 1, consumer.commit)
    consumer.stop()
    fill(clients, "third")
    seen = clients.push("light_group", "%LMQ%third").wait(COUNT // 3)
    assert [m.body for m in sorted(seen, key=lambda m: m.offset)] == expected(["third"], "%LMQ%third")
    clients.close()
