"""Lines <-> packets; pure functions.

A command is one line of words, ended by a newline (a carriage return before it is
dropped). PUB has its body in the line; PUT announces so many bytes, which follow with a
newline of their own and may be anything. Names and values of properties write space,
control characters, ``%`` and ``=`` (in names) as ``%20`` and so on.

    PUB topic [name=value ...] [:] body          a lone : ends the properties
    PUT topic bytes [name=value ...] <newline> body <newline>
    SUB topic [as NAME | group NAME] [from tail|earliest|offset N] [credit N] [lease SECONDS] [tags A,B]
        [where LANGUAGE expression ...]          such as: where PROPERTIES colour=red size=9
    CREDIT id n          ACK id queue offset [last]          NACK id queue offset [delay_ms]
    EXTEND id queue offset          UNSUB id [forget]          LOGIN user password
    PING [text]   PONG   HELP   QUIT

The broker sends lines that begin with a keyword: ``OK ...``, ``ERR code text``, ``PONG``, ``PING``, ``END id
reason``, ``BYE``, ``INFO text``, and for messages ``BATCH id count bytes [delivery=n]`` followed by that
many bytes: ``MSG queue offset bytes [name=value ...]``, a newline, the body, a newline, for each.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from martlet.contracts import Buffer
from martlet.delivery.fanout import parts
from martlet.errors import RemoteProtocolError
from martlet_line.packets import (
    Ack,
    Command,
    Credit,
    Extend,
    Help,
    Login,
    Malformed,
    Nack,
    Ping,
    Pong,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

__all__ = [
    "HELP",
    "Limits",
    "Received",
    "announced",
    "check_line_bytes",
    "decode",
    "decode_batch",
    "encode",
    "encode_error",
    "frames",
    "parse_properties",
]

NUMBER_DIGITS: Final = 19  # fewer digits than this; 10**18 fits an i64
SHOWN_BYTES_MAX: Final = 60
COLON: Final = 0x3A
RETURN: Final = 0x0D

COMPRESSED: Final = 0x1
ZLIB_TYPES: Final = (0, 3)  # MessageSysFlag compression type bits 8 to 10: old clients use 0 for zlib
INFLATED_BYTES_MAX: Final = 64 << 20

HELP: Final = (
    "PUB topic [name=value ...] [:] body - store a message; OK queue offset",
    "PUT topic bytes [name=value ...] - the same; the body follows on the next line, that many bytes and a newline",
    "SUB topic [from tail|earliest|offset N] [credit N] [tags A,B] [where LANGUAGE expression] - get messages; OK id",
    "SUB topic as NAME ... - durable: continues where NAME has acknowledged; OK id",
    "SUB topic group NAME [lease SECONDS] ... - each message goes to one member, who acknowledges it; OK id",
    "CREDIT id n - let n more messages come",
    "ACK id queue offset [last] - done with a message of a group, or with all up to it of a durable subscription",
    "NACK id queue offset [delay_ms] - give a message of a group to another member",
    "EXTEND id queue offset - hold a message of a group for the lease time again",
    "UNSUB id [forget] - end a subscription; forget: delete the durable name as well",
    "LOGIN user password - authenticate; only before SUB; OK user",
    "PING [text], HELP, QUIT",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of what a client may send."""

    line_bytes: int = 65536
    body_bytes: int = 4 << 20
    words: int = 64


class _BadLine(Exception):
    """The line is not a command; the text says what is expected."""


# commands of clients


def decode(data: bytes, limits: Limits) -> tuple[list[Command], int]:
    """Return the complete commands in *data*, and how many of its bytes they take.

    Raises:
      RemoteProtocolError: a line or a body is too long, or a body does not have the announced length.
    """
    commands: list[Command] = []
    at = 0
    run: Publish | None = None
    again = b"\n"  # the prefix of a line that continues the run; initially one that no line has
    skip = 0
    while True:
        end = data.find(b"\n", at)
        if end < 0:
            check_line_bytes(len(data) - at, limits)
            return commands, at
        if run is not None and data.startswith(again, at) and end - at <= limits.line_bytes:
            # The hot path: a PUB to the same topic, without properties, a colon or a carriage return.
            body = data[at + skip : end]
            if b"=" not in body and data[at + skip] != COLON and data[end - 1] != RETURN:
                run.bodies.append(body)
                run.properties.append(b"")
                at = end + 1
                continue
        line = data[at:end]
        check_line_bytes(end - at, limits)
        size = announced(line, limits)
        behind = end + 1 if size < 0 else end + size + 2
        if behind > len(data):
            return commands, at
        run = _add(commands, _parse(line, data[end + 1 : behind], limits), run)
        again = b"PUB %b " % run.topic.encode() if run is not None else b"\n"
        skip = len(again)
        at = behind


def check_line_bytes(size: int, limits: Limits) -> None:
    """Raise `RemoteProtocolError` if a line is too long."""
    if size > limits.line_bytes:
        raise RemoteProtocolError(f"a line is longer than {limits.line_bytes} bytes; use PUT for large bodies")


def announced(line: bytes, limits: Limits) -> int:
    """How many bytes of body follow *line*; -1 if none do.

    Raises:
      RemoteProtocolError: it announces a body without its length, or one that is too long.
    """
    words = line.split(None, 3)
    if not words or words[0].upper() != b"PUT":
        return -1
    size = _number(words[2]) if len(words) > 2 else None
    if size is None:
        raise RemoteProtocolError("PUT does not say how long its body is; it is PUT topic bytes [name=value ...]")
    if size > limits.body_bytes:
        raise RemoteProtocolError(f"a body of {size} bytes is longer than {limits.body_bytes}")
    return size


def _add(commands: list[Command], packet: Command | None, run: Publish | None) -> Publish | None:
    """Append *packet*, to the preceding run of publishes if it belongs there; return the current run."""
    if packet is None:
        return run
    if isinstance(packet, Publish):
        if run is not None and run.topic == packet.topic:
            run.bodies += packet.bodies
            run.properties += packet.properties
            return run
        commands.append(packet)
        return packet
    commands.append(packet)
    return None


def _parse(line: bytes, rest: bytes, limits: Limits) -> Command | None:
    """Return the command in *line*, None for an empty line; *rest* is an announced body and its newline."""
    line = line.removesuffix(b"\r")
    verb, _, tail = line.partition(b" ")
    try:
        if not verb:
            return None if not tail.strip() else _bad("a line begins with a space")
        parser = _PARSERS.get(verb.upper())
        if parser is None:
            return Malformed(f"{_show(verb)} is not a command; try HELP")
        if parser is _parse_put:
            if rest[-1:] != b"\n":
                raise RemoteProtocolError(f"a body of {len(rest) - 1} bytes does not end with a newline")
            return _parse_put(tail, rest[:-1], limits)
        return parser(tail, b"", limits)
    except _BadLine as error:
        return Malformed(f"{verb.upper().decode()}: {error}")


def _bad(text: str) -> Malformed:
    raise _BadLine(text)


def _parse_pub(tail: bytes, body: bytes, limits: Limits) -> Command:
    topic, _, rest = tail.partition(b" ")
    properties: list[bytes] = []
    while rest:
        word, _, behind = rest.partition(b" ")
        if word == b":":
            rest = behind
            break
        if b"=" not in word[1:]:
            break
        if len(properties) >= limits.words:
            _bad(f"more than {limits.words} properties")
        properties.append(_property(word))
        rest = behind
    return Publish(_name(topic, "topic"), [rest], [b"".join(properties)])


def _parse_put(tail: bytes, body: bytes, limits: Limits) -> Command:
    words = _words(tail, limits)
    return Publish(_name(words[0], "topic"), [body], [b"".join(map(_property, words[2:]))])


def _property(word: bytes) -> bytes:
    """``name=value`` as records hold it."""
    quoted_name, equals, quoted_value = word.partition(b"=")
    name, value = _unquote(quoted_name), _unquote(quoted_value)
    if not equals or not name or not value:
        _bad(f"{_show(word)} is not a property; write name=value, and a single : before a body that begins like one")
    if _SEPARATORS.search(name) or _SEPARATORS.search(value):
        _bad(f"property {_show(quoted_name)} holds U+0001 or U+0002, or is not UTF-8")
    return b"%b\x01%b\x02" % (name, value)


def parse_properties(text: str) -> bytes:
    """Return ``name=value ...`` as records hold properties.

    Raises:
      ValueError: a word is not a property.
    """
    try:
        return b"".join(map(_property, text.encode().split()))
    except _BadLine as error:
        raise ValueError(str(error)) from error


def _parse_sub(tail: bytes, body: bytes, limits: Limits) -> Command:
    tail, *where = _WHERE.split(tail, 1)
    words = _words(tail, limits)
    if not words:
        _bad("topic is missing; write SUB topic [as NAME | group NAME] [from tail|earliest|offset N] [credit N]")
    options: dict[str, Any] = {}
    left = iter(words[1:])
    for word in left:
        option = word.decode("ascii", "replace").lower()
        parse_option = _OPTIONS.get(option)
        if parse_option is None:
            _bad(f"{_show(word)} is not an option; options: as, group, from, credit, lease, tags, where")
        else:
            field, value = parse_option(left)
            if field in options:
                _bad(f"{option} is given twice")
            options[field] = value
    if "name" in options and "group" in options:
        _bad("as and group exclude each other")
    if "lease_s" in options and "group" not in options:
        _bad("lease is for groups")
    if where:
        language, _, expression = where[0].strip().partition(b" ")
        options["language"] = _name(language, "filter language")
        options["expression"] = _name(expression.strip(), "expression")
    return Subscribe(_name(words[0], "topic"), **options)


def _from_option(words: Iterator[bytes]) -> tuple[str, object]:
    where = _next(words, "from").decode("ascii", "replace").lower()
    if where == "offset":
        return "start", _count(_next(words, "offset"), "offset")
    if where not in ("tail", "earliest"):
        _bad(f"from {where!r} is unknown; it is tail, earliest or offset N")
    return "start", where


def _tags_option(words: Iterator[bytes]) -> tuple[str, object]:
    tags = _next(words, "tags").split(b",")
    return "tags", tuple(sorted({_name(_unquote(tag), "tag") for tag in tags}))


_OPTIONS: Final[dict[str, Callable[[Iterator[bytes]], tuple[str, object]]]] = {
    "as": lambda words: ("name", _name(_next(words, "as"), "name")),
    "group": lambda words: ("group", _name(_next(words, "group"), "group")),
    "from": _from_option,
    "credit": lambda words: ("credit", _count(_next(words, "credit"), "credit")),
    "lease": lambda words: ("lease_s", _count(_next(words, "lease"), "lease")),
    "tags": _tags_option,
}


def _next(words: Iterator[bytes], option: str) -> bytes:
    word = next(words, b"")
    return word or _never(f"{option} needs a value")


def _never(text: str) -> bytes:
    raise _BadLine(text)


def _numbers(names: str, optional: int, make: Callable[..., Command]) -> "Parser":
    """Return a parser for a command with these numbers, the last *optional* of which may be missing."""
    wanted = names.split()

    def parse(tail: bytes, body: bytes, limits: Limits) -> Command:
        words = _words(tail, limits)
        if not len(wanted) - optional <= len(words) <= len(wanted):
            _bad(f"it is followed by {names}")
        return make(*(_count(word, name) for word, name in zip(words, wanted, strict=False)))

    return parse


def _parse_unsub(tail: bytes, body: bytes, limits: Limits) -> Command:
    words = _words(tail, limits)
    if not 1 <= len(words) <= 2 or (len(words) == 2 and words[1].lower() != b"forget"):
        _bad("it is followed by id [forget]")
    return Unsubscribe(_count(words[0], "id"), len(words) == 2)


def _parse_login(tail: bytes, body: bytes, limits: Limits) -> Command:
    user, *passwords = _words(tail, limits) or [b""]
    if len(passwords) != 1:
        _bad("it is followed by user password, in both of which a space is %20")
    return Login(_name(_unquote(user), "user"), _unquote(passwords[0]))


def _parse_ping(tail: bytes, body: bytes, limits: Limits) -> Command:
    return Ping(_text(tail))


def _bare(packet: Command) -> "Parser":
    def parse(tail: bytes, body: bytes, limits: Limits) -> Command:
        return packet if not tail.strip() else _bad("nothing follows it")

    return parse


def _words(tail: bytes, limits: Limits) -> list[bytes]:
    words = tail.split()
    if len(words) > limits.words:
        _bad(f"more than {limits.words} words")
    return words


def _number(word: bytes) -> int | None:
    # int() takes quadratic time for long texts
    return int(word) if word.isdigit() and len(word) < NUMBER_DIGITS else None


def _count(word: bytes, name: str) -> int:
    number = _number(word)
    if number is None:
        raise _BadLine(f"{name} {_show(word)} is not a whole number from 0 to 999999999999999999")
    return number


def _name(word: bytes, what: str) -> str:
    if not word:
        raise _BadLine(f"{what} is missing")
    return _text(word)


def _text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise _BadLine(f"{_show(data)} is not UTF-8") from error
    if not text.isprintable():
        raise _BadLine(f"{_show(data)} holds control characters")
    return text


def _show(word: bytes) -> str:
    text = ascii(word[:SHOWN_BYTES_MAX].decode("utf-8", "replace"))
    return text if len(word) <= SHOWN_BYTES_MAX else f"{text}..."


Parser = Callable[[bytes, bytes, Limits], Command]

_PARSERS: Final[dict[bytes, Parser]] = {
    b"PUB": _parse_pub,
    b"PUT": _parse_put,
    b"SUB": _parse_sub,
    b"UNSUB": _parse_unsub,
    b"CREDIT": _numbers("id n", 0, Credit),
    b"ACK": _numbers("id queue offset last", 1, lambda i, q, o, last=-1: Ack(i, q, o, o if last < 0 else last)),
    b"NACK": _numbers("id queue offset delay_ms", 1, Nack),
    b"EXTEND": _numbers("id queue offset", 0, Extend),
    b"LOGIN": _parse_login,
    b"PING": _parse_ping,
    b"PONG": _bare(Pong()),
    b"HELP": _bare(Help()),
    b"QUIT": _bare(Quit()),
}


def encode(packet: Command) -> bytes:
    """Return *packet* as a client sends it; publishes always as PUT. Malformed packets have no line."""
    match packet:
        case Publish():
            return b"".join(_put(packet.topic, b, p) for b, p in zip(packet.bodies, packet.properties, strict=True))
        case Subscribe():
            return _sub(packet)
        case Unsubscribe(number, forget):
            return b"UNSUB %d%b\n" % (number, b" forget" if forget else b"")
        case Credit(number, count):
            return b"CREDIT %d %d\n" % (number, count)
        case Ack(number, queue_id, offset, last):
            return b"ACK %d %d %d %d\n" % (number, queue_id, offset, last)
        case Nack(number, queue_id, offset, delay_ms):
            return b"NACK %d %d %d %d\n" % (number, queue_id, offset, delay_ms)
        case Extend(number, queue_id, offset):
            return b"EXTEND %d %d %d\n" % (number, queue_id, offset)
        case Login(user, password):
            return b"LOGIN %b %b\n" % (_quote(user.encode(), _IN_VALUE), _quote(password, _IN_VALUE))
        case Ping(text):
            return b"PING %b\n" % text.encode() if text else b"PING\n"
        case _:
            return type(packet).__name__.upper().encode() + b"\n"


def _put(topic: str, body: bytes, properties: bytes) -> bytes:
    return b"PUT %b %d%b\n%b\n" % (topic.encode(), len(body), _shown_properties(properties), body)


def _sub(packet: Subscribe) -> bytes:
    words = ["SUB", packet.topic]
    words += ["as", packet.name] if packet.name else []
    words += ["group", packet.group] if packet.group else []
    words += ["from", packet.start] if isinstance(packet.start, str) else ["from", "offset", str(packet.start)]
    words += ["credit", str(packet.credit)] if packet.credit >= 0 else []
    words += ["lease", str(packet.lease_s)] if packet.lease_s >= 0 else []
    words += ["tags", ",".join(map(_quote_text, packet.tags))] if packet.tags else []
    words += ["where", packet.language, packet.expression] if packet.language else []
    return " ".join(words).encode() + b"\n"


# answers of the broker


def encode_error(code: str, text: str) -> bytes:
    """Return one ``ERR`` line; newlines in *text* become spaces."""
    return f"ERR {code} {' '.join(text.split())}\n".encode("utf-8", "replace")


def frames(piece: Buffer) -> list[bytes]:
    """Return the MSG frame of each record in *piece*."""
    return [
        b"MSG %d %d %d\n%b\n" % (queue_id, offset, len(body), body)
        if not properties and not flags & COMPRESSED
        else _frame(queue_id, offset, flags, body, properties)
        for queue_id, offset, flags, body, properties in parts(piece)
    ]


def _frame(queue_id: int, offset: int, flags: int, body: bytes, properties: bytes) -> bytes:
    if flags & COMPRESSED:
        body, how = _inflate(flags >> 8 & 7, body)
        properties = properties.removesuffix(b"\x02") + (b"\x02" if properties else b"") + how
    return b"MSG %d %d %d%b\n%b\n" % (queue_id, offset, len(body), _shown_properties(properties), body)


def _inflate(kind: int, body: bytes) -> tuple[bytes, bytes]:
    """Return the decompressed body; if that is not possible, the body as it is and a property that says so."""
    if kind not in ZLIB_TYPES:
        return body, b"compressed\x01%b\x02" % (b"lz4" if kind == 1 else b"zstd")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(body, INFLATED_BYTES_MAX)
    except zlib.error:
        return body, b"compressed\x01zlib\x02"
    return (plain, b"") if stream.eof else (body, b"compressed\x01zlib\x02")


def _shown_properties(properties: bytes) -> bytes:
    """`` name=value`` for each."""
    if not properties:
        return b""
    if not _SPECIAL.search(properties):
        return b" " + properties.removesuffix(b"\x02").replace(b"\x01", b"=").replace(b"\x02", b" ")
    shown = [b""]
    for fragment in properties.split(b"\x02"):
        name, _, value = fragment.partition(b"\x01")
        if name and value:
            shown.append(_quote(name, _IN_NAME) + b"=" + _quote(value, _IN_VALUE))
    return b" ".join(shown)


# Control characters (except the separators U+0001 and U+0002), space, %, and = in a name.
_SPECIAL: Final = re.compile(rb"[\x00\x03-\x20%=\x7f]")
_IN_NAME: Final = re.compile(rb"[\x00-\x20%=\x7f]")
_IN_VALUE: Final = re.compile(rb"[\x00-\x20%\x7f]")
_IN_TAG: Final = re.compile(rb"[\x00-\x20%,\x7f]")
_WHERE: Final = re.compile(rb"\s+where(?:\s+|$)", re.IGNORECASE)
_SEPARATORS: Final = re.compile(rb"[\x01\x02]")


def _quote(data: bytes, special: "re.Pattern[bytes]") -> bytes:
    return special.sub(lambda match: b"%%%02X" % match[0][0], data)


def _quote_text(tag: str) -> str:
    return _quote(tag.encode(), _IN_TAG).decode()


def _unquote(word: bytes) -> bytes:
    return unquote_to_bytes(word) if b"%" in word else word


@dataclass(frozen=True, slots=True)
class Received:
    """One message as a client reads it; ``properties`` are encoded as in records."""

    queue_id: int
    offset: int
    body: bytes
    properties: bytes = b""


def decode_batch(data: bytes) -> list[Received]:
    """Return the messages in *data*, the bytes that a BATCH line announced; for clients.

    Raises:
      RemoteProtocolError: they are not complete MSG frames.
    """
    found: list[Received] = []
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        words = data[at:end].split(b" ")
        if end < 0 or words[0] != b"MSG" or len(words) < 4 or not all(map(bytes.isdigit, words[1:4])):
            raise RemoteProtocolError(f"{_show(data[at : at + SHOWN_BYTES_MAX])} is not an MSG frame")
        queue_id, offset, size = map(int, words[1:4])
        at = end + 2 + size
        if data[at - 1 : at] != b"\n":
            raise RemoteProtocolError(f"a body of {size} bytes does not end with a newline")
        found.append(Received(queue_id, offset, data[end + 1 : at - 1], b"".join(map(_property, words[4:]))))
    return found
