"""`martlet tx` against a broker in another process: what it lists, shows and ends."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.broker_process import broker_process
from tests.client.patient import patient

from martlet_client import Admin, Message, TransactionResult, TransactionState
from martlet_client.blocking import PullConsumer, TransactionProducer
from martlet_remoting.wire.codes import RequestCode

LIMIT_S = 300


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[str]:
    with broker_process(tmp_path / "store") as address:
        yield address


def tx(name_server: str, *words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "martlet", "tx", *words, "-n", name_server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if not code else done.stderr


def prepare(name_server: str, *bodies: bytes) -> list[TransactionResult]:
    """Begin transactions of which nobody knows the end."""
    with TransactionProducer(
        patient(name_server), "sellers", lambda message: TransactionState.UNKNOWN, send_timeout_s=LIMIT_S
    ) as producer:
        return [
            producer.send_in_transaction(
                Message("orders", body, tags="t"), lambda message, key: TransactionState.UNKNOWN
            )
            for body in bodies
        ]


def read(name_server: str) -> list[bytes]:
    with PullConsumer(patient(name_server), "readers") as consumer:
        return sorted(message.body for queue in consumer.queues("orders") for message in consumer.read(queue))


def test_pending_transactions_are_listed_shown_and_ended(name_server: str) -> None:
    assert json.loads(tx(name_server, "list", "--json")) == []
    first, second, third = (each.sent.transaction_id for each in prepare(name_server, b"first", b"second", b"third"))
    rows = json.loads(tx(name_server, "list", "--json"))
    assert [(row["id"], row["number"], row["group"], row["topic"]) for row in rows] == [
        (key, number, "sellers", "orders") for number, key in enumerate((first, second, third))
    ]
    assert [row["id"] for row in json.loads(tx(name_server, "list", "--count", "2", "--json"))] == [first, second]
    assert second in tx(name_server, "list")
    shown = json.loads(tx(name_server, "show", second, "--json"))
    assert (shown["transactionId"], shown["bodyBytes"], shown["properties"]["TAGS"]) == (second, 6, "t")
    by_number = json.loads(tx(name_server, "show", "1", "--json"))
    assert {**by_number, "checks": shown["checks"]} == shown  # it may have been checked in between
    assert tx(name_server, "commit", second) == f"committed transaction {second} to topic orders\n"
    assert json.loads(tx(name_server, "rollback", "0", "--json")) == {"transactionId": first, "state": "rolled back"}
    assert [row["id"] for row in json.loads(tx(name_server, "list", "--json"))] == [third]
    assert read(name_server) == [b"second"]


async def begin_external(name_server: str) -> None:
    """Begin a run of a producer, and commit nothing."""
    async with Admin(patient(name_server)) as admin:
        (address,) = (await admin.cluster()).masters().values()
        ext: dict[str, object] = {"producer": "query", "run": "run-1", "topic": "orders"}
        begun = await admin.network.ask(address, RequestCode.BEGIN_EXTERNAL_TRANSACTIONS, ext)
        ext = {"producer": "query", "epoch": begun.ext["epoch"], "sequence": 5, "topic": "orders"}
        await admin.network.ask(address, RequestCode.COMMIT_EXTERNAL_TRANSACTION, ext)


def test_producers_of_external_transactions_are_listed(name_server: str) -> None:
    assert json.loads(tx(name_server, "producers", "--json")) == []
    trio.run(begin_external, name_server)
    (row,) = json.loads(tx(name_server, "producers", "--json"))
    assert {name: row[name] for name in ("producer", "identity", "epoch", "run", "committed", "delivering")} == {
        "producer": "query",
        "identity": "",
        "epoch": 1,
        "run": "run-1",
        "committed": 5,
        "delivering": -1,
    }
    assert "run-1" in tx(name_server, "producers")


def test_what_is_not_pending_is_not_found(name_server: str) -> None:
    (result,) = prepare(name_server, b"x")
    key = result.sent.transaction_id
    tx(name_server, "rollback", key)
    for wanted in key, "0", "7", "nonsense", "9" * 30:
        assert "is not pending; `martlet tx list` lists those that are" in tx(name_server, "show", wanted, code=1)
        assert "is not pending" in tx(name_server, "commit", wanted, code=1)
    assert read(name_server) == []
