"""What a table of the cold tier has of some topics, at one version: which offsets are in which rows of which file.

The footers of the files say it. Files that cannot have the topics, by the statistics in the table's log, are not
opened. Messages of topics that were deleted, and those that have expired, may still be in files: notes among the
broker's internal records say so.
"""

import logging
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, final

from martlet.records.layout import RecordView
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.read.losses import lose
from martlet_spark.read.offsets import words
from martlet_spark.read.planner import ColdRows, Piece, Range
from martlet_spark.read.tier_place import TierPlace
from martlet_tiered.errors import ObjectDamaged, ObjectMissing

if TYPE_CHECKING:
    from martlet.store.format.notes import Note
    from martlet_tiered.files import DataFile
    from martlet_tiered.format.footer import Span
    from martlet_tiered.objects import Objects
    from martlet_tiered.opened_table import OpenedTable
    from martlet_tiered.reading.row_groups import ParquetObject

__all__ = ["History", "TopicSet", "Window", "lose_doubtful", "read_history"]

log = logging.getLogger("martlet.spark")

REQUESTS_MAX: Final = 16
# A file that is gone was replaced in the meantime; then the newer table is read.
TRIES: Final = 3
NOTES_TOPIC: Final = "martlet.store"  # of `martlet.store.format.notes`, whose package imports the event loop
TOPIC, INTERNAL = "topic", "internal"
NEVER: Final = 1 << 62  # after every position of the log
KINDS: Final = {"%RETRY%": "retry", "%DLQ%": "dlq"}


@final
class TopicSet:
    """The topics to look for: those with *names*, or those that match *pattern*, without brokers' own ones."""

    def __init__(self, names: Collection[str] = (), pattern: str = "") -> None:
        self._names = frozenset(names)
        self._matches = re.compile(pattern).fullmatch if pattern else None
        self._kinds = {TOPIC} if pattern else {_kind(name) for name in names}

    def __contains__(self, topic: str) -> bool:
        return topic in self._names if self._matches is None else self._matches(topic) is not None

    def may_be_in(self, file: "DataFile") -> bool:
        """Whether *file* may have messages of these topics, by its statistics."""
        if file.kind not in self._kinds:
            return False
        return self._matches is not None or any(_may_have_topic(file, name) for name in self._names)


@final
@dataclass(frozen=True, slots=True)
class Window:
    """The times of storing, in ms, from *begin_ms* on and before *end_ms*; None is no bound."""

    begin_ms: int | None = None
    end_ms: int | None = None

    def files(self, files: "Sequence[DataFile]") -> "list[DataFile]":
        """Return *files* in order of the log, without the first and the last ones that have only other times.

        The clock may have gone back, so that files in between have other times too.
        """
        found = sorted(files, key=_begin)
        first = next((index for index, file in enumerate(found) if not self._is_after(file)), len(found))
        del found[:first]
        while found and self._is_before(found[-1]):
            del found[-1]
        return found

    def _is_after(self, file: "DataFile") -> bool:
        last = file.maximum.get("store_ts")
        if self.begin_ms is None or not isinstance(last, datetime):
            return False
        return last.timestamp() * 1000 + 1 < self.begin_ms  # Delta's statistics have milliseconds

    def _is_before(self, file: "DataFile") -> bool:
        first = file.minimum.get("store_ts")
        return self.end_ms is not None and isinstance(first, datetime) and first.timestamp() * 1000 >= self.end_ms


@final
@dataclass(frozen=True, slots=True)
class _File:
    """A data file that was opened: *groups* has the first row of each row group, *sizes* the bytes of its messages."""

    path: str
    bytes: int
    begin: int  # log position
    groups: Sequence[int] = ()
    sizes: Sequence[int] = ()
    spans: "Sequence[Span]" = ()
    notes: Sequence[tuple[int, "Note"]] = ()
    fault: str = ""


@final
@dataclass(frozen=True, slots=True)
class _Run:
    """The messages of a queue from offset *first* on, before *end*, none missing, in successive rows of *file*."""

    first: int
    end: int
    row: int
    file: _File
    positions: tuple[int, int]
    times_ms: tuple[int, int]


@final
@dataclass(frozen=True, slots=True)
class History:
    """The messages of some topics in the table of *broker* at *place*.

    *is_pruned* says that files were left out because of their time, and *faults* name files of messages that are lost
    or damaged. *doubts* say why deleted or expired messages may be among the others, or others be missing: notes that
    are lost or damaged, and offsets that the table has twice.
    """

    place: TierPlace
    broker: str
    version: int
    is_pruned: bool
    faults: Sequence[str]
    doubts: Sequence[str]
    _runs: Mapping[MessageQueue, Sequence[_Run]]
    _deleted: Mapping[str, int]

    def bounds(self) -> dict[MessageQueue, tuple[int, int]]:
        """Return the first offset and the end of each queue that has messages; some in between may be missing."""
        return {queue: (runs[0].first, runs[-1].end) for queue, runs in self._runs.items()}

    def seam(self, queue: MessageQueue, start: int, end: int) -> int:
        """Return the offset up to which the table has every message of *queue* from *start* on; *end* at most."""
        at = start
        for run in self._runs.get(queue, ()):
            if run.first > at:
                break
            at = max(at, run.end)
        return min(at, end)

    def is_created_again(self, piece: Piece, last_position: int) -> bool:
        """Whether the topic of *piece* was deleted after its messages were stored, the last one at *last_position* of
        the log; then messages with the same offsets are others.
        """
        queue, (start, end) = piece
        runs = [run for run in self._runs.get(queue, ()) if run.first < end and run.end > start]
        return self._deleted.get(queue.topic, -1) > last_position or any(
            run.positions[0] > last_position for run in runs
        )

    def ranges(self, wanted: Iterable[Piece]) -> list[Range]:
        """Return the rows with the messages of each piece in *wanted*, one range for each row group and piece.

        The ranges of a queue ascend.
        """
        found: list[tuple[int, str, Range]] = []
        for queue, (start, end) in wanted:
            for run in self._runs.get(queue, ()):
                if run.first < end and run.end > start:
                    found += [(run.file.begin, run.file.path, each) for each in self._cut(queue, run, start, end)]
        found.sort(key=lambda each: (each[0], each[1], _row(each[2])))
        ranges = [each for *_, each in found]
        return ranges if _ascend(ranges) else sorted(ranges, key=lambda each: (each.queue, each.start))

    def times(self, queue: MessageQueue) -> list[tuple[int, int, int]]:
        """Return first offset, end and greatest time of storing of each run of *queue*, in order of their offsets."""
        return [(run.first, run.end, run.times_ms[1]) for run in self._runs.get(queue, ())]

    def _cut(self, queue: MessageQueue, run: _Run, start: int, end: int) -> Iterator[Range]:
        """Yield the part of *run* from *start* up to *end*, row group by row group."""
        file = run.file
        first, last = max(start, run.first), min(end, run.end)
        while first < last:
            row = run.row + first - run.first
            group = bisect_right(file.groups, row) - 1
            after = file.groups[group + 1] if group + 1 < len(file.groups) else 1 << 62
            count = min(last - first, after - row)
            rows = ColdRows(self.place, file.path, file.bytes, group, row - file.groups[group], run.positions[1])
            yield Range(queue, first, first + count, file.sizes[group], rows)
            first += count


def read_history(
    place: TierPlace,
    topics: TopicSet,
    window: Window | None = None,
    known: History | None = None,
    since: int = NEVER,
) -> History:
    """Return what the newest version of the table at *place* has of *topics*; messages outside of *window* may lack.

    If *known*, an earlier answer, is of this version, it is returned. Deletions after the log position *since* are
    known, even if the table has no message before them any more.

    Raises:
      TierError: the store does not answer, or the table cannot be read.
    """
    window = window or Window()
    for _ in range(TRIES - 1):
        try:
            return _read(place, topics, window, known, since, is_last=False)
        except ObjectMissing as error:
            log.info("a file of the cold tier was replaced in the meantime, reading its table again: %s", error)
    return _read(place, topics, window, known, since, is_last=True)


def _read(
    place: TierPlace, topics: TopicSet, window: Window, known: History | None, since: int, *, is_last: bool
) -> History:
    table = place.open()
    if known is not None and known.version == table.version:
        return known
    chosen = [file for file in table.files if topics.may_be_in(file)]
    timely = window.files(chosen)
    files = list(table.each(timely, lambda file: _load(table, file, topics, is_last), REQUESTS_MAX))
    begin = min([since, *(file.begin for file in files)])
    noted = [file for file in table.files if file.kind == INTERNAL and _may_have_topic(file, NOTES_TOPIC)]
    noted = [file for file in noted if file.name is None or file.name.end > begin]
    notes = list(table.each(noted, lambda file: _load(table, file, topics, is_last), REQUESTS_MAX))
    deleted, expired = _facts(sorted((note for file in notes for note in file.notes), key=lambda pair: pair[0]))
    runs, doubts = _runs(table.broker, files, deleted, expired)
    return History(
        *(place, table.broker, table.version, len(timely) < len(chosen)),
        [file.fault for file in files if file.fault],
        [*(f"notes of deleted and expired messages are lost ({file.fault})" for file in notes if file.fault), *doubts],
        runs,
        deleted,
    )


def lose_doubtful(history: History, *, fails: bool) -> None:
    """Fail, or warn, if no broker tells which messages of *history* were deleted or have expired, and it does not.

    Raises:
      DataLost: it does not know, and the query *fails* on loss.
    """
    for doubt in history.doubts:
        lose(f"the cold tier at {history.place.url!r} is damaged: {doubt}", fails=fails)


def _facts(notes: Sequence[tuple[int, "Note"]]) -> tuple[dict[str, int], dict[tuple[str, int], int]]:
    """Return the log position at which topics were deleted last, and the first offsets of queues that expired since."""
    deleted: dict[str, int] = {}
    expired: dict[tuple[str, int], int] = {}
    for position, note in notes:
        if note.deleted:
            deleted[note.deleted] = position
            expired = {key: first for key, first in expired.items() if key[0] != note.deleted}
        expired.update({(topic, queue): first for topic, queue, first in note.expired})
    return deleted, expired


def _runs(
    broker: str, files: Sequence[_File], deleted: Mapping[str, int], expired: Mapping[tuple[str, int], int]
) -> tuple[dict[MessageQueue, list[_Run]], list[str]]:
    """Return the runs of each queue in order, and which queues have offsets twice."""
    found: dict[MessageQueue, list[_Run]] = {}
    for file in files:
        for span in file.spans:
            if span.max_position >= deleted.get(span.topic, -1):
                positions, times_ms = (span.min_position, span.max_position), (span.min_ms, span.max_ms)
                run = _Run(span.first, span.last + 1, span.row, file, positions, times_ms)
                found.setdefault(MessageQueue(span.topic, broker, span.queue), []).append(run)
    kept: dict[MessageQueue, list[_Run]] = {}
    doubts: list[str] = []
    for queue, runs in found.items():
        newest, doubt = _newest(queue, runs)
        doubts += [doubt] if doubt else []
        first = expired.get((queue.topic, queue.queue_id), 0)
        alive = [_from(run, first) for run in newest if run.end > first]
        if alive:
            kept[queue] = alive
    return kept, doubts


def _newest(queue: MessageQueue, runs: Sequence[_Run]) -> tuple[list[_Run], str]:
    """Return *runs* of *queue* in order without those before an overlap, and a text about it, or an empty one.

    Offsets come again only after the topic was deleted, and runs from before a deletion are not in *runs*.
    """
    kept: list[_Run] = []
    for run in sorted(runs, key=lambda run: run.positions, reverse=True):
        if kept and run.end > kept[-1].first:
            text = f"messages {kept[-1].first} to {run.end - 1} of {words(queue)} are there twice, without a deletion"
            return kept[::-1], f"{text} in between; those before log position {kept[-1].positions[0]} are left out"
        kept.append(run)
    return kept[::-1], ""


def _from(run: _Run, first: int) -> _Run:
    """Return the messages of *run* from offset *first* on."""
    return run if run.first >= first else replace(run, first=first, row=run.row + first - run.first)


def _load(table: "OpenedTable", file: "DataFile", topics: TopicSet, is_last: bool) -> _File:
    """Open *file*. If it is lost or damaged, it has a fault, as its messages are lost.

    Raises:
      ObjectMissing: it is gone, and the table may have a newer version, as it is not the *is_last* try.
    """
    from martlet_tiered.names import DATA_FOLDER
    from martlet_tiered.reading.row_groups import open_parquet

    try:
        parquet = open_parquet(table.objects, file.path, file.bytes)
        notes: list[tuple[int, Note]] = []
        spans: list[Span] = []
        for span in _spans(table.objects, parquet, topics):
            if span.topic in topics:
                spans.append(span)
            elif span.topic == NOTES_TOPIC:
                notes += _notes(table.objects, parquet, span)
    except (ObjectMissing, ObjectDamaged) as error:
        if isinstance(error, ObjectMissing) and not is_last:
            raise
        return _File(file.path, file.bytes, 0, fault=f"{DATA_FOLDER}/{file.path}: {error}")
    metadata = parquet.metadata
    counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    firsts = [0, *accumulate(counts)][:-1]
    sizes = [max(size // max(count, 1), 1) for size, count in zip(_sizes(parquet), counts, strict=True)]
    return _File(file.path, file.bytes, _begin(file), firsts, sizes, spans, notes)


def _begin(file: "DataFile") -> int:
    """Return the log position at which *file* begins."""
    begin = file.minimum.get("_position") if file.name is None else file.name.begin
    return begin if isinstance(begin, int) else 0


def _sizes(parquet: "ParquetObject") -> list[int]:
    """Return the bytes of the messages of each row group."""
    if parquet.footer is not None:
        return [group.bytes for group in parquet.footer.groups]
    metadata = parquet.metadata
    return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]


def _spans(objects: "Objects", parquet: "ParquetObject", topics: TopicSet) -> "Sequence[Span]":
    """Return the spans of a file; those of *topics* have no hole."""
    from martlet_tiered.reading.row_groups import read_columns
    from martlet_tiered.reading.spans import SPAN_COLUMNS, spans_of_columns

    footer = parquet.footer
    if footer is not None and all(
        span.last - span.first + 1 == span.count for span in footer.spans if span.topic in topics
    ):
        return footer.spans
    return list(spans_of_columns(read_columns(objects, parquet, SPAN_COLUMNS), exact=True))


def _notes(objects: "Objects", parquet: "ParquetObject", span: "Span") -> Iterator[tuple[int, "Note"]]:
    """Yield each note in *span* with its log position."""
    from martlet.store.format.notes import read_note
    from martlet_tiered.reading.row_groups import read_records

    end = span.row + span.count
    for number in range(parquet.range_at(span.row), parquet.range_at(end - 1) + 1):
        rows = parquet.ranges[number]
        records, _ = read_records(objects, parquet, rows)
        for start in records.starts[max(span.row - rows.first, 0) : end - rows.first].tolist():
            record = RecordView(records.data, start)
            yield record.position, read_note(bytes(record.body))


def _kind(topic: str) -> str:
    return next((kind for prefix, kind in KINDS.items() if topic.startswith(prefix)), TOPIC)


def _may_have_topic(file: "DataFile", topic: str) -> bool:
    first, last = file.minimum.get("topic"), file.maximum.get("topic")
    return not (isinstance(first, str) and topic < first) and not (isinstance(last, str) and topic > last)


def _row(each: Range) -> tuple[int, int]:
    assert each.rows is not None
    return each.rows.group, each.rows.row


def _ascend(ranges: Sequence[Range]) -> bool:
    ends: dict[Any, int] = {}
    for each in ranges:
        if each.start < ends.get(each.queue, 0):
            return False
        ends[each.queue] = each.end
    return True
