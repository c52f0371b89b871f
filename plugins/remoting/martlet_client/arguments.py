"""Checks of arguments: a wrong one raises a clear error at once instead of an obscure one later."""

import inspect
import math
from collections.abc import Mapping
from typing import Final

from martlet_remoting.wire.packets import MessageQueue

__all__ = [
    "I32_MAX",
    "check_callable",
    "check_integer",
    "check_queue",
    "check_seconds",
    "check_text_mapping",
    "check_time_ms",
    "check_type",
    "check_utf8",
]

I32_MAX: Final = (1 << 31) - 1
I64_MAX: Final = (1 << 63) - 1
# In milliseconds this is March 1973: a smaller time must be in seconds.
FIRST_TIME_MS: Final = 100_000_000_000


def _shown(value: object) -> str:
    return f"{value!r:.60} is of type {type(value).__name__}"


def check_type(what: str, value: object, kind: type, hint: str = "") -> None:
    """Refuse a *value* that is not a *kind*; *hint* tells the caller how to get one.

    Raises:
      TypeError: the text names *what*, the value, and the required type.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{what} {_shown(value)}; it must be {kind.__name__}{hint and f', {hint}'}")


def check_utf8(what: str, text: str) -> None:
    """Refuse *text* that cannot be sent, because it was decoded with ``surrogateescape``. Raises ValueError."""
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise ValueError(f"{what} {text!r:.60} has half a surrogate pair; decode it with errors='replace'")


def check_integer(what: str, value: object, low: int = 0, high: int = I64_MAX) -> None:
    """Refuse anything except a whole number from *low* to *high*.

    Raises:
      TypeError: it is not an int; a bool is not one here.
      ValueError: it is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} {_shown(value)}; it must be int")
    if not low <= value <= high:
        bounds = f"at least {low}" if high == I64_MAX else f"{low} to {high}"
        raise ValueError(f"{what} {value} is out of range; it must be {bounds}")


def check_seconds(what: str, value: object, *, zero: bool = False, high: float = math.inf) -> None:
    """Refuse anything except a number of seconds above 0 (from 0 on if *zero*) up to *high*.

    Raises:
      TypeError: it is not a number.
      ValueError: it is out of range, or not a number (NaN).
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{what} {_shown(value)}; it must be a number of seconds")
    if not (0 < value <= high or (zero and value == 0)):
        bounds = ("at least 0" if zero else "more than 0") + ("" if high == math.inf else f" and at most {high:g}")
        raise ValueError(f"{what} {value!r} is out of range; it must be {bounds} seconds")


def check_time_ms(what: str, value: object, low: int = 0) -> None:
    """Refuse anything except a time in milliseconds since 1970; values from *low* up to 0 are accepted.

    Raises:
      TypeError: it is not an int.
      ValueError: it is out of range, or so small that it must be in seconds.
    """
    if isinstance(value, float):
        raise TypeError(f"{what} {value!r} is of type float; it must be int, for example int(time.time() * 1000)")
    check_integer(what, value, low)
    if isinstance(value, int) and 0 < value < FIRST_TIME_MS:
        raise ValueError(f"{what} {value} is in 1973 or earlier; it must be in milliseconds, not in seconds")


def check_queue(queue: object, topic: str | None = None) -> None:
    """Refuse anything except a queue, of *topic* if given.

    Raises:
      TypeError: it is not a `MessageQueue`.
      ValueError: it belongs to another topic.
    """
    check_type("queue", queue, MessageQueue, "as queues() lists them")
    if topic is not None and isinstance(queue, MessageQueue) and queue.topic != topic:
        raise ValueError(f"queue {queue} is not a queue of topic {topic!r}; queues({topic!r}) lists them")


def check_text_mapping(what: str, table: object) -> None:
    """Refuse anything except a mapping from str to str. Raises TypeError."""
    check_type(what, table, Mapping, "for example {'colour': 'red'}")
    assert isinstance(table, Mapping)
    for name, value in table.items():
        check_type(f"name in {what}", name, str)
        check_type(f"{what} {name!r}:", value, str, "for example str(value)")


def check_callable(what: str, function: object, example: str, count: int) -> None:
    """Refuse anything that cannot be called with *count* arguments; *example* shows what can.

    Raises:
      TypeError: it is not a function, or takes other arguments.
    """
    if not callable(function):
        raise TypeError(f"{what} {_shown(function)}; it must be a function: {example}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some builtins have no signature
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(f"{what} {function!r:.60} does not fit, {error}; it must be a function: {example}") from None
