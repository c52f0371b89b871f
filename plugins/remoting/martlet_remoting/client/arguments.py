"""Checks of what a caller passes: a wrong argument is one sentence at once, never an obscure error later."""

import inspect
import math
from collections.abc import Mapping
from typing import Final

from martlet_remoting.packets import MessageQueue

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
# In milliseconds this is March 1973: whoever passes a smaller time counts seconds.
FIRST_TIME_MS: Final = 100_000_000_000


def _shown(value: object) -> str:
    return f"{value!r:.60} is of type {type(value).__name__}"


def check_type(what: str, value: object, kind: type, hint: str = "") -> None:
    """Refuse a *value* that is no *kind*; *hint* says how to get one.

    Raises:
      TypeError: with *what* it is, the value, and the type it must have.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{what} {_shown(value)}; it must be {kind.__name__}{hint and f', {hint}'}")


def check_utf8(what: str, text: str) -> None:
    """Refuse *text* that cannot be sent, because it was decoded with ``surrogateescape``. Raises ValueError."""
    if not text.isascii() and text.encode("utf-8", "replace").decode() != text:
        raise ValueError(f"{what} {text!r:.60} has half a surrogate pair; decode it with errors='replace'")


def check_integer(what: str, value: object, low: int = 0, high: int = I64_MAX) -> None:
    """Refuse what is not a whole number from *low* to *high*.

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
    """Refuse what is not a number of seconds above 0, or from 0 on if *zero*, up to *high*.

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
    """Refuse what is not a time in milliseconds since 1970; 0, and what is below it from *low* on, is let through.

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
    """Refuse what is not a queue, or not one of *topic*.

    Raises:
      TypeError: it is no `MessageQueue`.
      ValueError: it belongs to another topic.
    """
    check_type("queue", queue, MessageQueue, "as queues() lists them")
    if topic is not None and isinstance(queue, MessageQueue) and queue.topic != topic:
        raise ValueError(f"queue {queue} is not a queue of topic {topic!r}; queues({topic!r}) lists them")


def check_text_mapping(what: str, table: object) -> None:
    """Refuse what does not map texts to texts. Raises TypeError."""
    check_type(what, table, Mapping, "for example {'colour': 'red'}")
    assert isinstance(table, Mapping)
    for name, value in table.items():
        check_type(f"name in {what}", name, str)
        check_type(f"{what} {name!r}:", value, str, "for example str(value)")


def check_callable(what: str, function: object, example: str, count: int) -> None:
    """Refuse what cannot be called with *count* arguments; *example* shows what can.

    Raises:
      TypeError: it is no function, or takes other arguments.
    """
    if not callable(function):
        raise TypeError(f"{what} {_shown(function)}; it must be a function: {example}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some builtins do not say what they take
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TypeError(f"{what} {function!r:.60} does not fit, {error}; it must be a function: {example}") from None
