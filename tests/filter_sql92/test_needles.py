"""Needles: whatever a condition selects contains one, and searching for it takes linear time."""

from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.contracts import RecordView
from martlet.message import Message
from martlet.records.codec import encode_record
from martlet_filter_sql92.compiler import compile_tree
from martlet_filter_sql92.needles import NEEDLES_MAX, compile_needle, needle_of
from martlet_filter_sql92.parser import ExpressionLimits, parse
from martlet_filter_sql92.searches import END, HITS_MAX, Numbers, Texts, number_pattern, text_pattern
from martlet_filter_sql92.values import Values

from .table import cases
from .test_reference import conditions, messages

LIMITS = ExpressionLimits(1 << 20, 1 << 10, 1 << 20)


def stored(properties: dict[str, str], *, separated: bool = True) -> bytes:
    encoded = "".join(f"{name}\x01{text}\x02" for name, text in properties.items()).encode()
    if not separated:
        encoded = encoded.removesuffix(b"\x02")
    return encode_record(Message("t", b"body a\x01 b\x017 c", encoded), 0, 0, 0, 0, bytes(8))


def check_none_is_missed(text: str, records: list[bytes]) -> None:
    """The needle is in each of *records* that *text* selects, except the last one."""
    tree = parse(text, LIMITS)
    truth, find = compile_tree(tree), compile_needle(tree, [0])
    data = b"".join(records)
    found = None if find is None else find(data, 0, len(data))
    if found is None:
        return
    assert found == sorted(found)
    at = 0
    for record in records[:-1]:
        if truth(RecordView(data, at)) is True:
            assert any(at <= place < at + len(record) for place in found), (text, record)
        at += len(record)


LAST = stored({})


@given(conditions, st.lists(st.tuples(messages, st.booleans()), min_size=1, max_size=5))
def test_every_selected_record_has_a_needle(text: str, given_: list[tuple[dict[str, str], bool]]) -> None:
    records = [stored(properties, separated=separated) for properties, separated in given_]
    check_none_is_missed(text, [*records, LAST])


numbers = st.integers(-(10**20), 10**20) | st.integers(-20, 20) | st.floats(-1e20, 1e20, allow_nan=False)
written = st.sampled_from(("{}", "+{}", "0{}", "-{}", "000{}", "{}.0", "{}e0", "{}00e-2", ".{}e1", "{} "))


@given(numbers, numbers | st.none(), st.lists(st.tuples(written, st.booleans()), min_size=1, max_size=8))
def test_a_number_is_found_however_it_is_written(
    wanted: float, other: float | None, formats: list[tuple[str, bool]]
) -> None:
    literal = str(wanted) if isinstance(wanted, int) else f"{wanted:f}".rstrip("0")
    if abs(wanted) >= 2**63:
        literal += "" if "." in literal else ".0"
    values = [form.format(abs(wanted) if own or other is None else other) for form, own in formats]
    check_none_is_missed(f"a = {literal}", [*(stored({"a": value}) for value in values), LAST])


bounds = st.integers(-(10**19), 10**19) | st.integers(-130, 130) | st.sampled_from((-0.5, 9.99, 1e17, -1e17, 1e300))
comparisons = st.sampled_from(("a < {}", "{} < a", "a <= {}", "a >= {}", "{} > a", "a = {}"))


@given(
    st.lists(st.tuples(comparisons, bounds), min_size=1, max_size=3),
    st.lists(st.tuples(written, st.integers(0, 4), st.integers(-2, 2)), min_size=1, max_size=12),
)
def test_a_number_of_a_range_is_found(compared: list[tuple[str, float]], near: list[tuple[str, int, int]]) -> None:
    constants = [bound if abs(bound) < 2**63 else float(bound) for _, bound in compared]
    text = " AND ".join(form.format(constant) for (form, _), constant in zip(compared, constants, strict=True))
    values = [form.format(abs(int(constants[index % len(constants)])) + more) for form, index, more in near]
    check_none_is_missed(text, [*(stored({"a": value}) for value in values), LAST])


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("a BETWEEN 7 AND 7", 7, 7),
        ("a BETWEEN 20 AND 39", 20, 39),
        ("a >= 990 AND a < 1010", 990, 1009),
        ("a > -5 AND 3 >= a", -4, 3),
        ("a BETWEEN -120 AND -99", -120, -99),
        ("a >= 0 AND a <= 0", 0, 0),
        ("a > 0.5 AND a < 9.5 AND b > c", 1, 9),
        ("a > 150", 151, 10**6),
        ("a <= 150", -(10**6), 150),
    ],
)
def test_only_whole_numbers_of_a_range_have_its_needle(text: str, low: int, high: int) -> None:
    find = compile_needle(parse(text), [0])
    assert find is not None
    for number in range(-1100, 1100):
        for form in ("{}", "0{}", "00{}") if number >= 0 else ("{}",):
            data = b"a\x01" + form.format(number).encode() + b"\x02"
            assert (find(data, 0, len(data)) == [0]) is (low <= number <= high), number


def test_no_record_of_the_table_is_missed() -> None:
    for case in cases():
        if not case.refused_at:
            for separated in (True, False):
                check_none_is_missed(case.text, [stored(dict(case.properties), separated=separated), LAST])


def test_the_last_value_of_a_repeated_property_has_a_needle() -> None:
    data = encode_record(Message("t", b"", b"a\x01x\x02a\x01y\x02"), 0, 0, 0, 0, bytes(8))
    check_none_is_missed("a = 'y'", [data, LAST])


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("a = 'x'", (rb"a\x01x",)),
        ("a = 'x' AND b = 'longer'", (rb"b\x01longer",)),
        ("b > 5 AND a = 'x'", (rb"a\x01x",)),
        ("a = 'x' OR b = 'y'", (rb"a\x01x", rb"b\x01y")),
        ("a IN ('x', 'y.')", (rb"a\x01(?=(?:x|y\.)",)),
        ("a IN ('1', '2', '3', '4', '5', '6', '7', '8', '9')", (b"values of a",)),
        ("a LIKE 'ab!%c%d' ESCAPE '!'", (rb"a\x01ab%c",)),
        ("a LIKE '%x'", (b"values of a",)),
        ("a LIKE '%x_y%'", (rb"a\x01",)),
        ("a STARTSWITH 'x.'", (rb"a\x01x\.",)),
        ("a CONTAINS 'xyz'", (rb"xyz",)),
        ("a > b", (rb"a\x01",)),
        ("a <> 'x'", (b"values of a",)),
        ("a <> 'x' AND b + 1 = 8", (b"values of b",)),
        ("b + 1 = 8 AND b % 3 = 1", (b"values of b",)),
        ("a + 1 = 8 AND b > 5", (rb"b\x01",)),
        ("a + 1 = 8 OR a = 'x'", (b"values of a",)),
        ("a + 1 = 8 OR b = 'y'", (b"values of a", rb"b\x01y")),
        ("a + 1 = 8 OR b + 1 = 8 OR c > d", (b"values of a", b"values of b", rb"c\x01")),
        ("a + 1 IS NULL OR a = 5", None),
        (" OR ".join(["a + 1 = 8"] * 17), None),
        ("a + longer > 5", (rb"longer\x01",)),
        ("a IS NOT NULL", (rb"a\x01",)),
        ("NOT (a = 5)", (b"values of a",)),
        ("a = TRUE", (rb"a\x01(?i:true)",)),
        ("a", (rb"a\x01(?i:true)",)),
        ("a IS NULL", None),
        ("NOT (a CONTAINS 'x')", None),
        ("a = 'x' OR b IS NULL", None),
        ("a = 'x' OR b = 'x' OR c = 'x' OR d = 'x' OR e = 'x'", None),
        ("a = '\ufffd'", (b"values of a",)),
        ("TRUE", None),
    ],
)
def test_the_most_telling_bytes_are_searched(text: str, patterns: tuple[bytes, ...] | None) -> None:
    needle = needle_of(parse(text), [0])
    if patterns is None:
        assert needle is None
    else:
        assert needle is not None
        assert len(needle.patterns) <= NEEDLES_MAX
        for found, expected in zip(needle.patterns, patterns, strict=True):
            shown = b"values of " + found.name.encode() if isinstance(found, Values) else pattern_of(found)
            assert shown.startswith(expected)
            assert shown[len(expected) :] in (b"", END, END + b")") or b"0-9" in shown


def pattern_of(found: Texts | Numbers) -> bytes:
    """Return the regular expression that *found* searches."""
    pattern = (text_pattern(found) if isinstance(found, Texts) else number_pattern(found)).pattern
    return pattern.replace(b"\x01", rb"\x01")


def parts(pattern: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what a parsed pattern consists of, at all depths."""
    for kind, argument in pattern:
        yield kind, argument
        for each in argument if isinstance(argument, tuple) else (argument,):
            for below in each if isinstance(each, list) else [each]:
                if isinstance(below, _parser.SubPattern):
                    yield from parts(below)


def test_a_search_never_goes_back_far() -> None:
    """Each pattern begins with a literal that has the separator, and repeats only other characters."""
    seen = 0
    for case in cases():
        needle = None if case.refused_at else needle_of(parse(case.text), [0])
        for pattern in needle.patterns if needle is not None else ():
            if isinstance(pattern, Values):
                continue  # its one repetition is possessive, of a lookahead
            parsed = _parser.parse(pattern_of(pattern))
            assert parsed[0][0] is _constants.LITERAL, pattern
            for kind, argument in parts(parsed):
                if kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
                    assert argument[1] <= 64, pattern
                    seen += 1
    assert seen > 20


def test_bytes_made_of_names_are_not_searched_for_numbers() -> None:
    names = b"a\x01+" * 100_000
    for text in ("a = 7", "a BETWEEN 1 AND 7", "a < 8", "b = 'x' OR a = 7"):
        find = compile_needle(parse(text), [0])
        assert find is not None
        assert find(names, 0, len(names)) is None
        assert find(names, 0, 300) == []
        usual = b"a\x01+7\x02" + bytes(100)
        assert find(usual * 1000, 0, 1000 * len(usual)) == list(range(0, 1000 * len(usual), len(usual)))


def test_too_many_hits_are_none() -> None:
    find = compile_needle(parse("a = 'x' OR b = 'y'"), [0])
    assert find is not None
    data = b"a\x01x\x02b\x01y\x02" * (HITS_MAX // 2)
    assert find(data, 0, len(data)) is None
    assert find(data, 0, len(data) - 8) == sorted(range(0, len(data) - 8, 4))
