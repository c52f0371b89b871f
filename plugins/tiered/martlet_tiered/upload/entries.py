"""What a range of the log has: a few numbers for each record, which are sorted before any record is decoded."""

import datetime
from itertools import pairwise
from typing import Final, final

import numpy as np

from martlet.errors import CorruptRecord
from martlet.records.codec import decode_record
from martlet.records.layout import PREPARED, ROLLBACK, TRANSACTION_MASK
from martlet.runtime.steps import Steps
from martlet.store.disk.segments import Segments
from martlet.store.format.light import is_light
from martlet.store.format.notes import NOTES_TOPIC, read_note
from martlet.store.read.cold import may_be_cold
from martlet_columns.records import Integers, Records
from martlet_tiered.format.fields import store_times, topics_of
from martlet_tiered.names import Kind
from martlet_tiered.upload.log_blocks import LogBlock, read_block
from martlet_tiered.upload.messages import QueueRun

__all__ = ["INTERNAL", "KINDS", "Entries", "FoundEntries", "date_of", "find_entries", "sort_entries"]

ENTRY: Final = np.dtype(
    [("topic", "i4"), ("queue", "i4"), ("offset", "i8"), ("at", "u4"), ("size", "i4"), ("day", "i4"), ("kind", "i1")]
)
KINDS: Final[tuple[Kind, ...]] = ("topic", "retry", "dlq", "internal")
INTERNAL: Final = KINDS.index("internal")
# Bytes of a range, because its positions are 32-bit numbers.
RANGE_BYTES_MAX: Final = (1 << 32) - 1
DAY_MS: Final = 86_400_000
# Days since 1970 of the first and the last day of Python's calendar.
DAY_MIN: Final = datetime.date.min.toordinal() - datetime.date(1970, 1, 1).toordinal()
DAY_MAX: Final = datetime.date.max.toordinal() - datetime.date(1970, 1, 1).toordinal()
NO_TOPIC: Final = -1


def date_of(day: int) -> str:
    """Return the date of *day*, the number of days since 1970."""
    return (datetime.date(1970, 1, 1) + datetime.timedelta(days=day)).isoformat()


def _kind_of(topic: str) -> int:
    if not may_be_cold(topic):
        return INTERNAL
    prefixes = {"%RETRY%": "retry", "%DLQ%": "dlq"}
    return KINDS.index(next((kind for prefix, kind in prefixes.items() if topic.startswith(prefix)), "topic"))


@final
class FoundEntries:
    """The entries of the intact records from log position `begin` on, before `end`, in the order of the log.

    `topics` are numbered. `damaged` counts records and stretches of bytes that are no intact record, from position
    `damaged_at` on; `removed` bytes are not in the log any more. Deleted topics have no entries from before.
    """

    def __init__(self, begin: int) -> None:
        self.begin = self.end = begin
        self.topics: list[str] = []
        self.damaged = self.removed = 0
        self.damaged_at = -1
        self.rows: Integers = np.empty(0, ENTRY)
        self._parts: list[Integers] = []
        self._count = 0
        self._numbers: dict[bytes, int] = {}
        self._kinds: list[int] = []
        self._deleted: list[tuple[bytes, int]] = []

    def add(self, block: LogBlock, end: int, records_max: int) -> bool:
        """Add the records of *block* that end at or before *end*, if there are any; return whether these are all.

        At most *records_max* records are added in total.
        """
        records, base = block.records, block.position
        ends = base + records.starts + records.heads["size"]
        count = min(int(np.searchsorted(ends, end, "right")), records_max - self._count)
        if not self._count and len(records):
            count = max(count, 1)
        if count:
            self._add(records, block.is_intact[:count], base, count)
            self.end = int(ends[count - 1])
        if count < len(records):
            return False
        self.end = block.next
        self.removed += block.removed
        if block.lost:
            self._note_damage(block.next - block.lost, 1)
        return True

    def _add(self, records: Records, is_intact: Integers, base: int, count: int) -> None:
        heads, starts = records.heads[:count], records.starts[:count]
        part = np.empty(count, ENTRY)
        part["topic"] = self._topic_numbers(records)[:count]
        part["queue"], part["offset"], part["size"] = heads["queue"], heads["offset"], heads["size"]
        part["at"] = starts + (base - self.begin)
        part["day"] = np.clip(store_times(records)[:count] // DAY_MS, DAY_MIN, DAY_MAX)
        fine = is_intact & (part["topic"] != NO_TOPIC)
        states = heads["sys_flag"].astype(np.int32) & TRANSACTION_MASK
        kinds = np.append(np.array(self._kinds, np.int8), np.int8(INTERNAL))
        # Records of no queue: halves of transactions, and the store's notes.
        part["kind"] = np.where((states == PREPARED) | (states == ROLLBACK), INTERNAL, kinds[part["topic"]])
        for row in np.flatnonzero(~fine).tolist():
            self._note_damage(base + int(starts[row]), 1)
        self._note_deletions(records, part, fine)
        self._parts.append(part[fine])
        self._count += count

    def _topic_numbers(self, records: Records) -> Integers:
        topics = topics_of(records).dictionary_encode()
        numbers = [self._number(topic) for topic in topics.dictionary.to_pylist()]
        known = np.array([*numbers, NO_TOPIC], np.int32)
        found: Integers = known[np.asarray(topics.indices.fill_null(len(numbers)))]
        return found

    def _number(self, topic: bytes) -> int:
        number = self._numbers.get(topic)
        if number is None:
            try:
                name = topic.decode()
            except UnicodeDecodeError:
                number = NO_TOPIC
            else:
                number = len(self.topics)
                self.topics.append(name)
                self._kinds.append(_kind_of(name))
            self._numbers[topic] = number
        return number

    def _note_deletions(self, records: Records, part: Integers, fine: Integers) -> None:
        notes = self._numbers.get(NOTES_TOPIC.encode())
        if notes is None:
            return
        for row in np.flatnonzero(fine & (part["topic"] == notes)).tolist():
            try:
                note = read_note(decode_record(records.data, int(records.starts[row]), check_body=False).body)
            except CorruptRecord:
                continue
            if note.deleted:
                self._deleted.append((note.deleted.encode(), int(part["at"][row])))

    def _note_damage(self, position: int, count: int) -> None:
        self.damaged += count
        self.damaged_at = position if self.damaged_at < 0 else self.damaged_at

    def close(self) -> None:
        """Make `rows` of all entries that were added, without those of deleted topics and light queues."""
        self.rows = np.concatenate([self.rows, *self._parts])
        self._parts = []
        for topic, at in self._deleted:
            number = self._numbers.get(topic, NO_TOPIC)
            if number != NO_TOPIC:
                self.rows = self.rows[(self.rows["topic"] != number) | (self.rows["at"] > at)]
        light = [number for number, topic in enumerate(self.topics) if is_light(topic)]
        if light:
            self.rows = self.rows[~np.isin(self.rows["topic"], light)]


def find_entries(segments: Segments, begin: int, limit: int, bytes_max: int, records_max: int) -> Steps[FoundEntries]:
    """Return the entries of the log from *begin* on: up to *limit*, or to a record that ends *bytes_max* later.

    A record that is longer is a range of its own.

    Raises:
      LogUnreadable: the log has no data there.
    """
    found = FoundEntries(begin)
    end = min(limit, begin + min(bytes_max, RANGE_BYTES_MAX))
    while found.end < end:
        block = read_block(segments, found.end, limit)
        if block.next == block.position or not found.add(block, end, records_max):
            break
        yield
    found.close()
    return found


@final
class Entries:
    """Entries sorted by day, kind, topic (by bytes), queue and offset, and the `runs` of neighbours in one queue.

    `ranks` are numbers of the topics in this order.
    """

    __slots__ = ("begin", "end", "ranks", "rows", "runs")

    def __init__(self, begin: int, end: int, rows: Integers, ranks: Integers, runs: list[QueueRun]) -> None:
        self.begin = begin
        self.end = end
        self.rows = rows
        self.ranks = ranks
        self.runs = runs

    def keep(self, firsts: list[int]) -> "Entries":
        """Return the entries from offset ``firsts[n]`` on of run *n*, and one for each offset but for internal ones.

        Of several records with one offset the last in the log counts, as it does in the queue.
        """
        rows = self.rows
        lengths = [run.end - run.begin for run in self.runs]
        fine = rows["offset"] >= np.repeat(np.array(firsts, np.int64), lengths)
        same = np.ones(len(rows), bool)
        same[-1:] = False
        same[:-1] = rows["offset"][:-1] == rows["offset"][1:]
        same[[run.end - 1 for run in self.runs]] = False
        fine &= ~(same & (rows["kind"] != INTERNAL))
        kept = np.flatnonzero(fine)
        return self if len(kept) == len(rows) else Entries(self.begin, self.end, rows[kept], self.ranks[kept], [])

    def files(self) -> list[tuple[str, Kind, int, int]]:
        """Return date and kind of each file, and its entries: the first one and the end."""
        days, kinds = self.rows["day"], self.rows["kind"]
        changes = np.flatnonzero((np.diff(days) != 0) | (np.diff(kinds) != 0)) + 1
        bounds = [0, *changes.tolist(), len(self.rows)] if len(self.rows) else [0]
        return [(date_of(int(days[begin])), KINDS[int(kinds[begin])], begin, end) for begin, end in pairwise(bounds)]


def sort_entries(found: FoundEntries) -> Steps[Entries]:
    """Return *found* sorted; takes its rows away, to save memory."""
    rows, found.rows = found.rows, np.empty(0, ENTRY)
    order = sorted(range(len(found.topics)), key=lambda number: found.topics[number].encode())
    ranks_of = np.empty(len(order), np.int32)
    ranks_of[order] = np.arange(len(order), dtype=np.int32)
    ranks = ranks_of[rows["topic"]]
    yield
    # One key after the other, the last one first, so that no step is long.
    sorting = np.argsort(rows["at"], kind="stable")
    for key in (rows["offset"], rows["queue"], ranks, rows["kind"], rows["day"]):
        yield
        sorting = sorting[np.argsort(key[sorting], kind="stable")]
    yield
    rows, ranks = rows[sorting], ranks[sorting]
    yield
    changed = np.zeros(max(len(rows) - 1, 0), bool)
    for key in (rows["day"], rows["kind"], ranks, rows["queue"]):
        changed |= np.diff(key) != 0
    bounds = [0, *(np.flatnonzero(changed) + 1).tolist(), len(rows)] if len(rows) else [0]
    firsts = rows[bounds[:-1]]
    runs = [
        QueueRun(found.topics[topic], queue, KINDS[kind], begin, end)
        for topic, queue, kind, begin, end in zip(
            *(firsts[name].tolist() for name in ("topic", "queue", "kind")), bounds, bounds[1:], strict=False
        )
    ]
    return Entries(found.begin, found.end, rows, ranks, runs)
