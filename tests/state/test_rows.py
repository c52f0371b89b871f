"""The rows of a snapshot are packed and unpacked one by one, so that no slice has to do all of them."""

from collections.abc import Iterator

import msgpack  # type: ignore[import-untyped]
import pytest

from martlet.errors import StoreError
from martlet.runtime.steps import finish_now
from martlet.state import pack_rows, unpack_rows

ROWS = [[f"name{number}", number, {number: b"x"}] for number in range(1000)]


def test_rows_come_back_as_they_were() -> None:
    data = b"".join(finish_now(pack_rows(7, ROWS)))
    assert list(unpack_rows(7, data)) == ROWS


def test_no_data_has_no_rows() -> None:
    assert list(unpack_rows(7, b"")) == []


@pytest.mark.parametrize("data", [msgpack.packb(6), msgpack.packb([7, ROWS]), msgpack.packb("7")])
def test_another_format_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="is unknown; expected 7"):
        list(unpack_rows(7, data))


def test_bytes_that_are_no_rows_are_refused() -> None:
    with pytest.raises(StoreError, match="snapshot cannot be read"):
        list(unpack_rows(7, msgpack.packb(7) + b"\xc1"))


def test_packing_takes_a_slice_for_some_hundred_rows_and_reads_no_row_before_the_second() -> None:
    taken: list[int] = []

    def rows() -> Iterator[object]:
        for number, row in enumerate(ROWS):
            taken.append(number)
            yield row

    steps = pack_rows(7, rows())
    next(steps)
    assert taken == []
    counts: list[int] = []
    for _ in steps:
        counts.append(len(taken))
        taken.clear()
    assert max(counts) <= 256
    assert sum(counts) > 700


def test_large_rows_take_more_slices() -> None:
    few = sum(1 for _ in pack_rows(7, [b"x"] * 100))
    many = sum(1 for _ in pack_rows(7, [b"x" * 65_536] * 100))
    assert few == 1
    assert many == 101
