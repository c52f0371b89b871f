"""Compressed bodies: a turn of the event loop decompresses few of them, whatever they expand to.

RocketMQ's producers compress large bodies, and subscribers of other protocols get them decompressed. A body of 4 KiB
may expand to 4 MiB, so the size of what was read says nothing about that of the frames. Therefore a read ends after the
first compressed body, a run has no other message beside one, and a cursor brings one such run at a time: what a
subscriber has not read yet then counts before the next body is decompressed.
"""

from typing import Final

from martlet.records.compression import COMPRESSED
from martlet.records.layout import I32, SYS_FLAG_AT
from martlet.store import ReadResult

__all__ = ["COMPRESSION_AT", "cut_after_compressed"]

# The byte of a record with the flag COMPRESSED.
COMPRESSION_AT: Final = SYS_FLAG_AT + 3


def cut_after_compressed(result: ReadResult) -> None:
    """Keep only the messages of *result* up to the first compressed one."""
    count, size_of = 0, I32.unpack_from
    for piece in result.pieces:
        at, end = 0, len(piece)
        while at < end:
            count += 1
            if piece[at + COMPRESSION_AT] & COMPRESSED:
                result.cut(count)
                return
            at += size_of(piece, at)[0]
