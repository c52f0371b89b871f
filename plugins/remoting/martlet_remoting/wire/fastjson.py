"""Reads and writes JSON bodies in the dialect of RocketMQ's Java code (Fastjson).

Two things differ from standard JSON. Integer keys have no quotes, ``{0:"10.0.0.1:10911"}``, and a queue can be a
key, ``{{"brokerName":"b","queueId":0,"topic":"t"}:5}`` (a Map<MessageQueue, V>). Java's tools read such bodies in no
other form, and the Go client splits them on literal ``,{`` and ``}:``, so the output never contains blanks.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, final

import orjson

from martlet.errors import RemoteProtocolError
from martlet.runtime.steps import Budget, Steps, finish_now
from martlet_remoting.wire.packets import MessageQueue

__all__ = [
    "BODY_BYTES_MAX",
    "VALUES_MAX",
    "Lazy",
    "LazyList",
    "Shape",
    "dumps",
    "dumps_in_steps",
    "integer",
    "load_object",
    "loads",
    "queue_key",
    "read",
    "read_object",
]

DEPTH_MAX: Final = 64
# Limit of a request's body. RocketMQ's clients send a few KiB; heartbeats with 4,096 topics, the most that a group may
# subscribe to, have 0.8 MiB.
BODY_BYTES_MAX: Final = 1 << 20
# Limit of values. Heartbeats with 4,096 topics have 50,000; a request to lock 16,384 queues, the most of a topic, has
# 65,540.
VALUES_MAX: Final = 80_000
# Standard JSON with at most this many values is parsed at once; the worst case, empty arrays, takes orjson 2 ms.
PLAIN_VALUES_MAX: Final = 20_000
# Time to parse a value of the dialect: 3 MB/s.
VALUE_US: Final = 8.0
# Longest string in the dialect; the longest that clients send is an expression of 16,384 characters.
STRING_BYTES_MAX: Final = 65_536
STRING_BYTES_OF_A_VALUE: Final = 64  # a longer string counts as several values of a slice
DIGITS_MAX: Final = 20  # of an i64 with its sign
I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1

_BLANKS: Final = re.compile(rb"[ \t\r\n]{0,4096}")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD: Final = re.compile(rb"[A-Za-z0-9_+.\-]{1,256}")
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_WORDS: Final[Mapping[str, object]] = {"true": True, "false": False, "null": None}

# A function that is called for each value that is an object, with the field's name and the value, and returns the
# replacement.
Shape: TypeAlias = Callable[[object, dict[object, object]], object]


def queue_key(queue: MessageQueue) -> str:
    """Return *queue* as a key: fields in alphabetical order, no blanks."""
    broker, topic = orjson.dumps(queue.broker_name).decode(), orjson.dumps(queue.topic).decode()
    return f'{{"brokerName":{broker},"queueId":{queue.queue_id},"topic":{topic}}}'


def dumps(value: object) -> bytes:
    """Return *value* as compact JSON with unquoted int keys and queues as keys.

    Fields that are None are omitted, as Java omits null.

    Raises:
      TypeError: a value has a type that JSON does not support.
    """
    return _text(value).encode()


def _text(value: object) -> str:
    if isinstance(value, MessageQueue):
        return queue_key(value)
    if isinstance(value, Mapping):
        return "{" + ",".join([f"{_key(k)}:{_text(v)}" for k, v in value.items() if v is not None]) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ",".join(map(_text, value)) + "]"
    return orjson.dumps(value).decode()


def _key(key: object) -> str:
    if type(key) is int:
        return str(key)
    return queue_key(key) if isinstance(key, MessageQueue) else orjson.dumps(key).decode()


def dumps_in_steps(value: Mapping[str, object]) -> Steps[list[bytes]]:
    """Return the text of `dumps` in pieces, one per slice of work; joining megabytes would take 10 ms.

    Works for tables of any length. Values of type bytes must be JSON already.
    """
    parts: list[str] = []
    pieces: list[bytes] = []
    for _ in _write(value, parts.append, Budget()):
        pieces.append("".join(parts).encode())
        parts.clear()
        yield
    pieces.append("".join(parts).encode())
    return pieces


@final
class Lazy:
    """Fields of an object, generated while `dumps_in_steps` writes them."""

    __slots__ = ("fields",)

    def __init__(self, fields: Iterable[tuple[object, object]]) -> None:
        self.fields = fields


@final
class LazyList:
    """Items of a list, generated while `dumps_in_steps` writes them."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[object]) -> None:
        self.items = items


CONTAINERS: Final = (Mapping, Lazy, list, LazyList)


def _write(value: object, put: Callable[[str], None], budget: Budget) -> Steps[None]:
    brackets, entries = _entries(value)
    before = brackets[0]
    for name, inner in entries:
        put(before + name)
        before = ","
        if isinstance(inner, CONTAINERS):
            yield from _write(inner, put, budget)
        else:
            put(inner.decode() if isinstance(inner, bytes) else _text(inner))
        if budget.is_over():
            yield
    put(brackets if before == brackets[0] else brackets[1])


def _entries(value: object) -> tuple[str, Iterable[tuple[str, object]]]:
    """Return the brackets of a container, and its entries, each with the text that precedes it."""
    if isinstance(value, Mapping | Lazy):
        fields = list(value.items()) if isinstance(value, Mapping) else value.fields
        return "{}", ((f"{_key(key)}:", inner) for key, inner in fields if inner is not None)
    assert isinstance(value, list | LazyList)
    return "[]", (("", inner) for inner in (list(value) if isinstance(value, list) else value.items))


def loads(data: bytes) -> object:
    """Parse *data*, standard JSON or the dialect, without a time limit; for clients, not for servers.

    Unquoted keys become text, queues as keys become `MessageQueue`.

    Raises:
      ValueError: *data* is neither, or is nested deeper than DEPTH_MAX.
    """
    try:
        plain: object = orjson.loads(data)
    except orjson.JSONDecodeError:
        return finish_now(_Reader(data, len(data), len(data), None).document())
    return plain


def read(
    data: bytes, *, bytes_max: int = BODY_BYTES_MAX, values_max: int = VALUES_MAX, shape: Shape | None = None
) -> Steps[object]:
    """Parse *data* from the network like `loads`: standard JSON with few values at once, everything else in slices.

    In a long text, each object is replaced by the result of *shape*; in a short one it is unchanged.

    Raises:
      ValueError: as `loads`; or *data* is longer than *bytes_max* or has more than *values_max* values.
    """
    if len(data) > bytes_max:
        raise ValueError(f"{len(data)} bytes are too many; at most {bytes_max}")
    if len(data) <= BODY_BYTES_MAX:
        values = 1 + len(data) - len(data.translate(None, b",[{"))
        if values > values_max:
            raise ValueError(f"about {values} values are too many; at most {values_max}")
        if values <= PLAIN_VALUES_MAX:
            try:
                plain: object = orjson.loads(data)
            except orjson.JSONDecodeError:
                shape = None
            else:
                return plain
    return (yield from _Reader(data, values_max, STRING_BYTES_MAX, shape).document())


def load_object(body: bytes) -> dict[Any, object]:
    """Parse *body* like `loads`; it must be an object, and be short or from a trusted source.

    Raises:
      RemoteProtocolError: *body* is not a JSON object.
    """
    try:
        return _object(loads(body), body)
    except ValueError as error:
        raise _no_json(body, error) from error


def read_object(
    body: bytes, *, bytes_max: int = BODY_BYTES_MAX, values_max: int = VALUES_MAX, shape: Shape | None = None
) -> Steps[dict[Any, object]]:
    """Parse *body* like `read`; it must be an object.

    Raises:
      RemoteProtocolError: *body* is not a JSON object, or exceeds a limit.
    """
    try:
        return _object((yield from read(body, bytes_max=bytes_max, values_max=values_max, shape=shape)), body)
    except (ValueError, RecursionError) as error:
        raise _no_json(body, error) from error


def _object(value: object, body: bytes) -> dict[Any, object]:
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"body of {len(body)} bytes is not a JSON object")
    return value


def _no_json(body: bytes, error: Exception) -> RemoteProtocolError:
    return RemoteProtocolError(f"body of {len(body)} bytes is not JSON; {error}")


def integer(value: object, default: int = 0) -> int:
    """Return the whole number *value*, also from a text (C++ clients send texts); *default* for any other value.

    Raises:
      RemoteProtocolError: the number does not fit 64 bits.
    """
    if isinstance(value, str) and len(value) <= DIGITS_MAX:
        try:
            value = int(value)
        except ValueError:
            return default
    if type(value) is not int:
        return default
    if not I64_MIN <= value <= I64_MAX:
        raise RemoteProtocolError(f"number {value!r:.40} does not fit 64 bits")
    return value


@final
class _Reader:
    """Parses one document that is in the dialect or very long, in slices."""

    __slots__ = ("budget", "data", "position", "shape", "string_max", "values_left")

    def __init__(self, data: bytes, values_max: int, string_max: int, shape: Shape | None) -> None:
        self.data = data
        self.position = 0
        self.budget = Budget(VALUE_US)
        self.values_left = values_max
        self.string_max = string_max
        self.shape = shape

    def document(self) -> Steps[object]:
        value = yield from self.value(0)
        if self.peek():
            raise self.wrong("the end")
        return value

    def peek(self) -> bytes:
        """Return the next byte that is not blank; empty at the end."""
        found = self.data[self.position : self.position + 1]
        if found and found in b" \t\r\n":
            blanks = _BLANKS.match(self.data, self.position)
            self.position = blanks.end() if blanks else self.position
            found = self.data[self.position : self.position + 1]
        return found

    def wrong(self, wanted: str) -> ValueError:
        return ValueError(f"text is not JSON at byte {self.position}; expected {wanted}")

    def expect(self, wanted: bytes) -> None:
        if self.peek() != wanted:
            raise self.wrong(repr(wanted.decode()))
        self.position += 1

    def value(self, depth: int) -> Steps[object]:
        if depth > DEPTH_MAX:
            raise ValueError(f"text is nested deeper than {DEPTH_MAX}")
        self.values_left -= 1
        if self.values_left < 0:
            raise ValueError(f"text has too many values at byte {self.position}")
        if self.budget.is_over():
            yield
        first = self.peek()
        if first == b"{":
            return (yield from self.fields(depth))
        if first == b"[":
            return (yield from self.items(depth))
        return self.string() if first == b'"' else self.bare()

    def fields(self, depth: int) -> Steps[dict[object, object]]:
        self.expect(b"{")
        found: dict[object, object] = {}
        shape = self.shape
        while not self.closes(b"}", not found):
            key = yield from self.key(depth)
            self.expect(b":")
            value = yield from self.value(depth + 1)
            found[key] = value if shape is None or not isinstance(value, dict) else shape(key, value)
        return found

    def key(self, depth: int) -> Steps[object]:
        first = self.peek()
        if first == b"{":
            return _queue((yield from self.value(depth + 1)))
        return self.string() if first == b'"' else self.word("a key")

    def items(self, depth: int) -> Steps[list[object]]:
        self.expect(b"[")
        found: list[object] = []
        while not self.closes(b"]", not found):
            found.append((yield from self.value(depth + 1)))
        return found

    def closes(self, wanted: bytes, first: bool) -> bool:
        """Skip the list's end *wanted*, or the comma before the next item; return whether the list ended."""
        if self.peek() == wanted:
            self.position += 1
            return True
        if not first:
            self.expect(b",")
        return False

    def word(self, wanted: str) -> str:
        found = _WORD.match(self.data, self.position)
        if found is None:
            raise self.wrong(wanted)
        self.position = found.end()
        return found.group().decode()

    def string(self) -> str:
        start = self.position
        found = _STRING.match(self.data, start, start + self.string_max)
        if found is None:
            raise self.wrong(f"a string that ends within {self.string_max} bytes")
        self.position = found.end()
        self.budget.spend((found.end() - start) // STRING_BYTES_OF_A_VALUE)
        text: object = orjson.loads(found.group())
        return str(text)

    def bare(self) -> object:
        word = self.word("a value")
        if word in _WORDS:
            return _WORDS[word]
        if _NUMBER.fullmatch(word) is None:
            raise self.wrong("a value")
        if not word.lstrip("-").isdigit():
            return float(word)
        number = int(word) if len(word) <= DIGITS_MAX else I64_MAX + 1
        if not I64_MIN <= number <= I64_MAX:
            raise self.wrong("a number of 64 bits")
        return number


def _queue(fields: object) -> MessageQueue:
    if isinstance(fields, dict):
        topic, broker, queue_id = fields.get("topic"), fields.get("brokerName"), fields.get("queueId")
        if isinstance(queue_id, str) and _NUMBER.fullmatch(queue_id) and len(queue_id) < 12:
            queue_id = int(queue_id)
        if isinstance(topic, str) and isinstance(broker, str) and type(queue_id) is int:
            return MessageQueue(topic, broker, queue_id)
    raise ValueError(f"object as a key {fields!r:.80} is not a queue; it needs topic, brokerName and queueId")
