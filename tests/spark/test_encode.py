"""Rows become messages: compared with the decoding of batches, row by row."""

import subprocess
import sys
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.message import UNIQ_KEY, decode_properties
from martlet_remoting.wire.batches import BatchMessage, decode_batch
from martlet_spark.errors import WriteError
from martlet_spark.write.columns import SINK_COLUMNS
from martlet_spark.write.encode import Encoder

MAP = pa.map_(pa.string(), pa.string())
TYPES = {"body": pa.binary(), "key": pa.string(), "tag": pa.string(), "properties": MAP}
TYPES |= {"deliver_at": pa.timestamp("us", tz="UTC"), "delay_level": pa.int32(), "flag": pa.int32()}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=9)
NAME = TEXT.filter(lambda name: name.upper() != name)
ROW = st.fixed_dictionaries(
    {
        "body": st.binary(min_size=1, max_size=50),
        "key": st.none() | TEXT,
        "tag": st.none() | TEXT,
        "properties": st.none() | st.dictionaries(NAME, TEXT, max_size=4).map(lambda found: list(found.items())),
        "deliver_at": st.none() | st.integers(0, 1 << 50),
        "delay_level": st.none() | st.integers(0, 20),
        "flag": st.none() | st.integers(-(1 << 31), (1 << 31) - 1),
    }
).map(lambda row: {**row, "deliver_at": None} if row["delay_level"] else row)


def frame(rows: Sequence[dict[str, object]], names: Sequence[str] = tuple(TYPES)) -> pa.RecordBatch:
    arrays = [pa.array([row.get(name) for row in rows], TYPES[name]) for name in names]
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def decoded(rows: pa.RecordBatch) -> list[BatchMessage]:
    encoded = Encoder().encode(rows)
    assert len(encoded) == len(rows)
    return decode_batch(encoded.slice(0, len(rows)))


def expected(row: dict[str, object]) -> tuple[object, dict[str, str]]:
    """The body and the properties of *row*, one by one."""
    properties: dict[str, str] = dict(row["properties"] or ())  # type: ignore[call-overload]
    at = row["deliver_at"]
    given = {"KEYS": row["key"], "TAGS": row["tag"], "TIMER_DELIVER_MS": None if at is None else str(at // 1000)}  # type: ignore[operator]
    given["DELAY"] = row["delay_level"] or None
    return row["body"], {**properties, **{name: str(value) for name, value in given.items() if value is not None}}


@given(st.lists(ROW, min_size=1, max_size=20), st.integers(0, 5))
def test_every_row_is_a_message(rows: list[dict[str, object]], skipped: int) -> None:
    found = decoded(frame(rows).slice(min(skipped, len(rows) - 1)))
    for message, row in zip(found, rows[min(skipped, len(rows) - 1) :], strict=True):
        properties = decode_properties(message.properties)
        assert len(properties.pop(UNIQ_KEY)) == 32
        assert (message.body, properties) == expected(row)
        assert message.flag == (row["flag"] or 0)


def test_unique_keys_differ() -> None:
    encoder = Encoder()
    rows = frame([{"body": b"x"}] * 40_000, ("body",))
    found = [encoder.encode(rows).slice(0, 20_000) for _ in range(2)]
    keys = {decode_properties(message.properties)[UNIQ_KEY] for data in found for message in decode_batch(data)}
    assert len(keys) == 40_000


def test_a_body_may_be_text() -> None:
    rows = pa.RecordBatch.from_arrays([pa.array(["grün"])], names=["body"])
    assert decoded(rows)[0].body == "grün".encode()


def test_large_types_make_the_same_messages() -> None:
    """Spark sends them with spark.sql.execution.arrow.useLargeVarTypes."""
    large = pa.large_string()
    types = {"body": pa.large_binary(), "key": large, "tag": large, "properties": pa.map_(large, large)}
    row = {"body": b"body", "key": "k1 k2", "tag": "blue", "properties": [("a", "1")]}
    rows = pa.RecordBatch.from_pydict({name: pa.array([row[name]], kind) for name, kind in types.items()})
    [message] = decoded(rows)
    properties = decode_properties(message.properties)
    assert (message.body, properties.pop(UNIQ_KEY) != "") == (b"body", True)
    assert properties == {"a": "1", "KEYS": "k1 k2", "TAGS": "blue"}


def test_a_slice_has_some_of_the_messages() -> None:
    encoded = Encoder().encode(frame([{"body": b"%d" % number} for number in range(10)]))
    assert [message.body for message in decode_batch(encoded.slice(3, 5))] == [b"3", b"4"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"body": None}, "1 of 2 rows have no body"),
        ({"body": b""}, "a row has an empty body"),
        ({"key": "a\x01b"}, r"key 'a\\x01b' contains U\+0001"),
        ({"tag": "\x02"}, r"tag '\\x02' contains U\+0001"),
        ({"properties": [("UNIQ_KEY", "1")]}, "property 'UNIQ_KEY' is the brokers' own; remove it"),
        ({"properties": [("", "1")]}, "property '' is empty or contains"),
        ({"properties": [("a", None)]}, "property 'a' is null or empty in a row"),
        ({"properties": [("a", "")]}, "property 'a' is null or empty in a row"),
        ({"properties": [("b", "x\x02y")]}, "property 'b' is null or empty in a row, which brokers drop, or contains"),
        ({"delay_level": -2}, "delay_level -2 of a row is negative"),
        ({"delay_level": 1, "deliver_at": 1}, "a row has both deliver_at and delay_level"),
        ({"properties": [("b", "x" * 32_800)]}, "a row has properties of 32845 bytes, with key and tag; 32767 are"),
    ],
)
def test_a_row_that_cannot_be_a_message_says_why(row: dict[str, object], text: str) -> None:
    with pytest.raises(WriteError, match=text):
        decoded(frame([{"body": b"fine"}, {"body": b"x", **row}]))


def test_every_column_that_travels_is_tried_here() -> None:
    assert TYPES.keys() == SINK_COLUMNS.keys() - {"topic", "queue", "broker"}


def test_the_source_imports_no_pandas() -> None:
    """Spark starts a process for each query, and pandas would take almost half of the time it needs to start."""
    text = "import sys, martlet_spark.source; print('pandas' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", text], text=True) == "False\n"
