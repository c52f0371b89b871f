"""The body of a batch send: messages of one topic, one after the other (RocketMQ MessageDecoder.encodeMessage).

Per message, big-endian: i32 size of all of it, i32 magic 0, i32 CRC 0, i32 flag, i32 body
length, the body, i16 properties length, the property string.
"""

from collections.abc import Iterable
from struct import Struct
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX

__all__ = ["BATCH_MESSAGES_MAX", "BatchMessage", "decode_batch", "encode_batch"]

_HEAD: Final = Struct(">iiiii")
_TAIL: Final = Struct(">h")
_OVERHEAD: Final = _HEAD.size + _TAIL.size
# Each member costs an answer id of 32 characters and an index entry; Java's limit is the body size alone.
BATCH_MESSAGES_MAX: Final = 32_768


@final
class BatchMessage:
    """One member of a batch; ``properties`` is the encoded property string, stored verbatim."""

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
      ValueError: the properties of a member are longer than 32767 bytes.
    """
    parts: list[bytes] = []
    for message in messages:
        body, properties = message.body, message.properties
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise ValueError(f"properties of {len(properties)} bytes are over the limit of {PROPERTIES_BYTES_MAX}")
        size = _OVERHEAD + len(body) + len(properties)
        parts += (_HEAD.pack(size, 0, 0, message.flag, len(body)), body, _TAIL.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(data: bytes) -> list[BatchMessage]:
    """Return the members of a batch body; every length must fit exactly.

    Raises:
      Refused: a length contradicts another or the end of the body, or there are too many members.
    """
    messages: list[BatchMessage] = []
    position, end = 0, len(data)
    while position < end:
        message, position = _decode_member(data, position, len(messages))
        messages.append(message)
        if len(messages) > BATCH_MESSAGES_MAX:
            raise _illegal(f"batch has more than {BATCH_MESSAGES_MAX} messages; send smaller batches")
    return messages


def _decode_member(data: bytes, position: int, number: int) -> tuple[BatchMessage, int]:
    if len(data) - position < _OVERHEAD:
        raise _illegal(f"batch message {number} is cut short; {len(data) - position} bytes are left")
    size, _magic, _crc, flag, body_length = _HEAD.unpack_from(data, position)
    stop = position + size
    if size < _OVERHEAD or stop > len(data):
        raise _illegal(f"batch message {number} claims {size} bytes; {len(data) - position} are left")
    body_start = position + _HEAD.size
    body_end = body_start + body_length
    if body_length < 0 or body_end + _TAIL.size > stop:
        raise _illegal(f"batch message {number} claims a body of {body_length} bytes in {size} bytes")
    properties_length: int = _TAIL.unpack_from(data, body_end)[0]
    properties_start = body_end + _TAIL.size
    if properties_length < 0 or properties_start + properties_length != stop:
        raise _illegal(f"batch message {number} claims properties of {properties_length} bytes in {size} bytes")
    return BatchMessage(data[body_start:body_end], data[properties_start:stop], flag), stop


def _illegal(text: str) -> Refused:
    return Refused(Reason.ILLEGAL, text)
