"""JSON bodies as RocketMQ's Java side writes and reads them: plain JSON, and two things that are not.

Integer keys stand bare, ``{0:"10.0.0.1:10911"}``, and a queue stands as an object where a key belongs,
``{{"brokerName":"b","queueId":0,"topic":"t"}:5}`` (Fastjson with a Map<MessageQueue, V>). Java's tools
read such bodies in no other form, and the Go client splits them on literal ``,{`` and ``}:``, so nothing
here ever writes a blank.
"""

import re
from collections.abc import Mapping
from typing import Final, final

import orjson

from .packets import MessageQueue

__all__ = ["DIALECT_BYTES_MAX", "dumps", "loads", "queue_key"]

DEPTH_MAX: Final = 64
# Of what a peer may send: plain JSON is read at 300 MB/s, all else here at 3 MB/s, and everybody waits for it.
DIALECT_BYTES_MAX: Final = 1 << 20
DIGITS_MAX: Final = 20  # of an i64 with its sign
I64_MIN: Final = -(1 << 63)
I64_MAX: Final = (1 << 63) - 1

_BLANKS: Final = re.compile(r"[ \t\r\n]*")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_WORD: Final = re.compile(r"[A-Za-z0-9_+.\-]+")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WORDS: Final[Mapping[str, object]] = {"true": True, "false": False, "null": None}


def queue_key(queue: MessageQueue) -> str:
    """Return *queue* as it stands in the place of a key: properties in alphabetical order, no blanks."""
    broker, topic = orjson.dumps(queue.broker_name).decode(), orjson.dumps(queue.topic).decode()
    return f'{{"brokerName":{broker},"queueId":{queue.queue_id},"topic":{topic}}}'


def dumps(value: object) -> bytes:
    """Return *value* as compact JSON in which int keys stand bare and queues stand as object keys.

    A None in an object is left out, as the Java side leaves out what is null.

    Raises:
      TypeError: a value that JSON does not know.
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


def loads(data: bytes, dialect_bytes_max: int = 0) -> object:
    """Return what *data* says, in any of the dialects.

    Bare keys come back as text; a queue as a key comes back as a `MessageQueue`.

    Raises:
      ValueError: it is JSON in no dialect, or nested deeper than DEPTH_MAX, or it is not plain and longer than
        *dialect_bytes_max*, where that is given.
    """
    try:
        plain: object = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if 0 < dialect_bytes_max < len(data):
            text = f"{len(data)} bytes are no plain JSON, and at most {dialect_bytes_max} are read otherwise; {error}"
            raise ValueError(text) from error
        return _Reader(data.decode()).document()
    return plain


@final
class _Reader:
    """Reads one tolerant document; only bodies that are not plain JSON come here."""

    __slots__ = ("position", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def document(self) -> object:
        value = self.value(0)
        if self.peek():
            raise self.wrong("the end")
        return value

    def peek(self) -> str:
        """The next character that is not blank; empty at the end."""
        found = _BLANKS.match(self.text, self.position)
        self.position = found.end() if found else self.position
        return self.text[self.position : self.position + 1]

    def wrong(self, wanted: str) -> ValueError:
        return ValueError(f"text is no JSON at character {self.position}; {wanted} should stand there")

    def expect(self, character: str) -> None:
        if self.peek() != character:
            raise self.wrong(repr(character))
        self.position += 1

    def value(self, depth: int) -> object:
        if depth > DEPTH_MAX:
            raise ValueError(f"text is nested deeper than {DEPTH_MAX}")
        first = self.peek()
        if first == "{":
            return self.fields(depth)
        if first == "[":
            return self.items(depth)
        return self.string() if first == '"' else self.bare()

    def fields(self, depth: int) -> dict[object, object]:
        self.expect("{")
        found: dict[object, object] = {}
        while not self.closes("}", not found):
            key = self.key(depth)
            self.expect(":")
            found[key] = self.value(depth + 1)
        return found

    def key(self, depth: int) -> object:
        first = self.peek()
        if first == "{":
            return _queue(self.value(depth + 1))
        return self.string() if first == '"' else self.match(_WORD, "a key")

    def items(self, depth: int) -> list[object]:
        self.expect("[")
        found: list[object] = []
        while not self.closes("]", not found):
            found.append(self.value(depth + 1))
        return found

    def closes(self, character: str, first: bool) -> bool:
        """Step over *character*, which ends the list, or over the comma that goes on; true for the end."""
        if self.peek() == character:
            self.position += 1
            return True
        if not first:
            self.expect(",")
        return False

    def match(self, pattern: re.Pattern[str], wanted: str) -> str:
        found = pattern.match(self.text, self.position)
        if found is None:
            raise self.wrong(wanted)
        self.position = found.end()
        return found.group()

    def string(self) -> str:
        text: object = orjson.loads(self.match(_STRING, "the end of the string").encode())
        return str(text)

    def bare(self) -> object:
        word = self.match(_WORD, "a value")
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
    raise ValueError(f"object as a key {fields!r:.80} is no queue; it needs topic, brokerName and queueId")
