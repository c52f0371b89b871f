"""Compressed message bodies: ZLIB, and LZ4 and ZSTD if their packages are installed.

The broker stores bodies unchanged; clients and tools compress and decompress them, and protocols whose clients cannot
do that decompress bodies before they deliver them. The sysFlag bits (RocketMQ MessageSysFlag and CompressionType) are
0x1 for a compressed body, and 0x100 for LZ4, 0x200 for ZSTD, 0x300 for ZLIB; older clients set none of these three for
ZLIB.
"""

import importlib
import zlib
from typing import Final, Protocol, TypeAlias, cast

from martlet.errors import MartletError

__all__ = [
    "BODY_BYTES_MAX",
    "COMPRESSED",
    "COMPRESSION_BITS",
    "COMPRESSION_LZ4",
    "COMPRESSION_ZLIB",
    "COMPRESSION_ZSTD",
    "DELIVERED_BYTES_MAX",
    "CompressionError",
    "PackageMissing",
    "compress",
    "compression_name",
    "decompress",
    "plain_body",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
COMPRESSED: Final = 0x1
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300
COMPRESSION_BITS: Final = 0x700
# Protects against zip bombs: 4 MiB, RocketMQ's largest body, can decompress to 400 MiB and more.
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
# The broker decompresses bodies for subscribers that do not, in up to 3 ms a MiB. RocketMQ's producers refuse bodies of
# more than 4 MiB by default, before they compress them.
DELIVERED_BYTES_MAX: Final = 16 * 1024 * 1024


class CompressionError(MartletError):
    """A compressed body cannot be decompressed; the text says why."""


class PackageMissing(CompressionError):
    """The package that decompresses such bodies is not installed here."""


class StoredRecord(Protocol):
    """A record, or a view of one."""

    @property
    def body(self) -> Buffer: ...

    @property
    def sys_flag(self) -> int: ...


class _Expander(Protocol):
    def decompress(self, data: bytes, max_length: int = ...) -> bytes: ...


def compress(body: bytes, level: int = 5) -> tuple[bytes, int]:
    """Compress *body* with ZLIB; return it and its sysFlag bits."""
    return zlib.compress(body, level), COMPRESSED | COMPRESSION_ZLIB


def compression_name(sys_flag: int) -> str:
    """Return the name of the compression in the bits of a compressed body; a number if it has no name."""
    kind = sys_flag & COMPRESSION_BITS or COMPRESSION_ZLIB
    return {COMPRESSION_ZLIB: "ZLIB", COMPRESSION_LZ4: "LZ4", COMPRESSION_ZSTD: "ZSTD"}.get(kind, str(kind >> 8))


def decompress(body: bytes, sys_flag: int, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """Decompress *body* according to *sys_flag*; return an uncompressed body unchanged.

    Raises:
      CompressionError: the body is damaged, decompresses to more than *bytes_max*, or requires a missing package.
    """
    if not sys_flag & COMPRESSED:
        return body
    kind = sys_flag & COMPRESSION_BITS
    if kind in (0, COMPRESSION_ZLIB):
        return _expand_zlib(body, bytes_max)
    if kind == COMPRESSION_LZ4:
        return _expand_lz4(body, bytes_max)
    if kind == COMPRESSION_ZSTD:
        return _expand_zstd(body, bytes_max)
    raise CompressionError(f"compression type {kind >> 8} is unknown; 1 is LZ4, 2 is ZSTD, 3 is ZLIB")


def plain_body(record: StoredRecord, bytes_max: int = DELIVERED_BYTES_MAX) -> bytes:
    """Return the body of *record*, a `Record` or a `RecordView`, decompressed if its producer compressed it.

    Decompressing takes up to 3 ms a MiB, for which a protocol's `Handler.collect` counts the size of the result.

    Raises:
      CompressionError: the body is damaged, decompresses to more than *bytes_max*, or requires a missing package.
    """
    return decompress(bytes(record.body), record.sys_flag, bytes_max)


def _expand_zlib(body: bytes, bytes_max: int) -> bytes:
    expander = zlib.decompressobj()
    try:
        data = expander.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise CompressionError(f"ZLIB body of {len(body)} bytes is damaged: {error}") from error
    return _whole(data, expander.eof, bytes_max, "ZLIB")


def _whole(data: bytes, ended: bool, bytes_max: int, name: str) -> bytes:
    if len(data) > bytes_max:
        raise CompressionError(f"{name} body decompresses to more than the limit of {bytes_max} bytes")
    if not ended:
        raise CompressionError(f"{name} body is cut short")
    return data


def _package(module: str, package: str, name: str) -> object:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PackageMissing(f"{name} body requires the package {package!r}; install it with pip") from error


def _expand_lz4(body: bytes, bytes_max: int) -> bytes:
    module = _package("lz4.frame", "lz4", "LZ4")
    expander = cast("_Expander", module.LZ4FrameDecompressor())  # type: ignore[attr-defined]
    try:
        data = expander.decompress(body, max_length=bytes_max + 1)
    except RuntimeError as error:
        raise CompressionError(f"LZ4 body of {len(body)} bytes is damaged: {error}") from error
    return _whole(data, bool(expander.eof), bytes_max, "LZ4")  # type: ignore[attr-defined]


def _expand_zstd(body: bytes, bytes_max: int) -> bytes:
    module = _package("zstandard", "zstandard", "ZSTD")
    expander = module.ZstdDecompressor()  # type: ignore[attr-defined]
    try:
        with expander.stream_reader(body, read_across_frames=True) as reader:
            data = cast("bytes", reader.read(bytes_max + 1))
    except module.ZstdError as error:  # type: ignore[attr-defined]
        raise CompressionError(f"ZSTD body of {len(body)} bytes is damaged: {error}") from error
    return _whole(data, True, bytes_max, "ZSTD")
