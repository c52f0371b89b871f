"""Bytes <-> packets; pure functions.

A command is a line of words. RUN and TX announce so many bytes, which follow: a message is its name, its size in bytes
and a newline, its body and a newline. Messages have that form in both directions, so what a publisher sent can go to
subscribers as it came. Names write ``%``, space and control characters as ``%20`` and so on.

    HELLO [name]            SUB filter [0|1]        UNSUB filter        ACK first count
    RUN first count size    TX first count size [acked-first acked-count]
    FORGET    PING    QUIT

The broker says ``OK``, ``PONG``, ``BYE``, ``ACK first count``, ``ERR first count CODE text`` and
``RUN first count size [again]`` with messages.
"""

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from martlet.contracts import Buffer
from martlet.delivery.fanout import Encoding, parts
from martlet.errors import RemoteProtocolError
from martlet.message import find_property
from martlet_topics.packets import (
    Acknowledge,
    Command,
    Forget,
    Hello,
    Ping,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

__all__ = [
    "ENCODING",
    "IDS_MAX",
    "WINDOW_MAX",
    "Limits",
    "announced",
    "decode",
    "decode_name",
    "encode_error",
    "encode_frame",
    "encode_run",
]

IDS_MAX: Final = 65535
WINDOW_MAX: Final = 2000
DIGITS_MAX: Final = 9
SHOWN_BYTES_MAX: Final = 60
COMPRESSED: Final = 0x1
COMPRESSION_BITS: Final = 0x700
ZLIB: Final = (0, 0x300)
INFLATED_BYTES_MAX: Final = 64 << 20
# What a name may not hold as it is on the wire: it separates words, or is itself the escape.
_ESCAPED: Final = re.compile(rb"[\x00-\x20%\x7f]")
# What a record's properties or a line of text cannot hold.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
SAFE: Final = "/!\"#$&'()*+,:;<=>?@[\\]^`{|}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may say at most."""

    line_bytes: int = 4096
    run_bytes: int = 8 << 20
    run_messages: int = 10_000


def announced(line: bytes, limits: Limits) -> int:
    """Return how many bytes follow *line*.

    Raises:
      RemoteProtocolError: it does not say how many, or too many.
    """
    if not line.startswith((b"RUN ", b"TX ")):
        return 0
    words = line.split()
    size = _number(words[3] if len(words) > 3 else b"", "size")
    if size > limits.run_bytes:
        raise RemoteProtocolError(f"a run has {size} bytes; shorten it to {limits.run_bytes}")
    return size


def decode(line: bytes, data: bytes, limits: Limits) -> Command:
    """Return what *line* and the announced *data* say.

    Raises:
      RemoteProtocolError: that is no command.
    """
    words = line.removesuffix(b"\r").split()
    entry = _PARSERS.get(words[0]) if words else None
    if entry is None:
        raise RemoteProtocolError(f"{_shown(line)} is not a command; send HELLO, SUB, UNSUB, RUN, TX, ACK or QUIT")
    low, high, parse = entry
    if not low <= len(words) - 1 <= high:
        raise RemoteProtocolError(
            f"{_shown(line)} has {len(words) - 1} words after its first; expected {low} to {high}"
        )
    return parse(words, data, limits)


def _subscribe(words: list[bytes], data: bytes, limits: Limits) -> Command:
    qos = _number(words[2], "QoS") if len(words) > 2 else 0
    if qos > 1:
        raise RemoteProtocolError(f"QoS {qos} is not supported; send 0 or 1")
    return Subscribe(_text(words[1]), qos)


def _acknowledge(words: list[bytes], data: bytes, limits: Limits) -> Acknowledge:
    first, count = _number(words[-2], "packet id"), _number(words[-1], "count")
    if not first or first + count - 1 > IDS_MAX:
        raise RemoteProtocolError(f"packet ids {first} to {first + count - 1} do not exist; they are 1 to {IDS_MAX}")
    if count > WINDOW_MAX:
        raise RemoteProtocolError(f"{count} messages cannot be in flight; at most {WINDOW_MAX} are")
    return Acknowledge(first, count)


def _run(words: list[bytes], data: bytes, limits: Limits) -> Command:
    first, count = _number(words[1], "packet id"), _number(words[2], "count")
    if count > limits.run_messages or (first and first + count - 1 > IDS_MAX):
        text = f"a run of {count} messages from packet id {first} on is too long"
        raise RemoteProtocolError(f"{text}; ids are at most {IDS_MAX}, runs {limits.run_messages} messages")
    names: list[bytes] = []
    bodies: list[bytes] = []
    ends: list[int] = []
    at, size = 0, len(data)
    for _ in range(count):
        newline = data.find(b"\n", at)
        name, _, length = data[at:newline].partition(b" ")
        begin = newline + 1
        at = begin + _number(length, "body size") + 1
        if newline < 0 or at > size or data[at - 1] != 10:
            raise RemoteProtocolError(
                f"message {_shown(name)} does not fit its run; a newline ends name, size and body"
            )
        names.append(name)
        bodies.append(data[begin : at - 1])
        ends.append(at)
    if at != size:
        raise RemoteProtocolError(f"a run of {count} messages has {size - at} bytes more than these; count them again")
    if len(words) == 5:
        raise RemoteProtocolError("TX acknowledges a first packet id and a count; send both, or neither")
    is_atomic = words[0] == b"TX"
    acknowledged = _acknowledge(words, b"", limits) if len(words) == 6 else None
    return Publish(first, tuple(names), tuple(bodies), data, tuple(ends), is_atomic, acknowledged)


Parser = Callable[[list[bytes], bytes, Limits], Command]
# How many words follow at least and at most, and what makes a packet of them.
_PARSERS: Final[dict[bytes, tuple[int, int, Parser]]] = {
    b"HELLO": (0, 1, lambda words, data, limits: Hello(_text(words[1]) if len(words) > 1 else "")),
    b"SUB": (1, 2, _subscribe),
    b"UNSUB": (1, 1, lambda words, data, limits: Unsubscribe(_text(words[1]))),
    b"RUN": (3, 3, _run),
    b"TX": (3, 5, _run),
    b"ACK": (2, 2, _acknowledge),
    b"FORGET": (0, 0, lambda words, data, limits: Forget()),
    b"PING": (0, 0, lambda words, data, limits: Ping()),
    b"QUIT": (0, 0, lambda words, data, limits: Quit()),
}


def _number(word: bytes, what: str) -> int:
    if not word.isdigit() or len(word) > DIGITS_MAX:
        raise RemoteProtocolError(f"{what} {_shown(word)} is not a number; send up to {DIGITS_MAX} digits")
    return int(word)


def _text(word: bytes) -> str:
    try:
        text = unquote_to_bytes(word).decode()
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"{_shown(word)} is not UTF-8; send UTF-8") from error
    if _CONTROL.search(text):
        raise RemoteProtocolError(f"{_shown(word)} holds a control character; choose another name")
    return text


def decode_name(word: bytes) -> str:
    """Return the name that a message is published under; empty for one that cannot be published to."""
    try:
        text = unquote_to_bytes(word).decode()
    except UnicodeDecodeError:
        return ""
    return "" if _CONTROL.search(text) or "+" in text or "#" in text else text


def _shown(word: bytes) -> str:
    return repr(word[:SHOWN_BYTES_MAX].decode("utf-8", "replace"))


# what the broker says


def encode_frame(name: bytes, body: bytes) -> bytes:
    """Return a message as both sides send it."""
    word = quote_from_bytes(name, SAFE).encode() if _ESCAPED.search(name) else name
    return b"%b %d\n%b\n" % (word, len(body), body)


def _frames(piece: Buffer) -> list[bytes]:
    return [
        encode_frame(find_property(properties, b"TAGS"), _plain(body, sys_flag))
        for _queue_id, _offset, sys_flag, body, properties in parts(piece)
    ]


def _plain(body: bytes, sys_flag: int) -> bytes:
    """The *body* that a client of RocketMQ compressed; as it is where that did not use ZLIB."""
    if not sys_flag & COMPRESSED or sys_flag & COMPRESSION_BITS not in ZLIB:
        return body
    try:
        return zlib.decompressobj().decompress(body, INFLATED_BYTES_MAX)
    except zlib.error:
        return body


ENCODING: Final = Encoding("topics", _frames)


def encode_run(first_id: int, count: int, size: int, *, again: bool = False) -> bytes:
    """Return the line before the frames of *count* messages."""
    return b"RUN %d %d %d%b\n" % (first_id, count, size, b" again" if again else b"")


def encode_error(code: str, text: str, first_id: int = 0, count: int = 0) -> bytes:
    """Return the line that refuses *count* messages, or something else for none."""
    return f"ERR {first_id} {count} {code} {_CONTROL.sub('?', text)}\n".encode()
