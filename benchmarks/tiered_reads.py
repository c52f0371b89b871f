"""Reads of old messages from a cold tier in a directory: messages a second, seeks, memory, and the size of the index.

    python benchmarks/tiered_reads.py [MIB] [BODY_BYTES]

Writes a log of MIB (default 400) with JSON bodies in 8 topics with 4 queues, uploads it, and reads it in a process of
its own, 32 messages at a time. "records/s" is per second of processor time, "real" of time; "late" are pauses of the
event loop of 5 ms and more a second, and "longest" is the longest in ms. A seek is a read of one message at a random
offset, with nothing in memory: median and slowest in ms, and requests for each. "MiB" is the largest resident size
above a process that has only opened the store and imported. Then an index of 20 files with 10,000 queues each is made:
bytes for each span on the disk, and microseconds to add one and to find one.
"""

import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import trio
from tiered import CONFIG, Pauses, WithoutPandas, peak_kib, write_log

from martlet.runtime.clock import SystemClock
from martlet.runtime.io_threads import IoThreads
from martlet.store import Queue, ReadOptions, Store
from martlet_tiered.config import TieredConfig
from martlet_tiered.delta import TableLog
from martlet_tiered.format.footer import Span
from martlet_tiered.format.writing import TABLE_SCHEMA
from martlet_tiered.local import LocalObjects
from martlet_tiered.location import TierLocation
from martlet_tiered.objects import Objects
from martlet_tiered.opening import open_objects
from martlet_tiered.reading.database import IndexDatabase, IndexedFile
from martlet_tiered.reading.index import TierIndex
from martlet_tiered.reading.reader import TierReader
from martlet_tiered.reading.store_reads import StoreReads
from martlet_tiered.table import ColdTable
from martlet_tiered.upload.uploader import Uploader

CACHE_BYTES = 64 << 20
SEEKS = 40
FILES, QUEUES = 20, 10_000


class Counted(LocalObjects):
    """Counts the requests of readers."""

    requests = 0

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        Counted.requests += 1
        return super().read_range(name, begin, end)


def open_place(target: Path) -> tuple[Objects, ColdTable]:
    config = TieredConfig(url=str(target))
    location = TierLocation.of(config, {})
    objects = open_objects(location, config, uuid4().hex, SystemClock().now_ms())
    return objects, ColdTable(objects, TableLog(objects, location, config), "bench")


def make_reader(store: Store, target: Path) -> tuple[TierIndex, StoreReads, TierReader]:
    objects, threads = Counted(str(target)), IoThreads("the store")
    index = TierIndex(store, f"{store.data_directory.path}/config/tiered.index", "bench", objects, threads)
    reads = StoreReads(objects, threads, CACHE_BYTES)

    async def refresh() -> None:
        raise AssertionError("no file is removed")

    return index, reads, TierReader("bench", index, reads, refresh)


async def upload(folder: Path, target: Path) -> None:
    """Upload the log in *folder*, and index it."""
    store = await Store.open(folder, CONFIG, SystemClock())
    index, _, _ = make_reader(store, target)
    await index.begin()
    config = TieredConfig(url=str(target), range_ms=100)
    uploader = Uploader(store, config, SystemClock(), lambda: open_place(target), index, "bench", uuid4().hex)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(uploader.run)
        await uploader.release(store.durable)
        while uploader.released < store.durable:  # noqa: ASYNC110
            await trio.sleep(0.05)
        nursery.cancel_scope.cancel()
    store.crash()


async def read_all(reader: TierReader, queue: Queue) -> int:
    offset = count = 0
    wanted = ReadOptions(32, 1 << 20)
    while offset < queue.next_offset:
        result = await reader.read(queue, offset, wanted)
        count += result.count
        offset = result.next_offset
    return count


async def measure(folder: Path, target: Path) -> None:
    """Read everything, by one consumer after the other and by eight at the same time, and then at random places."""
    store = await Store.open(folder, CONFIG, SystemClock())
    before_kib = peak_kib()
    queues = sorted(store.queues.all(), key=lambda queue: (queue.topic, queue.queue_id))
    queues = [queue for queue in queues if queue.topic.startswith("Orders")]
    for at_once in (1, 8):
        index, _, reader = make_reader(store, target)
        await index.begin()
        await index.sync(open_table(target).files())
        Counted.requests, pauses, counts = 0, Pauses(), list[int]()
        began, processor = time.perf_counter(), time.process_time()

        async def consume(part: list[Queue], reader: TierReader = reader, counts: list[int] = counts) -> None:
            counts += [await read_all(reader, queue) for queue in part]

        async with trio.open_nursery() as services:
            services.start_soon(reader.run)
            services.start_soon(pauses.run)
            async with trio.open_nursery() as consumers:
                for number in range(at_once):
                    consumers.start_soon(consume, queues[number::at_once])
            services.cancel_scope.cancel()
        seconds, spent = time.perf_counter() - began, time.process_time() - processor
        print(f"{at_once:>9} {sum(counts) / spent:11,.0f} {sum(counts) / seconds:11,.0f}", end="")
        print(f" {pauses.late(0.005) / seconds:6.1f} {pauses.longest_s * 1000:8.1f}", end="")
        print(f" {Counted.requests:9} {(peak_kib() - before_kib) >> 10:6}", flush=True)
    took, requests = [], []
    for _ in range(SEEKS):
        index, _, reader = make_reader(store, target)
        await index.begin()
        await index.sync(open_table(target).files())
        queue = random.choice(queues)
        Counted.requests, began = 0, time.perf_counter()
        await reader.read(queue, random.randrange(queue.next_offset), ReadOptions(1, 1 << 20))
        took.append((time.perf_counter() - began) * 1000)
        requests.append(Counted.requests)
    print(f"seeks: {statistics.median(took):.1f} ms, slowest {max(took):.1f} ms, {max(requests)} requests")
    store.crash()


def open_table(target: Path) -> ColdTable:
    _, table = open_place(target)
    table.open(TABLE_SCHEMA)
    return table


def measure_index(folder: Path) -> None:
    """Make a large index."""
    database = IndexDatabase(str(folder / "index"), "bench")
    database.open()
    began = time.perf_counter()
    for number in range(FILES):
        begin = number << 28
        spans = [
            Span(f"Topic-{queue}", 0, number * 30, number * 30 + 29, queue * 30, 30, begin, begin, begin, begin + 1, 0)
            for queue in range(QUEUES)
        ]
        path = f"date=2026-11-28/kind=topic/e1-{begin}-{begin + (1 << 28)}.parquet"
        file = IndexedFile(path, 1 << 26, begin, begin + (1 << 28), spans)
        database.tangled_files(file)
        database.add(file)
    added = (time.perf_counter() - began) / (FILES * QUEUES)
    began = time.perf_counter()
    for _ in range(1000):
        database.places(f"Topic-{random.randrange(QUEUES)}", 0, random.randrange(FILES * 30), 2)
    found = (time.perf_counter() - began) / 1000
    size = (folder / "index").stat().st_size / (FILES * QUEUES)
    print(f"index: {size:.0f} B a span, {added * 1e6:.0f} us to add one, {found * 1e6:.0f} us to find one")


def main() -> None:
    """Write and upload a log, and read it in a process of its own."""
    if sys.argv[1:2] == ["--read"]:
        sys.meta_path.insert(0, WithoutPandas())
        trio.run(measure, Path(sys.argv[2]), Path(sys.argv[3]))
        return
    mib, size = (int(given) for given in [*sys.argv[1:], *("400", "1024")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = trio.run(write_log, folder / "store", mib, size)
        trio.run(upload, folder / "store", folder / "tier")
        print(f"{count:,} records, {mib} MiB", flush=True)
        print(f"{'consumers':>9} {'records/s':>11} {'real':>11} {'late':>6} {'longest':>8} {'requests':>9} {'MiB':>6}")
        sys.stdout.flush()
        subprocess.run([sys.executable, __file__, "--read", str(folder / "store"), str(folder / "tier")], check=True)
        measure_index(folder)


if __name__ == "__main__":
    main()
