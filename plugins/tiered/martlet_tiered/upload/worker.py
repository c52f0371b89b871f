"""The upload process, which a broker starts: ``python -P -m martlet_tiered.upload.worker``.

Requests come on its standard input, and replies go to its standard output. It ends when the input does, whatever it is
doing then, so it never outlives its broker. Its priority is low: the broker comes first.
"""

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, final

from martlet.store.disk.files import Files, RealDisk
from martlet.store.disk.segments import Segments
from martlet_tiered.credentials import Credentials
from martlet_tiered.location import TierLocation
from martlet_tiered.objects import Objects
from martlet_tiered.opening import open_objects
from martlet_tiered.upload.messages import LENGTH, AtWork, LogLine, Reply, Setup, encode_message
from martlet_tiered.upload.range_work import RangeWork

__all__ = ["main", "open_place"]

# A quarter of a processor that the broker wants all of. With less, uploads fall behind on a busy machine.
NICENESS: Final = 5
OPEN_FILES: Final = 8
BEAT_S: Final = 1.0
LINE_MAX: Final = 8 << 10


def main() -> None:
    """Answer requests until the input ends."""
    _lower_priority()
    sys.meta_path.insert(0, _WithoutPandas())
    replies = ReplyPipe(_take_output())
    logging.getLogger().addHandler(_Forward(replies))
    logging.getLogger().setLevel(logging.WARNING)
    work = RangeWork(open_place, replies.send)
    for request in _requests(sys.stdin.buffer):
        work.answer(request)


def open_place(setup: Setup) -> tuple[Segments, Objects]:
    """Return the files of the log, none of which is shown yet, and the objects of the cold tier."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    logging.getLogger("martlet").setLevel(setup.log_level)
    location = TierLocation(setup.config.url, Credentials(setup.options), {})
    segments = Segments(Files(RealDisk(), OPEN_FILES, read_only=True), setup.folder, 0)
    return segments, open_objects(location, setup.config, setup.unique, setup.now_ms)


def _lower_priority() -> None:
    # The terminal and service managers send these to all processes of a broker, which needs time for its own end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    with suppress(AttributeError, OSError):  # not on all systems, or forbidden
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(OSError):  # Linux: if memory is exhausted, the process ends, not its broker
        Path("/proc/self/oom_score_adj").write_text("500")


def _take_output() -> int:
    """Return a descriptor for replies; whatever a library prints goes to the standard error."""
    taken = os.dup(1)
    os.dup2(2, 1)
    return taken


def _requests(source: BinaryIO) -> Iterator[bytes]:
    """Yield each request; the process ends with *source*, also while one is at work."""
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        while len(head := source.read(LENGTH.size)) == LENGTH.size:
            requests.put(source.read(LENGTH.unpack(head)[0]))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield requests.get()


@final
class _WithoutPandas:
    """Hides pandas, which pyarrow imports where it is installed: it takes 50 MiB and is of no use here."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name, name=name)


@final
class ReplyPipe:
    """Writes replies to the descriptor *fd*; several threads may use it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._beat_at = 0.0

    def send(self, reply: Reply) -> None:
        """Write *reply*; most of the beats are left out."""
        if isinstance(reply, AtWork):
            now = time.monotonic()
            if now < self._beat_at:
                return
            self._beat_at = now + BEAT_S
        data = memoryview(encode_message(reply))
        with self._lock:
            while data:
                data = data[os.write(self._fd, data) :]


@final
class _Forward(logging.Handler):
    """Sends log lines to the broker."""

    def __init__(self, replies: ReplyPipe) -> None:
        super().__init__()
        self._replies = replies

    def emit(self, record: logging.LogRecord) -> None:
        self._replies.send(LogLine(record.name, record.levelno, self.format(record)[:LINE_MAX]))


if __name__ == "__main__":
    main()
