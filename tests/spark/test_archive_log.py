"""What an archive has, read in batches of any size, without Spark: each row once, in order."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from martlet_columns.schema import COLUMNS
from martlet_spark.errors import PipelineError
from martlet_spark.pipelines.archive_log import ArchiveLog, RowPlace, advance, kind_of, open_log, slices
from martlet_spark.pipelines.archive_reader import BatchPace, read_slice
from martlet_spark.pipelines.archived import MESSAGE_COLUMNS, arrow_schema
from martlet_spark.pipelines.commits import open_commits
from martlet_spark.pipelines.parts import WrittenFile, write_parts
from martlet_spark.pipelines.storage import Location

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
KINDS = ("list", "delta")


DAY = date(2026, 3, 1)


def messages(topic: str, first: int, count: int, body_bytes: int = 0) -> pa.RecordBatch:
    """Messages as Spark hands them to the sink; their bodies are TOPIC NUMBER."""
    numbers = range(first, first + count)
    values: dict[str, list[object]] = {name: [None] * count for name in MESSAGE_COLUMNS}
    values |= {
        "body": [f"{topic} {n}".encode() + os.urandom(body_bytes) for n in numbers],
        "offset": [*numbers],
        "queue": [0] * count,
    }
    values |= {"properties": [[("number", str(n))] for n in numbers]}
    values |= {"store_ts": [NOON + timedelta(seconds=n) for n in numbers]}
    columns = [pa.array(values[name], COLUMNS[name][1]) for name in MESSAGE_COLUMNS]
    columns += [pa.array([topic] * count), pa.array([DAY] * count, pa.date32())]
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema())


def write_tasks(location: Location, batch: int, *tasks: list[pa.RecordBatch]) -> list[WrittenFile]:
    """Write the files of *tasks*, as the sink's tasks do."""
    filesystem, root = location.open()
    return [file for task, rows in enumerate(tasks) for file in write_parts(filesystem, root, batch, task, iter(rows))]


def write(location: Location, kind: str, batch: int, *tasks: list[pa.RecordBatch]) -> None:
    """Write and commit a batch, as the sink does."""
    files = write_tasks(location, batch, *tasks)
    commits = open_commits(location, kind)
    if commits.has("query", batch):
        commits.drop(files)
    else:
        commits.commit("query", batch, files)


def read(location: Location, log: ArchiveLog, start: RowPlace, end: RowPlace) -> Iterator[str]:
    for part in slices(log, start, end):
        for batch in read_slice(location, part):
            assert batch.schema == arrow_schema()
            yield from (body.decode() for body in batch.column("body").to_pylist())


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def location(tmp_path: Path, kind: str) -> Location:
    """An archive of three batches: 10 and 5 messages of two tasks, 7 of the next, and 3 in an odd topic."""
    found = Location.of(str(tmp_path / "archive"))
    write(found, kind, 0, [messages("A", 0, 10)], [messages("A", 10, 5)])
    write(found, kind, 1, [messages("A", 15, 4), messages("A", 19, 3)])
    write(found, kind, 2, [messages("%DLQ%a|b", 0, 3)])
    return found


ALL = sorted([*(f"A {n}" for n in range(22)), *(f"%DLQ%a|b {n}" for n in range(3))])


@pytest.mark.parametrize("rows_max", [0, 1, 4, 10, 100])
def test_every_row_is_read_once_in_batches_of_any_size(location: Location, kind: str, rows_max: int) -> None:
    assert kind_of(location.path) == kind
    place, found = RowPlace(), []
    while True:
        log = open_log(location, kind)  # each batch begins like one after a restart
        end = advance(log, place, log.last(), rows_max=rows_max)
        if end == place:
            break
        end = RowPlace.of(json.loads(json.dumps(asdict(end))))
        rows = [*read(location, open_log(location, kind), place, end)]
        assert not rows_max or len(rows) <= rows_max
        found += rows
        place = end
    assert sorted(found) == ALL
    own = [int(body.split()[1]) for body in found if body.startswith("A")]
    assert own == sorted(own)


def test_bytes_bound_a_batch_by_whole_files(location: Location, kind: str) -> None:
    place, counts = RowPlace(), []
    log = open_log(location, kind)
    while (end := advance(log, place, log.last(), bytes_max=1)) != place:
        counts.append(len([*read(location, log, place, end)]))
        place = end
    assert [count for count in counts if count] == [10, 5, 7, 3]


def test_a_reader_continues_with_what_was_archived_since(location: Location, kind: str) -> None:
    log = open_log(location, kind)
    place = advance(log, RowPlace(), log.last())
    assert advance(log, place, log.last()) == place
    write(location, kind, 3, [messages("A", 22, 2)])
    log = open_log(location, kind)
    end = advance(log, place, log.last())
    assert [*read(location, log, place, end)] == ["A 22", "A 23"]


def test_a_batch_that_was_planned_is_the_same_later(location: Location, kind: str) -> None:
    """Spark plans a batch again after a crash, when the archive may have more."""
    log = open_log(location, kind)
    end = advance(log, RowPlace(), log.last(), rows_max=12)
    planned = [*read(location, log, RowPlace(), end)]
    write(location, kind, 3, [messages("A", 22, 2)])
    assert [*read(location, open_log(location, kind), RowPlace(), end)] == planned


def test_an_empty_archive_has_nothing(tmp_path: Path) -> None:
    location = Location.of(str(tmp_path))
    (tmp_path / "_batches").mkdir()
    log = open_log(location, kind_of(str(tmp_path)))
    assert advance(log, RowPlace(), log.last()) == RowPlace()


def test_a_table_that_was_compacted_is_read_on(tmp_path: Path) -> None:
    location = Location.of(str(tmp_path / "archive"))
    for batch in range(3):
        write(location, "delta", batch, [messages("A", batch, 1)])
    log = open_log(location, "delta")
    place = advance(log, RowPlace(), log.last())
    DeltaTable(location.path).optimize.compact()
    write(location, "delta", 3, [messages("A", 3, 1)])
    log = open_log(location, "delta")
    assert [*read(location, log, place, advance(log, place, log.last()))] == ["A 3"]
    assert sorted(read(location, log, RowPlace(), advance(log, RowPlace(), log.last()))) == [f"A {n}" for n in range(4)]


def test_a_table_whose_messages_were_deleted_is_not_read_on(tmp_path: Path) -> None:
    location = Location.of(str(tmp_path / "archive"))
    write(location, "delta", 0, [messages("A", 0, 4)])
    log = open_log(location, "delta")
    place = advance(log, RowPlace(), log.last())
    DeltaTable(location.path).delete("offset = 1")
    with pytest.raises(
        PipelineError, match=r"has removed messages; begin with a new checkpoint, and select with --from"
    ):
        advance(log, place, log.last())
    first = RowPlace(place.version - 1, snapshot=place.version - 1)
    os.remove(f"{location.path}/_delta_log/{place.version - 1:020}.json")
    with pytest.raises(PipelineError, match="is gone; begin with a new checkpoint"):
        advance(open_log(location, "delta"), replace(first, file=0), first.version)


def test_a_path_without_an_archive_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(
            PipelineError, match="is not an archive; give the path that `martlet pipeline archive --to`"
        ):
            kind_of(str(path))
    (tmp_path / "topic=A").mkdir()
    (tmp_path / "topic=A" / "x.parquet").touch()
    assert kind_of(str(tmp_path)) == kind_of("hdfs://name/archive") == "spark"


def test_a_pace_keeps_the_mean_rate() -> None:
    now, began = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    pace = BatchPace(100, lambda: now, sleep)
    for rows, works_s in ((200, 0.5), (50, 0.1), (100, 5.0), (100, 0.0), (100, 0.0)):
        pace.wait(rows)
        began.append(round(now, 6))
        now += works_s
    # Each waits for its predecessors' share of time; time that was lost is not made up for.
    assert began == [0, 2, 2.5, 7.5, 8.5]
