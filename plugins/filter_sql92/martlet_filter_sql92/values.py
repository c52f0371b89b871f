"""Finds records by the values of one property: all values of a page in one search, each evaluated once.

For conditions on one property that imply nothing about its bytes, such as ``a + 1 = 8``. Equal bytes have the same
verdict, and most properties have few values, so a scan evaluates the condition a few times instead of once for each
record.
"""

import re
from functools import lru_cache
from itertools import islice
from typing import Final, final

from martlet.runtime.native import native
from martlet_filter_sql92.compiler import Truth, compile_tree, cost_of, has_slow_like, nodes
from martlet_filter_sql92.parser import Node, PropertyReference
from martlet_filter_sql92.searches import start_of

__all__ = ["ALTERNATIVES_MAX", "Values", "distinct_values", "find_values", "values_of"]

# A search extracts at most one value in this many bytes, each in 0.3 us. It does so piece by piece, to stop in time.
BYTES_A_VALUE: Final = 96
VALUES_FREE: Final = 256
STEPS_A_TAKEN: Final = 2
PIECE_BYTES: Final = 128 << 10
# A search evaluates this many values if the condition costs as much as one comparison (1 us), fewer if it costs more.
EVALUATED_MAX: Final = 6144
STEPS_A_VALUE: Final = 4
# Verdicts are kept for this many values of this length: 100 KiB for each condition.
VERDICTS_MAX: Final = 512
KEPT_BYTES_MAX: Final = 64
NODES_MAX: Final = 64  # of a condition, which is compiled twice
ALTERNATIVES_MAX: Final = 8  # of one pattern, which compares them one after the other

# A zero byte may belong to a value, unless it begins the next record: the record's magic, or the magic of the segment's
# filler, follows the size. Neither magic is UTF-8, so no text contains one. A byte 1 is no separator. If the end of a
# value is unknown, the value ends with one of these bytes.
ZERO_BYTE: Final = b"\x00"
UNSURE: Final = (ZERO_BYTE, b"\x01")
NEXT: Final = rb"...(?:\xda\xa3\x20[\xa7\xab]|\xcb\xd4\x31\x94)"
# The patterns only look ahead: consumed bytes could be the beginning of the next name. The group is the value.
VALUE: Final = rb"(?=([^\x00-\x02]*+(?:\x00(?!" + NEXT + rb")|\x01)?))"
VALUE_END: Final = rb"(?=\x02|\Z|\x00" + NEXT + b")"
PATTERNS_MAX: Final = 64  # compiled ones that are kept


@final
class _One:
    """A record that has one property only."""

    __slots__ = ("value",)

    def __init__(self, value: str | None) -> None:
        self.value = value

    def property(self, name: str) -> str | None:
        return self.value


def values_of(node: Node, steps: list[int]) -> "Values | None":
    """Return the search for records that *node* may select; None if it does not depend on one property alone.

    The search adds its evaluations to the only element of *steps*.
    """
    parts = list(islice(nodes(node), NODES_MAX + 1))
    names = {each.name for each in parts if isinstance(each, PropertyReference)}
    if len(names) != 1 or any("\x02" in name for name in names) or len(parts) > NODES_MAX or has_slow_like(node):
        return None
    truth = compile_tree(node)
    if truth(_One(None)) is True:
        return None
    return Values(names.pop(), truth, cost_of(node), steps)


@final
class Values:
    """Finds the places in raw bytes where property *name* has a value for which *truth* is TRUE; thread-safe."""

    __slots__ = ("_cost", "_start", "_steps", "_truth", "_verdicts", "_wanted", "name")

    def __init__(self, name: str, truth: Truth, cost: int, steps: list[int]) -> None:
        self.name = name
        self._start = start_of(name)
        self._truth = truth
        self._cost = cost
        self._steps = steps
        self._verdicts: dict[bytes, bool] = {}
        # Values for which the condition is TRUE, of the last searches: few, so that they need few patterns.
        self._wanted: frozenset[bytes] = frozenset()

    def __call__(self, data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        """Return the places in ``data[begin:end]``; None if there are too many, or too many values."""
        values_max = (end - begin) // BYTES_A_VALUE + VALUES_FREE
        found = native(distinct_values)(data, begin, end, self._start, values_max)
        if found is None:
            return None
        values, count = found
        self._steps[0] += count * STEPS_A_TAKEN
        true_values = self._select_true(values)
        if not true_values:
            return None if true_values is None else []
        if not true_values <= self._wanted:
            wanted = self._wanted | true_values
            self._wanted = wanted if len(wanted) <= ALTERNATIVES_MAX else true_values
        return native(find_values)(data, begin, end, self._start, self._wanted)

    def _select_true(self, values: set[bytes]) -> frozenset[bytes] | None:
        """Return the values of *values* for which the condition is TRUE; None if too many are new."""
        verdicts = self._verdicts
        if len(verdicts) >= VERDICTS_MAX:
            verdicts = self._verdicts = {}
        new_values = values.difference(verdicts)
        if len(new_values) * self._cost > EVALUATED_MAX:
            return None
        self._steps[0] += len(new_values) * self._cost * STEPS_A_VALUE
        true_values = {value for value in values if verdicts.get(value)}
        for value in new_values:
            holds = self._holds(value)
            if holds:
                true_values.add(value)
            if len(verdicts) < VERDICTS_MAX and len(value) <= KEPT_BYTES_MAX:
                verdicts[value] = holds
        # The search for all values may see where a value ends that seemed to continue with a zero byte.
        true_values |= {value[:-1] for value in true_values if value[-1:] == ZERO_BYTE}
        return frozenset(true_values)

    def _holds(self, value: bytes) -> bool:
        if value[-1:] in UNSURE:
            return True
        return self._truth(_One(value.decode("utf-8", "replace") or None)) is True


def distinct_values(
    data: bytes | bytearray, begin: int, end: int, start: bytes, values_max: int
) -> tuple[set[bytes], int] | None:
    """Return the different values after *start* in ``data[begin:end]``, and the number of all; None for too many."""
    find_all = _value_pattern(start).findall
    values: list[bytes] = []
    while begin < end:
        stop = data.find(b"\x02", begin + PIECE_BYTES, end)  # no name and no value contains this byte
        if stop < 0:
            stop = end
        if stop - begin > 2 * PIECE_BYTES and data.count(start, begin, stop) > values_max:
            return None
        values += find_all(data, begin, stop)
        if len(values) > values_max:
            return None
        begin = stop
    return set(values), len(values)


def find_values(data: bytes | bytearray, begin: int, end: int, start: bytes, values: frozenset[bytes]) -> list[int]:
    """Return the places in ``data[begin:end]`` where *start* is followed by one of *values*.

    These come from `distinct_values`: a zero byte or a byte 1 can only be the last byte of one.
    """
    if len(values) > ALTERNATIVES_MAX:
        found = _value_pattern(start).finditer(data, begin, end)
        return [match.start() for match in found if match[1] in values]
    return [match.start() for match in _pattern_of(start, values).finditer(data, begin, end)]


@lru_cache(PATTERNS_MAX)
def _value_pattern(start: bytes) -> re.Pattern[bytes]:
    return re.compile(re.escape(start) + VALUE, re.DOTALL)


@lru_cache(PATTERNS_MAX)
def _pattern_of(start: bytes, values: frozenset[bytes]) -> re.Pattern[bytes]:
    """Return the pattern of *start* and any of *values*."""
    ends = {ZERO_BYTE: b"(?!" + NEXT + b")", UNSURE[1]: b""}
    texts = [re.escape(value) + ends.get(value[-1:], VALUE_END) for value in sorted(values)]
    return re.compile(re.escape(start) + b"(?=" + b"|".join(texts) + b")", re.DOTALL)
