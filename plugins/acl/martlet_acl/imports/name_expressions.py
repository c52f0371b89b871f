"""Regular expressions of names in RabbitMQ's permissions, as names and beginnings of names.

RabbitMQ searches an expression anywhere in a name (rabbit_access_control, Erlang's re). Rules have only whole names and
beginnings, so an expression may be imported with fewer names than it has, or not at all; a remark says so.
"""

import re
from collections.abc import Iterator
from itertools import product
from typing import Final, Literal, TypeAlias, final

from msgspec import Struct

from martlet_acl.policy.errors import PolicyError

__all__ = ["NamePatterns", "is_found_in", "parse_expression"]

ALTERNATIVES_MAX: Final = 100
CHARACTERS_MAX: Final = 4096
# An escaped character, ``.*`` or ``.+``, a character with a meaning, a variable of topic permissions, or itself.
_TOKEN: Final = re.compile(
    r"\\(?P<escaped>[^\w\s])|(?P<some>\.[*+])|(?P<special>[.^$|()])|(?P<variable>\{[a-z_]+\})|(?P<itself>[^\\{}\[\]?*+])"
)

# ``text`` and ``some`` have the characters, the others none.
_Kind: TypeAlias = Literal["text", "start", "end", "some", "one"]
_Piece: TypeAlias = tuple[_Kind, str]
_SPECIAL: Final[dict[str, _Piece]] = {"^": ("start", ""), "$": ("end", ""), ".": ("one", ".")}


@final
class NamePatterns(Struct, frozen=True):
    """Names, beginnings of names, and remarks on names that the expression has besides."""

    names: tuple[str, ...] = ()
    beginnings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there are no names."""
        return not self.names and not self.beginnings


def is_found_in(expression: str, name: str) -> bool:
    """Whether RabbitMQ finds *expression* in *name*; False if it cannot be compiled."""
    try:
        return bool(expression) and re.search(expression, name) is not None
    except re.error:
        return False


def parse_expression(expression: str) -> NamePatterns:
    """Return the names that *expression* matches.

    Raises:
      PolicyError: it has parts that rules cannot have.
    """
    if len(expression) > CHARACTERS_MAX:
        raise PolicyError(f"the expression has {len(expression)} characters; {CHARACTERS_MAX} are allowed")
    if expression in ("", "^$"):
        return NamePatterns()
    names: dict[str, None] = {}
    beginnings: dict[str, None] = {}
    remarks: dict[str, None] = {}
    for pieces in _Parser(expression).parse():
        text, is_beginning = _name_of(pieces, remarks)
        (beginnings if is_beginning else names)[text] = None
    return NamePatterns(tuple(names), tuple(beginnings), tuple(remarks))


def _name_of(pieces: list[_Piece], remarks: dict[str, None]) -> tuple[str, bool]:
    """Return what one alternative matches: a name, or the beginning of names."""
    rest = list(pieces)
    is_anchored = bool(rest) and rest[0][0] == "start"
    if is_anchored:
        rest.pop(0)
    elif rest and rest[0] == ("some", ".*"):
        is_anchored = len(rest) == 1 or rest[1:] == [("end", "")]
    is_whole = bool(rest) and rest[-1][0] == "end"
    if is_whole:
        rest.pop()
    while rest and rest[-1] == ("some", ".*"):
        rest.pop()
        is_whole = False
    if any(kind not in ("text", "one") for kind, _ in rest):
        raise PolicyError("rules have only whole names and beginnings of names")
    if not is_anchored:
        remarks["without ^ it also matches inside names; only those that begin so are imported"] = None
    if any(kind == "one" for kind, _ in rest):
        remarks["a dot is any character; only the dot itself is imported"] = None
    return "".join(text for _, text in rest), not is_whole


@final
class _Parser:
    """Splits an expression into alternatives without groups."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._place = 0

    def parse(self) -> list[list[_Piece]]:
        """Return the alternatives. Raises `PolicyError`."""
        found = self._alternatives(depth=0)
        if self._place < len(self._expression):
            raise self._unknown()
        return found

    def _alternatives(self, depth: int) -> list[list[_Piece]]:
        found = self._sequences(depth)
        while self._take("|"):
            found += self._sequences(depth)
        return found

    def _sequences(self, depth: int) -> list[list[_Piece]]:
        parts = list(self._parts(depth))
        count = 1
        for part in parts:
            count *= len(part)
        if count > ALTERNATIVES_MAX:
            raise PolicyError(f"the expression has more than {ALTERNATIVES_MAX} alternatives")
        return [[piece for each in chosen for piece in each] for chosen in product(*parts)]

    def _parts(self, depth: int) -> Iterator[list[list[_Piece]]]:
        """Yield the alternatives of each part of a sequence."""
        while self._place < len(self._expression) and self._expression[self._place] not in "|)":
            if self._take("("):
                self._take("?:")
                if depth > ALTERNATIVES_MAX:
                    raise self._unknown()
                yield self._alternatives(depth + 1)
                if not self._take(")"):
                    raise self._unknown()
            else:
                yield [[self._piece()]]

    def _piece(self) -> _Piece:
        matched = _TOKEN.match(self._expression, self._place)
        if matched is None:
            raise self._unknown()
        self._place = matched.end()
        if matched["some"]:
            return "some", matched["some"]
        if matched["special"]:
            return _SPECIAL[matched["special"]]
        return "text", matched["escaped"] or matched["variable"] or matched["itself"]

    def _take(self, text: str) -> bool:
        """Skip *text* if it comes next; return whether it did."""
        if not self._expression.startswith(text, self._place):
            return False
        self._place += len(text)
        return True

    def _unknown(self) -> PolicyError:
        rest = self._expression[self._place : self._place + 20]
        return PolicyError(f"rules cannot say {rest!r} of an expression")
