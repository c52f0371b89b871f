"""A cache of what is read from the store: bounded by memory, and what is missing is read once for all who ask."""

from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar, final

import trio

__all__ = ["SharedCache"]

K = TypeVar("K")
V = TypeVar("V")


class _Read(Generic[V]):
    """A read that is under way, and later its outcome; none of both if whoever read was cancelled."""

    def __init__(self) -> None:
        self.is_over = trio.Event()
        self.value: V | None = None
        self.failure: Exception | None = None


@final
class SharedCache(Generic[K, V]):
    """Keeps values by key, the last used ones, and as many as fit *bytes_max*; the newest one whatever its size.

    `hits` and `reads` count the questions that needed no read, and the reads. *bytes_of* returns the memory of a value.
    """

    def __init__(self, bytes_max: int, bytes_of: Callable[[V], int]) -> None:
        self.bytes = 0
        self.hits = 0
        self.reads = 0
        self._bytes_max: Final = bytes_max
        self._bytes_of: Final = bytes_of
        self._values: dict[K, tuple[V, int]] = {}  # the last used one is the last
        self._reading: dict[K, _Read[V]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def find(self, key: K) -> V | None:
        """Return the value of *key* if it is there."""
        found = self._values.pop(key, None)
        if found is None:
            return None
        self._values[key] = found
        self.hits += 1
        return found[0]

    def has(self, key: K) -> bool:
        """Return whether the value of *key* is there, or being read."""
        return key in self._values or key in self._reading

    async def get(self, key: K, read: Callable[[], Awaitable[V]]) -> V:
        """Return the value of *key*; call *read* if it is missing, unless another task does so already.

        All who wait for a read get its error. If its task is cancelled, another one reads.
        """
        while (value := self.find(key)) is None:
            under_way = self._reading.get(key)
            if under_way is None:
                return await self._read(key, read)
            await under_way.is_over.wait()
            if under_way.failure is not None:
                raise under_way.failure
            if under_way.value is not None:
                return under_way.value
        return value

    def drop(self, key: K) -> None:
        """Forget the value of *key*."""
        found = self._values.pop(key, None)
        if found is not None:
            self.bytes -= found[1]

    async def _read(self, key: K, read: Callable[[], Awaitable[V]]) -> V:
        mine = self._reading[key] = _Read[V]()
        self.reads += 1
        try:
            mine.value = await read()
            self._keep(key, mine.value)
            return mine.value
        except Exception as error:
            mine.failure = error
            raise
        finally:
            del self._reading[key]
            mine.is_over.set()

    def _keep(self, key: K, value: V) -> None:
        self.drop(key)
        size = self._bytes_of(value)
        self._values[key] = value, size
        self.bytes += size
        while self.bytes > self._bytes_max and len(self._values) > 1:
            self.drop(next(iter(self._values)))
