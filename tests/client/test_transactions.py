"""The transaction producer against a Martlet broker in this process: what it does is judged by what can be read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.client.patient import patient
from tests.remoting.test_plugin import PATIENCE_S, Running, broker

from martlet_client import (
    Message,
    MessageRefused,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
    aio,
    blocking,
)

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
QUICK = {"check_interval_ms": 50, "immunity_ms": 0, "checks_max": 250}
NEVER = {"check_interval_ms": 86_400_000}


@asynccontextmanager
async def serving(folder: Path, tx: dict[str, int]) -> AsyncIterator[Running]:
    async with broker(folder, "nameserver", "tx", sections={"tx": tx}) as running:
        yield running


def never_asked(message: ReceivedMessage) -> TransactionState:
    raise AssertionError("nobody asks in this test")


async def read(name_server: str, topic: str = "T") -> list[bytes]:
    """Return the bodies of everything in *topic*."""
    async with PullConsumer(patient(name_server), "readers") as consumer:
        found = []
        for queue in await consumer.queues(topic):
            found += [message.body async for message in consumer.read(queue)]
        return found


async def until_read(name_server: str, expected: list[bytes]) -> None:
    with trio.fail_after(PATIENCE_S):
        while sorted(await read(name_server)) != sorted(expected):
            pass


async def test_a_message_is_delivered_if_its_local_transaction_commits(tmp_path: Path) -> None:
    async with serving(tmp_path, NEVER) as running:
        name_server = running.addresses["nameserver"]
        seen: list[str] = []

        async def execute(message: Message, transaction_id: str) -> TransactionState:
            assert await read(name_server) == []  # it is stored, and nobody can read it
            seen.append(transaction_id)
            return COMMIT if message.body == b"yes" else ROLLBACK

        async with TransactionProducer(patient(name_server), "P", never_asked, send_timeout_s=PATIENCE_S) as producer:
            rolled_back = await producer.send_in_transaction(Message("T", b"no"), execute)
            committed = await producer.send_in_transaction(Message("T", b"yes"), execute)
        assert (rolled_back.state, committed.state) == (ROLLBACK, COMMIT)
        assert rolled_back.confirmed
        assert committed.confirmed
        assert seen == [rolled_back.sent.message_id, committed.sent.message_id]
        assert await read(name_server) == [b"yes"]


@pytest.mark.parametrize("answer", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("raises", [True, False])
async def test_the_broker_asks_about_a_transaction_that_nobody_ended(
    tmp_path: Path, answer: TransactionState, raises: bool
) -> None:
    async with serving(tmp_path, QUICK) as running:
        name_server, asked = running.addresses["nameserver"], trio.Event()

        def execute(message: Message, transaction_id: str) -> TransactionState:
            if raises:
                raise OSError("the database is away")
            return UNKNOWN

        async def check(message: ReceivedMessage) -> TransactionState:
            assert (message.topic, message.body, message.properties["PGROUP"]) == ("T", b"x", "P")
            asked.set()
            return answer

        async with TransactionProducer(patient(name_server), "P", check, send_timeout_s=PATIENCE_S) as producer:
            result = await producer.send_in_transaction(Message("T", b"x"), execute)
            assert (result.state, result.confirmed) == (UNKNOWN, False)
            with trio.fail_after(PATIENCE_S):
                await asked.wait()
            if answer is COMMIT:
                await until_read(name_server, [b"x"])
            else:
                await producer.send(Message("T", b"later"))
                assert await read(name_server) == [b"later"]


async def test_what_a_function_must_not_return_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, NEVER) as running:
        name_server = running.addresses["nameserver"]
        async with TransactionProducer(patient(name_server), "P", never_asked, send_timeout_s=PATIENCE_S) as producer:
            with pytest.raises(TypeError, match="result of a local transaction"):
                await producer.send_in_transaction(Message("T", b"x"), lambda message, key: True)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="execute"):
                await producer.send_in_transaction(Message("T", b"x"), lambda: COMMIT)  # type: ignore[arg-type]
            with pytest.raises(MessageRefused, match="is delayed"):
                await producer.send_in_transaction(Message("T", b"x", delay_level=3), lambda message, key: COMMIT)


def test_a_check_must_be_a_function_of_a_message() -> None:
    with pytest.raises(TypeError, match="check"):
        TransactionProducer("127.0.0.1:1", "P", 7)  # type: ignore[arg-type]


async def test_plain_code_and_asyncio_have_it_too(tmp_path: Path) -> None:
    async with serving(tmp_path, NEVER) as running:
        name_server = running.addresses["nameserver"]
        await trio.to_thread.run_sync(plain, name_server)
        await trio.to_thread.run_sync(in_asyncio, name_server)
        assert sorted(await read(name_server)) == [b"asyncio", b"plain"]


def plain(name_server: str) -> None:
    with blocking.TransactionProducer(patient(name_server), "P", never_asked, send_timeout_s=PATIENCE_S) as producer:
        assert producer.send_in_transaction(Message("T", b"plain"), lambda message, key: COMMIT).confirmed


def in_asyncio(name_server: str) -> None:
    async def execute(message: Message, transaction_id: str) -> TransactionState:
        await asyncio.sleep(0)
        return COMMIT

    async def work() -> None:
        async with aio.TransactionProducer(
            patient(name_server), "P", never_asked, send_timeout_s=PATIENCE_S
        ) as producer:
            assert (await producer.send_in_transaction(Message("T", b"asyncio"), execute)).confirmed

    asyncio.run(work())


def committing(count: list[int]) -> Callable[[Message, str], TransactionState]:
    def execute(message: Message, transaction_id: str) -> TransactionState:
        count.append(1)
        return COMMIT

    return execute


async def test_the_producer_still_sends_plain_messages(tmp_path: Path) -> None:
    async with serving(tmp_path, NEVER) as running:
        name_server, count = running.addresses["nameserver"], [0]
        async with TransactionProducer(patient(name_server), "P", never_asked, send_timeout_s=PATIENCE_S) as producer:
            await producer.send(Message("T", b"plain"))
            await producer.send_in_transaction(Message("T", b"transaction"), committing(count))
        assert sorted(await read(name_server)) == [b"plain", b"transaction"]
        assert count == [0, 1]
