"""Whole records, in the log's format, and the fixed fields of all of them as one array."""

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np

from martlet.records.codec import MARK_FIRST, MARK_LAST, RECORD_CRC_BYTES, has_record_crc, record_crc_holds
from martlet.records.layout import (
    BODY_BYTES_AT,
    BORN_V6,
    HEAD_BYTES,
    RECORD_BYTES_MIN,
    STORE_V6,
    SYS_FLAG_AT,
    WIDE_HOST_BYTES,
    WIDE_HOSTS,
    RecordView,
)
from martlet.runtime.checksum import crc32, crc32_each
from martlet.runtime.native import native
from martlet_columns.errors import RecordError

__all__ = ["Data", "Integers", "Records", "doubtful_records", "joined", "record_starts"]

Data: TypeAlias = bytearray | memoryview
Integers: TypeAlias = "np.ndarray[tuple[int], np.dtype[Any]]"

# The fields before the hosts.
START_FIELDS: Final = (
    ("size", ">i4"),
    ("magic", ">u4"),
    ("crc", ">u4"),
    ("queue", ">i4"),
    ("flag", ">i4"),
    ("offset", ">i8"),
    ("position", ">i8"),
    ("sys_flag", ">i4"),
    ("born_ms", ">i8"),
)
# `martlet.records.layout.HEAD`: the fixed fields, if both hosts are IPv4 addresses.
HEADS: Final = np.dtype(
    [
        *START_FIELDS,
        ("born_host", ("u1", 8)),
        ("store_ms", ">i8"),
        ("store_host", ("u1", 8)),
        ("reconsume_times", ">i4"),
        ("prepared_position", ">i8"),
        ("body_bytes", ">i4"),
    ]
)
assert HEADS.itemsize == HEAD_BYTES

_SIZE: Final = struct.Struct(">i")
_SIZE_CRC: Final = struct.Struct(f">i4xI{SYS_FLAG_AT - 12}xi{BODY_BYTES_AT - SYS_FLAG_AT - 4}xi")


@final
class Records:
    """The records in *data*, one after the other; ``starts`` has the position of each, ``heads`` their fixed fields.

    Fields after ``born_ms`` are wrong where a host is an IPv6 address (``sys_flag`` 0x10, 0x20).

    Raises:
      RecordError: the sizes of the records do not add up to the size of *data*.
    """

    __slots__ = ("data", "heads", "starts")

    def __init__(self, data: Data, starts: "Sequence[int] | Integers | None" = None) -> None:
        self.data = data
        self.starts: Integers = _checked_starts(data) if starts is None else np.array(starts, dtype=np.int64)
        self.heads = _heads(data, self.starts)

    def __len__(self) -> int:
        return len(self.starts)

    def before(self, offset: int) -> "Records | None":
        """Return the records before *offset*, all of one queue; None if there are none."""
        count = int(np.searchsorted(self.heads["offset"], offset))
        if count == len(self):
            return self
        return Records(self.data[: self.starts[count]], self.starts[:count].tolist()) if count else None

    def check_bodies(self) -> None:
        """Compare each record with its CRCs.

        Raises:
          RecordError: a record does not match, or lacks its end.
        """
        for start in native(doubtful_records)(self.data, self.starts, self.heads):
            self._check_one(start)

    def _check_one(self, start: int) -> None:
        """Compare the record at *start*, of any kind, with its CRCs."""
        data = self.data
        size, crc, sys_flag, body_bytes = _SIZE_CRC.unpack_from(data, start)
        body_at = start + HEAD_BYTES
        if sys_flag & WIDE_HOSTS:
            body_at += WIDE_HOST_BYTES * (bool(sys_flag & BORN_V6) + bool(sys_flag & STORE_V6))
            body_bytes = _SIZE.unpack_from(data, body_at - 4)[0]
        if body_bytes and crc32(memoryview(data)[body_at : body_at + body_bytes]) & 0x7FFFFFFF != crc:
            raise RecordError(f"{self.describe(start)} does not match its CRC")
        end = start + size
        if not data[end - 1] and RecordView(data, start).properties:
            raise RecordError(f"{self.describe(start)} has lost the end of its properties")
        if has_record_crc(data, end) and not record_crc_holds(data, start, end):
            raise RecordError(f"{self.describe(start)} does not match its record CRC")

    def describe(self, start: int) -> str:
        """Return a description of the record at *start*, for errors."""
        head = np.frombuffer(self.data, HEADS, 1, start)[0]
        return f"message {head['offset']} of queue {head['queue']} (position {head['position']} of the broker's log)"


def joined(parts: Sequence[Records]) -> Records:
    """Return the records of all *parts* in one buffer."""
    if len(parts) == 1:
        return parts[0]
    starts: list[Integers] = []
    at = 0
    for part in parts:
        starts.append(part.starts + at)
        at += len(part.data)
    return Records(bytearray().join([part.data for part in parts]), np.concatenate(starts))


def record_starts(data: Data) -> tuple[Integers, int]:
    """Return the position of each record in *data*, and the end of the last; the size of a record is not plausible if
    it ends where it begins.

    The native kernel has a function with the same name that does the same; see `martlet.runtime.native`.
    """
    starts: list[int] = []
    at, last = 0, len(data) - RECORD_BYTES_MIN
    unpack, add = _SIZE.unpack_from, starts.append
    while at <= last:
        add(at)
        size = unpack(data, at)[0]
        if size < RECORD_BYTES_MIN:
            break
        at += size
    return np.array(starts, np.int64), at


def doubtful_records(data: Data, starts: Integers, heads: Any) -> list[int]:
    """Return those of *starts* whose records do not simply match the CRC of their body.

    They may be damaged, or have IPv6 hosts or a CRC of the whole record. *heads* has the fixed fields of all.

    The native kernel has a function with the same name that does the same; see `martlet.runtime.native`.
    """
    view = memoryview(data)
    raw = np.frombuffer(view, np.uint8)
    ends, bodies = starts + heads["size"], starts + HEAD_BYTES
    body_ends = bodies + heads["body_bytes"]
    fine = (heads["sys_flag"] & WIDE_HOSTS == 0) & (body_ends >= bodies) & (body_ends <= ends)
    first, second = raw[ends - RECORD_CRC_BYTES] == MARK_FIRST, raw[ends - RECORD_CRC_BYTES + 1] == MARK_FIRST
    last = raw[ends - 12] == MARK_LAST
    # A flipped bit changes one of the three marks of a record CRC.
    fine &= ~((first & second) | (first & last) | (second & last)) & (raw[ends - 1] != 0)
    parts = map(slice, bodies.tolist(), body_ends.tolist())
    crcs = np.array(crc32_each(map(view.__getitem__, parts)), np.uint32)
    fine &= (crcs & 0x7FFFFFFF == heads["crc"]) | (heads["body_bytes"] == 0)
    doubtful: list[int] = starts[~fine].tolist()
    return doubtful


def _checked_starts(data: Data) -> Integers:
    """Return the position of each record in *data*."""
    starts, end = native(record_starts)(data)
    if len(starts) and starts[-1] == end:
        size = _SIZE.unpack_from(data, end)[0]
        raise RecordError(f"record {len(starts)} says {size} bytes; {RECORD_BYTES_MIN} is the least")
    if end != len(data):
        raise RecordError(f"{len(starts)} records say {end} bytes in total; {len(data)} are there")
    return starts


def _heads(data: Data, starts: Integers) -> Any:
    if not len(starts):
        return np.empty(0, HEADS)
    # A window begins at each byte; copying the windows at *starts* as opaque bytes is faster than field by field.
    windows = np.ndarray((len(data) - HEAD_BYTES + 1,), f"V{HEAD_BYTES}", data, strides=(1,))
    return windows[starts].view(HEADS)
