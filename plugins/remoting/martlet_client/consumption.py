"""One queue of a push consumer: from the pull to the work for its listener, and to the committed offset.

Pulling and consuming are separate tasks with a bounded backlog between them.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, final

import trio
from msgspec import Struct

from martlet_client.arguments import check_integer
from martlet_client.backlog import Backlog
from martlet_client.offsets import Offsets
from martlet_client.outages import level_of
from martlet_client.pulling import PAUSE_S, PULL_MESSAGES_MAX, Pulled, PullStatus, QueuePulls
from martlet_remoting.wire.answers.errors import ClientError
from martlet_remoting.wire.answers.messages import DamagedMessage, ReceivedMessage
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["CacheLimits", "ConsumedQueue", "Work"]

log = logging.getLogger(__name__)

# A lock that was not renewed for so long counts as lost, 30 s before the broker expires it.
LOCK_LIVE_S: Final = 30.0


@final
class CacheLimits(Struct, frozen=True):
    """How much a queue may cache, and how much one pull asks for."""

    pull_messages: int
    cached_messages: int
    cached_bytes: int

    def __post_init__(self) -> None:
        check_integer("pull_messages", self.pull_messages, 1, PULL_MESSAGES_MAX)
        check_integer("cached_messages_max", self.cached_messages, 1)
        check_integer("cached_bytes_max", self.cached_bytes, 1)


@final
class Work(Struct):
    """One message for the listener; each retry gets a copy with a higher count."""

    queue: "ConsumedQueue"
    backlog: Backlog
    message: ReceivedMessage | DamagedMessage

    def count_try(self) -> None:
        """Increase the count of tries."""
        if isinstance(self.message, ReceivedMessage):
            self.message = replace(self.message, reconsume_times=self.message.reconsume_times + 1)


def _queue_offset(message: ReceivedMessage | DamagedMessage) -> int:
    return message.queue_offset


@final
class ConsumedQueue:
    """A queue that is assigned to us; `run` pulls it until `stop`."""

    def __init__(
        self,
        pulls: QueuePulls,
        limits: CacheLimits,
        offsets: Offsets,
        first_offset: Callable[[MessageQueue], Awaitable[int]],
    ) -> None:
        self.pulls = pulls
        self.queue = pulls.queue
        self.backlog = Backlog(0, limits.cached_messages, limits.cached_bytes)
        self.stopped = False
        self.finished = trio.Event()
        self.last_consume_ms = 0
        self.locked_until = -1.0
        self._limits = limits
        self._offsets = offsets
        self._first_offset = first_offset
        self._jump: int | None = None
        self._moved_to: int | None = None
        self._scope = trio.CancelScope()
        self._committed: int | None = None
        self._started = False

    async def run(self, sink: "trio.MemorySendChannel[Work]") -> None:
        """Pull into *sink* until stopped; after a jump, start again at its offset with an empty backlog."""
        offset: int | None = None
        while not self.stopped:
            self._scope = trio.CancelScope()
            with self._scope:
                if offset is None:
                    offset = await self._find_offset()
                self._begin(offset)
                offset = await self._pull_from(offset, sink)
                # Replace the backlog before the write: a commit of the old backlog's offset must not follow it.
                self._begin(offset)
                await self._write(offset)
            if self._jump is not None:
                offset, self._jump = self._jump, None

    def stop(self) -> None:
        """Stop pulling and ignore the results of cached messages; offsets already done may still be committed."""
        self.stopped = True
        self.backlog.dropped = True
        self._scope.cancel()

    def stop_pulling(self) -> None:
        """Stop pulling; the results of running listeners still count."""
        self.stopped = True
        self._scope.cancel()

    def jump(self, offset: int) -> None:
        """Continue at *offset*, forward or back; the caller has committed it."""
        self._jump = offset
        self.backlog.dropped = True
        # A commit of the old offset may have followed the caller's: commit the new one again.
        self._committed = None
        self._scope.cancel()

    def _begin(self, offset: int) -> None:
        self.backlog.dropped = True
        self.backlog = Backlog(offset, self._limits.cached_messages, self._limits.cached_bytes)
        self._started = True

    async def _find_offset(self) -> int:
        while True:
            try:
                return await self._first_offset(self.queue)
            except ClientError as error:
                log.log(
                    level_of(error),
                    "cannot read the offset of %s for group %r: %s",
                    self.queue,
                    self.pulls.group,
                    error,
                )
                await trio.sleep(PAUSE_S)

    async def _pull_from(self, offset: int, sink: "trio.MemorySendChannel[Work]") -> int:
        """Pull until the broker moves the offset; return the new offset."""
        while True:
            await self.backlog.wait_room()
            try:
                pulled = await self.pulls.pull(offset, self.backlog.commit_offset)
            except ClientError as error:
                await self.pulls.recover(error)
                continue
            if pulled.status is PullStatus.OFFSET_MOVED:
                log.warning("offset %d of %s moved to %d", offset, self.queue, pulled.next_offset)
                if pulled.next_offset == self._moved_to:
                    await trio.sleep(PAUSE_S)
                self._moved_to = pulled.next_offset
                return pulled.next_offset
            self._moved_to = None
            offset = max(pulled.next_offset, offset)
            self._hand_over(pulled, offset, sink)

    def _hand_over(self, pulled: Pulled, next_offset: int, sink: "trio.MemorySendChannel[Work]") -> None:
        backlog = self.backlog
        wanted: list[ReceivedMessage | DamagedMessage] = list(pulled.damaged)
        wanted += [message for message in pulled.messages if self.pulls.subscription.selects(message)]
        for message in sorted(wanted, key=_queue_offset):
            size = message.store_bytes if isinstance(message, ReceivedMessage) else 0
            if backlog.add(message.queue_offset, size):
                sink.send_nowait(Work(self, backlog, message))
        backlog.end = max(backlog.end, next_offset)

    async def commit(self) -> None:
        """Commit the offset up to which the queue is done, if it changed; failures are logged and retried later."""
        offset = self.backlog.commit_offset
        if self._started and offset != self._committed:
            await self._write(offset)

    async def _write(self, offset: int) -> None:
        try:
            await self._offsets.write(self.queue, offset)
        except ClientError as error:
            log.log(level_of(error), "offset %d of %s was not committed: %s", offset, self.queue, error)
        else:
            self._committed = offset

    @property
    def is_locked(self) -> bool:
        """Whether we certainly hold the broker's lock on the queue."""
        return trio.current_time() < self.locked_until
