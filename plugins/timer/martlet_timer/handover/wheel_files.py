"""Writes the pending timers as RocketMQ's files: ``timerwheel``, ``timerlog`` and ``config/timercheck``.

RocketMQ delivers from these files, not from its timer topic: the wheel has a slot for each second of two weeks with the
position of the slot's last unit in the log, and each unit has the positions of the previous unit and of the record.
Timers more than two days ahead are in an earlier slot, with a mark that makes RocketMQ append them again.

RocketMQ continues after the record of the last unit. So the last unit is for the last record of the topic, as a recall
without a key, which RocketMQ ignores. (RocketMQ TimerMessageStore, TimerWheel, TimerLog, TimerCheckpoint.)
"""

from collections.abc import Iterable
from contextlib import suppress
from struct import Struct
from typing import Final

from martlet.runtime.steps import Budget, Steps
from martlet.store.disk.files import Disk
from martlet_timer.timers.records import PRECISION_MS

__all__ = ["CHECK", "Unit", "write_wheel"]

SLOTS: Final = 2 * 7 * 86_400
# time / 1000, first position, last position, number of timers, unused
SLOT: Final = Struct(">qqqii")
# size, position of the previous unit, kind, time of writing, delay, position and size of the record, hash of its topic,
# unused
UNIT: Final = Struct(">iqiqiqiiq")
BLANK: Final = Struct(">iqi")
BLANK_MAGIC: Final = (0xBBCCDDEE ^ (1_880_681_586 + 8)) - (1 << 32)
LOG_BYTES: Final = 100 << 20  # mappedFileSizeTimerLog
# A file of another size is damaged, unless its size is a multiple of this: then it is RocketMQ's setting.
LOG_STEP_BYTES: Final = 1024
# lastReadTimeMs lastTimerLogFlushPos lastTimerQueueOffset masterTimerQueueOffset; the data version: state, ms, counter
CHECK: Final = Struct(">qqqqqqq")
USUAL: Final = 1
ROLLED: Final = 2
RECALL: Final = 4
# timerRollWindowSlot
WINDOW_MS: Final = 2 * 86_400_000
# RocketMQ looks back 7 days.
LATE_MAX_MS: Final = 6 * 86_400_000
WRITTEN_BYTES: Final = 1 << 20

# Due time of a timer, and position and size of its record.
Unit = tuple[int, int, int]


def _slot_of(due_ms: int, now_ms: int) -> tuple[int, int]:
    """Return the time of the slot for a timer, and its kind."""
    slot_ms = max((due_ms - 1) // PRECISION_MS * PRECISION_MS, now_ms - LATE_MAX_MS)
    ahead_ms = slot_ms - now_ms - WINDOW_MS
    if ahead_ms < 0:
        return slot_ms, USUAL
    step_ms = WINDOW_MS // 2 if ahead_ms < WINDOW_MS // 3 else WINDOW_MS
    return now_ms + step_ms, USUAL | ROLLED


class _Log:
    """The files of the log, written from the beginning."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._parts: list[bytes] = []
        self._bytes = 0
        self._written = 0
        self.position = 0
        disk.make_directory(directory)
        self._file_bytes = _log_bytes(disk, directory)
        for name in disk.names(directory):
            disk.unlink(f"{directory}/{name}")

    def append(self, unit: bytes) -> int:
        """Append *unit* and return its position."""
        left = self._file_bytes - self.position % self._file_bytes
        if len(unit) + BLANK.size > left:
            self._put(BLANK.pack(left, 0, BLANK_MAGIC))
            self.flush()
            self.position = self._written = self.position + left - BLANK.size
        position = self.position
        self._put(unit)
        if self._bytes >= WRITTEN_BYTES:
            self.flush()
        return position

    def _put(self, data: bytes) -> None:
        self._parts.append(data)
        self._bytes += len(data)
        self.position += len(data)

    def flush(self) -> None:
        """Write the appended units, which are all in one file."""
        if not self._parts:
            return
        start, at = divmod(self._written, self._file_bytes)
        path = f"{self._directory}/{start * self._file_bytes:020d}"
        fd = self._disk.open(path, create=not at)
        try:
            if not at:
                self._disk.truncate(fd, self._file_bytes)
            self._disk.write(fd, b"".join(self._parts), at)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
        self._parts, self._bytes, self._written = [], 0, self.position


def _log_bytes(disk: Disk, directory: str) -> int:
    """Return the size of the log's files: that of existing files, as RocketMQ compares it with its setting.

    A file without room for two units and a blank one does not count.
    """
    sizes = {disk.path_size(f"{directory}/{name}") for name in disk.names(directory)}
    size = sizes.pop() if len(sizes) == 1 else 0
    return size if size >= 2 * UNIT.size + BLANK.size and not size % LOG_STEP_BYTES else LOG_BYTES


def write_wheel(
    disk: Disk, directory: str, units: Iterable[Unit], last_record: tuple[int, int], queue_end: int, now_ms: int
) -> Steps[bytes]:
    """Write wheel and log of *units* into the data directory, in slices; return the content of the checkpoint.

    Args:
      last_record: position and size of the last record of the timer topic, which has *queue_end* messages.
    """
    write_ms = now_ms // PRECISION_MS * PRECISION_MS
    read_ms = write_ms
    slots: dict[int, tuple[int, int, int]] = {}  # first and last position, number
    log = _Log(disk, f"{directory}/timerlog")
    budget = Budget()
    for due_ms, position, size in units:
        slot_ms, kind = _slot_of(due_ms, write_ms)
        read_ms = min(read_ms, slot_ms)
        first_position, previous, count = slots.get(slot_ms, (-1, -1, 0))
        unit = UNIT.pack(UNIT.size, previous, kind, write_ms, slot_ms - write_ms, position, size, 0, 0)
        unit_position = log.append(unit)
        slots[slot_ms] = (unit_position if first_position < 0 else first_position), unit_position, count + 1
        if budget.is_over():
            yield
    first_position, previous, count = slots.get(read_ms, (-1, -1, 0))
    kind = USUAL | RECALL
    unit_position = log.append(UNIT.pack(UNIT.size, previous, kind, write_ms, read_ms - write_ms, *last_record, 0, 0))
    slots[read_ms] = (unit_position if first_position < 0 else first_position), unit_position, count
    log.flush()
    yield from _write_slots(disk, f"{directory}/timerwheel", slots)
    return CHECK.pack(read_ms, log.position, queue_end, queue_end, 0, now_ms, 1)


def _write_slots(disk: Disk, path: str, slots: dict[int, tuple[int, int, int]]) -> Steps[None]:
    budget = Budget()
    with suppress(FileNotFoundError):
        disk.unlink(path)
    fd = disk.open(path, create=True)
    try:
        disk.truncate(fd, SLOTS * SLOT.size)
        for slot_ms, (first, last, count) in sorted(slots.items()):
            number = slot_ms // PRECISION_MS
            disk.write(fd, SLOT.pack(number, first, last, count, 0), number % SLOTS * SLOT.size)
            if budget.is_over():
                yield
        disk.sync(fd)
    finally:
        disk.close(fd)
