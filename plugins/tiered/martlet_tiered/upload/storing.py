"""Stores a file of a range and its keys, and reads them back."""

from collections.abc import Callable
from typing import final

from martlet.runtime.checksum import crc32
from martlet_columns.errors import RecordError
from martlet_columns.rebuild import rebuild
from martlet_tiered.errors import ObjectDamaged
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, decode_group, footer_of, read_metadata
from martlet_tiered.format.keys import keys_name
from martlet_tiered.format.writing import EncodedFile
from martlet_tiered.names import DATA_FOLDER
from martlet_tiered.objects import Objects

__all__ = ["check_file", "store_file"]


def store_file(objects: Objects, encoded: EncodedFile, beat: Callable[[], None]) -> None:
    """Store a file and its keys, and call *beat* before each request. Raises as `Objects.create` does."""
    path = encoded.file.path
    beat()
    objects.create(f"{DATA_FOLDER}/{path}", encoded.data)
    beat()
    objects.create(keys_name(path), encoded.keys)


def check_file(objects: Objects, file: DataFile, footer: FileFooter, keys_bytes: int, beat: Callable[[], None]) -> None:
    """Read back what shows that a file and its keys are whole: sizes, footer, and one row group, which CRCs choose.

    Calls *beat* before each request.

    Raises:
      ObjectDamaged: the store returns other data.
    """
    name = f"{DATA_FOLDER}/{file.path}"
    ranges = _BeatingReader(objects, beat)
    beat()
    data_bytes = objects.size(name)
    beat()
    sizes = data_bytes, objects.size(keys_name(file.path))
    if sizes != (file.bytes, keys_bytes):
        raise ObjectDamaged(f"{name!r} and its keys have {sizes} bytes after they were stored")
    metadata = read_metadata(ranges, name, file.bytes)
    if footer_of(metadata) != footer:
        raise ObjectDamaged(f"{name!r} has another footer than what was stored")
    number = sum(group.crc for group in footer.groups) % len(footer.groups)
    group = footer.groups[number]
    data = ranges.read_range(name, group.begin, group.end)
    try:
        crc = crc32(rebuild(decode_group(metadata, number, group.begin, data)).data)
    except RecordError as error:
        raise ObjectDamaged(f"row group {number} of {name!r} gives no records: {error}") from error
    if crc != group.crc:
        raise ObjectDamaged(f"row group {number} of {name!r} has other records than what was stored")


@final
class _BeatingReader:
    """Reads parts of *objects*, and calls *beat* before each."""

    def __init__(self, objects: Objects, beat: Callable[[], None]) -> None:
        self._objects = objects
        self._beat = beat

    def read_range(self, name: str, begin: int, end: int) -> bytes:
        self._beat()
        return self._objects.read_range(name, begin, end)
