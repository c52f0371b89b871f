"""What a file of the cold tier says about itself, in the metadata of its Parquet footer.

The footer is at the end of the file, and usually shorter than 64 KiB, so one request gets it. It names the row groups
with their byte ranges, and for each queue where its messages are.
"""

import base64
from typing import Any, Final, Protocol, final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from martlet.runtime.checksum import crc32
from martlet_tiered.errors import ObjectDamaged
from martlet_tiered.objects import Objects

__all__ = [
    "FOOTER_KEY",
    "FOOTER_VERSION",
    "FileFooter",
    "GroupPlace",
    "ReadsRanges",
    "Span",
    "decode_group",
    "encode_footer",
    "footer_of",
    "group_range",
    "read_footer",
    "read_metadata",
]

FOOTER_KEY: Final = b"martlet"
FOOTER_VERSION: Final = 1
# The last bytes of a file that are read first; they have the footer of up to some hundred queues.
TAIL_BYTES: Final = 64 << 10
# A Parquet file ends with the size of its footer (4 bytes, little-endian) and this.
PARQUET_END: Final = b"PAR1"
END_BYTES: Final = 8
FOOTER_BYTES_MAX: Final = 256 << 20


class Span(Struct, array_like=True, frozen=True):
    """The messages of one queue in a file: `count` rows from row `row` on, with ascending offsets.

    `first` and `last` are offsets; there may be holes between them, of messages that expired or were damaged. Times are
    milliseconds, positions those of the log; `crc` is the CRC-32 of the bytes of all its records, in order.
    """

    topic: str
    queue: int
    first: int
    last: int
    row: int
    count: int
    min_ms: int
    max_ms: int
    min_position: int
    max_position: int
    crc: int


class GroupPlace(Struct, array_like=True, frozen=True):
    """A row group: `count` rows from row `row` on, in the bytes of the file from `begin` on, before `end`.

    Its records have `bytes` bytes in the log, and the CRC-32 `crc`, one after the other.
    """

    row: int
    count: int
    begin: int
    end: int
    bytes: int
    crc: int


class FileFooter(Struct, frozen=True):
    """What a file has: records of the log positions from `begin` on, before `end`, uploaded in `epoch` by `broker`.

    `spans` are sorted by topic (by their UTF-8 bytes) and queue.
    """

    version: int
    broker: str
    epoch: int
    begin: int
    end: int
    spans: list[Span]
    groups: list[GroupPlace]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(FileFooter)


def encode_footer(footer: FileFooter) -> bytes:
    """Return *footer* as text: version, size before the compression, CRC-32 of the rest, and MessagePack in zstd in
    Base64.
    """
    data = _ENCODER.encode(footer)
    text = base64.b64encode(pa.compress(data, codec="zstd", asbytes=True))
    return b"%d %d %d %b" % (footer.version, len(data), crc32(text), text)


def footer_of(metadata: pq.FileMetaData) -> FileFooter | None:
    """Return the footer of the file with *metadata*; None if another program wrote the file.

    Raises:
      ObjectDamaged: the footer cannot be decoded, or is of a later version.
    """
    text = (metadata.metadata or {}).get(FOOTER_KEY)
    if text is None:
        return None
    try:
        version, size, crc, packed = text.split(b" ")
        if int(version) != FOOTER_VERSION:
            raise ObjectDamaged(
                f"the file has a footer of version {int(version)}, and this program knows {FOOTER_VERSION}; use a newer"
            )
        if not 0 <= int(size) <= FOOTER_BYTES_MAX or crc32(packed) != int(crc):
            raise ValueError("it does not match its CRC")
        data = pa.decompress(base64.b64decode(packed, validate=True), int(size), codec="zstd")
        return _DECODER.decode(data)
    except (ValueError, OSError, msgspec.MsgspecError) as error:
        raise ObjectDamaged(f"the footer of the file cannot be decoded: {error}") from error


class ReadsRanges(Protocol):
    """Reads parts of objects, as `Objects` does."""

    def read_range(self, name: str, begin: int, end: int) -> bytes: ...


def read_metadata(objects: ReadsRanges, name: str, size: int) -> pq.FileMetaData:
    """Return the metadata of the Parquet file *name* with *size* bytes: one request, two if it is long.

    Raises:
      ObjectMissing: there is no such object.
      ObjectDamaged: it is shorter, or no Parquet file.
    """
    begin = max(size - TAIL_BYTES, 0)
    tail = objects.read_range(name, begin, size) if size else b""
    if len(tail) < END_BYTES or not tail.endswith(PARQUET_END):
        raise ObjectDamaged(f"{name!r} does not end as a Parquet file does")
    needed = int.from_bytes(tail[-END_BYTES:-4], "little") + END_BYTES
    if needed > size:
        raise ObjectDamaged(f"{name!r} says that it has a footer of {needed} bytes, and has {size}")
    if needed > len(tail):
        tail = objects.read_range(name, size - needed, begin) + tail
    try:
        return pq.read_metadata(pa.BufferReader(tail))
    except (pa.ArrowException, OSError) as error:
        raise ObjectDamaged(f"the footer of {name!r} cannot be read: {error}") from error


def read_footer(objects: Objects, name: str, size: int) -> FileFooter:
    """Return the footer of the file *name* with *size* bytes. Requests and errors are those of `read_metadata`.

    Raises:
      ObjectDamaged: also if the file has no footer of ours.
    """
    footer = footer_of(read_metadata(objects, name, size))
    if footer is None:
        raise ObjectDamaged(f"{name!r} was not written by a broker")
    return footer


def group_range(metadata: pq.FileMetaData, number: int) -> tuple[int, int]:
    """Return the bytes of row group *number* of any Parquet file, begin and end."""
    group = metadata.row_group(number)
    columns = [group.column(index) for index in range(group.num_columns)]
    begins = [
        each.data_page_offset
        if each.dictionary_page_offset is None
        else min(each.dictionary_page_offset, each.data_page_offset)
        for each in columns
    ]
    return min(begins), max(begin + each.total_compressed_size for begin, each in zip(begins, columns, strict=True))


def decode_group(metadata: pq.FileMetaData, number: int, begin: int, data: bytes) -> Any:
    """Return the rows of row group *number* as a `pa.Table`; *data* has its bytes, which begin at *begin* of the file.

    Raises:
      ObjectDamaged: the bytes are damaged.
    """
    source = pa.PythonFile(_Part(begin, data), "r")
    try:
        # Statistics and page checksums are checked; one thread, because the caller's threads are bounded.
        file = pq.ParquetFile(source, metadata=metadata, page_checksum_verification=True)
        return file.read_row_group(number, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ObjectDamaged(f"row group {number} cannot be read: {error}") from error


@final
class _Part:
    """A file of which only the bytes of *data* can be read, from *begin* on."""

    def __init__(self, begin: int, data: bytes) -> None:
        self.closed = False
        self._begin = begin
        self._data = memoryview(data)
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        ends = {0: 0, 1: self._at, 2: self._begin + len(self._data)}
        self._at = ends[whence] + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        at = self._at - self._begin
        if at < 0 or size < 0 or at + size > len(self._data):
            raise OSError(f"bytes {self._at} to {self._at + size} are not part of the row group")
        self._at += size
        return bytes(self._data[at : at + size])

    def close(self) -> None:
        self.closed = True
