"""What an append costs in processor time, one by one and in every form of a run.

    python benchmarks/appends.py [--rounds 15] [--beside CHECKOUT]

Prints the least of all rounds in microseconds a message: 1 KiB, four queues, 40 messages a commit, async flush, no key
index. With --beside, each round also runs on the code of another checkout, by turns, in a process of its own; a form
that it does not have is left out.
"""

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trio

from martlet.message import Message
from martlet.runtime.clock import SystemClock
from martlet.store import Store, StoreConfig

HOST = bytes((127, 0, 0, 1, 0, 0, 0x1F, 0x90))
AT_ONCE = 40
COMMITS = 250


def made_messages() -> list[Message]:
    body = b"x" * 1024
    made = []
    for number in range(AT_ONCE):
        unique = f"7F0000010A2B18B4AAC2{number * 16:08X}{number:04X}"
        properties = f"UNIQ_KEY\x01{unique}\x02WAIT\x01true\x02TAGS\x01Tag{number % 3}\x02".encode()
        made.append(Message("BenchmarkTest", body, properties, born_ms=1, born_host=HOST))
    return made


def forms(store: Store) -> dict[str, Callable[[], object]]:
    """Return functions that append 40 messages, by name."""
    messages = made_messages()
    append = store.writer.append

    def one_by_one() -> None:
        for number, message in enumerate(messages):
            append(message, number & 3)

    found: dict[str, Callable[[], object]] = {
        "append": one_by_one,
        "append_all, atomic": lambda: store.writer.append_all(
            [store.writer.item(each, 0) for each in messages], atomic=True
        ),
    }
    item, append_all = store.writer.item, store.writer.append_all
    found["append_all, constructing items"] = lambda: append_all([item(each, n & 3) for n, each in enumerate(messages)])
    items = [item(each, number & 3) for number, each in enumerate(messages)]
    found["append_all of prepared items"] = lambda: append_all(items)
    return found


def measured(store: Store, work: Callable[[], object]) -> float:
    """Processor time of the appends alone, in microseconds a message."""
    spent, clock = 0.0, time.process_time
    gc.collect()
    for _ in range(COMMITS):
        began = clock()
        work()
        spent += clock() - began
        store.committer.commit()
    return spent * 1e6 / (COMMITS * AT_ONCE)


async def one_round() -> None:
    with tempfile.TemporaryDirectory(prefix="martlet-bench-") as directory:
        config = StoreConfig(flush="async", disk_full_ratio=1.0, keys_index=False)
        store = await Store.open(Path(directory), config, SystemClock())
        store.writer.store_host = bytes((127, 0, 0, 1, 0, 0, 0x2A, 0x9F))
        for name, work in forms(store).items():
            print(f"{name}\t{measured(store, work)}\t{measured(store, work)}")
        await store.close()


def round_of(checkout: Path) -> dict[str, float]:
    """The least of one round with the code of *checkout*."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "core")}
    words = [sys.executable, __file__, "--one-round"]
    said = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
    lines = [line.split("\t") for line in said.splitlines()]
    return {name: min(float(cost) for cost in costs) for name, *costs in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.one_round:
        trio.run(one_round)
        return
    here = Path(__file__).resolve().parents[1]
    checkouts = [words.beside.resolve(), here] if words.beside else [here]
    rounds = [[round_of(each) for each in checkouts] for _ in range(words.rounds)]
    for name in rounds[0][-1]:
        costs = [[each[index][name] for each in rounds if name in each[index]] for index in range(len(checkouts))]
        print(f"{name:30}", *[f"{min(cost):6.2f} us" if cost else " " * 9 for cost in costs])


if __name__ == "__main__":
    main()
