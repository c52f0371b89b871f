"""The file format of snapshots: a header that tells which records are included, and the projection's own bytes.

Layout: ``magic, CRC-32 of the rest, size of the header, header in msgpack, rendered state``. A snapshot is valid only
for the log that it was made from. To verify that, the header has the CRC of the head of the newest record, and for
each queue the next offset and the position of the newest entry.
"""

from collections.abc import Sequence
from struct import Struct
from typing import Final

import msgpack  # type: ignore[import-untyped]
import msgspec

from martlet.errors import StoreError
from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Budget, Steps

__all__ = ["Mark", "Snapshot", "decode_snapshot", "encode_snapshot"]

MAGIC: Final = b"MARTSNAP"
FORMAT: Final = 1
HEAD: Final = Struct(">8sII")  # magic, CRC of everything after it, size of the header
CRC_FROM: Final = 12
BYTE_US: Final = 0.001  # cost of a byte of a CRC


class Mark(msgspec.Struct, frozen=True):
    """The progress in a queue: its next offset, and the log position of the entry before that, -1 if there is none."""

    topic: str
    queue_id: int
    offset: int
    position: int


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot with all records up to the one at ``position``, with ``size`` and the ``crc`` of its head; 0 if none.

    ``held`` messages wait for ``plugin`` to deliver them.
    """

    topics: list[str]
    position: int
    size: int
    crc: int
    marks: list[Mark]
    data: bytes
    plugin: str = ""
    held: int = 0

    @property
    def end(self) -> int:
        """The log position after the newest included record."""
        return self.position + self.size


def encode_snapshot(name: str, snapshot: Snapshot, pieces: Sequence[bytes]) -> Steps[list[bytes]]:
    """Return the file of projection *name* in pieces; *pieces* is the rendered state."""
    budget = Budget(BYTE_US)
    marks = [(mark.topic, mark.queue_id, mark.offset, mark.position) for mark in snapshot.marks]
    progress = [snapshot.topics, snapshot.position, snapshot.size, snapshot.crc, marks]
    header = msgpack.packb([FORMAT, name, *progress, snapshot.plugin, snapshot.held])
    checked_pieces = [len(header).to_bytes(4, "big"), header, *pieces]
    crc = 0
    for piece in checked_pieces:
        crc = crc32(piece, crc)
        if budget.is_over(len(piece)):
            yield
    return [MAGIC, crc.to_bytes(4, "big"), *checked_pieces]


def decode_snapshot(name: str, content: bytes) -> Snapshot:
    """Decode the file of projection *name*.

    Raises:
      StoreError: it is damaged, of another projection, or in another format.
    """
    if len(content) < HEAD.size:
        raise StoreError(f"snapshot of {len(content)} bytes is too short")
    magic, crc, header_bytes = HEAD.unpack_from(content)
    if magic != MAGIC or crc32(memoryview(content)[CRC_FROM:]) != crc:
        raise StoreError("snapshot is damaged")
    data_start = HEAD.size + header_bytes
    try:
        header = msgpack.unpackb(content[HEAD.size : data_start])
        version, owner, topics, position, size, record_crc, marks, *rest = header
        if (version, owner) != (FORMAT, name):
            raise StoreError(f"snapshot is of {owner!r} in format {version}; expected {name!r} in format {FORMAT}")
        progress = [Mark(*mark) for mark in marks]
        return Snapshot(topics, position, size, record_crc, progress, content[data_start:], *rest[:2])
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise StoreError(f"snapshot has a header that cannot be read; {error}") from error
