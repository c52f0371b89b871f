"""Encodes and decodes commands; no I/O, no clock.

A frame is an i32 length of the rest, one byte of header encoding, three bytes of header
length, the header and the body (RocketMQ RemotingCommand.java). Requests may use either header
encoding, JSON or binary. Answers are always JSON, which every client reads (the C++ client
reads nothing else).

The most frequent answers, to sends, pulls, pops and acknowledgements, are %-templates filled with numbers, which need
no dictionary and no escaping.
"""

from collections.abc import Iterator, Mapping, Sequence
from struct import Struct
from struct import error as struct_error
from typing import Final, TypeAlias, final

import orjson
from msgspec import ValidationError

from martlet.errors import LocalProtocolError, RemoteProtocolError
from martlet.runtime.native import native
from martlet_remoting.wire.binary_headers import BINARY_FIXED, KEY_LENGTH, decode_binary_header
from martlet_remoting.wire.codes import (
    ANSWER_LANGUAGE,
    FLAG_RESPONSE,
    LANGUAGE_NAMES,
    LANGUAGE_NUMBERS,
    VERSION,
    RequestCode,
)
from martlet_remoting.wire.headers import (
    EndHead,
    SendHead,
    ack_head,
    decode_envelope,
    end_head,
    end_head_of,
    send_head,
    send_head_of,
)
from martlet_remoting.wire.packets import NO_EXT, Command, ext_text
from martlet_remoting.wire.runs import Ack, AckRun, End, RunSigner, RunSigners, SendRun
from martlet_remoting.wire.sends import (
    BINARY_HEADER,
    BINARY_SEND,
    HEADER_LENGTH,
    JSON_HEADER,
    SEND_BEGINNING,
    Send,
    scan_sends,
    scan_signed_sends,
    usual_send,
)
from martlet_remoting.wire.signatures import SIGNED_ACK, SIGNED_BY_CODE, SIGNED_END, SIGNED_SEND

__all__ = [
    "FRAME_BYTES_MAX",
    "HEADER_BYTES_MAX",
    "READ_BYTES_MAX",
    "FrameBuffer",
    "ack_response_template",
    "decode_frame",
    "encode_ack_response",
    "encode_binary_command",
    "encode_command",
    "encode_command_in_pieces",
    "encode_pop_prefix",
    "encode_prefix",
    "encode_pull_prefix",
    "encode_response",
    "encode_response_in_pieces",
    "encode_send_response",
    "pop_response_template",
    "pull_response_template",
    "send_response_template",
]

# RocketMQ: com.rocketmq.remoting.frameMaxLength, the same in client and server.
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024
# Limit of Martlet's own clients: RocketMQ's limit is too small for the longest messages that a broker may be set to
# accept.
READ_BYTES_MAX: Final = 256 * 1024 * 1024
# A property string of 32767 bytes, each escaped as \\u0001, makes a header of 192 KiB. A header of 1 MiB with 60,000
# fields would block the event loop for 30 ms.
HEADER_BYTES_MAX: Final = 256 * 1024
PREFIX_BYTES: Final = 8  # the two length fields
# After a larger frame its buffer is released immediately; smaller frames share the buffer of one read.
GIVE_BACK_BYTES: Final = 262_144
# An incomplete frame is kept in pieces of at least this size.
PIECE_BYTES: Final = 65_536
# The beginnings of END_TRANSACTION headers in the JSON of all known clients, and of both in binary; other forms are
# handled one by one.
END_BEGINNING: Final = b'{"code":37,'
BINARY_END: Final = RequestCode.END_TRANSACTION.to_bytes(2, "big")
ACK_BEGINNING: Final = b'{"code":200051,'  # in JSON only
RUN_BEGINNINGS: Final = (SEND_BEGINNING, END_BEGINNING, BINARY_SEND, BINARY_END, ACK_BEGINNING)
SENDS_MAX: Final = 64  # in one run
ACKS_MIN: Final = 4  # of the size of the first; fewer are not worth a run
ACKS_MAX: Final = 256
SEND_BYTES_MAX: Final = 65536  # largest frame in a run; larger ones gain nothing
# Frequent requests, whose handlers read the fields directly from the JSON (martlet_remoting.wire.headers).
READ_AS_RECORDS: Final = SIGNED_BY_CODE.keys()

# The binary header has 16 bits for a code, and Java clients send the lower ones of POP's codes.
CUT_CODES: Final = {
    code & 0xFFFF: code
    for code in (*range(RequestCode.POP_MESSAGE, RequestCode.POLLING_INFO + 1), RequestCode.BATCH_ACK_MESSAGE)
}

# The fields and the version of a binary header.
BinaryFields: TypeAlias = tuple[dict[str, object], int]

_LENGTH: Final = Struct(">i")
_LENGTHS: Final = Struct(">iI")


@final
class FrameBuffer:
    """Decodes the bytes of one connection into commands; reads may split them anywhere.

    Only the bytes of frames that are not decoded yet are kept. A frame over *frame_bytes_max* is refused after its
    first four bytes. *header_bytes_max* limits the memory that parsing a hostile header can take; a client allows more,
    because the answer to a large batch has an id for each message. *key* names the setting of *frame_bytes_max* in
    errors.
    """

    __slots__ = (
        "_data",
        "_error",
        "_key",
        "_need",
        "_pieces",
        "_position",
        "_run_frame_bytes_max",
        "_scan_sends",
        "_scan_signed_sends",
        "_waiting",
        "frame_bytes_max",
        "header_bytes_max",
    )

    def __init__(
        self, frame_bytes_max: int = FRAME_BYTES_MAX, header_bytes_max: int = HEADER_BYTES_MAX, key: str = ""
    ) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._key = key
        self.header_bytes_max = header_bytes_max
        self._run_frame_bytes_max = min(frame_bytes_max, SEND_BYTES_MAX)
        self._scan_sends, self._scan_signed_sends = native(scan_sends), native(scan_signed_sends)
        self._data = b""
        self._position = 0
        # The incomplete frame in pieces, its current size, and the size at which to examine it again.
        self._pieces: list[bytes | bytearray] = []
        self._waiting = 0
        self._need = 0
        # Only the text: an exception references its stack frames, and with them the received bytes.
        self._error = ""

    @property
    def buffered_bytes(self) -> int:
        """The number of received bytes that are not decoded yet."""
        return len(self._data) - self._position + self._waiting

    def receive_data(self, data: bytes) -> None:
        """Add bytes from the socket; read all commands before the next call."""
        if self._error:
            return
        if self._position < len(self._data):
            self._keep_incomplete_frame()
        if not self._pieces:
            self._data = data
            self._position = 0
            return
        self._keep(data)
        if self._waiting >= self._need and self._need <= GIVE_BACK_BYTES:
            self._data = b"".join(self._pieces)
            self._forget_pieces()

    def _forget_pieces(self) -> None:
        self._pieces = []
        self._waiting = 0
        self._position = 0

    def next_command(self) -> Command | None:
        """Return the next complete command, None if more bytes are needed.

        Raises:
          RemoteProtocolError: the bytes are not a valid command; every later call raises the same error.
        """
        if self._error:
            raise RemoteProtocolError(self._error)
        if self._pieces:
            return self._next_large() if self._waiting >= self._need else None
        data = self._data
        start = self._position
        available = len(data) - start
        if available < 4:
            self._keep_incomplete_frame()
            return None
        length: int = _LENGTH.unpack_from(data, start)[0]
        if length < 4 or length > self.frame_bytes_max:
            raise self._record_error(RemoteProtocolError(_length_text(length, self.frame_bytes_max, self._key)))
        end = start + 4 + length
        if end > len(data):
            if available >= PREFIX_BYTES and (text := _prefix_text(data, start, length, self.header_bytes_max)):
                raise self._record_error(RemoteProtocolError(text))
            self._keep_incomplete_frame()
            return None
        self._position = end
        if length > GIVE_BACK_BYTES:
            # The caller may take long before it asks for the next command; keep only the following bytes.
            self._data = data[end:]
            self._position = 0
        try:
            return _decode(data, start + 4, end, self.header_bytes_max)
        except RemoteProtocolError as error:
            raise self._record_error(error) from error.__cause__

    def next_run(self, signers: RunSigners | None = None) -> SendRun | AckRun | None:
        """Return the next sends and ends of transactions, or acknowledgements of popped messages.

        The run ends before the first request that is of another kind, incomplete, large or unusual, or has another
        signer; None if that is the next request. The requests stay in the buffer until `skip_to` or `next_command`
        removes them. Without *signers* signatures are ignored.
        """
        data, start = self._data, self._position
        if not data.startswith(RUN_BEGINNINGS, start + PREFIX_BYTES):
            return None
        if data.startswith(ACK_BEGINNING, start + PREFIX_BYTES):
            return self._next_acks(signers)
        sends: list[Send] = []
        ends: list[End] = []
        signer: RunSigner | None = None
        takes_unsigned = signers is None or signers.begin_run()
        frame_bytes_max, header_bytes_max = self._run_frame_bytes_max, self.header_bytes_max
        if takes_unsigned:
            sends, start = self._scan_sends(data, start, SENDS_MAX, frame_bytes_max, header_bytes_max)
            if start == len(data):
                return SendRun(sends, ends, start)
        scans = is_mixed = False
        while len(sends) + len(ends) < SENDS_MAX:
            if scans:
                room = SENDS_MAX - len(sends) - len(ends)
                found, start = self._scan_sends(data, start, room, frame_bytes_max, header_bytes_max)
                sends += found
                if len(found) == room or start == len(data):
                    break
            request = self._decode_for_run(start)
            if request is None:
                break
            head, header, body, end, binary = request
            send = usual_send(head, body, end) if isinstance(head, SendHead) else None
            if send is None and isinstance(head, SendHead):
                break
            if signers is not None:
                found_signer = _find_signer(signers, head, header, body, binary)
                if found_signer is None and (head.fields.access_key or not takes_unsigned):
                    break
                if found_signer is not signer and start > self._position:
                    break
                signer = found_signer
            start, scans = end, takes_unsigned and send is None and signer is None
            if isinstance(head, EndHead):
                ends.append((head, end))
            elif send is not None:
                sends.append(send)
                if signer is not None and not is_mixed:
                    room = SENDS_MAX - len(sends) - len(ends)
                    found, start = self._scan_signed_sends(
                        data, start, room, frame_bytes_max, header_bytes_max, head.fields.access_key, signer
                    )
                    sends += found
                    is_mixed = not found
        return SendRun(sends, ends, start, signer) if start > self._position else None

    def _decode_for_run(self, start: int) -> tuple[SendHead | EndHead, bytes, bytes, int, BinaryFields | None] | None:
        """Return head, header, body, end and binary fields of the request at *start*; None if it cannot be in a run."""
        data = self._data
        if len(data) - start <= PREFIX_BYTES:
            return None
        length, marked = _LENGTHS.unpack_from(data, start)
        header_bytes = marked & HEADER_LENGTH
        header_start, end = start + PREFIX_BYTES, start + 4 + length
        body_start = header_start + header_bytes
        if (
            end > len(data)
            or length > self._run_frame_bytes_max
            or body_start > end
            or header_bytes > self.header_bytes_max
        ):
            return None
        header, head, binary = data[header_start:body_start], None, None
        if marked != header_bytes:
            head, binary = _binary_head(header, marked >> 24)
        elif header.startswith(SEND_BEGINNING):
            head = send_head(header)
        elif header.startswith(END_BEGINNING):
            head = end_head(header)
        return (head, header, data[body_start:end], end, binary) if head is not None else None

    def _next_acks(self, signers: RunSigners | None) -> AckRun | None:
        acks: list[Ack] = []
        signer: RunSigner | None = None
        data, start, header_bytes_max = self._data, self._position, self.header_bytes_max
        available = len(data)
        if available - start < ACKS_MIN * _LENGTH.unpack_from(data, start)[0]:
            return None
        takes_unsigned = signers is None or signers.begin_run()
        while available - start >= PREFIX_BYTES and len(acks) < ACKS_MAX:
            length, header_bytes = _LENGTHS.unpack_from(data, start)
            header_start, end = start + PREFIX_BYTES, start + 4 + length
            if end > available or header_start + header_bytes != end or header_bytes > header_bytes_max:
                break
            header = data[header_start:end]
            head = ack_head(header) if header.startswith(ACK_BEGINNING) else None
            if head is None:
                break
            if signers is not None:
                found = signers.signer_of(SIGNED_ACK, header, b"") if head.fields.access_key else None
                if found is None and (head.fields.access_key or not takes_unsigned):
                    break
                if found is not signer and acks:
                    break
                signer = found
            acks.append((head, end))
            start = end
        return AckRun(acks, signer) if acks else None

    def skip_to(self, end: int) -> bool:
        """Remove the requests before *end*; return whether there are more bytes."""
        self._position = end
        if end < len(self._data):
            return True
        self._data = b""
        self._position = 0
        return False

    def _next_large(self) -> Command:
        """Decode the frame in the pieces; the body, up to 16 MiB, is copied only once."""
        pieces, need = self._pieces, self._need
        surplus = self._waiting - need
        last = pieces[-1]
        pieces[-1] = last[: len(last) - surplus]
        self._forget_pieces()
        self._data = bytes(last[len(last) - surplus :])
        try:
            return _decode_pieces(pieces, need, self.header_bytes_max)
        except RemoteProtocolError as error:
            raise self._record_error(error) from error.__cause__

    def commands(self) -> Iterator[Command]:
        """Yield every complete command; raises like `next_command`, after the valid ones."""
        while (command := self.next_command()) is not None:
            yield command

    def _keep_incomplete_frame(self) -> None:
        """Keep the incomplete frame as a piece; the pieces are joined once, when the frame is complete."""
        if self._position < len(self._data):
            frame_start = self._data[self._position :]
            self._keep(frame_start)
            self._need = self._bytes_to_examine(frame_start)
        self._data = b""
        self._position = 0

    def _keep(self, data: bytes) -> None:
        """Add *data* to the incomplete frame; merge small pieces, because each object has overhead."""
        pieces = self._pieces
        self._waiting += len(data)
        if len(data) >= PIECE_BYTES:
            pieces.append(data)
        elif pieces and type(pieces[-1]) is bytearray and len(pieces[-1]) < PIECE_BYTES:
            pieces[-1] += data
        else:
            pieces.append(bytearray(data))

    def _bytes_to_examine(self, frame_start: bytes) -> int:
        """Return the number of bytes of the frame that begins with *frame_start* at which to examine it again."""
        if len(frame_start) < PREFIX_BYTES:
            # next_command reports an invalid length when it examines the bytes again.
            is_possible = len(frame_start) < 4 or 4 <= _LENGTH.unpack_from(frame_start)[0] <= self.frame_bytes_max
            return PREFIX_BYTES if is_possible else 4
        return 4 + int(_LENGTH.unpack_from(frame_start)[0])

    def _record_error(self, error: RemoteProtocolError) -> RemoteProtocolError:
        self._error = str(error)
        self._data = b""
        self._forget_pieces()
        return error


def _length_text(length: int, limit: int, key: str) -> str:
    if length < 4:
        return f"frame length {length} is invalid; a frame has at least 4 bytes"
    return f"frame length {length} is over the limit of {limit} bytes" + (f" ({key})" if key else "")


def decode_frame(frame: bytes) -> Command:
    """Decode one complete frame, including its length field.

    Raises:
      RemoteProtocolError: *frame* is not exactly one valid frame.
    """
    if len(frame) < 8 or _LENGTH.unpack_from(frame)[0] != len(frame) - 4:
        raise RemoteProtocolError(f"frame of {len(frame)} bytes does not begin with its own length")
    return _decode(frame, 4, len(frame), HEADER_BYTES_MAX)


def _prefix_text(data: bytes, start: int, length: int, header_bytes_max: int) -> str:
    """Return the error in the first bytes of the frame at *start*, empty if none; later bytes may be missing."""
    header_length = int.from_bytes(data[start + 5 : start + PREFIX_BYTES], "big")
    if header_length > length - 4:
        return f"header length {header_length} exceeds the frame; {length - 4} bytes follow"
    if header_length > header_bytes_max:
        return f"header length {header_length} is over the limit of {header_bytes_max} bytes"
    encoding = data[start + 4]
    if encoding not in (JSON_HEADER, BINARY_HEADER):
        return f"header encoding {encoding} is unknown; 0 is JSON, 1 is ROCKETMQ"
    return ""


def _decode_pieces(pieces: list[bytes | bytearray], size: int, header_bytes_max: int) -> Command:
    """Decode one complete frame of *size* bytes, including its length field, from *pieces*."""
    prefix = _first_bytes(pieces, PREFIX_BYTES)
    if text := _prefix_text(prefix, 0, size - 4, header_bytes_max):
        raise RemoteProtocolError(text)
    body_start = PREFIX_BYTES + int.from_bytes(prefix[5:], "big")
    header = _first_bytes(pieces, body_start)[PREFIX_BYTES:]
    while body_start >= len(pieces[0]) and len(pieces) > 1:
        body_start -= len(pieces.pop(0))
    pieces[0] = pieces[0][body_start:]
    decode = _decode_json if prefix[4] == JSON_HEADER else _decode_binary
    return decode(header, b"".join(pieces))


def _first_bytes(pieces: list[bytes | bytearray], count: int) -> bytes:
    found = b""
    for piece in pieces:
        found += piece[: count - len(found)]
        if len(found) == count:
            break
    return found


def _decode(data: bytes, start: int, end: int, header_bytes_max: int) -> Command:
    """Decode the command in data[start:end]; *start* is after the length field."""
    header_length = data[start + 1] << 16 | data[start + 2] << 8 | data[start + 3]
    header_start = start + 4
    body_start = header_start + header_length
    if body_start <= end and header_length <= header_bytes_max:
        encoding = data[start]
        if encoding == JSON_HEADER:
            return _decode_json(data[header_start:body_start], data[body_start:end])
        if encoding == BINARY_HEADER:
            return _decode_binary(data[header_start:body_start], data[body_start:end])
    raise RemoteProtocolError(_prefix_text(data, start - 4, end - start, header_bytes_max))


def _decode_json(header: bytes, body: bytes) -> Command:
    try:
        envelope = decode_envelope(header)
    except ValidationError as error:
        raise RemoteProtocolError(f"header is not valid: {error}") from error
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"header is not JSON: {error}") from error
    language = envelope.language
    command = Command(
        envelope.code,
        NO_EXT,
        body,
        envelope.opaque,
        envelope.flag,
        envelope.remark,
        language if type(language) is str else "",
        envelope.version,
        envelope.fields,
    )
    if envelope.code not in READ_AS_RECORDS or envelope.flag & FLAG_RESPONSE:
        command.read_ext()
    return command


def _find_signer(
    signers: RunSigners, head: SendHead | EndHead, header: bytes, body: bytes, binary: BinaryFields | None
) -> RunSigner | None:
    """Return who signed a request; None if nobody did, or if the handler must find out."""
    if not head.fields.access_key:
        return None
    if binary is not None:
        return signers.signer_of_fields(*binary, body)
    return signers.signer_of(SIGNED_SEND if isinstance(head, SendHead) else SIGNED_END, header, body)


def _binary_head(header: bytes, encoding: int) -> tuple[SendHead | EndHead | None, BinaryFields | None]:
    """Decode a binary header of a send or an END_TRANSACTION; no head is returned if it needs the general decoder.

    RocketMQ's benchmarks send such headers, and so do Java clients with rocketmq.serialize.type=ROCKETMQ.
    """
    if encoding != BINARY_HEADER or not header.startswith((BINARY_SEND, BINARY_END)):
        return None, None
    try:
        code, _, version, opaque, flag, _, ext = decode_binary_header(header)
    except RemoteProtocolError:
        return None, None  # `next_command` raises it again
    read = send_head_of if code == RequestCode.SEND_MESSAGE_V2 else end_head_of
    return read(opaque, flag, ext), (ext, version)


def _decode_binary(header: bytes, body: bytes) -> Command:
    code, language, version, opaque, flag, remark, ext = decode_binary_header(header)
    name = LANGUAGE_NAMES[language] if 0 <= language < len(LANGUAGE_NAMES) else ""
    return Command(CUT_CODES.get(code, code), ext, body, opaque, flag, remark or None, name, version)


def encode_command(command: Command) -> bytes:
    """Return the frame of *command* with a JSON header; every header field is a string."""
    return b"".join(encode_command_in_pieces(command, (command.body,)))


def encode_command_in_pieces(command: Command, body: Sequence[bytes]) -> list[bytes]:
    """As `encode_command`, with *body* in place of the command's own, which is not copied."""
    fields: dict[str, object] = {
        "code": command.code,
        "extFields": {name: ext_text(value) for name, value in command.ext.items() if value is not None},
        "flag": command.flag,
        "language": command.language,
        "opaque": command.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": command.version,
    }
    if command.remark is not None:
        fields["remark"] = command.remark
    header = orjson.dumps(fields)
    return [_LENGTHS.pack(4 + len(header) + sum(map(len, body)), len(header)) + header, *body]


def encode_binary_command(command: Command) -> bytes:
    """Return the frame of *command* with a ROCKETMQ header.

    Raises:
      LocalProtocolError: the code or version needs more than the header's 16 bits.
    """
    remark = (command.remark or "").encode()
    language = LANGUAGE_NUMBERS.get(command.language, LANGUAGE_NUMBERS["OTHER"])
    parts = [b"", remark, b""]
    size = 0
    try:
        for name, value in command.ext.items():
            part = _binary_entry(name, value)
            size += len(part)
            parts.append(part)
        parts[0] = BINARY_FIXED.pack(command.code, language, command.version, command.opaque, command.flag, len(remark))
    except struct_error as error:
        raise LocalProtocolError(f"code {command.code} or a field does not fit the binary header; use JSON") from error
    parts[2] = _LENGTH.pack(size)
    header = b"".join(parts)
    return _LENGTHS.pack(4 + len(header) + len(command.body), BINARY_HEADER << 24 | len(header)) + header + command.body


def _binary_entry(name: str, value: object) -> bytes:
    if value is None:
        return b""
    key = name.encode()
    text = ext_text(value).encode()
    return KEY_LENGTH.pack(len(key)) + key + _LENGTH.pack(len(text)) + text


def encode_prefix(
    opaque: int,
    code: int,
    ext: Mapping[str, object] = NO_EXT,
    body_bytes: int = 0,
    remark: str | None = None,
    version: int = VERSION,
) -> bytes:
    """Return the frame of a response up to its body; *body_bytes* of body must follow.

    Keys and order are those of a real broker's answers, so that recorded
    conversations can be compared byte by byte.
    """
    fields: dict[str, object] = {"code": code}
    if ext:
        fields["extFields"] = {name: ext_text(value) for name, value in ext.items() if value is not None}
    fields["flag"] = FLAG_RESPONSE
    fields["language"] = ANSWER_LANGUAGE
    fields["opaque"] = opaque
    if remark is not None:
        fields["remark"] = remark
    fields["serializeTypeCurrentRPC"] = "JSON"
    fields["version"] = version
    header = orjson.dumps(fields)
    return _LENGTHS.pack(4 + len(header) + body_bytes, len(header)) + header


def encode_response(
    opaque: int,
    code: int,
    ext: Mapping[str, object] = NO_EXT,
    body: bytes = b"",
    remark: str | None = None,
    version: int = VERSION,
) -> bytes:
    """Return the frame of a response."""
    return encode_prefix(opaque, code, ext, len(body), remark, version) + body


def encode_response_in_pieces(
    opaque: int, code: int, ext: Mapping[str, object], body: list[bytes], remark: str | None = None
) -> list[bytes]:
    """As `encode_response`, with a body in pieces, which are not copied."""
    return [encode_prefix(opaque, code, ext, sum(map(len, body)), remark), *body]


def _json_text(text: str) -> str:
    """Return *text* as a JSON string; letters and digits, as in nearly every id, need no escaping."""
    return f'"{text}"' if text.isalnum() and text.isascii() else orjson.dumps(text).decode()


def send_response_template(region: str = "DefaultRegion", trace_on: bool = True, version: int = VERSION) -> str:
    """Return the template for `encode_send_response`; call this once for each broker, not for each message."""
    region = _json_text(region).replace("%", "%%")
    return (
        '{"code":%d,"extFields":{"queueId":"%d",%s"msgId":"%s","TRACE_ON":"'
        + ext_text(trace_on)
        + '","MSG_REGION":'
        + region
        + ',"queueOffset":"%d"},"flag":1,"language":"'
        + ANSWER_LANGUAGE
        + '","opaque":%d,"serializeTypeCurrentRPC":"JSON","version":'
        + str(version)
        + "}"
    )


def encode_send_response(
    template: str,
    opaque: int,
    code: int,
    message_id: str,
    queue_id: int,
    queue_offset: int,
    transaction_id: str,
    recall_handle: str = "",
) -> bytes:
    """Return the answer to a stored send (code 0, 10, 11 or 12).

    *message_id* is the offset message id, or several joined with commas; hexadecimal, so not escaped. *transaction_id*
    is the sender's UNIQ_KEY, and *recall_handle* is in base64; each is left out when empty.
    """
    transaction = f'"transactionId":{_json_text(transaction_id)},' if transaction_id else ""
    if recall_handle:
        transaction += f'"recallHandle":"{recall_handle}",'
    header = (template % (code, queue_id, transaction, message_id, queue_offset, opaque)).encode()
    return _LENGTHS.pack(4 + len(header), len(header)) + header


def pull_response_template(version: int = VERSION) -> str:
    """Return the template for `encode_pull_prefix`."""
    return (
        '{"code":%d,"extFields":{"suggestWhichBrokerId":"%d","groupSysFlag":"0","nextBeginOffset":"%d",'
        '"maxOffset":"%d","minOffset":"%d","topicSysFlag":"0"},'
        '"flag":1,"language":"'
        + ANSWER_LANGUAGE
        + '","opaque":%d,"remark":"%s","serializeTypeCurrentRPC":"JSON","version":'
        + str(version)
        + "}"
    )


def encode_pull_prefix(
    template: str,
    opaque: int,
    code: int,
    next_offset: int,
    min_offset: int,
    max_offset: int,
    remark: str,
    body_bytes: int = 0,
    suggested_broker_id: int = 0,
) -> bytes:
    """Return the answer to a pull up to its body: *body_bytes* of records must follow.

    *remark* is the store's status name (FOUND, NO_MATCHED_MESSAGE, ...), a word that needs no escaping.
    """
    values = (code, suggested_broker_id, next_offset, max_offset, min_offset, opaque, remark)
    header = (template % values).encode()
    return _LENGTHS.pack(4 + len(header) + body_bytes, len(header)) + header


def pop_response_template(version: int = VERSION) -> str:
    """Return the template for `encode_pop_prefix`."""
    return (
        '{"code":%d,"extFields":{"popTime":"%d","invisibleTime":"%d","reviveQid":"%d","restNum":"%d"%s},'
        '"flag":1,"language":"'
        + ANSWER_LANGUAGE
        + '","opaque":%d,"remark":"%s","serializeTypeCurrentRPC":"JSON","version":'
        + str(version)
        + "}"
    )


def encode_pop_prefix(
    template: str,
    opaque: int,
    code: int,
    remark: str,
    pop_ms: int,
    invisible_ms: int,
    revive_queue: int,
    rest: int,
    places: Mapping[str, str],
    body_bytes: int,
) -> bytes:
    """Return the answer to a pop up to its body: *body_bytes* of records must follow.

    *places* are the header fields with the records' places; *places* and *remark* need no escaping.
    """
    more = "".join([f',"{name}":"{value}"' for name, value in places.items()])
    header = (template % (code, pop_ms, invisible_ms, revive_queue, rest, more, opaque, remark)).encode()
    return _LENGTHS.pack(4 + len(header) + body_bytes, len(header)) + header


def ack_response_template(version: int = VERSION) -> bytes:
    """Return the template for `encode_ack_response`."""
    text = '{"code":0,"flag":1,"language":"' + ANSWER_LANGUAGE + '","opaque":%d,"serializeTypeCurrentRPC":"JSON",'
    return f'{text}"version":{version}}}'.encode()


def encode_ack_response(template: bytes, opaque: int) -> bytes:
    """Return the frame of an answer that only says success."""
    header = template % opaque
    return _LENGTHS.pack(4 + len(header), len(header)) + header
