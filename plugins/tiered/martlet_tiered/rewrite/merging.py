"""Makes new files of the records of others, in the order and with the row groups of uploaded ones.

All records are decoded twice. The first time, a few numbers of each are noted and sorted. Then each window of row
groups of the new files is gathered: a window of 20 MiB, one row group of a source and the growing file are in memory.
The new file is read back, and each of its records compared by its CRC with what the sources had, before anybody commits
it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from msgspec import Struct, structs

from martlet.runtime.checksum import crc32_each
from martlet.runtime.steps import Steps, off_loop
from martlet_columns.records import Integers, Records
from martlet_tiered.errors import ObjectDamaged, TierError
from martlet_tiered.files import DataFile
from martlet_tiered.format.fields import topics_of
from martlet_tiered.format.footer import FileFooter
from martlet_tiered.format.keys import keys_name
from martlet_tiered.format.writing import GROUP_BYTES, EncodedFile, FileWriter, group_ends
from martlet_tiered.names import DATA_FOLDER, DataName
from martlet_tiered.objects import Objects
from martlet_tiered.rewrite.dropping import Dropping
from martlet_tiered.rewrite.sources import SourceFile, open_source

__all__ = ["FILE_BYTES", "Rewritten", "TangledQueues", "merge_files", "store_file"]

# A new file ends after the row group with which it has this size.
FILE_BYTES: Final = 32 << 20
# Bytes of records in memory, more only if one row group has more.
WINDOW_BYTES: Final = 20 << 20
# Room for the end of a file, of which the part that is not used takes no memory.
SPARE_BYTES: Final = 64 << 20
# Records copied in one slice, about 2 ms.
COPIED: Final = 5000

ENTRY: Final = np.dtype(
    [
        *(("topic", "i4"), ("queue", "i4"), ("offset", "i8"), ("position", "i8"), ("size", "i4"), ("crc", "u4")),
        *(("source", "i4"), ("group", "i4"), ("row", "i4")),
    ]
)


class TangledQueues(TierError):
    """Several files have different messages with one offset of a queue, as after a restore of an old data directory."""


class Rewritten(Struct):
    """New files with `records` records, which are stored and checked; `dropped` records of the sources are not in them.

    If no record was dropped from a single source, there are no new files, because they would be the same: then the
    footer has told, and no record was read.
    """

    files: list[DataFile]
    footers: list[FileFooter]
    records: int
    dropped: int


def merge_files(
    objects: Objects,
    files: Sequence[DataFile],
    name: DataName,
    broker: str,
    dropping: Dropping,
    now_ms: Callable[[], int],
    *,
    keeps: bool = False,
) -> Steps[Rewritten]:
    """Store new files with the records of *files* that *dropping* keeps; each is named after *name* and its part.

    With *keeps*, the bytes of *files* stay in memory: give it if they have few, and many row groups.

    Raises:
      ObjectDamaged: a record of *files* is damaged, or a new file is not what was stored.
      ObjectMissing: the store has no such file.
      TangledQueues: the messages of a queue do not ascend by offset and position; they cannot be in one file.
      TierError: the store cannot be used.
    """
    sources = []
    for file in files:
        source = yield from open_source(objects, file, keeps=keeps)
        sources.append(source)
    if len(files) == 1 and not any(map(dropping.touches, sources[0].footer.spans)):
        return Rewritten([], [], files[0].rows or 0, 0)
    rows, ranks, dropped = yield from _sorted_entries(sources, dropping)
    if len(files) > 1 and name.kind != "internal" and _is_tangled(rows, ranks):
        raise TangledQueues(f"messages of a queue in {len(files)} files from {files[0].path!r} on do not ascend")
    found = Rewritten([], [], len(rows), dropped)
    if not len(rows) or (not dropped and len(files) == 1):
        return found
    writer: FileWriter | None = None
    stored = 0
    for window in _windows(rows["size"], group_ends(ranks, rows["size"])):
        begin = window[0][0]
        data = yield from _gather(sources, rows[begin : window[-1][1]])
        starts = np.cumsum(rows["size"][begin : window[-1][1]], dtype=np.int64)
        starts = np.concatenate(([0], starts))
        for first, end in window:
            if writer is None:
                writer = _open_writer(structs.replace(name, part=len(found.files)), broker, rows[stored:])
            places = starts[first - begin : end - begin + 1]
            records = Records(memoryview(data)[places[0] : places[-1]], places[:-1] - places[0])
            yield from writer.add(records)
            yield from writer.end_group()
            if writer.bytes >= FILE_BYTES or end == len(rows):
                encoded = yield from writer.finish(now_ms())
                writer = None
                yield from store_file(objects, encoded, rows["crc"][stored:end])
                found.files.append(encoded.file)
                found.footers.append(encoded.footer)
                stored = end
                del encoded
        del data, records
    return found


def _sorted_entries(sources: Sequence[SourceFile], dropping: Dropping) -> Steps[tuple[Integers, Integers, int]]:
    """Return the entries of the records that stay, in the order of files, numbers of their topics, and how many leave.

    The numbers ascend with the topics.
    """
    numbers: dict[str, int] = {}
    parts: list[Integers] = [np.empty(0, ENTRY)]
    dropped = 0
    for at, source in enumerate(sources):
        for number in range(len(source.footer.groups)):
            records = yield from source.records(number)
            part = yield from _entries(records, numbers, dropping)
            part["source"], part["group"] = at, number
            parts.append(part)
            dropped += len(records) - len(part)
    rows = np.concatenate(parts)
    del parts
    yield
    order = sorted(numbers, key=str.encode)
    ranks_of = np.empty(len(order), np.int32)
    ranks_of[[numbers[topic] for topic in order]] = np.arange(len(order), dtype=np.int32)
    ranks = ranks_of[rows["topic"]]
    sorting = np.argsort(rows["position"], kind="stable")
    for key in (rows["offset"], rows["queue"], ranks):
        yield
        sorting = sorting[np.argsort(key[sorting], kind="stable")]
    return rows[sorting], ranks[sorting], dropped


def _is_tangled(rows: Integers, ranks: Integers) -> bool:
    is_same = (np.diff(ranks) == 0) & (np.diff(rows["queue"]) == 0)
    ascends = (np.diff(rows["offset"]) > 0) & (np.diff(rows["position"]) > 0)
    return bool((is_same & ~ascends).any())


def _entries(records: Records, numbers: dict[str, int], dropping: Dropping) -> Steps[Integers]:
    """Return the entries of those of *records* that stay; *numbers* has a number for each topic."""
    heads = records.heads
    topics = topics_of(records).dictionary_encode()
    names = [topic.decode("utf-8", "replace") for topic in topics.dictionary.to_pylist()]
    codes = np.asarray(topics.indices.fill_null(-1))
    kept = np.flatnonzero(dropping.keeps(names, codes, heads["position"].astype(np.int64)))
    known = [numbers.setdefault(name, len(numbers)) for name in [*names, ""]]
    yield
    part = np.empty(len(kept), ENTRY)
    part["topic"] = np.array(known, np.int32)[codes[kept]]
    for field in ("queue", "offset", "position", "size"):
        part[field] = heads[field][kept]
    part["row"] = kept
    view = memoryview(records.data)
    starts = records.starts[kept]
    ends = (starts + part["size"]).tolist()
    for begin in range(0, len(kept), COPIED):
        bounds = zip(starts[begin : begin + COPIED].tolist(), ends[begin : begin + COPIED], strict=True)
        part["crc"][begin : begin + COPIED] = crc32_each(view[start:end] for start, end in bounds)
        yield
    return part


def _windows(sizes: Integers, ends: list[int]) -> list[list[tuple[int, int]]]:
    """Return the first record and the end of each row group, which *ends* has, those of each window together."""
    totals = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    windows: list[list[tuple[int, int]]] = []
    for first, end in pairwise([0, *ends]):
        if not windows or totals[end] - totals[windows[-1][0][0]] > WINDOW_BYTES:
            windows.append([])
        windows[-1].append((first, end))
    return windows


def _gather(sources: Sequence[SourceFile], rows: Integers) -> Steps[bytearray]:
    """Return the records of the entries *rows*, one after the other."""
    ends = np.cumsum(rows["size"], dtype=np.int64)
    data = bytearray(int(ends[-1]))
    view = memoryview(data)
    order = np.lexsort((rows["row"], rows["group"], rows["source"]))
    changes = (np.diff(rows["source"][order]) != 0) | (np.diff(rows["group"][order]) != 0)
    for begin, end in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(order)]):
        chosen = order[begin:end]
        first = rows[chosen[0]]
        records = yield from sources[int(first["source"])].records(int(first["group"]))
        source, starts = memoryview(records.data), records.starts[rows["row"][chosen]]
        sizes = rows["size"][chosen]
        if (records.heads["size"][rows["row"][chosen]] != sizes).any():
            raise ObjectDamaged(f"a row group that begins at position {int(first['position'])} has changed")
        columns = (starts, starts + sizes, ends[chosen] - sizes, ends[chosen])
        for at in range(0, len(chosen), COPIED):
            for from_, to, low, high in zip(*(each[at : at + COPIED].tolist() for each in columns), strict=True):
                view[low:high] = source[from_:to]
            yield
        del records, source
    return data


def _open_writer(name: DataName, broker: str, rows: Integers) -> FileWriter:
    """Return a writer for a file with the first ones of *rows*."""
    largest = int(min(rows["size"].sum(dtype=np.int64), 2 * GROUP_BYTES + int(rows["size"].max())))
    return FileWriter(name, broker, FILE_BYTES + largest + SPARE_BYTES)


def store_file(objects: Objects, encoded: EncodedFile, crcs: Integers) -> Steps[None]:
    """Store a file and its keys, and compare each of its records with *crcs* after reading it back.

    Raises:
      ObjectDamaged: the store returns other data.
      ObjectExists: it has another object with this name.
      TierError: it cannot be used.
    """
    file, footer, keys = encoded.file, encoded.footer, encoded.keys
    yield from off_loop(partial(objects.create, f"{DATA_FOLDER}/{file.path}", encoded.data))
    yield from off_loop(partial(objects.create, keys_name(file.path), keys))
    if (yield from off_loop(partial(objects.read, keys_name(file.path)))) != keys:
        raise ObjectDamaged(f"{keys_name(file.path)!r} has other data than what was stored")
    stored = yield from open_source(objects, file)
    if stored.footer != footer:
        raise ObjectDamaged(f"{file.path!r} has another footer than what was stored")
    at = 0
    for number in range(len(footer.groups)):
        records = yield from stored.records(number)
        view, ends = memoryview(records.data), (records.starts + records.heads["size"]).tolist()
        found = crc32_each(view[start:end] for start, end in zip(records.starts.tolist(), ends, strict=True))
        if found != crcs[at : at + len(records)].tolist():
            raise ObjectDamaged(f"row group {number} of {file.path!r} has other records than the files before")
        at += len(records)
        yield
    if at != len(crcs):
        raise ObjectDamaged(f"{file.path!r} has {at} records, and the files before {len(crcs)}")
