"""What the stored bytes of every selected record contain, so that a scan can search for it and skip the rest.

A record stores its properties as ``name\\x01value\\x02...``, so ``colour = 'red'`` selects only records with the bytes
``colour\\x01red``. A needle is a regular expression over raw bytes: an escaped literal, then at most some digits. `re`
searches the literal without going back, and the digits cannot contain it, so the time is linear in the bytes whatever
they are. Alternatives are searched one after the other for the same reason. A needle may be found in other records as
well, even in a body: the condition decides. It must be in every selected one.

Numbers: a text that counts as 7 is ``7`` with sign and zeros before, or has one of ``.eE``. The whole numbers of a
range are matched digit by digit.
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from martlet.contracts import Find

from .compiler import NUMBER_CHARACTERS_MAX
from .parser import (
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
    Property,
    Search,
    Value,
)

__all__ = ["compile_needle", "needle_of"]

HITS_MAX: Final = 8192  # in one call, which then takes 2 ms
# What follows a name is compared at each name, in up to 0.06 us. Bytes with more names than one in 16 are no usual
# messages, and a MiB of them takes 4 ms.
BYTES_A_NAME: Final = 16
NAMES_MAX: Final = 256
NEEDLES_MAX: Final = 4
INTEGERS_EXACT: Final = 1 << 53  # beyond, a decimal text may equal a whole number with other digits
# A value ends before the separator, before the next record, whose first byte is that of a size, or at the end.
END: Final = rb"(?:[\x00-\x02]|\Z)"
SOME_DIGITS: Final = b"{0,%d}" % NUMBER_CHARACTERS_MAX
# The repetitions are possessive: their characters cannot be what follows.
DECIMAL: Final = rb"[+\-0-9]" + SOME_DIGITS + rb"+[.eE]"
ZEROS: Final = b"0" + SOME_DIGITS + b"+"
ZERO: Final = b"0{1,%d}+(?![0-9])" % NUMBER_CHARACTERS_MAX
ZERO_DIGIT, NINE = b"09"
BOUND_MAX: Final = 10**18
MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
UNDECODED: Final = "\ufffd"  # stands for bytes that are not UTF-8


class Needle(NamedTuple):
    patterns: tuple[bytes, ...]  # one of them is found
    weight: int  # how much it tells: of several that all must match the heaviest is searched


def compile_needle(node: Node) -> Find | None:
    """Return what finds records that the condition *node* may select; None if it tells nothing about their bytes."""
    needle = needle_of(node)
    if needle is None:
        return None
    searches = [re.compile(pattern, re.DOTALL).finditer for pattern in needle.patterns]
    has_numbers = any(DECIMAL in pattern for pattern in needle.patterns)

    def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        if has_numbers and data.count(b"\x01", begin, end) > (end - begin) // BYTES_A_NAME + NAMES_MAX:
            return None
        found: list[int] = []
        for search in searches:
            found += [match.start() for match in islice(search(data, begin, end), HITS_MAX - len(found))]
        if len(found) == HITS_MAX:
            return None
        if len(searches) > 1:
            found.sort()
        return found

    return find


def needle_of(node: Node) -> Needle | None:
    """Return what a record for which *node* is TRUE contains."""
    if isinstance(node, And):
        return _heaviest([*_ranges(node.operands), *[needle_of(operand) for operand in node.operands]])
    if isinstance(node, Or):
        return _any([needle_of(operand) for operand in node.operands])
    if isinstance(node, Not):
        return _present(node.operand)
    if isinstance(node, Property):
        return _equal(node, True)
    if isinstance(node, Compare):
        return _heaviest([*_ranges([node]), _compared(node)])
    if isinstance(node, In | Like | Search):
        return _text(node) or _heaviest([_name(name) for name in _names(node.operand)])
    return None


def _heaviest(needles: Sequence[Needle | None]) -> Needle | None:
    return max((needle for needle in needles if needle is not None), key=lambda needle: needle.weight, default=None)


def _any(needles: Sequence[Needle | None]) -> Needle | None:
    found = [needle for needle in needles if needle is not None]
    patterns = tuple(dict.fromkeys(pattern for needle in found for pattern in needle.patterns))
    if len(found) < len(needles) or len(patterns) > NEEDLES_MAX:
        return None
    return Needle(patterns, min(needle.weight for needle in found))


# Presence


def _present(node: Node) -> Needle | None:
    """Return what a record contains for which *node* is FALSE: a property without which it is unknown."""
    if isinstance(node, IsNull):  # as the operand of NOT
        return _heaviest([_name(name) for name in _names(node.operand)])
    if isinstance(node, Compare):
        return _heaviest([_name(name) for name in (*_names(node.left), *_names(node.right))])
    if isinstance(node, Property):
        return _name(node.name)
    if isinstance(node, In | Like):
        return _heaviest([_name(name) for name in _names(node.operand)])
    return None  # NOT of a search is TRUE for a missing property


def _names(node: Node) -> list[str]:
    """Return the properties without which the value of *node* is NULL."""
    if isinstance(node, Property):
        return [node.name]
    if isinstance(node, Negate):
        return _names(node.operand)
    if isinstance(node, Arithmetic):
        return [*_names(node.left), *_names(node.right)]
    return []


def _name(name: str) -> Needle:
    return Needle((re.escape(name.encode()) + rb"\x01",), len(name))


# Texts


def _text(node: In | Like | Search) -> Needle | None:
    if not isinstance(node.operand, Property):
        return None
    name = node.operand.name
    if isinstance(node, In):
        return _any([_value(name, text, END) for text in sorted(node.texts)])
    if isinstance(node, Like):
        return _like(name, node)
    if node.negated or not node.text:
        return None
    if node.operator == "STARTSWITH":
        return _value(name, node.text, b"")
    return _literal(node.text, END if node.operator == "ENDSWITH" else b"")


def _like(name: str, node: Like) -> Needle | None:
    """By the characters before the first wildcard."""
    plain, quoted = "", False
    for character in node.pattern:
        if not quoted and character == node.escape:
            quoted = True
            continue
        if not quoted and character in "%_":
            return _value(name, plain, b"") if plain else None
        plain += character
        quoted = False
    return _value(name, plain, END)


def _value(name: str, text: str, end: bytes) -> Needle | None:
    """Return the needle of property *name* whose value begins with *text*, or is it, depending on *end*."""
    literal = _literal(text, end)
    if literal is None:
        return None
    found = _name(name)
    return Needle((found.patterns[0] + literal.patterns[0],), 100 + found.weight + literal.weight)


def _literal(text: str, end: bytes) -> Needle | None:
    if UNDECODED in text:
        return None
    return Needle((re.escape(text.encode()) + end,), 50 + len(text))


# Comparisons


def _compared(node: Compare) -> Needle | None:
    left, right = node.left, node.right
    if isinstance(left, Constant):
        left, right = right, left
    if node.operator == "=" and isinstance(left, Property) and isinstance(right, Constant):
        return _equal(left, right.value) or _present(node)
    return _present(node)


def _equal(node: Property, value: Value) -> Needle | None:
    if isinstance(value, str):
        return _value(node.name, value, END)
    found = _name(node.name)
    if value is True:
        return Needle((found.patterns[0] + rb"(?i:true)" + END,), 100 + found.weight)
    if value is None or value is False or abs(value) >= INTEGERS_EXACT:
        return None
    digits = DECIMAL
    if value == int(value):
        digits += b"|" + _whole(int(value))
    return Needle((found.patterns[0] + b"(?:" + digits + b")",), 100 + found.weight)


def _whole(value: int) -> bytes:
    """Return a pattern for texts of *value* without ``.eE``."""
    if not value:
        return rb"[+\-]?" + ZERO
    sign = rb"\+?" if value > 0 else b"-"
    return sign + ZEROS + b"%d(?![0-9])" % abs(value)


# Ranges


def _ranges(operands: Iterable[Node]) -> list[Needle]:
    """Return a needle for each property that *operands*, which must all be TRUE, compare by ``<`` and so on."""
    bounds: dict[str, tuple[int | None, int | None]] = {}
    for operand in operands:
        found = _bounds(operand)
        if found is not None:
            name, low, high = found
            lowest, highest = bounds.get(name, (None, None))
            low = low if lowest is None or (low is not None and low > lowest) else lowest
            high = high if highest is None or (high is not None and high < highest) else highest
            bounds[name] = low, high
    return [_range(name, low, high) for name, (low, high) in bounds.items()]


def _bounds(node: Node) -> tuple[str, int | None, int | None] | None:
    """Return the property that *node* compares with a constant, and the lowest and the highest whole number allowed."""
    if not isinstance(node, Compare):
        return None
    left, right, operator = node.left, node.right, node.operator
    if isinstance(left, Constant):
        left, right, operator = right, left, MIRRORED.get(operator, "")
    if not isinstance(left, Property) or not isinstance(right, Constant) or operator not in MIRRORED:
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
    found = _name(name)
    weight = 30 if low is None or high is None else 60
    return Needle((found.patterns[0] + b"(?:" + b"|".join(texts) + b")",), weight + found.weight)


def _positive(low: int, high: int | None) -> bytes:
    """Return a pattern for whole numbers from *low*, at least 1, to *high*; its lookaheads have one for each bound."""
    pattern = ZEROS + b"(?=(?:%b)(?![0-9]))" % _from(low)
    return pattern if high is None else pattern + b"(?=(?:%b)(?![0-9]))" % _up_to(high)


def _from(low: int) -> bytes:
    digits = str(low).encode()
    texts = [b"[1-9][0-9]{%d,%d}" % (len(digits), NUMBER_CHARACTERS_MAX), digits]
    for at, digit in enumerate(digits):
        if digit < NINE:
            texts.append(b"%b[%c-9][0-9]{%d}" % (digits[:at], digit + 1, len(digits) - at - 1))
    return b"|".join(texts)


def _up_to(high: int) -> bytes:
    digits = str(high).encode()
    texts = [digits]
    if len(digits) > 1:
        texts.append(b"[1-9][0-9]{0,%d}" % (len(digits) - 2))
    for at, digit in enumerate(digits):
        least = ZERO_DIGIT if at else ZERO_DIGIT + 1
        if digit > least:
            texts.append(b"%b[%c-%c][0-9]{%d}" % (digits[:at], least, digit - 1, len(digits) - at - 1))
    return b"|".join(texts)
