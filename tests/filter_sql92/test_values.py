"""Conditions on one property: each value of a page is evaluated once, and no record that is selected is missed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.contracts import RecordView
from martlet.message import Message
from martlet.records.codec import encode_filler, encode_record
from martlet_filter_sql92.compiler import PropertySource, compile_tree
from martlet_filter_sql92.needles import compile_needle
from martlet_filter_sql92.parser import parse
from martlet_filter_sql92.values import EVALUATED_MAX, KEPT_BYTES_MAX, PIECE_BYTES, VERDICTS_MAX, Values, values_of

CONDITIONS = (
    "a + 1 = 8",
    "a <> 'x'",
    "a LIKE '%x'",
    "NOT (a = 5) AND a < 100",
    "a % 3 = 1 OR a = 'x'",
    "a IN ('1','2','3','4','5','6','7','8','9')",
)


def stored(properties: bytes, body: bytes = b"") -> bytes:
    return encode_record(Message("t", body, properties), 0, 0, 0, 0, bytes(8))


LAST = stored(b"")


def selected(text: str, records: list[bytes]) -> list[bool]:
    truth, data, at, found = compile_tree(parse(text)), b"".join(records), 0, []
    for record in records:
        found.append(truth(RecordView(data, at)) is True)
        at += len(record)
    return found


def found_in(search: Values, records: list[bytes]) -> list[bool]:
    """Return for each of *records* whether the search has a place in it."""
    data = b"".join(records)
    places = search(data, 0, len(data))
    assert places is not None
    assert places == sorted(places)
    bounds, at = [], 0
    for record in records:
        bounds.append(any(at <= place < at + len(record) for place in places))
        at += len(record)
    return bounds


def search_of(text: str) -> Values:
    search = values_of(parse(text), [0])
    assert search is not None
    return search


texts = st.sampled_from(["7", "07", "7.0", "x", "", "5", "4", "é", "a", "7\x00", "\x00", "7\x00abc", "7\x01", "x\x01y"])
pairs = st.lists(st.tuples(st.sampled_from(["a", "aa", "b", "\x00a"]), texts), max_size=4)

message_bodies = st.sampled_from([b"", b"a\x01", b"a\x017", b"a\x01x\x02a"])


@pytest.mark.parametrize("text", CONDITIONS)
@given(
    st.lists(st.tuples(pairs, st.booleans(), st.sampled_from([b"", b"a\x01", b"a\x017", b"a\x01x\x02a"])), max_size=6)
)
def test_no_selected_record_is_missed(text: str, given_: list[tuple[list[tuple[str, str]], bool, bytes]]) -> None:
    records = []
    for properties, separated, body in given_:
        encoded = b"".join(f"{name}\x01{value}\x02".encode() for name, value in properties)
        records.append(stored(encoded if separated else encoded.removesuffix(b"\x02"), body))
    found = found_in(search_of(text), [*records, LAST])
    for record, is_selected, is_found in zip(records, selected(text, records), found, strict=False):
        assert is_found or not is_selected, record


def test_only_records_with_a_wanted_value_are_found() -> None:
    records = [stored(b"b\x01y\x02a\x01%d" % number, b"body") for number in range(20)]
    records += [stored(b"a\x01%d\x02b\x01y" % number) for number in range(20)]
    search = search_of("a + 1 = 8")
    for _ in range(2):
        assert found_in(search, [*records, LAST]) == [*selected("a + 1 = 8", records), False]
    end = encode_filler(100)
    assert found_in(search, [stored(b"a\x016"), end]) == [False, False]
    assert found_in(search, [stored(b"a\x017"), end]) == [True, False]


def test_a_body_hides_no_property_behind_it() -> None:
    record = stored(b"a\x017\x02b\x01" + b"y" * 1000, b"a\x01" + b"m" * 50)  # no byte 0 to 2 between body and name
    assert found_in(search_of("a + 1 = 8"), [record, LAST]) == [True, False]
    record = stored(b"a\x01x\x02b\x01" + b"y" * 1000, b"a\x01x")
    find = compile_needle(parse("a = 'x'"), [0])
    assert find is not None
    assert find(record, 0, len(record))


def test_each_value_is_evaluated_once() -> None:
    calls: list[str | None] = []

    def truth(record: PropertySource) -> bool:
        calls.append(record.property("a"))
        return False

    steps = [0]
    search = Values("a", truth, 1, steps)
    records = [stored(b"a\x01%d" % (number % 10)) for number in range(500)]
    assert not any(found_in(search, [*records, LAST]))
    assert sorted(map(str, calls)) == [str(number) for number in range(10)]
    first = steps[0]
    assert not any(found_in(search, [*records, LAST]))
    assert len(calls) == 10
    assert 500 <= steps[0] - first < first


def test_many_wanted_values_are_found() -> None:
    records = [stored(b"a\x01%d" % (number % 60)) for number in range(300)]
    for text in ("a % 2 = 1", "a % 20 = 3", "a <> 'x'"):
        search = search_of(text)
        for _ in range(2):
            assert found_in(search, [*records, LAST])[:-1] == selected(text, records)


def test_the_wanted_values_of_earlier_pages_are_found_again() -> None:
    search = search_of("a % 10 = 3")
    for begin in (0, 30, 0, 200, 30):
        records = [stored(b"a\x01%d" % number) for number in range(begin, begin + 30)]
        assert found_in(search, [*records, LAST])[:-1] == selected("a % 10 = 3", records)


def test_too_many_new_values_are_not_evaluated() -> None:
    data = b"".join(b"a\x01%d\x02" % number for number in range(EVALUATED_MAX))
    search = search_of("a + 1 = 8")
    assert search(data, 0, len(data)) is None
    few = b"a\x017\x02a\x018\x02"
    assert search(few, 0, len(few)) == [0]


def test_verdicts_are_kept_for_a_bounded_number_of_short_values() -> None:
    search = search_of("a LIKE '%7'")
    for begin in range(0, 5 * VERDICTS_MAX, 100):
        records = [stored(b"a\x01%d" % number) for number in range(begin, begin + 100)]
        records += [stored(b"a\x01" + b"x" * KEPT_BYTES_MAX + b"%d" % begin)]
        assert found_in(search, [*records, LAST])[:-1] == selected("a LIKE '%7'", records)
        assert len(search._verdicts) <= VERDICTS_MAX
        assert all(len(value) <= KEPT_BYTES_MAX for value in search._verdicts)


def test_a_page_full_of_the_name_is_not_searched_for_values() -> None:
    find = compile_needle(parse("a + 1 = 8"), [0])
    assert find is not None
    data = b"a\x017\x02" + b"a\x01" + b"8" * 17 + b"\x02"
    assert find(data, 0, len(data)) == [0]
    assert find(data * 10_000, 0, len(data) * 10_000) is None
    crowd = b"a\x01" * 500_000  # no separator where the search could pause
    assert find(crowd, 0, len(crowd)) is None


def test_a_search_in_pieces_finds_what_one_search_finds() -> None:
    search = search_of("a + 1 = 8")
    records = []
    for number in range(2000):
        body = b"." * (number % 331) if number % 400 else b"c\x01" + b"." * 3 * PIECE_BYTES
        records.append(stored(b"b\x01%d\x02a\x01%d" % (number, number % 20), body))
    assert found_in(search, [*records, LAST])[:-1] == selected("a + 1 = 8", records)
