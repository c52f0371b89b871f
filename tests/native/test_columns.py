"""The kernel makes the same columns of stored records as Python, and doubts the same records."""

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.message import Message
from martlet.records.codec import encode_record, with_room_for_record_crc, write_record_crc
from martlet.records.layout import HEAD_BYTES
from martlet_columns.decode import VECTOR_MIN, Decoder
from martlet_columns.errors import RecordError
from martlet_columns.records import Records, doubtful_records, record_starts
from martlet_columns.schema import COLUMNS, MS_MAX, MS_MIN
from martlet_columns.vectors import gather_usual
from martlet_spark.columns import DEFAULT

IPV4, IPV6 = b"\x7f\0\0\x01\0\0\x30\x39", bytes(range(20))
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
PARTS = st.sampled_from(
    [
        *(b"KEYS\x01k", b"KEYS\x01a b", "KEYS\x01☃".encode(), b"TAGS\x01a", b"TAGS\x01\xff", b"UNIQ_KEY\x01U"),
        *(b"a\x01b", b"WAIT\x01true", b"MYTAGS\x01x", b"a\x01b\x01c", b"n\x01\0", b"\xfe\x01x"),
        *(b"", b"\x01", b"a\x01", b"TAGS", b"\x01b"),
    ]
)
PROPERTIES = st.one_of(
    st.lists(PARTS, max_size=5).map(b"\x02".join),
    st.binary(max_size=20),
    st.sampled_from([b"".join(b"%d\x01v\x02" % number for number in range(count)) for count in (64, 65, 200)]),
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["t"] * 8 + ["☃", "x" * 127, "x" * 128]),
    st.binary(max_size=40),
    PROPERTIES,
    flag=st.integers(-(1 << 31), (1 << 31) - 1),
    sys_flag=st.sampled_from([0] * 8 + [1, 0x301, 8]),
    born_ms=st.one_of(st.sampled_from([0, -1, MS_MIN, MS_MIN - 1, MS_MAX, MS_MAX + 1]), I64),
    born_host=st.sampled_from([IPV4] * 9 + [IPV6]),
)
NAMES = st.one_of(
    st.just(DEFAULT), st.just(tuple(COLUMNS)), st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True)
)


def stored(messages: list[Message], *, has_crcs: bool = False) -> bytearray:
    """Return the records of *messages*, one after the other."""
    data = bytearray()
    for number, message in enumerate(messages):
        if has_crcs:
            message.properties = with_room_for_record_crc(message.properties)
        record = bytearray(encode_record(message, number % 3, number, len(data), 1_700_000_000_000 + number, IPV4))
        if has_crcs:
            write_record_crc(record, 0, len(record))
        data += record
    return data


def damaged(data: bytearray, damages: list[tuple[int, int]]) -> bytearray:
    for place, value in damages:
        if place < len(data):
            data[place] = value
    return data


DAMAGES = st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=3)


@given(st.lists(MESSAGES, max_size=6), st.integers(0, 2000), DAMAGES, st.booleans())
def test_records_are_found_and_doubted_alike(
    messages: list[Message], size: int, damages: list[tuple[int, int]], has_crcs: bool
) -> None:
    data = damaged(stored(messages, has_crcs=has_crcs)[:size], damages)
    (starts, end), (python_starts, python_end) = kernel_of(record_starts)(data), record_starts(data)
    assert (starts.tolist(), end) == (python_starts.tolist(), python_end)
    assert starts.dtype == python_starts.dtype
    if end == len(data) and (not len(starts) or starts[-1] < end):
        records = Records(data)
        rest = data, records.starts, records.heads
        assert kernel_of(doubtful_records)(*rest) == doubtful_records(*rest)


@given(st.lists(MESSAGES, min_size=1, max_size=12), DAMAGES, NAMES)
def test_records_become_the_same_rows(
    messages: list[Message], damages: list[tuple[int, int]], names: tuple[str, ...]
) -> None:
    data = damaged(stored(messages), damages)
    try:
        records = Records(data)
    except RecordError:
        return
    kernel, python = (_decoder(tuple(names), function) for function in (kernel_of(gather_usual), gather_usual))
    outcomes: list[Any] = []
    for decoder in (kernel, python):
        try:
            batch = _decoded(decoder, records)
            batch.validate(full=True)
            outcomes.append((batch.to_pylist(), batch.schema, decoder.undecoded))
        except RecordError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def _decoder(names: tuple[str, ...], function: Any) -> Decoder:
    decoder = Decoder(names, "null")
    decoder._gather_usual = function
    return decoder


def _decoded(decoder: Decoder, records: Records) -> Any:
    """Decode *records* at once, even if there are only a few."""
    count = -(-VECTOR_MIN // len(records))
    starts = [start + at for at in range(0, count * len(records.data), len(records.data)) for start in records.starts]
    return decoder.decode(Records(bytearray(records.data) * count, starts), "broker-a")


def test_the_kernel_takes_all_usual_records_at_once() -> None:
    properties = b"KEYS\x01k\x02TAGS\x01a\x02UNIQ_KEY\x01U\x02WAIT\x01true\x02"
    messages = [Message("t", b"body", properties, born_host=IPV4) for _ in range(10)]
    messages[3].properties = b""
    records = Records(stored(messages))
    rest = tuple(COLUMNS), Decoder(tuple(COLUMNS)).schema, "b", (MS_MIN, MS_MAX)
    results = [
        function(records.data, records.starts, records.heads, *rest)
        for function in (kernel_of(gather_usual), gather_usual)
    ]
    for columns, odd in results:
        assert len(odd) == 0
        assert pa.RecordBatch.from_arrays(columns, schema=rest[1]).num_rows == 10
    assert results[0][0] == results[1][0]


@given(st.binary(max_size=300).map(bytearray), st.lists(st.integers(-5, 400), max_size=4))
def test_any_bytes_at_any_places_become_no_rows_or_odd_ones(data: bytearray, starts: list[int]) -> None:
    places = np.array(starts, np.int64)
    columns, odd = kernel_of(gather_usual)(
        data, places, None, ("body", "properties"), Decoder(("body", "properties")).schema, "b", (MS_MIN, MS_MAX)
    )
    assert len(columns[0]) == len(columns[1]) == len(starts) - len(odd)
    assert set(kernel_of(doubtful_records)(data, places, None)) <= set(starts)
    assert kernel_of(record_starts)(data)[0].tolist() == record_starts(data)[0].tolist()


def test_a_body_of_an_impossible_length_is_doubted() -> None:
    for length in (-1, 1 << 30):
        data = stored([Message("t", b"body", b"a\x01b", born_host=IPV4)] * 2)
        data[HEAD_BYTES - 4 : HEAD_BYTES] = length.to_bytes(4, "big", signed=True)
        records = Records(data)
        for function in (kernel_of(doubtful_records), doubtful_records):
            assert function(records.data, records.starts, records.heads) == [0]


def test_a_record_crc_is_doubted_whichever_bit_of_its_name_is_flipped() -> None:
    whole = stored([Message("t", b"body", b"a\x01b\x02", born_host=IPV4)], has_crcs=True)
    for bit in range(9 * 8):
        data = bytearray(whole)
        data[len(data) - 20 + bit // 8] ^= 1 << bit % 8
        records = Records(data)
        for function in (kernel_of(doubtful_records), doubtful_records):
            assert function(records.data, records.starts, records.heads) == [0]


def test_a_record_that_ends_like_one_with_a_record_crc_is_not_doubted() -> None:
    records = Records(stored([Message("t", b"body", b"CONTENT_TYPE\x01text/plain\x02", born_host=IPV4)] * 2))
    for function in (kernel_of(doubtful_records), doubtful_records):
        assert function(records.data, records.starts, records.heads) == []
