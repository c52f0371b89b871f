"""Messages between a broker and its upload process, and how they become bytes.

A message is MessagePack after its length (4 bytes, big-endian). The broker asks, one request at a time: `Setup`, then
`FindRange` and `StoreRange` for each range. The process answers with `Opened`, `FoundRange`, `StoredRange` or `Failed`,
and before that with any number of others. Long lists are sent in parts before, so that no message keeps the event loop
busy.
"""

import struct
from typing import Final, TypeAlias

import msgspec
from msgspec import Struct

from martlet_tiered.config import TieredConfig
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, Span
from martlet_tiered.names import Kind

__all__ = [
    "FRAME_BYTES_MAX",
    "LENGTH",
    "PART_COUNT",
    "AtWork",
    "Failed",
    "FindRange",
    "FoundRange",
    "LogLine",
    "Opened",
    "QueueRun",
    "Reply",
    "Request",
    "RunsPart",
    "Setup",
    "SpansPart",
    "StoreRange",
    "StoredFile",
    "StoredRange",
    "decode_reply",
    "decode_request",
    "encode_message",
]

LENGTH: Final = struct.Struct(">I")
# First offsets of 500,000 queues have 4 MB.
FRAME_BYTES_MAX: Final = 64 << 20
# Elements of a list in one message: about 1 ms to decode.
PART_COUNT: Final = 1000


class QueueRun(Struct, array_like=True, frozen=True):
    """Neighbouring entries of one queue, and of one file: those from `begin` on, before `end`."""

    topic: str
    queue: int
    kind: Kind
    begin: int
    end: int


class Setup(Struct, tag=True, frozen=True):
    """What the process needs: settings, options of the store with secrets, where the log is, and which level to log."""

    config: TieredConfig
    options: dict[str, str]
    folder: str
    broker: str
    unique: str
    now_ms: int
    log_level: int

    def __repr__(self) -> str:
        return f"Setup({self.config.url!r}, {self.folder!r})"


class FindRange(Struct, tag=True, frozen=True):
    """Find and sort the entries of the log from `begin` on; `segments` have begin and end of the files from there on.

    The other fields are those of `find_entries`.
    """

    segments: list[tuple[int, int]]
    begin: int
    limit: int
    bytes_max: int
    records_max: int


class StoreRange(Struct, tag=True, frozen=True):
    """Encode and store the files of the range that was found, in `epoch`, and read them back.

    `firsts` has for each run the first offset that is a message, as 64-bit numbers. No file may have more than
    `bytes_max` bytes, unless it has one record only.
    """

    epoch: int
    now_ms: int
    firsts: bytes
    bytes_max: int | None


class Opened(Struct, tag=True, frozen=True):
    """The store is open."""


class RunsPart(Struct, tag=True, frozen=True):
    """Some runs of the range that is being found."""

    runs: list[QueueRun]


class FoundRange(Struct, tag=True, frozen=True):
    """The range ends at log position `end`; the other fields are those of `FoundEntries`."""

    end: int
    damaged: int
    damaged_at: int
    removed: int


class SpansPart(Struct, tag=True, frozen=True):
    """Some spans of the file that comes next."""

    spans: list[Span]


class StoredFile(Struct, tag=True, frozen=True):
    """A file is stored and was read back; `footer` lacks its spans."""

    file: DataFile
    footer: FileFooter


class StoredRange(Struct, tag=True, frozen=True):
    """All files of the range are stored; they have `records` records."""

    records: int


class AtWork(Struct, tag=True, frozen=True):
    """The process is at work."""


class LogLine(Struct, tag=True, frozen=True):
    """A line for the broker's log."""

    name: str
    level: int
    text: str


class Failed(Struct, tag=True, frozen=True):
    """The request failed: `name` is the class of the error, `number` its `epoch`, `end` or `errno`.

    `traceback` is empty unless it is a defect.
    """

    name: str
    text: str
    number: int | None = None
    path: str | None = None
    traceback: str = ""


Request: TypeAlias = Setup | FindRange | StoreRange
Reply: TypeAlias = Opened | RunsPart | FoundRange | SpansPart | StoredFile | StoredRange | AtWork | LogLine | Failed

_ENCODER: Final = msgspec.msgpack.Encoder()
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_REPLIES: Final = msgspec.msgpack.Decoder(Reply)


def encode_message(message: Request | Reply) -> bytes:
    """Return *message* with its length before it.

    Raises:
      ValueError: it has more than `FRAME_BYTES_MAX` bytes.
    """
    data = _ENCODER.encode(message)
    if len(data) > FRAME_BYTES_MAX:
        raise ValueError(f"a message of {len(data)} bytes is longer than {FRAME_BYTES_MAX}")
    return LENGTH.pack(len(data)) + data


def decode_request(data: bytes | bytearray | memoryview) -> Request:
    """Return the request in *data*, without its length. Raises `msgspec.MsgspecError`."""
    return _REQUESTS.decode(data)


def decode_reply(data: bytes | bytearray | memoryview) -> Reply:
    """Return the reply in *data*, without its length. Raises `msgspec.MsgspecError`."""
    return _REPLIES.decode(data)
