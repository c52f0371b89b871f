"""A consumer that never reads costs what is under way to it, and a position; not the messages that it has not read."""

import gc
import tracemalloc
from pathlib import Path

import pytest
from tests.wire_clients.stomp import StompBroker, stomp_broker

from martlet.testing.stores import small_config

CONSUMERS = 20
# The first ones fill connections, of 64 KiB each, the cache of the log, and what cursors have in common at its tail.
FIRST, MORE, BODY_BYTES = 5000, 15_000, 1000
STORE = small_config(flush="async", segment_bytes=1 << 22, page_bytes=1 << 16, cache_bytes=1 << 20, open_files_max=64)


async def publish(stomp: StompBroker, destination: str, count: int) -> None:
    talk = await stomp.connect()
    for _ in range(count // 500):
        await talk.publish(destination, *[b"x" * BODY_BYTES] * 500)
    await talk.disconnect()
    await stomp.idle()
    gc.collect()


@pytest.mark.parametrize(
    ("subscribed", "sent", "ack"),
    [
        ("/topic/a", "/topic/a", "auto"),
        ("/topic/a", "/topic/a", "client-individual"),
        ("/topic/mqtt/a/#", "/topic/mqtt/a/b", "auto"),
        ("/queue/a", "/queue/a", "client"),
        ("/temp-topic/a", "", "auto"),
    ],
)
async def test_a_consumer_that_never_reads_costs_no_memory_per_message(
    tmp_path: Path, subscribed: str, sent: str, ack: str
) -> None:
    async with stomp_broker(tmp_path, store=STORE) as stomp:
        talks = []
        for number in range(CONSUMERS):
            talk = await stomp.connect()
            await talk.subscribe(subscribed, ack, f"s{number}")
            talks.append(talk)
        if not sent:
            await talks[0].subscribe("/queue/work", name="work")
            await talks[0].publish("/queue/work", b"question", reply_to=subscribed)
            sent = (await talks[0].messages(1))[0]["reply-to"]
        tracemalloc.start()
        try:
            await publish(stomp, sent, FIRST)
            before, _ = tracemalloc.get_traced_memory()
            await publish(stomp, sent, MORE)
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < MORE * BODY_BYTES // 15, f"{after - before} bytes for {CONSUMERS} consumers"
        assert len(stomp.context.clients) == CONSUMERS
