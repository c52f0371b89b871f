"""A real process, killed while it works: its projection then knows what the log says, and all that was acknowledged."""

import random
import sys
from pathlib import Path

import pytest
import trio
from tests.kills import ROUNDS, Victim
from tests.state.tally import Tally, totals_in

from martlet.runtime.clock import SystemClock
from martlet.runtime.turns import Turns
from martlet.state import Projections
from martlet.store import Store
from martlet.testing.stores import HOST, message, small_config


async def opened(directory: Path, flush: str) -> tuple[Store, Tally, Projections]:
    sizes = {"segment_bytes": 1 << 20, "page_bytes": 1 << 16, "cache_bytes": 1 << 20}
    config = small_config(flush=flush, flush_interval_ms=20, **sizes)
    store = await Store.open(directory, config, SystemClock())
    store.writer.store_host = HOST
    tally, projections = Tally(), Projections(store, Turns(), snapshot_bytes=10_000)
    projections.add("toy", tally)
    await projections.replay()
    return store, tally, projections


async def work(directory: Path, flush: str) -> None:
    """Append for ever; print how many messages of this process are acknowledged."""
    store, _, projections = await opened(directory, flush)
    first = sum(count for count, _ in totals_in(store).values())
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        nursery.start_soon(projections.run)
        number = first
        while True:
            for _ in range(20):
                number += 1
                placed = store.writer.append(
                    message(b"x" * (number % 200), "AB"[number % 2], unique=f"k{number}"), number % 3
                )
            store.committer.commit()
            await store.flusher.wait_flushed(placed.end)
            await trio.lowlevel.checkpoint()
            print(number, flush=True)


async def check(directory: Path, flush: str, acknowledged: int) -> int:
    """Compare the projection with the log; return how many records its snapshot had."""
    store, tally, _ = await opened(directory, flush)
    assert tally.totals() == totals_in(store)
    known = set().union(*(keys for _, keys in tally.totals().values()))
    assert known >= {f"k{number}" for number in range(1, acknowledged + 1)}
    store.crash()
    return tally.restored


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_projection_survives_kill_9(tmp_path: Path, flush: str) -> None:
    chance = random.Random(flush)
    snapshot, restored = tmp_path / "config" / "tally.snapshot", 0
    for _ in range(ROUNDS):
        with Victim("tests.state.test_kill", tmp_path, flush) as victim:
            acknowledged, lines = 0, chance.randrange(5, 60)
            while lines > 0 or not snapshot.exists():
                acknowledged = int(victim.line())
                lines -= 1
        restored += trio.run(check, tmp_path, flush, acknowledged)
    assert restored > 0, "no snapshot was used"


if __name__ == "__main__":
    trio.run(work, Path(sys.argv[1]), sys.argv[2])
