"""What the JSON tables of RocketMQ's ``config/`` directory have in common.

Written the way RocketMQ writes them, so that either broker reads the other's:
a ``dataVersion``, and integer map keys without quotes (Fastjson's way; not JSON).
"""

import re
from collections.abc import Mapping
from typing import Any, Final, final

import orjson

from martlet.clock import Clock
from martlet.errors import StoreError

__all__ = ["DataVersion", "parse", "render"]

# Names of topics and groups hold none of { } , : so this can only be a map key.
_BARE_KEY: Final = re.compile(rb"([{,]\s*)(-?\d+)(\s*:)")
_QUOTED_KEY: Final = re.compile(rb'([{,]\s*)"(-?\d+)"(\s*:)')


@final
class DataVersion:
    """How often a table changed, and when last (RocketMQ DataVersion)."""

    __slots__ = ("counter", "state_version", "timestamp")

    def __init__(self, counter: int = 0, state_version: int = 0, timestamp: int = 0) -> None:
        self.counter = counter
        self.state_version = state_version
        self.timestamp = timestamp

    def next(self, clock: Clock) -> None:
        """The table has changed."""
        self.counter += 1
        self.timestamp = clock.now_ms()

    def as_json(self) -> dict[str, int]:
        return {"counter": self.counter, "stateVersion": self.state_version, "timestamp": self.timestamp}

    def load(self, table: object) -> None:
        """Take over what a file says; what it does not say stays."""
        if isinstance(table, dict):
            self.counter = _number(table.get("counter"), self.counter)
            self.state_version = _number(table.get("stateVersion"), self.state_version)
            self.timestamp = _number(table.get("timestamp"), self.timestamp)


def _number(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def parse(data: bytes, name: str) -> dict[str, Any]:
    """Return the object in *data*, with integer keys as strings.

    Raises:
      StoreError: it is not such a table.
    """
    try:
        table = orjson.loads(_BARE_KEY.sub(rb'\1"\2"\3', data))
    except orjson.JSONDecodeError as error:
        raise StoreError(f"{name} is not JSON; {error}") from error
    if not isinstance(table, dict):
        raise StoreError(f"{name} is not a JSON object")
    return table


def render(table: Mapping[str, object]) -> bytes:
    """Return *table* as RocketMQ writes it: keys in order, integer keys bare."""
    data = orjson.dumps(table, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return _QUOTED_KEY.sub(rb"\1\2\3", data)
