"""Where a group of records ends, and what is no group: each damage to its bytes, each cut, each kind of record."""

from collections.abc import Iterator
from struct import pack_into
from typing import Final

import pytest
from tests.store.test_atomic_groups import CONFIG, flush, open_on, put

from martlet.records.codec import encode_filler, encode_record, with_room_for_record_crc, write_record_crc
from martlet.records.layout import (
    BODY_CRC_AT,
    FILLER_BYTES,
    HEAD_BYTES,
    MAGIC_AT,
    POSITION_AT,
    SYS_FLAG_AT,
    RecordView,
    part_offsets,
)
from martlet.store.format import atomic
from martlet.store.format.atomic import MARK_AT, TORN, group_marks, lacks_magic, may_begin_at, valid_after, whole_group
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, message

BASE: Final = 4096  # the log position of the bytes
BEFORE: Final = 100  # bytes before the group
WIDE_HOST: Final = bytes(range(1, 17)) + HOST[-4:]
BODIES: Final = (b"", b"x" * 300, b"last")
KINDS: Final = ("usual", "wide hosts", "long topic", "record CRC")


def record(body: bytes, at: int, mark: int, kind: str) -> bytes:
    topic = "T" * 200 if kind == "long topic" else "T"
    made = message(body, topic, "tag", "key", "unique")
    if kind == "record CRC":
        made.properties = with_room_for_record_crc(made.properties)
    host = WIDE_HOST if kind == "wide hosts" else HOST
    data = bytearray(encode_record(made, 1, 2, BASE + at, 3, host))
    data[MARK_AT] |= mark
    if kind == "record CRC":
        write_record_crc(data, 0, len(data))
    return bytes(data)


def group(kind: str, marks: list[int] | None = None) -> tuple[bytes, list[int]]:
    """The bytes of a group after `BEFORE` others, and where each record ends."""
    data, ends = b"\xff" * BEFORE, []
    for body, mark in zip(BODIES, marks or group_marks(len(BODIES)), strict=True):
        data += record(body, len(data), mark, kind)
        ends.append(len(data))
    return data, ends


def found(data: bytes, room: int = 1 << 20) -> int:
    return whole_group(data, BEFORE, room, BASE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_group_ends_after_its_last_record(kind: str) -> None:
    data, ends = group(kind)
    assert found(data) == found(data + data) == found(data, len(data)) == ends[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_whose_bytes_are_not_all_here_is_undecided(kind: str) -> None:
    data, _ = group(kind)
    for cut in range(BEFORE, len(data)):
        assert found(data[:cut]) == 0, cut


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_was_written_in_part_is_torn(kind: str) -> None:
    data, _ = group(kind)
    for cut in range(BEFORE, len(data)):
        assert found(data[:cut] + bytes(len(data) - cut + 200)) == TORN, cut


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(3))
def test_a_group_with_a_damaged_record_is_torn(kind: str, number: int) -> None:
    data, ends = group(kind)
    start = [BEFORE, *ends][number]
    view = RecordView(data, start)
    parts = part_offsets(data, start, ends[number], view.magic, view.sys_flag)
    assert parts is not None
    body_at, topic_at, _ = parts
    places = [*range(start + MAGIC_AT, start + BODY_CRC_AT), *range(start + POSITION_AT, start + SYS_FLAG_AT)]
    if body := BODIES[number]:
        places += [*range(start + BODY_CRC_AT + 1, start + BODY_CRC_AT + 4), body_at, body_at + len(body) - 1]
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        assert found(bytes(damaged)) == TORN, at - start
    for at in range(topic_at, ends[number]):  # of topic and properties, a page that was not written reads as zeros
        damaged = bytearray(data)
        damaged[at] = 0
        if damaged == data:
            continue  # a byte of a length
        assert found(bytes(damaged)) == TORN, at - start


@pytest.mark.parametrize("body_bytes", [-1, -300, 301, 5000, 1 << 30])
def test_a_wrong_length_of_a_body_tears_the_group(body_bytes: int) -> None:
    data, ends = group("usual")
    damaged = bytearray(data)
    pack_into(">i", damaged, ends[0] + HEAD_BYTES - 4, body_bytes)
    assert found(bytes(damaged)) == TORN


def test_a_record_outside_follows_where_rocketmq_copied_the_mark() -> None:
    for number in (1, 2):
        marks = group_marks(3)
        marks[number:] = [0] * (3 - number)
        data, ends = group("usual", marks)
        assert found(data) == ends[number - 1]
    marks = group_marks(3)
    marks[2] = atomic.FIRST
    data, ends = group("usual", marks)
    assert found(data) == ends[1]


def test_the_end_of_a_segment_ends_what_is_no_group() -> None:
    data, ends = group("usual", [atomic.FIRST, atomic.INNER, atomic.INNER])
    end = ends[-1]
    for rest in (0, FILLER_BYTES - 1):
        assert found(data + bytes(rest), end + rest) == end
    for rest in (FILLER_BYTES, 50, 89, 90, 91, 400):
        filler = encode_filler(rest)
        assert found(data + filler + bytes(rest - len(filler)), end + rest) == end, rest
        assert found(data + bytes(rest), end + rest) == TORN, rest
    assert found(data + encode_filler(400) + bytes(300), end + 300) == TORN  # it would end after the segment


def test_a_record_that_crosses_the_end_of_the_segment_tears_the_group() -> None:
    data, _ = group("usual")
    assert found(data, len(data) - 1) == TORN


def starts() -> Iterator[tuple[str, int, tuple[int, ...]]]:
    yield "plain", 0, (5,)
    yield "pair", 1, (0, 0)
    yield "plain", 2, (40,)
    yield "long", 3, (700, 20, 900, 3, 5)
    yield "plain", 4, (1,)


@pytest.mark.parametrize("block_bytes", [64, 300, 1000, 1 << 22])
async def test_a_search_finds_the_next_record_that_a_scan_may_begin_with(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "BLOCK_BYTES", block_bytes)
    disk = FakeDisk()
    store = await open_on(disk, CONFIG)
    every: list[int] = []
    allowed: list[int] = []
    for name, number, sizes in starts():
        placed = put(store, f"{name}{number}", *sizes) if len(sizes) > 1 else [store.writer.append(message(name), 0)]
        every += [each.position for each in placed]
        allowed.append(placed[0].position)
    flush(store)
    segments = store.segments
    (segment,) = segments.items
    for wanted, groups_from in ((every, atomic.NOWHERE), (allowed, 0)):
        for position in range(-1, store.appended):
            expected = next((each for each in wanted if each > position), -1)
            assert valid_after(segments, position, groups_from) == expected, position
    assert [each for each in every if may_begin_at(segments, segment, each)] == allowed
    parts: list[int] = []
    assert valid_after(segments, allowed[3], 0, parts.append) == allowed[4]
    assert parts == [each for each in every if allowed[3] < each < allowed[4]]
    store.crash()


@pytest.mark.parametrize("block_bytes", [64, 1 << 22])
async def test_only_a_whole_group_lacks_nothing_but_its_magic(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "BLOCK_BYTES", block_bytes)
    disk = FakeDisk()
    store = await open_on(disk, CONFIG)
    start = store.writer.append(message("plain"), 0)
    placed = put(store, "group", 700, 20, 900)
    flush(store)
    (segment,) = store.segments.items
    data = disk.files[segment.path].data
    begin = placed[0].position

    def lacks(position: int = begin) -> bool:
        return lacks_magic(store.segments, segment, position)

    assert not lacks()
    magic = data[begin + MAGIC_AT]
    data[begin + MAGIC_AT] = 0
    assert lacks()
    data[start.position + MAGIC_AT] = 0
    assert not lacks(start.position)
    for at in (begin + MAGIC_AT + 1, begin + MAGIC_AT + 2, begin + HEAD_BYTES, placed[-1].end - 1):
        before, data[at] = data[at], 0
        assert not lacks(), at
        data[at] = before
    assert lacks()
    data[begin + MAGIC_AT] = magic ^ 1
    assert not lacks()
    assert not lacks(segment.end - MARK_AT)
    store.crash()
