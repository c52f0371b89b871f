"""The longest turn of the event loop of a broker that runs as another process.

    turns = Turns(path)
    command = [python, *turns.command, "run", ...]     instead of [python, "-m", "martlet", "run", ...]
    turns.begin()
    ...                                                a load
    turns.longest_ms()

A turn is what the loop does between two waits for sockets and deadlines. It counts in processor time of the loop's
thread, which other work on the machine hardly lengthens. Measuring takes two system calls a turn. The broker writes the
longest turn into a file that both processes have mapped.
"""

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path
from typing import Any

import trio

LONGEST = struct.Struct("=d")


class Turns:
    """The longest turn since `begin` of the broker that was started with ``command``."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(LONGEST.size))
        self.command = [__file__, str(path)]
        self._shared = mapped(path)

    def begin(self) -> None:
        """Forget all earlier turns."""
        LONGEST.pack_into(self._shared, 0, 0.0)

    def longest_ms(self) -> float:
        found: float = LONGEST.unpack_from(self._shared)[0]
        return found * 1000


class Measure(trio.abc.Instrument):
    """Writes the longest turn to the file *path*."""

    def __init__(self, path: Path) -> None:
        self._shared = mapped(path)
        self._began = time.thread_time()

    def before_io_wait(self, timeout: float) -> None:
        took = time.thread_time() - self._began
        if took > LONGEST.unpack_from(self._shared)[0]:
            LONGEST.pack_into(self._shared, 0, took)

    def after_io_wait(self, timeout: float) -> None:
        self._began = time.thread_time()


def mapped(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), LONGEST.size)


def main() -> None:
    """Run ``martlet`` with the arguments after the path of the file."""
    measure, run = Measure(Path(sys.argv[1])), trio.run

    def measured_run(*args: Any, **more: Any) -> Any:
        return run(*args, **{**more, "instruments": [*more.get("instruments", ()), measure]})

    trio.run = measured_run
    del sys.argv[1], sys.path[0]  # the folder of the benchmarks
    runpy.run_module("martlet", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
