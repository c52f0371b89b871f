"""Reads JSON bodies of requests from any client: enums as names or ordinals, numbers as numbers or text."""

from collections.abc import Iterable, Sequence
from typing import Final

from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet.runtime.steps import Budget, Steps
from martlet_remoting.handlers.context import Declined
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.packets import Command, MessageQueue

__all__ = ["boolean", "enum_name", "integer", "items", "queues", "read_body", "text"]

WORD_CHARS_MAX: Final = 64  # of the name of an enum value


def read_body(command: Command) -> Steps[dict[object, object]]:
    """Return the JSON object in the body of *command*, usually in one slice.

    Raises:
      Declined: the body is not a JSON object, is longer than `fastjson.BODY_BYTES_MAX`, or has more than
        `fastjson.VALUES_MAX` values.
    """
    try:
        return (yield from fastjson.read_object(command.body))
    except RemoteProtocolError as error:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"request {command.code} cannot be read; {error}") from error


def text(table: dict[object, object], name: str, default: str = "") -> str:
    """Return the text field *name*; *default* if it is missing or not a text."""
    value = table.get(name)
    return value if isinstance(value, str) else default


def integer(table: dict[object, object], name: str, default: int = 0) -> int:
    """Return the number field *name*; *default* if it is missing or not a number.

    Raises:
      Refused: the number does not fit 64 bits.
    """
    try:
        return fastjson.integer(table.get(name), default)
    except RemoteProtocolError as error:
        raise Refused(Reason.PARAMETER, f"{name}: {error}") from error


def boolean(table: dict[object, object], name: str) -> bool:
    """Return whether the field *name* is true, as a boolean or as text."""
    value = table.get(name)
    return value is True or (isinstance(value, str) and value.lower() == "true")


def items(table: dict[object, object], name: str) -> list[dict[object, object]]:
    """Return the objects in the array field *name*, without other items; empty if it is not an array."""
    value = table.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def enum_name(table: dict[object, object], name: str, names: Sequence[str], default: str) -> str:
    """Return the name of an enum value, given as a name, or by C++ clients as an ordinal; *default* if neither."""
    value = table.get(name)
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    return value if isinstance(value, str) and 0 < len(value) <= WORD_CHARS_MAX else default


def queues(objects: Iterable[dict[object, object]]) -> Steps[list[MessageQueue]]:
    """Return the queues in *objects*, in slices; skip objects without a topic."""
    message_queues: list[MessageQueue] = []
    budget = Budget()
    for item in objects:
        if topic := text(item, "topic"):
            message_queues.append(MessageQueue(topic, text(item, "brokerName"), integer(item, "queueId", -1)))
        if budget.is_over():
            yield
    return message_queues
