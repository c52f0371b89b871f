"""What makes the files of a batch part of an archive, exactly once: a Delta table's log, or a list per batch.

Both remember the streaming query and the number of its last batch. A batch that Spark runs again after a crash,
although it was committed, changes nothing. An archive takes batches of one query only: a new query would begin at the
first message again.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, Protocol, final
from urllib.parse import quote

import pyarrow.fs as pafs

from martlet_spark.errors import PipelineError
from martlet_spark.pipelines.parts import PARTITIONS, Written, batch_of
from martlet_spark.pipelines.storage import Location

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["Commits", "DeltaCommits", "ListCommits", "open_commits"]

BATCHES: Final = "_batches"


class Commits(Protocol):
    """The committed batches of an archive."""

    def has(self, query: str, batch: int) -> bool:
        """Whether *batch* of *query* is committed. Raises `PipelineError` if the batches are another query's."""

    def clean(self) -> None:
        """Remove files of batches that were not committed; no query may be running."""

    def commit(self, query: str, batch: int, files: Sequence[Written]) -> None:
        """Make *files* part of the archive."""

    def files(self) -> list[str]:
        """Return the paths of all files of the archive, relative to it."""


def open_commits(location: Location, kind: str) -> Commits:
    """Return the commits of the archive at *location*; *kind* is ``parquet`` or ``delta``."""
    return DeltaCommits(location) if kind == "delta" else ListCommits(location)


def _foreign(location: Location) -> PipelineError:
    text = f"archive {location.path!r} was written with another checkpoint, and would get all messages again"
    return PipelineError(f"{text}; give that --checkpoint, or another directory")


@final
class ListCommits:
    """Parquet files, and ``_batches/NUMBER.json`` with the files of each batch."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._filesystem, self._root = location.open()

    def has(self, query: str, batch: int) -> bool:
        numbers = self._numbers()
        if not numbers:
            return False
        if self._read(numbers[-1])["query"] != query:
            raise _foreign(self._location)
        return batch <= numbers[-1]

    def clean(self) -> None:
        last = max(self._numbers(), default=-1)
        selector = pafs.FileSelector(self._root, allow_not_found=True, recursive=True)
        for info in self._filesystem.get_file_info(selector):
            batch = batch_of(info.base_name)
            if batch is not None and batch > last:
                self._filesystem.delete_file(info.path)

    def commit(self, query: str, batch: int, files: Sequence[Written]) -> None:
        value = {"query": query, "batch": batch, "files": [asdict(each) for each in files]}
        with self._filesystem.open_output_stream(self._path(batch)) as stream:
            stream.write(json.dumps(value).encode())

    def files(self) -> list[str]:
        return [each["path"] for number in self._numbers() for each in self._read(number)["files"]]

    def _path(self, batch: int) -> str:
        return f"{self._root}/{BATCHES}/{batch:010}.json"

    def _numbers(self) -> list[int]:
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
        return DeltaTable.create(
            self._location.path,
            schema=arrow_schema(),
            mode="ignore",
            partition_by=list(PARTITIONS),
            storage_options=options,
        )

    def has(self, query: str, batch: int) -> bool:
        table = self._table()
        last = table.transaction_version(query)
        if last is None and table.version() > 0:
            raise _foreign(self._location)
        return last is not None and batch <= last

    def clean(self) -> None:
        """Keep them: the log does not have them, and a vacuum removes them."""

    def commit(self, query: str, batch: int, files: Sequence[Written]) -> None:
        from deltalake import CommitProperties, Transaction
        from deltalake.transaction import AddAction, RemoveAction

        from martlet_spark.pipelines.archived import arrow_schema

        now_ms = time.time_ns() // 1_000_000
        actions: list[AddAction | RemoveAction] = [
            AddAction(
                quote(each.path, safe="/="),
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

    def files(self) -> list[str]:
        table = self._table()
        return list(table.file_uris())
