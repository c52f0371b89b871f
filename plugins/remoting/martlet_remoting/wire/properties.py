"""Configurations as RocketMQ's tools exchange them: ``key=value`` lines in the format of java.util.Properties."""

import re
from collections.abc import Mapping
from typing import Final

from martlet.errors import Reason, Refused
from martlet_remoting.wire.packets import ext_text

__all__ = ["PROPERTIES_BYTES_MAX", "format_properties", "parse_properties"]

# The complete configuration of a RocketMQ broker has 20 kB. Parsing this many bytes takes up to 10 ms.
PROPERTIES_BYTES_MAX: Final = 32_768

_LINE: Final = re.compile(r"((?:\\.|[^\\=:\s])+)[ \t]*[=:]?[ \t]*(.*)")
_ESCAPE: Final = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def format_properties(values: Mapping[str, object]) -> bytes:
    """Return *values* as lines sorted by name; backslashes and line breaks are escaped."""
    return "".join(f"{name}={_escaped(ext_text(values[name]))}\n" for name in sorted(values)).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def parse_properties(data: bytes) -> dict[str, str]:
    """Return the values of *data* by name; comments and blank lines are skipped.

    Raises:
      Refused: the data is too long, is not UTF-8, or an escape is half of a surrogate pair (PARAMETER).
    """
    if len(data) > PROPERTIES_BYTES_MAX:
        text = f"properties of {len(data)} bytes are too long; at most {PROPERTIES_BYTES_MAX} are read"
        raise Refused(Reason.PARAMETER, text)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Refused(Reason.PARAMETER, "properties are not UTF-8 text") from error
    # A line that ends in an odd number of backslashes continues on the next line.
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\\r?\n[ \t]*", r"\1", text)
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _LINE.match(line.lstrip())
        if match and not match[1].startswith(("#", "!")):
            found[_unescaped(match[1])] = _unescaped(match[2])
    return found


def _unescaped(text: str) -> str:
    units = _ESCAPE.sub(lambda found: _meaning(found[1]), text)
    if "\\u" not in text:
        return units
    try:  # Java escapes UTF-16: beyond U+FFFF two escapes are one character
        return units.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        text = f"property {text!r:.80} contains half of a surrogate pair; send both halves"
        raise Refused(Reason.PARAMETER, text) from error


def _meaning(escape: str) -> str:
    return chr(int(escape[1:], 16)) if len(escape) == 5 else _ESCAPES.get(escape, escape)
