"""A plain evaluator of SQL92 conditions, straight from the rules. It shares nothing with the compiler."""

import re
from fractions import Fraction

from martlet_filter_sql92 import parser as p

Values = dict[str, str]
Number = int | float
LONG = range(-(2**63), 2**63)


def evaluate(node: p.Node, values: Values) -> p.Value:
    match node:
        case p.Constant(value):
            return value
        case p.PropertyReference(name):
            return values.get(name)
        case p.Negate(operand):
            return fit(minus(to_number(evaluate(operand, values))))
        case p.Arithmetic(operator, left, right):
            return compute(operator, to_number(evaluate(left, values)), to_number(evaluate(right, values)))
        case p.IsNull(operand):
            return evaluate(operand, values) is None
        case p.Search(operator, operand, text, negated):
            return search(operator, evaluate(operand, values), text, negated)
        case p.Compare(operator, left, right):
            return compare(operator, evaluate(left, values), evaluate(right, values))
        case p.In(operand, texts):
            value = evaluate(operand, values)
            return None if value is None else value in texts
        case p.Like(operand, pattern, escape):
            value = evaluate(operand, values)
            return None if value is None else like(str(value), pattern, escape)
        case p.Not(operand):
            known = condition(operand, values)
            return None if known is None else not known
        case p.And(operands):
            found = [condition(operand, values) for operand in operands]
            return False if False in found else None if None in found else True
        case p.Or(operands):
            found = [condition(operand, values) for operand in operands]
            return True if True in found else None if None in found else False
    raise AssertionError(node)


def condition(node: p.Node, values: Values) -> bool | None:
    value = evaluate(node, values)
    if isinstance(node, p.PropertyReference):
        return None if value is None else str(value).lower() == "true"
    assert value is None or isinstance(value, bool)
    return value


def to_number(value: p.Value) -> int | float | None:
    if isinstance(value, bool) or value is None:
        return None
    if not isinstance(value, str):
        return value
    if len(value) > 64 or not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value, re.ASCII):
        return None
    return fit(float(value) if re.search(r"[.eE]", value) else int(value))


def fit(value: Number | None) -> Number | None:
    """As a long or a double holds it."""
    if isinstance(value, int) and value not in LONG:
        value = float(value)
    return None if value in (float("inf"), float("-inf")) else value


def minus(value: float | None) -> int | float | None:
    return None if value is None else -value


def compute(operator: str, left: float | None, right: float | None) -> int | float | None:
    if left is None or right is None or (operator in "/%" and right == 0):
        return None
    whole = isinstance(left, int) and isinstance(right, int)
    quotient = Fraction(left) / Fraction(right) if operator in "/%" else Fraction(0)
    try:
        match operator:
            case "+":
                return fit(left + right)
            case "-":
                return fit(left - right)
            case "*":
                return fit(left * right)
            case "/":
                return fit(int(quotient) if whole else left / right)
            case _:
                return fit(left - right * int(quotient) if whole else left - right * int(left / right))
    except OverflowError:
        return None


def compare(operator: str, left: p.Value, right: p.Value) -> bool | None:
    if operator == "<>":
        equal = compare("=", left, right)
        return None if equal is None else not equal
    if left is None or right is None:
        return None
    if operator == "=":
        return equals(left, right)
    a, b = to_number(left), to_number(right)
    if a is None or b is None:
        return None
    return {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[operator]


def equals(left: str | float | bool, right: str | float | bool) -> bool | None:
    kinds = {type(left), type(right)}
    if kinds == {str} or kinds == {bool}:
        return left == right
    if kinds == {str, bool}:
        text, truth = (left, right) if isinstance(left, str) else (right, left)
        return (str(text).lower() == "true") == truth
    if bool in kinds:
        return False
    a, b = to_number(left), to_number(right)
    return None if a is None or b is None else a == b


def search(operator: str, value: p.Value, text: str, negated: bool) -> bool:
    if value is None or not text:
        return False
    found = str(value)
    has = {"CONTAINS": text in found, "STARTSWITH": found.startswith(text), "ENDSWITH": found.endswith(text)}
    return has[operator] != negated


def like(text: str, pattern: str, escape: str) -> bool:
    """By dynamic programming over both texts."""
    characters = iter(pattern)
    symbols = [(next(characters), True) if c == escape else (c, c not in "%_") for c in characters]  # (c, plain)
    row = [True] + [False] * len(text)
    for symbol, plain in symbols:
        if symbol == "%" and not plain:
            seen, following = False, []
            for reached in row:
                seen = seen or reached
                following.append(seen)
        else:
            following = [False] + [
                reached and (not plain or symbol == character) for reached, character in zip(row, text, strict=False)
            ]
        row = following
    return row[-1]
