"""Makes a data directory from a table and a state: internal records, notes, tables. No message is copied.

The log of the new directory ends where the table does. It has the internal records that the state of sessions, groups,
timers and transactions is computed from, at their old positions, and at its end notes where each queue continues: the
messages before are in the tier alone. `FENCE_FILE` says up to which position that is so.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar, final

from msgspec import Struct, field

from martlet.message import Message
from martlet.records.layout import RecordView
from martlet.store.disk.files import Disk, atomic_write
from martlet.store.format.light import is_light
from martlet.store.format.notes import NOTES_TOPIC, QueueEnd, expiry_notes, offset_notes, read_note
from martlet.store.read.cold import RESTORED_FILE, may_be_cold
from martlet_tiered.errors import ObjectDamaged, ObjectMissing
from martlet_tiered.files import DataFile
from martlet_tiered.objects import Objects
from martlet_tiered.reading.blocks import load_block
from martlet_tiered.reading.row_groups import open_parquet
from martlet_tiered.reading.table_files import TableFile, load_file
from martlet_tiered.restore.broker_state import BrokerState
from martlet_tiered.restore.sparse_log import HOST, SparseLog

__all__ = ["Restored", "make_directory", "restored_position"]

T = TypeVar("T")

FILES_AT_ONCE: Final = 8
NOTE_BYTES_MAX: Final = 256 << 10
Report = Callable[[int, int], None]


class Restored(Struct):
    """What was restored: the log from `start` to `end`, where the table ends; and what could not be read."""

    start: int
    end: int
    records: int = 0
    queues: int = 0
    problems: list[str] = field(default_factory=list)


def make_directory(
    folder: str, disk: Disk, objects: Objects, files: Sequence[DataFile], state: BrokerState, end: int, report: Report
) -> Restored:
    """Make the data directory *folder* from *files*, all of a table that ends at *end*, and *state*, which is not
    newer. It is not a store that was stopped in order yet.

    Args:
      report: called with files that were read, and those to read.

    Raises:
      TierError: the store cannot be read, or its records do not fit into a log.
      OSError: the disk is full or fails.
    """
    making = _Making(folder, disk, objects, state, end)
    making.read(files, report)
    making.write_tables()
    making.write_notes()
    return making.done


@final
class _Making:
    def __init__(self, folder: str, disk: Disk, objects: Objects, state: BrokerState, end: int) -> None:
        self.done = Restored(min(state.log_start, end), end)
        self._folder = folder
        self._disk = disk
        self._objects = objects
        self._state = state
        start = self.done.start
        self._log = SparseLog(disk, f"{folder}/commitlog", start, end, state.segment_bytes)
        self._restored: set[tuple[str, int]] = set()  # queues with records in the log
        self._deleted: dict[str, int] = {}  # topics, with the position of the note, if it is newer than the state
        self._ends: dict[tuple[str, int], tuple[int, int]] = {}  # offset and position after the last newer message

    # ---- reading

    def read(self, files: Sequence[DataFile], report: Report) -> None:
        """Read the internal records of the log's range, and where queues are after the state."""
        tables = sorted(map(TableFile.of, files), key=lambda file: (file.start, file.path))
        internal = [file for file in tables if file.is_internal and file.end > self.done.start]
        newer = [file for file in tables if not file.is_internal and file.end > self._state.position]
        total = len(internal) + len(newer)
        with ThreadPoolExecutor(FILES_AT_ONCE) as threads:
            number = 0
            for _, records in _each(threads, internal, self._records_of):
                for record in records:
                    self._add(record)
                report(number := number + 1, total)
            for file, found in _each(threads, newer, partial(load_file, self._objects)):
                if found.fault:
                    self.done.problems.append(f"{file.path}: {found.fault}")
                for span in found.spans:
                    key, known = (span.topic, span.queue), self._ends.get((span.topic, span.queue), (0, -1))
                    if span.max_position > known[1]:  # offsets may have begun again
                        self._ends[key] = span.last + 1, span.max_position
                report(number := number + 1, total)

    def _records_of(self, file: TableFile) -> list[bytes]:
        """Return the intact records of *file* that are in the log's range."""
        found: list[bytes] = []
        try:
            parquet = open_parquet(self._objects, file.path, file.bytes)
        except (ObjectDamaged, ObjectMissing) as error:
            self.done.problems.append(f"{file.path}: {error}")
            return found
        for rows in parquet.ranges:
            try:
                block = load_block(self._objects, parquet, rows)
            except (ObjectDamaged, ObjectMissing) as error:
                self.done.problems.append(f"{file.path}: {error}")
                continue
            if block.damaged:
                self.done.problems.append(f"{file.path}: {block.damaged} records are damaged")
            found += [block.record(at) for at in range(len(block.offsets)) if block.intact[at]]
        start, end = self.done.start, self.done.end
        return [record for record in found if start <= RecordView(record).position < end]

    def _add(self, record: bytes) -> None:
        view = RecordView(record)
        self._log.add(record)
        self.done.records += 1
        self._restored.add((view.topic, view.queue_id))
        if view.topic == NOTES_TOPIC and view.position >= self._state.position:
            deleted = read_note(bytes(view.body)).deleted
            if deleted:
                self._deleted[deleted] = max(self._deleted.get(deleted, -1), view.position)

    # ---- writing

    def write_tables(self) -> None:
        """Write the tables of the broker, and up to where messages are in the tier alone."""
        self._disk.make_directory(f"{self._folder}/config")
        for path, data in self._state.files.items():
            atomic_write(self._disk, f"{self._folder}/{path}", data)
        about = json.dumps({"position": self.done.end}).encode()
        atomic_write(self._disk, f"{self._folder}/{RESTORED_FILE}", about)

    def write_notes(self) -> None:
        """Complete the log with notes where queues continue."""
        ends, expired = self._continuations()
        self.done.queues = len(ends)
        now_ms, size = self._state.time_ms, min(NOTE_BYTES_MAX, self._state.segment_bytes // 4)
        notes: list[Message] = [*offset_notes(ends, size, HOST, now_ms), *expiry_notes(expired, size, HOST, now_ms)]
        self._log.finish(notes, now_ms)
        self._disk.sync_everything(self._folder)

    def _continuations(self) -> tuple[list[QueueEnd], list[QueueEnd]]:
        """Return the next offset of each queue that the log does not show, and the offsets before which messages have
        expired.
        """
        nexts: dict[tuple[str, int], int] = {}
        expired: list[QueueEnd] = []
        for place in self._state.queues:
            key = place.topic, place.queue
            is_shown = key in self._restored and not may_be_cold(place.topic)
            if is_light(place.topic) or is_shown or place.topic in self._deleted:
                continue
            nexts[key] = place.next
            if place.expired_to:
                expired.append((*key, place.expired_to))
        for key, (following, position) in self._ends.items():
            if position > self._deleted.get(key[0], -1):
                nexts[key] = max(nexts.get(key, 0), following)
        return [(*key, following) for key, following in sorted(nexts.items())], expired


def _each(
    threads: ThreadPoolExecutor, files: Sequence[TableFile], work: Callable[[TableFile], T]
) -> Iterator[tuple[TableFile, T]]:
    """Yield each of *files* with the result of *work*; some are worked on at the same time."""
    step = 2 * FILES_AT_ONCE
    for begin in range(0, len(files), step):
        part = files[begin : begin + step]
        yield from zip(part, threads.map(work, part), strict=True)


def restored_position(data: bytes) -> int:
    """Return the log position before which a restored directory has no messages, from its `RESTORED_FILE`; else 0."""
    try:
        found = json.loads(data)["position"]
    except (ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) else 0
