"""The headers of commands as records: the common fields of all commands, and the fields of frequent requests.

msgspec decodes them in C, from JSON or from the fields of a binary header. Most clients write numbers in quotes, the
C++ client without. If fields do not match their record, for example because a number is empty, they are read one by
one. Other requests have few fields, which their handlers read from the `Command`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, Generic, TypeVar, final

import orjson
from msgspec import Meta, Raw, Struct, convert, defstruct, field, to_builtins
from msgspec.json import Decoder
from msgspec.structs import FieldInfo, fields

from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

__all__ = [
    "PULL_COMMIT_OFFSET",
    "PULL_LITE",
    "PULL_SUBSCRIPTION",
    "PULL_SUSPEND",
    "REMARK_MAX",
    "AckHead",
    "AckHeader",
    "EndHead",
    "EndHeader",
    "Head",
    "NotificationHeader",
    "PopHeader",
    "PullHeader",
    "SendHead",
    "SendHeader",
    "ack_head",
    "decode_envelope",
    "decode_header",
    "decode_pull_header",
    "decode_send_header",
    "end_head",
    "end_head_of",
    "send_head",
    "send_head_of",
]

REMARK_MAX: Final = 64 * 1024  # characters, or bytes in the binary header
# Bits of a pull's sysFlag (RocketMQ PullSysFlag).
PULL_COMMIT_OFFSET: Final = 0x1
PULL_SUSPEND: Final = 0x2
PULL_SUBSCRIPTION: Final = 0x4
PULL_CLASS_FILTER: Final = 0x8
PULL_LITE: Final = 0x10

I32 = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
I64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
F = TypeVar("F")


class Head(Struct, Generic[F], gc=False, rename={"fields": "extFields"}):
    """The header of a command (RocketMQ RemotingCommand), with the ``fields`` of its kind of request."""

    code: I32
    fields: F
    opaque: I32 = 0
    flag: I32 = 0
    version: I32 = 0
    language: str | int | None = None
    remark: Annotated[str, Meta(max_length=REMARK_MAX)] | None = None


@final
class Envelope(Head[Raw], gc=False):
    """The header of any command, whose ``fields`` are not decoded."""

    fields: Raw = Raw(b"null")


class Header(Struct, gc=False):
    """The fields of one kind of request; a field with a default may be missing."""

    def to_ext(self) -> dict[str, object]:
        """Return the fields by their names on the wire, without unset texts and numbers."""
        ext: dict[str, object] = to_builtins(self)
        for name, unset in _unset(type(self)):
            if ext[name] == unset:
                del ext[name]
        return ext


# The fields of a send: in SEND_MESSAGE_V2 (RocketMQ SendMessageRequestHeaderV2) and SEND_MESSAGE.
_SEND_NAMES: Final = {
    "producer_group": ("a", "producerGroup"),
    "topic": ("b", "topic"),
    "default_topic": ("c", "defaultTopic"),
    "default_queues": ("d", "defaultTopicQueueNums"),
    "queue_id": ("e", "queueId"),
    "sys_flag": ("f", "sysFlag"),
    "born_ms": ("g", "bornTimestamp"),
    "flag": ("h", "flag"),
    "properties": ("i", "properties"),
    "reconsume_times": ("j", "reconsumeTimes"),
    "unit_mode": ("k", "unitMode"),
    "max_reconsume_times": ("l", "maxReconsumeTimes"),
    "batch": ("m", "batch"),
    "broker_name": ("n", "bname"),
    "access_key": ("AccessKey", "AccessKey"),
}
_LONG_NAMES: Final = dict(_SEND_NAMES.values())
_LONG_NAMED: Final = frozenset((RequestCode.SEND_MESSAGE, RequestCode.SEND_REPLY_MESSAGE))


@final
class SendHeader(Header, gc=False, kw_only=True, rename={name: short for name, (short, _) in _SEND_NAMES.items()}):
    """A send; ``max_reconsume_times`` is -1 if not given.

    Numbers without a range are checked where they are used.
    """

    producer_group: str
    topic: str
    default_topic: str = ""
    default_queues: I64 = 4
    queue_id: I64
    sys_flag: I64 = 0
    born_ms: I64 = 0
    flag: I32 = 0
    properties: str = ""
    reconsume_times: I64 = 0
    unit_mode: bool = False
    max_reconsume_times: I64 = -1
    batch: bool = False
    broker_name: str = ""
    access_key: str = ""


@final
class EndHeader(
    Header,
    gc=False,
    rename={
        "producer_group": "producerGroup",
        "table_offset": "tranStateTableOffset",
        "position": "commitLogOffset",
        "decision": "commitOrRollback",
        "from_check": "fromTransactionCheck",
        "message_id": "msgId",
        "access_key": "AccessKey",
    },
):
    """An END_TRANSACTION (RocketMQ EndTransactionRequestHeader), without fields that the broker does not use."""

    producer_group: str
    table_offset: I64
    position: I64
    decision: I64
    from_check: str = "false"
    message_id: str = ""
    access_key: str = ""


@final
class PullHeader(
    Header,
    gc=False,
    rename={
        "group": "consumerGroup",
        "queue_id": "queueId",
        "offset": "queueOffset",
        "messages_max": "maxMsgNums",
        "sys_flag": "sysFlag",
        "commit_offset": "commitOffset",
        "suspend_ms": "suspendTimeoutMillis",
        "expression": "subscription",
        "sub_version": "subVersion",
        "expression_type": "expressionType",
        "bytes_max": "maxMsgBytes",
        "broker_name": "bname",
    },
):
    """A pull (RocketMQ PullMessageRequestHeader); ``sys_flag`` has the PULL_ bits."""

    group: str
    topic: str
    queue_id: I64
    offset: I64
    messages_max: I64
    sys_flag: I64 = 0
    commit_offset: I64 = 0
    suspend_ms: I64 = 0
    expression: str = ""
    sub_version: I64 = 0
    expression_type: str = "TAG"
    bytes_max: I64 = -1
    broker_name: str = ""


class NotificationHeader(
    Header,
    gc=False,
    rename={
        "group": "consumerGroup",
        "queue_id": "queueId",
        "poll_ms": "pollTime",
        "born_ms": "bornTime",
        "expression_type": "expType",
        "expression": "exp",
        "in_order": "order",
        "attempt": "attemptId",
        "count_max": "maxMsgNums",
        "invisible_ms": "invisibleTime",
        "init_mode": "initMode",
    },
):
    """A NOTIFICATION; ``born_ms`` is 0 if the client did not send its start time."""

    group: str
    topic: str
    queue_id: I64
    poll_ms: I64
    born_ms: I64 = 0
    expression_type: str = "TAG"
    expression: str = ""
    in_order: bool = False
    attempt: str = ""


@final
class PopHeader(NotificationHeader, gc=False, kw_only=True):
    """A POP_MESSAGE (RocketMQ PopMessageRequestHeader)."""

    count_max: I64
    invisible_ms: I64
    init_mode: I64 = 0


@final
class AckHeader(
    Header,
    gc=False,
    rename={
        "group": "consumerGroup",
        "queue_id": "queueId",
        "handle": "extraInfo",
        "invisible_ms": "invisibleTime",
        "access_key": "AccessKey",
    },
):
    """An ACK_MESSAGE or CHANGE_MESSAGE_INVISIBLETIME."""

    group: str
    topic: str
    queue_id: I64
    handle: str
    offset: I64
    invisible_ms: I64 = -1
    access_key: str = ""


NO_NAMES: Final[Mapping[str, str]] = {}
H = TypeVar("H", bound=Header)
K = TypeVar("K", bound=Head[Any])


@final
class SendHead(Head[SendHeader], gc=False):
    """The whole header of a SEND_MESSAGE_V2."""


@final
class EndHead(Head[EndHeader], gc=False):
    """The whole header of an END_TRANSACTION."""


@final
class AckHead(Head[AckHeader], gc=False):
    """The whole header of an ACK_MESSAGE."""


@cache
def _unset(kind: type[Header]) -> list[tuple[str, object]]:
    """Return the optional fields of *kind*, each with the value that means unset."""
    return [(each.encode_name, each.default) for each in fields(kind) if each.default in ("", -1)]


decode_envelope: Final = Decoder(Envelope).decode


# Fields of the requests in runs that their records leave out. A run takes others too, but checks them with orjson,
# since msgspec does not look into the texts of fields that it skips.
_SIGNED_NAMES: Final = ("SecurityToken", "Signature")


def _head_decoder(code: int, kind: type[K], header: type[Header], *more: str) -> Callable[[bytes], K | None]:
    """Return a function that decodes a JSON header with *code* into *kind*, or returns None if it does not match.

    It does not match either if a field is not JSON, even if it is none of *header*; *more* are names of such fields.
    """
    names = [(f"more_{place}", str, field(default="", name=name)) for place, name in enumerate((*more, *_SIGNED_NAMES))]
    known = defstruct("Known", names, bases=(header,), forbid_unknown_fields=True, gc=False, kw_only=True)
    known_head = defstruct("KnownHead", [("fields", known)], bases=(kind,), gc=False)
    decode: Callable[[bytes], Any] = Decoder(known_head, strict=False).decode
    decode_any = Decoder(kind, strict=False).decode

    def read(header: bytes) -> K | None:
        try:
            head: K = decode(header)
        except (ValueError, RecursionError):
            return read_unusual(header)
        return head if head.code == code else None

    def read_unusual(header: bytes) -> K | None:
        try:
            head: K = decode_any(header)
            orjson.loads(memoryview(decode_envelope(header).fields))
        except (ValueError, RecursionError):
            return None
        return head if head.code == code else None

    return read


def _converter(kind: type[K], fields: type[H], code: int) -> Callable[[int, int, Mapping[str, object]], K | None]:
    """Return a function that converts opaque, flag and fields of a binary header into *kind*, like `_head_decoder`."""

    def read(opaque: int, flag: int, ext: Mapping[str, object]) -> K | None:
        try:
            return kind(code, convert(ext, fields, strict=False), opaque, flag)
        except ValueError:
            return None

    return read


# Each returns None if a field does not match.
send_head: Final = _head_decoder(RequestCode.SEND_MESSAGE_V2, SendHead, SendHeader)
end_head: Final = _head_decoder(RequestCode.END_TRANSACTION, EndHead, EndHeader, "bname", "topic", "transactionId")
ack_head: Final = _head_decoder(RequestCode.ACK_MESSAGE, AckHead, AckHeader, "bname")
send_head_of: Final = _converter(SendHead, SendHeader, RequestCode.SEND_MESSAGE_V2)
end_head_of: Final = _converter(EndHead, EndHeader, RequestCode.END_TRANSACTION)
_DECODERS: Final[Mapping[type[Header], Callable[[Raw], Any]]] = {
    kind: Decoder(kind, strict=False).decode
    for kind in (SendHeader, PullHeader, NotificationHeader, PopHeader, AckHeader)
}


def decode_header(command: Command, kind: type[H]) -> H:
    """Return the fields of *command* as a *kind*.

    Raises:
      Refused: a mandatory field is missing or is not a number.
    """
    raw = command.raw
    try:
        if raw is None:
            return convert(command.ext, kind, strict=False)
        header: H = _DECODERS[kind](raw)
    except (ValueError, RecursionError):
        return _read_one_by_one(command, kind)
    return header


def _read_one_by_one(command: Command, kind: type[H], names: Mapping[str, str] = NO_NAMES) -> H:
    """Return the fields of *command* in any spelling; *names* maps the fields that are named differently."""
    readers: dict[object, Callable[[str, Any], object]] = {str: command.text, bool: command.boolean}

    def read(each: FieldInfo) -> object:
        name = names.get(each.encode_name, each.encode_name)
        return readers.get(each.type, command.integer)(name, None if each.required else each.default)

    return kind(**{each.name: read(each) for each in fields(kind)})


def decode_send_header(command: Command) -> SendHeader:
    """Return the header of any send, with long or short field names.

    A batch has the field ``batch`` or code 320; C++ clients send batches with code 310.

    Raises:
      Refused: a mandatory field is missing or is not a number.
    """
    if command.code in _LONG_NAMED:
        header = _read_one_by_one(command, SendHeader, _LONG_NAMES)
    else:
        header = decode_header(command, SendHeader)
        if header.batch:  # msgspec takes "1" as well, RocketMQ only "true"
            header.batch = command.boolean("m")
    if command.code == RequestCode.SEND_BATCH_MESSAGE:
        header.batch = True
    return header


def decode_pull_header(command: Command) -> PullHeader:
    """Return the header of a PULL_MESSAGE or LITE_PULL_MESSAGE.

    Raises:
      Refused: a mandatory field is missing or is not a number.
    """
    header = decode_header(command, PullHeader)
    header.expression_type = header.expression_type or "TAG"
    return header
