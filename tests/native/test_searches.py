"""The kernel finds the texts, numbers and values of properties that the regular expressions find."""

import re
from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.records.codec import encode_filler
from martlet_filter_sql92 import searches
from martlet_filter_sql92.searches import Numbers, Texts, count_names, find_numbers, find_texts
from martlet_filter_sql92.values import PIECE_BYTES, distinct_values, find_values

ENDS = st.sampled_from([b"\x02", b"\x02", b"\x02", b"\x00", b"\x01", b"", b" ", encode_filler(100)[:8]])
MAGIC = st.sampled_from([b"\0\0\1\x2a\xda\xa3\x20\xa7", b"\0\0\1\2\xda\xa3\x20\xab", b"\0\0\1\x2a\xda\xa3\x20\xa8"])
NAMES = st.sampled_from([b"a\x01", b"a\x01", b"aa\x01", b"b\x01", b"\x01", b"a"])
WORDS = st.sampled_from([b"", b"x", b"xa", b"X", b"y.", b"true", b"TRUE", b"7", b"\xc3\xa9", b"a\x01", b"x" * 70])


def parts_of(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Return bytes with names, *values* and what follows values."""
    each = st.tuples(NAMES, values, st.one_of(ENDS, ENDS, MAGIC)).map(b"".join)
    return st.lists(each, max_size=9).map(b"".join)


# What a search finds in each part of some data.
Found = list[object]


def searched(function: Callable[..., object], data: bytes, cut: int, *arguments: object) -> Found:
    """Return what *function* finds in all of *data*, and in parts that *cut* bytes are missing from."""
    parts = (0, len(data)), (min(cut, len(data)), len(data)), (0, max(len(data) - cut, 0))
    return [function(buffer, *part, *arguments) for part in parts for buffer in (data, bytearray(data))]


def by_both(function: Callable[..., object], data: bytes, cut: int, *arguments: object) -> tuple[Found, Found]:
    """Return what the kernel and what Python finds, as `searched`."""
    return searched(kernel_of(function), data, cut, *arguments), searched(function, data, cut, *arguments)


@given(st.binary(max_size=99), st.integers(0, 9))
def test_the_kernel_counts_the_names_that_python_counts(data: bytes, cut: int) -> None:
    native, plain = by_both(count_names, data.replace(b"0", b"\x01"), cut)
    assert native == plain


@given(
    parts_of(WORDS),
    st.integers(0, 9),
    st.lists(WORDS, min_size=1, max_size=4),
    st.sampled_from([b"a\x01", b"a\x01", b"xx"]),
    st.booleans(),
    st.booleans(),
)
@example(b"a\x01xa\x01xa\x01x\x02", 0, [b"x", b"xa"], b"a\x01", True, False)
@example(b"xxxxxx\x02", 1, [b"x"], b"xx", True, False)
def test_the_kernel_finds_the_texts_that_python_finds(
    data: bytes, cut: int, texts: list[bytes], start: bytes, is_whole: bool, ignores_case: bool
) -> None:
    native, plain = by_both(find_texts, data, cut, Texts(start, tuple(texts), is_whole, ignores_case))
    assert native == plain


SIGNS = st.sampled_from(["", "", "", "+", "-", "+-"])
ZEROS = st.sampled_from(["", "", "0", "00", "0" * 63, "0" * 64, "0" * 65])
DIGITS = st.one_of(
    st.integers(0, 130).map(str),
    st.integers(0, 10**19).map(str),
    st.sampled_from(["1" * 64, "1" * 65, "1" * 66, "9" * 20, "10" * 10, ""]),
)
LAST = st.sampled_from(["", "", "", ".5", "e1", "E", ".", "x", "-"])
NUMBERS = st.tuples(SIGNS, ZEROS, DIGITS, LAST).map(lambda parts: "".join(parts).encode())
BOUNDS = st.one_of(st.none(), st.integers(-130, 130), st.integers(-(10**18), 10**18))


@given(parts_of(NUMBERS), st.integers(0, 9), BOUNDS, BOUNDS, st.booleans())
@example(b"a\x01" + b"1" * 20 + b"\x02", 0, None, 10**18, False)
def test_the_kernel_finds_the_numbers_that_python_finds(
    data: bytes, cut: int, low: int | None, high: int | None, is_one: bool
) -> None:
    native, plain = by_both(find_numbers, data, cut, Numbers(b"a\x01", low, low if is_one else high))
    assert native == plain


@given(parts_of(NUMBERS), st.integers(-12, 12), st.integers(-12, 12))
def test_the_kernel_finds_the_small_numbers_that_python_finds(data: bytes, low: int, high: int) -> None:
    data += b"".join(b"a\x01%d\x02" % number for number in range(-12, 13))
    native, plain = by_both(find_numbers, data, 0, Numbers(b"a\x01", low, high))
    assert native == plain


VALUES = st.one_of(WORDS, st.sampled_from([b"7\x00", b"\x00", b"7\x00abc", b"x\x01", b"7\x01y"]))
# What distinct_values can return: a zero byte or a byte 1 is the last byte of a value.
TAKEN = VALUES.map(lambda value: re.split(b"(?<=[\x00\x01])", value)[0])


@given(
    parts_of(VALUES),
    st.integers(0, 9),
    st.integers(0, 9),
    st.one_of(st.none(), st.frozensets(TAKEN, min_size=1, max_size=12)),
)
def test_the_kernel_finds_the_values_that_python_finds(
    data: bytes, cut: int, values_max: int, values: frozenset[bytes] | None
) -> None:
    native, plain = by_both(distinct_values, data, cut, b"a\x01", values_max)
    assert native == plain
    found = distinct_values(data, 0, len(data), b"a\x01", 99)
    assert found is not None
    wanted = frozenset(found[0] or {b""}) if values is None else values
    native, plain = by_both(find_values, data, cut, b"a\x01", wanted)
    assert native == plain


@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 30), st.integers(2000, 9000))
def test_the_kernel_pauses_where_python_pauses(body: int, shift: int, count: int, values_max: int) -> None:
    """A zero byte before a size with a byte 2 is part of a value only where the search pauses at that byte."""
    record = b"." * body + b"a\x017\0\0\1\2\xda\xa3\x20\xa7" + b"b\x01y\x02"
    data = b"." * shift + record * (2 * PIECE_BYTES // len(record) + count)
    native, plain = by_both(distinct_values, data, shift, b"a\x01", values_max)
    assert native == plain
    native, plain = by_both(find_values, data, shift, b"a\x01", frozenset([b"7", b"7\0"]))
    assert native == plain


def test_the_kernel_stops_at_as_many_places_as_python() -> None:
    data = b"a\x017\x02" * (searches.HITS_MAX + 5)
    for search in Texts(b"a\x01", (b"7",), is_whole=True), Texts(b"a\x01", (b"6", b"7")):
        native, plain = by_both(find_texts, data, 3, search)
        assert native == plain
        assert len(find_texts(data, 0, len(data), search)) == searches.HITS_MAX
    native, plain = by_both(find_numbers, data, 3, Numbers(b"a\x01", 7, 7))
    assert native == plain
