"""Typed records for JSON headers, decoded in C: the envelope of every command, and the fields of sends and pulls.

The records use the names on the wire. Numbers may be in quotes, as most clients write them, or
not, as the C++ client does. A header that does not match its record, for example because a number
is empty, is not refused here: the handler then reads it field by field.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Final, TypeVar

from msgspec import Meta, Raw, Struct, convert
from msgspec.json import Decoder

from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

__all__ = [
    "REMARK_MAX",
    "AckFields",
    "AckHead",
    "EndFields",
    "EndHead",
    "Envelope",
    "PopFields",
    "PullFields",
    "SendFields",
    "SendHead",
    "ack_fields",
    "ack_head",
    "decode_envelope",
    "end_head",
    "end_head_of",
    "pop_fields",
    "pull_fields",
    "send_fields",
    "send_head",
    "send_head_of",
]

T = TypeVar("T")
REMARK_MAX: Final = 64 * 1024  # characters, or bytes in the binary header
I32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Envelope(Struct, gc=False):
    """The common fields of all commands (RocketMQ RemotingCommand); `extFields` is not decoded."""

    code: I32
    opaque: I32 = 0
    flag: I32 = 0
    version: I32 = 0
    language: str | int | None = None
    remark: Annotated[str, Meta(max_length=REMARK_MAX)] | None = None
    extFields: Raw = Raw(b"null")


class SendFields(Struct, gc=False):
    """The fields of SEND_MESSAGE_V2 that are needed for a single message (RocketMQ SendMessageRequestHeaderV2)."""

    b: str  # topic
    e: I32  # queue id
    i: str  # properties
    f: I32 = 0  # sysFlag
    g: I64 = 0  # born, ms
    h: I32 = 0  # flag
    j: I32 = 0  # reconsumeTimes
    m: bool = False  # batch


class SendHead(Struct, gc=False):
    """The complete header of a SEND_MESSAGE_V2, an `Envelope` and its fields, decoded in one step."""

    code: I32
    extFields: SendFields
    opaque: I32 = 0
    flag: I32 = 0
    version: I32 = 0
    language: str | int | None = None
    remark: Annotated[str, Meta(max_length=REMARK_MAX)] | None = None


class EndFields(Struct, gc=False):
    """The fields of END_TRANSACTION (RocketMQ EndTransactionRequestHeader) that are needed to end a transaction."""

    producerGroup: str
    tranStateTableOffset: I64
    commitLogOffset: I64
    commitOrRollback: I64
    fromTransactionCheck: str = "false"
    msgId: str = ""


class EndHead(Struct, gc=False):
    """The complete header of an END_TRANSACTION, an `Envelope` and its fields, decoded in one step."""

    code: I32
    extFields: EndFields
    opaque: I32 = 0
    flag: I32 = 0
    version: I32 = 0
    language: str | int | None = None
    remark: Annotated[str, Meta(max_length=REMARK_MAX)] | None = None


class PullFields(Struct, gc=False):
    """The fields of PULL_MESSAGE (RocketMQ PullMessageRequestHeader)."""

    consumerGroup: str
    topic: str
    queueId: I64
    queueOffset: I64
    maxMsgNums: I64
    sysFlag: I64 = 0
    commitOffset: I64 = 0
    suspendTimeoutMillis: I64 = 0
    subscription: str = ""
    subVersion: I64 = 0
    expressionType: str = "TAG"
    maxMsgBytes: I64 = -1
    bname: str = ""


class PopFields(Struct, gc=False):
    """The fields of POP_MESSAGE (RocketMQ PopMessageRequestHeader)."""

    consumerGroup: str
    topic: str
    queueId: I64
    pollTime: I64
    maxMsgNums: I64
    invisibleTime: I64
    bornTime: I64 = 0
    initMode: I64 = 0
    expType: str = "TAG"
    exp: str = ""
    order: bool = False
    attemptId: str = ""


class AckFields(Struct, gc=False):
    """The fields of ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME."""

    consumerGroup: str
    topic: str
    queueId: I64
    extraInfo: str
    offset: I64
    invisibleTime: I64 = -1


class AckHead(Struct, gc=False):
    """The complete header of an ACK_MESSAGE, an `Envelope` and its fields, decoded in one step."""

    code: I32
    extFields: AckFields
    opaque: I32 = 0
    flag: I32 = 0
    version: I32 = 0
    language: str | int | None = None
    remark: Annotated[str, Meta(max_length=REMARK_MAX)] | None = None


decode_envelope: Final = Decoder(Envelope).decode


def _reader(kind: type[T]) -> Callable[[Command], T | None]:
    """Return a function that decodes the fields of a command, from a JSON or a binary header, into *kind*."""
    decode = Decoder(kind, strict=False).decode

    def read(command: Command) -> T | None:
        raw = command.raw
        try:
            return decode(raw) if raw is not None else convert(command.ext, kind, strict=False)
        except (ValueError, RecursionError):
            return None

    return read


def _head_reader(kind: type[T]) -> Callable[[bytes], T | None]:
    """Return a function that decodes the JSON header of a command into *kind*."""
    decode = Decoder(kind, strict=False).decode

    def read(header: bytes) -> T | None:
        try:
            return decode(header)
        except (ValueError, RecursionError):
            return None

    return read


def send_head_of(opaque: int, flag: int, fields: Mapping[str, object]) -> SendHead | None:
    """Return the header of a send with these *fields*; None if they do not match the record."""
    try:
        return SendHead(RequestCode.SEND_MESSAGE_V2, convert(fields, SendFields, strict=False), opaque, flag)
    except ValueError:
        return None


def end_head_of(opaque: int, flag: int, fields: Mapping[str, object]) -> EndHead | None:
    """Return the header of an END_TRANSACTION with these *fields*; None if they do not match the record."""
    try:
        return EndHead(RequestCode.END_TRANSACTION, convert(fields, EndFields, strict=False), opaque, flag)
    except ValueError:
        return None


# Each returns None if the header or the fields do not match its record.
send_head: Final = _head_reader(SendHead)
end_head: Final = _head_reader(EndHead)
ack_head: Final = _head_reader(AckHead)
send_fields: Final = _reader(SendFields)
pull_fields: Final = _reader(PullFields)
pop_fields: Final = _reader(PopFields)
ack_fields: Final = _reader(AckFields)
