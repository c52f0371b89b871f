"""The name server's key-value table: texts by namespace and key, kept on disk (RocketMQ kvConfig.json).

The namespace ORDER_TOPIC_CONFIG has the brokers and queues of each ordered topic.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, final

import orjson
import trio

from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet.tables.rocketmq_json import check_seal, seal
from martlet_remoting.wire.fastjson import load_object

__all__ = ["ORDER_TOPICS", "KVConfig"]

ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"
# Limit of the whole table, which is rendered at each change: 20,000 ordered topics.
BYTES_MAX: Final = 2 * 1024 * 1024


@final
class KVConfig:
    """Texts by namespace and key; *save* writes the whole file before a change takes effect."""

    def __init__(self, save: Callable[[bytes], Awaitable[None]], bytes_max: int = BYTES_MAX) -> None:
        self._save = save
        self._bytes_max = bytes_max
        self._lock = trio.Lock()  # one change at a time
        self._table: dict[str, dict[str, str]] = {}

    def load(self, data: bytes) -> None:
        """Load the table from the content of its file.

        Raises:
          RemoteProtocolError: the content is invalid.
          StoreError: its CRC is wrong.
        """
        check_seal(data, "kvConfig.json")
        table = load_object(data).get("configTable")
        if not isinstance(table, Mapping):
            raise RemoteProtocolError("it has no object configTable")
        self._table = {str(name): _texts(name, values) for name, values in table.items()}

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, name: str) -> dict[str, str] | None:
        """Return all texts of a namespace; None if the namespace never had any."""
        found = self._table.get(name)
        return dict(found) if found is not None else None

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value; return once it is on disk.

        Raises:
          Refused: the table would exceed its size limit (BUSY).
          OSError: the table cannot be saved, and the change has no effect.
        """
        async with self._lock:
            await self._change(namespace, {**self._table.get(namespace, {}), key: value})

    async def delete(self, namespace: str, key: str) -> None:
        """Delete a value; return once the deletion is on disk. The namespace is kept even if it is empty."""
        async with self._lock:
            values = self._table.get(namespace)
            if values is not None and key in values:
                await self._change(namespace, {k: v for k, v in values.items() if k != key})

    async def _change(self, namespace: str, values: dict[str, str]) -> None:
        table = {**self._table, namespace: values}
        data = orjson.dumps({"configTable": table})
        if len(data) > self._bytes_max:
            raise Refused(Reason.BUSY, f"the table would have {len(data)} bytes; at most {self._bytes_max} are allowed")
        (sealed,) = seal([data])
        await self._save(sealed)
        self._table = table


def _texts(name: object, values: object) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise RemoteProtocolError(f"namespace {name!r:.80} is not an object")
    return {str(key): str(value) for key, value in values.items()}
