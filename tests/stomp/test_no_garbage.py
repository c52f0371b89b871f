"""Connections of STOMP clients leave no reference cycles, which nothing would collect while the broker is busy."""

import gc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from tests.wire_clients.stomp import StompBroker, stomp_broker

TIMES = 20


async def sender(stomp: StompBroker) -> None:
    talk = await stomp.connect(heart_beat="1000,1000")
    await talk.publish("/queue/q", b"1")
    await talk.disconnect()


async def consumer(stomp: StompBroker) -> None:
    talk = await stomp.connect()
    await talk.subscribe("/queue/q", "client")
    await talk.subscribe("/topic/t", name="1")
    talk.hang_up()


async def transaction(stomp: StompBroker) -> None:
    talk = await stomp.connect()
    await talk.send(talk.frame("BEGIN", transaction="t"))
    await talk.publish("/queue/other", b"1", transaction="t")
    talk.hang_up()


async def refused(stomp: StompBroker) -> None:
    _, answer = await stomp.answer(login="\x01")
    assert answer.command == "ERROR"


async def wrong(stomp: StompBroker) -> None:
    talk = await stomp.connect()
    await talk.send(talk.frame("COMMIT", transaction="unknown"))
    assert (await talk.receive()).command == "ERROR"


@pytest.mark.parametrize("visit", [sender, consumer, transaction, refused, wrong], ids=lambda visit: visit.__name__)
async def test_clients_leave_no_cycles(
    visit: Callable[[StompBroker], Awaitable[None]], tmp_path: Path, no_collection: None
) -> None:
    async def visit_often(times: int) -> None:
        for _ in range(times):
            await visit(stomp)
        while stomp.running.server.statistics()["connections"]:
            await trio.lowlevel.checkpoint()
        await stomp.settle()

    async with stomp_broker(tmp_path) as stomp:
        await visit_often(3)  # what is made once
        gc.collect()
        await visit_often(TIMES)
        assert gc.collect() < TIMES  # less than one object for each time
