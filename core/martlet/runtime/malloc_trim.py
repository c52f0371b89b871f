"""Returns freed memory to the kernel. Works with glibc; does nothing with other allocators.

glibc maps blocks over `LARGE_BYTES` one by one and unmaps them when they are freed, and it shrinks the heap when its
end is free. Many blocks of medium size, such as incomplete requests of 100 KB, leave gaps between blocks in use. Gaps
stay resident until `malloc_trim`, which blocks every allocation for up to 1.5 ms per MiB on a busy machine. So it is
called only while the process is idle and enough memory was freed.
"""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import trio

__all__ = ["FreedMemory", "resident_bytes"]

# Parameters of mallopt(3). By default both grow with the largest block ever freed: after one frame of 16 MiB, 32 MiB
# would stay allocated.
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
# More than what scrypt takes to check a password (4 MiB and 1 KiB): else each check costs 1,025 page faults, a tenth of
# its time.
LARGE_BYTES: Final = 5 << 20
# Trim only if this much is free, and this much more is resident than after the last trim.
WORTH_BYTES: Final = 16 << 20
LOOK_S: Final = 5.0
IDLE_S: Final = 0.05  # idle means less CPU time than this between two checks


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 (mallinfo(3)), since glibc 2.33."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]  # type: ignore[mutable-override]

    @property
    def free_bytes(self) -> int:
        """Return the bytes in free blocks of the heap (fordblks)."""
        return int(self.numbers[8])


@final
class FreedMemory:
    """Trims the heap while the process is idle; one per process."""

    def __init__(self, used_s: Callable[[], float] = time.process_time) -> None:
        self._used_s = used_s
        self._library = ctypes.CDLL(None)
        self._trimmed_bytes = 0  # resident memory after the last trim
        self.trims = 0

    def start(self) -> None:
        """Make glibc unmap large blocks when they are freed."""
        mallopt = getattr(self._library, "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
            mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)
            self._trimmed_bytes = resident_bytes()

    async def run(self) -> None:
        """Trim the heap whenever the process is idle and enough memory is free, until cancelled."""
        mallinfo = getattr(self._library, "mallinfo2", None)
        if mallinfo is None:
            return
        mallinfo.restype = _Mallinfo
        while True:
            before = self._used_s()
            await trio.sleep(LOOK_S)
            idle = self._used_s() - before < IDLE_S
            resident = resident_bytes()
            if idle and resident - self._trimmed_bytes >= WORTH_BYTES and mallinfo().free_bytes >= WORTH_BYTES:
                await trio.to_thread.run_sync(self._library.malloc_trim, 0)
                self._trimmed_bytes = resident_bytes()
                self.trims += 1
            else:
                self._trimmed_bytes = min(self._trimmed_bytes, resident)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
