"""Transactions in a store that both brokers use, one after the other; what is stored and received counts."""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import orjson
import pytest

from martlet.errors import CorruptRecord
from martlet.message import Record
from martlet.records.codec import decode_record

from . import rocketmq, wire
from .java import Java, Jvm, Received, TransactionProducer, message
from .process import eventually
from .store_exchange import OurBroker, RealBroker

Name = Callable[[str], str]
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
PARK_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
END_TRANSACTION, RESUME_CHECK, LIST_TRANSACTIONS = 37, 323, 31001
COMMIT, ROLLBACK = "8", "12"
# Checks come soon. RocketMQ ends a transaction twice if it checks before it has written its op record.
OURS = {"tx.check_interval_ms": "500", "tx.immunity_ms": "500", "tx.checks_max": "250"}
REAL = {"transactionCheckInterval": "3000", "transactionTimeOut": "3000", "transactionCheckMax": "250"}
REAL |= {"transactionOpBatchInterval": "50"}


@dataclass(frozen=True)
class Handle:
    """What a producer keeps of its half message."""

    offset: int
    position: int
    key: str
    message_id: str


@dataclass
class Seller:
    """Sends half messages and ends transactions by hand: nobody is connected whom a broker could ask."""

    address: str
    topic: str
    group: str

    def prepare(self, body: str, check: str = "unknown", **properties: str) -> Handle:
        key = f"7F000001{zlib.crc32(body.encode()):024X}"
        named = {"TRAN_MSG": "true", "PGROUP": self.group, "UNIQ_KEY": key, "check": check, **properties}
        fields = {"producerGroup": self.group, "topic": self.topic, "defaultTopic": "TBW102", "queueId": "0"}
        fields |= {"defaultTopicQueueNums": "1", "sysFlag": "4", "flag": "0", "reconsumeTimes": "0"}
        fields |= {"bornTimestamp": str(time.time_ns() // 1_000_000), "unitMode": "false", "batch": "false"}
        fields["properties"] = "".join(f"{name}\x01{value}\x02" for name, value in named.items())
        answer = wire.ask(self.address, wire.SEND_MESSAGE, fields, body.encode())
        assert answer is not None
        assert answer.code == 0, answer.remark
        found = answer.fields["msgId"]
        return Handle(int(answer.fields["queueOffset"]), int(found[-16:], 16), key, found)

    def end(self, half: Handle, how: str) -> wire.Answer:
        fields = {"producerGroup": self.group, "tranStateTableOffset": str(half.offset), "commitOrRollback": how}
        fields |= {"commitLogOffset": str(half.position), "fromTransactionCheck": "false", "msgId": half.key}
        answer = wire.ask(self.address, END_TRANSACTION, {**fields, "transactionId": half.key, "topic": self.topic})
        assert answer is not None
        return answer

    def pending(self) -> list[dict[str, Any]]:
        """Return the pending transactions of a Martlet."""
        answer = wire.ask(self.address, LIST_TRANSACTIONS)
        assert answer is not None
        found: list[dict[str, Any]] = orjson.loads(answer.body)["transactions"]
        return found


def stored(data: Path, topic: str) -> list[Record]:
    """Return the records of *topic* in the first segment of the log."""
    found: list[Record] = []
    at = 0
    # Mapped, because most of its 64 MB are zeros.
    with (
        min((data / "commitlog").iterdir()).open("rb") as segment,
        mmap(segment.fileno(), 0, access=ACCESS_READ) as mapped,
        memoryview(mapped) as raw,
    ):
        while True:
            try:
                record = decode_record(raw, at, at)
            except CorruptRecord:
                return found  # nothing was written there yet
            at += record.size
            if record.topic == topic:
                found.append(record)


def bodies(seen: list[Received] | list[Record]) -> Counter[str]:
    return Counter(each.body.decode() for each in seen)


def wait_stored(data: Path, topic: str, expected: Counter[str]) -> None:
    """Wait until *topic* has each of *expected*, and see that it has nothing else."""
    eventually(lambda: True if expected <= bodies(stored(data, topic)) else None)
    assert bodies(stored(data, topic)) == expected


def end_many(seller: Seller, prefix: str) -> tuple[Counter[str], list[Handle]]:
    """Commit and roll back more transactions than RocketMQ reads op records at once; return what was committed."""
    handles = []
    for number in range(40):
        handles.append(seller.prepare(f"{prefix} ended {number}"))
        assert seller.end(handles[-1], ROLLBACK if number % 2 else COMMIT).code == 0
    return Counter(f"{prefix} ended {number}" for number in range(0, 40, 2)), handles


def connected(clients: Java, group: str, topic: str) -> TransactionProducer:
    """Return a producer that the broker can ask: the Java client tells a broker of itself once it has sent to it."""
    producer = clients.transactions(group)
    producer.send(message(topic, f"hello {producer.name}", properties={"local": "commit"}))
    return producer


def asked(producer: TransactionProducer) -> Counter[str]:
    return bodies(producer.checks)


def read(clients: Java, topic: str, expected: Mapping[str, int]) -> None:
    """See that a stock consumer gets exactly *expected* from queue 0 of *topic*."""
    consumer = clients.lite("another_reader", topic, assign=True)
    assert bodies(consumer.poll_bodies(body.encode() for body in expected)) == expected


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_pending_transactions_go_to_rocketmq_and_back(
    real_broker: RealBroker,
    martlet: OurBroker,
    names: rocketmq.NameServer,
    jvm: Jvm,
    data: Path,
    end: str,
    name: Name,
) -> None:
    topic, group, other = name("Tx"), name("sellers"), name("Hello")
    ours = martlet(settings=OURS)
    seller = Seller(ours.address, topic, group)
    for check in ("commit", "rollback", "unknown"):
        seller.prepare(f"ours {check}", check)
    seller.prepare("ours parked", "commit", TRANSACTION_CHECK_TIMES="250")
    committed, ended = end_many(seller, "ours")
    eventually(lambda: True if [each["checks"] >= 2 for each in seller.pending()] == [True] * 3 else None)
    wait_stored(data, PARK_TOPIC, Counter(["ours parked"]))
    if end == "stopped":
        assert ours.stop() == 0
    else:
        ours.kill()
    halves = len(stored(data, HALF_TOPIC))

    real = real_broker(settings=REAL)
    clients = Java(jvm, names.address)
    producer = connected(clients, group, other)
    producer.wait_checks(lambda checks: bodies(checks)["ours unknown"] >= 2 and len(bodies(checks)) == 3)
    committed["ours commit"] += 1
    wait_stored(data, topic, committed)
    clients.close()
    real.stop()
    copies = [each for each in stored(data, HALF_TOPIC)[halves:] if each.property("REAL_TOPIC") == topic]
    assert set(bodies(copies)) == {"ours commit", "ours rollback", "ours unknown"}, "only what was pending is put back"
    assert bodies(stored(data, PARK_TOPIC)) == Counter(["ours parked"])

    ours.start()
    (left,) = seller.pending()
    times = [int(each.property("TRANSACTION_CHECK_TIMES")) for each in copies if each.body == b"ours unknown"]
    assert left["checks"] >= max(times) >= 2, "the count goes on"
    assert {seller.end(half, COMMIT).code for half in ended} == {1}, "each has ended already"
    clients = Java(jvm, ours.name_server)
    producer = connected(clients, group, other)
    producer.wait_checks(lambda checks: bodies(checks)["ours unknown"] >= 2)
    assert set(asked(producer)) == {"ours unknown"}
    assert seller.end(Handle(left["tranStateTableOffset"], left["commitLogOffset"], "", ""), COMMIT).code == 0
    committed["ours unknown"] += 1
    read(clients, topic, committed)
    assert bodies(stored(data, topic)) == committed
    assert seller.pending() == []
    clients.close()


def test_pending_transactions_of_rocketmq_go_on_in_martlet(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm, data: Path, name: Name
) -> None:
    topic, group, other = name("Tx"), name("sellers"), name("Hello")
    real = real_broker(settings=REAL)
    seller = Seller(real.address, topic, group)
    waiting = [seller.prepare(f"theirs {check}", check) for check in ("commit", "rollback", "unknown")]
    seller.prepare("theirs parked", "commit", TRANSACTION_CHECK_TIMES="250")
    committed, ended = end_many(seller, "theirs")
    wait_stored(data, topic, committed)
    # It puts each pending one back at each check: there are copies now.
    eventually(lambda: True if bodies(stored(data, HALF_TOPIC))["theirs unknown"] >= 3 else None)
    wait_stored(data, PARK_TOPIC, Counter(["theirs parked"]))
    real.stop()

    ours = martlet(settings=OURS)
    seller.address = ours.address
    pending = seller.pending()
    assert sorted(each["properties"]["check"] for each in pending) == ["commit", "rollback", "unknown"]
    assert min(each["checks"] for each in pending) >= 2
    assert {seller.end(half, COMMIT).code for half in [*ended, *waiting]} == {1}, "each has ended, or was copied"
    clients = Java(jvm, ours.name_server)
    producer = connected(clients, group, other)
    producer.wait_checks(lambda checks: bodies(checks)["theirs unknown"] >= 3 and len(bodies(checks)) == 3)
    (parked,) = stored(data, PARK_TOPIC)
    message_id = f"{parked.store_host.hex()}{parked.position:016X}"
    answer = wire.ask(ours.address, RESUME_CHECK, {"msgId": message_id, "topic": PARK_TOPIC})
    assert answer is not None
    assert answer.code == 0, answer.remark
    committed += Counter(["theirs commit", "theirs parked"])
    read(clients, topic, committed)
    assert bodies(stored(data, topic)) == committed
    clients.close()
