"""Delivered messages of the delay levels, as ranges of offsets by level, and the notes that add to them.

Several rounds can wait for one fdatasync, and the pages of their groups reach the disk in any order. So after a power
cut a round may be lost although a later one is not. A note therefore has the begin of its round in each level: messages
that no note covers were not delivered.

A note is a msgpack array: the offset of each level after the round; the offset at which the round began, for the levels
that it changed; and, by level, the ranges above that offset that earlier rounds delivered, if any. Older versions wrote
only the first element.
"""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import msgpack  # type: ignore[import-untyped]

__all__ = ["Delivered", "Offsets", "Ranges", "apply_note", "encode_note", "later_of", "low_of", "union"]

Offsets: TypeAlias = Mapping[int, int]
# Ascending ranges (first offset, offset after the last) that do not touch each other.
Ranges: TypeAlias = tuple[tuple[int, int], ...]
# The delivered messages by level; a level without any may be missing.
Delivered: TypeAlias = dict[int, Ranges]


def low_of(ranges: Ranges) -> int:
    """Return the offset before which all messages were delivered."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def later_of(ranges: Ranges) -> Ranges:
    """Return the ranges after `low_of`."""
    return ranges[1:] if low_of(ranges) else ranges


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return *ranges*, which may overlap, be empty and be in any order, as `Ranges`."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif begin < end:
            found.append((begin, end))
    return tuple(found)


def encode_note(reached: Offsets, begun: Offsets, later: Mapping[int, Ranges]) -> bytes:
    """Return the note of a round that advanced the levels from *begun* to *reached*; *later* was delivered before."""
    changed = {level: begun.get(level, 0) for level, offset in reached.items() if begun.get(level, 0) != offset}
    above = {level: ranges for level, ranges in later.items() if ranges and ranges[-1][1] > reached.get(level, 0)}
    note: bytes = msgpack.packb([dict(reached), changed, above] if above else [dict(reached), changed])
    return note


def apply_note(delivered_before: Delivered | None, note: bytes) -> Delivered:
    """Return the messages delivered up to and including the round of *note*.

    Args:
      delivered_before: the messages that earlier notes contain; None if they were removed from the log.
    """
    content = msgpack.unpackb(note, strict_map_key=False)
    if isinstance(content, dict):
        return {level: union([(0, offset)]) for level, offset in content.items()}
    reached, changed = content[:2]
    later = content[2] if len(content) > 2 else {}
    delivered: Delivered = {}
    for level in {**reached, **later}:
        offset = reached.get(level, 0)
        start = changed.get(level, offset)
        # Known ranges after that offset do not count: RocketMQ has set the level back, or its queue is shorter now.
        earlier_ranges = (
            [(0, start)]
            if delivered_before is None
            else [(first, min(end, start)) for first, end in delivered_before.get(level, ())]
        )
        delivered[level] = union([*earlier_ranges, (start, offset), *map(tuple, later.get(level, ()))])
    return delivered
