"""What the simulation has found, as short as it can be said."""

import errno
import random
from pathlib import Path

import pytest
import trio

from martlet.errors import Refused
from martlet.store import Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock, bodies, drain, message, small_config


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


async def test_a_stop_amid_a_checkpoint_loses_no_entry_of_a_queue() -> None:
    """What the checkpoint was about to sync is synced, or an orderly stop claims too much (seed 282)."""
    disk = FakeDisk()
    config = small_config(keys_index=False)
    store = await Store.open(Path("/data"), config, ManualClock(), disk)
    sent = [b"%d" % number for number in range(20)]
    # The second part ends where a file of the queue does, so that what follows does not touch that file again.
    for first, end in ((0, 5), (5, config.queue_file_entries), (config.queue_file_entries, 20)):
        for body in sent[first:end]:
            store.append(message(body), 0)
        store.commit()
        store.flusher.flush_now()
        with trio.CancelScope() as stop:
            if first == 5:
                stop.cancel()
            await store.checkpoint()
    await store.close()
    found = await Store.open(Path("/data"), config, ManualClock(), disk.after_power_cut(Cut.LOST, random.Random(0)))
    assert drain(found, found.queue("T", 0)) == sent
    found.crash()
