"""What makes the files of a batch part of an archive, exactly once: a Delta table's log, or a list per batch.

Both remember the streaming query and the number of its last batch. A batch that Spark runs again after a crash,
although it was committed, changes nothing. An archive takes batches of one query only: a new query would begin at the
first message again.
"""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Protocol, final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs as pafs

from martlet_spark.errors import PipelineError
from martlet_spark.pipelines.owner import foreign
from martlet_spark.pipelines.parts import PARTITIONS, Written, batch_of
from martlet_spark.pipelines.storage import Location, write_whole

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["BATCHES", "Commits", "DeltaCommits", "ListCommits", "open_commits"]

BATCHES: Final = "_batches"


class Commits(Protocol):
    """The committed batches of an archive."""

    def has(self, query: str, batch: int) -> bool:
        """Whether *batch* of *query* is committed. Raises `PipelineError` if the batches are another query's."""

    def clean(self, query: str) -> None:
        """Remove files that were not committed; no other run of *query* may go on."""

    def commit(self, query: str, batch: int, files: Sequence[Written]) -> None:
        """Make *files* part of the archive."""

    def drop(self, files: Sequence[Written]) -> None:
        """Remove *files*, which a batch wrote that was committed before, with others."""

    def files(self) -> list[str]:
        """Return the paths of all files of the archive, relative to it."""


def open_commits(location: Location, kind: str) -> Commits:
    """Return the commits of the archive at *location*; *kind* is ``parquet`` or ``delta``."""
    return DeltaCommits(location) if kind == "delta" else ListCommits(location)


def _drop(location: Location, files: Sequence[Written], listed: Collection[str]) -> None:
    """Remove those of *files* that are not *listed*."""
    filesystem, root = location.open()
    for file in files:
        if file.path not in listed:
            filesystem.delete_file(f"{root}/{file.path}")


def _clean(location: Location, last: int, listed: Collection[str]) -> None:
    """Remove files of batches after *last*, and those of *last* itself that are not *listed*."""
    filesystem, root = location.open()
    selector = pafs.FileSelector(root, allow_not_found=True, recursive=True)
    for info in filesystem.get_file_info(selector):
        batch = batch_of(info.base_name)
        is_unlisted = batch == last and info.path.removeprefix(f"{root}/") not in listed
        if batch is not None and (batch > last or is_unlisted):
            filesystem.delete_file(info.path)


@final
class ListCommits:
    """Parquet files, and ``_batches/NUMBER.json`` with the files of each batch."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._filesystem, self._root = location.open()

    def has(self, query: str, batch: int) -> bool:
        # Nearly always one of these two is there; to list all batches takes the longer the more there are.
        last = next((number for number in (batch, batch - 1) if self._exists(number)), None)
        if last is None:
            last = max(self.numbers(), default=None)
        if last is None:
            return False
        if self._read(last)["query"] != query:
            raise foreign(self._location.path)
        return batch <= last

    def clean(self, query: str) -> None:
        last = max(self.numbers(), default=-1)
        _clean(self._location, last, [file.path for file in self.files_of(last)] if last >= 0 else ())

    def commit(self, query: str, batch: int, files: Sequence[Written]) -> None:
        value = {"query": query, "batch": batch, "files": [asdict(each) for each in files]}
        write_whole(self._filesystem, self._path(batch), json.dumps(value).encode())

    def drop(self, files: Sequence[Written]) -> None:
        batches = {batch_of(file.path.rpartition("/")[2]) for file in files}
        listed = [each.path for number in self.numbers() if number in batches for each in self.files_of(number)]
        _drop(self._location, files, listed)

    def files(self) -> list[str]:
        return [each.path for number in self.numbers() for each in self.files_of(number)]

    def files_of(self, batch: int) -> list[Written]:
        """Return the files of *batch*."""
        return [Written(**each) for each in self._read(batch)["files"]]

    def _path(self, batch: int) -> str:
        return f"{self._root}/{BATCHES}/{batch:010}.json"

    def _exists(self, batch: int) -> bool:
        return bool(self._filesystem.get_file_info(self._path(batch)).type is not pafs.FileType.NotFound)

    def numbers(self) -> list[int]:
        """Return the numbers of the batches, in order."""
        selector = pafs.FileSelector(f"{self._root}/{BATCHES}", allow_not_found=True)
        infos = self._filesystem.get_file_info(selector)
        return sorted(int(info.base_name.removesuffix(".json")) for info in infos if info.base_name.endswith(".json"))

    def _read(self, batch: int) -> dict[str, Any]:
        with self._filesystem.open_input_stream(self._path(batch)) as stream:
            value: dict[str, Any] = json.loads(stream.read())
        return value


@final
class DeltaCommits:
    """The log of a Delta table; it keeps the number of a query's last batch as Delta's own writers do."""

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
        _clean(self._location, -1 if last is None else last, [unquote(path) for path in _paths(table)])

    def commit(self, query: str, batch: int, files: Sequence[Written]) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction, RemoveAction

        from martlet_spark.pipelines.archived import arrow_schema

        now_ms = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                each.path,  # deltalake escapes it in the log
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

    def drop(self, files: Sequence[Written]) -> None:
        _drop(self._location, files, self.files())

    def files(self) -> list[str]:
        return [unquote(path) for path in _paths(self._table())]


def _paths(table: "DeltaTable") -> list[str]:
    """Return the paths of the files of *table* below it, as its log has them."""
    return [row["path"] for row in pa.table(table.get_add_actions()).select(["path"]).to_pylist()]
