"""The kernel narrows the entries of a page as Python does."""

from hypothesis import example, given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.records.layout import BLANK_SIZE, ENTRY, ENTRY_BYTES
from martlet.store.read.needle_match import match_places, positions_before

# Distance from the record before, and size: adjacent records, gaps, the same position again, blank and damaged entries.
STEPS = st.tuples(
    st.one_of(st.integers(0, 9), st.just(0)),
    st.one_of(st.integers(1, 30), st.sampled_from([0, -1, -(1 << 31), BLANK_SIZE])),
)
BASES = st.sampled_from([0, (1 << 32) - 50, 1 << 40])
WIDE = st.integers(-(1 << 63), (1 << 63) - 1)


def encode(steps: list[tuple[int, int]], position: int) -> bytes:
    """Return entries with ascending positions; each step follows the record before."""
    entries = b""
    for distance, size in steps:
        position += distance
        entries += ENTRY.pack(position, size, 7)
        position += max(size, 0) if size < BLANK_SIZE else 0
    return entries


@given(st.lists(STEPS, min_size=1, max_size=30), BASES, st.integers(-5, 400), st.data())
def test_the_kernel_finds_the_entries_of_a_page_that_python_finds(
    steps: list[tuple[int, int]], base: int, page_end: int, draw: st.DataObject
) -> None:
    entries, begin = encode(steps, base), draw.draw(st.integers(0, len(steps) - 1))
    assert kernel_of(positions_before)(entries, begin, base + page_end) == positions_before(
        entries, begin, base + page_end
    )


@given(st.lists(st.tuples(WIDE, st.integers(-(1 << 31), (1 << 31) - 1)), min_size=1, max_size=9), WIDE)
@example([(5, 1), (4, 1)], 9)
def test_the_kernel_finds_damaged_entries_that_python_finds(damaged: list[tuple[int, int]], position: int) -> None:
    entries = b"".join([ENTRY.pack(*each, 0) for each in damaged])
    for begin in range(len(damaged)):
        assert kernel_of(positions_before)(entries, begin, position) == positions_before(entries, begin, position)


@given(
    st.lists(STEPS, min_size=1, max_size=30),
    BASES,
    st.one_of(st.lists(st.integers(-9, 300), max_size=8), st.lists(st.integers(-9, 300), min_size=20, max_size=90)),
    st.data(),
)
@example([(0, 10), (0, 10), (0, 10)], 0, [10, 11, 25], None)
def test_the_kernel_matches_the_places_that_python_matches(
    steps: list[tuple[int, int]], base: int, places: list[int], draw: st.DataObject | None
) -> None:
    entries, begin, end = encode(steps, base), 0, len(steps)
    if draw is not None:
        begin = draw.draw(st.integers(0, len(steps) - 1))
        end = draw.draw(st.integers(begin + 1, len(steps)))
    positions = [position for position, _, _ in ENTRY.iter_unpack(entries[begin * ENTRY_BYTES : end * ENTRY_BYTES])]
    arguments = entries, begin, positions, base, sorted(places)
    assert kernel_of(match_places)(*arguments) == match_places(*arguments)
