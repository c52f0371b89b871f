"""The figures of memory among those of `$SYS`."""

from pathlib import Path

import pytest
from tests.wire_clients.mqtt import mqtt_broker
from trio.testing import MockClock

from martlet_mqtt.admin import sys_topics
from martlet_mqtt.config import MqttConfig

PREFIX = "$SYS/broker/heap/"


async def test_the_maximum_is_never_less_than_any_current_value(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the kernel's own maximum is."""
    sizes = iter([1 << 50, 1 << 51, 1 << 20])
    monkeypatch.setattr(sys_topics, "resident_bytes", lambda: next(sizes))
    async with mqtt_broker(tmp_path, MqttConfig(sys_interval_s=10)) as broker:
        talk = await broker.connect("c")
        await talk.subscribe(PREFIX + "+")
        for current, maximum in ((1 << 50, 1 << 50), (1 << 51, 1 << 51)):
            found = {packet.topic: int(packet.payload) for packet in await talk.messages(2)}
            assert found == {PREFIX + "current": current, PREFIX + "maximum": maximum}
        (smaller,) = await talk.messages(1)
        assert (smaller.topic, int(smaller.payload)) == (PREFIX + "current", 1 << 20)
