"""Splits SQL92 into tokens. Grammar: RocketMQ filter/SelectorParser.jj, and ActiveMQ's LIKE, ESCAPE and arithmetic."""

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from martlet.errors import Reason, Refused

__all__ = ["KEYWORDS", "Token", "mistake", "tokens"]

Kind = Literal["number", "string", "name", "keyword", "operator", "end"]

KEYWORDS: Final = frozenset(
    [
        "AND",
        "BETWEEN",
        "CONTAINS",
        "ENDSWITH",
        "ESCAPE",
        "FALSE",
        "IN",
        "IS",
        "LIKE",
        "NOT",
        "NULL",
        "OR",
        "STARTSWITH",
        "TRUE",
    ]
)
# No repeated group is inside another repeated group, so the time is linear in the text.
TOKEN: Final = re.compile(
    r"""
    (?P<space>[ \t\n\r\f]+ | --[^\n\r]* | /\*(?:[^*]|\*(?!/))*\*/)
  | (?P<number>(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?[lL]?)
  | (?P<string>'(?:[^']|'')*')
  | (?P<name>[A-Za-z_$][A-Za-z0-9_$]*)
  | (?P<quoted>"(?:[^"]|"")+")
  | (?P<operator><>|<=|>=|=(?!=)|[<>()+\-*/%,])
    """,
    re.VERBOSE,
)
UNCLOSED: Final = {"'": "a string that is not closed", '"': "a quoted name that is not closed"}


class Token(NamedTuple):
    kind: Kind
    text: str  # keywords in capitals; strings and quoted names without their quotes
    at: int  # index of the first character in the expression


def mistake(text: str, at: int, what: str) -> Refused:
    """Return the refusal of *text*, whose message says *what* is wrong at the character *at*, counted from 0."""
    near = text[at : at + 20]
    where = f"at character {at + 1}" + (f", near {near!r}" if near else ", its end")
    return Refused(Reason.ILLEGAL, f"SQL92 expression {text[:200]!r} is invalid {where}: {what}")


def tokens(text: str) -> Iterator[Token]:
    """Yield the tokens of *text*, and an ``end``.

    Raises:
      Refused: no token begins with a character of *text* (Reason.ILLEGAL).
    """
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise mistake(text, at, _unknown(text, at))
        group, word = found.lastgroup, found[0]
        if group == "name" and word.upper() in KEYWORDS:
            yield Token("keyword", word.upper(), at)
        elif group == "string":
            yield Token("string", word[1:-1].replace("''", "'"), at)
        elif group == "quoted":
            yield Token("name", word[1:-1].replace('""', '"'), at)
        elif group == "number" or group == "name" or group == "operator":
            yield Token(group, word, at)  # type: ignore[arg-type]
        at = found.end()
    yield Token("end", "", at)


def _unknown(text: str, at: int) -> str:
    if text.startswith("!=", at):
        return "!= is not an operator; use <>"
    if text.startswith("==", at):
        return "== is not an operator; use ="
    if text.startswith("/*", at):
        return "a comment that is not closed"
    return UNCLOSED.get(text[at], f"unexpected character {text[at]!r}")
