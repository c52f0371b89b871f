"""Writes atomic groups into a store until it is killed: ``python -m tests.faults.group_writer DIRECTORY FIRST``.

Prints the number of each group whose commit is durable. A group has 2 to 6 messages of up to 3 KB in two topics, so
that groups cross pages and segments.
"""

import sys
from pathlib import Path
from random import Random

import trio

from martlet.runtime.clock import SystemClock
from martlet.store import Store, StoreConfig
from martlet.testing.stores import HOST, append_group, message

CONFIG = StoreConfig(segment_bytes=1 << 20, page_bytes=4096, checkpoint_interval_ms=50, keys_index=False)


def sizes_of(number: int) -> list[int]:
    """The sizes of the bodies of group *number*."""
    random = Random(number)
    return [random.choice((0, 100, 3000)) for _ in range(random.choice((2, 3, 6)))]


async def write(directory: Path, number: int) -> None:
    store = await Store.open(directory, CONFIG, SystemClock())
    store.writer.store_host = HOST
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        while True:
            for _ in range(1 + number % 3):
                number += 1
                sizes = sizes_of(number)
                store.writer.append(message(b"plain %d" % number), 0)
                members = [message(b"%d:%d:" % (number, i) + bytes(size), "UV"[i % 2]) for i, size in enumerate(sizes)]
                append_group(store, members, [0] * len(members))
            store.committer.commit()
            await store.flusher.wait_flushed(store.appended)
            print(number, flush=True)


if __name__ == "__main__":
    trio.run(write, Path(sys.argv[1]), int(sys.argv[2]))
