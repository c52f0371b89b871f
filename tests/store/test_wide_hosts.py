"""Records of IPv6 clients, which have the store time at another place, at the head of a segment."""

from pathlib import Path

from tests.store.conftest import OpenStore

from martlet.message import Message
from martlet.records.layout import BORN_V6
from martlet.store.disk.checkpoint import TIMES
from martlet.testing.stores import ManualClock, drain, small_config

V6 = bytes(15) + b"\x01" + (40000).to_bytes(4, "big")
EVERY_HOUR = ";".join(f"{hour:02}" for hour in range(24))


def from_far(body: bytes) -> Message:
    return Message("T", body, b"", 0, 0, BORN_V6, 1, V6)


async def test_a_young_segment_stays_whoever_wrote_the_next_one(open_store: OpenStore, clock: ManualClock) -> None:
    store = await open_store(small_config(delete_when=EVERY_HOUR))
    for number in range(100):
        store.writer.append(from_far(b"%d" % number + b"x" * 100), 0)
    store.committer.commit()
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.upkeep.retention.look()
    assert store.first_position == 0
    clock.ms += 73 * 3_600_000
    store.writer.append(from_far(b"new"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.upkeep.retention.look()
    assert store.first_position > 0


async def test_a_start_after_a_crash_of_rocketmq_reads_everything_unsaved(
    open_store: OpenStore, clock: ManualClock, tmp_path: Path
) -> None:
    store = await open_store()
    sent = [b"%d" % number + b"x" * 100 for number in range(100)]
    saved = clock.ms + 5000
    for body in sent:
        clock.ms += 1000
        store.writer.append(from_far(body), 0)
        store.committer.commit()
    store.crash()
    path = tmp_path / "store" / "checkpoint"
    page = bytearray(4096)
    TIMES.pack_into(page, 0, saved, saved, saved, 0, 0)
    path.write_bytes(page)
    store = await open_store()
    assert drain(store, store.queue("T", 0)) == sent
