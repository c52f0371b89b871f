"""The format of the JSON tables in RocketMQ's ``config/`` directory.

They are written as RocketMQ writes them, so that each broker can read the other's tables: with a ``dataVersion``, and
with unquoted integer keys (Fastjson's dialect; not standard JSON).

A file of Martlet begins with the key ``martletCrc``, the CRC-32 of everything after it, and has the log position up to
which it is complete as ``martletPosition``. RocketMQ drops both when it writes the file. So a file without either is
RocketMQ's, and a file whose CRC is wrong is damaged.
"""

import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import orjson

from martlet.errors import Refused, StoreError
from martlet.runtime.checksum import crc32
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Budget, Steps
from martlet.tables.saved import NO_POSITION, POSITION_KEY

__all__ = ["CRC_KEY", "DataVersion", "check_seal", "head_of", "parse", "reading", "render_in_steps", "seal", "table_in"]

CRC_KEY: Final = "martletCrc"
_SEAL: Final = re.compile(rb'\{"martletCrc":(\d{1,10}),')

# A string, which stays unchanged, or an unquoted map key.
_TEXT_OR_BARE_KEY: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|([{,]\s*)(-?\d+)(\s*:)', re.DOTALL)
ENTRY_OPTIONS: Final = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS
ENTRY_US: Final = 10.0
BYTES_OF_A_STEP: Final = 256  # the usual size of an entry; a longer one counts as several steps
_QUOTED_KEY: Final = re.compile(rb'([{,]\s*)"(-?\d+)"(\s*:)')


@final
class DataVersion:
    """The number of changes of a table, and the time of the last one (RocketMQ DataVersion)."""

    def __init__(self, counter: int = 0, state_version: int = 0, timestamp: int = 0) -> None:
        self.counter = counter
        self.state_version = state_version
        self.timestamp = timestamp

    def next(self, clock: Clock) -> None:
        """Count a change of the table."""
        self.counter += 1
        self.timestamp = clock.now_ms()

    def as_json(self) -> dict[str, int]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}

    def load(self, table: object) -> None:
        """Take over the fields of a file; missing fields stay unchanged."""
        if isinstance(table, dict):
            self.counter = _number(table.get("counter"), self.counter)
            self.state_version = _number(table.get("stateVersion"), self.state_version)
            self.timestamp = _number(table.get("timestamp"), self.timestamp)


def head_of(version: DataVersion, position: int) -> dict[str, object]:
    """Return the first fields of a table: its version, and the log position up to which it is complete, if known."""
    head: dict[str, object] = {"dataVersion": version.as_json()}
    if position != NO_POSITION:
        head[POSITION_KEY] = position
    return head


def _number(value: object, default: int) -> int:
    return value if type(value) is int else default


def parse(data: bytes, name: str) -> dict[str, Any]:
    """Return the object in *data*, with integer keys as strings.

    Raises:
      StoreError: *data* is not such a table, or its CRC is wrong.
    """
    check_seal(data, name)
    try:
        table = orjson.loads(data)
    except orjson.JSONDecodeError:
        table = _parse_bare_keys(data, name)
    if not isinstance(table, dict):
        raise StoreError(f"{name} is not a JSON object")
    return table


def seal(pieces: list[bytes]) -> list[bytes]:
    """Return the JSON object in *pieces*, which has at least one key, with its CRC as the first one."""
    first = pieces[0][1:]
    crc = crc32(first)
    for piece in pieces[1:]:
        crc = crc32(piece, crc)
    return [b'{"%b":%d,%b' % (CRC_KEY.encode(), crc, first), *pieces[1:]]


def check_seal(data: bytes, name: str) -> None:
    """Raise `StoreError` if *data* has a wrong CRC; older versions and RocketMQ write none."""
    found = _SEAL.match(data)
    if found is not None and int(found[1]) != crc32(memoryview(data)[found.end() :]):
        raise StoreError(f"{name} is damaged: its checksum is wrong (if you have edited it, remove the key {CRC_KEY})")


def _parse_bare_keys(data: bytes, name: str) -> object:
    try:
        return orjson.loads(_TEXT_OR_BARE_KEY.sub(_quoted, data))
    except orjson.JSONDecodeError as error:
        raise StoreError(f"{name} is not JSON; {error}") from error


def _quoted(found: re.Match[bytes]) -> bytes:
    return found[0] if found[2] is None else b'%b"%b"%b' % (found[1], found[2], found[3])


def table_in(table: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    """Return the entries of *table*, the content of file *name*, under its main *key*.

    Raises:
      StoreError: the key is missing, so the file is damaged: an empty table has an empty object.
    """
    found = table.get(key)
    if not isinstance(found, Mapping):
        raise StoreError(f"{name} has no {key}")
    return found


@contextmanager
def reading(name: str) -> Generator[None]:
    """Convert errors in the block, caused by an unexpected structure of table *name*, to `StoreError`."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, Refused) as error:
        raise StoreError(f"{name} has an unexpected structure; {error}") from error


def render_in_steps(
    fields: Mapping[str, object], name: str, table: Iterable[tuple[str, object]], *, bare_keys: bool = False
) -> Steps[list[bytes]]:
    """Return a JSON object of *fields* and the object *name* with the entries of *table*, one per line, in slices.

    The result is one piece per slice, because joining megabytes would take 10 ms. A file, whose *fields* have the log
    position up to which it is complete, gets its CRC.

    The source of *table* may change in the meantime: each entry is rendered in its present state when its slice runs.
    *bare_keys* omits the quotes around integer keys within an entry.
    """
    budget = Budget(ENTRY_US)
    head = b"".join(b"%b:%b,\n" % (orjson.dumps(key), orjson.dumps(value)) for key, value in fields.items())
    lines = [b"{%b%b:{\n" % (head, orjson.dumps(name))]
    pieces: list[bytes] = []
    before = b""
    for key, value in table:
        line = b"%b:%b" % (orjson.dumps(key), orjson.dumps(value, option=ENTRY_OPTIONS))
        lines += before, _QUOTED_KEY.sub(rb"\1\2\3", line) if bare_keys else line
        before = b",\n"
        if budget.is_over(1 + len(line) // BYTES_OF_A_STEP):
            pieces.append(b"".join(lines))
            lines.clear()
            yield
    pieces.append(b"".join([*lines, b"\n}}"]))
    return seal(pieces) if POSITION_KEY in fields else pieces
