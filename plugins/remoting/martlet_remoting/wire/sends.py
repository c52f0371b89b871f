"""Usual sends: their requests in the received bytes, and the answers to them.

The native kernel has the scans and `sent_answers` as well; see `martlet.runtime.native`.
"""

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final, Protocol, TypeAlias

from msgspec.structs import astuple

from martlet.errors import RemoteProtocolError
from martlet_remoting.wire.binary_headers import decode_binary_header
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.headers import SendHead, send_head, send_head_of
from martlet_remoting.wire.signatures import SIGNED_SEND

__all__ = [
    "BINARY_HEADER",
    "BINARY_SEND",
    "HEADER_LENGTH",
    "JSON_HEADER",
    "SEND_BEGINNING",
    "KeyOwner",
    "Send",
    "scan_sends",
    "scan_signed_sends",
    "sent_answers",
    "usual_send",
]

# The beginning of the header of SEND_MESSAGE_V2 in the JSON of all known clients; other forms are handled one by one.
SEND_BEGINNING: Final = b'{"code":310,'
BINARY_SEND: Final = RequestCode.SEND_MESSAGE_V2.to_bytes(2, "big")  # the beginning of its binary header
JSON_HEADER: Final = 0
BINARY_HEADER: Final = 1
HEADER_LENGTH: Final = 0xFFFFFF  # mask of the length of a header in a field whose first byte is the encoding
PREFIX_BYTES: Final = 8
_LENGTHS: Final = Struct(">iI")

# A usual send: topic, queue id, body, encoded properties, flag, sysFlag, born ms, unique key, opaque, flag of the
# command, and the end of its frame in the received bytes. A tuple, because there is one for each message.
Send: TypeAlias = tuple[str, int, bytes, bytes, int, int, int, bytes, int, int, int]


class KeyOwner(Protocol):
    """Who owns an access key: `martlet.access.Signer`."""

    def has_signed(self, content: bytes, signature: str) -> bool:
        """Return whether *signature* is exactly that of *content*."""


def usual_send(head: SendHead, body: bytes, end: int) -> Send | None:
    """Return the send with *head* and *body*, whose frame ends at *end*; None if it is not usual.

    A usual send has a body and a unique key of letters and digits, and is no batch and no retry.
    """
    fields = head.fields
    if not body or fields.batch or fields.reconsume_times or fields.flag >> 31 or fields.born_ms < 0:
        return None
    properties = fields.properties.encode()
    at = properties.find(b"UNIQ_KEY\x01")
    if at < 0 or (at and properties[at - 1] != 2):
        return None
    unique_end = properties.find(2, at)
    unique = properties[at + 9 : unique_end] if unique_end >= 0 else properties[at + 9 :]
    if not unique.isalnum():
        return None
    return (
        fields.topic,
        fields.queue_id,
        body,
        properties,
        fields.flag,
        fields.sys_flag,
        fields.born_ms,
        unique,
        head.opaque,
        head.flag,
        end,
    )


def scan_sends(
    data: bytes, start: int, count_max: int, frame_bytes_max: int, header_bytes_max: int
) -> tuple[list[Send], int]:
    """Return the usual sends at *start* of *data*, at most *count_max*, and the end of the last one.

    The scan ends before a request that is of another kind, incomplete, not usual or signed. The kernel also ends it
    before a header that has other fields than RocketMQ's clients send, or blanks.
    """
    limits = count_max, frame_bytes_max, header_bytes_max
    return _scan(data, start, limits, _read_head, lambda head, header, body: not head.fields.access_key)


def scan_signed_sends(
    data: bytes,
    start: int,
    count_max: int,
    frame_bytes_max: int,
    header_bytes_max: int,
    access_key: str,
    signer: KeyOwner,
) -> tuple[list[Send], int]:
    """As `scan_sends`, for sends with JSON headers, *access_key*, no token, and a signature by *signer*, who owns that
    key.
    """
    limits = count_max, frame_bytes_max, header_bytes_max
    return _scan(
        data, start, limits, _read_json_head, lambda head, header, body: _is_signed(header, body, access_key, signer)
    )


def _scan(
    data: bytes,
    start: int,
    limits: tuple[int, int, int],
    read: Callable[[bytes, int], SendHead | None],
    is_wanted: Callable[[SendHead, bytes, bytes], bool],
) -> tuple[list[Send], int]:
    """As `scan_sends`, for the usual sends whose head, header and body *is_wanted* accepts.

    *read* reads a header of an encoding.
    """
    count_max, frame_bytes_max, header_bytes_max = limits
    sends: list[Send] = []
    while len(sends) < count_max:
        frame = frame_at(data, start, frame_bytes_max, header_bytes_max)
        if frame is None:
            break
        header, body, end, encoding = frame
        head = read(header, encoding)
        send = usual_send(head, body, end) if head is not None else None
        if head is None or send is None or not is_wanted(head, header, body):
            break
        sends.append(send)
        start = end
    return sends, start


def _read_json_head(header: bytes, encoding: int) -> SendHead | None:
    return send_head(header) if encoding == JSON_HEADER and header.startswith(SEND_BEGINNING) else None


def _read_head(header: bytes, encoding: int) -> SendHead | None:
    """Return the head of a send; None if it is another request, or if a field does not match."""
    if encoding == JSON_HEADER:
        return send_head(header) if header.startswith(SEND_BEGINNING) else None
    if encoding != BINARY_HEADER or not header.startswith(BINARY_SEND):
        return None
    try:
        _, _, _, opaque, flag, _, ext = decode_binary_header(header)
    except RemoteProtocolError:
        return None  # `next_command` raises it again
    return send_head_of(opaque, flag, ext)


def _is_signed(header: bytes, body: bytes, access_key: str, signer: KeyOwner) -> bool:
    """Return whether a usual send has *access_key*, no token, and a signature by *signer*."""
    try:
        key, token, *values, signature = astuple(SIGNED_SEND.decode_header(header).extFields)
    except (ValueError, RecursionError):
        return False
    return not token and key == access_key and signer.has_signed("".join((key, *values)).encode() + body, signature)


def frame_at(
    data: bytes, start: int, frame_bytes_max: int, header_bytes_max: int
) -> tuple[bytes, bytes, int, int] | None:
    """Return header, body and end of the frame at *start*, and the header's encoding; None if it is incomplete or too
    long.
    """
    if len(data) - start <= PREFIX_BYTES:
        return None
    length, marked = _LENGTHS.unpack_from(data, start)
    header_bytes = marked & HEADER_LENGTH
    body_start, end = start + PREFIX_BYTES + header_bytes, start + 4 + length
    if end > len(data) or length > frame_bytes_max or body_start > end or header_bytes > header_bytes_max:
        return None
    return data[start + PREFIX_BYTES : body_start], data[body_start:end], end, marked >> 24


def sent_answers(
    template: bytes, sends: Sequence[Send], positions: Sequence[int], offsets: Sequence[int]
) -> list[bytes]:
    """Return the answers to *sends*, which were stored at *positions* and *offsets*; empty ones if nobody waits.

    *template* has places for the queue id, the unique key, the position, the offset, and the opaque.
    """
    answers: list[bytes] = []
    for send, position, offset in zip(sends, positions, offsets, strict=False):
        _, queue_id, _, _, _, _, _, unique, opaque, flag, _ = send
        header = b"" if flag else template % (queue_id, unique, position, offset, opaque)
        answers.append(_LENGTHS.pack(4 + len(header), len(header)) + header if header else b"")
    return answers
