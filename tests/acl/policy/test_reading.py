"""Files are read in slices: what is found, and what is refused, is the same as if they were read in one call."""

import json
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Struct

from martlet.runtime.steps import finish_now
from martlet_acl.policy import reading as module
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.reading import read_object


class Sections(Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 0
    a: dict[str, str] = {}
    b: dict[str, str] = {}


class Whole(Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 0
    a: dict[str, msgspec.Raw] = {}
    b: dict[str, msgspec.Raw] = {}


TEXTS = st.text(st.sampled_from('ab{}[]"\\\n:, é😀'), max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={"number": st.integers(-9, 99), "a": st.dictionaries(TEXTS, VALUES), "b": st.dictionaries(TEXTS, VALUES)},
)


def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def read_whole(data: bytes) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Return what *data* says, read in one call; None if it must be refused."""
    try:
        found = msgspec.json.decode(data, type=Whole)
        json.loads(data.decode(), object_pairs_hook=check_unique)
    except (ValueError, RecursionError):
        return None
    a, b = ({key: json.loads(bytes(raw)) for key, raw in each.items()} for each in (found.a, found.b))
    return found.number, a, b


def read_in_slices(data: bytes) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    try:
        found = finish_now(read_object(data, Sections))
    except PolicyError:
        return None
    a, b = ({key: json.loads(text) for key, text in each.items()} for each in (found.a, found.b))
    return found.number, a, b


@given(DOCUMENTS, st.sampled_from((None, 1)), st.booleans(), st.integers(1, 30), st.data())
def test_a_file_read_in_slices_says_the_same_or_is_refused_as_well(
    document: dict[str, Any], indent: int | None, ascii_only: bool, size: int, data: st.DataObject
) -> None:
    text = bytearray(json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(text)))
        text[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=2))
    with patch.object(module, "TEXT_BYTES", size):
        assert read_in_slices(bytes(text)) == read_whole(bytes(text))


@given(st.binary(max_size=40), st.integers(1, 5))
@example(b'{"number": 12', 1)
@example(b'{"number": 12}', 1)
@example(b'{"a": {"b": "\\ud83d\\ude00"}}', 1)
@example(b'{"a": {"b": tru', 2)
@example(b'{"a": {}}  x', 3)
@example(b"  {}  ", 1)
def test_any_bytes_are_read_as_in_one_call(data: bytes, size: int) -> None:
    with patch.object(module, "TEXT_BYTES", size):
        assert read_in_slices(data) == read_whole(data)


@pytest.mark.parametrize("size", [1, 7, 1 << 18])
@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b'{\n "a": {\n  "b": [1 2]}}', "line 3, column 11"),
        (b'{"a": {"b": [1 2]}}', "line 1, column 16"),
        (b'{"a": {"b": {}} "b": {}}', r"expected ',' or '}' \(line 1, column 17\)"),
        (b'{\n"a" {}}', r"expected ':' \(line 2, column 5\)"),
        (b"{\n\n a: {}}", r"expected a key in double quotes \(line 3, column 2\)"),
        (b'{"a": {},\n}', "line 2, column 1"),
        (b"{}\n{}", r"expected the end \(line 2, column 1\)"),
        (b'{"a": {"b":\n "c', "line 2, column 2"),
        ('{"a": {"é":\n "'.encode() + b"\xff", "Invalid UTF-8 in line 2"),
    ],
)
def test_an_error_says_the_line_and_the_column(data: bytes, place: str, size: int) -> None:
    with patch.object(module, "TEXT_BYTES", size), pytest.raises(PolicyError, match=place):
        finish_now(read_object(data, Sections))


def test_no_slice_reads_a_large_part_of_the_file() -> None:
    members = {f"member {number}": "x" * 100 for number in range(10_000)}
    data = json.dumps({"a": members}).encode()
    slices = sum(1 for _ in read_object(data, Sections))
    assert slices > 50
