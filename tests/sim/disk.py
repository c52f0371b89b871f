"""The fake disk with time: what runs beside the event loop takes a while, in virtual time and without threads."""

import random
from collections.abc import Callable
from typing import Final, TypeVar, final

import trio

from martlet.store.disk.files import FILE_MODE, Bytes, Usage
from martlet.store.disk.syncers import OffLoopSyncer, Syncer
from martlet.testing.disk import FakeDisk

__all__ = ["SlowDisk"]

# 140 MB of zeros for RocketMQ, which nobody here reads: what is written to these files is dropped.
FOR_ROCKETMQ: Final = ("/timerwheel", "/timerlog/")

T = TypeVar("T")


@final
class SlowDisk:
    """A `martlet.store.Disk` over *disk*; ``delay_s`` is the longest that one piece of work in the background takes."""

    def __init__(self, disk: FakeDisk, chance: random.Random, delay_s: float, on_unlink: Callable[[str], None]) -> None:
        self.disk = disk
        self._on_unlink = on_unlink
        self.delay_s = delay_s
        self._chance = chance
        self._dropped: set[int] = set()  # open files whose content nobody reads

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Wait half of the time before the work and half after it: a cut may come in between."""
        await trio.sleep(self._chance.random() * self.delay_s)
        result = work()
        await trio.sleep(self._chance.random() * self.delay_s)
        return result

    def syncer(self) -> Syncer:
        return OffLoopSyncer(self)

    def open(self, path: str, *, create: bool = False, read_only: bool = False, mode: int = FILE_MODE) -> int:
        fd = self.disk.open(path, create=create, read_only=read_only, mode=mode)
        if any(part in path for part in FOR_ROCKETMQ):
            self._dropped.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._dropped.discard(fd)
        self.disk.close(fd)

    def size(self, fd: int) -> int:
        return self.disk.size(fd)

    def path_size(self, path: str) -> int:
        return self.disk.path_size(path)

    def stamp(self, path: str) -> tuple[int, ...] | None:
        return self.disk.stamp(path)

    def read(self, fd: int, size: int, position: int) -> bytes:
        return self.disk.read(fd, size, position)

    def read_now(self, fd: int, size: int, position: int) -> bytes | None:
        return self.disk.read(fd, size, position) if self._chance.random() < 0.5 else None

    def write(self, fd: int, data: Bytes, position: int) -> None:
        if fd not in self._dropped:
            self.disk.write(fd, data, position)

    def truncate(self, fd: int, size: int) -> None:
        if fd not in self._dropped:
            self.disk.truncate(fd, size)

    def sync(self, fd: int) -> None:
        self.disk.sync(fd)

    def sync_everything(self, path: str) -> None:
        self.disk.sync_everything(path)

    def next_data(self, fd: int, position: int) -> int:
        return self.disk.next_data(fd, position)

    def sync_directory(self, path: str) -> None:
        self.disk.sync_directory(path)

    def make_directory(self, path: str) -> None:
        self.disk.make_directory(path)

    def names(self, path: str) -> list[str]:
        return self.disk.names(path)

    def rename(self, source: str, target: str) -> None:
        self.disk.rename(source, target)

    def unlink(self, path: str) -> None:
        self._on_unlink(path)
        self.disk.unlink(path)

    def remove_directory(self, path: str) -> None:
        self.disk.remove_directory(path)

    def lock(self, path: str) -> int:
        return self.disk.lock(path)

    def usage(self, path: str) -> Usage:
        return self.disk.usage(path)
