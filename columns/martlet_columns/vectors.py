"""Columns of many records at once.

An array of bounds over a buffer is a binary Arrow array without a copy, and one call of `take` copies every n-th
element. So all bodies of a buffer are copied in one call, and so are the topics, the property strings, and their names
and values.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias, final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from martlet.message import KEYS, TAGS, UNIQ_KEY
from martlet.records.compression import COMPRESSED
from martlet.records.layout import HEAD_BYTES, MAGIC_V1, WIDE_HOSTS
from martlet_columns.records import Data, Integers
from martlet_columns.schema import COLUMNS, PROPERTIES, TIMESTAMP

__all__ = ["COLUMN", "NEEDED", "RecordVectors", "gather_usual"]

NAME_END: Final = 1
VALUE_END: Final = 2
# Cells, records times names, up to which a table finds the name that a record has twice; a sort does beyond.
TABLE_MAX: Final = 1 << 22
HEX: Final = np.array([f"{byte:02X}".encode() for byte in range(256)], dtype="S2")

# Columns of the bounds of body, topic and properties; the bytes between are their lengths.
BODY, TOPIC, TEXT = 0, 2, 4
BOUNDS: Final = 6

Times: TypeAlias = tuple[int, int]


def bounds_of(data: Data, starts: Integers, heads: Any, *, has_bodies: bool) -> Integers:
    """Return a row of bounds per record: begin and end of body, topic and properties; -1 for odd records.

    Odd are records with an IPv6 host or a long topic, damaged ones, and, if bodies are wanted, compressed ones.
    """
    odd = WIDE_HOSTS | (COMPRESSED if has_bodies else 0)
    raw = np.frombuffer(data, np.uint8)
    ends = starts + heads["size"]
    body_ends = starts + HEAD_BYTES + heads["body_bytes"]
    fine = (heads["magic"] == MAGIC_V1) & (heads["sys_flag"] & odd == 0)
    fine &= (heads["body_bytes"] >= 0) & (body_ends + 3 <= ends)
    topics = np.where(fine, body_ends + 1, 1)
    topic_ends = topics + raw[topics - 1]
    fine &= topic_ends + 2 <= ends
    at = np.where(fine, topic_ends, 0)
    texts = at + 2
    fine &= texts + (raw[at].astype(np.int64) << 8 | raw[at + 1]) == ends
    bounds = np.stack((starts + HEAD_BYTES, body_ends, topics, topic_ends, texts, ends), axis=1).astype(np.int32)
    bounds[~fine] = -1
    return bounds


def elements(data: Any, bounds: Integers, first: int, step: int) -> Any:
    """Return the bytes of *data* between neighbouring *bounds* (ascending, int32): the *first*, each *step* later."""
    count = len(bounds) - 1
    whole = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(bounds), pa.py_buffer(data)])
    return whole.take(pa.array(np.arange(first, count, step)))


@final
class RecordVectors:
    """Records, none of them odd: their fixed fields, bytes, bounds in the bytes, and broker name.

    Only the properties *names* are needed; None means all. Times outside of *times*, in milliseconds, are null.
    """

    def __init__(
        self, heads: Any, data: Data, bounds: Integers, broker: str, names: Collection[str] | None, times: Times
    ) -> None:
        self.heads = heads
        self.data = data
        self.bounds = np.ascontiguousarray(bounds).reshape(-1)
        self.broker = broker
        self._names = names
        self._times = times

    def __len__(self) -> int:
        return len(self.heads)

    def part(self, first: int) -> Any:
        """Return the bytes of one part of all records: `BODY`, `TOPIC` or `TEXT`."""
        return elements(self.data, self.bounds, first, BOUNDS)

    @cached_property
    def properties(self) -> "PropertyColumns | NamedProperties":
        texts = self.part(TEXT)
        return PropertyColumns(texts) if self._names is None else NamedProperties(texts, self._names)

    def maps(self) -> Any:
        assert isinstance(self.properties, PropertyColumns)
        return self.properties.maps()

    def integers(self, field: str, kind: type) -> Any:
        return pa.array(self.heads[field].astype(kind))

    def times(self, field: str) -> Any:
        values = self.heads[field].astype(np.int64)
        outside = (values < self._times[0]) | (values > self._times[1])
        if outside.any():
            return pa.array(np.where(outside, 0, values) * 1000, TIMESTAMP, mask=outside)
        values *= 1000
        return pa.Array.from_buffers(TIMESTAMP, len(values), [None, pa.py_buffer(values)])

    def constant(self, text: str) -> Any:
        return pa.repeat(pa.scalar(text), len(self))

    def message_ids(self) -> Any:
        """Return each record's unique key; without one, the broker's address and the record's position."""
        keys = self.properties.values_of(UNIQ_KEY)
        if not keys.null_count:
            return keys
        places = np.empty((len(self), 16), np.uint8)
        places[:, :8] = self.heads["store_host"]
        places[:, 8:] = self.heads["position"].copy().view(np.uint8).reshape(-1, 8)
        texts = np.ascontiguousarray(HEX[places]).view("S32")[:, 0]
        return pc.coalesce(keys, pa.array(texts.astype("U32")))


@final
class PropertyColumns:
    """Names and values in the property *texts* of records; each text is ``name 0x01 value 0x02`` repeated.

    ``odd`` has the numbers of the records whose text is irregular: a name or value is empty, or a name is repeated.
    The last 0x02 may be missing.
    """

    def __init__(self, texts: Any) -> None:
        self._data, raw, offsets = _bytes_of(texts)
        self._rows = len(texts)
        starts, ends = _fragments(raw, offsets)
        self._first = np.searchsorted(starts, offsets).astype(np.int32)  # the number of each record's first property
        self._row = np.repeat(np.arange(self._rows), np.diff(self._first))
        marks = np.flatnonzero(raw == NAME_END)
        self.odd = _odd_rows(marks, starts, ends, self._row)
        self._names: Any = None
        if not self.odd.size:
            self._bounds = np.stack((starts, marks, marks + 1, ends), axis=1).astype(np.int32).reshape(-1)
            self._name()

    def _name(self) -> None:
        """Number the names, and find the records with a repeated name."""
        if not len(self._row):
            self._codes, self._dictionary = np.empty(0, np.int32), {}
            return
        self._names = elements(self._data, self._bounds, 0, 4)
        encoded = self._names.dictionary_encode()
        self._codes = np.asarray(encoded.indices)
        self._dictionary = {name: code for code, name in enumerate(encoded.dictionary.to_pylist())}
        places = self._row * len(self._dictionary) + self._codes
        if self._rows * len(self._dictionary) <= TABLE_MAX:
            twice = np.flatnonzero(np.bincount(places) > 1)
        else:
            found, counts = np.unique(places, return_counts=True)
            twice = found[counts > 1]
        self.odd = np.unique(twice // len(self._dictionary))

    def values_of(self, name: str) -> Any:
        """Return the value of property *name* of each record, null without one, as strings."""
        code = self._dictionary.get(name.encode())
        if code is None:
            return pa.nulls(self._rows, pa.string())
        found = np.flatnonzero(self._codes == code)
        count = len(self._bounds) - 1
        whole = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(self._bounds), pa.py_buffer(self._data)])
        at = np.full(self._rows, -1, np.int64)
        at[self._row[found]] = found * 4 + 2
        return whole.take(pa.array(at, mask=at < 0)).cast(pa.string())

    def maps(self) -> Any:
        """Return the properties of each record as a map."""
        if self._names is None:
            empty = pa.nulls(0, pa.string())
            return pa.MapArray.from_arrays(pa.array(self._first), empty, empty)
        values = elements(self._data, self._bounds, 2, 4)
        return pa.MapArray.from_arrays(
            pa.array(self._first), self._names.cast(pa.string()), values.cast(pa.string()), type=PROPERTIES
        )


@final
class NamedProperties:
    """Values of the properties *names*, of 4 or 8 ASCII characters, in the property *texts* of records.

    Properties are found by the bytes of their names, so other properties cost nothing. ``odd`` has the numbers of the
    records that have one of *names* twice, or with a value that is empty or contains a 0x00 or 0x01.
    """

    def __init__(self, texts: Any, names: Collection[str]) -> None:
        self._data, self._raw, self._offsets = _bytes_of(texts)
        self._rows = len(texts)
        self._marks = np.flatnonzero(self._raw <= VALUE_END)
        self._numbers = np.flatnonzero(self._raw[self._marks] == NAME_END)  # indexes of the marks that end a name
        # A word of four bytes begins at each byte; a name is one or two words before its mark.
        self._words = np.ndarray((max(len(self._raw) - 3, 0),), "S4", self._data, strides=(1,))
        self._last = self._words_before(self._marks[self._numbers], 4)
        odd, self._found = [np.empty(0, np.int64)], {}
        for name in names:
            self._found[name], wrong = self._find(name.encode())
            odd.append(wrong)
        self.odd = np.unique(np.concatenate(odd))

    def _words_before(self, places: Integers, distance: int) -> Integers:
        """Return the word at *distance* bytes before each of *places*; an arbitrary one before the first byte."""
        if not len(self._words):
            return np.zeros(len(places), "S4")
        found: Integers = self._words[np.maximum(places - distance, 0)]
        return found

    def _find(self, name: bytes) -> tuple[Any, Integers]:
        """Return row, begin and end of each value of *name*, and the odd rows."""
        numbers = self._numbers[self._last == name[-4:]]
        if len(name) == 8:
            numbers = numbers[self._words_before(self._marks[numbers], 8) == name[:4]]
        at = self._marks[numbers]
        rows = np.searchsorted(self._offsets, at, "right") - 1
        row_starts = self._offsets[rows]
        starts = at - len(name)
        is_whole = (starts == row_starts) | ((starts > row_starts) & (self._raw[starts - 1] == VALUE_END))
        if not is_whole.all():
            numbers, at, rows = numbers[is_whole], at[is_whole], rows[is_whole]
        text_ends = self._offsets[rows + 1]
        marks = np.append(self._marks, len(self._raw))[numbers + 1]
        ends = np.minimum(marks, text_ends)
        is_odd = ends == at + 1
        inside = marks < text_ends
        is_odd[inside] |= self._raw[marks[inside]] != VALUE_END
        is_odd[1:] |= rows[1:] == rows[:-1]
        return (rows, at + 1, ends), rows[is_odd]

    def values_of(self, name: str) -> Any:
        """Return the value of property *name* of each record, null without one, as strings."""
        rows, starts, ends = self._found[name]
        if not len(rows):
            return pa.nulls(self._rows, pa.string())
        bounds = np.stack((starts, ends), axis=1).astype(np.int32).reshape(-1)
        if len(rows) == self._rows:
            return elements(self._data, bounds, 0, 2).cast(pa.string())
        whole = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), self._data])
        at = np.full(self._rows, -1, np.int64)
        at[rows] = np.arange(0, len(bounds), 2)
        return whole.take(pa.array(at, mask=at < 0)).cast(pa.string())


def _bytes_of(texts: Any) -> tuple[Any, Integers, Integers]:
    """Return the bytes of *texts*, as a buffer and as numbers, and the begin of each text, with the end of the last."""
    offsets = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    data = texts.buffers()[2]
    data = pa.py_buffer(b"") if data is None else data
    return data, np.frombuffer(data, np.uint8)[: offsets[-1]], offsets


def _fragments(raw: Integers, offsets: Integers) -> tuple[Integers, Integers]:
    """Return the begin of each property in the texts and the end of its value."""
    ends = np.flatnonzero(raw == VALUE_END)
    text_ends = offsets[1:][np.diff(offsets) > 0]
    unended = text_ends[raw[text_ends - 1] != VALUE_END]  # texts without their last 0x02
    real = np.ones(len(ends), np.int64)
    if len(unended):
        # The end of a text without its last 0x02 is the begin of the next text, perhaps an 0x02. Of two equal ends, it
        # comes first.
        both = np.concatenate((unended, ends))
        order = np.argsort(both, kind="stable")
        real = np.concatenate((np.zeros(len(unended), np.int64), real))[order]
        ends = both[order]
    starts = np.zeros(len(ends), np.int64)
    starts[1:] = (ends + real)[:-1]
    return starts, ends


def _odd_rows(marks: Integers, starts: Integers, ends: Integers, row: Integers) -> Integers:
    """Return the records with a property that has not exactly one 0x01, or an empty name or value."""
    if len(marks) == len(starts) and ((starts < marks) & (marks < ends - 1)).all():
        return np.empty(0, np.int64)
    first = np.searchsorted(marks, starts)
    counts = np.searchsorted(marks, ends) - first
    mark = np.append(marks, 0)[first]
    return np.unique(row[(counts != 1) | (mark == starts) | (mark >= ends - 1)])


Column = Callable[[RecordVectors], Any]

COLUMN: Final[Mapping[str, Column]] = {
    "topic": lambda places: places.part(TOPIC).cast(pa.string()),
    "broker": lambda places: places.constant(places.broker),
    "queue": lambda places: places.integers("queue", np.int32),
    "offset": lambda places: places.integers("offset", np.int64),
    "key": lambda places: places.properties.values_of(KEYS),
    "tag": lambda places: places.properties.values_of(TAGS),
    "body": lambda places: places.part(BODY),
    "properties": lambda places: places.maps(),
    "msg_id": lambda places: places.message_ids(),
    "born_ts": lambda places: places.times("born_ms"),
    "store_ts": lambda places: places.times("store_ms"),
    "flag": lambda places: places.integers("flag", np.int32),
    "reconsume_times": lambda places: places.integers("reconsume_times", np.int32),
}
assert COLUMN.keys() == COLUMNS.keys()

# Column -> the property that it needs, for columns that do not need all.
NEEDED: Final[Mapping[str, str]] = {"key": KEYS, "tag": TAGS, "msg_id": UNIQ_KEY}
assert {len(name) for name in NEEDED.values()} <= {4, 8}


def gather_usual(
    data: Data, starts: Integers, heads: Any, names: Sequence[str], schema: pa.Schema, broker: str, times: Times
) -> tuple[list[Any], Integers]:
    """Return the columns *names* of the usual records among those at *starts*, and the starts of the others.

    The native kernel has a function with the same name that does the same; see `martlet.runtime.native`.

    Args:
      heads: the fixed fields of the records.
      schema: the type of each column.
      times: the least and the greatest time that is not null, in milliseconds.
    """
    wanted = None if "properties" in names else [NEEDED[name] for name in names if name in NEEDED]
    bounds = bounds_of(data, starts, heads, has_bodies="body" in names)
    fine = bounds[:, 0] >= 0
    try:
        places = RecordVectors(heads[fine], data, bounds[fine], broker, wanted, times)
        while wanted != [] and places.properties.odd.size:  # twice at most
            fine[np.flatnonzero(fine)[places.properties.odd]] = False
            places = RecordVectors(heads[fine], data, bounds[fine], broker, wanted, times)
        return [COLUMN[name](places) for name in names], starts[~fine]
    except pa.ArrowInvalid:  # a text is not UTF-8
        return [pa.array([], schema.field(name).type) for name in names], starts
