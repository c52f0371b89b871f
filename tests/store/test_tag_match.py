"""Tag codes are matched over many entries at once; what comes out is what a comparison of each would find."""

from hypothesis import given
from hypothesis import strategies as st

from martlet.records.layout import ENTRY
from martlet.store.read.tag_match import matching_entries

# Few bytes, so that codes share them, mix, and differ in the upper half alone.
BYTES = st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF])
CODES = st.lists(BYTES, min_size=8, max_size=8).map(lambda each: int.from_bytes(bytes(each), "big", signed=True))
ANY_CODES = CODES | st.integers(-(1 << 31), (1 << 31) - 1)


@given(st.lists(ANY_CODES, max_size=60), st.frozensets(ANY_CODES, max_size=20), st.data())
def test_the_first_matches_are_found_whatever_the_codes(
    codes: list[int], others: frozenset[int], data: st.DataObject
) -> None:
    wanted = others | frozenset(data.draw(st.lists(st.sampled_from(codes), max_size=5)) if codes else ())
    count_max = data.draw(st.integers(1, 70))
    entries = b"".join(ENTRY.pack(number * 100, 100, code) for number, code in enumerate(codes))
    found, covered = matching_entries(entries, wanted, count_max)
    plain = [index for index, code in enumerate(codes) if code in wanted]
    assert found == plain[:count_max]
    assert covered == (found[-1] + 1 if len(found) == count_max else len(codes))


def test_codes_that_share_bytes_with_two_wanted_ones_do_not_match() -> None:
    wanted = frozenset((0x01010101, 0x02020202))
    mixtures = [0x01020102, 0x02010201, 0x01010102]
    entries = b"".join(ENTRY.pack(0, 100, code) for code in (*mixtures, 0x02020202))
    assert matching_entries(entries, wanted, 9) == ([3], 4)


def test_a_code_that_differs_above_32_bits_does_not_match() -> None:
    entries = ENTRY.pack(0, 100, (1 << 32) | 7) + ENTRY.pack(0, 100, 7)
    assert matching_entries(entries, frozenset((7,)), 9) == ([1], 2)
