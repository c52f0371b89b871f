"""Needles: byte strings that every selected record contains, so that a scan can search for them and skip other records.

A record stores its properties as ``name\\x01value\\x02...``, so ``colour = 'red'`` selects only records with the bytes
``colour\\x01red``. A needle is searched in raw bytes (`searches.py`). Other records may contain it too, even in a body:
the condition decides. Every selected record must contain it. If the form of a condition on one property implies no
bytes, its values are evaluated (`values.py`).
"""

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple, TypeAlias

from martlet.contracts import Find
from martlet.runtime.native import native
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
from martlet_filter_sql92.searches import HITS_MAX, Numbers, Texts, count_names, start_of
from martlet_filter_sql92.values import ALTERNATIVES_MAX, Values, values_of

__all__ = ["compile_needle", "needle_of"]

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
NO_WHOLE_NUMBER: Final = 1, 0
BOUND_MAX: Final = 10**18
MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
UNDECODED: Final = "\ufffd"  # replaces bytes that are not UTF-8


Pattern: TypeAlias = Texts | Numbers | Values


class Needle(NamedTuple):
    patterns: tuple[Pattern, ...]  # a record contains one of them
    weight: int  # selectivity: of several needles that all must match, the heaviest is searched


def compile_needle(node: Node, steps: list[int]) -> Find | None:
    """Return a search for records that the condition *node* may select; None if *node* implies no bytes in them.

    The search adds its steps (`Condition`) to the only element of *steps*.
    """
    needle = needle_of(node, steps)
    if needle is None:
        return None
    patterns, count = needle.patterns, native(count_names)
    compares_names = any(not isinstance(each, Values) and each.compares_names for each in patterns)

    def find(data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        if compares_names:
            names = count(data, begin, end)
            if names > (end - begin) // BYTES_A_NAME + NAMES_MAX:
                return None
            steps[0] += names // NAMES_A_STEP
        hits: list[int] = []
        steps_limit = steps[0] + STEPS_MAX
        for pattern in patterns:
            new_hits = pattern(data, begin, end) if steps[0] <= steps_limit else None
            if new_hits is None or len(hits) + len(new_hits) >= HITS_MAX:
                return None
            hits += new_hits
        if len(patterns) > 1:
            hits.sort()
        return hits

    return find


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
    patterns = tuple(dict.fromkeys(chain.from_iterable(each.patterns for each in known_needles)))
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
    return Needle((Texts(start_of(name)),), min(len(name), NAME_WEIGHT_MAX))


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
        return _value(name, node.text, is_whole=False)
    return _literal(node.text, is_whole=node.operator == "ENDSWITH")


def _one_of(name: str, texts: list[str]) -> Needle | None:
    if len(texts) == 1:
        return _value(name, texts[0], is_whole=True)
    if len(texts) > ALTERNATIVES_MAX or any(UNDECODED in text or "\x01" in text for text in texts):
        return None
    search = Texts(start_of(name), tuple(text.encode() for text in texts), is_whole=True)
    return Needle((search,), 150 + len(name) + min(map(len, texts)))


def _like(name: str, node: Like) -> Needle | None:
    """Return the needle of a LIKE: the characters before the first wildcard."""
    literal, is_quoted = "", False
    for character in node.pattern:
        if not is_quoted and character == node.escape:
            is_quoted = True
            continue
        if not is_quoted and character in "%_":
            return _value(name, literal, is_whole=False) if literal else None
        literal += character
        is_quoted = False
    return _value(name, literal, is_whole=True)


def _value(name: str, text: str, *, is_whole: bool) -> Needle | None:
    """Return the needle of property *name* with a value that begins with *text*, or equals it if it *is_whole*."""
    if UNDECODED in text:
        return None
    return Needle((Texts(start_of(name), (text.encode(),), is_whole),), 150 + len(name) + len(text))


def _literal(text: str, *, is_whole: bool) -> Needle | None:
    if UNDECODED in text:
        return None
    return Needle((Texts(b"", (text.encode(),), is_whole),), 50 + len(text))


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
        return _value(node.name, value, is_whole=True)
    start, weight = start_of(node.name), 100 + len(node.name)
    if value is True:
        return Needle((Texts(start, (b"true",), is_whole=True, ignores_case=True),), weight)
    if value is None or value is False or abs(value) >= INTEGERS_EXACT:
        return None
    low, high = (int(value), int(value)) if value == int(value) else NO_WHOLE_NUMBER
    return Needle((Numbers(start, low, high),), weight)


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
    weight = HALF_RANGE_WEIGHT if low is None or high is None else RANGE_WEIGHT
    return Needle((Numbers(start_of(name), low, high),), weight + len(name))
