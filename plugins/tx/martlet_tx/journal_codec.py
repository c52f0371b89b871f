"""Encodes and decodes notes of transactions.

A note is a msgpack array of its kind and numbers: transactions were checked once more, RocketMQ handled all up to some
half message, an administrator had a transaction checked again, or continued a parked one.
"""

from collections.abc import Sequence

import msgpack  # type: ignore[import-untyped]

__all__ = ["ADOPTED", "CHECKED", "RESUMED", "UNCHECKED", "adopted", "checked", "decode_note", "resumed", "unchecked"]

CHECKED, ADOPTED, UNCHECKED, RESUMED = range(4)


def checked(offsets: Sequence[int]) -> bytes:
    """Note that the transactions of the half messages at *offsets*, ascending, are checked once more."""
    before = 0
    deltas = []
    for offset in offsets:
        deltas.append(offset - before)
        before = offset
    return bytes(msgpack.packb([CHECKED, *deltas]))


def adopted(offset: int) -> bytes:
    """Note that RocketMQ has handled all half messages before *offset*: ended, copied or parked them."""
    return bytes(msgpack.packb([ADOPTED, offset]))


def unchecked(offset: int) -> bytes:
    """Note that the checks of the half message at *offset* are counted from 0 again."""
    return bytes(msgpack.packb([UNCHECKED, offset]))


def resumed(offset: int, first_offset: int) -> bytes:
    """Note that the parked message at *offset* is a half message again; those before *first_offset* are gone."""
    return bytes(msgpack.packb([RESUMED, offset, first_offset]))


def decode_note(note: bytes) -> list[int]:
    """Return the kind of *note* and its numbers."""
    numbers: list[int] = msgpack.unpackb(note)
    return numbers
