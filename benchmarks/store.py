"""How fast the store is on this machine: append, commit, read, scan, recover, rebuild.

    python benchmarks/store.py [--messages 300000] [--body 1024] [--queues 4] [--flush async] [--directory DIR]

Each line is one figure; run it a few times, the disk and the neighbours vary. Nothing here waits
for a network, so a broker can only be slower.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from martlet.message import Message
from martlet.records.codec import tags_code
from martlet.runtime.clock import SystemClock
from martlet.store import Store, StoreConfig


def timed(label: str, count: int, work: Callable[[], None], unit: str = "messages") -> None:
    began = time.perf_counter()
    work()
    report(label, count, time.perf_counter() - began, unit)


def report(label: str, count: int, seconds: float, unit: str = "messages") -> None:
    print(f"{label:<46} {count / seconds:>12,.0f} {unit}/s   {seconds / count * 1e6:8.3f} us each", flush=True)


def messages_for(body_bytes: int) -> list[Message]:
    body = b"x" * body_bytes
    host = bytes((127, 0, 0, 1, 0, 0, 0x1F, 0x90))
    made = []
    for number in range(4096):
        unique = f"7F0000010A2B18B4AAC2{number * 16:08X}{number:04X}"
        properties = f"UNIQ_KEY\x01{unique}\x02WAIT\x01true\x02TAGS\x01Tag{number % 3}\x02".encode()
        made.append(Message("BenchmarkTest", body, properties, born_ms=1, born_host=host))
    return made


def append_all(store: Store, messages: list[Message], count: int, queues: int, batch: int) -> None:
    append, commit = store.writer.append, store.committer.commit
    for number in range(count):
        append(messages[number & 4095], number % queues)
        if number % batch == batch - 1:
            commit()
    commit()


def append_runs(store: Store, messages: list[Message], count: int, queues: int, batch: int) -> None:
    for start in range(0, count, batch):
        numbers = range(start, min(start + batch, count))
        store.writer.append_all([store.writer.item(messages[number & 4095], number % queues) for number in numbers])
        store.committer.commit()


def read_all(store: Store, queues: int, pull: int) -> int:
    count = 0
    for queue_id in range(queues):
        queue = store.queue("BenchmarkTest", queue_id)
        offset = 0
        end = store.readers.end_offset(queue)
        while offset < end:
            result = store.readers.read(queue, offset, pull, 262_144)
            count += result.count
            offset = result.next_offset
    return count


def read_interleaved(store: Store, queues: int, pull: int) -> int:
    """Every queue in turn, as many consumers do."""
    count = 0
    offsets = dict.fromkeys(range(queues), 0)
    while offsets:
        for queue_id in list(offsets):
            queue = store.queue("BenchmarkTest", queue_id)
            result = store.readers.read(queue, offsets[queue_id], pull, 262_144)
            count += result.count
            offsets[queue_id] = result.next_offset
            if result.next_offset >= store.readers.end_offset(queue):
                del offsets[queue_id]
    return count


def scan_all(store: Store, queues: int) -> None:
    codes = frozenset((tags_code("nothing has it"),))
    for queue_id in range(queues):
        queue = store.queue("BenchmarkTest", queue_id)
        offset = 0
        while offset < store.readers.end_offset(queue):
            offset = store.readers.read(queue, offset, 32, 262_144, codes).next_offset


async def index_all(store: Store) -> None:
    keys = store.keys
    while keys is not None and keys.drain(256):
        await trio.lowlevel.checkpoint()


async def follow(store: Store, total: int) -> None:
    """Let the store complete its key index, with nothing else to do."""
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        while store.statistics().unindexed_bytes:  # noqa: ASYNC110 - the store tells nobody when it is done
            await trio.sleep(0.01)
        report("  the key index, in the background", total, time.perf_counter() - began)
        nursery.cancel_scope.cancel()


async def open_store(directory: Path, config: StoreConfig) -> Store:
    store = await Store.open(directory, config, SystemClock())
    store.writer.store_host = bytes((127, 0, 0, 1, 0, 0, 0x2A, 0x9F))
    return store


async def reopen(label: str, directory: Path, config: StoreConfig, messages: int) -> Store:
    began = time.perf_counter()
    store = await open_store(directory, config)
    seconds = time.perf_counter() - began
    records = store.recovered.records
    print(f"{label:<46} {seconds:>12.3f} s   {records:,} of {messages:,} records read again", flush=True)
    return store


async def main(arguments: argparse.Namespace) -> None:
    directory = Path(arguments.directory or tempfile.mkdtemp(prefix="martlet-bench-"))
    config = StoreConfig(flush=arguments.flush, disk_full_ratio=1.0, keys_index=not arguments.no_index)
    messages = messages_for(arguments.body)
    count, queues = arguments.messages, arguments.queues
    try:
        began = time.perf_counter()
        store = await open_store(directory, config)
        print(f"{'open, empty':<46} {time.perf_counter() - began:>12.3f} s")
        for batch in (1, 16, 64):
            append = partial(append_all, store, messages, count // 3, queues, batch)
            timed(f"append, commit every {batch}", count // 3, append)
            if store.keys is not None:
                waiting = len(store.keys.pending)
                began = time.perf_counter()
                await index_all(store)
                report("  index what waits", waiting, time.perf_counter() - began)
        timed(
            "append_all of 64, commit each", count // 3, partial(append_runs, store, messages, count // 3, queues, 64)
        )
        if store.keys is not None:
            await index_all(store)
        total = count // 3 * 4
        timed("fdatasync of all that", total, store.flusher.flush_now)
        await store.upkeep.checkpointer.checkpoint()
        for pull in (1, 32):
            read = partial(check_read, store, queues, pull, total)
            timed(f"read, one queue after the other, {pull} a read", total, read)
        timed("read, queues in turn, 32 a read", total, lambda: check(read_interleaved(store, queues, 32), total))
        timed("search a tag that nothing has", total, lambda: scan_all(store, queues), "entries")
        store.crash()
        store = await reopen("open after a kill", directory, config, total)
        timed("read what another process wrote, 32 a read", total, partial(check_read, store, queues, 32, total))
        await store.close()
        store = await reopen("open after an orderly stop", directory, config, total)
        await store.close()
        shutil.rmtree(directory / "consumequeue")
        shutil.rmtree(directory / "index")
        began = time.perf_counter()
        store = await reopen("open without consumequeue and index", directory, config, total)
        report("  rebuild of the queues", total, time.perf_counter() - began)
        await follow(store, total)
        await store.close()
    finally:
        if not arguments.directory:
            shutil.rmtree(directory)


def check_read(store: Store, queues: int, pull: int, wanted: int) -> None:
    check(read_all(store, queues, pull), wanted)


def check(found: int, wanted: int) -> None:
    if found != wanted:
        raise SystemExit(f"read {found} of {wanted} messages")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=300_000)
    parser.add_argument("--body", type=int, default=1024)
    parser.add_argument("--queues", type=int, default=4)
    parser.add_argument("--flush", choices=("sync", "async"), default="async")
    parser.add_argument("--no-index", action="store_true", help="leave the key index out of the appends")
    parser.add_argument("--directory", help="where; default: a temporary directory that is removed")
    trio.run(main, parser.parse_args())
