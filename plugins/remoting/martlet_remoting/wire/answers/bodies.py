"""Reads JSON bodies from brokers: returns the needed fields, or raises an error that names the missing one."""

from collections.abc import Mapping
from typing import TypeAlias

from martlet.errors import Refused, RemoteProtocolError
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.answers.errors import BadAnswer
from martlet_remoting.wire.packets import Command, MessageQueue

__all__ = [
    "Fields",
    "as_queue",
    "dump",
    "integer",
    "load_object",
    "objects",
    "queue_fields",
    "queue_map",
    "queues",
    "text",
]

Fields: TypeAlias = Mapping[object, object]


def dump(value: object) -> bytes:
    """Return *value* as JSON in Fastjson's dialect: message queues may be keys, None is omitted."""
    return fastjson.dumps(value)


def header_integer(answer: Command, name: str, default: int | None = None) -> int:
    """Return a number of an answer's header."""
    try:
        return answer.integer(name, default)
    except Refused as error:
        raise BadAnswer(f"answer {answer.code}: {error}") from error


def header_text(answer: Command, name: str, default: str | None = None) -> str:
    """Return a text of an answer's header."""
    try:
        return answer.text(name, default)
    except Refused as error:
        raise BadAnswer(f"answer {answer.code}: {error}") from error


def load_object(body: bytes) -> Fields:
    """Return the JSON object in *body*, in any of Fastjson's dialects.

    Raises:
      BadAnswer: *body* is not a JSON object.
    """
    try:
        return fastjson.load_object(body)
    except RemoteProtocolError as error:
        raise BadAnswer(str(error)) from error


def text(fields: Fields, name: str, default: str | None = None) -> str:
    """Return a text field, or the default if it is absent or null."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise BadAnswer(f"body lacks the text {name}")
    return value


def integer(fields: Fields, name: str, default: int | None = None) -> int:
    """Return a number field; C++ clients send some numbers as text."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = None
    if not isinstance(value, int | float):
        raise BadAnswer(f"body lacks the number {name}")
    return int(value)


def objects(fields: Fields, name: str) -> list[Fields]:
    """Return a field that is a list of objects; empty if the field is absent or null."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadAnswer(f"body field {name} is not a list of objects")
    return value


def texts(fields: Fields, name: str) -> list[str]:
    """Return a field that is a list of texts; empty if the field is absent or null."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadAnswer(f"body field {name} is not a list")
    return [str(item) for item in value]


def mapping(fields: Fields, name: str) -> Fields:
    """Return a field that is an object; empty if the field is absent or null."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadAnswer(f"body field {name} is not an object")
    return value


def queue_fields(queue: MessageQueue) -> dict[str, object]:
    """Return a message queue as the object that brokers read."""
    return {"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic}


def as_queue(value: object) -> MessageQueue:
    """Return the message queue that *value* spells: itself, an object, or the JSON of one."""
    if isinstance(value, MessageQueue):
        return value
    if isinstance(value, str):
        return as_queue(load_object(value.encode()))
    if not isinstance(value, dict):
        raise BadAnswer(f"{value!r:.80} is not a message queue")
    return MessageQueue(text(value, "topic"), text(value, "brokerName"), integer(value, "queueId"))


def queues(fields: Fields, name: str) -> list[MessageQueue]:
    """Return a field that is a list of message queues; empty if the field is absent or null."""
    return [as_queue(item) for item in objects(fields, name)]


def queue_map(value: object) -> dict[MessageQueue, object]:
    """Return a map by message queue from any of its three spellings.

    The spellings are object keys (Java), ``[[queue, value], ...]`` (Go) and a list of objects with an ``offset`` beside
    the queue's fields (for C++).
    """
    if value is None:
        return {}
    if isinstance(value, dict):
        return {as_queue(key): item for key, item in value.items()}
    if not isinstance(value, list):
        raise BadAnswer("map by message queue is neither an object nor a list")
    return dict(_pair(item) for item in value)


def _pair(item: object) -> tuple[MessageQueue, object]:
    if isinstance(item, list) and len(item) == 2:
        return as_queue(item[0]), item[1]
    return as_queue(item), item.get("offset") if isinstance(item, dict) else None
