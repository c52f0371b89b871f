"""Workers of a push consumer: they take pulled messages and call the listener.

A concurrent consumer's queues share a pool of workers. An ordered queue has one worker,
consumes only while it holds the broker's lock, and pauses after a failure.
"""

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, TypeAlias, final

import trio

from martlet_client.consumption import ConsumedQueue, Work
from martlet_client.listening import Listening, Outcome
from martlet_client.locks import Locks
from martlet_remoting.wire.answers.messages import DamagedMessage, ReceivedMessage

__all__ = ["ConcurrentWorkers", "OrderedWorkers", "Workers"]

log = logging.getLogger(__name__)

LOCK_RETRY_S: Final = 1.0
LOCAL_RETRY_S: Final = 5.0

# Gives a failed message away; returns whether somebody has it now.
PassOn: TypeAlias = Callable[[ReceivedMessage | DamagedMessage], Awaitable[bool]]


class Workers(Protocol):
    """Who consumes the messages of queues."""

    def start(self, nursery: trio.Nursery) -> None:
        """Start the tasks that all queues share."""

    async def run(self, consumed: ConsumedQueue) -> None:
        """Pull and consume a queue until it is stopped."""

    async def finish(self, consumed: ConsumedQueue) -> None:
        """End the work on a queue that was stopped, before another member may have it."""


async def _outcome(listening: Listening, work: Work) -> Outcome | None:
    """Return the outcome of the message; None if the listener is broken, and then stop the queue before it."""
    work.queue.last_consume_ms = work.queue.pulls.network.clock.now_ms()
    message = work.message
    if isinstance(message, DamagedMessage):
        log.error("message at offset %d of %s is damaged: %s", message.queue_offset, message.queue, message.text)
        return Outcome.RETRY
    outcome, _ = await listening.call(message)
    if outcome is None:
        work.queue.stop_pulling()
    return outcome


@final
class ConcurrentWorkers:
    """*size* workers that consume messages of all queues in any order."""

    def __init__(self, listening: Listening, give_back: PassOn, size: int) -> None:
        self.listening = listening
        self._give_back = give_back
        self._size = size
        self._sink, self._source = trio.open_memory_channel[Work](math.inf)

    def start(self, nursery: trio.Nursery) -> None:
        """Start the workers."""
        for _ in range(self._size):
            nursery.start_soon(self._work, nursery)

    async def run(self, consumed: ConsumedQueue) -> None:
        """Pull a queue until it is stopped; the workers get its messages."""
        await consumed.run(self._sink)

    async def finish(self, consumed: ConsumedQueue) -> None:
        """Return at once: the results of calls that are still running are ignored."""

    async def _work(self, nursery: trio.Nursery) -> None:
        async for work in self._source:
            if not work.backlog.dropped and not work.queue.stopped and not await self._consume(work):
                nursery.start_soon(self._again_later, work)

    async def _consume(self, work: Work) -> bool:
        """Return whether the message is done; False if it must be retried here."""
        message = work.message
        outcome = await _outcome(self.listening, work)
        if outcome is None or work.backlog.dropped:
            return True
        if outcome is Outcome.SUCCESS or await self._give_back(message):
            work.backlog.done(message.queue_offset)
            return True
        return False

    async def _again_later(self, work: Work) -> None:
        await trio.sleep(LOCAL_RETRY_S)
        work.count_try()
        self._sink.send_nowait(work)


@final
class OrderedWorkers:
    """One worker a queue, which consumes its messages in order; under the broker's lock if there are *locks*."""

    def __init__(
        self, listening: Listening, give_up: PassOn, suspend_s: float, times_max: int, locks: Locks | None
    ) -> None:
        self.listening = listening
        self._give_up = give_up
        self._suspend_s = suspend_s
        self._times_max = times_max
        self._locks = locks

    def start(self, nursery: trio.Nursery) -> None:
        """Do nothing: each queue has its own worker."""

    async def run(self, consumed: ConsumedQueue) -> None:
        """Lock, then pull and consume; read the offset only under the lock, when nobody else commits any more."""
        sink, source = trio.open_memory_channel[Work](math.inf)
        try:
            with source:
                if not await self._lock(consumed):
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._work, source)
                    with sink:
                        await consumed.run(sink)
        finally:
            consumed.finished.set()

    async def _lock(self, consumed: ConsumedQueue) -> bool:
        """Lock the queue if this kind of worker needs locks; return False if the consumer left the queue first."""
        while self._locks is not None and not consumed.is_locked:
            if consumed.stopped:
                return False
            await self._locks.take([consumed.queue])
            if not consumed.is_locked:
                await trio.sleep(LOCK_RETRY_S)
        return True

    async def finish(self, consumed: ConsumedQueue) -> None:
        """Wait for the call that is still running, commit what it has done, and release the lock."""
        await consumed.finished.wait()
        await consumed.commit()
        if self._locks is not None:
            await self._locks.let_go([consumed.queue])

    async def _work(self, source: "trio.MemoryReceiveChannel[Work]") -> None:
        async for work in source:
            while not work.backlog.dropped and not work.queue.stopped:
                if self._locks is not None and not work.queue.is_locked:
                    await trio.sleep(LOCK_RETRY_S)
                elif await self._consume(work):
                    break
                else:
                    await trio.sleep(self._suspend_s)

    async def _consume(self, work: Work) -> bool:
        outcome = await _outcome(self.listening, work)
        if outcome is None:
            return True
        if outcome is not Outcome.SUCCESS and not await self._is_given_up(work):
            return False
        if not work.backlog.dropped:
            work.backlog.done(work.message.queue_offset)
        return True

    async def _is_given_up(self, work: Work) -> bool:
        if isinstance(work.message, ReceivedMessage) and work.message.reconsume_times < self._times_max:
            work.count_try()
            return False
        return await self._give_up(work.message)
