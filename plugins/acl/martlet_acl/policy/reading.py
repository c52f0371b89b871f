"""Reads JSON files in slices: an object of objects, which have very many members.

msgspec and json decode a file in one call, which keeps the event loop waiting, also from another thread: 40 to 60 ms
for 12 MB. So a walk through the text finds the members of each inner object, and their text is decoded one by one. On
the way, json checks the whole text: msgspec reads only what it keeps, and takes the last one of two equal keys.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar, final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from martlet.runtime.steps import Budget, Steps
from martlet_acl.policy.errors import PolicyError
from martlet_acl.policy.policies import LEVELS

__all__ = ["MEMBER_CHARACTERS", "MEMBER_US", "decode_value", "read_object"]

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

BYTES_MAX: Final = 256 << 20
TEXT_BYTES: Final = 1 << 18  # decoded at once
# The cost of a member and of so many characters of it, for each of walking through it and decoding it.
MEMBER_US: Final = 6.0
MEMBER_CHARACTERS: Final = 200
FIRST: Final = 8  # characters that show what a value is
CUT: Final = 12  # characters of what an error can be about before the end of a cut text, such as "\\ud83d\\ude00"

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# The end of an error of msgspec, such as " - at `$.custom[2].actions`", and its parts.
_PATH: Final = re.compile(r" - at `\$(?P<path>.*)`\Z")
_PART: Final = re.compile(r"\.(?P<name>\w+)|\[(?P<number>\d+)\]|\[\.\.\.\]")


def read_object(data: bytes, kind: type[S]) -> Steps[S]:
    """Return *data* as a *kind*, whose fields that are objects have the text of each member by its key.

    Raises:
      PolicyError: it is no such JSON, or an object has a key twice: the first one would be lost.
    """
    if len(data) > BYTES_MAX:
        raise PolicyError(f"{len(data)} bytes are too many; {BYTES_MAX} are allowed")
    walk, decoder, budget = _Walk(data), msgspec.json.Decoder(kind), Budget(MEMBER_US)
    if not walk.is_at("{"):
        decode_value(decoder, walk.first)  # an error
    fields: list[str] = []
    found: dict[str, dict[str, str]] = {}
    for name in walk.members():
        if walk.is_at("{"):
            members = found[name] = {}
            for key in walk.members():
                members[key] = walk.value()
                if budget.is_over(1 + len(members[key]) // MEMBER_CHARACTERS):
                    yield
            fields.append(f"{json.dumps(name)}: {{}}")
        else:
            fields.append(f"{json.dumps(name)}: {walk.value()}")
    walk.check_end()
    return replace(decode_value(decoder, "{" + ", ".join(fields) + "}"), **found)


@final
class _Walk:
    """A place in a JSON text. Each method moves it over what it reads, or raises `PolicyError`.

    A part of the text is decoded at a time: 12 MB take 15 ms.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._decoded = 0  # bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""  # what was decoded last
        self._at = 0  # the place in it
        self._line = self._column = 1  # of its first character
        self._values = json.JSONDecoder(object_pairs_hook=_check_unique)

    def _read_more(self, size: int = TEXT_BYTES) -> bool:
        """Decode *size* bytes more; return whether there were any."""
        begin, end = self._decoded, self._decoded + size
        if begin >= len(self._data):
            return False
        self._line, self._column = self._place(self._at)
        try:
            more = self._decoder.decode(self._data[begin:end], end >= len(self._data))
        except UnicodeDecodeError as error:
            line = self._place(len(self._text))[0] + error.object[: error.start].count(b"\n")
            raise PolicyError(f"Invalid UTF-8 in line {line}") from None
        self._text, self._at, self._decoded = self._text[self._at :] + more, 0, end
        return True

    def _place(self, at: int) -> tuple[int, int]:
        """Return the line and the column of the character *at*."""
        begin = self._text.rfind("\n", 0, at) + 1
        column = at - begin + 1 if begin else self._column + at
        return self._line + self._text.count("\n", 0, at), column

    @property
    def first(self) -> str:
        """The first characters of what comes next."""
        return self._text[self._at : self._at + FIRST]

    def is_at(self, character: str) -> bool:
        """Skip white space; return whether *character* comes next, which stays."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or not self._read_more():
                return self._text.startswith(character, self._at)

    def _take(self, character: str) -> bool:
        is_next = self.is_at(character)
        self._at += is_next
        return is_next

    def members(self) -> Iterator[str]:
        """Yield the key of each member of the object that begins here; read its value before the next one."""
        self._take("{")
        seen: set[str] = set()
        while seen or not self._take("}"):
            key = self._key()
            if key in seen:
                raise _twice(key)
            seen.add(key)
            yield key
            if self._take("}"):
                return
            if not self._take(","):
                raise self._error("expected ',' or '}'", self._at)

    def _key(self) -> str:
        is_string = self.is_at('"')
        while is_string and (found := _STRING.match(self._text, self._at)) is None and self._read_more():
            pass
        if not is_string or found is None:
            raise self._error("expected a key in double quotes", self._at)
        self._at = found.end()
        if not self._take(":"):
            raise self._error("expected ':'", self._at)
        self.is_at("")
        key: str = decode_value(_KEYS, found[0])
        return key

    def value(self) -> str:
        """Return the text of the value that begins here."""
        while True:
            end = self._end_of_value()
            if end < len(self._text) or not self._read_more(max(TEXT_BYTES, end - self._at)):
                begin, self._at = self._at, end
                return self._text[begin:end]

    def _end_of_value(self) -> int:
        """Return where the value that begins here ends; the end of the text if that may be later."""
        try:
            return self._values.raw_decode(self._text, self._at)[1]
        except RecursionError as error:
            raise PolicyError("it is nested too deep") from error
        except json.JSONDecodeError as error:
            is_cut = error.pos >= len(self._text) - CUT or error.msg.startswith("Unterminated string")
            if is_cut and self._decoded < len(self._data):
                return len(self._text)
            raise self._error(error.msg[:1].lower() + error.msg[1:], error.pos) from None
        except ValueError as error:  # a number with thousands of digits
            raise PolicyError(f"it is no JSON; {type(error).__name__}") from None

    def check_end(self) -> None:
        """Check that nothing comes any more."""
        self.is_at("")
        if self._at < len(self._text):
            raise self._error("expected the end", self._at)

    def _error(self, what: str, at: int) -> PolicyError:
        if at >= len(self._text):
            return PolicyError("Input data was truncated")
        line, column = self._place(at)
        return PolicyError(f"JSON is malformed: {what} (line {line}, column {column})")


_KEYS: Final = msgspec.json.Decoder(str)


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    if len({key for key, _ in pairs}) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _twice(next(key for key in keys if keys.count(key) > 1))


def _twice(key: str) -> PolicyError:
    return PolicyError(f"the key {key!r} is there twice; the first one would be ignored")


def decode_value(decoder: msgspec.json.Decoder[T], text: str) -> T:
    """Return what the JSON *text* is. Raises `PolicyError` with the place inside it."""
    try:
        return decoder.decode(text)
    except RecursionError as error:
        raise PolicyError("it is nested too deep") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error)
        path = _PATH.search(reason)
        place = _show_path(path["path"]) if path is not None else []
        raise PolicyError(_PATH.sub("", reason), *place) from error


def _show_path(path: str) -> list[str]:
    """Return the place that msgspec calls *path*, such as ``.custom[2].actions``."""
    shown: list[str] = []
    for part in _PART.finditer(path):
        if part["name"]:
            shown.append(part["name"])
        elif part["number"] and shown and shown[-1] in LEVELS:
            shown[-1] += f" rule {int(part['number']) + 1}"
        elif part["number"]:
            shown.append(f"number {int(part['number']) + 1}")
    return shown
