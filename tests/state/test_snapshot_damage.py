"""Whatever happens to the file of a snapshot, after whatever kind of stop, the projection knows what the log says."""

from random import Random
from typing import Any

import pytest
import trio
from tests.state.tally import Running, Totals, retire, send, start, stop, totals_in

from martlet.testing.disk import Cut, FakeDisk

PATH = "/data/store/config/tally.snapshot"
CONFIG: dict[str, Any] = {"segment_bytes": 8192, "disk_clean_ratio": 0.9, "flush": "sync"}
TARGETS = {"newest": (PATH,), "previous": (f"{PATH}.bak",), "all": (PATH, f"{PATH}.bak")}
DAMAGES = (
    "removed",
    "emptied",
    "zeroed",
    "truncated",
    "flipped",
    "stale",
    "from the future",
    "of another log",
    "renamed by half a replacement",
)
STOPS = ("orderly", "killed before a snapshot", "killed after a snapshot", "killed twice", "power cut")


def copy_of(disk: FakeDisk) -> FakeDisk:
    return disk.after_power_cut(Cut.KILLED, Random(0))


class History:
    """A store with all that can happen to followed topics, stopped in each way, and other snapshots of its name."""

    def __init__(self) -> None:
        self.stopped: dict[str, FakeDisk] = {}
        self.totals: dict[str, Totals] = {}
        # Snapshots by damage: an old one, one that ends behind every log, and one of a log with other records.
        self.others: dict[str, bytes] = {}

    async def make(self) -> "History":
        await self._make_others()
        disk = FakeDisk()
        running = await start(disk, **CONFIG)
        self._fill(running, "old", 20)
        await stop(running)
        self.others["stale"] = bytes(disk.files[PATH].data)
        running = await start(disk, **CONFIG)
        await self._live_on(running, disk)
        await stop(running)
        await self._keep("orderly", disk)
        return self

    async def _make_others(self) -> None:
        for damage, count in (("from the future", 400), ("of another log", 9)):
            disk = FakeDisk()
            running = await start(disk, **CONFIG)
            self._fill(running, f"other{damage}", count)
            await stop(running)
            self.others[damage] = bytes(disk.files[PATH].data)

    def _fill(self, running: Running, label: str, count: int) -> None:
        for number in range(count):
            topic, queue_id = ("A", "B", "B", "C")[number % 4], number % 3
            send(running.store, topic, f"{label}{number}", queue_id=queue_id, keys="live" if number % 7 == 3 else "")
        running.store.flusher.flush_now()

    async def _live_on(self, running: Running, disk: FakeDisk) -> None:
        store = running.store
        self._fill(running, "more", 60)
        await retire(running, disk)
        assert store.first_position > 0
        assert running.tally.rolled
        await self._save(running)
        await self._keep("killed after a snapshot", disk)
        self.stopped["power cut"] = disk.after_power_cut(Cut.TORN, Random(1))
        self.totals["power cut"] = self.totals["killed after a snapshot"]
        store.deletions.delete_topic("A")
        self._fill(running, "new", 30)
        await self._keep("killed before a snapshot", disk)
        again = copy_of(disk)
        second = await start(again, **CONFIG)
        self._fill(second, "second", 5)
        second.store.crash()
        await self._keep("killed twice", again)

    async def _save(self, running: Running) -> None:
        driven = running.projections._driven[0]
        await running.projections.snapshots.write(driven)

    async def _keep(self, stop: str, disk: FakeDisk) -> None:
        """Remember *disk*, and what its log says."""
        self.stopped[stop] = copy_of(disk)
        bare = copy_of(disk)
        for name in (PATH, f"{PATH}.bak"):
            if name in bare.files:
                bare.unlink(name)
        running = await start(bare, **CONFIG)
        self.totals[stop] = totals_in(running.store)
        running.store.crash()


@pytest.fixture(scope="module")
def history() -> History:
    """Made once: each test works on copies."""
    made = History()
    trio.run(made.make)
    return made


def set_content(disk: FakeDisk, path: str, data: bytes) -> None:
    if path not in disk.files:
        disk.close(disk.open(path, create=True))
    file = disk.files[path]
    file.data[:] = data
    file.stable[:] = data
    file.changes.clear()


def spoil(disk: FakeDisk, path: str, damage: str, others: dict[str, bytes], random: Random) -> None:
    """Do *damage* to the file *path*."""
    data = bytearray(disk.files[path].data) if path in disk.files else bytearray()
    if damage in others:
        set_content(disk, path, others[damage])
    elif path not in disk.files:
        return
    elif damage == "removed":
        disk.unlink(path)
    elif damage == "renamed by half a replacement":
        disk.rename(path, f"{path}.tmp")
    elif damage == "emptied":
        set_content(disk, path, b"")
    elif damage == "zeroed":
        set_content(disk, path, bytes(len(data)))
    elif damage == "truncated":
        set_content(disk, path, bytes(data[: random.randrange(len(data))]))
    elif damage == "flipped":
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        set_content(disk, path, bytes(data))


@pytest.mark.parametrize("stop_kind", STOPS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("target", TARGETS)
async def test_damage_to_a_snapshot_changes_nothing(history: History, target: str, damage: str, stop_kind: str) -> None:
    disk = copy_of(history.stopped[stop_kind])
    for path in TARGETS[target]:
        spoil(disk, path, damage, history.others, Random(f"{target}{damage}{stop_kind}"))
    running = await start(disk, **CONFIG)
    assert running.tally.totals(running.store.first_position) == history.totals[stop_kind]
    send(running.store, "A", "one more")
    running.store.flusher.flush_now()
    running.check()
    known = running.tally.totals(running.store.first_position)
    await stop(running)
    again = await start(disk, **CONFIG)
    assert again.tally.totals(again.store.first_position) == known
    assert again.tally.applied == 0
    again.store.crash()


@pytest.mark.parametrize("stop_kind", STOPS)
async def test_every_flipped_bit_of_a_snapshot_is_noticed(history: History, stop_kind: str) -> None:
    size = len(history.stopped[stop_kind].files[PATH].data)
    for at in range(0, size, max(size // 40, 1)):
        disk = copy_of(history.stopped[stop_kind])
        data = bytearray(disk.files[PATH].data)
        data[at] ^= 1 << at % 8
        set_content(disk, PATH, bytes(data))
        running = await start(disk, **CONFIG)
        assert running.tally.totals(running.store.first_position) == history.totals[stop_kind]
        running.store.crash()
