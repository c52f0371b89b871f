"""Property strings: every reader finds the same, whoever wrote them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.message import (
    Message,
    Record,
    decode_properties,
    encode_properties,
    find_property,
    put_property,
    remove_property,
)

TEXT = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=8)
TABLES = st.dictionaries(TEXT, TEXT, max_size=5)
NAMES = st.sampled_from([b"a", b"b", b"aa", b"ab", b"TAGS"])
# Whatever a client may send: separators anywhere, names twice, ends missing.
PARTS = [b"a\x01x\x02", b"a\x01y", b"TAGS\x01t\x02", b"a", b"b", b"ab", b"TAGS", b"\x01", b"\x02", b"x", b"\xff"]
WILD = st.lists(st.sampled_from(PARTS), max_size=10).map(b"".join)


@given(TABLES)
def test_properties_come_back_as_they_were(table: dict[str, str]) -> None:
    encoded = encode_properties(table)
    assert decode_properties(encoded) == table
    for name, value in table.items():
        assert find_property(encoded, name.encode()) == value.encode()


@given(TABLES, TEXT)
def test_what_is_absent_is_empty(table: dict[str, str], name: str) -> None:
    table.pop(name, None)
    encoded = encode_properties(table)
    assert find_property(encoded, name.encode()) == b""
    assert remove_property(encoded, name.encode()) == encoded


@given(TABLES, TEXT, TEXT)
def test_put_replaces_or_adds_and_leaves_the_rest(table: dict[str, str], name: str, value: str) -> None:
    encoded = put_property(encode_properties(table), name.encode(), value.encode())
    assert decode_properties(encoded) == {**table, name: value}
    assert decode_properties(remove_property(encoded, name.encode())) == {
        key: v for key, v in table.items() if key != name
    }


@given(WILD, NAMES, st.sampled_from([b"1", b"new"]))
def test_put_is_found_whatever_was_there(properties: bytes, name: bytes, value: bytes) -> None:
    put = put_property(properties, name, value)
    assert find_property(put, name) == value
    assert decode_properties(put)[name.decode()] == value.decode()


@given(WILD, NAMES)
def test_a_removed_property_is_absent_whatever_was_there(properties: bytes, name: bytes) -> None:
    rest = remove_property(properties, name)
    assert find_property(rest, name) == b""
    assert name.decode() not in decode_properties(rest)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "ab"]), TEXT), max_size=6))
def test_every_reader_takes_the_last_of_two_properties_with_one_name(pairs: list[tuple[str, str]]) -> None:
    """As RocketMQ, whose reader puts them into a map in order."""
    encoded = "".join(f"{name}\x01{value}\x02" for name, value in pairs).encode()
    assert decode_properties(encoded) == dict(pairs)
    for name, value in dict(pairs).items():
        assert find_property(encoded, name.encode()) == value.encode()


@pytest.mark.parametrize(
    ("properties", "table"),
    [
        (b"", {}),
        (b"TAGS\x01a\x02", {"TAGS": "a"}),
        (b"TAGS\x01a", {"TAGS": "a"}),
        (b"TAGS\x01a\x02KEYS\x01k", {"TAGS": "a", "KEYS": "k"}),
        (b"TAGS\x01\x02KEYS\x01k\x02", {"KEYS": "k"}),
        (b"\x01v\x02KEYS\x01k\x02", {"KEYS": "k"}),
        (b"nothing\x02KEYS\x01k\x02", {"KEYS": "k"}),
        (b"\x02\x02\x02", {}),
    ],
)
def test_fragments_are_read_as_rocketmq_reads_them(properties: bytes, table: dict[str, str]) -> None:
    assert decode_properties(properties) == table


@pytest.mark.parametrize("table", [{"": "x"}, {"a\x01": "x"}, {"a": "x\x02"}, {"a\x02": "x"}, {"a": "\x01"}])
def test_separators_in_names_and_values_are_refused(table: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="separate properties"):
        encode_properties(table)


def test_an_empty_value_is_left_out() -> None:
    assert encode_properties({"a": "", "b": "x"}) == b"b\x01x\x02"


def test_messages_and_records_tell_their_properties() -> None:
    properties = "KEYS\x01schlüssel\x02".encode()
    assert Message("T", b"", properties).property("KEYS") == "schlüssel"
    record = Record("T", 0, 0, 0, 91, b"", properties, 0, 0, 0, b"", 0, b"", 0, 0, 0)
    assert record.property("KEYS") == "schlüssel"
    assert record.property("TAGS") == ""


def removed_one_by_one(properties: bytes, name: bytes) -> bytes:
    """A slow reference implementation of `remove_property`."""
    needle = name + b"\x01"
    while True:
        start = properties.rfind(b"\x02" + needle) + 1
        if start == 0 and not properties.startswith(needle):
            return properties
        end = properties.find(b"\x02", start)
        properties = properties[:start] + (properties[end + 1 :] if end >= 0 else b"")


@given(st.lists(st.sampled_from([b"A", b"AA", b"\n", b"\x01", b"\x02", b"A\x01", b"\x02A\x01"])).map(b"".join))
def test_a_property_is_removed_from_any_place(properties: bytes) -> None:
    assert remove_property(properties, b"A") == removed_one_by_one(properties, b"A")


def test_a_property_that_occurs_very_often_is_removed_in_one_pass() -> None:
    assert remove_property(b"B\x01x\x02" + b"A\x01\x02" * 300_000 + b"C\x01y", b"A") == b"B\x01x\x02C\x01y"
