"""Spans made from the columns of a file: of files that another program wrote, as Delta's OPTIMIZE, and of exact ones.

The footer of the broker's own files has their spans.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa

from martlet_columns.records import Integers
from martlet_tiered.format.footer import Span

__all__ = ["SPAN_COLUMNS", "end_row", "spans_of_columns"]

SPAN_COLUMNS: Final = ("topic", "queue", "offset", "_position", "store_ts")
ANY_MS: Final = (0, (1 << 63) - 1)


def end_row(span: Span) -> int:
    """Return the row after the last one of *span*."""
    return span.row + span.count


def spans_of_columns(table: pa.Table, *, exact: bool = False) -> Iterator[Span]:
    """Yield the spans of a file whose rows have the columns `SPAN_COLUMNS`, in any order of rows.

    Their CRC is 0. The spans of one queue do not overlap, whatever the order of the rows: a span ends where the message
    with the next higher offset is not in the next row. With *exact* they have no holes.
    """
    if not len(table):
        return
    topics = table.column("topic").combine_chunks()
    codes = topics if pa.types.is_dictionary(topics.type) else topics.dictionary_encode()
    names, topic = codes.dictionary.to_pylist(), np.asarray(codes.indices)
    queue, offset, position = (_integers(table, name) for name in SPAN_COLUMNS[1:4])
    times = table.column("store_ts").combine_chunks().cast(pa.int64())
    ms = np.asarray(times.fill_null(-1)) // 1000
    order = np.lexsort((position, offset, queue, topic))
    topic, queue, offset = topic[order], queue[order], offset[order]
    ends = (topic[1:] != topic[:-1]) | (queue[1:] != queue[:-1]) | (order[1:] != order[:-1] + 1)
    ends |= (offset[1:] != offset[:-1] + 1) if exact else (offset[1:] <= offset[:-1])
    starts = [0, *(np.flatnonzero(ends) + 1).tolist(), len(order)]
    for start, end in pairwise(starts):
        rows = order[start:end]
        low, high = int(ms[rows].min()), int(ms[rows].max())
        yield Span(
            names[topic[start]],
            int(queue[start]),
            int(offset[start]),
            int(offset[end - 1]),
            int(rows[0]),
            end - start,
            *((low, high) if low >= 0 else ANY_MS),
            int(position[rows].min()),
            int(position[rows].max()),
            0,
        )


def _integers(table: pa.Table, name: str) -> Integers:
    return np.asarray(table.column(name).combine_chunks().cast(pa.int64()))
