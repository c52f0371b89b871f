"""Parses tokens into a tree by precedence climbing: a pair of parentheses costs few frames of Python's stack.

Precedence, lowest first: OR, AND, NOT, comparisons, + and -, * / and %, signs. RocketMQ's grammar lets NOT bind as
tightly as a sign, so that ``NOT a = 1`` never matches there; here it is ``NOT (a = 1)``, as SQL92 says.
"""

from typing import Final, Literal, TypeAlias, final

from msgspec import Struct  # defining a Struct takes a fiftieth of the time of a dataclass

from martlet_filter_sql92.lexer import KEYWORDS, Token, mistake, tokens

__all__ = [
    "And",
    "Arithmetic",
    "Compare",
    "Constant",
    "ExpressionLimits",
    "In",
    "IsNull",
    "Like",
    "Negate",
    "Node",
    "Not",
    "Or",
    "PropertyReference",
    "Search",
    "Value",
    "parse",
]

# A value of an expression; None is SQL's NULL, or UNKNOWN where a truth value is expected.
Value: TypeAlias = str | int | float | bool | None
Comparator: TypeAlias = Literal["=", "<>", "<", "<=", ">", ">="]

INTEGER_MAX: Final = (1 << 63) - 1
COMPARATORS: Final[frozenset[str]] = frozenset({"=", "<>", "<", "<=", ">", ">="})
SEARCHES: Final[frozenset[str]] = frozenset({"CONTAINS", "STARTSWITH", "ENDSWITH"})
# Precedences.
OR: Final = 0
AND: Final = 1
NOT: Final = 2
COMPARISON: Final = 3
SUM: Final = 4
PRODUCT: Final = 5
SIGN: Final = 6
TESTS: Final[frozenset[str]] = frozenset({"IS", "NOT", "BETWEEN", "IN", "LIKE"}) | SEARCHES
PRECEDENCE: Final[dict[str, int]] = (
    {"OR": OR, "AND": AND, "+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "%": PRODUCT}
    | dict.fromkeys(COMPARATORS, COMPARISON)
    | dict.fromkeys(TESTS, COMPARISON)
)


class ExpressionLimits(Struct, frozen=True):
    """Limits on the size of an expression: bytes of UTF-8, levels of nesting, nodes of the tree."""

    text_bytes: int = 4096
    depth: int = 64
    nodes: int = 256


LIMITS: Final = ExpressionLimits()


class Constant(Struct, frozen=True):
    value: Value


class PropertyReference(Struct, frozen=True):
    name: str


class Negate(Struct, frozen=True):
    operand: "Node"


class Arithmetic(Struct, frozen=True):
    operator: str  # + - * / %
    left: "Node"
    right: "Node"


class Compare(Struct, frozen=True):
    operator: str
    left: "Node"
    right: "Node"


class IsNull(Struct, frozen=True):
    operand: "Node"


class In(Struct, frozen=True):
    operand: "Node"
    texts: frozenset[str]


class Like(Struct, frozen=True):
    operand: "Node"
    pattern: str
    escape: str  # one character; empty for none


class Search(Struct, frozen=True):
    """RocketMQ's CONTAINS, STARTSWITH and ENDSWITH.

    FALSE for a missing property and for an empty text, even when negated.
    """

    operator: str
    operand: "Node"
    text: str
    negated: bool


class Not(Struct, frozen=True):
    operand: "Node"


class And(Struct, frozen=True):
    operands: tuple["Node", ...]


class Or(Struct, frozen=True):
    operands: tuple["Node", ...]


Node: TypeAlias = (
    Constant | PropertyReference | Negate | Arithmetic | Compare | IsNull | In | Like | Search | Not | And | Or
)
BOOLEANS: Final = (Compare, IsNull, In, Like, Search, Not, And, Or)
NODES: Final = (Constant, PropertyReference, Negate, Arithmetic, *BOOLEANS)
NUMBERS: Final = (Negate, Arithmetic)


def parse(text: str, limits: ExpressionLimits = LIMITS) -> Node:
    """Return the tree of the condition *text*.

    Raises:
      Refused: *text* is no condition, or exceeds *limits*; the message points at the character (Reason.ILLEGAL).
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise mistake(text, error.start, "half of a surrogate pair is no character") from error
    if size > limits.text_bytes:
        raise mistake(text, 0, f"it has {size} bytes; the limit is {limits.text_bytes}")
    return _Parser(text, limits).condition()


@final
class _Parser:
    def __init__(self, text: str, limits: ExpressionLimits) -> None:
        self._text = text
        self._limits = limits
        self._tokens = tokens(text)
        self._token = next(self._tokens)
        self._depth = 0
        self._nodes = 0

    def condition(self) -> Node:
        at = self._token.at
        node = self._parse_expression(OR)
        if self._token.kind != "end":
            raise self._unexpected("AND, OR or the end")
        return self._check_boolean(node, at)

    # tokens

    def _next(self) -> Token:
        token, self._token = self._token, next(self._tokens, self._token)
        return token

    def _take(self, *texts: str) -> str:
        """Consume and return the next token if it is a keyword or operator of *texts*; else return an empty text."""
        if self._token.kind in ("keyword", "operator") and self._token.text in texts:
            return self._next().text
        return ""

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._unexpected(text)

    def _unexpected(self, expected: str) -> Exception:
        return mistake(self._text, self._token.at, f"expected {expected}")

    # limits

    def _count_node(self, node: Node, at: int) -> Node:
        self._nodes += 1
        if self._nodes > self._limits.nodes:
            raise mistake(self._text, at, f"more than {self._limits.nodes} operators and operands")
        return node

    def _parse_nested(self, lowest: int) -> Node:
        """Parse an expression one level deeper."""
        self._depth += 1
        if self._depth > self._limits.depth:
            raise mistake(self._text, self._token.at, f"more than {self._limits.depth} levels of nesting")
        node = self._parse_expression(lowest)
        self._depth -= 1
        return node

    # types

    def _check_boolean(self, node: Node, at: int) -> Node:
        """Return *node*, which must be a condition; a property counts as one."""
        if isinstance(node, (PropertyReference, *BOOLEANS)) or (
            isinstance(node, Constant) and isinstance(node.value, bool)
        ):
            return node
        raise mistake(self._text, at, "expected a condition, found a value")

    def _check_number(self, node: Node, at: int, operator: str) -> Node:
        """Return *node*, which must be a number; the text of a property may be one."""
        if isinstance(node, (PropertyReference, *NUMBERS)):
            return node
        if isinstance(node, Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
            return node
        raise mistake(self._text, at, f"{operator} compares and computes numbers only")

    def _check_string(self, node: Node, at: int, operator: str) -> Node:
        if isinstance(node, PropertyReference) or (isinstance(node, Constant) and isinstance(node.value, str)):
            return node
        raise mistake(self._text, at, f"{operator} is for properties and strings only")

    def _check_equatable(self, node: Node, at: int) -> Node:
        if isinstance(node, Constant) and node.value is None:
            raise mistake(self._text, at, "nothing equals NULL; use IS NULL or IS NOT NULL")
        return node

    # rules

    def _parse_expression(self, lowest: int) -> Node:
        """Parse operands joined by operators of precedence *lowest* or higher."""
        at = self._token.at
        left = self._parse_negation() if lowest <= NOT and self._take("NOT") else self._parse_signed()
        while (precedence := self._precedence()) >= lowest:
            if precedence <= AND:
                left = self._parse_series(left, at, precedence)
            elif precedence == COMPARISON:
                left = self._parse_predicate(left, at)
            else:
                left = self._parse_arithmetic(left, at, precedence)
        return left

    def _precedence(self) -> int:
        """Return the precedence of the next token as an operator between operands; -1 for any other token."""
        token = self._token
        return PRECEDENCE.get(token.text, -1) if token.kind in ("keyword", "operator") else -1

    def _parse_series(self, left: Node, at: int, precedence: int) -> Node:
        """Parse the operands that OR or AND joins to *left*."""
        word, operands = "OR" if precedence == OR else "AND", [self._check_boolean(left, at)]
        while self._take(word):
            at = self._token.at
            operands.append(self._check_boolean(self._parse_expression(precedence + 1), at))
        return self._count_node(Or(tuple(operands)) if precedence == OR else And(tuple(operands)), at)

    def _parse_negation(self) -> Node:
        at = self._token.at
        return self._count_node(Not(self._check_boolean(self._parse_nested(NOT), at)), at)

    def _parse_predicate(self, left: Node, at: int) -> Node:
        start = self._token.at
        node = self._parse_comparison(left, at) if self._token.text in COMPARATORS else self._parse_test(left, at)
        return self._count_node(node, start)

    def _parse_comparison(self, left: Node, at: int) -> Node:
        """Parse a comparison operator and its right side after *left*."""
        operator = self._next().text
        right_at = self._token.at
        right = self._parse_expression(SUM)
        check = self._check_equatable if operator in ("=", "<>") else lambda n, at: self._check_number(n, at, operator)
        return Compare(operator, check(left, at), check(right, right_at))

    def _parse_test(self, left: Node, at: int) -> Node:
        """Parse IS NULL, BETWEEN, IN, LIKE or a search after *left*."""
        if self._take("IS"):
            negated = bool(self._take("NOT"))
            self._expect("NULL")
            return Not(IsNull(left)) if negated else IsNull(left)
        negated = bool(self._take("NOT"))
        word = self._take("BETWEEN", "IN", "LIKE", *SEARCHES)
        if not word:
            raise self._unexpected("BETWEEN, IN, LIKE, CONTAINS, STARTSWITH or ENDSWITH after NOT")
        if word == "BETWEEN":
            return self._parse_between(self._check_number(left, at, word), negated)
        left = self._check_string(left, at, word)
        if word in SEARCHES:
            return Search(word, left, self._parse_quoted(), negated)
        node: Node = self._parse_in(left) if word == "IN" else self._parse_like(left)
        return Not(node) if negated else node

    def _parse_between(self, left: Node, negated: bool) -> Node:
        at = self._token.at
        low = self._check_number(self._parse_expression(SUM), at, "BETWEEN")
        self._expect("AND")
        right_at = self._token.at
        high = self._check_number(self._parse_expression(SUM), right_at, "BETWEEN")
        if isinstance(low, Constant) and isinstance(high, Constant) and low.value > high.value:  # type: ignore[operator]
            raise mistake(self._text, at, f"BETWEEN {low.value} AND {high.value} is empty; the lower bound comes first")
        if negated:
            return Or((Compare("<", left, low), Compare(">", left, high)))
        return And((Compare(">=", left, low), Compare("<=", left, high)))

    def _parse_in(self, left: Node) -> Node:
        self._expect("(")
        texts = {self._parse_quoted()}
        while self._take(","):
            texts.add(self._parse_quoted())
        self._expect(")")
        return In(left, frozenset(texts))

    def _parse_like(self, left: Node) -> Node:
        at, pattern, escape = self._token.at, self._parse_quoted(), ""
        if self._take("ESCAPE"):
            at, escape = self._token.at, self._parse_quoted()
            if len(escape) != 1:
                raise mistake(self._text, at, "the ESCAPE character must be one character")
            if _ends_in_escape(pattern, escape):
                raise mistake(self._text, at, f"the pattern ends with its ESCAPE character {escape!r}")
        return Like(left, pattern, escape)

    def _parse_quoted(self) -> str:
        if self._token.kind != "string":
            raise self._unexpected("a string in single quotes")
        return self._next().text

    def _parse_arithmetic(self, left: Node, at: int, precedence: int) -> Node:
        operator = self._next().text
        right_at = self._token.at
        right = self._check_number(self._parse_expression(precedence + 1), right_at, operator)
        return self._count_node(Arithmetic(operator, self._check_number(left, at, operator), right), at)

    def _parse_signed(self) -> Node:
        at = self._token.at
        sign = self._take("+", "-")
        if not sign:
            return self._parse_primary()
        is_number = self._token.kind == "number"
        if sign == "-" and is_number:
            return self._count_node(Constant(self._literal(self._next(), -1)), at)
        node = self._check_number(self._parse_nested(SIGN), self._token.at if is_number else at, sign)
        return self._count_node(Negate(node), at) if sign == "-" else node

    def _parse_primary(self) -> Node:
        token = self._token
        if self._take("("):
            node = self._parse_nested(OR)
            self._expect(")")
            return node
        if token.kind == "keyword" and token.text in ("TRUE", "FALSE", "NULL"):
            self._next()
            return self._count_node(Constant({"TRUE": True, "FALSE": False, "NULL": None}[token.text]), token.at)
        if token.kind not in ("number", "string", "name"):
            reserved = f'a value; {token.text} is reserved, quote a property of that name: "{token.text}"'
            raise self._unexpected(reserved if token.text in KEYWORDS else "a value")
        self._next()
        if token.kind == "name":
            return self._count_node(PropertyReference(token.text), token.at)
        return self._count_node(Constant(token.text if token.kind == "string" else self._literal(token)), token.at)

    def _literal(self, token: Token, sign: int = 1) -> int | float:
        text = token.text
        if text.rstrip("lL").isdigit():
            digits = text.rstrip("lL")
            if digits != "0" and digits.startswith("0"):
                raise mistake(self._text, token.at, "a whole number must not begin with 0")
            if len(digits) > 19 or int(digits) > INTEGER_MAX + (sign < 0):
                raise mistake(self._text, token.at, "a whole number must fit in 64 bits")
            return sign * int(digits)
        if text[-1] in "lL":
            raise mistake(self._text, token.at, "only a whole number may end with L")
        number = sign * float(text)
        if number in (float("inf"), float("-inf")):
            raise mistake(self._text, token.at, "the number is too large")
        return number


def _ends_in_escape(pattern: str, escape: str) -> bool:
    at = 0
    while at < len(pattern):
        if pattern[at] == escape:
            at += 1
            if at == len(pattern):
                return True
        at += 1
    return False
