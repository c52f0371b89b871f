"""Commits that make a batch's files part of an archive exactly once: in a Delta table's log, or as a list per batch.

Both record the streaming query and the number of its last batch. A batch that Spark runs again after a crash, although
it was committed, changes nothing. An archive takes batches of one query only: a new query would begin at the first
message again.
"""

import json
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, final
from urllib.parse import unquote

import pyarrow as pa

from martlet_spark.errors import PipelineError
from martlet_spark.pipelines.batch_lists import BatchLists
from martlet_spark.pipelines.owner import foreign
from martlet_spark.pipelines.parts import PARTITIONS, WrittenFile
from martlet_spark.pipelines.storage import Location
from martlet_spark.pipelines.unfinished import batch_of, forget_notes, remove_unfinished

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from deltalake.transaction import RemoveAction

__all__ = ["Commits", "DeltaCommits", "ListCommits", "open_commits"]


class Commits(Protocol):
    """The committed batches of an archive."""

    def has(self, query: str, batch: int) -> bool:
        """Whether *batch* of *query* is committed. Raises `PipelineError` if the batches are another query's."""

    def clean(self, query: str) -> None:
        """Remove files that were not committed; no other run of *query* may be active."""

    def commit(self, query: str, batch: int, files: Sequence[WrittenFile]) -> None:
        """Make *files* part of the archive."""

    def drop(self, files: Sequence[WrittenFile]) -> None:
        """Remove *files* of a batch that was committed before with other files."""

    def files(self) -> list[str]:
        """Return the paths of all files of the archive, relative to it."""


def open_commits(location: Location, kind: str) -> Commits:
    """Return the commits of the archive at *location*; *kind* is ``parquet`` or ``delta``."""
    return DeltaCommits(location) if kind == "delta" else ListCommits(location)


def _drop(location: Location, files: Sequence[WrittenFile], listed: Collection[str]) -> None:
    """Remove the files of *files* that are not *listed*."""
    filesystem, root = location.open()
    dropped = [file.path for file in files if file.path not in listed]
    for path in dropped:
        filesystem.delete_file(f"{root}/{path}")
    forget_notes(filesystem, root, dropped)


@final
class ListCommits:
    """Parquet files, and lists of the files of each batch (`BatchLists`)."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._filesystem, self._root = location.open()
        self._lists = BatchLists(self._filesystem, self._root)

    def has(self, query: str, batch: int) -> bool:
        # Nearly always one of these two batches is committed.
        last = next((number for number in (batch, batch - 1) if number >= 0 and self._lists.has(number)), None)
        if last is None:
            last = self._lists.last()
        if last < 0:
            return False
        if self._lists.query(last) != query:
            raise foreign(self._location.path)
        return batch <= last

    def clean(self, query: str) -> None:
        last = self._lists.last()
        remove_unfinished(self._filesystem, self._root, last, lambda: self._paths(last) if last >= 0 else ())
        self._lists.join()

    def commit(self, query: str, batch: int, files: Sequence[WrittenFile]) -> None:
        self._lists.add(query, batch, files)
        forget_notes(self._filesystem, self._root, [file.path for file in files])
        self._lists.join_before(batch)

    def drop(self, files: Sequence[WrittenFile]) -> None:
        batches = {batch_of(file.path.rpartition("/")[2]) for file in files}
        _drop(self._location, files, [path for each in batches if each is not None for path in self._paths(each)])

    def files(self) -> list[str]:
        return [path for number in self._lists.numbers() for path in self._paths(number)]

    def _paths(self, batch: int) -> list[str]:
        return [file.path for file in self._lists.files(batch)]


@final
class DeltaCommits:
    """The log of a Delta table; stores the number of a query's last batch as Delta's own writers do."""

    def __init__(self, location: Location) -> None:
        self._location = location

    def _table(self) -> "DeltaTable":
        from deltalake import DeltaTable

        from martlet_spark.pipelines.archived import arrow_schema

        options = self._location.delta_options
        table = DeltaTable.create(
            self._location.path,
            schema=arrow_schema(),
            mode="ignore",
            partition_by=list(PARTITIONS),
            storage_options=options,
        )
        missing = {*arrow_schema().names} - {field.name for field in table.schema().fields}
        if missing or table.metadata().partition_columns != [*PARTITIONS]:
            text = f"Delta table {self._location.path!r} is not an archive: it has other columns or partitions"
            raise PipelineError(f"{text}; give another path")
        return table

    def has(self, query: str, batch: int) -> bool:
        table = self._table()
        last = table.transaction_version(query)
        if last is None and table.version() > 0:
            raise foreign(self._location.path)
        return last is not None and batch <= last

    def clean(self, query: str) -> None:
        table = self._table()
        last = table.transaction_version(query)
        if last is None and table.version() > 0:
            raise foreign(self._location.path)
        filesystem, root = self._location.open()
        remove_unfinished(filesystem, root, -1 if last is None else last, lambda: [unquote(p) for p in _paths(table)])

    def commit(self, query: str, batch: int, files: Sequence[WrittenFile]) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction

        from martlet_spark.pipelines.archived import arrow_schema

        now_ms = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                each.path,  # deltalake escapes the path in the log
                each.bytes,
                {"topic": each.topic, "date": each.date},
                now_ms,
                True,
                json.dumps({"numRecords": each.rows}),
            )
            for each in files
        ]
        self._table().create_write_transaction(
            actions,
            "append",
            arrow_schema(),
            list(PARTITIONS),
            commit_properties=CommitProperties(app_transactions=[Transaction(query, batch)]),
        )
        forget_notes(*self._location.open(), [each.path for each in files])

    def drop(self, files: Sequence[WrittenFile]) -> None:
        _drop(self._location, files, self.files())

    def files(self) -> list[str]:
        return [unquote(path) for path in _paths(self._table())]


def _paths(table: "DeltaTable") -> list[str]:
    """Return the paths of the files of *table* in its log, relative to the table."""
    return [row["path"] for row in pa.table(table.get_add_actions()).select(["path"]).to_pylist()]
