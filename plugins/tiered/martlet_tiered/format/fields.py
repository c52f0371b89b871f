"""Fields of records that are not at a fixed place, of many records at once."""

from typing import Any

import numpy as np
import pyarrow as pa

from martlet.records.layout import BORN_V6, STORE_MS_AT, WIDE_HOST_BYTES, part_offsets
from martlet_columns.records import HEADS, Integers, Records
from martlet_columns.vectors import TOPIC, bounds_of

__all__ = ["store_times", "topics_of"]


def store_times(records: Records) -> Integers:
    """Return when each of *records* was stored, in milliseconds; ``heads`` has another time where a host is IPv6."""
    if not len(records):
        return np.empty(0, np.int64)
    wide = records.heads["sys_flag"].astype(np.int64) & BORN_V6 != 0
    at = records.starts + STORE_MS_AT + WIDE_HOST_BYTES * wide
    # A window of eight bytes begins at each byte.
    windows = np.ndarray((len(records.data) - 7,), "V8", records.data, strides=(1,))
    times: Integers = windows[at].view(">i8").astype(np.int64)
    return times


def topics_of(records: Records) -> Any:
    """Return a binary array of the topics of *records*, as stored; null where the parts of a record do not add up."""
    bounds = bounds_of(records.data, records.starts, records.heads, has_bodies=False)
    starts, ends = bounds[:, TOPIC].copy(), bounds[:, TOPIC + 1].copy()
    lost = []
    for row in np.flatnonzero(starts < 0).tolist():
        starts[row], ends[row] = _topic_bounds(records, row)
        if starts[row] < 0:
            starts[row] = ends[row] = records.starts[row]
            lost.append(row)
    flat = np.stack((starts, ends), axis=1).reshape(-1)
    whole = pa.Array.from_buffers(pa.binary(), len(flat) - 1, [None, pa.py_buffer(flat), pa.py_buffer(records.data)])
    places = np.arange(0, len(flat), 2)
    if not lost:  # a mask makes pyarrow import pandas, if that is installed
        return whole.take(pa.array(places))
    return whole.take(pa.array(places, mask=np.isin(places, 2 * np.array(lost, np.int64))))


def _topic_bounds(records: Records, row: int) -> tuple[int, int]:
    """Return begin and end of the topic of a record of any kind; -1 and -1 if its parts do not add up."""
    start = int(records.starts[row])
    head = np.frombuffer(records.data, HEADS, 1, start)[0]
    parts = part_offsets(records.data, start, start + int(head["size"]), int(head["magic"]), int(head["sys_flag"]))
    return (parts[1], parts[2] - 2) if parts is not None else (-1, -1)
