"""What a file of the table has for the index: its spans, and the deletions of topics that it notes."""

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from martlet.records.layout import RecordView
from martlet.store.format.notes import NOTES_TOPIC, read_note
from martlet.store.read.cold import may_be_cold
from martlet_tiered.errors import ObjectDamaged, ObjectMissing
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, Span
from martlet_tiered.names import parse_data
from martlet_tiered.objects import Objects
from martlet_tiered.reading.database import IndexedFile
from martlet_tiered.reading.row_groups import ParquetObject, open_parquet, read_columns, read_records
from martlet_tiered.reading.spans import SPAN_COLUMNS, spans_of_columns

__all__ = ["TableFile", "exact_spans", "load_file", "spans_for_readers", "table_of"]


class TableFile(Struct, frozen=True):
    """A file of the table; it has records of log positions from `start` on, before `end`."""

    path: str
    bytes: int
    start: int
    end: int

    @property
    def is_internal(self) -> bool:
        """Whether its records are internal ones, among them notes that topics were deleted."""
        return "/kind=internal/" in self.path

    @classmethod
    def of(cls, file: DataFile) -> "TableFile":
        """Return what the index needs of *file*, which any program may have written."""
        name = parse_data(file.path)
        if name is not None:
            return cls(file.path, file.bytes, name.begin, name.end)
        low, high = file.minimum.get("_position"), file.maximum.get("_position")
        return cls(
            *(file.path, file.bytes),
            low if isinstance(low, int) else 0,
            high + 1 if isinstance(high, int) else 1 << 62,
        )


def table_of(files: Sequence[DataFile], known: Mapping[str, TableFile]) -> dict[str, TableFile]:
    """Return what the index needs of each of *files*, by path; those of *known* are not made again.

    Call it in a thread: 14,000 new files take 60 ms.
    """
    return {file.path: known.get(file.path) or TableFile.of(file) for file in files}


def spans_for_readers(spans: Sequence[Span]) -> list[Span]:
    """Return those of *spans* that consumers may read."""
    return [span for span in spans if may_be_cold(span.topic)]


def load_file(objects: Objects, file: TableFile, footer: FileFooter | None = None) -> IndexedFile:
    """Return what *file* has; *footer* is its footer, if that is known. A file that is damaged or lost has a fault.

    Raises:
      TierError: the store did not answer.
    """
    try:
        spans, parquet = (footer.spans, None) if footer is not None else _read_spans(objects, file)
        deleted: list[tuple[str, int]] = []
        for note in [span for span in spans if span.topic == NOTES_TOPIC]:
            parquet = parquet or open_parquet(objects, file.path, file.bytes)
            deleted += _deletions(objects, parquet, note)
    except (ObjectMissing, ObjectDamaged) as error:
        return IndexedFile(file.path, file.bytes, file.start, file.end, fault=str(error))
    return IndexedFile(file.path, file.bytes, file.start, file.end, spans_for_readers(spans), deleted)


def exact_spans(objects: Objects, path: str, size: int) -> list[Span]:
    """Return the spans of a file for readers, without holes.

    Raises:
      TierError: the file is damaged, or the store did not answer.
    """
    table = read_columns(objects, open_parquet(objects, path, size), SPAN_COLUMNS)
    return spans_for_readers(list(spans_of_columns(table, exact=True)))


def _read_spans(objects: Objects, file: TableFile) -> tuple[Sequence[Span], ParquetObject]:
    parquet = open_parquet(objects, file.path, file.bytes)
    if parquet.footer is not None:
        return parquet.footer.spans, parquet
    return list(spans_of_columns(read_columns(objects, parquet, SPAN_COLUMNS))), parquet


def _deletions(objects: Objects, parquet: ParquetObject, notes: Span) -> Iterator[tuple[str, int]]:
    """Yield the topics that *notes* say were deleted, each with the log position of the note."""
    for number in range(parquet.range_at(notes.row), parquet.range_at(notes.row + notes.count - 1) + 1):
        rows = parquet.ranges[number]
        records, _ = read_records(objects, parquet, rows)
        starts = records.starts[max(notes.row - rows.first, 0) : notes.row + notes.count - rows.first]
        for start in starts.tolist():
            record = RecordView(records.data, start)
            deleted = read_note(bytes(record.body)).deleted
            if deleted:
                yield deleted, record.position
