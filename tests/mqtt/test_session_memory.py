"""A session without a client takes little memory, also right after its client left."""

import gc
import tracemalloc
from pathlib import Path

from tests.mqtt.test_no_garbage import wait_alone
from tests.wire_clients.mqtt import V4, MqttBroker, mqtt_broker

from martlet.store import StoreConfig
from martlet_mqtt.wire.packets import Connack, Connect, FilterSubscription, Suback, Subscribe

SESSIONS = 1000
BYTES_MAX = 700  # 460 were measured; a reference cycle of a connection takes 3,000
# Little of the log is kept in memory.
STORE = StoreConfig(flush="async", page_bytes=1 << 14, cache_bytes=1 << 14)


async def make_sessions(mqtt: MqttBroker, first: int, count: int) -> None:
    """Let clients connect, subscribe to a filter of their own, and go."""
    for number in range(first, first + count):
        talk = mqtt.open(V4)
        await talk.send(
            Connect(f"s{number}", V4, clean_start=False), Subscribe(1, (FilterSubscription(f"d/{number}/#", 1),))
        )
        await talk.expect(Connack)
        await talk.expect(Suback)
        talk.hang_up()
    await wait_alone(mqtt)


async def test_a_new_session_takes_little_memory_once_its_client_left(tmp_path: Path, no_collection: None) -> None:
    async with mqtt_broker(tmp_path, store=STORE) as mqtt:
        await make_sessions(mqtt, 0, 200)  # what is made once
        gc.collect()
        tracemalloc.start()
        try:
            await make_sessions(mqtt, 200, SESSIONS)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(mqtt.broker.sessions) == 200 + SESSIONS
        assert held / SESSIONS <= BYTES_MAX
