"""Transactional messages of stock clients; what is stored and received counts, never what a client says about its end.

A client ends a transaction oneway, and RocketMQ's own test of transactions passes even when every send is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from tests.client.listening import PATIENCE_S, wait_for

from martlet_client import (
    ClientSettings,
    Message,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
)

from . import fetch, rocketmq
from .conftest import RocketMQ, Target
from .java import Java, Jvm, Received, found, message
from .martlet_process import Martlet
from .other_clients import Program
from .process import eventually

Name = Callable[[str], str]
OUTCOMES = ("commit", "rollback", "unknown")
# A check comes within seconds instead of after half a minute.
OURS = {"tx.check_interval_ms": "1000", "tx.immunity_ms": "3000", "tx.checks_max": "250"}
REAL = {"transactionCheckInterval": "1000", "transactionTimeOut": "3000", "transactionCheckMax": "250"}
# If RocketMQ checks a transaction before it has written its op record, it ends twice.
REAL |= {"transactionOpBatchInterval": "50"}


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


# other clients; the Node client and the C interface of the C++ client have no transactions


def test_transactions_of_the_go_client_end_as_its_producer_or_the_check_says(
    go: Program, quick: Target, jvm: Jvm, name: Name
) -> None:
    topic = name("Tx")
    outcomes = [f"{local}:{check}" for local in OUTCOMES for check in OUTCOMES]
    committed = {outcome.encode() for outcome in outcomes if outcome.startswith(("commit", "unknown:commit"))}
    clients = Java(jvm, quick.name_server)
    consumer = clients.push(name("readers"), topic)
    run = go.start("transact", quick.name_server, name("sellers"), topic, *outcomes)

    def checks() -> Counter[str]:
        return Counter(line["body"] for line in run.lines() if line.get("event") == "check")

    consumer.wait_bodies(committed)
    eventually(lambda: True if checks()["unknown:unknown"] >= 2 and checks()["unknown:rollback"] else None)
    repeated = Counter(outcomes[line["number"]].encode() for line in run.lines() if line.get("event") == "again")
    assert set(checks()) == {f"unknown:{check}" for check in OUTCOMES} | {body.decode() for body in repeated}
    assert Counter(committed) <= bodies(consumer.seen) <= Counter(committed) + repeated
    clients.close()


# our client, and a broker of each kind behind one name server

STATES = {
    "commit": TransactionState.COMMIT,
    "rollback": TransactionState.ROLLBACK,
    "unknown": TransactionState.UNKNOWN,
}


async def sell(name_server: str, group: str, topic: str, enough: Callable[[set[str]], bool]) -> set[str]:
    """Send transactions of each kind to each of two brokers, and answer checks until *enough* were asked about.

    Returns the bodies that a broker asked about.
    """
    asked: set[str] = set()

    def check(message: ReceivedMessage) -> TransactionState:
        asked.add(message.body.decode())
        return STATES[message.properties["check"]]

    def execute(message: Message, key: str) -> TransactionState:
        return STATES[message.properties["local"]]

    settings = ClientSettings(name_server, request_timeout_s=PATIENCE_S, connect_timeout_s=PATIENCE_S)
    async with TransactionProducer(settings, group, check, send_timeout_s=PATIENCE_S) as producer:
        for kind in (f"{local} then {check}" for local in OUTCOMES for check in OUTCOMES):
            brokers = set()
            for number in range(2):
                local, _, later = kind.split()
                properties = {"local": local, "check": later}
                made = Message(topic, f"{kind} {number}".encode(), properties=properties)
                result = await producer.send_in_transaction(made, execute)
                assert result.confirmed == (local != "unknown")
                brokers.add(result.sent.queue.broker_name)
            assert brokers == {"ours", "theirs"}
        await wait_for(lambda: enough(asked))
    return asked


def test_our_producer_and_a_stock_one_share_a_group_on_brokers_of_both_kinds(
    tmp_path: Path, names: rocketmq.NameServer, jvm: Jvm, name: Name
) -> None:
    topic, group = "Shared", name("sellers")
    theirs = rocketmq.Broker(tmp_path / "theirs", names.address, {**REAL, "brokerName": "theirs"})
    ours = Martlet(tmp_path / "ours", {**OURS, "broker.name": "ours", "remoting.nameservers": f'["{names.address}"]'})
    clients = Java(jvm, names.address)
    try:
        received, expected = both_share(clients, topic, group, [ours.address, theirs.address], name("readers"))
        assert received == expected
    finally:
        clients.close()
        ours.close()
        theirs.kill()


def both_share(
    clients: Java, topic: str, group: str, brokers: list[str], readers: str
) -> tuple[set[bytes], set[bytes]]:
    """Let both producers send and answer checks; return what a consumer received, and what it should have received."""

    def known() -> bool | None:
        return True if set(rocketmq.brokers_known(clients.name_server)) == {"ours", "theirs"} else None

    eventually(known)
    for address in brokers:
        clients.queries().create_topic(topic, address, queues=1)
    plain = clients.producer()
    eventually(lambda: True if len(found(lambda: plain.queues(topic)) or []) == 2 else None)
    kinds = [(local, check) for local in OUTCOMES for check in OUTCOMES]
    stock = clients.transactions(group)
    stock.send(*(transaction(topic, local, check, number) for local, check in kinds for number in (2, 3)))
    consumer = clients.push(readers, topic)
    expected = {
        f"{local} then {check} {number}".encode()
        for local, check in kinds
        for number in range(4)
        if local == "commit" or (local, check) == ("unknown", "commit")
    }
    unknown = {f"unknown then {check} {number}" for check in OUTCOMES for number in range(4)}

    def all_asked(asked: set[str]) -> set[str]:
        return asked | {body.decode() for body in bodies(stock.checks)}

    asked = trio.run(
        sell,
        clients.name_server,
        group,
        topic,
        lambda asked: all_asked(asked) == unknown and expected <= set(bodies(consumer.seen)),
    )
    assert all_asked(asked) == unknown
    # RocketMQ stores a message twice if it checks again before it has written that the transaction ended.
    assert set(bodies([each for each in consumer.seen if each.broker == "ours"]).values()) == {1}
    return set(bodies(consumer.seen)), expected
