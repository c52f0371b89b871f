"""The mutants of a module: its source with one small fault each, made by the operators of cosmic-ray.

Of its operators only those are used that make the faults people make: a comparison off by one or turned around, a
wrong sign, a condition that is missing or inverted, a loop or handler that never runs. One of our own removes a
statement: a call whose result nobody uses, or an assignment to an attribute. So a forgotten flush is a mutant.
"""

import ast
import difflib
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

__all__ = ["Mutant", "mutants", "sample"]

# The operators of cosmic-ray by kind; its others replace by what nobody would write.
OPERATOR_NAMES: Final = {
    "ReplaceComparisonOperator_": (
        *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
        *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    ),
    "ReplaceBinaryOperator_": (
        *("Add_Sub", "Sub_Add", "Mul_FloorDiv", "FloorDiv_Mul", "Div_Mul", "Mod_FloorDiv"),
        *("BitOr_BitAnd", "BitAnd_BitOr", "LShift_RShift", "RShift_LShift"),
    ),
    "ReplaceUnaryOperator_": ("Delete_USub", "Delete_Not", "Delete_Invert"),
    "Replace": ("TrueWithFalse", "FalseWithTrue", "AndWithOr", "OrWithAnd", "BreakWithContinue", "ContinueWithBreak"),
    "": ("AddNot", "ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop"),
}
STATEMENTS: Final = (ast.stmt, ast.ExceptHandler)
TARGETS: Final = ("power", "atom_expr")  # parso's name for a.b, a[b] and a(b), by version


class RemoveStatement(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """Replace a call or an assignment to an attribute or item by ``pass``; log lines stay."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if node.type == "simple_stmt" and _has_an_effect(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        first = node.children[0]
        node.children[0] = Keyword("pass", first.start_pos, first.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("disk.sync(path)\n", "pass\n"), Example("self.end = end\n", "pass\n"))


def _has_an_effect(statement: Any) -> bool:
    if statement.type == "expr_stmt":
        return statement.children[0].type in TARGETS or str(statement.children[1].get_code()).strip() in ("+=", "-=")
    code = str(statement.get_code()).strip()
    return statement.type in TARGETS and code.endswith(")") and not code.startswith(("log.", "self.log."))


def _operators() -> list[Operator]:
    known = OperatorProvider()
    return [*(known[kind + name]() for kind, names in OPERATOR_NAMES.items() for name in names), RemoveStatement()]


OPERATORS: Final = _operators()


@dataclass(frozen=True)
class Mutant:
    """One fault in *module*: which, and the *lines* that a test must run to notice it."""

    module: str
    operator: int  # in OPERATORS
    occurrence: int
    lines: tuple[int, ...]

    @property
    def name(self) -> str:
        """What tells it from the others of the same source."""
        return f"{self.module}:{self.lines[0]}:{type(OPERATORS[self.operator]).__name__}:{self.occurrence}"

    def apply(self, source: str) -> str | None:
        """Return *source* with the fault; None if that is no valid program."""
        mutated = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        try:
            compile(mutated, self.module, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, TypeError):
            return None
        return str(mutated)

    def diff(self, source: str) -> str:
        """Return the fault as a diff."""
        before, after = source.splitlines(True), (self.apply(source) or "").splitlines(True)
        return "".join(difflib.unified_diff(before, after, self.module, self.name, n=2))


def mutants(module: str, source: str) -> list[Mutant]:
    """Return the mutants of *module*, in the order of its lines; nothing outside of functions is mutated.

    There are limits and tables, which the tests of the protocols and of the disk format pin where they matter.
    """
    spans = _Spans(source)
    counts: Counter[int] = Counter()
    found: list[tuple[tuple[int, int], Mutant]] = []
    for node in ast_nodes(get_ast(source)):
        for number, operator in enumerate(OPERATORS):
            for start, _ in operator.mutation_positions(node):
                lines = spans.lines(start)
                if lines:
                    found.append((start, Mutant(module, number, counts[number], lines)))
                counts[number] += 1
    return [mutant for _, mutant in sorted(found, key=lambda pair: pair[0])]


def sample(everything: Sequence[Mutant], source: str, size: int, seed: int) -> list[Mutant]:
    """Return *size* of the mutants that are valid programs, the same ones for the same seed, in their order."""
    places = list(range(len(everything)))
    random.Random(f"{seed} {everything[0].module}" if everything else seed).shuffle(places)
    valid = (place for place in places if everything[place].apply(source) is not None)
    return [everything[place] for place in sorted(islice(valid, size))]


class _Spans:
    """Which statement of a function a position belongs to."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self._types = [_span(node) for node in _annotations(tree)]
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        inside = {node for function in functions for node in ast.walk(function) if isinstance(node, STATEMENTS)}
        self._statements = sorted((_span(node)[0], _last_line(node)) for node in inside - set(functions))
        self._starts = [start for start, _ in self._statements]

    def lines(self, position: tuple[int, int]) -> tuple[int, ...]:
        """Return the lines of the statement at *position*, without its block; none if it is to be left alone."""
        index = bisect_right(self._starts, position) - 1
        if index < 0 or any(start <= position < end for start, end in self._types):
            return ()
        (first, _), last = self._statements[index]
        return tuple(range(first, last + 1)) if position[0] <= last else ()


def _annotations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns:
            yield node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation


def _span(node: ast.stmt | ast.expr | ast.ExceptHandler) -> tuple[tuple[int, int], tuple[int, int]]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def _last_line(node: ast.stmt | ast.ExceptHandler) -> int:
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
