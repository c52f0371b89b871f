"""CRC-32 as zlib's, five times as fast for a kilobyte where ISA-L is installed (it is on x86-64 and 64-bit ARM).

On processors with AVX-512, ISA-L (2.32) returns without VZEROUPPER. From then on each copy of 16 to 32 bytes, as of a
short `bytes` or of a digest, takes 0.20 us instead of 0.04 (Intel Granite Rapids), until other code executes
VZEROUPPER. orjson does at the end of a text, so one is written after ISA-L has run.
"""

from collections.abc import Iterable
from typing import Final, TypeAlias

import orjson

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    from zlib import crc32 as _crc32

__all__ = ["crc32", "crc32_each"]

Data: TypeAlias = bytes | bytearray | memoryview

_zero_upper: Final = orjson.dumps


def crc32(data: Data, value: int = 0) -> int:
    """Return the CRC-32 of *data* after bytes whose CRC-32 is *value*."""
    crc = _crc32(data, value)
    _zero_upper("")
    return crc


def crc32_each(parts: Iterable[Data]) -> list[int]:
    """Return the CRC-32 of each of *parts*."""
    crcs = list(map(_crc32, parts))
    _zero_upper("")
    return crcs
