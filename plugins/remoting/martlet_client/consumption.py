"""One queue of a push consumer: from the pull to the listener to the committed offset.

Pulling and consuming are separate tasks with a bounded backlog between them. A
concurrent consumer's queues share a pool of workers; an ordered queue has one worker,
consumes only while it holds the broker's lock, and pauses after a failure.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Protocol, final

import trio
from msgspec import Struct

from martlet_client.arguments import check_integer
from martlet_client.backlog import Backlog
from martlet_client.listening import Listening, Outcome
from martlet_client.network import Network
from martlet_client.outages import level_of
from martlet_client.pulling import PULL_MESSAGES_MAX, Pulled, PullStatus, TopicSelection, pull
from martlet_remoting.wire.answers.errors import BrokerError, ClientError
from martlet_remoting.wire.answers.messages import DamagedMessage, ReceivedMessage
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import PULL_COMMIT_OFFSET, PULL_SUSPEND, PullHeader
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["CacheLimits", "ConsumedQueue", "Offsets", "Work"]

log = logging.getLogger(__name__)

# From Java's push consumer: how long a pull may wait, and the pauses after failures.
SUSPEND_MS: Final = 15_000
PAUSE_S: Final = 3.0
LOCK_RETRY_S: Final = 1.0
LOCAL_RETRY_S: Final = 5.0
# A lock that was not renewed for so long counts as lost, 30 s before the broker expires it.
LOCK_LIVE_S: Final = 30.0
_UNKNOWN_TO_BROKER: Final = (
    ResponseCode.SUBSCRIPTION_NOT_EXIST,
    ResponseCode.SUBSCRIPTION_NOT_LATEST,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
)


class Offsets(Protocol):
    """Where a group's offsets are kept."""

    async def read(self, queue: MessageQueue) -> int | None: ...
    async def write(self, queue: MessageQueue, offset: int) -> None: ...
    async def flush(self) -> None: ...


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
        network: Network,
        group: str,
        queue: MessageQueue,
        subscription: TopicSelection,
        limits: CacheLimits,
        offsets: Offsets,
        first_offset: Callable[[MessageQueue], Awaitable[int]],
        sink: "trio.MemorySendChannel[Work]",
        is_clustering: bool,
    ) -> None:
        self.network = network
        self.group = group
        self.queue = queue
        self.subscription = subscription
        self.limits = limits
        self.offsets = offsets
        self.backlog = Backlog(0, limits.cached_messages, limits.cached_bytes)
        self.stopped = False
        self.finished = trio.Event()
        self.last_pull_ms = 0
        self.last_consume_ms = 0
        self.locked_until = -1.0
        self._first_offset = first_offset
        self._sink = sink
        self._is_clustering = is_clustering
        self._jump: int | None = None
        self._moved_to: int | None = None
        self._scope = trio.CancelScope()
        self._committed: int | None = None
        self._broker_id = 0
        self._started = False

    async def run(self) -> None:
        """Pull until stopped; after a jump, start again at its offset with an empty backlog."""
        offset: int | None = None
        while not self.stopped:
            self._scope = trio.CancelScope()
            with self._scope:
                if offset is None:
                    offset = await self._find_offset()
                self._begin(offset)
                offset = await self._pull_from(offset)
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
        self.backlog = Backlog(offset, self.limits.cached_messages, self.limits.cached_bytes)
        self._started = True

    async def _find_offset(self) -> int:
        while True:
            try:
                return await self._first_offset(self.queue)
            except ClientError as error:
                log.log(level_of(error), "cannot read the offset of %s for group %r: %s", self.queue, self.group, error)
                await trio.sleep(PAUSE_S)

    async def _pull_from(self, offset: int) -> int:
        """Pull until the broker moves the offset; return the new offset."""
        while True:
            await self.backlog.wait_room()
            try:
                pulled = await self._pull(offset)
            except ClientError as error:
                await self._recover(error)
                continue
            if pulled.status is PullStatus.OFFSET_MOVED:
                log.warning("offset %d of %s moved to %d", offset, self.queue, pulled.next_offset)
                if pulled.next_offset == self._moved_to:
                    await trio.sleep(PAUSE_S)
                self._moved_to = pulled.next_offset
                return pulled.next_offset
            self._moved_to = None
            self._broker_id = pulled.suggested_broker_id
            offset = max(pulled.next_offset, offset)
            self._hand_over(pulled, offset)

    async def _pull(self, offset: int) -> Pulled:
        sys_flag, commit = PULL_SUSPEND, 0
        if self._is_clustering and self.backlog.commit_offset > 0:
            sys_flag, commit = sys_flag | PULL_COMMIT_OFFSET, self.backlog.commit_offset
        header = PullHeader(
            self.group,
            self.queue.topic,
            self.queue.queue_id,
            offset,
            self.limits.pull_messages,
            sys_flag,
            commit,
            SUSPEND_MS,
            sub_version=self.subscription.version,
            expression_type=self.subscription.expression_type,
        )
        self.last_pull_ms = self.network.clock.now_ms()
        return await pull(self.network, self.queue, header, RequestCode.PULL_MESSAGE, self._broker_id)

    async def _recover(self, error: ClientError) -> None:
        log.log(level_of(error), "pull of %s for group %r failed: %s", self.queue, self.group, error)
        self._broker_id = 0
        if isinstance(error, BrokerError) and error.code in _UNKNOWN_TO_BROKER:
            await self.network.send_heartbeats()
        await trio.sleep(PAUSE_S)

    def _hand_over(self, pulled: Pulled, next_offset: int) -> None:
        backlog = self.backlog
        wanted: list[ReceivedMessage | DamagedMessage] = list(pulled.damaged)
        wanted += [message for message in pulled.messages if self.subscription.selects(message)]
        for message in sorted(wanted, key=_queue_offset):
            size = message.store_bytes if isinstance(message, ReceivedMessage) else 0
            if backlog.add(message.queue_offset, size):
                self._sink.send_nowait(Work(self, backlog, message))
        backlog.end = max(backlog.end, next_offset)

    async def commit(self) -> None:
        """Commit the offset up to which the queue is done, if it changed; failures are logged and retried later."""
        offset = self.backlog.commit_offset
        if self._started and offset != self._committed:
            await self._write(offset)

    async def _write(self, offset: int) -> None:
        try:
            await self.offsets.write(self.queue, offset)
        except ClientError as error:
            log.log(level_of(error), "offset %d of %s was not committed: %s", offset, self.queue, error)
        else:
            self._committed = offset

    @property
    def is_locked(self) -> bool:
        """Whether we certainly hold the broker's lock on the queue."""
        return trio.current_time() < self.locked_until


async def _outcome(listening: Listening, work: Work) -> Outcome | None:
    """Return the outcome of the message; None if the listener is broken, and then stop the queue before it."""
    message = work.message
    if isinstance(message, DamagedMessage):
        log.error("message at offset %d of %s is damaged: %s", message.queue_offset, message.queue, message.text)
        return Outcome.RETRY
    outcome, _ = await listening.call(message)
    if outcome is None:
        work.queue.stop_pulling()
    return outcome


@final
class Concurrent:
    """Workers that consume messages of all queues in any order."""

    def __init__(
        self, listening: Listening, give_back: Callable[[ReceivedMessage | DamagedMessage], Awaitable[bool]]
    ) -> None:
        self.listening = listening
        self._give_back = give_back

    async def work(
        self, source: "trio.MemoryReceiveChannel[Work]", nursery: trio.Nursery, sink: "trio.MemorySendChannel[Work]"
    ) -> None:
        """Consume until the channel is closed."""
        async for work in source:
            if not work.backlog.dropped and not work.queue.stopped and not await self._consume(work):
                nursery.start_soon(self._again_later, work, sink)

    async def _consume(self, work: Work) -> bool:
        """Return whether the message is done; False if it must be retried here."""
        work.queue.last_consume_ms = work.queue.network.clock.now_ms()
        message = work.message
        outcome = await _outcome(self.listening, work)
        if outcome is None or work.backlog.dropped:
            return True
        if outcome is Outcome.SUCCESS or await self._give_back(message):
            work.backlog.done(message.queue_offset)
            return True
        return False

    async def _again_later(self, work: Work, sink: "trio.MemorySendChannel[Work]") -> None:
        await trio.sleep(LOCAL_RETRY_S)
        work.count_try()
        try:
            await sink.send(work)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            return


@final
class Ordered:
    """The one worker of an ordered queue."""

    def __init__(
        self,
        listening: Listening,
        give_up: Callable[[ReceivedMessage | DamagedMessage], Awaitable[bool]],
        suspend_s: float,
        times_max: int,
        needs_lock: bool,
    ) -> None:
        self.listening = listening
        self._give_up = give_up
        self._suspend_s = suspend_s
        self._times_max = times_max
        self._needs_lock = needs_lock

    async def work(self, source: "trio.MemoryReceiveChannel[Work]") -> None:
        """Consume in order until the channel is closed."""
        async for work in source:
            while not work.backlog.dropped and not work.queue.stopped:
                if self._needs_lock and not work.queue.is_locked:
                    await trio.sleep(LOCK_RETRY_S)
                elif await self._consume(work):
                    break
                else:
                    await trio.sleep(self._suspend_s)

    async def _consume(self, work: Work) -> bool:
        work.queue.last_consume_ms = work.queue.network.clock.now_ms()
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
