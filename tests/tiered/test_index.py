"""The index finds each message that is still part of its topic, in whatever order files come to it."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet_tiered.format.footer import Span
from martlet_tiered.reading.database import IndexDatabase, IndexedFile
from martlet_tiered.reading.spans import spans_of_columns
from martlet_tiered.reading.sqlite_file import IndexDamaged

IDENTITY: Final = "s3://lake/a b"


@pytest.fixture
def database(tmp_path: Path) -> IndexDatabase:
    found = IndexDatabase(str(tmp_path / "config" / "tiered.index"), IDENTITY)
    assert not found.open()
    return found


def span(first: int, last: int, position: int, topic: str = "T", queue: int = 0, row: int = 0) -> Span:
    """A span whose messages have the positions from *position* on, one byte each."""
    count = last - first + 1
    return Span(topic, queue, first, last, row, count, position, position + count, position, position + count - 1, 0)


def file(number: int, *spans: Span, deleted: Sequence[tuple[str, int]] = ()) -> IndexedFile:
    return IndexedFile(f"f{number}", 100, number * 1000, (number + 1) * 1000, spans, deleted)


def firsts(database: IndexDatabase, topic: str = "T", queue: int = 0) -> list[tuple[int, int, int]]:
    places = database.places(topic, queue, 0, 1000)
    return [(place.span.first, place.span.last, place.span.min_position) for place in places]


# ---- spans


# Ranges of the log; in each, a queue of one topic goes on for some messages, or its topic is deleted first.
HISTORIES = st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), min_size=1, max_size=12)


def files_of(history: Sequence[tuple[int, bool, bool]]) -> Iterator[tuple[IndexedFile, bool]]:
    """Yield the file of each range, and whether the topic was deleted in it; a deletion may lack its note."""
    offset = 0
    for number, (count, is_deleted, is_noted) in enumerate(history):
        position = number * 1000 + 10
        deleted = [("T", position)] if is_deleted and is_noted else []
        offset = 0 if is_deleted else offset
        spans = [span(offset, offset + count - 1, position)] if count else []
        offset += count
        yield file(number, *spans, deleted=deleted), is_deleted


def expected(history: Sequence[tuple[int, bool, bool]]) -> list[tuple[int, int, int]]:
    """The spans of the last life of the topic; without a note, only its first message shows that it began."""
    found: list[tuple[int, int, int]] = []
    is_over = False
    for each, is_deleted in files_of(history):
        is_over = is_over or is_deleted
        if is_over and (each.deleted or each.spans):
            found.clear()
            is_over = False
        found += [(one.first, one.last, one.min_position) for one in each.spans]
    return found


@given(HISTORIES, st.data())
def test_only_the_last_life_of_a_topic_is_indexed(history: list[tuple[int, bool, bool]], data: st.DataObject) -> None:
    """A rebuild adds the newest first; a running broker the oldest; a start some of each."""
    files = [each for each, _ in files_of(history)]
    already = data.draw(st.integers(0, len(files)), "files that are indexed")
    order = [*files[:already], *reversed(files[already:])]
    with TemporaryDirectory() as folder:
        database = IndexDatabase(f"{folder}/index", IDENTITY)
        database.open()
        database._file.run("PRAGMA synchronous = OFF")
        for each in order:
            assert database.tangled_files(each) == {}
            database.add(each)
        assert firsts(database) == expected(history)
        database.close()


def test_spans_of_one_life_are_found_by_offset_time_and_position(database: IndexDatabase) -> None:
    database.add(file(1, span(10, 19, 1000), span(0, 4, 1100, queue=1)))
    database.add(file(2, span(20, 29, 2000)))
    database.add(file(3, span(40, 49, 3000)))
    for offset, first in ((0, 10), (10, 10), (19, 10), (20, 20), (35, 20), (40, 40), (99, 40)):
        assert database.places("T", 0, offset, 2)[0].span.first == first
    assert database.places("T", 2, 0, 1) == database.places("U", 0, 0, 1) == []
    assert [place.path for place in database.places_by_time("T", 0, 1500, 0)] == ["f2"]
    assert [place.path for place in database.places_by_position("T", 0, 2009, 0)] == ["f2"]
    assert [place.path for place in database.places_by_position("T", 0, 2010, 0)] == ["f3"]
    assert database.places_by_position("T", 0, 4000, 0) == []
    assert (database.end_of("T", 0), database.end_of("T", 1), database.end_of("T", 2)) == (50, 5, 0)
    assert sorted(database.first_offsets()) == [("T", 0, 10), ("T", 1, 0)]
    assert database.files_at(2500) == [("f2", 100)]
    assert [place.path for place in database.places_of_topic("T", 0, 9999, 3000, 10)] == ["f2", "f1", "f1"]


def test_files_are_removed_with_their_spans(database: IndexDatabase) -> None:
    for number in range(4):
        database.add(file(number, span(number * 10, number * 10 + 9, number * 1000)))
    database.remove(["f0", "f2", "nothing"])
    assert [each[0] for each in firsts(database)] == [10, 30]
    assert [each.path for each in database.files()] == ["f1", "f3"]


def test_a_deletion_counts_for_files_that_come_later(database: IndexDatabase) -> None:
    database.add(file(5, span(0, 3, 5000)))
    database.delete_topic("T", 4000)
    database.add(file(1, span(10, 12, 1000)))
    assert firsts(database) == [(0, 3, 5000)]
    database.delete_topic("T", 6000)
    assert firsts(database) == []


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_files_with_messages_of_a_deleted_topic_are_marked_in_whatever_order(
    database: IndexDatabase, order: Sequence[int]
) -> None:
    old, note, new = file(0, span(0, 9, 0)), file(1, deleted=[("T", 1500)]), file(2, span(0, 9, 2000))
    for number in order:
        database.add((old, note, new)[number])
    assert database.deleted() == (["f0"], {"T": 1500})


def test_a_tangled_file_that_was_removed_meanwhile_is_left_out(database: IndexDatabase) -> None:
    database.add(file(1, span(0, 3, 1000)), [("removed", [span(4, 9, 900)])])
    assert firsts(database) == [(0, 3, 1000)]


def test_files_whose_messages_alternate_are_told(database: IndexDatabase) -> None:
    whole = Span("T", 0, 0, 9, 0, 6, 0, 0, 100, 190, 0)
    other = Span("T", 0, 4, 6, 0, 3, 0, 0, 140, 160, 0)
    database.add(file(0, whole))
    added = file(1, other)
    assert database.tangled_files(added) == {"f0": 100}
    exact = [Span("T", 0, 0, 3, 0, 4, 0, 0, 100, 130, 0), Span("T", 0, 7, 9, 4, 2, 0, 0, 170, 190, 0)]
    database.add(added, [("f0", exact)])
    assert firsts(database) == [(0, 3, 100), (4, 6, 140), (7, 9, 170)]


# ---- the file


def test_an_index_is_kept(tmp_path: Path, database: IndexDatabase) -> None:
    database.add(file(1, span(0, 9, 1000)))
    database.close()
    again = IndexDatabase(str(tmp_path / "config" / "tiered.index"), IDENTITY)
    assert again.open()
    again.check()
    assert firsts(again) == [(0, 9, 1000)]
    other = IndexDatabase(str(tmp_path / "config" / "tiered.index"), "another table")
    assert not other.open()
    assert other.files() == []


def test_a_change_that_fails_changes_nothing(database: IndexDatabase) -> None:
    database.add(file(1, span(0, 9, 1000)))
    with pytest.raises(IndexDamaged):
        database.add(file(1, span(10, 19, 2000)))
    assert firsts(database) == [(0, 9, 1000)]


def test_a_full_disk_is_no_damage(database: IndexDatabase) -> None:
    database._file.run("PRAGMA max_page_count = 20")
    many = file(1, *(span(number, number, number, topic=f"T{number}") for number in range(10_000)))
    with pytest.raises(OSError, match="full"):
        database.add(many)
    assert database.files() == []
    database.check()


# ---- spans of columns


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 30)), max_size=40, unique=True))
def test_spans_of_columns_are_disjoint_and_name_each_row(rows: list[tuple[int, int, int]]) -> None:
    for exact in (False, True):
        table = pa.table(
            {
                "topic": pa.array([f"T{topic}" for topic, _, _ in rows], pa.string()),
                "queue": pa.array([queue for _, queue, _ in rows], pa.int32()),
                "offset": pa.array([offset for _, _, offset in rows], pa.int64()),
                "_position": pa.array([offset * 10 for _, _, offset in rows], pa.int64()),
                "store_ts": pa.array(
                    np.array([offset * 1000 for _, _, offset in rows], "datetime64[us]"), pa.timestamp("us", tz="UTC")
                ),
            }
        )
        spans = list(spans_of_columns(table, exact=exact))
        named = [
            (f"T{rows[row][0]}", rows[row][1], row, each)
            for each in spans
            for row in range(each.row, each.row + each.count)
        ]
        assert sorted(row for _, _, row, _ in named) == list(range(len(rows)))
        assert all((topic, queue) == (each.topic, each.queue) for topic, queue, _, each in named)
        ends: dict[tuple[str, int], int] = {}
        for each in spans:
            assert ends.get((each.topic, each.queue), -1) < each.first <= each.last
            ends[each.topic, each.queue] = each.last
            offsets = [rows[row][2] for row in range(each.row, each.row + each.count)]
            assert (offsets[0], offsets[-1], sorted(offsets)) == (each.first, each.last, offsets)
            assert (each.min_position, each.max_ms) == (10 * each.first, each.last)
            assert not exact or each.count == each.last - each.first + 1
