"""The usual content of a snapshot: the number of its format, then one msgpack object for each entry of the state.

Objects of their own, because msgpack packs and unpacks one object in one piece: an array of 100,000 rows
would keep the event loop, or the lock of the interpreter, for 100 ms.
"""

from collections.abc import Generator, Iterable
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from martlet.errors import StoreError
from martlet.turns import Pace, Steps

__all__ = ["pack_rows", "unpack_rows"]

BYTES_OF_A_STEP: Final = 256


def pack_rows(version: int, rows: Iterable[object]) -> Steps[list[bytes]]:
    """Return the pieces of a snapshot of *rows* in format *version*; the first slice does not touch *rows* yet."""
    yield
    pace = Pace()
    lines: list[bytes] = [msgpack.packb(version)]
    pieces: list[bytes] = []
    for row in rows:
        line = msgpack.packb(row)
        lines.append(line)
        if pace.is_over(1 + len(line) // BYTES_OF_A_STEP):
            pieces.append(b"".join(lines))
            lines.clear()
            yield
    pieces.append(b"".join(lines))
    return pieces


def unpack_rows(version: int, data: bytes) -> Generator[Any]:
    """Yield the rows of a snapshot in format *version*, arrays as lists; none where *data* is empty.

    Raises:
      StoreError: *data* is of another format, or not such a snapshot.
    """
    if not data:
        return
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        found = next(unpacker, None)
        if found != version:
            raise StoreError(f"format {found!r} is unknown; expected {version}")
        yield from unpacker
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreError(f"snapshot cannot be read; {error}") from error
