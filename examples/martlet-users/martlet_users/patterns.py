"""Patterns of names in rules: ``*`` for anything, and the wildcards of MQTT's topic filters as levels of their own.

A pattern also matches topic filters: those that select only what the pattern allows. So ``mqtt/home/+`` matches the
filter ``home/+`` of the topic ``mqtt`` and not ``home/#``.
"""

import re
from typing import Final

__all__ = ["compile_pattern"]

_TOKENS: Final = re.compile(r"\*|(?<=/)\+(?=/|\Z)|/#\Z|\{user\}")
_LEVEL: Final = "[^/#]*"  # names have no #, so that of filters only those match that end below
_BELOW: Final = "(?:/.*)?"


def compile_pattern(pattern: str, user: str) -> re.Pattern[str]:
    """Return the pattern as an expression for `re.Pattern.match`; ``{user}`` in it stands for *user*."""
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
                parts[-1] += re.escape(user)
    parts[-1] += re.escape(pattern[at:])
    first, *rest = parts
    if rest:
        # As in fnmatch: once the part after a * was found, no later place is tried, so nothing takes forever.
        *middle, last = rest
        first += "".join(f"(?>.*?{part})" for part in middle) + f".*{last}"
    return re.compile(rf"(?s:{first})\Z")
