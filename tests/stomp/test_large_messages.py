"""Large messages: subscribers of a topic share their bodies."""

import tracemalloc
from pathlib import Path

import pytest
from tests.wire_clients.stomp import V1_1, V1_2, stomp_broker
from trio.testing import MockClock

from martlet_stomp.wire.packets import Version

SUBSCRIBERS = 60
MESSAGE_BYTES = 4_000_000
MEMORY_BYTES_MAX = 40_000_000


@pytest.mark.parametrize(("version", "ack"), [(V1_1, "auto"), (V1_2, "client-individual")])
async def test_subscribers_that_do_not_read_share_a_body(
    version: Version, ack: str, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path) as broker:
        talks = [await broker.connect(version) for _ in range(SUBSCRIBERS)]
        for number, talk in enumerate(talks):
            await talk.subscribe("/topic/t", ack, str(number))
        publisher = await broker.connect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            await publisher.publish("/topic/t", b"x" * MESSAGE_BYTES)
            await broker.idle()
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY_BYTES_MAX
        finally:
            tracemalloc.stop()
        assert broker.context.counters.delivered == SUBSCRIBERS
        for number in 0, SUBSCRIBERS - 1:
            (found,) = await talks[number].messages(1)
            assert (found["subscription"], found.body) == (str(number), b"x" * MESSAGE_BYTES)


async def test_small_and_large_messages_come_in_their_order(tmp_path: Path, autojump_clock: MockClock) -> None:
    bodies = [b"first", b"x" * 100_000, b"second", b"third", b"y" * 40_000, b"z" * 50_000, b"last"]
    async with stomp_broker(tmp_path) as broker:
        talks = [await broker.connect(version) for version in Version]
        for talk in talks:
            await talk.subscribe("/topic/t")
        await (await broker.connect()).publish("/topic/t", *bodies)
        for talk in talks:
            assert await talk.bodies(len(bodies)) == bodies
