"""The longest frame follows the largest message body."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import stomp_broker

from martlet.settings import BrokerConfig
from martlet.store import StoreConfig
from martlet_stomp.config import StompConfig

BODY = bytes(range(256)) * (5 << 12)  # 5 MiB
STORE = StoreConfig(flush="async", message_bytes_max=len(BODY))


async def test_a_body_as_large_as_the_broker_accepts_passes(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, store=STORE, broker=BrokerConfig(message_bytes_max=len(BODY))) as stomp:
        reader, writer = await stomp.connect(), await stomp.connect()
        await reader.subscribe("/queue/large")
        await writer.publish("/queue/large", BODY, **{"content-length": str(len(BODY))})
        assert await reader.bodies(1) == [BODY]


@pytest.mark.parametrize(("frame_bytes_max", "expected"), [(256 << 20, len(BODY) + 65_536), (1 << 20, 1 << 20)])
def test_a_smaller_limit_of_frames_counts(frame_bytes_max: int, expected: int) -> None:
    assert StompConfig(frame_bytes_max=frame_bytes_max).limits(len(BODY)).frame_bytes_max == expected
