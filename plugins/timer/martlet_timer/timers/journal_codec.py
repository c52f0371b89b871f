"""Encodes and decodes notes about timers: a msgpack array of the note's kind and its timers or keys."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from martlet_timer.timers.schedule import Timer

__all__ = ["ENDED", "GONE", "decode_note", "ended", "gone", "read_gone"]

GONE: Final = 1
ENDED: Final = 2


def gone(timers: Iterable[Timer]) -> bytes:
    """Return the note that *timers* are no longer pending."""
    numbers = [GONE]
    due_before = position_before = 0
    for due_ms, position in timers:
        numbers += (due_ms - due_before, position - position_before)
        due_before, position_before = due_ms, position
    note: bytes = msgpack.packb(numbers)
    return note


def ended(keys: Iterable[str]) -> bytes:
    """Return the note that the repeated messages with these keys have no timer any more."""
    note: bytes = msgpack.packb([ENDED, *keys])
    return note


def decode_note(note: bytes) -> tuple[int, list[Any]]:
    """Return the kind of *note* and its content: numbers for `read_gone`, or keys."""
    kind, *rest = msgpack.unpackb(note)
    return kind, rest


def read_gone(numbers: Sequence[int]) -> Iterator[Timer]:
    """Yield the timers in a note of the kind `GONE`."""
    due_ms = position = 0
    for due_more, position_more in zip(numbers[::2], numbers[1::2], strict=True):
        due_ms, position = due_ms + due_more, position + position_more
        yield due_ms, position
