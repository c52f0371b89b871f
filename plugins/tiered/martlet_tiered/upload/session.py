"""What an uploader does with the store and the table, in blocking calls; each belongs to one epoch."""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias, final

from martlet.runtime.checksum import crc32
from martlet_columns.errors import RecordError
from martlet_columns.rebuild import rebuild
from martlet_tiered.errors import ObjectDamaged, TierError
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, decode_group, footer_of, read_metadata
from martlet_tiered.format.keys import keys_name
from martlet_tiered.format.writing import TABLE_SCHEMA, EncodedFile
from martlet_tiered.names import DATA_FOLDER
from martlet_tiered.objects import Objects
from martlet_tiered.table import ColdTable

__all__ = ["OpenPlace", "UploadSession", "open_session"]

# Opens the store, and makes a handle of the table, which is not open yet.
OpenPlace: TypeAlias = Callable[[], tuple[Objects, ColdTable]]


@final
class UploadSession:
    """A table that this broker has taken over, until something fails; then the next session has a new epoch.

    So no object of a failed attempt has the name of a later one, and a call that hangs cannot commit after the next
    session has begun.
    """

    def __init__(self, objects: Objects, table: ColdTable) -> None:
        self.epoch: Final = table.epoch
        self._objects = objects
        self._table = table

    @property
    def end(self) -> int | None:
        """The log position up to which ranges are in the table; None before the first."""
        return self._table.end

    def files(self) -> list[DataFile]:
        """Return the files of the table."""
        return self._table.files()

    def store(self, encoded: EncodedFile) -> None:
        """Store a file and its keys."""
        path = encoded.file.path
        self._objects.create(f"{DATA_FOLDER}/{path}", encoded.data)
        self._objects.create(keys_name(path), encoded.keys)

    def check(self, file: DataFile, footer: FileFooter, keys_bytes: int) -> None:
        """Read back what shows that a file and its keys are whole: sizes, footer, and one row group, which CRCs choose.

        Raises:
          ObjectDamaged: the store returns other data.
        """
        objects, name = self._objects, f"{DATA_FOLDER}/{file.path}"
        sizes = objects.size(name), objects.size(keys_name(file.path))
        if sizes != (file.bytes, keys_bytes):
            raise ObjectDamaged(f"{name!r} and its keys have {sizes} bytes after they were stored")
        metadata = read_metadata(objects, name, file.bytes)
        if footer_of(metadata) != footer:
            raise ObjectDamaged(f"{name!r} has another footer than what was stored")
        number = sum(group.crc for group in footer.groups) % len(footer.groups)
        group = footer.groups[number]
        data = objects.read_range(name, group.begin, group.end)
        try:
            crc = crc32(rebuild(decode_group(metadata, number, group.begin, data)).data)
        except RecordError as error:
            raise ObjectDamaged(f"row group {number} of {name!r} gives no records: {error}") from error
        if crc != group.crc:
            raise ObjectDamaged(f"row group {number} of {name!r} has other records than what was stored")

    def append(self, begin: int, end: int, files: Sequence[DataFile]) -> None:
        """Commit the range, as `ColdTable.append`."""
        self._table.append(begin, end, files)

    def take_foreign(self) -> int:
        """Return the number of commits of other programs since the last call."""
        count = len(self._table.foreign)
        self._table.foreign.clear()
        return count

    def tidy(self, now_ms: int, *, collects: bool) -> str:
        """Write a checkpoint if one is due; with *collects*, remove objects that nobody needs. Return what failed."""
        try:
            self._table.checkpoint()
            if collects:
                self._table.collect(now_ms)
        except TierError as error:
            return str(error)
        return ""


def open_session(open_place: OpenPlace, owner: str, last_epoch: int) -> UploadSession:
    """Open the table and take it over, unless another owner did after *last_epoch*; that is 0 before the first session.

    The names of all owners of one broker process have one begin: the part of *owner* before its ``/``.

    Raises:
      Fenced: another broker has taken the table over since.
    """
    objects, table = open_place()
    table.open(TABLE_SCHEMA)
    table.take_over(owner, last_epoch)
    return UploadSession(objects, table)
