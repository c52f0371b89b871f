"""Encodes and decodes notes of transactions.

A note is a msgpack array of its kind and numbers. The kinds: transactions were checked once more, RocketMQ handled all
half messages up to one, an administrator restarted the checks of a transaction, or resumed a parked one.
"""

from collections.abc import Sequence

import msgpack  # type: ignore[import-untyped]

__all__ = [
    "ADOPTED",
    "CHECKED",
    "RESUMED",
    "UNCHECKED",
    "adopted_note",
    "checked_note",
    "decode_note",
    "resumed_note",
    "unchecked_note",
]

CHECKED, ADOPTED, UNCHECKED, RESUMED = range(4)


def checked_note(offsets: Sequence[int]) -> bytes:
    """Return the note that the transactions of the half messages at *offsets*, ascending, are checked once more."""
    before = 0
    deltas = []
    for offset in offsets:
        deltas.append(offset - before)
        before = offset
    return bytes(msgpack.packb([CHECKED, *deltas]))


def adopted_note(offset: int) -> bytes:
    """Return the note that RocketMQ has handled all half messages before *offset*: ended, copied or parked them."""
    return bytes(msgpack.packb([ADOPTED, offset]))


def unchecked_note(offset: int) -> bytes:
    """Return the note that the checks of the half message at *offset* are counted from 0 again."""
    return bytes(msgpack.packb([UNCHECKED, offset]))


def resumed_note(offset: int, first_offset: int) -> bytes:
    """Return the note that the parked message at *offset* is a half message again; *first_offset* is the oldest."""
    return bytes(msgpack.packb([RESUMED, offset, first_offset]))


def decode_note(note: bytes) -> list[int]:
    """Return the kind of *note* and its numbers."""
    numbers: list[int] = msgpack.unpackb(note)
    return numbers
