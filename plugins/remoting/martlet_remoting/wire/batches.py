"""The body of a batch send: consecutive messages of one topic (RocketMQ MessageDecoder.encodeMessage).

The native kernel has `take_members` as well; see `martlet.runtime.native`.

Each message, big-endian: i32 total size, i32 magic 0, i32 CRC 0, i32 flag, i32 body
length, the body, i16 properties length, the property string.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, TypeAlias, final

from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX
from martlet.runtime.native import native

__all__ = [
    "BATCH_MESSAGES_MAX",
    "BatchMessage",
    "Member",
    "decode_batch",
    "encode_batch",
    "split_batch",
    "take_members",
]

# Body, encoded properties, flag.
Member: TypeAlias = tuple[bytes, bytes, int]

HEAD: Final = Struct(">iiiii")
HEAD_BYTES: Final = 20
TAIL: Final = Struct(">h")
OVERHEAD: Final = 22
# Each message costs an id of 32 characters in the answer and an index entry; RocketMQ limits only the body size.
BATCH_MESSAGES_MAX: Final = 32_768


@final
class BatchMessage:
    """One message of a batch; ``properties`` is the encoded property string, stored verbatim."""

    __slots__ = ("body", "flag", "properties")

    def __init__(self, body: bytes, properties: bytes = b"", flag: int = 0) -> None:
        self.body = body
        self.properties = properties
        self.flag = flag

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchMessage):
            return NotImplemented
        return (self.body, self.properties, self.flag) == (other.body, other.properties, other.flag)

    def __hash__(self) -> int:
        return hash((self.body, self.properties, self.flag))

    def __repr__(self) -> str:
        return f"BatchMessage({self.body!r:.60}, {self.properties!r:.60}, {self.flag})"


def encode_batch(messages: Iterable[BatchMessage]) -> bytes:
    """Return the body of a batch send.

    Raises:
      ValueError: the properties of a message are longer than 32767 bytes.
    """
    parts: list[bytes] = []
    for message in messages:
        body, properties = message.body, message.properties
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise ValueError(f"properties of {len(properties)} bytes are over the limit of {PROPERTIES_BYTES_MAX}")
        size = OVERHEAD + len(body) + len(properties)
        parts += (HEAD.pack(size, 0, 0, message.flag, len(body)), body, TAIL.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(data: bytes) -> list[BatchMessage]:
    """Return the messages of a batch body; all lengths must match exactly.

    Raises:
      Refused: a length contradicts another one or the end of the body, or there are too many messages.
    """
    return [BatchMessage(*member) for members in split_batch(data, BATCH_MESSAGES_MAX) for member in members]


def split_batch(data: bytes, count: int) -> Iterator[list[Member]]:
    """Yield the messages of a batch body, *count* at a time; raises as `decode_batch`."""
    take, position, number = native(take_members), 0, 0
    while position < len(data):
        if number == BATCH_MESSAGES_MAX:
            raise _illegal(f"batch has more than {BATCH_MESSAGES_MAX} messages; send smaller batches")
        members: list[Member] = []
        wanted = min(count, BATCH_MESSAGES_MAX - number)
        position = take(data, position, wanted, members)
        number += len(members)
        if len(members) < wanted and position < len(data):
            raise _illegal_member(data, position, number)
        yield members


def take_members(data: bytes, position: int, count_max: int, members: list[Member]) -> int:
    """Add to *members* the messages at *position* of a batch body, at most *count_max*; return the end of the last one.

    Stops before a message whose lengths contradict each other or the end of the body.
    """
    end = len(data)
    while len(members) < count_max and end - position >= OVERHEAD:
        size, _, _, flag, body_bytes = HEAD.unpack_from(data, position)
        stop, body_start = position + size, position + HEAD_BYTES
        body_end = body_start + body_bytes
        if size < OVERHEAD or stop > end or body_bytes < 0 or body_end + 2 > stop:
            break
        properties_bytes = data[body_end] << 8 | data[body_end + 1]
        if body_end + 2 + properties_bytes != stop or properties_bytes > PROPERTIES_BYTES_MAX:
            break
        members.append((data[body_start:body_end], data[body_end + 2 : stop], flag))
        position = stop
    return position


def _illegal_member(data: bytes, position: int, number: int) -> Refused:
    """Return the reason why the message at *position*, which is message *number*, is illegal."""
    left = len(data) - position
    if left < OVERHEAD:
        return _illegal(f"batch message {number} is cut short; {left} bytes are left")
    size, _, _, _, body_bytes = HEAD.unpack_from(data, position)
    if size < OVERHEAD or size > left:
        return _illegal(f"batch message {number} claims {size} bytes; {left} are left")
    if body_bytes < 0 or OVERHEAD + body_bytes > size:
        return _illegal(f"batch message {number} claims a body of {body_bytes} bytes in {size} bytes")
    properties_bytes = int.from_bytes(data[position + HEAD_BYTES + body_bytes :][:2], "big")
    return _illegal(f"batch message {number} claims properties of {properties_bytes} bytes in {size} bytes")


def _illegal(text: str) -> Refused:
    return Refused(Reason.ILLEGAL, text)
