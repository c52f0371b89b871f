"""Checksums are zlib's, with or without ISA-L."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from martlet.runtime.checksum import crc32, crc32_each

# ISA-L has other code for long data than for short ones.
data = st.one_of(st.binary(), st.integers(0, 5000).map(lambda size: b"x" * size))


@given(data, st.integers(0, (1 << 32) - 1))
def test_a_checksum_is_that_of_zlib(data: bytes, value: int) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data), value) == zlib.crc32(data, value)


@given(st.lists(data))
def test_checksums_of_several_parts_are_in_their_order(parts: list[bytes]) -> None:
    assert crc32_each(parts) == [zlib.crc32(part) for part in parts]
    assert crc32_each(map(bytearray, parts)) == crc32_each(parts)
