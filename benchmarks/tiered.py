"""Uploads of a log to the cold tier in a directory: processor time, pauses of the event loop, memory, size, sends.

    python benchmarks/tiered.py [MIB] [BODY_BYTES]

Writes a log of MIB (default 600) with JSON bodies in 8 topics with 4 queues, then uploads it twice in a process of its
own, which stands for the broker and starts the upload process. The first time it does nothing else:

- worker: records per second of processor time of the upload process, its start included
- both: the same of the upload process and the broker together; 500 looks at the event loop a second are the broker's
- real: records per second
- idle, late: pauses of the broker's event loop of 5 ms and more a second, without and with uploads
- longest: the longest of them with uploads, in ms
- MiB: largest resident size of the broker above a process that has only opened the store, and of the upload process
- size: bytes of the files, relative to the log

The second time it stores messages of 1 KiB in another log at half of the rate that it can, and prints the p99 from when
a message is due until it is stored, without and with uploads.
"""

import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING
from uuid import uuid4

import trio
from bodies import body

from martlet.message import Message, encode_properties
from martlet.runtime.clock import SystemClock
from martlet.store import Store, StoreConfig
from martlet.testing.stores import HOST

if TYPE_CHECKING:
    from martlet_tiered.upload.uploader import Uploader

CONFIG = StoreConfig(flush="async", disk_used_ratio_max=1.0, disk_clean_ratio=1.0, disk_full_ratio=1.0)
TICK_S = 0.002
IDLE_S = 2.0
SENDS_S = 2.0
SENDS_AT_ONCE = 20
SEND_TICK_S = 0.0005


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

    async def beginning(self, epoch: int, end: int) -> None:
        """Do nothing."""

    async def committed(self, files: Sequence[object], footers: Sequence[object]) -> None:
        """Do nothing."""


async def upload(folder: Path, target: Path, *, sends: bool) -> None:
    """Upload the log in *folder* and print what it took."""
    store = await Store.open(folder, CONFIG, SystemClock())
    before_kib = peak_kib()
    uploader = make_uploader(store, target)
    await (
        upload_beside_sends(store, uploader, target / "live") if sends else upload_alone(store, uploader, before_kib)
    )
    store.crash()


def make_uploader(store: Store, target: Path) -> "Uploader":
    """Return an uploader of *store* to the directory *target*."""
    from martlet_tiered.config import TieredConfig
    from martlet_tiered.delta import TableLog
    from martlet_tiered.location import TierLocation
    from martlet_tiered.opening import open_objects
    from martlet_tiered.table import ColdTable
    from martlet_tiered.upload.messages import Setup
    from martlet_tiered.upload.process import run_worker
    from martlet_tiered.upload.uploader import Uploader

    config, unique, now_ms = TieredConfig(url=str(target / "tier"), range_ms=100), uuid4().hex, SystemClock().now_ms()
    location = TierLocation.of(config, {})
    setup = Setup(config, location.options, store.segments.directory, "bench", unique, now_ms, logging.INFO)

    def open_table() -> ColdTable:
        objects = open_objects(location, config, uuid4().hex, SystemClock().now_ms())
        return ColdTable(objects, TableLog(objects, location, config), "bench")

    return Uploader(store, config, SystemClock(), open_table, partial(run_worker, setup), Ignore(), "bench", unique)


async def upload_alone(store: Store, uploader: "Uploader", before_kib: int) -> None:
    """Upload, and print what it took."""
    idle, pauses = Pauses(), Pauses()
    with trio.move_on_after(IDLE_S):
        await idle.run()
    began, processor = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pauses.run)
        await upload_all(store, uploader)
        nursery.cancel_scope.cancel()
    seconds = time.perf_counter() - began
    broker_s = time.process_time() - processor
    worker = resource.getrusage(resource.RUSAGE_CHILDREN)
    worker_s = worker.ru_utime + worker.ru_stime
    progress = uploader.progress
    for spent in (worker_s, worker_s + broker_s, seconds):
        print(f"{progress.records / spent:11,.0f}", end="")
    late = idle.late(0.005) / IDLE_S, pauses.late(0.005) / seconds
    print(f" {late[0]:6.1f} {late[1]:6.1f} {pauses.longest_s * 1000:8.1f}", end="")
    print(f" {(peak_kib() - before_kib) >> 10:6} + {worker.ru_maxrss >> 10:4}", end="")
    print(f" {progress.file_bytes / progress.log_bytes:6.2f} {progress.ranges:7}")


async def upload_all(store: Store, uploader: "Uploader") -> None:
    """Upload until all of *store* is in the tier."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(uploader.run)
        await uploader.release(store.durable)
        while uploader.released < store.durable:  # noqa: ASYNC110
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()


async def upload_beside_sends(store: Store, uploader: "Uploader", folder: Path) -> None:
    """Store messages in *folder* without and with uploads, and print how long they wait."""
    live = await Store.open(folder, CONFIG, SystemClock())
    live.writer.store_host = HOST
    rate = (await Sends(live, None).measure(SENDS_S)) / 2
    without = Sends(live, rate)
    with trio.move_on_after(SENDS_S):
        await without.run()
    beside = Sends(live, rate)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(beside.run)
        await upload_all(store, uploader)
        nursery.cancel_scope.cancel()
    p99 = [quantiles(each.waits_s, n=100)[98] * 1000 for each in (without, beside)]
    print(
        f"{rate:,.0f} sends/s: p99 {p99[0]:.2f} ms without uploads, {p99[1]:.2f} ms with; ratio {p99[1] / p99[0]:.2f}"
    )


class Sends:
    """Stores messages at *rate*, each when it is due; None: as fast as possible."""

    def __init__(self, store: Store, rate: float | None) -> None:
        self.waits_s: list[float] = []
        self._store = store
        self._rate = rate
        self._message = Message("Live", body(1024), b"", born_ms=1)

    async def measure(self, seconds: float) -> float:
        """Return how many messages a second can be stored."""
        with trio.move_on_after(seconds):
            await self.run()
        return len(self.waits_s) / seconds

    async def run(self) -> None:
        """Store messages until cancelled."""
        began, count = time.perf_counter(), 0
        while True:
            now = time.perf_counter()
            due = count + SENDS_AT_ONCE if self._rate is None else int((now - began) * self._rate)
            for _ in range(count, due):
                self._store.writer.append(self._message, count % 4)
            self._store.committer.commit()
            done = time.perf_counter()
            for number in range(count, due):
                self.waits_s.append(done - (now if self._rate is None else began + number / self._rate))
            count = due
            await trio.sleep(0 if self._rate is None else SEND_TICK_S)


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
        trio.run(lambda: upload(Path(sys.argv[2]), Path(sys.argv[3]), sends=sys.argv[4] == "sends"))
        return
    mib, size = (int(given) for given in [*sys.argv[1:], *("600", "1024")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as folder:
        count = trio.run(write_log, Path(folder) / "store", mib, size)
        print(f"{count:,} records, {mib} MiB", flush=True)
        print(f"{'worker':>11}{'both':>11}{'real':>11} {'idle':>6} {'late':>6} {'longest':>8}", end="")
        print(f" {'MiB':>13} {'size':>6} {'ranges':>7}", flush=True)
        for what in ("alone", "sends"):
            command = [sys.executable, __file__, "--upload", f"{folder}/store", f"{folder}/{what}", what]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
