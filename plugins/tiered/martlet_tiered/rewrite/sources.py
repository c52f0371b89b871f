"""Files that are rewritten: their records, a row group at a time, checked against the footer."""

from functools import partial
from typing import Final, final

from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Steps, off_loop
from martlet_columns.errors import RecordError
from martlet_columns.rebuild import rebuild
from martlet_columns.records import Records
from martlet_tiered.errors import ObjectDamaged
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, decode_group, footer_of, read_metadata
from martlet_tiered.names import DATA_FOLDER
from martlet_tiered.objects import Objects

__all__ = ["SourceFile", "open_source"]

READS: Final = 2


@final
class SourceFile:
    """A data file with its metadata; with *keeps*, its bytes stay in memory once they were read."""

    def __init__(self, objects: Objects, file: DataFile, metadata: object, footer: FileFooter, *, keeps: bool) -> None:
        self.footer: Final = footer
        self._objects = objects
        self._name = f"{DATA_FOLDER}/{file.path}"
        self._metadata = metadata
        self._kept: dict[int, bytes] | None = {} if keeps else None

    def records(self, number: int) -> Steps[Records]:
        """Return the records of row group *number*.

        Raises:
          ObjectDamaged: they do not match the CRC in the footer.
          TierError: they cannot be read.
        """
        for _ in range(READS):
            data = yield from self._bytes(number)
            records = self._decode(number, data)
            yield
            if records is not None:
                return records
            if self._kept is not None:
                self._kept.clear()
        raise ObjectDamaged(f"row group {number} of {self._name!r} is damaged")

    def _bytes(self, number: int) -> Steps[bytes]:
        group = self.footer.groups[number]
        if self._kept is not None and number in self._kept:
            return self._kept[number]
        data = yield from off_loop(partial(self._objects.read_range, self._name, group.begin, group.end))
        if self._kept is not None:
            self._kept[number] = data
        return data

    def _decode(self, number: int, data: bytes) -> Records | None:
        group = self.footer.groups[number]
        try:
            records = rebuild(decode_group(self._metadata, number, group.begin, data))
        except (ObjectDamaged, RecordError):
            return None
        return records if len(records) == group.count and crc32(records.data) == group.crc else None


def open_source(objects: Objects, file: DataFile, *, keeps: bool = False) -> Steps[SourceFile]:
    """Return *file*, opened: one request, two if its footer is long.

    Raises:
      ObjectDamaged: it is damaged, or was written by another program.
      ObjectMissing: the store does not have it.
      TierError: it cannot be read.
    """
    name = f"{DATA_FOLDER}/{file.path}"
    metadata = yield from off_loop(partial(read_metadata, objects, name, file.bytes))
    footer = footer_of(metadata)
    if footer is None:
        raise ObjectDamaged(f"{name!r} was not written by a broker")
    yield
    return SourceFile(objects, file, metadata, footer, keeps=keeps)
