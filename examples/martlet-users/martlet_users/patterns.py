"""Patterns of names in rules: ``*`` for anything, and the wildcards of MQTT's topic filters as levels of their own.

A pattern also matches topic filters: those that select only what the pattern allows. So ``mqtt/home/+`` matches the
filter ``home/+`` of the topic ``mqtt`` and not ``home/#``.

A user's name may be ``+`` or contain ``/``, which would make a pattern with ``{user}`` match the filters of everybody.
So these characters are in percent encoding there: the user ``+4917`` has the level ``%2B4917``.
"""

import re
from typing import Final
from urllib.parse import quote

__all__ = ["compile_pattern"]

_TOKENS: Final = re.compile(r"\*|(?<=/)\+(?=/|\Z)|/#\Z|\{user\}")
_LEVEL: Final = "[^/#]*"  # names have no #, so that of filters only those match that end below
_SPECIAL: Final = re.compile(r"[%/+#*]")
_BELOW: Final = "(?:/.*)?"


def compile_pattern(pattern: str, user: str) -> re.Pattern[str]:
    """Return the pattern as an expression for `re.Pattern.match`; ``{user}`` in it stands for *user* as one level."""
    parts, at = [""], 0
    for token in _TOKENS.finditer(pattern):
        parts[-1] += re.escape(pattern[at : token.start()])
        at = token.end()
        match token[0]:
            case "*":
                parts.append("")
            case "+":
                parts[-1] += _LEVEL
            case "/#":
                parts[-1] += _BELOW
            case _:
                parts[-1] += _level_of(user)
    parts[-1] += re.escape(pattern[at:])
    first, *rest = parts
    if rest:
        # As in fnmatch: once the part after a * was found, no later place is tried, so nothing takes forever.
        *middle, last = rest
        first += "".join(f"(?>.*?{part})" for part in middle) + f".*{last}"
    return re.compile(rf"(?s:{first})\Z")


def _level_of(user: str) -> str:
    """Return an expression for the level of *user*: its special characters in percent encoding, or all, as in STOMP."""
    usual = _SPECIAL.sub(lambda found: quote(found[0], safe=""), user)
    return f"(?:{re.escape(usual)}|{re.escape(quote(user, safe=''))})"
