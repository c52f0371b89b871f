"""What the simulation has found, as short as it can be said."""

import errno
from pathlib import Path

import pytest

from martlet.errors import Refused
from martlet.store import Store
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock, bodies, message, small_config


async def test_records_lost_when_a_full_disk_stops_a_new_segment_are_not_committed() -> None:
    """Their appends have returned: only the commit can say that they are not stored (seed 216)."""
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(), ManualClock(), disk)
    stored = store.append(message("stored"), 0)
    store.commit()
    for _ in range(6):
        store.append(message("x" * 500), 0)
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(Refused, match="is full"):
        store.append(message("x" * 500), 0)
    with pytest.raises(Refused, match="is full"):
        store.commit()
    store.commit()
    store.flusher.flush_now()
    assert store.readable == stored.end
    queue = store.queue("T", 0)
    assert (queue.next_offset, bodies(store.read(queue, 0, 32, 65536).pieces)) == (1, [b"stored"])
    store.crash()
