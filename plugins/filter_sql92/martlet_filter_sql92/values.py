"""Finds records by the values of one property: all values of a page in one search, each evaluated once.

For conditions on one property that imply nothing about its bytes, such as ``a + 1 = 8``. Equal bytes have the same
verdict, and most properties have few values, so a scan evaluates the condition a few times instead of once for each
record.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, final

from martlet_filter_sql92.compiler import Truth, compile_tree, cost_of, has_slow_like, nodes
from martlet_filter_sql92.parser import Node, PropertyReference

__all__ = ["ALTERNATIVES_MAX", "END", "Values", "key_of", "values_of"]

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

# A value ends before the separator, before the next record, whose first byte belongs to a size, or at the end. All
# patterns only look ahead: consumed bytes could be the beginning of the next name.
END: Final = rb"(?=[\x00-\x02]|\Z)"
# The group is the value. A zero byte may belong to the value, unless it begins the next record: the record's magic, or
# the magic of the segment's filler, follows the size. Neither magic is UTF-8, so no text contains one. A byte 1 is no
# separator. If the end of the value is unknown, the group ends with one of these bytes.
UNSURE: Final = (b"\x00", b"\x01")
VALUE: Final = rb"(?=([^\x00-\x02]*+(?:\x00(?!...(?:\xda\xa3\x20[\xa7\xa8]|\xcb\xd4\x31\x94))|\x01)?))"


def key_of(name: str) -> bytes:
    """Return the pattern of the bytes before the value of property *name* in a record."""
    return re.escape(name.encode()) + rb"\x01"


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

    __slots__ = (
        "_cost",
        "_find_all",
        "_iterate",
        "_key",
        "_last_pattern",
        "_prefix",
        "_steps",
        "_truth",
        "_verdicts",
        "name",
    )

    def __init__(self, name: str, truth: Truth, cost: int, steps: list[int]) -> None:
        self.name = name
        self._key = name.encode() + b"\x01"
        self._truth = truth
        self._cost = cost
        self._steps = steps
        self._prefix = key_of(name)
        pattern = re.compile(self._prefix + VALUE, re.DOTALL)
        self._find_all: Callable[[bytes | bytearray, int, int], list[bytes]] = pattern.findall
        self._iterate: Callable[[bytes | bytearray, int, int], Iterator[re.Match[bytes]]] = pattern.finditer
        self._verdicts: dict[bytes, bool] = {}
        # Values for which the condition is TRUE, and the pattern that finds them.
        self._last_pattern: tuple[frozenset[bytes], re.Pattern[bytes] | None] = frozenset(), None

    def __call__(self, data: bytes | bytearray, begin: int, end: int) -> list[int] | None:
        """Return the places in ``data[begin:end]``; None if there are too many, or too many values."""
        values = self._find_values(data, begin, end)
        true_values = self._select_true(values) if values is not None else None
        if not true_values:
            return None if true_values is None else []
        pattern = self._pattern(true_values)
        if pattern is None:
            return [match.start() for match in self._iterate(data, begin, end) if match[1] in true_values]
        return [match.start() for match in pattern.finditer(data, begin, end)]

    def _find_values(self, data: bytes | bytearray, begin: int, end: int) -> set[bytes] | None:
        """Return all values in ``data[begin:end]``; None if there are too many."""
        values: list[bytes] = []
        values_max = (end - begin) // BYTES_A_VALUE + VALUES_FREE
        while begin < end:
            stop = data.find(b"\x02", begin + PIECE_BYTES, end)  # no name and no value contains this byte
            if stop < 0:
                stop = end
            if stop - begin > 2 * PIECE_BYTES and data.count(self._key, begin, stop) > values_max:
                return None
            values += self._find_all(data, begin, stop)
            if len(values) > values_max:
                return None
            begin = stop
        self._steps[0] += len(values) * STEPS_A_TAKEN
        return set(values)

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
        return frozenset(true_values)

    def _holds(self, value: bytes) -> bool:
        if value[-1:] in UNSURE:
            return True
        return self._truth(_One(value.decode("utf-8", "replace") or None)) is True

    def _pattern(self, true_values: frozenset[bytes]) -> re.Pattern[bytes] | None:
        """Return a pattern that finds *true_values* and values searched before; None if the pattern would be slow."""
        values, pattern = self._last_pattern
        if pattern is not None and true_values <= values:
            return pattern
        values = values | true_values if len(values | true_values) <= ALTERNATIVES_MAX else true_values
        if len(values) > ALTERNATIVES_MAX:
            return None
        texts = [re.escape(value) + (b"" if value[-1:] in UNSURE else END) for value in sorted(values)]
        pattern = re.compile(self._prefix + b"(?:" + b"|".join(texts) + b")")
        self._last_pattern = values, pattern
        return pattern
