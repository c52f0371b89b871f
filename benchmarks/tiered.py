"""Uploads of a log to the cold tier in a directory: processor time, pauses of the event loop, memory, size.

    python benchmarks/tiered.py [MIB] [BODY_BYTES]

Writes a log of MIB (default 600) with JSON bodies in 8 topics with 4 queues, then uploads it in a process of its own:
once as fast as possible and once at the usual pace. "records/s" is per second of processor time, "real" of time.
"idle" and "late" are pauses of the event loop of 5 ms and more a second, without and with uploads, and "longest" is the
longest in ms. "imports" and "MiB" are the largest resident size above a process that has only opened the store, of the
imports and in total.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import trio
from bodies import body

from martlet.message import Message, encode_properties
from martlet.runtime.clock import SystemClock
from martlet.store import Store, StoreConfig
from martlet.testing.stores import HOST

CONFIG = StoreConfig(flush="async", disk_used_ratio_max=1.0, disk_clean_ratio=1.0, disk_full_ratio=1.0)
TICK_S = 0.002
IDLE_S = 2.0


async def write_log(folder: Path, mib: int, size: int) -> int:
    """Write a log and return the number of its records."""
    store = await Store.open(folder, CONFIG, SystemClock())
    store.writer.store_host = HOST
    samples = [body(size) for _ in range(2000)]
    count = 0
    while store.appended < mib << 20:
        for _ in range(100):
            place = random.randrange(32)
            keys = {"KEYS": f"key-{count}", "TAGS": f"T{count % 7}", "UNIQ_KEY": f"7F{random.getrandbits(120):030X}"}
            text = samples[random.randrange(2000)].replace(b'"id": ', b'"id": %d' % random.getrandbits(20), 1)
            made = Message(f"Orders-{place % 8}", text, encode_properties(keys), born_ms=1_700_000_000_000 + count)
            store.writer.append(made, place // 8)
            count += 1
        store.committer.commit()
        if count % 10_000 == 0:
            store.flusher.flush_now()
    await store.close()
    return count


class Ignore:
    """A follower that needs nothing."""

    async def sync(self, files: Sequence[object]) -> None:
        """Do nothing."""

    async def committed(self, files: Sequence[object], footers: Sequence[object]) -> None:
        """Do nothing."""


async def upload(folder: Path, target: Path, *, is_urgent: bool) -> None:
    """Upload the log in *folder* and print what it took."""
    store = await Store.open(folder, CONFIG, SystemClock())
    before_kib = peak_kib()
    from martlet_tiered.config import TieredConfig
    from martlet_tiered.delta import TableLog
    from martlet_tiered.location import TierLocation
    from martlet_tiered.opening import open_objects
    from martlet_tiered.table import ColdTable
    from martlet_tiered.upload import uploader as uploading
    from martlet_tiered.upload.uploader import Uploader

    imported_kib = peak_kib()
    config = TieredConfig(url=str(target), range_ms=100)
    location = TierLocation.of(config, {})

    def open_place() -> tuple[object, ColdTable]:
        objects = open_objects(location, config, uuid4().hex, SystemClock().now_ms())
        return objects, ColdTable(objects, TableLog(objects, location, config), "bench")

    if not is_urgent:
        uploading.RANGES_BEHIND = 1 << 20  # type: ignore[misc]
    uploader = Uploader(store, config, SystemClock(), open_place, Ignore(), "bench", uuid4().hex)  # type: ignore[arg-type]
    idle, pauses = Pauses(), Pauses()
    processor = time.process_time()
    with trio.move_on_after(IDLE_S):
        await idle.run()
    idle_share = (time.process_time() - processor) / IDLE_S
    began, processor = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(uploader.run)
        nursery.start_soon(pauses.run)
        if is_urgent:
            await uploader.release(store.durable)
        while uploader.released < store.durable:  # noqa: ASYNC110
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    seconds = time.perf_counter() - began
    spent = time.process_time() - processor - idle_share * seconds
    progress = uploader.progress
    memory = (imported_kib - before_kib) >> 10, (peak_kib() - before_kib) >> 10
    late = idle.late(0.005) / IDLE_S, pauses.late(0.005) / seconds
    name, ratio = "urgent" if is_urgent else "usual", progress.file_bytes / progress.log_bytes
    print(f"{name:>7} {progress.records / spent:11,.0f} {progress.records / seconds:11,.0f}", end="")
    print(f" {late[0]:6.1f} {late[1]:6.1f} {pauses.longest_s * 1000:8.1f} {memory[0]:8} {memory[1]:8}", end="")
    print(f" {ratio:6.2f} {progress.ranges:7}")
    store.crash()


class Pauses:
    """Finds out how late the event loop is."""

    def __init__(self) -> None:
        self.all: list[float] = []

    async def run(self) -> None:
        """Sleep and compare, until cancelled."""
        while True:
            began = time.perf_counter()
            await trio.sleep(TICK_S)
            self.all.append(time.perf_counter() - began - TICK_S)

    @property
    def longest_s(self) -> float:
        """The longest pause."""
        return max(self.all)

    def late(self, least_s: float) -> int:
        """Return the number of pauses of *least_s* and more."""
        return sum(each >= least_s for each in self.all)


class WithoutPandas:
    """Hides pandas, which pyarrow imports if it is there: brokers do not have it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse pandas."""
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name)


def peak_kib() -> int:
    """The largest resident size of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    """Write a log, and upload it in processes of their own."""
    if sys.argv[1:2] == ["--upload"]:
        sys.meta_path.insert(0, WithoutPandas())
        trio.run(lambda: upload(Path(sys.argv[2]), Path(sys.argv[3]), is_urgent=sys.argv[4] == "urgent"))
        return
    mib, size = (int(given) for given in [*sys.argv[1:], *("600", "1024")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as folder:
        count = trio.run(write_log, Path(folder) / "store", mib, size)
        print(f"{count:,} records, {mib} MiB", flush=True)
        print(f"{'pace':>7} {'records/s':>11} {'real':>11} {'idle':>6} {'late':>6} {'longest':>8}", end="")
        print(f" {'imports':>8} {'MiB':>8} {'size':>6} {'ranges':>7}")
        for pace in ("urgent", "usual"):
            command = [sys.executable, __file__, "--upload", f"{folder}/store", f"{folder}/{pace}", pace]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
