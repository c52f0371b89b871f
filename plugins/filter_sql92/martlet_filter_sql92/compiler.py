"""Compiles a tree to one closure: each node becomes a function of the record, bound to the functions of its operands.

Truth values are True, False and None for UNKNOWN. Only True selects a record. A comparison with a missing property is
UNKNOWN, and so is a comparison of a number with a text that is no number. Properties are texts; compared with a number
they count as numbers, compared with a truth value as truth values (RocketMQ ComparisonExpression.__compare). A property
is read only when the evaluation reaches its name.
"""

import operator
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, TypeAlias, cast, final

from martlet_filter_sql92.like import STEPS_MAX, compile_like, is_slow
from martlet_filter_sql92.parser import (
    BOOLEANS,
    NODES,
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

__all__ = [
    "NUMBER_CHARACTERS_MAX",
    "PropertySource",
    "Truth",
    "compile_tree",
    "cost_of",
    "has_slow_like",
    "nodes",
    "number",
]


class PropertySource(Protocol):
    """An object with properties, such as a stored record."""

    def property(self, name: str) -> str | None: ...


Truth: TypeAlias = Callable[[PropertySource], bool | None]
Evaluate: TypeAlias = Callable[[PropertySource], Value]
Number: TypeAlias = int | float

NODES_A_MICROSECOND: Final = 4
DIGITS_MAX: Final = 18  # so many digits always fit in 64 bits
NUMBER_CHARACTERS_MAX: Final = 64
NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
INTEGER: Final = re.compile(r"[+-]?[0-9]+", re.ASCII)
INFINITY: Final = float("inf")
INTEGER_END: Final = 1 << 63
ORDERS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


SEARCHES: Final[dict[str, Callable[[str, str], bool]]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": lambda text, start: text.startswith(start),
    "ENDSWITH": lambda text, end: text.endswith(end),
}


@final
class _Counting:
    """A record, and the number of steps that LIKE may still take on it."""

    __slots__ = ("property", "steps")

    def __init__(self, record: PropertySource) -> None:
        self.property = record.property
        self.steps = [STEPS_MAX]


def compile_tree(node: Node, steps: list[int] | None = None) -> Truth:
    """Return the function that evaluates the condition *node*: True, False, or None for UNKNOWN.

    The function adds the steps of slow patterns to the only element of *steps*.
    """
    truth = _truth(node)
    if not has_slow_like(node):
        return truth
    total = steps if steps is not None else [0]

    def count_steps(record: PropertySource) -> bool | None:
        counting = _Counting(record)
        try:
            return truth(counting)
        finally:
            total[0] += STEPS_MAX - counting.steps[0]

    return count_steps


def nodes(node: Node) -> Iterator[Node]:
    """Yield *node* and all nodes below it."""
    yield node
    for name in node.__struct_fields__:
        value = getattr(node, name)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, NODES):
                yield from nodes(each)


def cost_of(node: Node) -> int:
    """Return the time of one evaluation of *node*, in units of one property's comparison (1 us)."""
    return 1 + sum(1 for _ in nodes(node)) // NODES_A_MICROSECOND


def has_slow_like(node: Node) -> bool:
    """Return whether a pattern below *node* takes many steps on some texts."""
    return any(isinstance(each, Like) and is_slow(each.pattern, each.escape) for each in nodes(node))


def _truth(node: Node) -> Truth:
    if isinstance(node, And):
        return _all([_truth(operand) for operand in node.operands])
    if isinstance(node, Or):
        return _any([_truth(operand) for operand in node.operands])
    if isinstance(node, Not):
        return _inverse(_truth(node.operand))
    if isinstance(node, PropertyReference):  # a property alone is a condition: its text is "true"
        return _equal(node, Constant(True))
    return CONDITIONS[type(node)](node)


def number(value: Value) -> Number | None:
    """Return *value* as a number; None for a text that is no number, for a truth value and for NULL."""
    if not isinstance(value, str):
        return None if isinstance(value, bool) else value
    if len(value) <= DIGITS_MAX and value.isdigit() and value.isascii():
        return int(value)
    if len(value) > NUMBER_CHARACTERS_MAX or not NUMBER.fullmatch(value):
        return None
    return _in_64_bits(int(value)) if INTEGER.fullmatch(value) else _in_64_bits(float(value))


def truth(text: str) -> bool:
    """Return the truth value of *text*, as Java's Boolean.valueOf: "true" in any case is True, any other text False."""
    return text.lower() == "true"


def _in_64_bits(value: Number) -> Number | None:
    """Return *value* as a long or double of 64 bits; None beyond their range."""
    if isinstance(value, int):
        if -INTEGER_END <= value < INTEGER_END:
            return value
        value = float(value)
    return value if -INFINITY < value < INFINITY else None


# Truth values


def _all(operands: list[Truth]) -> Truth:
    first, *other_operands = operands
    if len(other_operands) == 1:
        second = other_operands[0]

        def both(record: PropertySource) -> bool | None:
            left = first(record)
            if left is False:
                return False
            right = second(record)
            return right if left else False if right is False else None

        return both

    def every(record: PropertySource) -> bool | None:
        result: bool | None = True
        for operand in operands:
            operand_truth = operand(record)
            if operand_truth is False:
                return False
            if operand_truth is None:
                result = None
        return result

    return every


def _any(operands: list[Truth]) -> Truth:
    def some(record: PropertySource) -> bool | None:
        result: bool | None = False
        for operand in operands:
            operand_truth = operand(record)
            if operand_truth:
                return True
            if operand_truth is None:
                result = None
        return result

    return some


def _inverse(operand: Truth) -> Truth:
    def inverse(record: PropertySource) -> bool | None:
        operand_truth = operand(record)
        return None if operand_truth is None else not operand_truth

    return inverse


# Conditions


def _compare(node: Compare) -> Truth:
    if node.operator == "=":
        return _equal(node.left, node.right)
    if node.operator == "<>":
        return _inverse(_equal(node.left, node.right))
    return _order(node.operator, node.left, node.right)


def _equal(left: Node, right: Node) -> Truth:
    if isinstance(left, Constant) and not isinstance(right, Constant):
        left, right = right, left
    if isinstance(right, Constant):
        return _equal_constant(left, right.value)
    first, second = _value(left), _value(right)

    def equal(record: PropertySource) -> bool | None:
        value = first(record)
        return None if value is None else equals(value, second(record))

    return equal


def _equal_constant(node: Node, constant: Value) -> Truth:
    """Compile the usual ``property = constant``, without the checks that only other comparisons need."""
    value = _value(node)
    if isinstance(node, PropertyReference) and isinstance(constant, str):

        def equals_text(record: PropertySource) -> bool | None:
            property_value = value(record)
            return None if property_value is None else property_value == constant

        return equals_text
    return lambda record: equals(value(record), constant)


def equals(left: Value, right: Value) -> bool | None:
    """Return whether two values are equal; None if one is NULL, or is no number while the other is one."""
    if left is None or right is None:
        return None
    if isinstance(left, str):
        if isinstance(right, str):
            return left == right
        left, right = right, left
    if isinstance(left, bool):
        if isinstance(right, str):
            return truth(right) is left
        return isinstance(right, bool) and left is right
    if isinstance(right, bool):
        return False
    other = number(right)
    return None if other is None else left == other


def _order(symbol: str, left: Node, right: Node) -> Truth:
    holds, first, second = ORDERS[symbol], _value(left), _value(right)
    bound = number(right.value) if isinstance(right, Constant) else None
    if bound is not None:

        def compare_with_bound(record: PropertySource) -> bool | None:
            value = number(first(record))
            return None if value is None else holds(value, bound)

        return compare_with_bound

    def compare_both(record: PropertySource) -> bool | None:
        lower = number(first(record))
        if lower is None:
            return None
        upper = number(second(record))
        return None if upper is None else holds(lower, upper)

    return compare_both


def _is_null(node: IsNull) -> Truth:
    value = _value(node.operand)
    return lambda record: value(record) is None


def _in(node: In) -> Truth:
    value, texts = _value(node.operand), node.texts

    def within(record: PropertySource) -> bool | None:
        property_value = value(record)
        return None if property_value is None else property_value in texts

    return within


def _like(node: Like) -> Truth:
    value, matches = _value(node.operand), compile_like(node.pattern, node.escape)
    if not is_slow(node.pattern, node.escape):
        uncounted_steps = [STEPS_MAX]

        def like(record: PropertySource) -> bool | None:
            property_value = value(record)
            return None if property_value is None else matches(str(property_value), uncounted_steps)

        return like

    def like_counted(record: _Counting) -> bool | None:
        property_value = value(record)
        return None if property_value is None else matches(str(property_value), record.steps)

    return cast(Truth, like_counted)  # `compile_tree` wraps the record


def _search(node: Search) -> Truth:
    value, needle, is_negated = _value(node.operand), node.text, node.negated
    if not needle:
        return lambda record: False
    contains = SEARCHES[node.operator]

    def search(record: PropertySource) -> bool | None:
        property_value = value(record)
        return property_value is not None and contains(str(property_value), needle) is not is_negated

    return search


def _constant_truth(node: Constant) -> Truth:
    value = node.value
    return lambda record: bool(value)


CONDITIONS: Final[dict[type, Callable[[Any], Truth]]] = {
    Compare: _compare,
    IsNull: _is_null,
    In: _in,
    Like: _like,
    Search: _search,
    Constant: _constant_truth,
}


# Values


def _value(node: Node) -> Evaluate:
    if isinstance(node, Constant):
        constant = node.value
        return lambda record: constant
    if isinstance(node, PropertyReference):
        name = node.name
        return lambda record: record.property(name)
    if isinstance(node, BOOLEANS):
        return _truth(node)
    operand = _value(node.operand if isinstance(node, Negate) else node.left)
    if isinstance(node, Negate):
        return lambda record: _negate(number(operand(record)))
    return _compute(node, operand)


def _negate(value: Number | None) -> Number | None:
    return None if value is None else _in_64_bits(-value)


def _compute(node: Arithmetic, first: Evaluate) -> Evaluate:
    compute, second = COMPUTE[node.operator], _value(node.right)

    def compute_both(record: PropertySource) -> Number | None:
        left = number(first(record))
        if left is None:
            return None
        right = number(second(record))
        if right is None:
            return None
        try:
            return _in_64_bits(compute(left, right))
        except (ZeroDivisionError, OverflowError):
            return None

    return compute_both


def _divide(left: Number, right: Number) -> Number:
    """Divide as Java does: the quotient of whole numbers is whole, rounded towards zero."""
    if isinstance(left, int) and isinstance(right, int):
        quotient = abs(left) // abs(right)
        return quotient if (left < 0) is (right < 0) else -quotient
    return left / right


def _remainder(left: Number, right: Number) -> Number:
    """Return the remainder as Java does, with the sign of *left*."""
    if isinstance(left, int) and isinstance(right, int):
        remainder = abs(left) % abs(right)
        return -remainder if left < 0 else remainder
    return left - right * int(left / right) if right else _divide(left, right)


COMPUTE: Final[dict[str, Callable[[Any, Any], Number]]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": _remainder,
}
