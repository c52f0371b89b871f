"""The index stays right, and is not built again, whatever comes at the same time: commits, deletions, failures."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import pytest
import trio

from martlet.errors import Refused
from martlet.runtime.io_threads import IoThreads
from martlet.store import Store
from martlet.store.read.cold import NOTHING_COLD
from martlet.testing.stores import message
from martlet_tiered.errors import StoreUnavailable
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, Span
from martlet_tiered.local import LocalObjects
from martlet_tiered.reading import index as indexes
from martlet_tiered.reading.database import IndexDatabase, IndexedFile
from martlet_tiered.reading.index import FILE_NAME, TierIndex
from martlet_tiered.reading.table_files import TableFile

from .uploads import fill, open_store, until

T = TypeVar("T")
IDENTITY: Final = "s3://lake/a b"
SPANS: Final = {
    "Old": Span("Old", 0, 0, 9, 0, 10, 0, 0, 0, 90, 0),
    "New": Span("New", 0, 0, 9, 0, 10, 0, 0, 100, 190, 0),
}


def file_of(begin: int, end: int, suffix: str = "") -> DataFile:
    path = f"date=2026-11-28/kind=topic/e1-{begin}-{end}{suffix}.parquet"
    return DataFile(path, "2026-11-28", "topic", 5, 0, 1, {}, {})


OLD: Final = file_of(0, 100)
REWRITTEN: Final = file_of(0, 100, "-r1-0")
NEW: Final = file_of(100, 200)
FOOTER: Final = FileFooter(1, "a", 1, 0, 100, [], [])


class Indexed:
    """An index, and footers of its files that can be read unless the store is `down`."""

    def __init__(self, store: Store) -> None:
        self.is_down = False
        self.path = f"{store.data_directory.path}/{FILE_NAME}"
        self.index = TierIndex(store, self.path, IDENTITY, LocalObjects(store.data_directory.path), IoThreads("files"))
        self.index._load = self.load  # type: ignore[method-assign]

    async def load(self, file: TableFile, footer: FileFooter | None) -> IndexedFile:
        if self.is_down:
            raise StoreUnavailable("the store is down")
        span = SPANS["Old" if file.start == 0 else "New"]
        return IndexedFile(file.path, file.bytes, file.start, file.end, [span])

    def stored_spans(self) -> list[int]:
        """Return the first offsets of topic Old that the file of the index has."""
        database = IndexDatabase(self.path, IDENTITY)
        assert database.open()
        found = [place.span.first for place in database.places("Old", 0, 0, 9)]
        database.close()
        return found


@asynccontextmanager
async def indexed(path: Path, *files: DataFile) -> AsyncIterator[tuple[Store, Indexed]]:
    """Yield a store with messages of topics Old and New, and an index that has *files*."""
    async with open_store(path) as store:
        fill(store, *[(message(b"x", topic), 0) for topic in ("Old", "New") for _ in range(10)])
        made = Indexed(store)
        await made.index.begin()
        await made.index.sync(files)
        yield store, made


# ---- deletions


async def test_a_deletion_is_written_once_it_is_durable(tmp_path: Path) -> None:
    """A power cut may undo it; until it is durable, a question waits."""
    async with indexed(tmp_path, OLD) as (store, made), trio.open_nursery() as nursery:
        store.deletions.delete_topic("Old")
        store.flusher.wanted = 0
        answers: list[list[object]] = []

        async def ask() -> None:
            answers.append(await made.index._ask(lambda database: list(database.places("Old", 0, 0, 9))))

        nursery.start_soon(ask)
        await until(lambda: store.flusher.wanted >= store.deletions.end or bool(answers))
        assert (answers, made.stored_spans()) == ([], [0])
        store.flusher.flush_now()
        await until(lambda: bool(answers))
        assert (answers, made.stored_spans()) == ([[]], [])


async def test_a_deletion_that_the_log_has_lost_is_forgotten(tmp_path: Path) -> None:
    async with indexed(tmp_path, OLD) as (store, made):
        lost = store.appended + (1 << 20)
        await made.index._ask(lambda database: database.delete_topic("Old", lost))
        assert made.stored_spans() == []
    async with indexed(tmp_path, OLD) as (_, made):
        assert made.stored_spans() == [0]


# ---- what is not indexed yet


async def test_a_queue_of_a_new_file_that_is_not_indexed_yet_is_not_empty(tmp_path: Path) -> None:
    async with indexed(tmp_path, OLD) as (store, made):
        old, new = store.queue("Old", 0), store.queue("New", 0)
        assert (old.cold_from, new.cold_from) == (0, NOTHING_COLD)
        made.is_down = True
        await made.index.committed([NEW], [FOOTER])
        assert (made.index.unindexed, new.cold_from) == (1, 0)
        with pytest.raises(Refused, match="1 of 2 files are left"):
            await made.index.finder.find(new, 0)
        made.is_down = False
        await made.index.sync([OLD, NEW])
        assert (await made.index.finder.find(new, 0)).place is not None


async def test_before_the_table_is_read_no_queue_is_empty(tmp_path: Path) -> None:
    async with indexed(tmp_path, OLD) as (store, _):
        again = Indexed(store)
        await again.index.begin()
        assert store.queue("New", 0).cold_from == 0


# ---- at the same time


async def test_a_file_that_is_added_during_a_comparison_is_added_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "SYNC_S", 60.0)
    async with indexed(tmp_path, OLD) as (_, made), trio.open_nursery() as nursery:
        index = made.index
        made.is_down = True
        await index.sync([OLD, NEW])
        made.is_down = False
        late = await made.load(index._missing[NEW.path], None)
        ask, is_first = index._ask, [True]

        async def interrupted(question: Callable[[IndexDatabase], T]) -> T:
            answer = await ask(question)
            if is_first[0]:
                is_first[0] = False
                nursery.start_soon(index._add, late)
                await until(lambda: not index._missing or index._adding.statistics().tasks_waiting > 0)
            return answer

        monkeypatch.setattr(index, "_ask", interrupted)
        await index.sync([OLD, NEW])
        assert index.is_complete


@pytest.mark.parametrize("is_down", [True, False], ids=["listed", "indexed"])
async def test_a_rewritten_file_that_a_reader_has_listed_first_is_added_once(tmp_path: Path, is_down: bool) -> None:
    async with indexed(tmp_path, OLD) as (store, made):
        made.is_down = is_down
        await made.index.sync([REWRITTEN])
        made.is_down = False
        await made.index.replaced([OLD], [REWRITTEN], [FOOTER])
        assert made.index.is_complete
        await made.index.sync([REWRITTEN])
        assert (made.index.is_complete, made.index.files) == (True, 1)
        found = await made.index.finder.find(store.queue("Old", 0), 3)
        assert found.place is not None
        assert found.place.path == REWRITTEN.path


async def test_a_comparison_reads_the_names_of_new_files_only_and_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[tuple[str, int]] = []
    of = TableFile.of

    def noted(file: DataFile) -> TableFile:
        threads.append((file.path, threading.get_ident()))
        return of(file)

    async with indexed(tmp_path, OLD) as (_, made):
        monkeypatch.setattr(TableFile, "of", noted)
        await made.index.sync([OLD, NEW])
        ((path, thread),) = threads
        assert path == NEW.path
        assert thread != threading.get_ident()
