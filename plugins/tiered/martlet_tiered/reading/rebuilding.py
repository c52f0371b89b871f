"""Builds the index of a stopped broker from the files of the table, as a running one does (`index.py`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from msgspec import structs

from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import Span
from martlet_tiered.objects import Objects
from martlet_tiered.reading.database import IndexDatabase, IndexedFile
from martlet_tiered.reading.index import newest_first
from martlet_tiered.reading.table_files import TableFile, exact_spans, load_file

__all__ = ["rebuild_index"]

# Reads files, several at the same time, and yields what they have in their order.
Loading = Callable[[Sequence[TableFile], Callable[[TableFile], IndexedFile]], Iterator[IndexedFile]]


def rebuild_index(path: str, identity: str, objects: Objects, files: Sequence[DataFile], load: Loading) -> list[str]:
    """Remove the index at *path*, which no broker may be using, and build it from *files*; return what is damaged.

    If it is interrupted, the next start of the broker indexes what is missing.

    Raises:
      TierError: the store cannot be read.
      IndexDamaged, OSError: the disk is full or fails.
    """
    faults: list[str] = []
    ordered = sorted(map(TableFile.of, files), key=newest_first)
    database = IndexDatabase(path, identity)
    with closing(database):
        database.clear()
        for file in load(ordered, lambda each: load_file(objects, each)):
            _add(database, objects, file)
            if file.fault:
                faults.append(file.fault)
        database.check()
    return faults


def _add(database: IndexDatabase, objects: Objects, file: IndexedFile) -> None:
    exact: list[tuple[str, Sequence[Span]]] = []
    tangled = database.tangled_files(file)
    if tangled:
        exact = [(path, exact_spans(objects, path, size)) for path, size in tangled.items()]
        file = structs.replace(file, spans=exact_spans(objects, file.path, file.bytes))
    database.add(file, exact)
