"""A disk that tells on whoever keeps the event loop waiting for it."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from martlet.testing.disk import FakeDisk

__all__ = ["ColdDisk", "cold_disk"]

T = TypeVar("T")


class ColdDisk:
    """A disk with nothing in the page cache while ``is_cold``; counts the reads that keep the event loop waiting."""

    def __init__(self) -> None:
        self.disk = FakeDisk()
        self._is_off_loop = False
        self.is_cold = True
        self.on_loop = 0
        self.off = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.disk, name)

    def read_now(self, fd: int, size: int, position: int) -> bytes | None:
        return None if self.is_cold else self.disk.read(fd, size, position)

    def read(self, fd: int, size: int, position: int) -> bytes:
        self.on_loop += not self._is_off_loop
        return self.disk.read(fd, size, position)

    async def off_loop(self, work: Callable[[], T]) -> T:
        self._is_off_loop = True
        self.off += 1
        try:
            return work()
        finally:
            self._is_off_loop = False


def cold_disk() -> tuple[ColdDisk, FakeDisk]:
    """Return a disk twice: to ask how it was read, and for those who take a `FakeDisk`."""
    disk = ColdDisk()
    return disk, cast(FakeDisk, disk)
