"""The usual content of a snapshot: a format number, then one msgpack object for each row of the state.

The rows are separate objects because msgpack packs and unpacks an object in one piece: an array of 100,000 rows would
block the event loop, or hold the interpreter's lock, for 100 ms.
"""

from collections.abc import Generator, Iterable
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from martlet.errors import StoreError
from martlet.runtime.steps import Budget, Steps

__all__ = ["pack_rows", "unpack_rows"]

BYTES_OF_A_STEP: Final = 256


def pack_rows(version: int, rows: Iterable[object]) -> Steps[list[bytes]]:
    """Return the pieces of a snapshot of *rows* in format *version*; the first slice does not read *rows*."""
    yield
    budget = Budget()
    lines: list[bytes] = [msgpack.packb(version)]
    pieces: list[bytes] = []
    for row in rows:
        line = msgpack.packb(row)
        lines.append(line)
        if budget.is_over(1 + len(line) // BYTES_OF_A_STEP):
            pieces.append(b"".join(lines))
            lines.clear()
            yield
    pieces.append(b"".join(lines))
    return pieces


def unpack_rows(version: int, data: bytes) -> Generator[Any]:
    """Yield the rows of a snapshot in format *version*, arrays as lists; nothing if *data* is empty.

    Raises:
      StoreError: *data* has another format, or is not such a snapshot.
    """
    if not data:
        return
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        found_version = next(unpacker, None)
        if found_version != version:
            raise StoreError(f"format {found_version!r} is unknown; expected {version}")
        yield from unpacker
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreError(f"snapshot cannot be read; {error}") from error
