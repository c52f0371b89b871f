"""How long garbage collections take while many objects come to live.

    python benchmarks/garbage.py [--objects 100000]

Objects come as sessions do: a few containers each, which stay. Prints for CPython's default, for rare collections and
for what `martlet run` does how many collections there were, the longest and all together, in ms of processor time.
"""

import argparse
import gc
import time
from collections import deque

from martlet.runtime.gc_schedule import OldObjects

CONTAINERS_EACH = 5


class Session:
    """Five containers that the collector walks."""

    def __init__(self, number: int) -> None:
        self.offsets = {number: [number]}
        self.ready: deque[int] = deque([number])
        self.waiting = {number}


class Times:
    """How long each collection took, in ms."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.found.append((time.thread_time() - self._began) * 1000)


def measure(name: str, objects: int) -> None:
    """Make *objects* containers and print what the collections of them cost."""
    times = Times()
    gc.callbacks.append(times)
    sessions = [Session(number) for number in range(objects // CONTAINERS_EACH)]
    gc.callbacks.remove(times)
    print(f"{name:34}{len(times.found):8}{max(times.found, default=0):10.1f}{sum(times.found):10.1f}")
    assert len(sessions) == objects // CONTAINERS_EACH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=100_000, help="containers that stay")
    objects = parser.parse_args().objects
    print(f"{'policy':34}{'number':>8}{'longest':>10}{'all':>10}")
    gc.collect()
    measure("CPython's default", objects)
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    measure("20,000 new objects, 20, 50", objects)
    gc.collect()
    OldObjects().start()
    measure("martlet run", objects)


if __name__ == "__main__":
    main()
