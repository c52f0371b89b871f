"""Encodes Arrow batches into the body of a batch send (`martlet_remoting.wire.batches`), all rows of a batch at once.

A message has a few parts; each part is one Arrow array with an element per row. Joined row by row, they form one array,
whose buffer has the messages one after the other: a batch send's body is a slice of it.
"""

import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from martlet.message import KEYS, PROPERTIES_BYTES_MAX, TAGS, UNIQ_KEY
from martlet.records.reserved import RESERVED
from martlet_columns.records import Integers
from martlet_spark.errors import WriteError

__all__ = ["MIDDLE_BYTES", "Encoded", "Encoder", "RowKeys"]

HEAD: Final = np.dtype([("size", ">i4"), ("magic", ">i4"), ("crc", ">i4"), ("flag", ">i4"), ("body_bytes", ">i4")])
OVERHEAD: Final = 22
HEX: Final = np.array([f"{byte:02X}".encode() for byte in range(256)], dtype="S2")
NAME: Final = f"{UNIQ_KEY}\x01".encode()
KEY_CHARACTERS: Final = 32
# Bytes between the body and the other properties: the length of the properties, and the unique key.
MIDDLE_BYTES: Final = 2 + len(NAME) + KEY_CHARACTERS + 1
SEPARATORS: Final = "[\x01\x02]"
NONE: Final = b""  # not a pa.scalar: making one imports pandas, in each Python process that Spark starts


@final
class RowKeys:
    """Makes the unique keys of messages, in RocketMQ's format: address, process, instance, time and number."""

    def __init__(self) -> None:
        try:
            address = socket.inet_aton(socket.gethostbyname(socket.gethostname()))
        except OSError:
            address = random.randbytes(4)
        process = (os.getpid() & 0xFFFF).to_bytes(2, "big")
        self._prefix = (address + process + random.randbytes(4)).hex().upper().encode()
        now = time.time()
        month = time.localtime(now)
        start = time.mktime((month.tm_year, month.tm_mon, 1, 0, 0, 0, 0, 0, -1))
        self._next = int((now - start) * 1000) << 16

    def fill(self, places: Integers) -> None:
        """Write a key into each row of *places*, which are `KEY_CHARACTERS` wide."""
        numbers = np.arange(self._next, self._next + len(places), dtype=np.int64).astype(">i8")
        self._next += len(places)
        places[:, :20] = np.frombuffer(self._prefix, np.uint8)
        places[:, 20:] = HEX[numbers.view(np.uint8).reshape(-1, 8)[:, 2:]].view(np.uint8).reshape(-1, 12)


@final
class Encoded:
    """Messages one after the other: ``bounds`` has the begin of each, and the end of the last."""

    __slots__ = ("_data", "bounds")

    def __init__(self, joined: Any) -> None:
        self.bounds = _offsets(joined)
        self._data = joined.buffers()[2]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def slice(self, first: int, after: int) -> bytes:
        """Return the messages from number *first* up to *after*."""
        start, end = int(self.bounds[first]), int(self.bounds[after])
        data: bytes = self._data.slice(start, end - start).to_pybytes()
        return data


@final
class Encoder:
    """Encodes rows; each gets a unique key of its own.

    *allows_empty* permits empty bodies, which brokers accept only in transactions.
    """

    def __init__(self, *, allows_empty: bool = False) -> None:
        self._keys = RowKeys()
        self._allows_empty = allows_empty

    def encode(self, rows: Any) -> Encoded:
        """Return the messages of *rows*, a RecordBatch with columns of the sink.

        Raises:
          WriteError: a row cannot be a message.
        """
        body = _body(rows, allows_empty=self._allows_empty)
        parts = [part for name, make in PARTS.items() if name in rows.schema.names for part in make(rows.column(name))]
        body_bytes = np.asarray(pc.binary_length(body)).astype(np.int64)
        text_bytes = np.full(len(rows), MIDDLE_BYTES - 2, np.int64)
        for part in parts:
            text_bytes += np.diff(_offsets(part))
        if len(rows) and text_bytes.max() > PROPERTIES_BYTES_MAX:
            row = int(text_bytes.argmax())
            text = f"has properties of {text_bytes[row]} bytes, with key and tag; {PROPERTIES_BYTES_MAX} are the limit"
            raise WriteError(f"a row {text}, put more into the body")
        flags = rows.column("flag") if "flag" in rows.schema.names else None
        _check_delays(rows)
        pieces = [_heads(body_bytes, text_bytes, flags), body, self._middles(text_bytes), *parts, NONE]
        return Encoded(pc.binary_join_element_wise(*pieces))

    def _middles(self, text_bytes: Integers) -> Any:
        middles = np.empty((len(text_bytes), MIDDLE_BYTES), np.uint8)
        middles[:, :2] = text_bytes.astype(">i2").view(np.uint8).reshape(-1, 2)
        middles[:, 2 : 2 + len(NAME)] = np.frombuffer(NAME, np.uint8)
        self._keys.fill(middles[:, 2 + len(NAME) : -1])
        middles[:, -1] = 2
        return _fixed(middles, MIDDLE_BYTES)


def _heads(body_bytes: Integers, text_bytes: Integers, flags: Any) -> Any:
    heads = np.zeros(len(body_bytes), HEAD)
    heads["size"] = OVERHEAD + body_bytes + text_bytes
    heads["body_bytes"] = body_bytes
    if flags is not None:
        heads["flag"] = np.asarray(pc.fill_null(flags, 0))
    return _fixed(heads, HEAD.itemsize)


def _fixed(values: Any, size: int) -> Any:
    """Return *values* of *size* bytes each as a binary array that shares their memory."""
    bounds = np.arange(0, (len(values) + 1) * size, size, dtype=np.int32)
    return pa.Array.from_buffers(pa.binary(), len(values), [None, pa.py_buffer(bounds), pa.py_buffer(values)])


def _offsets(texts: Any) -> Integers:
    """Return the begin of each element of a binary array in its buffer, and the end of the last."""
    if not len(texts):
        return np.zeros(1, np.int32)
    return np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]


def _body(rows: Any, *, allows_empty: bool) -> Any:
    body = rows.column("body").cast(pa.binary())
    if body.null_count:
        raise WriteError(f"{body.null_count} of {len(rows)} rows have no body (null); filter them out, or fill it")
    if not allows_empty and pc.any(pc.equal(pc.binary_length(body), 0)).as_py():
        text = "a row has an empty body, which brokers take with the guarantee exactly-once only"
        raise WriteError(f"{text}; give it at least one byte, or filter it out")
    return body


def _label(label: str, column_name: str) -> Callable[[Any], list[Any]]:
    """Return a function that makes the property *label* of a column of texts; null and empty ones have none."""

    def make(column: Any) -> list[Any]:
        texts = column.cast(pa.string())
        separators_texts = pc.filter(texts, pc.match_substring_regex(texts, SEPARATORS))
        if len(separators_texts):
            text = (
                f"{separators_texts[0].as_py()!r:.80} contains U+0001 or U+0002, which separate properties; remove them"
            )
            raise WriteError(f"{column_name} {text}")
        values = texts.cast(pa.binary())
        labelled_values = pc.binary_join_element_wise(label.encode() + b"\x01", values, b"\x02", NONE)
        is_not_empty = pc.greater(pc.fill_null(pc.binary_length(values), 0), 0)
        return [pc.if_else(is_not_empty, labelled_values, NONE)]

    return make


def _deliver_at(column: Any) -> list[Any]:
    """Return the time of delivery in milliseconds as a property; null has none."""
    times = pc.divide(column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()), 1000)
    return _label("TIMER_DELIVER_MS", "deliver_at")(times)


def _delay_level(column: Any) -> list[Any]:
    """Return the level as a property; null and 0 have none."""
    wrong = pc.filter(column, pc.less(column, 0))
    if len(wrong):
        raise WriteError(f"delay_level {wrong[0].as_py()} of a row is negative; use 1 and higher, or 0 for no delay")
    return _label("DELAY", "delay_level")(pc.if_else(pc.equal(column, 0), pa.scalar(None, column.type), column))


def _check_delays(rows: Any) -> None:
    """Raise `WriteError` if a row has both kinds of delay."""
    if {"deliver_at", "delay_level"} <= {*rows.schema.names}:
        both = pc.and_(
            rows.column("deliver_at").is_valid(), pc.fill_null(pc.greater(rows.column("delay_level"), 0), False)
        )
        if pc.any(both).as_py():
            raise WriteError("a row has both deliver_at and delay_level; set one of them to null")


def _properties(column: Any) -> list[Any]:
    """Return the properties of each row, encoded."""
    bounds = np.asarray(column.offsets)
    filled = _checked_names(column.keys.slice(bounds[0], bounds[-1] - bounds[0]))
    values = _checked_values(column.items.slice(bounds[0], bounds[-1] - bounds[0]), filled)
    joined = pc.binary_join_element_wise(filled, b"\x01", values, b"\x02", NONE)
    ends = np.ascontiguousarray(_offsets(joined)[bounds - bounds[0]])
    texts = pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(ends), joined.buffers()[2]])
    return [texts]


def _checked_names(names: Any) -> Any:
    known = pc.unique(names.cast(pa.string())).to_pylist()
    for name in known:
        if name in RESERVED:
            text = f"property {name!r} is the brokers' own; remove it, for example with map_filter"
            raise WriteError(f"{text}, or use the columns key, tag, deliver_at and delay_level")
        if not name or "\x01" in name or "\x02" in name:
            raise WriteError(f"property {name!r:.80} is empty or contains U+0001 or U+0002; choose another name")
    return names.cast(pa.binary())


def _checked_values(values: Any, names: Any) -> Any:
    texts = values.cast(pa.string())
    empty = pc.equal(pc.fill_null(pc.binary_length(texts), 0), 0)
    wrong = pc.or_(empty, pc.fill_null(pc.match_substring_regex(texts, SEPARATORS), fill_value=False))
    if pc.any(wrong).as_py():
        name = pc.filter(names, wrong)[0].as_py().decode("utf-8", "replace")
        text = "is null or empty in a row, which brokers drop, or contains U+0001 or U+0002, which separate properties"
        raise WriteError(f"property {name!r:.80} {text}; remove it there, for example with map_filter")
    return texts.cast(pa.binary())


PARTS: Final[dict[str, Callable[[Any], list[Any]]]] = {
    "tag": _label(TAGS, "tag"),
    "key": _label(KEYS, "key"),
    "deliver_at": _deliver_at,
    "delay_level": _delay_level,
    "properties": _properties,
}
