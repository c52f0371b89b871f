"""The name server's key-value table: texts by namespace and key, kept on disk (RocketMQ kvConfig.json).

Namespace ORDER_TOPIC_CONFIG says which brokers hold the queues of an ordered topic.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, final

import orjson
import trio

from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet_remoting.routes import load_object

__all__ = ["ORDER_TOPICS", "KVConfig"]

ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"
# Of the whole table, which is rendered for each change: 20,000 ordered topics.
BYTES_MAX: Final = 2 * 1024 * 1024


@final
class KVConfig:
    """Texts by namespace and key; *save* writes the whole file before a change counts."""

    def __init__(self, save: Callable[[bytes], Awaitable[None]], bytes_max: int = BYTES_MAX) -> None:
        self._save = save
        self._bytes_max = bytes_max
        self._lock = trio.Lock()  # one change at a time, each on top of the one before
        self._table: dict[str, dict[str, str]] = {}

    def load(self, data: bytes) -> None:
        """Take over what a file says.

        Raises:
          RemoteProtocolError: it is no such file.
        """
        table = load_object(data).get("configTable") or {}
        if not isinstance(table, Mapping):
            raise RemoteProtocolError("configTable is not an object")
        self._table = {str(name): _texts(name, values) for name, values in table.items()}

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, name: str) -> dict[str, str] | None:
        """Return all of a namespace; None when nothing was ever put into it."""
        found = self._table.get(name)
        return dict(found) if found is not None else None

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value; returns when it is on the disk.

        Raises:
          Refused: the table would be larger than it may be (BUSY).
          OSError: it cannot be saved, and does not count.
        """
        async with self._lock:
            await self._change(namespace, {**self._table.get(namespace, {}), key: value})

    async def delete(self, namespace: str, key: str) -> None:
        """Forget a value; the namespace stays, also when it is empty. Returns when that is on the disk."""
        async with self._lock:
            values = self._table.get(namespace)
            if values is not None and key in values:
                await self._change(namespace, {k: v for k, v in values.items() if k != key})

    async def _change(self, namespace: str, values: dict[str, str]) -> None:
        table = {**self._table, namespace: values}
        data = orjson.dumps({"configTable": table})
        if len(data) > self._bytes_max:
            raise Refused(Reason.BUSY, f"the table would be {len(data)} bytes; it may be {self._bytes_max}")
        await self._save(data)
        self._table = table


def _texts(name: object, values: object) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise RemoteProtocolError(f"namespace {name!r:.80} is not an object")
    return {str(key): str(value) for key, value in values.items()}
