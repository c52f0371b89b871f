"""Makes a file of sorted entries: reads their records from the log again, some row groups at a time.

Records of one row group are all over the range, so the range is read once for each window of row groups: a window of
20 MiB and the file are in memory, not the range.
"""

from itertools import accumulate
from typing import Any, Final

import numpy as np
import pyarrow as pa

from martlet.runtime.steps import Steps
from martlet.store.disk.segments import Segments
from martlet_columns.records import Integers, Records
from martlet_tiered.errors import FileTooLarge, LogUnreadable
from martlet_tiered.format.writing import EncodedFile, FileWriter, group_ends
from martlet_tiered.names import DataName
from martlet_tiered.upload.log_blocks import BLOCK_BYTES

__all__ = ["WINDOW_BYTES", "encode_file"]

# Bytes of records in memory, more only if one row group has more.
WINDOW_BYTES: Final = 20 << 20
# Pieces are twice as large as where an event loop waits for the interpreter's lock: fewer calls, and no more memory.
PIECES_FACTOR: Final = 2


def encode_file(
    segments: Segments,
    name: DataName,
    broker: str,
    rows: Integers,
    ranks: Integers,
    now_ms: int,
    bytes_max: int | None,
) -> Steps[EncodedFile]:
    """Return the file *name* with the records of the entries *rows*, which are sorted; *ranks* number their topics.

    Raises:
      FileTooLarge: it would have more than *bytes_max* bytes, if that is not None.
      LogUnreadable: the log has other records than before.
    """
    writer = FileWriter(name, broker, bytes_max, PIECES_FACTOR)
    ends = group_ends(ranks, rows["size"])
    try:
        yield from _write(writer, segments, name, rows, ends)
        return (yield from writer.finish(now_ms))
    except OSError as error:
        if bytes_max is None or writer.bytes < bytes_max // 2:
            raise  # of the log
        raise FileTooLarge(f"{name.path!r} has more than {bytes_max} bytes") from error


def _write(writer: FileWriter, segments: Segments, name: DataName, rows: Integers, ends: list[int]) -> Steps[None]:
    """Add all *rows* to the file, whose row groups have these *ends*."""
    begin = 0
    for window in _windows(rows["size"], ends):
        part = rows[begin : window[-1]]
        order = np.argsort(part["at"], kind="stable")
        at, sizes = part["at"][order].astype(np.int64) + name.begin, part["size"][order].astype(np.int64)
        data = yield from _gather(segments, at, sizes)
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        whole = _binary(data, sizes)
        first = begin
        for end in window:
            group = whole.take(pa.array(places[first - begin : end - begin]))
            yield from writer.add(_records(group, rows[first:end], name.begin))
            del group
            yield from writer.end_group()
            first = end
        begin = window[-1]
        del whole, data


def _windows(sizes: Integers, ends: list[int]) -> list[list[int]]:
    """Return the *ends* of row groups, those of each window together."""
    totals = [0, *accumulate(sizes.tolist())]
    windows: list[list[int]] = []
    begin = 0
    for end in ends:
        if not windows or totals[end] - totals[begin] > WINDOW_BYTES:
            windows.append([])
            begin = windows[-2][-1] if len(windows) > 1 else 0
        windows[-1].append(end)
    return windows


def _gather(segments: Segments, at: Integers, sizes: Integers) -> Steps[bytearray]:
    """Return the records at the ascending log positions *at*, one after the other."""
    found = bytearray(int(sizes.sum()))
    filled, row, ends = 0, 0, at + sizes
    while row < len(at):
        begin = int(at[row])
        end = max(int(np.searchsorted(ends, begin + BLOCK_BYTES, "right")), row + 1)
        data = segments.read(begin, int(ends[end - 1]) - begin)
        end = int(np.searchsorted(ends, begin + len(data), "right"))
        if end <= row:
            raise LogUnreadable(f"the log has no record at position {begin} any more")
        picked = _pick(data, at[row:end] - begin, ends[row:end] - begin)
        found[filled : filled + len(picked)] = picked
        filled, row = filled + len(picked), end
        yield
    return found


def _pick(data: bytes, starts: Integers, ends: Integers) -> memoryview:
    """Return the bytes of *data* between each of the ascending *starts* and its end, one after the other."""
    if (ends[:-1] == starts[1:]).all():
        return memoryview(data)[: int(ends[-1])]
    bounds = np.stack((starts, ends), axis=1).astype(np.int32).reshape(-1)
    whole = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)])
    picked = whole.take(pa.array(np.arange(0, len(bounds), 2)))
    return memoryview(picked.buffers()[2]).cast("B")[: int((ends - starts).sum())]


def _binary(data: bytearray, sizes: Integers) -> Any:
    """Return *data* as a binary array with an element for each of *sizes*."""
    bounds = np.zeros(len(sizes) + 1, np.int32)
    np.cumsum(sizes, out=bounds[1:])
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(bounds), pa.py_buffer(data)])


def _records(group: Any, rows: Integers, begin: int) -> Records:
    sizes = rows["size"].astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    records = Records(memoryview(group.buffers()[2]).cast("B")[: int(sizes.sum())], starts)
    heads = records.heads
    if (heads["size"] != sizes).any() or (heads["position"] != rows["at"].astype(np.int64) + begin).any():
        raise LogUnreadable(f"records of the log after position {begin} have changed while they were read")
    return records
