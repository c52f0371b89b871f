"""A file of the cold tier gives its records back byte for byte, and says by itself what is in it."""

import zlib
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.columns.kinds import stored_records
from tests.columns.stored import records, usual

from martlet.message import Message, encode_properties, find_property
from martlet.records.codec import encode_record, key_hash
from martlet.records.layout import RecordView
from martlet_columns.rebuild import rebuild
from martlet_columns.records import Records
from martlet_tiered.errors import ObjectDamaged
from martlet_tiered.format import footer as footers
from martlet_tiered.format import writing
from martlet_tiered.format.fields import store_times, topics_of
from martlet_tiered.format.footer import (
    FileFooter,
    Span,
    decode_group,
    footer_of,
    group_range,
    read_footer,
    read_metadata,
)
from martlet_tiered.format.keys import decode_keys, encode_keys, key_hashes, keys_name
from martlet_tiered.format.writing import EncodedFile, group_ends, pieces_of, write_file
from martlet_tiered.local import LocalObjects
from martlet_tiered.names import DataName

NAME: Final = DataName("2026-11-28", "topic", 3, 0, 1 << 40)
HOST: Final = bytes((127, 0, 0, 1, 0, 0, 0x2A, 0x9F))
NOW_MS: Final = 1_700_000_000_000
KINDS: Final = st.lists(stored_records(), min_size=1, max_size=8)


class Memory:
    """Objects of which only ranges are read; counts the requests."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.requests = 0

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        self.requests += 1
        assert 0 <= begin < end <= len(self.data)
        return self.data[begin:end]


def message(topic: str, number: int, body: bytes = b"body", **properties: str) -> Message:
    found = usual(number, body)
    found.topic = topic
    found.properties = encode_properties({"UNIQ_KEY": f"7F{number:030X}", "KEYS": f"key-{number} both", **properties})
    return found


def log(*messages: tuple[Message, int, int]) -> Records:
    """The records of messages, each with its queue and offset, at positions from 1000 on."""
    data = bytearray()
    for number, (each, queue, offset) in enumerate(messages):
        data += encode_record(each, queue, offset, 1000 + len(data), NOW_MS + number, HOST)
    return Records(data)


def many(count: int, topics: int = 3, body: bytes = b"x" * 50) -> Records:
    places = [(number % topics, number // topics) for number in range(count)]
    return log(
        *[
            (message(f"T{topic}", number, body), offset % 2, offset // 2)
            for number, (topic, offset) in enumerate(places)
        ]
    )


def small_groups(monkeypatch: pytest.MonkeyPatch, full: int = 4000, least: int = 500) -> None:
    monkeypatch.setattr(writing, "GROUP_BYTES", full)
    monkeypatch.setattr(writing, "GROUP_BYTES_MIN", least)
    monkeypatch.setattr(writing, "PIECE_BYTES", 1000)


def sorted_records(found: Records) -> list[bytes]:
    each = [
        bytes(found.data[start : start + size]) for start, size in zip(found.starts, found.heads["size"], strict=True)
    ]
    views = [RecordView(data) for data in each]
    keys = [(view.topic.encode(), view.queue_id, view.queue_offset, view.position) for view in views]
    return [each[number] for number in sorted(range(len(each)), key=lambda number: keys[number])]


def opened(written: EncodedFile) -> tuple[pq.FileMetaData, FileFooter]:
    metadata = read_metadata(Memory(bytes(written.data)), "f", len(written.data))
    footer = footer_of(metadata)
    assert footer is not None
    return metadata, footer


def read_groups(written: EncodedFile) -> list[Records]:
    """Rebuild each row group from its bytes alone."""
    metadata, footer = opened(written)
    found = []
    for number, group in enumerate(footer.groups):
        assert group_range(metadata, number) == (group.begin, group.end)
        rows = decode_group(metadata, number, group.begin, bytes(written.data[group.begin : group.end]))
        rebuilt = rebuild(rows)
        assert (len(rebuilt), len(rebuilt.data), zlib.crc32(rebuilt.data)) == (group.count, group.bytes, group.crc)
        found.append(rebuilt)
    return found


@given(KINDS)
def test_records_of_any_kind_come_back_from_their_row_groups(parts: list[bytes]) -> None:
    found = Records(bytearray(b"".join(parts)))
    written = write_file(NAME, "broker-a", found, NOW_MS)
    assert b"".join(bytes(each.data) for each in read_groups(written)) == b"".join(sorted_records(found))


@given(KINDS)
def test_times_and_topics_of_records_of_any_kind_are_found(parts: list[bytes]) -> None:
    found = Records(bytearray(b"".join(parts)))
    views = [RecordView(found.data, start) for start in found.starts.tolist()]
    assert store_times(found).tolist() == [view.store_ms for view in views]
    assert topics_of(found).to_pylist() == [view.topic_bytes for view in views]


@given(KINDS)
def test_spans_say_where_the_queues_are(parts: list[bytes]) -> None:
    found = Records(bytearray(b"".join(parts)))
    written = write_file(NAME, "broker-a", found, NOW_MS)
    whole = [RecordView(data) for data in sorted_records(found)]
    row = 0
    for span in opened(written)[1].spans:
        rows = whole[row : row + span.count]
        times, positions = [each.store_ms for each in rows], [each.position for each in rows]
        crc = zlib.crc32(b"".join(bytes(each.buffer) for each in rows))
        assert {(each.topic, each.queue_id) for each in rows} == {(span.topic, span.queue)}
        assert span == Span(
            *(span.topic, span.queue, rows[0].queue_offset, rows[-1].queue_offset, row, len(rows)),
            *(min(times), max(times), min(positions), max(positions), crc),
        )
        row += span.count
    assert row == len(whole)


def test_a_footer_names_the_range_and_its_writer() -> None:
    footer = opened(write_file(NAME, "broker-a", many(10), NOW_MS))[1]
    assert (footer.version, footer.broker, footer.epoch, footer.begin, footer.end) == (1, "broker-a", 3, 0, 1 << 40)
    assert [(span.topic, span.queue, span.first, span.last) for span in footer.spans] == [
        ("T0", 0, 0, 1),
        ("T0", 1, 0, 1),
        ("T1", 0, 0, 1),
        ("T1", 1, 0, 0),
        ("T2", 0, 0, 1),
        ("T2", 1, 0, 0),
    ]


def test_a_span_has_holes() -> None:
    found = log(*[(message("T", number), 1, offset) for number, offset in enumerate((3, 4, 9))])
    (span,) = opened(write_file(NAME, "b", found, NOW_MS))[1].spans
    assert (span.first, span.last, span.count) == (3, 9, 3)


def test_row_groups_end_when_full_and_at_a_change_of_the_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    small_groups(monkeypatch, 100, 30)
    topics = np.array([0, 0, 1, 1, 1, 2, 3, 3, 3])
    assert group_ends(topics, np.array([10, 10, 10, 10, 10, 10, 10, 10, 10])) == [5, 9]
    assert group_ends(topics, np.array([30, 10, 10, 10, 10, 10, 90, 9, 10])) == [2, 5, 7, 9]
    assert group_ends(topics, np.array([500] * 9)) == list(range(1, 10))
    assert group_ends(topics[:0], topics[:0]) == []


def test_pieces_are_bounded_in_bytes_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PIECE_BYTES", 100)
    monkeypatch.setattr(writing, "PIECE_RECORDS", 3)
    assert pieces_of(np.array([10, 10, 10, 10, 95, 10, 300, 1])) == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]
    assert pieces_of(np.array([], np.int64)) == []


def test_a_file_of_many_row_groups_is_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small_groups(monkeypatch)
    found = many(300)
    written = write_file(NAME, "b", found, NOW_MS)
    groups = read_groups(written)
    assert len(groups) > 10
    assert b"".join(bytes(each.data) for each in groups) == b"".join(sorted_records(found))
    footer = opened(written)[1]
    assert [group.row for group in footer.groups] == np.cumsum([0, *[group.count for group in footer.groups]])[
        :-1
    ].tolist()


def test_any_program_reads_a_file_and_skips_by_statistics() -> None:
    written = write_file(NAME, "broker-a", many(30), NOW_MS)
    table = pq.read_table(pa.BufferReader(written.data))
    assert table.column("topic").to_pylist() == ["T0"] * 10 + ["T1"] * 10 + ["T2"] * 10
    column = pq.ParquetFile(pa.BufferReader(written.data)).metadata.row_group(0).column(0)
    assert (column.statistics.min, column.statistics.max) == ("T0", "T2")
    assert column.has_offset_index
    assert column.has_column_index
    file = written.file
    assert (file.path, file.rows, file.bytes, file.modified_ms) == (NAME.path, 30, len(written.data), NOW_MS)
    assert (file.minimum["topic"], file.maximum["topic"], file.maximum["offset"]) == ("T0", "T2", 4)
    assert file.minimum["_position"] == 1000


@pytest.mark.parametrize("queues", [3, 3000])
def test_a_footer_is_read_with_one_request_or_two(queues: int) -> None:
    found = log(*[(message(f"topic-{number * 7919 % 100_003}", number), 0, number) for number in range(queues)])
    written = write_file(NAME, "b", found, NOW_MS)
    objects = Memory(bytes(written.data))
    footer = read_footer(objects, "f", len(written.data))  # type: ignore[arg-type]
    assert len(footer.spans) == queues
    assert objects.requests == (1 if queues == 3 else 2)


def test_a_file_of_another_program_has_no_footer(tmp_path: object) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"topic": ["T"]}), sink)
    data = sink.getvalue().to_pybytes()
    assert footer_of(pq.read_metadata(pa.BufferReader(data))) is None
    with pytest.raises(ObjectDamaged, match="'f' was not written by a broker"):
        read_footer(Memory(data), "f", len(data))  # type: ignore[arg-type]


def test_a_damaged_file_is_noticed() -> None:
    data = bytes(write_file(NAME, "b", many(30), NOW_MS).data)
    for bad in (b"", data[:-1], data[:3], data[:-8] + b"\xff\xff\xff\x7fPAR1"):
        with pytest.raises(ObjectDamaged):
            read_footer(Memory(bad), "f", len(bad))  # type: ignore[arg-type]
    text = data.index(b"martlet", len(data) // 2)
    for at in range(text + 20, len(data) - 8, 50):
        bad = data[:at] + bytes((data[at] ^ 4,)) + data[at + 1 :]
        try:
            assert read_footer(Memory(bad), "f", len(bad)) == read_footer(Memory(data), "f", len(data))  # type: ignore[arg-type]
        except ObjectDamaged:
            continue


def test_a_damaged_row_group_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    small_groups(monkeypatch)
    written = write_file(NAME, "b", many(100), NOW_MS)
    metadata, footer = opened(written)
    group = footer.groups[1]
    data = bytes(written.data[group.begin : group.end])
    whole = bytes(rebuild(decode_group(metadata, 1, group.begin, data)).data)
    step = max(len(data) // 200, 1)
    for at in range(0, len(data), step):
        bad = data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :]
        try:
            found = bytes(rebuild(decode_group(metadata, 1, group.begin, bad)).data)
        except ObjectDamaged:
            continue
        assert found == whole, f"byte {at}"
    with pytest.raises(ObjectDamaged):
        decode_group(metadata, 1, group.begin, data[: len(data) // 2])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"1 5 2617509130 AAAA", "cannot be decoded"),
        (b"1 5 1 AAAA", "does not match its CRC"),
        (b"1 5", "cannot be decoded"),
        (b"1 99999999999 2617509130 AAAA", "does not match its CRC"),
        (b"2 5 1 AAAA", "has a footer of version 2, and this program knows 1"),
    ],
)
def test_a_footer_that_cannot_be_decoded_is_refused(text: bytes, error: str) -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"topic": ["T"]}).replace_schema_metadata({footers.FOOTER_KEY: text})
    pq.write_table(table, sink)
    with pytest.raises(ObjectDamaged, match=error):
        footer_of(pq.read_metadata(pa.BufferReader(sink.getvalue())))


# ---- keys


def keys_of(record: RecordView) -> set[int]:
    words = [*find_property(record.properties, b"KEYS").split(b" "), find_property(record.properties, b"UNIQ_KEY")]
    return {key_hash(record.topic, word) for word in words if word}


@given(KINDS)
def test_every_key_of_any_record_is_found(parts: list[bytes]) -> None:
    found = Records(bytearray(b"".join(parts)))
    written = write_file(NAME, "b", found, NOW_MS)
    keys = decode_keys(written.keys)
    for number, group in enumerate(read_groups(written)):
        for start in group.starts.tolist():
            for code in keys_of(RecordView(group.data, start)):
                assert number in keys.groups_of(code)


def test_keys_name_the_row_groups_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    small_groups(monkeypatch)
    written = write_file(NAME, "b", many(200), NOW_MS)
    keys = decode_keys(written.keys)
    for number in range(0, 200, 17):
        code = key_hash(f"T{number % 3}", f"key-{number}".encode())
        assert len(keys.groups_of(code)) == 1
    count = len(opened(written)[1].groups)
    found = {group for topic in ("T0", "T1", "T2") for group in keys.groups_of(key_hash(topic, b"both"))}
    assert found == set(range(count))
    assert keys.groups_of(key_hash("T0", b"nobody has it")) == []


def test_keys_can_be_made_again_from_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    small_groups(monkeypatch)
    found = [*[message("T", number) for number in range(50)], message("T", 51, KEYS="ключ ☃ " + "k" * 300)]
    odd = message("T", 52)
    odd.properties = b"KEYS\x01a\x02KEYS\x01b c\x02"
    written = write_file(NAME, "b", records([*found, odd]), NOW_MS)
    columns = ["topic", "key", "msg_id", "_properties", "_record"]
    file = pq.ParquetFile(pa.BufferReader(written.data))
    groups = [key_hashes(file.read_row_group(number, columns)) for number in range(file.num_row_groups)]
    assert encode_keys(groups) == written.keys
    keys = decode_keys(written.keys)
    for word in ("ключ", "☃", "k" * 300, "b", "c"):
        assert keys.groups_of(key_hash("T", word.encode())), word


@given(st.lists(st.lists(st.integers(0, (1 << 31) - 1), max_size=20), max_size=5))
def test_an_index_of_keys_comes_back(groups: list[list[int]]) -> None:
    found = decode_keys(encode_keys([np.array(each, np.uint32) for each in groups]))
    for code in {code for each in groups for code in each}:
        assert found.groups_of(code) == [number for number, each in enumerate(groups) if code in each]
    assert len(found) == sum(len(set(each)) for each in groups)


def test_a_damaged_index_of_keys_is_refused() -> None:
    data = encode_keys([np.array([1, 2, 3], np.uint32)])
    for at in range(len(data)):
        with pytest.raises(ObjectDamaged):
            decode_keys(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        with pytest.raises(ObjectDamaged):
            decode_keys(data[:at])


def test_files_and_keys_are_stored_as_they_are(tmp_path: object) -> None:
    objects = LocalObjects(str(tmp_path))
    written = write_file(NAME, "b", many(30), NOW_MS)
    objects.create(f"table/{NAME.path}", written.data)
    objects.create(f"table/{NAME.path}", written.data)
    objects.create(keys_name(NAME.path), written.keys)
    assert read_footer(objects, f"table/{NAME.path}", written.file.bytes) == written.footer
    assert objects.read(f"index/{NAME.path}.keys") == written.keys
