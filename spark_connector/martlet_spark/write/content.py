"""The digest of a transaction: brokers keep it, and compare a batch that is written again with it."""

from dataclasses import dataclass
from struct import Struct
from typing import Final, final

from martlet.runtime.checksum import crc32
from martlet_spark.write.encode import MIDDLE_BYTES

__all__ = ["NO_CONTENT", "Content", "content_of"]

# Size of the message and size of its body, at the begin of a message.
HEAD: Final = Struct(">i12xi")
DIGEST_MAX: Final = (1 << 64) - 1


@final
@dataclass(frozen=True, slots=True)
class Content:
    """The number of rows and the sum of their checksums: independent of the order and of the tasks."""

    rows: int = 0
    digest: int = 0

    def __add__(self, other: "Content") -> "Content":
        return Content(self.rows + other.rows, (self.digest + other.digest) & DIGEST_MAX)

    def __str__(self) -> str:
        return f"{self.rows}-{self.digest:016x}"


NO_CONTENT: Final = Content()


def content_of(body: bytes) -> Content:
    """Return the content of the messages in the *body* of a batch send, without their unique keys."""
    view, at, rows, digest = memoryview(body), 0, 0, 0
    while at < len(body):
        size, body_bytes = HEAD.unpack_from(body, at)
        middle = at + HEAD.size + body_bytes
        digest += crc32(view[middle + MIDDLE_BYTES : at + size], crc32(view[at:middle]))
        at += size
        rows += 1
    return Content(rows, digest & DIGEST_MAX)
