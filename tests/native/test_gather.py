"""The kernel selects entries and gathers their records as Python does."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.message import Message
from martlet.records.codec import encode_record, with_room_for_record_crc, write_record_crc
from martlet.records.layout import BLANK_SIZE, ENTRY, Buffer
from martlet.store.disk.page_cache import Page
from martlet.store.queues.queues import Queue
from martlet.store.read.gather import count_intact, gather_records, select_entries

CODES = st.one_of(st.integers(-3, 3), st.integers(-(1 << 63), (1 << 63) - 1))
ENTRIES = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 99), CODES), max_size=40)
# Distance from the end of the record before, and size: adjacent records, gaps, overlaps, blank entries.
STEPS = st.tuples(
    st.one_of(st.just(0), st.integers(0, 9), st.sampled_from([-1, -50, 1 << 32, -(1 << 32), 1 << 62])),
    st.one_of(st.integers(1, 30), st.sampled_from([0, -1, BLANK_SIZE, BLANK_SIZE - 1, -(1 << 31)])),
)
# The second lies across the end of 4 GiB.
BASES = st.sampled_from([0, (1 << 32) - 50, 1 << 40])


def encode(steps: list[tuple[int, int]], position: int) -> bytes:
    """Return entries whose records begin at *position*; each step follows the record before."""
    entries = b""
    for distance, size in steps:
        position = min(max(position + distance, -(1 << 63)), (1 << 63) - (1 << 32))
        entries += ENTRY.pack(position, size, 7)
        position += size
    return entries


@given(ENTRIES, st.frozensets(CODES, max_size=12), st.integers(1, 12))
def test_the_kernel_selects_the_entries_that_python_selects(
    entries: list[tuple[int, int, int]], codes: frozenset[int], count_max: int
) -> None:
    data = b"".join([ENTRY.pack(*entry) for entry in entries])
    assert kernel_of(select_entries)(data, codes, count_max) == select_entries(data, codes, count_max)


@given(
    st.lists(STEPS, max_size=30),
    st.integers(-3, 20),
    BASES,
    st.integers(0, 12),
    st.integers(0, 40),
    st.integers(-5, 400),
    st.booleans(),
)
@example([], 0, 0, 0, 9, 9, True)
@example([(0, 10), (0, 10), (5, 10)], 0, 0, 0, 3, 100, False)
@example([(0, 50), (0, 40)], 0, (1 << 32) - 50, 0, 2, 300, False)
def test_the_kernel_gathers_the_records_that_python_gathers(
    steps: list[tuple[int, int]], start: int, base: int, first: int, end: int, bytes_max: int, is_final: bool
) -> None:
    entries, data = encode(steps, base + start), bytes(range(200))
    page = Page(base, data if is_final else bytearray(data), True)

    def gather(function: Any) -> tuple[list[bytes], list[type[Buffer]], tuple[int, int]]:
        pieces: list[Buffer] = [b"before"]
        answer = function(entries, first, end, bytes_max, page, pieces)
        return [bytes(piece) for piece in pieces], [type(piece) for piece in pieces], answer

    assert gather(kernel_of(gather_records)) == gather(gather_records)


def test_adjacent_records_are_a_view_of_the_page_and_others_a_copy() -> None:
    page = Page(100, bytes(range(50)), True)
    for function in gather_records, kernel_of(gather_records):
        pieces: list[Buffer] = []
        assert function(encode([(0, 10), (0, 10)], 110), 0, 2, 99, page, pieces) == (2, 20)
        assert function(encode([(0, 10), (5, 10)], 110), 0, 2, 99, page, pieces) == (2, 20)
        view, copy = pieces
        assert isinstance(view, memoryview)
        assert (view.obj is page.data, bytes(view)) == (True, bytes(range(10, 30)))
        assert copy == bytes(range(10, 20)) + bytes(range(25, 35))


IPV4, IPV6 = b"\x7f\0\0\x01\0\0\x30\x39", bytes(range(20))
PROPERTIES = st.sampled_from([b"", b"TAGS\x01a\x02", with_room_for_record_crc(b"TAGS\x01a\x02"), b"a\x01\0"])
RECORDS = st.tuples(
    st.sampled_from(["t", "t", "t", "t", "u", "x" * 200]),
    st.binary(max_size=9),
    PROPERTIES,
    st.sampled_from([IPV4, IPV4, IPV4, IPV6]),
    st.sampled_from([0, 0, 0, 1]),
)
# The byte that is changed, and by what.
DAMAGE = st.one_of(st.none(), st.none(), st.tuples(st.integers(0, 500), st.integers(1, 255)))


@given(
    st.lists(RECORDS, max_size=5),
    DAMAGE,
    st.sampled_from([0, 1 << 40]),
    st.integers(0, 3),
    st.integers(0, 6),
    st.one_of(st.just(1 << 20), st.integers(-5, 600)),
    st.booleans(),
    st.integers(0, 30),
)
def test_the_kernel_finds_intact_records_that_python_finds(
    records: list[tuple[str, bytes, bytes, bytes, int]],
    damage: tuple[int, int] | None,
    base: int,
    first: int,
    end: int,
    bytes_max: int,
    has_gaps: bool,
    cut: int,
) -> None:
    data, entries, queue, is_usual = bytearray(), b"", Queue("t", 3), True
    indexes = [2 * i + 1 for i in range(len(records))] if has_gaps else range(len(records))
    for index, (topic, body, properties, host, odd) in zip(indexes, records, strict=True):
        message, position = Message(topic, body, properties, 3, born_host=host), base + len(data)
        record = bytearray(encode_record(message, 3 + odd, 70 + index, position, 5, IPV4))
        if b"__CRC32#" in properties:
            write_record_crc(record, 0, len(record))
        entries += ENTRY.pack(position, len(record), 7)
        is_usual = is_usual and host == IPV4
        data += record
    if damage is not None and data:
        data[damage[0] % len(data)] ^= damage[1]
    page = Page(base, bytes(data[: len(data) - cut]), False)
    arguments = entries, first, end, bytes_max, page, queue, 70, indexes
    python, kernel = count_intact(*arguments), kernel_of(count_intact)(*arguments)
    assert kernel == python if is_usual else kernel <= python
