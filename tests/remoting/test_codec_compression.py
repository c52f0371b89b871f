"""Compressed bodies expand to what they were, within a bound, or say what is missing."""

import importlib.util
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.records.compression import (
    COMPRESSED,
    COMPRESSION_LZ4,
    COMPRESSION_ZSTD,
    CompressionError,
    compress,
    decompress,
)


@given(st.binary(max_size=1000))
def test_zlib_round_trip(body: bytes) -> None:
    data, flag = compress(body)
    assert decompress(data, flag) == body
    assert decompress(data, COMPRESSED) == body


def test_body_without_the_bit_is_left_alone() -> None:
    assert decompress(b"plain", 0x300) == b"plain"


@pytest.mark.parametrize("flag", [COMPRESSED, COMPRESSED | 0x300])
def test_damaged_and_cut_bodies_are_refused(flag: int) -> None:
    with pytest.raises(CompressionError, match="damaged"):
        decompress(b"not zlib", flag)
    with pytest.raises(CompressionError, match="cut short"):
        decompress(zlib.compress(b"x" * 1000)[:-2], flag)


def test_expansion_is_bounded() -> None:
    bomb = zlib.compress(bytes(10_000))
    assert len(decompress(bomb, COMPRESSED, bytes_max=10_000)) == 10_000
    with pytest.raises(CompressionError, match="more than the limit of 9999 bytes"):
        decompress(bomb, COMPRESSED, bytes_max=9_999)


def test_unknown_type_is_refused() -> None:
    with pytest.raises(CompressionError, match="type 7 is unknown"):
        decompress(b"", COMPRESSED | 0x700)


# A frame each of 600 times "martlet ", made by the lz4 and zstandard packages.
FRAMES: dict[str, tuple[int, bytes]] = {
    "lz4": (
        COMPRESSION_LZ4,
        bytes.fromhex(
            "04224d186840c01200000000000068240000008f6d6172746c6574200800ffffffffffffffffffffffffffffffffffffb250746c65742000000000"
        ),
    ),
    "zstandard": (COMPRESSION_ZSTD, bytes.fromhex("28b52ffd60c011850000406d6172746c6574200100b5b2be7001")),
}


@pytest.mark.parametrize("package", FRAMES)
def test_optional_types_expand_or_name_their_package(package: str) -> None:
    kind, data = FRAMES[package]
    if importlib.util.find_spec(package) is None:
        with pytest.raises(CompressionError, match=f"requires the package '{package}'"):
            decompress(data, COMPRESSED | kind)
        return
    assert decompress(data, COMPRESSED | kind) == b"martlet " * 600
    with pytest.raises(CompressionError, match="more than the limit of 100 bytes"):
        decompress(data, COMPRESSED | kind, bytes_max=100)
    with pytest.raises(CompressionError):
        decompress(b"garbage" * 3, COMPRESSED | kind)
