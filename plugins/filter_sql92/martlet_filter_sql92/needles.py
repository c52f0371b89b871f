"""Needles: byte strings that every selected record contains, so that a scan can search for them and skip other records.

A record stores its properties as ``name\\x01value\\x02...``, so ``colour = 'red'`` selects only records with the bytes
``colour\\x01red``. A needle is a regular expression over raw bytes: an escaped literal, then alternatives or at most
some digits. `re` searches the literal without backtracking, and the part after the literal cannot contain it, so the
time is linear for any bytes. Different literals are searched one after the other for the same reason. Other records may
contain a needle too, even in a body: the condition decides. Every selected record must contain it.

Numbers: a text that counts as 7 is ``7`` after an optional sign and zeros, or has one of ``.eE``. The whole numbers of
a range are matched digit by digit. If the form of a condition on one property implies no bytes, its values are
evaluated (`values.py`).
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from martlet.contracts import Find
from martlet_filter_sql92.compiler import NUMBER_CHARACTERS_MAX
from martlet_filter_sql92.parser import (
    And,
    Arithmetic,
    Compare,
    Constant,
    In,
    IsNull,
    Like,
    Negate,
    Node,
    Not,
    Or,
    PropertyReference,
    Search,
    Value,
)
from martlet_filter_sql92.values import ALTERNATIVES_MAX, END, Values, key_of, values_of

__all__ = ["compile_needle", "needle_of"]

HITS_MAX: Final = 8192  # in one call, which then takes 2 ms
# The bytes after each name are compared, in up to 0.06 us. Usual messages have at most one name in 16 bytes, and a MiB
# of them takes 4 ms.
BYTES_A_NAME: Final = 16
NAMES_MAX: Final = 256
NAMES_A_STEP: Final = 6  # few of the names are the searched one
STEPS_MAX: Final = 16_384  # 3 ms; then no further needle is searched
NEEDLES_MAX: Final = 4
# The selectivity of needles; a text is more selective than a name.
NAME_WEIGHT_MAX: Final = 20
EXCLUDING_WEIGHT: Final = 21
VALUES_WEIGHT: Final = 22
HALF_RANGE_WEIGHT: Final = 30
RANGE_WEIGHT: Final = 60
INTEGERS_EXACT: Final = 1 << 53  # beyond, a decimal text may equal a whole number with other digits
SOME_DIGITS: Final = b"{0,%d}" % NUMBER_CHARACTERS_MAX
# The repetitions are possessive: their characters cannot be those that follow.
DECIMAL: Final = rb"[+\-0-9]" + SOME_DIGITS + rb"+[.eE]"
ZEROS: Final = b"0" + SOME_DIGITS + b"+"
ZERO: Final = b"0{1,%d}+(?![0-9])" % NUMBER_CHARACTERS_MAX
ZERO_DIGIT, NINE = b"09"
BOUND_MAX: Final = 10**18
MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
UNDECODED: Final = "\ufffd"  # replaces bytes that are not UTF-8


class Needle(NamedTuple):
    patterns: tuple[bytes | Values, ...]  # a record contains one of them
    weight: int  # selectivity: of several needles that all must match, the heaviest is searched


def compile_needle(node: Node, steps: list[int]) -> Find | None:
    """Return a search for records that the condition *node* may select; None if *node* implies no bytes in them.

    The search adds its steps (`Condition`) to the only element of *steps*.
    """
    needle = needle_of(node, steps)
    if needle is None:
        return None
    searches = [_search_of(pattern) for pattern in needle.patterns]
    compares_names = any(b"(?:" in pattern for pattern in needle.patterns if isinstance(pattern, bytes))

    def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        if compares_names:
            names = data.count(b"\x01", begin, end)
            if names > (end - begin) // BYTES_A_NAME + NAMES_MAX:
                return None
            steps[0] += names // NAMES_A_STEP
        hits: list[int] = []
        steps_limit = steps[0] + STEPS_MAX
        for search in searches:
            new_hits = search(data, begin, end) if steps[0] <= steps_limit else None
            if new_hits is None or len(hits) + len(new_hits) >= HITS_MAX:
                return None
            hits += new_hits
        if len(searches) > 1:
            hits.sort()
        return hits

    return find


def _search_of(pattern: bytes | Values) -> Find:
    if isinstance(pattern, Values):
        return pattern
    search = re.compile(pattern, re.DOTALL).finditer
    return lambda data, begin, end: [match.start() for match in islice(search(data, begin, end), HITS_MAX)]


def needle_of(node: Node, steps: list[int]) -> Needle | None:
    """Return the needle of records for which *node* is TRUE.

    If the needle would be only the name of a property, the property's values are evaluated.
    """
    needle = _needle_of_form(node, steps)
    if (needle is not None and needle.weight > VALUES_WEIGHT) or _tests_presence_only(node):
        return needle
    values = values_of(node, steps)
    return needle if values is None else Needle((values,), VALUES_WEIGHT if not _excludes(node) else EXCLUDING_WEIGHT)


def _tests_presence_only(node: Node) -> bool:
    """Return whether *node* is TRUE for every value of its properties."""
    return isinstance(node, Not) and isinstance(node.operand, IsNull)


def _excludes(node: Node) -> bool:
    """Return whether *node* is TRUE for most values."""
    return isinstance(node, Not) or (isinstance(node, Compare) and node.operator == "<>")


def _needle_of_form(node: Node, steps: list[int]) -> Needle | None:
    """Return the needle that follows from the form of *node*."""
    if isinstance(node, And):
        return _heaviest([*_ranges(node.operands), *[needle_of(operand, steps) for operand in node.operands]])
    if isinstance(node, Or):
        return _any([needle_of(operand, steps) for operand in node.operands])
    if isinstance(node, Not):
        return _needle_of_presence(node.operand)
    if isinstance(node, PropertyReference):
        return _equal(node, True)
    if isinstance(node, Compare):
        return _heaviest([*_ranges([node]), _comparison(node)])
    if isinstance(node, In | Like | Search):
        return _text(node) or _heaviest([_name(name) for name in _names(node.operand)])
    return None


def _heaviest(needles: Sequence[Needle | None]) -> Needle | None:
    return max((needle for needle in needles if needle is not None), key=lambda needle: needle.weight, default=None)


def _any(needles: Sequence[Needle | None]) -> Needle | None:
    known_needles = [needle for needle in needles if needle is not None]
    patterns: tuple[bytes | Values, ...] = tuple(
        dict.fromkeys(chain.from_iterable(each.patterns for each in known_needles))
    )
    if len(known_needles) < len(needles) or len(patterns) > NEEDLES_MAX:
        return None
    return Needle(patterns, min(needle.weight for needle in known_needles))


# Presence


def _needle_of_presence(node: Node) -> Needle | None:
    """Return the needle of records for which *node* is FALSE: a property without which *node* is UNKNOWN."""
    if isinstance(node, IsNull):  # as the operand of NOT
        return _heaviest([_name(name) for name in _names(node.operand)])
    if isinstance(node, Compare):
        return _heaviest([_name(name) for name in (*_names(node.left), *_names(node.right))])
    if isinstance(node, PropertyReference):
        return _name(node.name)
    if isinstance(node, In | Like):
        return _heaviest([_name(name) for name in _names(node.operand)])
    return None  # NOT of a search is TRUE for a missing property


def _names(node: Node) -> list[str]:
    """Return the properties that *node* needs: without one of them, its value is NULL."""
    if isinstance(node, PropertyReference):
        return [node.name]
    if isinstance(node, Negate):
        return _names(node.operand)
    if isinstance(node, Arithmetic):
        return [*_names(node.left), *_names(node.right)]
    return []


def _name(name: str) -> Needle:
    return Needle((key_of(name),), min(len(name), NAME_WEIGHT_MAX))


# Texts


def _text(node: In | Like | Search) -> Needle | None:
    if not isinstance(node.operand, PropertyReference):
        return None
    name = node.operand.name
    if isinstance(node, In):
        return _one_of(name, sorted(node.texts))
    if isinstance(node, Like):
        return _like(name, node)
    if node.negated or not node.text:
        return None
    if node.operator == "STARTSWITH":
        return _value(name, node.text, b"")
    return _literal(node.text, END if node.operator == "ENDSWITH" else b"")


def _one_of(name: str, texts: list[str]) -> Needle | None:
    if len(texts) == 1:
        return _value(name, texts[0], END)
    if len(texts) > ALTERNATIVES_MAX or any(UNDECODED in text or "\x01" in text for text in texts):
        return None
    pattern = b"|".join(re.escape(text.encode()) for text in texts)
    return Needle((key_of(name) + b"(?:" + pattern + b")" + END,), 150 + len(name) + min(map(len, texts)))


def _like(name: str, node: Like) -> Needle | None:
    """Return the needle of a LIKE: the characters before the first wildcard."""
    literal, is_quoted = "", False
    for character in node.pattern:
        if not is_quoted and character == node.escape:
            is_quoted = True
            continue
        if not is_quoted and character in "%_":
            return _value(name, literal, b"") if literal else None
        literal += character
        is_quoted = False
    return _value(name, literal, END)


def _value(name: str, text: str, end: bytes) -> Needle | None:
    """Return the needle of property *name* with a value that begins with *text*, or equals it, depending on *end*."""
    if UNDECODED in text:
        return None
    return Needle((key_of(name) + re.escape(text.encode()) + end,), 150 + len(name) + len(text))


def _literal(text: str, end: bytes) -> Needle | None:
    if UNDECODED in text:
        return None
    return Needle((re.escape(text.encode()) + end,), 50 + len(text))


# Comparisons


def _comparison(node: Compare) -> Needle | None:
    left, right = node.left, node.right
    if isinstance(left, Constant):
        left, right = right, left
    if node.operator == "=" and isinstance(left, PropertyReference) and isinstance(right, Constant):
        return _equal(left, right.value) or _needle_of_presence(node)
    return _needle_of_presence(node)


def _equal(node: PropertyReference, value: Value) -> Needle | None:
    if isinstance(value, str):
        return _value(node.name, value, END)
    key, weight = key_of(node.name), 100 + len(node.name)
    if value is True:
        return Needle((key + rb"(?i:true)" + END,), weight)
    if value is None or value is False or abs(value) >= INTEGERS_EXACT:
        return None
    digits = DECIMAL
    if value == int(value):
        digits += b"|" + _whole(int(value))
    return Needle((key + b"(?:" + digits + b")",), weight)


def _whole(value: int) -> bytes:
    """Return a pattern for texts of *value* without ``.eE``."""
    if not value:
        return rb"[+\-]?" + ZERO
    sign = rb"\+?" if value > 0 else b"-"
    return sign + ZEROS + b"%d(?![0-9])" % abs(value)


# Ranges


def _ranges(operands: Iterable[Node]) -> list[Needle]:
    """Return a needle for each property that *operands*, all of which must be TRUE, compare by order."""
    bounds: dict[str, tuple[int | None, int | None]] = {}
    for operand in operands:
        bound = _bounds(operand)
        if bound is not None:
            name, low, high = bound
            lowest, highest = bounds.get(name, (None, None))
            low = low if lowest is None or (low is not None and low > lowest) else lowest
            high = high if highest is None or (high is not None and high < highest) else highest
            bounds[name] = low, high
    return [_range(name, low, high) for name, (low, high) in bounds.items()]


def _bounds(node: Node) -> tuple[str, int | None, int | None] | None:
    """Return the property that *node* compares with a constant, and the least and greatest whole number allowed."""
    if not isinstance(node, Compare):
        return None
    left, right, operator = node.left, node.right, node.operator
    if isinstance(left, Constant):
        left, right, operator = right, left, MIRRORED.get(operator, "")
    if not isinstance(left, PropertyReference) or not isinstance(right, Constant) or operator not in MIRRORED:
        return None
    value = right.value
    if value is None or isinstance(value, str) or abs(value) >= BOUND_MAX:
        return None
    if operator[0] == ">":
        return left.name, math.floor(value) + 1 if operator == ">" else math.ceil(value), None
    return left.name, None, math.ceil(value) - 1 if operator == "<" else math.floor(value)


def _range(name: str, low: int | None, high: int | None) -> Needle:
    """Return the needle of numbers from *low* to *high*, both included; None for no bound."""
    texts = [DECIMAL]
    if (low is None or low <= 0) and (high is None or high >= 0):
        texts.append(rb"[+\-]?" + ZERO)
    if high is None or high > 0:
        texts.append(rb"\+?" + _positive(max(low or 1, 1), high))
    if low is None or low < 0:
        lowest = 1 if high is None or high > -1 else -high
        texts.append(b"-" + _positive(lowest, None if low is None else -low))
    weight = HALF_RANGE_WEIGHT if low is None or high is None else RANGE_WEIGHT
    return Needle((key_of(name) + b"(?:" + b"|".join(texts) + b")",), weight + len(name))


def _positive(low: int, high: int | None) -> bytes:
    """Return a pattern for whole numbers from *low*, at least 1, to *high*; it has a lookahead for each bound."""
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
