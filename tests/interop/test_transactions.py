"""Transactional messages of stock clients; what is stored and received counts, never what a client says about its end.

A client ends a transaction oneway, and RocketMQ's own test of transactions passes even when every send is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import fetch
from .conftest import RocketMQ, Target
from .java import Java, Jvm, Received, message
from .martlet_process import Martlet

Name = Callable[[str], str]
OUTCOMES = ("commit", "rollback", "unknown")
# A check comes within seconds instead of after half a minute.
OURS = {"tx.check_interval_ms": "1000", "tx.immunity_ms": "3000", "tx.checks_max": "250"}
REAL = {"transactionCheckInterval": "1000", "transactionTimeOut": "3000", "transactionCheckMax": "250"}


@pytest.fixture
def quick(target_kind: str, tmp_path: Path) -> Iterator[Target]:
    """A broker that checks transactions every second."""
    if target_kind == "rocketmq":
        real = RocketMQ(tmp_path, REAL)
        yield real
        real.close()
    else:
        ours = Martlet(tmp_path, OURS)
        yield ours
        ours.close()


@pytest.fixture(params=fetch.CLIENT_VERSIONS)
def clients(request: pytest.FixtureRequest, jvms: Callable[[str], Jvm], quick: Target) -> Iterator[Java]:
    made = Java(jvms(request.param), quick.name_server)
    yield made
    made.close()


def transaction(topic: str, local: str, check: str = "unknown", number: int = 0) -> dict[str, object]:
    body = f"{local} then {check} {number}"
    return message(topic, body, tags="t", keys=body.replace(" ", "-"), properties={"local": local, "check": check})


def bodies(seen: list[Received]) -> Counter[bytes]:
    return Counter(each.body for each in seen)


def test_a_transaction_becomes_what_its_producer_or_the_check_says(clients: Java, name: Name) -> None:
    topic = name("Tx")
    sent = [transaction(topic, local, check, n) for local in OUTCOMES for check in OUTCOMES for n in range(2)]
    consumer = clients.push(name("readers"), topic)
    producer = clients.transactions(name("sellers"))
    producer.send(*sent)
    expected = {
        f"{local} then {check} {n}".encode()
        for local in OUTCOMES
        for check in OUTCOMES
        for n in range(2)
        if local == "commit" or (local == "unknown" and check == "commit")
    }
    seen = consumer.wait_bodies(expected)
    producer.wait_checks(lambda checks: b"unknown then rollback 1" in bodies(checks))
    # Everything that came after a second round of checks would have come by now.
    producer.wait_checks(lambda checks: bodies(checks)[b"unknown then unknown 1"] >= 3)
    assert bodies(consumer.seen) == Counter(expected)
    asked = set(bodies(producer.checks))
    assert asked == {f"unknown then {check} {n}".encode() for check in OUTCOMES for n in range(2)}
    for each in seen:
        assert each.properties["TRAN_MSG"] == "true"
        assert each.sys_flag & 0xC == 0x8


def test_a_local_transaction_that_throws_is_checked(clients: Java, name: Name) -> None:
    topic = name("Tx")
    consumer = clients.push(name("readers"), topic)
    producer = clients.transactions(name("sellers"))
    producer.send(transaction(topic, "throw", "commit"))
    consumer.wait(1)
    assert bodies(consumer.seen) == Counter([b"throw then commit 0"])


def test_a_broker_that_is_killed_forgets_no_transaction(quick: Target, jvm: Jvm, name: Name) -> None:
    topic = name("Tx")
    clients = Java(jvm, quick.name_server)
    producer = clients.transactions(name("sellers"))
    producer.send(*[transaction(topic, outcome, "commit") for outcome in OUTCOMES])
    consumer = clients.push(name("readers"), topic)
    consumer.wait_bodies([b"commit then commit 0"])
    quick.kill()
    quick.start()
    consumer.wait_bodies([b"commit then commit 0", b"unknown then commit 0"])
    assert set(bodies(consumer.seen)) == {b"commit then commit 0", b"unknown then commit 0"}
    clients.close()
