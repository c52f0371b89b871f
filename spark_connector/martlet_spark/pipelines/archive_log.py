"""The files of an archive in the order in which they were added, if Spark's file sink has not written it.

A version of the archive is a batch, or a commit of a Delta table, and has some files. A place in the archive is a row
of a file of a version, so a read may have any number of rows.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from martlet_spark.errors import PipelineError
from martlet_spark.pipelines.batch_lists import BATCHES, BatchLists
from martlet_spark.pipelines.parts import WrittenFile
from martlet_spark.pipelines.storage import Location, is_remote
from martlet_spark.pipelines.unfinished import batch_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["ArchiveLog", "RowPlace", "Slice", "advance", "kind_of", "open_log", "slices", "tier_of"]

DELTA_LOG: Final = "_delta_log"
SPARK: Final = "spark"
TABLE: Final = "table"  # the folder of a cold tier that has its table


def kind_of(path: str) -> str:
    """Return the reader that the archive *path* needs: ``delta``, ``list``, or ``spark`` if Spark has written it.

    Raises:
      PipelineError: there is no archive.
    """
    if is_remote(path):
        return SPARK
    location = Location.of(path)
    filesystem, root = location.open()
    with location.plain_errors():
        names = (DELTA_LOG, BATCHES, "_spark_metadata", "_checkpoint")
        infos = filesystem.get_file_info([f"{root}/{name}" for name in names])
        found = {name for name, info in zip(names, infos, strict=True) if info.type is pafs.FileType.Directory}
        if DELTA_LOG in found:
            return "delta"
        if BATCHES in found:
            return "list"
        if found or (not location.is_s3 and _has_parquet(root)):
            return SPARK
    raise PipelineError(f"{path!r} is not an archive; give the path that `martlet pipeline archive --to` had")


def tier_of(path: str) -> str:
    """Return the URL of the cold tier at *path*, which may also be that of its table; empty if there is none."""
    if is_remote(path):
        return ""
    location = Location.of(path.rstrip("/").removesuffix(f"/{TABLE}"))
    filesystem, root = location.open()
    with location.plain_errors():
        [info] = filesystem.get_file_info([f"{root}/{TABLE}/{DELTA_LOG}"])
    return location.path if info.type is pafs.FileType.Directory else ""


def _has_parquet(root: str) -> bool:
    return any(name.endswith(".parquet") for _, _, names in os.walk(root) for name in names)


@final
@dataclass(frozen=True, slots=True)
class RowPlace:
    """The place of the next row to read: *row* of the file number *file* of *version*.

    *snapshot* is the version of a Delta table whose files were all read as one version; -1 before it is known.
    """

    version: int = -1
    file: int = 0
    row: int = 0
    snapshot: int = -1

    @classmethod
    def of(cls, value: dict[str, Any]) -> "RowPlace":
        return cls(**{name: int(number) for name, number in value.items()})


@final
@dataclass(frozen=True, slots=True)
class Slice:
    """Rows *first* up to *end* of a file."""

    file: WrittenFile
    first: int
    end: int


class ArchiveLog(Protocol):
    """The versions of an archive."""

    def last(self) -> int:
        """Return the number of the last version; -1 if there is none."""

    def begin(self, last: int) -> RowPlace:
        """Return the first place, if the archive now ends with the version *last*."""

    def files(self, version: int, snapshot: int) -> list[WrittenFile]:
        """Return the files of *version*."""


def open_log(location: Location, kind: str) -> ArchiveLog:
    """Return the log of the archive at *location*; *kind* is ``delta`` or ``list``."""
    return DeltaLog(location) if kind == "delta" else ListLog(location)


def advance(log: ArchiveLog, start: RowPlace, last: int, *, rows_max: int = 0, bytes_max: int = 0) -> RowPlace:
    """Return the place after the next batch, which ends with the version *last* at the latest.

    A limit of 0 is none. *bytes_max* counts the stored bytes of files; a batch has at least one file.
    """
    if last < 0:
        return start
    rows = size = 0
    place = start if start.version >= 0 else log.begin(last)
    while place.version <= last:
        files = log.files(place.version, place.snapshot)
        for number in range(place.file, len(files)):
            file, first_row = files[number], place.row if number == place.file else 0
            if size and bytes_max and size + file.bytes > bytes_max:
                return replace(place, file=number, row=0)
            size += file.bytes
            rows += file.rows - first_row
            if rows_max and rows > rows_max:
                return replace(place, file=number, row=file.rows - (rows - rows_max))
        place = RowPlace(place.version + 1, snapshot=place.snapshot)
    return place


def slices(log: ArchiveLog, start: RowPlace, end: RowPlace) -> Iterator[Slice]:
    """Yield the rows between two places, the second of which `advance` has returned."""
    place = start if start.version >= 0 else log.begin(end.snapshot)
    while (place.version, place.file, place.row) < (end.version, end.file, end.row):
        for number, file in enumerate(log.files(place.version, place.snapshot)):
            first = place.row if number == place.file else 0
            after = file.rows
            if place.version == end.version:
                after = file.rows if number < end.file else end.row if number == end.file else 0
            if number >= place.file and first < after:
                yield Slice(file, first, after)
        place = RowPlace(place.version + 1, snapshot=place.snapshot)


@final
class ListLog:
    """The batches of an archive of Parquet files."""

    def __init__(self, location: Location) -> None:
        self._lists = BatchLists(*location.open())

    def last(self) -> int:
        return self._lists.last()

    def begin(self, last: int) -> RowPlace:
        return RowPlace(0, snapshot=0)

    def files(self, version: int, snapshot: int) -> list[WrittenFile]:
        return self._lists.files(version)


@final
class DeltaLog:
    """A Delta table: all its files at the first look, and from then on the files that each commit adds."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._filesystem, self._root = location.open()
        self._known: dict[tuple[int, int], list[WrittenFile]] = {}  # of the last look

    def last(self) -> int:
        return self._table().version()

    def begin(self, last: int) -> RowPlace:
        return RowPlace(last, snapshot=last)

    def files(self, version: int, snapshot: int) -> list[WrittenFile]:
        if (version, snapshot) not in self._known:
            found = self._all(version) if version == snapshot else self._read_added_files(version)
            self._known = {(version, snapshot): sorted(found, key=_order)}
        return self._known[version, snapshot]

    def _table(self, version: int | None = None) -> "DeltaTable":
        from deltalake import DeltaTable

        return DeltaTable(self._location.path, version, storage_options=self._location.delta_options)

    def _all(self, version: int) -> list[WrittenFile]:
        from deltalake.exceptions import DeltaError

        try:
            actions = self._table(version).get_add_actions(flatten=True)
        except DeltaError as error:
            raise self._rewritten(f"version {version} is gone") from error
        return [
            WrittenFile(
                unquote(row["path"]),
                row["partition.topic"],
                str(row["partition.date"]),
                row["num_records"],
                row["size_bytes"],
            )
            for row in pa.table(actions).to_pylist()
        ]

    def _read_added_files(self, version: int) -> list[WrittenFile]:
        path = f"{self._root}/{DELTA_LOG}/{version:020}.json"
        if self._filesystem.get_file_info(path).type is pafs.FileType.NotFound:
            raise self._rewritten(f"the log of version {version} is gone")
        with self._filesystem.open_input_stream(path) as stream:
            actions = [json.loads(line) for line in stream.read().splitlines() if line.strip()]
        if any(each.get("remove", {}).get("dataChange") for each in actions):
            raise self._rewritten(f"version {version} has removed messages")
        added = [each["add"] for each in actions if each.get("add", {}).get("dataChange")]
        return [
            WrittenFile(
                unquote(each["path"]),
                each["partitionValues"]["topic"],
                each["partitionValues"]["date"],
                json.loads(each["stats"])["numRecords"],
                each["size"],
            )
            for each in added
        ]

    def _rewritten(self, why: str) -> PipelineError:
        text = f"Delta table {self._location.path!r} cannot be read on where the last run ended: {why}"
        return PipelineError(f"{text}; begin with a new checkpoint, and select with --from what was not replayed")


def _order(file: WrittenFile) -> tuple[int, str]:
    """Sort key of a file: files that the archive's tasks wrote are in the order of their batches."""
    return batch_of(os.path.basename(file.path)) or 0, file.path
