"""Frames of STOMP as bytes; pure functions.

The three versions differ in three ways:

- Escapes: STOMP 1.0 has none, 1.1 has ``\\n``, ``\\c`` and ``\\\\``, and 1.2 also ``\\r``. CONNECT and CONNECTED never
  have any.
- Spaces around names and values: the examples of STOMP 1.0 have some, which are not part of a value. Later they are.
- Ends of lines: 1.2 allows CR LF and LF, 1.0 and 1.1 only LF. Many clients and brokers use CR LF with all versions, so
  it is allowed in a frame of 1.1 whose first line ends so. Otherwise, a CR before LF is part of a value there.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, final

from martlet_stomp.wire.errors import StompError, shown
from martlet_stomp.wire.packets import Version

__all__ = [
    "Head",
    "Limits",
    "check_unfinished",
    "content_length",
    "decode_head",
    "encode_connected",
    "encode_error",
    "encode_frame",
    "encode_header",
    "encode_receipts",
    "escape",
    "find_receipt",
    "head_end",
    "unescape",
]

CARRIAGE_RETURN: Final = 13
# Longest command, with its end of line.
COMMAND_BYTES_MAX: Final = 32

# The blank line after the headers. DISCONNECT has none in the examples of the specifications, so a NUL at the beginning
# of a line ends the frame, too.
_BLANK: Final = re.compile(rb"\n(?:\r?\n|\0)")
_BLANK_LF: Final = re.compile(rb"\n[\n\0]")
_ESCAPES: Final[dict[Version, dict[str, str]]] = {
    Version.V1_1: {"\\n": "\n", "\\c": ":", "\\\\": "\\"},
    Version.V1_2: {"\\n": "\n", "\\c": ":", "\\\\": "\\", "\\r": "\r"},
}
_ESCAPED: Final = re.compile(r"\\.?", re.DOTALL)
# NUL ends a frame for many clients, even in a header; U+FFFD replaces a character that cannot be shown.
# STOMP 1.0 cannot express a line feed; its clients get the escape of 1.1, but no other escapes.
_SPECIAL: Final[dict[Version, re.Pattern[str]]] = {
    Version.V1_0: re.compile("[\n\0]"),
    Version.V1_1: re.compile(r"[\n:\\" + "\0]"),
    Version.V1_2: re.compile(r"[\r\n:\\" + "\0]"),
}
_REPLACED: Final = {"\n": "\\n", "\r": "\\r", ":": "\\c", "\\": "\\\\", "\0": "�"}
_LENGTH: Final = re.compile(r"[0-9]{1,10}\Z")
_RECEIPT: Final = re.compile(rb"\nreceipt:([^\n\r\0]*)\r?\n")


@final
class Limits(NamedTuple):
    """The limits of a client's frames, and its time for CONNECT."""

    connect_bytes_max: int = 65_536  # the whole CONNECT
    frame_bytes_max: int = (4 << 20) + 65_536  # any other whole frame
    head_bytes_max: int = 65_536  # the command and the headers
    headers_max: int = 100
    header_bytes_max: int = 8192  # a line of the head
    connect_s: float = 10.0


@final
class Head(NamedTuple):
    """The command and the headers of a frame; a repeated header has its first value."""

    command: str
    headers: dict[str, str]


# ---- decoding


def head_end(data: bytes | bytearray, at: int, version: Version | None, seen: int = 0) -> tuple[int, int, bool] | None:
    """Return the end of the headers of the frame at *at*, the beginning of its body, and whether the frame ends there.

    The last line end of the headers belongs to neither. Returns None if the headers are incomplete.

    Args:
      version: None before the client is connected.
      seen: number of bytes of the frame that were searched before.
    """
    blank = _BLANK
    if version is Version.V1_1:
        line_end = data.find(b"\n", at, at + COMMAND_BYTES_MAX)
        if line_end > at and data[line_end - 1] != CARRIAGE_RETURN:
            blank = _BLANK_LF
    found = blank.search(data, at + max(0, seen - 2))
    if found is None:
        return None
    return found.start(), found.end(), data[found.end() - 1] == 0


def decode_head(head: bytes, version: Version | None, limits: Limits) -> Head:
    """Return the command and headers in *head*, which ends before the blank line.

    Args:
      version: None for CONNECT, which has no escapes.

    Raises:
      StompError: it is malformed, or exceeds a limit.
    """
    check_lines(head, limits)
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        around = head[max(0, error.start - 20) : error.start + 20]
        raise StompError(f"the headers are not UTF-8 near {around!r}; encode them as UTF-8") from error
    command, *lines = text.split("\n")
    if version is not Version.V1_1 or command.endswith("\r"):
        command, lines = command.removesuffix("\r"), [line.removesuffix("\r") for line in lines]
        if version is Version.V1_2 and "\r" in text:
            _check_carriage_returns(command, lines)
    if len(lines) > limits.headers_max:
        raise StompError(f"a frame has {len(lines)} headers; stomp.headers_max is {limits.headers_max}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if version is Version.V1_0:
            name, value = name.strip(), value.strip()
        if not colon or not name:
            raise StompError(f"header line {shown(line)} is not NAME:VALUE")
        if name not in headers:
            headers[name] = value
    if "\\" in text and version:
        headers = _unescaped(headers, version)
    return Head(command, headers)


def check_lines(head: bytes, limits: Limits) -> None:
    """Raise `StompError` if *head* contains NUL or exceeds a limit."""
    check_unfinished(head, 0, limits)
    if len(head) > limits.header_bytes_max and max(map(len, head.split(b"\n"))) > limits.header_bytes_max:
        raise _too_long(limits)


def check_unfinished(head: bytes | bytearray, seen: int, limits: Limits) -> None:
    """Raise `StompError` if no frame can begin with *head*, whose first *seen* bytes were checked before.

    The time of the check does not depend on *seen*.
    """
    size = len(head)
    if head.find(0, seen) >= 0:
        raise StompError("the headers contain NUL; a blank line must follow them")
    if size >= COMMAND_BYTES_MAX and head.find(b"\n", 0, COMMAND_BYTES_MAX) < 0:
        raise StompError(f"the first line begins with {bytes(head[:COMMAND_BYTES_MAX])!r}, which is no STOMP command")
    if size > limits.header_bytes_max and head.find(b"\n", size - limits.header_bytes_max - 1) < 0:
        raise _too_long(limits)
    if size > limits.head_bytes_max:
        raise StompError(f"the headers have more than {limits.head_bytes_max} bytes; stomp.head_bytes_max is that")


def _too_long(limits: Limits) -> StompError:
    return StompError(f"a header line is longer than {limits.header_bytes_max} bytes; stomp.header_bytes_max is that")


def _check_carriage_returns(command: str, lines: Iterable[str]) -> None:
    for line in (command, *lines):
        if "\r" in line:
            raise StompError(f"line {shown(line)} contains a carriage return; write \\r in a header")


def _unescaped(headers: dict[str, str], version: Version) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers.items():
        plain = unescape(name, version)
        if plain not in found:  # names that are escaped differently may be equal
            found[plain] = unescape(value, version)
    return found


def unescape(text: str, version: Version) -> str:
    """Return *text* without the escapes of *version*.

    Raises:
      StompError: *text* contains an escape that the version does not define.
    """
    escapes = _ESCAPES.get(version)
    if escapes is None or "\\" not in text:
        return text

    def plain(match: re.Match[str]) -> str:
        found = escapes.get(match[0])
        if found is None:
            known = " ".join(escapes)
            raise StompError(f"header {shown(text)} contains {match[0]}; STOMP {version.text} has the escapes {known}")
        return found

    return _ESCAPED.sub(plain, text)


def content_length(headers: dict[str, str]) -> int:
    """Return the ``content-length``, -1 if absent. Raises `StompError`."""
    text = headers.get("content-length")
    if text is None:
        return -1
    if _LENGTH.match(text) is None:
        raise StompError(f"content-length {shown(text)} is not the number of bytes of a body")
    return int(text)


def find_receipt(head: bytes, version: Version) -> bytes | None:
    """Return the receipt of a malformed frame that begins with *head*; None if it is not found."""
    found = _RECEIPT.search(head)
    if found is None:
        return None
    try:
        value = found[1].decode()
        return escape(unescape(value.strip() if version is Version.V1_0 else value, version), version)
    except (UnicodeDecodeError, StompError):
        return None


# ---- encoding


def escape(text: str, version: Version) -> bytes:
    """Return a header's value with the escapes of *version*; NUL becomes U+FFFD."""
    if _SPECIAL[version].search(text) is None:
        return text.encode()
    return _SPECIAL[version].sub(lambda match: _REPLACED[match[0]], text).encode()


def encode_header(name: str, value: str, version: Version) -> bytes:
    """Return a header's line with its LF; empty if *name* is empty, or blank in STOMP 1.0: no frame can have it."""
    if not name:
        return b""
    if version is Version.V1_0:
        if not name.strip():
            return b""
        return b"%b:%b\n" % (escape(name, version).replace(b":", b"\\c"), escape(value, version))
    return b"%b:%b\n" % (escape(name, version), escape(value, version))


def encode_frame(command: str, headers: Iterable[tuple[str, str]], body: bytes, version: Version) -> bytes:
    """Return a whole frame; the caller includes ``content-length`` in *headers*, if the frame needs it.

    CONNECT, STOMP and CONNECTED have no escapes: their headers must not contain a line end, and names no colon.
    """
    if command in ("CONNECT", "STOMP", "CONNECTED"):
        lines = b"".join([f"{name}:{value}\n".encode() for name, value in headers])
    else:
        lines = b"".join([encode_header(name, value, version) for name, value in headers])
    return b"%b\n%b\n%b\0" % (command.encode(), lines, body)


def encode_connected(version: Version, session: str, server: str, beats: tuple[int, int]) -> bytes:
    """Return CONNECTED; *beats* are the intervals of the broker's and the client's heart-beats in ms, 0 for none."""
    headers = [("version", version.text), ("session", session), ("server", server)]
    if version is not Version.V1_0:
        headers.append(("heart-beat", f"{beats[0]},{beats[1]}"))
    return encode_frame("CONNECTED", headers, b"", version)


def encode_receipts(receipts: Sequence[bytes]) -> bytes:
    """Return a RECEIPT frame for each of *receipts*, in the form of `packets.py`; empty if there are none."""
    if not receipts:
        return b""
    return b"RECEIPT\nreceipt-id:%b\n\n\0" % b"\n\n\0RECEIPT\nreceipt-id:".join(receipts)


def encode_error(
    text: str, version: Version, receipt: bytes | None = None, headers: Iterable[tuple[str, str]] = ()
) -> bytes:
    """Return ERROR with *text* as its body, and the part before the first semicolon as its ``message``.

    Args:
      receipt: the receipt of the frame that caused the error, in the form of `packets.py`.
    """
    body = text.replace("\0", "�").encode()
    lines = [encode_header("message", text.partition(";")[0], version)]
    if receipt is not None:
        lines.append(b"receipt-id:%b\n" % receipt)
    lines += [encode_header(name, value, version) for name, value in headers]
    lines.append(b"content-type:text/plain\ncontent-length:%d\n" % len(body))
    return b"ERROR\n%b\n%b\0" % (b"".join(lines), body)
