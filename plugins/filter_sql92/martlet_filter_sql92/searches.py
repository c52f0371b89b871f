"""Searches of raw bytes for texts and numbers of properties.

Each search has a regular expression: an escaped literal, then alternatives or at most some digits. `re` searches the
literal without backtracking, and the part after the literal cannot contain it, so the time is linear for any bytes.
Different literals are searched one after the other for the same reason. What follows the name of a property is only
looked at, not consumed: it could be the beginning of the next name. The native kernel searches without these patterns.

Numbers: a text that counts as 7 is ``7`` after an optional sign and zeros, or has one of ``.eE``. The whole numbers of
a range are matched digit by digit.
"""

import re
from functools import lru_cache
from itertools import islice
from typing import Final

from msgspec import Struct

from martlet.runtime.native import native
from martlet_filter_sql92.compiler import NUMBER_CHARACTERS_MAX

__all__ = [
    "END",
    "HITS_MAX",
    "Numbers",
    "Texts",
    "count_names",
    "find_numbers",
    "find_texts",
    "number_pattern",
    "start_of",
    "text_pattern",
]

HITS_MAX: Final = 8192  # in one call, which then takes 2 ms
# A value ends before the separator, before the next record, whose first byte belongs to a size, or at the end.
END: Final = rb"(?=[\x00-\x02]|\Z)"
SOME_DIGITS: Final = b"{0,%d}" % NUMBER_CHARACTERS_MAX
# The repetitions are possessive: their characters cannot be those that follow.
DECIMAL: Final = rb"[+\-0-9]" + SOME_DIGITS + rb"+[.eE]"
ZEROS: Final = b"0" + SOME_DIGITS + b"+"
ZERO: Final = b"0{1,%d}+(?![0-9])" % NUMBER_CHARACTERS_MAX
ZERO_DIGIT, NINE = b"09"
PATTERNS_MAX: Final = 256  # compiled ones that are kept


def start_of(name: str) -> bytes:
    """Return the bytes before the value of property *name* in a record."""
    return name.encode() + b"\x01"


class Texts(Struct, frozen=True):
    """A search for *start*, followed by one of *texts*; if it *is_whole*, the value ends after the text."""

    start: bytes
    texts: tuple[bytes, ...] = (b"",)
    is_whole: bool = False
    ignores_case: bool = False  # of ASCII letters in the text

    @property
    def compares_names(self) -> bool:
        """Whether the search looks at the bytes after each *start*."""
        return len(self.texts) > 1

    def __call__(self, data: bytes | bytearray, begin: int, end: int) -> list[int]:
        return native(find_texts)(data, begin, end, self)


class Numbers(Struct, frozen=True):
    """A search for *start*, followed by a whole number from *low* to *high*, None for no bound, or by any other number.

    What has one of ``.eE`` counts as another number.
    """

    start: bytes
    low: int | None
    high: int | None

    @property
    def compares_names(self) -> bool:
        """Whether the search looks at the bytes after each *start*."""
        return True

    def __call__(self, data: bytes | bytearray, begin: int, end: int) -> list[int]:
        return native(find_numbers)(data, begin, end, self)


def count_names(data: bytes | bytearray, begin: int, end: int) -> int:
    """Return how many bytes in ``data[begin:end]`` could end the name of a property."""
    return data.count(b"\x01", begin, end)


def find_texts(data: bytes | bytearray, begin: int, end: int, wanted: Texts) -> list[int]:
    """Return the first `HITS_MAX` places in ``data[begin:end]`` where *wanted* is."""
    found = islice(text_pattern(wanted).finditer(data, begin, end), HITS_MAX)
    return [match.start() for match in found]


def find_numbers(data: bytes | bytearray, begin: int, end: int, wanted: Numbers) -> list[int]:
    """Return the first `HITS_MAX` places in ``data[begin:end]`` where *wanted* is."""
    found = islice(number_pattern(wanted).finditer(data, begin, end), HITS_MAX)
    return [match.start() for match in found]


@lru_cache(PATTERNS_MAX)
def text_pattern(wanted: Texts) -> re.Pattern[bytes]:
    """Return the pattern of *wanted*."""
    start, end = re.escape(wanted.start), END if wanted.is_whole else b""
    texts = [b"(?i:%b)" % re.escape(text) if wanted.ignores_case else re.escape(text) for text in wanted.texts]
    if len(texts) > 1:
        return re.compile(start + b"(?=(?:" + b"|".join(texts) + b")" + end + b")")
    return re.compile(start + texts[0] + end)


@lru_cache(PATTERNS_MAX)
def number_pattern(wanted: Numbers) -> re.Pattern[bytes]:
    """Return the pattern of *wanted*."""
    low, high, texts = wanted.low, wanted.high, [DECIMAL]
    if (low is None or low <= 0) and (high is None or high >= 0):
        texts.append(rb"[+\-]?" + ZERO)
    if high is None or high > 0:
        texts.append(rb"\+?" + _positive(max(low or 1, 1), high))
    if low is None or low < 0:
        lowest = 1 if high is None or high > -1 else -high
        texts.append(b"-" + _positive(lowest, None if low is None else -low))
    return re.compile(re.escape(wanted.start) + b"(?=" + b"|".join(texts) + b")")


def _positive(low: int, high: int | None) -> bytes:
    """Return a pattern for whole numbers from *low*, at least 1, to *high*; it has a lookahead for each bound."""
    if low == high:
        return ZEROS + b"%d(?![0-9])" % low
    pattern = ZEROS + b"(?=(?:%b)(?![0-9]))" % _at_least(low)
    return pattern if high is None else pattern + b"(?=(?:%b)(?![0-9]))" % _at_most(high)


def _at_least(low: int) -> bytes:
    digits = str(low).encode()
    texts = [b"[1-9][0-9]{%d,%d}" % (len(digits), NUMBER_CHARACTERS_MAX), digits]
    for index, digit in enumerate(digits):
        if digit < NINE:
            texts.append(b"%b[%c-9][0-9]{%d}" % (digits[:index], digit + 1, len(digits) - index - 1))
    return b"|".join(texts)


def _at_most(high: int) -> bytes:
    digits = str(high).encode()
    texts = [digits]
    if len(digits) > 1:
        texts.append(b"[1-9][0-9]{0,%d}" % (len(digits) - 2))
    for index, digit in enumerate(digits):
        lowest_digit = ZERO_DIGIT if index else ZERO_DIGIT + 1
        if digit > lowest_digit:
            texts.append(b"%b[%c-%c][0-9]{%d}" % (digits[:index], lowest_digit, digit - 1, len(digits) - index - 1))
    return b"|".join(texts)
