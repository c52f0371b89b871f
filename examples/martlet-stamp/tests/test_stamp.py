"""Every message is stored with a property that names the broker."""

from pathlib import Path

import pytest

from martlet.message import Message
from martlet.records.codec import decode_record
from martlet.settings import BrokerConfig
from martlet.testing.peers import serving
from martlet_stamp import StampConfig, StampPlugin


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b"VIA\x01north\x02"),
        (b"k\x01v\x02", b"k\x01v\x02VIA\x01north\x02"),
        (b"VIA\x01south\x02k\x01v", b"k\x01v\x02VIA\x01north\x02"),
    ],
)
async def test_a_message_is_stamped_once(tmp_path: Path, before: bytes, after: bytes) -> None:
    async with serving(tmp_path, broker=BrokerConfig(name="north")) as running:
        broker, plugin = running.broker, StampPlugin(StampConfig("VIA"))
        broker.set_stages([("stamp", stage) for stage in plugin.martlet_stages(broker)])
        broker.topics.ensure("t", 1)
        placed = broker.publish(Message("t", b"x", before))
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(placed.end)
        record = broker.store.lookup.record_at(placed.position)
        assert record is not None
        assert decode_record(record).properties == after
