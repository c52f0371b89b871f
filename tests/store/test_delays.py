"""Entries of the schedule topic say when a message is due, as RocketMQ reads it, whichever plugins are enabled."""

from pathlib import Path

import pytest

from martlet.message import Message
from martlet.records.codec import tags_code
from martlet.records.layout import ENTRY
from martlet.store import Store
from martlet.store.format.delays import DELAYS_MS, SCHEDULE_TOPIC, due_dispatcher
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock, small_config


@pytest.mark.parametrize(
    ("properties", "code"),
    [
        (b"DELAY\x011\x02", 10_000 + 1000),
        (b"TAGS\x01a\x02DELAY\x013\x02", 10_000 + 10_000),
        (b"DELAY\x0118", 10_000 + 7_200_000),
        (b"DELAY\x0199\x02", 10_000 + 7_200_000),
        (b"DELAY\x010\x02TAGS\x01a\x02", tags_code(b"a")),
        (b"DELAY\x01-1\x02TAGS\x01a\x02", tags_code(b"a")),
        (b"DELAY\x019999999999\x02", 0),
        (b"", 0),
    ],
)
def test_the_code_is_the_time_at_which_the_message_is_due(properties: bytes, code: int) -> None:
    assert due_dispatcher(DELAYS_MS)(properties, 10_000) == code


async def test_a_rebuild_without_plugins_gives_the_entries_the_time_at_which_their_messages_are_due() -> None:
    disk, clock = FakeDisk(), ManualClock()
    properties = b"REAL_TOPIC\x01T\x02REAL_QID\x010\x02DELAY\x013\x02"
    for rebuilt in (False, True):
        if rebuilt:
            for path in [path for path in disk.files if "/consumequeue/" in path]:
                disk.unlink(path)
        store = await Store.open(Path("/data/store"), small_config(), clock, disk)
        store.writer.store_host = HOST
        if not rebuilt:
            store.writer.append(Message(SCHEDULE_TOPIC, b"x", properties), 2)
            store.committer.commit()
        entries = store.queues.load_entries(store.queue(SCHEDULE_TOPIC, 2), 0, 1)
        assert ENTRY.unpack(entries)[2] == clock.ms + 10_000
        await store.close()
