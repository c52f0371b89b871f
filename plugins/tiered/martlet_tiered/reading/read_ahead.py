"""Reads ahead for consumers that read a queue in order: the next row group is in memory before they ask for it."""

import logging
from collections.abc import Awaitable, Callable
from typing import Final, final

import trio

from martlet.errors import MartletError
from martlet.runtime.wakeup import Wakeup

__all__ = ["ReadAhead"]

logger = logging.getLogger("martlet.tiered")

# Ends of reads that are remembered: a read that begins at one is of a consumer that reads in order.
ENDS_MAX: Final = 4096
# Reads ahead at the same time: half of the threads, and what is wanted beyond that is dropped.
AT_ONCE: Final = 4
WAITING_MAX: Final = 16


@final
class ReadAhead:
    """Notices consumers that read in order, and does `run` their next reads."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, int, int], None] = {}
        self._wanted: list[Callable[[], Awaitable[None]]] = []
        self._wakeup = Wakeup()

    def is_sequential(self, topic: str, queue_id: int, offset: int, next_offset: int) -> bool:
        """Note a read from *offset* on, before *next_offset*; whether another one ended where it begins."""
        found = (topic, queue_id, offset) in self._ends
        self._ends.pop((topic, queue_id, offset), None)
        self._ends[topic, queue_id, next_offset] = None
        if len(self._ends) > ENDS_MAX:
            del self._ends[next(iter(self._ends))]
        return found

    def want(self, read: Callable[[], Awaitable[None]]) -> None:
        """Let `run` call *read*, unless there is too much to do."""
        if len(self._wanted) < WAITING_MAX:
            self._wanted.append(read)
            self._wakeup.set()

    async def run(self) -> None:
        """Read what is wanted, until cancelled."""
        turns = trio.Semaphore(AT_ONCE)
        async with trio.open_nursery() as nursery:
            while True:
                await self._wakeup.wait()
                while self._wanted:
                    await turns.acquire()
                    nursery.start_soon(self._read, self._wanted.pop(0), turns)

    async def _read(self, read: Callable[[], Awaitable[None]], turns: trio.Semaphore) -> None:
        try:
            await read()
        except MartletError as error:
            logger.debug("a read ahead failed: %s", error)  # whoever reads this later gets the error
        finally:
            turns.release()
