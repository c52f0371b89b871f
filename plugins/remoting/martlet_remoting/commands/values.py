"""Parsers of argument values: bounded numbers and places in a queue. They raise `UsageError` for an invalid value."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, final

from msgspec import Struct

from martlet.cli.outcome import UsageError
from martlet.runtime.clock import SystemClock
from martlet_client import MessageQueue, PullConsumer
from martlet_client.arguments import check_utf8
from martlet_client.network import split_address
from martlet_client.pulling import subscription_of

__all__ = ["WHERE", "Where", "address", "check_text", "duration", "moment", "seconds", "sql", "tags", "where", "whole"]

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
UNITS_MS: Final = {"ms": 1} | {unit: 1000 * in_s for unit, in_s in UNITS_S.items()}
_DURATION: Final = re.compile(r"([0-9]{1,12}(ms|[smhd]))+", re.ASCII)
_PART: Final = re.compile(r"([0-9]+)(ms|[smhd])")
# Digits of times in ms since 1970, from September 2001 on; fewer are a mistake, such as seconds.
MS_DIGITS_MIN: Final = 13
TIME_MS_MAX: Final = (1 << 47) - 1
WHERE: Final = "begin, end, an offset (4711), a time (2026-03-01T12:00), or 15m for 15 minutes ago"
OFFSET_MAX: Final = (1 << 63) - 1
ANY_BYTES: Final = ("body", "file", "config", "secret_file", "tls_ca", "tls_cert", "tls_key")


def whole(option: str, low: int = 0, high: int = (1 << 31) - 1) -> Callable[[str], int]:
    """Return a parser for *option*, whose value is a whole number."""

    def read(text: str) -> int:
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdecimal()):
            raise UsageError(f"{option} {text!r} is not a whole number; for example {max(low, 1)}")
        if not low <= int(text) <= high:
            raise UsageError(f"{option} {text!r} is out of range; it must be {low} to {high}")
        return int(text)

    return read


def seconds(option: str) -> Callable[[str], float]:
    """Return a parser for *option*, whose value is a number of seconds."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{option} {text!r} is not a number of seconds; for example 2.5") from None
        if not 0 < value <= 86_400:
            raise UsageError(f"{option} {text!r} is out of range; it must be more than 0 and at most 86400")
        return value

    return read


def duration(option: str) -> Callable[[str], int]:
    """Return a parser for *option*, whose value is a length of time such as ``10m``; it returns milliseconds."""

    def read(text: str) -> int:
        if _DURATION.fullmatch(text) is None:
            raise UsageError(
                f"{option} {text!r} is not a length of time; give for example 500ms, 30s, 10m, 1h30m or 2d"
            )
        length_ms = sum(int(number) * UNITS_MS[unit] for number, unit in _PART.findall(text))
        if not 0 < length_ms <= TIME_MS_MAX:
            raise UsageError(f"{option} {text!r} is out of range; give at least 1ms")
        return length_ms

    return read


def moment(option: str) -> Callable[[str], int]:
    """Return a parser for *option*, whose value is a time; it returns milliseconds since 1970."""

    def read(text: str) -> int:
        if text.isascii() and text.isdecimal() and len(text) >= MS_DIGITS_MIN and int(text) <= TIME_MS_MAX:
            return int(text)
        try:
            if text.isdecimal():
                raise ValueError("a short number could be a date or seconds")
            time_ms = int(datetime.fromisoformat(text).timestamp() * 1000)
        except (ValueError, OverflowError):
            forms = "2026-03-01T12:00 (local time), 2026-03-01T12:00:30.5+01:00 or milliseconds since 1970"
            raise UsageError(f"{option} {text!r} is not a time; give for example {forms}") from None
        if time_ms <= 0:
            raise UsageError(f"{option} {text!r} is before 1970; give a time in the future")
        return time_ms

    return read


def address(option: str) -> Callable[[str], str]:
    """Return a parser for *option*, whose value is ``HOST:PORT``."""

    def read(text: str) -> str:
        try:
            split_address(text)
        except ValueError as error:
            raise UsageError(f"{option} {str(error).removeprefix('address ')}") from error
        return text

    return read


def tags(option: str) -> Callable[[str], str]:
    """Return a parser for *option*, whose value is tags as a consumer writes them."""

    def read(text: str) -> str:
        try:
            subscription_of("", text.encode("utf-8", "replace").decode(), 0)  # `check_text` reports invalid UTF-8
        except ValueError as error:
            raise UsageError(
                f"{option} {text!r} is not a list of tags; give for example 'books || pens' or '*'"
            ) from error
        return text

    return read


def sql(option: str) -> Callable[[str], str]:
    """Return a parser for *option*, whose value is an SQL92 expression; the broker compiles it."""

    def read(text: str) -> str:
        if not text.strip():
            raise UsageError(f'{option} is empty; give for example "price > 100"')
        return text

    return read


def check_text(arguments: Any) -> None:
    """Raise `UsageError` for text that is not UTF-8, except in file names and bodies."""
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if name in ANY_BYTES or not isinstance(text, str):
                continue
            try:
                check_utf8(name, text)
            except ValueError as error:
                what = name.replace("_", " ")
                raise UsageError(
                    f"{what} {text!r} is not UTF-8; only bodies and file names may contain other bytes"
                ) from error


@final
class Where(Struct, frozen=True):
    """A place in any queue: its beginning, its end, an offset, or the first message stored at or after a time."""

    text: str
    offset: int | None = None
    time_ms: int | None = None

    async def offset_in(self, consumer: PullConsumer, queue: MessageQueue) -> int:
        """Return the offset of this place in *queue*."""
        if self.offset is not None:
            return self.offset
        if self.time_ms is not None:
            return await consumer.search_offset(queue, self.time_ms)
        return await (consumer.min_offset(queue) if self.text == "begin" else consumer.max_offset(queue))


def where(option: str) -> Callable[[str], Where]:
    """Return a parser for *option*, whose value is a place in a queue."""

    def read(text: str) -> Where:
        if text in ("begin", "end"):
            return Where(text)
        if text.isascii() and text.isdecimal() and int(text) <= OFFSET_MAX:
            return Where(text, offset=int(text))
        return Where(text, time_ms=_time_ms(option, text))

    return read


def _time_ms(option: str, text: str) -> int:
    number, unit = text[:-1], text[-1:]
    try:
        if number.isascii() and number.isdecimal() and unit in UNITS_S:
            return max(SystemClock().now_ms() - int(number) * UNITS_S[unit] * 1000, 0)
        return max(int(datetime.fromisoformat(text).timestamp() * 1000), 0)
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text!r} is not a place in a queue; give {WHERE}") from None
