"""Compressed bodies that expand to many times their size: few of them are in memory at a time, whoever reads them."""

import tracemalloc
from pathlib import Path

import pytest
import trio
from tests.wire_clients.stomp import V1_2, stomp_broker
from trio.testing import MockClock

from martlet.message import Message
from martlet.records.compression import DELIVERED_BYTES_MAX, compress
from martlet.settings import BrokerConfig

EXPANDED_BYTES = 1 << 20
MESSAGES = 40
MEMORY_BYTES_MAX = 20_000_000


@pytest.mark.parametrize("ack", ["auto", "client", "client-individual"])
@pytest.mark.parametrize("destination", ["/topic/t", "/queue/t", "/topic/mqtt/t", "/queue/mqtt/t"])
async def test_a_subscriber_gets_them_in_order_and_few_are_in_memory(
    destination: str, ack: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    topic = destination.split("/")[2]
    async with stomp_broker(tmp_path) as broker:
        talk = await broker.connect(V1_2)
        await talk.subscribe(destination, ack)
        bodies = [b"%d" % number + bytes(EXPANDED_BYTES) for number in range(MESSAGES)]
        for body in bodies:
            content, flag = compress(body)
            broker.broker.publish(Message(topic, content, b"TAGS\x01t\x02", 0, sys_flag=flag))
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await broker.idle()
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY_BYTES_MAX
        finally:
            tracemalloc.stop()
        for body in bodies:
            (found,) = await talk.messages(1)
            assert found.body == body
            if ack != "auto":
                await talk.ack(found)


@pytest.mark.parametrize("message_bytes_max", [1 << 20, DELIVERED_BYTES_MAX + 1000])
@pytest.mark.parametrize("destination", ["/topic/t", "/queue/t"])
async def test_a_body_as_long_as_messages_may_be_arrives(
    destination: str, message_bytes_max: int, tmp_path: Path, autojump_clock: MockClock
) -> None:
    largest = bytes(max(DELIVERED_BYTES_MAX, message_bytes_max))
    async with stomp_broker(tmp_path, broker=BrokerConfig(message_bytes_max=message_bytes_max)) as broker:
        talk = await broker.connect(V1_2)
        await talk.subscribe(destination)
        for body in largest + b"x", largest, b"last":
            content, flag = compress(body)
            broker.broker.publish(Message("t", content, b"", 0, sys_flag=flag))
        await broker.idle()
        with trio.fail_after(60):
            found = await talk.messages(2)
        assert [len(each.body) for each in found] == [len(largest), len(b"last")]
        assert broker.context.statistics()["unreadable"] == 1
