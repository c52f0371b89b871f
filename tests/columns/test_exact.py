"""Records become an exact table and come back byte for byte, whatever their kind."""

import io
import zlib
from typing import Any

import lz4.frame
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from martlet.message import Message
from martlet.records.codec import body_crc, with_room_for_record_crc
from martlet.records.compression import COMPRESSED, COMPRESSION_LZ4, COMPRESSION_ZSTD
from martlet.records.layout import BORN_V6, HEAD_BYTES, MAGIC_V1, PREPARED, ROLLBACK, SYS_FLAG_AT
from martlet_columns import exact
from martlet_columns.decode import RAW, VECTOR_MIN, Decoder
from martlet_columns.errors import RecordError
from martlet_columns.exact import ExactDecoder
from martlet_columns.rebuild import rebuild
from martlet_columns.records import Records
from martlet_columns.schema import COLUMNS, RECORD_COLUMNS, exact_schema

from .kinds import DELAYS, IPV6, LIGHT, stored_records
from .stored import HOST, records, stored, usual

KINDS = st.lists(stored_records(), min_size=1, max_size=5)
RAW_COLUMNS = ["_properties", "_body", "_record"]
USUAL = bytes(stored([usual(number, b"usual") for number in range(VECTOR_MIN)]))


def exact_table(found: Records, broker: str = "broker-a") -> pa.Table:
    batches = list(ExactDecoder().batches(found, broker))
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, exact_schema())


def through_parquet(table: pa.Table, row_group_size: int = 5) -> pa.Table:
    file = io.BytesIO()
    pq.write_table(
        table, file, compression="zstd", row_group_size=row_group_size, use_dictionary=["topic", "_born_host"]
    )
    return pq.read_table(io.BytesIO(file.getvalue()))


def raw_columns(table: pa.Table) -> list[set[str]]:
    """The columns of each row that are kept raw."""
    return [{name for name in RAW_COLUMNS if row[name] is not None} for row in table.select(RAW_COLUMNS).to_pylist()]


def message(**fields: Any) -> Message:
    """A usual message but for *fields*."""
    found = usual(7)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


# What is kept raw of a record of each kind.
RAW_BY_KIND: dict[str, tuple[Message, set[str]]] = {
    "usual": (message(), set()),
    "empty": (message(body=b"", properties=b""), set()),
    "flag and tries": (message(flag=-5, reconsume_times=3), set()),
    "IPv6 client": (message(born_host=IPV6), set()),
    "long topic": (message(topic="t" * 200), set()),
    "prepared": (message(sys_flag=PREPARED), set()),
    "rolled back": (message(sys_flag=ROLLBACK, prepared_position=1 << 40), set()),
    "record CRC": (message(properties=with_room_for_record_crc(b"TAGS\x01a\x02")), set()),
    "light queues": (message(properties=LIGHT), set()),
    "delay": (message(properties=DELAYS), set()),
    "ZLIB": (message(body=zlib.compress(b"body"), sys_flag=COMPRESSED), {"_body"}),
    "LZ4": (message(body=lz4.frame.compress(b"body"), sys_flag=COMPRESSED | COMPRESSION_LZ4), {"_body"}),
    "ZSTD": (message(body=zstandard.compress(b"body"), sys_flag=COMPRESSED | COMPRESSION_ZSTD), {"_body"}),
    "ZLIB that is none": (message(body=b"body", sys_flag=COMPRESSED), {"_properties"}),
    "no last separator": (message(properties=b"TAGS\x01a"), {"_properties"}),
    "repeated name": (message(properties=b"a\x01b\x02a\x01c\x02"), {"_properties"}),
    "empty value": (message(properties=b"a\x01\x02"), {"_properties"}),
    "not UTF-8": (message(properties=b"a\x01\xff\x02"), {"_properties"}),
    "both": (message(body=zlib.compress(b"body"), sys_flag=COMPRESSED, properties=b"a"), {"_body", "_properties"}),
    "impossible time": (message(born_ms=1 << 62), {"_record"}),
}


@pytest.mark.parametrize("kind", RAW_BY_KIND)
@pytest.mark.parametrize("every", [1, 5])
def test_only_what_columns_cannot_express_is_kept_raw(kind: str, every: int) -> None:
    odd, expected = RAW_BY_KIND[kind]
    parts = [odd if number % every == 0 else usual(number) for number in range(VECTOR_MIN * 2)]
    found = records(parts, first=9, store_host=IPV6 if kind == "IPv6 client" else HOST)
    table = exact_table(found)
    assert raw_columns(table) == [expected if number % every == 0 else set() for number in range(len(parts))]
    assert bytes(rebuild(through_parquet(table, 50)).data) == bytes(found.data)


@pytest.mark.parametrize("bits", [0, 1, 2, 3])
def test_places_in_atomic_groups_come_back(bits: int) -> None:
    data = stored([usual(number) for number in range(3)])
    data[SYS_FLAG_AT] |= bits << 5
    assert bytes(rebuild(exact_table(Records(data))).data) == data


def test_a_table_has_the_fields_of_its_records() -> None:
    odd = message(sys_flag=COMPRESSED, body=zlib.compress(b"plain"), properties=b"TAGS\x01a", born_host=IPV6)
    odd.prepared_position = 77
    row = exact_table(records([odd])).to_pylist()[0]
    assert {name: row[name] for name in RECORD_COLUMNS} == {
        "_position": 1 << 33,
        "_sys_flag": COMPRESSED | BORN_V6,
        "_magic": MAGIC_V1 - (1 << 32),
        "_body_crc": body_crc(odd.body),
        "_prepared_position": 77,
        "_born_host": IPV6,
        "_store_host": HOST,
        "_properties": b"TAGS\x01a",
        "_body": odd.body,
        "_record": None,
    }
    assert row["body"] == b"plain"


@given(KINDS, st.booleans())
def test_records_of_any_kind_come_back_byte_for_byte(parts: list[bytes], among_usual: bool) -> None:
    data = bytearray(b"".join(parts) + (USUAL if among_usual else b""))
    table = exact_table(Records(data))
    assert bytes(rebuild(table).data) == data
    again = rebuild(through_parquet(table))
    assert bytes(again.data) == data
    assert again.starts.tolist() == Records(data).starts.tolist()


@given(KINDS)
def test_columns_are_those_of_an_archive(parts: list[bytes]) -> None:
    data = bytearray(b"".join(parts) + USUAL)
    shown = Decoder(tuple(COLUMNS), RAW).decode(Records(data), "broker-a")
    assert exact_table(Records(data)).select(list(COLUMNS)).to_pylist() == shown.to_pylist()


@given(KINDS, st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_records_come_back_as_they_are(parts: list[bytes], damages: list[tuple[int, int]]) -> None:
    data = bytearray(b"".join(parts) + USUAL)
    for place, value in damages:
        data[place % len(data)] = value
    try:
        found = Records(data)
    except RecordError:
        return  # the records cannot be told apart
    assert bytes(rebuild(through_parquet(exact_table(found))).data) == data


def test_a_record_whose_parts_do_not_add_up_shows_its_numbers() -> None:
    data = stored([usual(number) for number in range(VECTOR_MIN)], first=5)
    data[HEAD_BYTES - 4 : HEAD_BYTES] = b"\x7f\xff\xff\xff"
    table = exact_table(Records(data))
    row = table.to_pylist()[0]
    assert (row["topic"], row["queue"], row["offset"], row["body"], row["properties"]) == ("", 3, 5, b"", [])
    assert raw_columns(table)[:2] == [{"_record"}, set()]
    assert bytes(rebuild(table).data) == data


def test_a_topic_that_is_no_utf_8_is_shown_with_a_replacement() -> None:
    data = stored([usual(0)])
    data[data.index(b"Orders")] = 0xFF
    table = exact_table(Records(data))
    assert table.column("topic").to_pylist() == ["\ufffdrders"]
    assert bytes(rebuild(table).data) == data


def test_no_records_are_an_empty_table() -> None:
    table = exact_table(Records(bytearray()))
    assert table.num_rows == 0
    assert len(rebuild(table)) == 0
    assert len(rebuild(exact_schema().empty_table())) == 0


def test_bodies_that_decompress_to_very_much_are_divided_among_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "PLAIN_BYTES_MAX", 2500)
    bomb = message(body=zlib.compress(bytes(1000)), sys_flag=COMPRESSED)
    found = records([usual(number) if number % 50 else bomb for number in range(400)])
    batches = list(ExactDecoder().batches(found, "b"))
    assert len(batches) == 4
    assert bytes(rebuild(pa.Table.from_batches(batches)).data) == bytes(found.data)
    huge = records([message(body=zlib.compress(bytes(3000)), sys_flag=COMPRESSED)] * 2)
    assert [batch.num_rows for batch in ExactDecoder().batches(huge, "b")] == [1, 1]


def test_rows_do_not_change_with_the_memory_of_their_records() -> None:
    odd = message(properties=b"a", born_ms=1 << 62)
    found = records([usual(number) if number % 9 else odd for number in range(VECTOR_MIN * 2)])
    before, table = bytes(found.data), exact_table(found)
    found.data[:] = bytes(len(found.data))
    assert bytes(rebuild(table).data) == before


def test_too_many_bytes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "BYTES_MAX", 200)
    with pytest.raises(ValueError, match=r"\d+ bytes of records are more than 200; give fewer at a time"):
        next(ExactDecoder().batches(records([usual(number) for number in range(5)]), "b"))


def test_records_that_are_not_neighbours_are_found_by_their_starts() -> None:
    found = records([usual(number) for number in range(5)])
    some = Records(found.data, found.starts[[0, 3]].tolist())
    again = rebuild(exact_table(some))
    assert again.heads["offset"].tolist() == [0, 3]
    assert bytes(again.data) == b"".join(
        bytes(found.data[s:e]) for s, e in zip(found.starts[[0, 3]], found.starts[[1, 4]], strict=True)
    )


def test_rows_are_rebuilt_in_the_order_of_the_table_and_from_any_part_of_it() -> None:
    found = records([usual(number) if number % 3 else message(properties=b"a") for number in range(30)])
    table = exact_table(found)
    order = [29, 3, 3, 0]
    assert rebuild(table.take(order)).heads["offset"].tolist() == order
    part = rebuild(table.slice(7, 9))
    assert bytes(part.data) == bytes(found.data[found.starts[7] : found.starts[16]])
    chunks = pa.concat_tables([table.slice(20), table.slice(0, 0), table.slice(0, 20)])
    assert rebuild(chunks).heads["offset"].tolist() == [*range(20, 30), *range(20)]


def test_other_columns_and_another_order_do_not_matter() -> None:
    found = records([usual(number) for number in range(5)])
    table = exact_table(found)
    other = table.select(table.schema.names[::-1]).append_column("date", pa.nulls(5, pa.date32()))
    assert bytes(rebuild(other).data) == bytes(found.data)


def test_a_table_that_lacks_a_column_is_refused() -> None:
    table = exact_table(records([usual(0)])).drop_columns(["_position", "body"])
    with pytest.raises(RecordError, match="the table lacks the columns _position, body; records cannot be made of it"):
        rebuild(table)


@pytest.mark.parametrize("name", ["topic", "offset", "body", "properties", "store_ts", "_magic", "_born_host"])
def test_a_row_that_lacks_a_value_is_refused(name: str) -> None:
    table = exact_table(records([usual(number) for number in range(3)]))
    at = table.schema.get_field_index(name)
    column = pc.if_else(pa.array([True, False, True]), table.column(name), pa.scalar(None, table.schema.field(at).type))
    broken = table.set_column(at, table.schema.field(at), column)
    with pytest.raises(RecordError, match=f"the row of message .* has null in {name}; a record cannot be made of it"):
        rebuild(broken)


def test_a_defect_of_the_rebuilding_is_found_before_a_batch_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "record_array", lambda batch: pa.array([b"other"] * len(batch), pa.binary()))
    with pytest.raises(RecordError, match="row 0 does not give its record again; report this defect"):
        next(ExactDecoder().batches(records([usual(0)]), "b"))
