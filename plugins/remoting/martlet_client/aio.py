"""The client for asyncio: the classes of `martlet_client` with the same methods, as coroutines.

Each object runs the trio client in a thread of its own. Cancelling a call cancels it there.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, final

import trio

from martlet_client import admin, consumer, popping, producer, puller, transactions
from martlet_client.admin import ClusterInfo, ConnectedMember, QueueLag, QueueStats
from martlet_client.blocking_bridge import Bridged
from martlet_client.consumer import PushConsumerOptions
from martlet_client.listening import Listener, Outcome, check_listener, is_coroutine_listener
from martlet_client.messages import Message, SendResult
from martlet_client.network import ClientSettings, NetworkClient
from martlet_client.popping import PoppedMessage
from martlet_client.producer import ProducerOptions, Selector
from martlet_client.pulling import Expression, Pulled
from martlet_client.request_reply import Reply
from martlet_client.transactions import Check, Execute, TransactionResult, TransactionState
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import TopicRoute

__all__ = ["Admin", "PopConsumer", "Producer", "PullConsumer", "PushConsumer", "TransactionProducer"]

T = TypeVar("T")
C = TypeVar("C", bound=NetworkClient)


class _Held(Bridged[C]):
    """A trio client in its own thread, as an asyncio context manager."""

    def __init__(self, client: C) -> None:
        super().__init__(client)
        self._task: asyncio.Task[object] | None = None  # in the ``async with`` block
        self._is_interrupted = False

    async def __aenter__(self) -> Self:
        try:
            await asyncio.wrap_future(self._portal.open())
        except asyncio.CancelledError:
            self._portal.close()
            raise
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._portal.when_failed(lambda: loop.call_soon_threadsafe(self._interrupt))
        return self

    def _interrupt(self) -> None:
        """Cancel the block as trio would, because the client has failed; leaving the block raises the reason."""
        if self._task is not None:
            self._is_interrupted = True
            self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        if self._is_interrupted and task is not None:
            task.uncancel()
        await self._close()

    async def _close(self) -> None:
        """Close the client, in a bounded time, and to the end however often the caller is cancelled meanwhile."""
        closing = asyncio.wrap_future(self._portal.close())
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.wait([closing])
            except asyncio.CancelledError as error:
                cancelled = error
        closing.result()
        if cancelled is not None:
            raise cancelled

    async def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        return await asyncio.wrap_future(self._portal.call(function))


class Producer(_Held[producer.Producer]):
    """As `martlet_client.Producer`."""

    def __init__(self, name_server: str | ClientSettings, group: str, **options: Unpack[ProducerOptions]) -> None:
        super().__init__(producer.Producer(name_server, group, **options))

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues that *topic* can be sent to."""
        return await self._call(partial(self._client.queues, topic))

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Return where *message* was stored, once the broker confirms that it is."""
        return await self._call(
            partial(self._client.send, message, queue=queue, selector=selector, argument=argument, timeout_s=timeout_s)
        )

    async def request(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send *message* and return the reply of the consumer that receives it."""
        call = self._client.request
        return await self._call(
            partial(call, message, queue=queue, selector=selector, argument=argument, timeout_s=timeout_s)
        )

    async def reply(
        self,
        request: ReceivedMessage,
        body: bytes,
        *,
        tags: str = "",
        keys: str | Sequence[str] = "",
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send *body* as the reply to *request*; return once the requester has it."""
        call = self._client.reply
        return await self._call(
            partial(call, request, body, tags=tags, keys=keys, properties=properties, timeout_s=timeout_s)
        )

    async def send_oneway(self, message: Message, *, queue: MessageQueue | None = None) -> None:
        """Send *message* without waiting for an answer; you cannot know whether it was stored."""
        await self._call(partial(self._client.send_oneway, message, queue=queue))

    async def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        """Recall a message that was sent with a time or a delay in ms; return its unique key."""
        return await self._call(partial(self._client.recall, topic, handle, timeout_s=timeout_s))

    async def send_batch(self, messages: Sequence[Message], *, timeout_s: float | None = None) -> SendResult:
        """Return where *messages* were stored: all of them in one queue, in order, or none."""
        return await self._call(partial(self._client.send_batch, messages, timeout_s=timeout_s))


@final
class TransactionProducer(Producer):
    """As `martlet_client.TransactionProducer`.

    Coroutine functions run in the asyncio loop, plain ones in a thread.
    """

    def __init__(
        self,
        name_server: str | ClientSettings,
        group: str,
        check: Check,
        *,
        checks_max: int = 16,
        **options: Unpack[ProducerOptions],
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        bridged = self._bridged(check)
        client = transactions.TransactionProducer(name_server, group, bridged, checks_max=checks_max, **options)
        super(Producer, self).__init__(client)
        self._transactions = client

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return await super().__aenter__()

    def _bridged(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return *function* for trio's thread; a coroutine function runs in the asyncio loop, and trio waits."""
        if not inspect.iscoroutinefunction(function):
            return function

        async def call(*arguments: object) -> TransactionState:
            assert self._loop is not None
            return await _wait(asyncio.run_coroutine_threadsafe(function(*arguments), self._loop))

        return call

    async def send_in_transaction(
        self, message: Message, execute: Execute, *, timeout_s: float | None = None
    ) -> TransactionResult:
        """Store *message* so that nobody receives it, call *execute*, and commit the message or roll it back."""
        call = self._transactions.send_in_transaction
        return await self._call(partial(call, message, self._bridged(execute), timeout_s=timeout_s))


@final
class PushConsumer(_Held[consumer.PushConsumer]):
    """As `martlet_client.PushConsumer`.

    A coroutine listener runs in the asyncio loop, a plain one in a thread. If the listener returns an invalid
    value, the task in the ``async with`` block is cancelled, and the block raises a TypeError.
    """

    def __init__(
        self,
        name_server: str | ClientSettings,
        group: str,
        listener: Listener,
        subscriptions: Mapping[str, Expression],
        **options: Unpack[PushConsumerOptions],
    ) -> None:
        check_listener(listener)
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        bridged: Listener = self._listen if is_coroutine_listener(listener) else self._call_plain
        super().__init__(consumer.PushConsumer(name_server, group, bridged, subscriptions, **options))

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return await super().__aenter__()

    async def _listen(self, message: ReceivedMessage) -> Outcome | None:
        """Run in trio's thread: wait for the listener, which runs in asyncio's thread."""
        assert self._loop is not None
        return await _wait(asyncio.run_coroutine_threadsafe(_consumed(self._listener, message), self._loop))

    def _call_plain(self, message: ReceivedMessage) -> Outcome | None:
        """Run in a worker thread; if the listener returns a coroutine, run that in asyncio's loop."""
        result = self._listener(message)
        if not inspect.isawaitable(result):
            return result
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop).result()

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member consumes now, sorted."""
        return self._client.assigned

    def statistics(self) -> dict[str, int]:
        """Return numbers: queues, cached messages, and listener calls running, succeeded and failed."""
        return self._client.statistics()

    async def subscribe(self, topic: str, expression: Expression = "*") -> None:
        """Consume *topic* as well, or with another expression from now on."""
        await self._call(partial(self._client.subscribe, topic, expression))

    async def unsubscribe(self, topic: str) -> None:
        """Stop consuming *topic*; its offsets are committed."""
        await self._call(partial(self._client.unsubscribe, topic))


@final
class PullConsumer(_Held[puller.PullConsumer]):
    """As `martlet_client.PullConsumer`."""

    def __init__(self, name_server: str | ClientSettings, group: str) -> None:
        super().__init__(puller.PullConsumer(name_server, group))

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of *topic* that can be read."""
        return await self._call(partial(self._client.queues, topic))

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        expression: Expression = "*",
        messages_max: int = puller.PULL_MESSAGES,
        wait_s: float = 0.0,
    ) -> Pulled:
        """Return up to *messages_max* messages of *queue* from *offset* on, and the offset to continue at."""
        return await self._call(
            partial(self._client.pull, queue, offset, expression=expression, messages_max=messages_max, wait_s=wait_s)
        )

    def read(
        self, queue: MessageQueue, start: int | None = None, *, expression: Expression = "*", follow: bool = False
    ) -> AsyncIterator[ReceivedMessage]:
        """Return an iterator over the messages of *queue* up to the last one now; with *follow* it never ends."""
        return self._read(self._client.read(queue, start, expression=expression, follow=follow))

    async def _read(self, reading: puller.Reading) -> AsyncIterator[ReceivedMessage]:
        while (message := await self._call(reading.next_message)) is not None:
            yield message

    async def poll(self, queue: MessageQueue, *, expression: Expression = "*", wait_s: float = 0.0) -> Pulled:
        """Return what `pull` finds at the position of *queue*, and advance the position."""
        return await self._call(partial(self._client.poll, queue, expression=expression, wait_s=wait_s))

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Let the next `poll` of *queue* begin at *offset*."""
        self._client.seek(queue, offset)

    async def position(self, queue: MessageQueue) -> int:
        """Return the offset at which the next `poll` of *queue* begins."""
        return await self._call(partial(self._client.position, queue))

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's committed offset in *queue*, None if there is none."""
        return await self._call(partial(self._client.committed, queue))

    async def commit(self, queue: MessageQueue, offset: int | None = None) -> None:
        """Commit *offset*, by default the position of *queue*, for the group."""
        await self._call(partial(self._client.commit, queue, offset))

    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message that *queue* holds."""
        return await self._call(partial(self._client.min_offset, queue))

    async def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the next message of *queue* will get."""
        return await self._call(partial(self._client.max_offset, queue))

    async def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at *timestamp_ms* or later."""
        return await self._call(partial(self._client.search_offset, queue, timestamp_ms))


@final
class PopConsumer(_Held[popping.PopConsumer]):
    """As `martlet_client.PopConsumer`."""

    def __init__(self, name_server: str | ClientSettings, group: str, *, from_newest: bool = False) -> None:
        super().__init__(popping.PopConsumer(name_server, group, from_newest=from_newest))

    async def receive(
        self,
        topic: str,
        *,
        messages_max: int = popping.COUNT_MAX,
        invisible_s: float = popping.INVISIBLE_S,
        wait_s: float = 0.0,
        expression: Expression = "*",
        in_order: bool = False,
    ) -> list[PoppedMessage]:
        """Return up to *messages_max* messages, which are invisible to others for *invisible_s* seconds."""
        return await self._call(
            partial(
                self._client.receive,
                topic,
                messages_max=messages_max,
                invisible_s=invisible_s,
                wait_s=wait_s,
                expression=expression,
                in_order=in_order,
            )
        )

    async def ack(self, *popped: PoppedMessage) -> None:
        """Acknowledge messages; they do not come again."""
        await self._call(partial(self._client.ack, *popped))

    async def change_invisible(self, popped: PoppedMessage, invisible_s: float) -> PoppedMessage:
        """Make a message come again in *invisible_s* seconds from now; return it with its new handle."""
        return await self._call(partial(self._client.change_invisible, popped, invisible_s))


@final
class Admin(_Held[admin.Admin]):
    """As `martlet_client.Admin`."""

    def __init__(self, name_server: str | ClientSettings) -> None:
        super().__init__(admin.Admin(name_server))

    async def cluster(self) -> ClusterInfo:
        """Return all brokers by cluster."""
        return await self._call(self._client.cluster)

    async def broker_config(self, address: str) -> dict[str, str]:
        """Return every setting of the broker at *address*."""
        return await self._call(partial(self._client.broker_config, address))

    async def update_broker_config(self, address: str, settings: Mapping[str, str]) -> None:
        """Change settings of the broker at *address*."""
        await self._call(partial(self._client.update_broker_config, address, settings))

    async def broker_runtime(self, address: str) -> dict[str, str]:
        """Return the counters of the broker at *address*, by name."""
        return await self._call(partial(self._client.broker_runtime, address))

    async def topics(self) -> list[str]:
        """Return the names of all topics, including system topics."""
        return await self._call(self._client.topics)

    async def topic_route(self, topic: str) -> TopicRoute:
        """Return the brokers and queues of *topic*."""
        return await self._call(partial(self._client.topic_route, topic))

    async def create_topic(
        self,
        topic: str,
        *,
        queues: int = 8,
        perm: int = admin.PERM_READ_WRITE,
        cluster: str | None = None,
        attributes: str = "",
    ) -> list[str]:
        """Create or change *topic* on every broker, or on those of *cluster*; return the brokers' names."""
        return await self._call(
            partial(self._client.create_topic, topic, queues=queues, perm=perm, cluster=cluster, attributes=attributes)
        )

    async def delete_topic(self, topic: str) -> None:
        """Delete *topic* on every broker and name server."""
        await self._call(partial(self._client.delete_topic, topic))

    async def topic_stats(self, topic: str) -> list[QueueStats]:
        """Return the statistics of each queue of *topic*, sorted by queue."""
        return await self._call(partial(self._client.topic_stats, topic))

    async def groups(self) -> list[str]:
        """Return the names of all consumer groups."""
        return await self._call(self._client.groups)

    async def create_group(
        self, group: str, *, consume_enable: bool = True, retry_max_times: int = 16, cluster: str | None = None
    ) -> None:
        """Create or change *group* on every broker, or on those of *cluster*."""
        await self._call(
            partial(
                self._client.create_group,
                group,
                consume_enable=consume_enable,
                retry_max_times=retry_max_times,
                cluster=cluster,
            )
        )

    async def delete_group(self, group: str, *, offsets_too: bool = False) -> None:
        """Delete *group* on every broker; with *offsets_too* also the offsets that it committed."""
        await self._call(partial(self._client.delete_group, group, offsets_too=offsets_too))

    async def group_members(self, group: str) -> list[ConnectedMember]:
        """Return the connected members of *group*; empty when none is."""
        return await self._call(partial(self._client.group_members, group))

    async def group_lag(self, group: str, topic: str = "") -> list[QueueLag]:
        """Return the lag of *group* in each queue, sorted by queue."""
        return await self._call(partial(self._client.group_lag, group, topic))

    async def reset_offsets(self, group: str, topic: str, timestamp_ms: int = -1) -> dict[MessageQueue, int]:
        """Reset *group* to the first messages stored at *timestamp_ms* or later; -1 means the end."""
        return await self._call(partial(self._client.reset_offsets, group, topic, timestamp_ms))

    async def reset_queue_offset(self, group: str, queue: MessageQueue, offset: int) -> dict[MessageQueue, int]:
        """Reset *group* to *offset* of *queue*."""
        return await self._call(partial(self._client.reset_queue_offset, group, queue, offset))

    async def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at *timestamp_ms* or later, the end if there is none."""
        return await self._call(partial(self._client.search_offset, queue, timestamp_ms))

    async def message(self, message_id: str, topic: str = "") -> ReceivedMessage:
        """Return the message with this id: an offset message id or, with its *topic*, also a unique key."""
        return await self._call(partial(self._client.message, message_id, topic))

    async def messages_by_key(
        self,
        topic: str,
        key: str,
        *,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
        messages_max: int = admin.KEY_RESULTS_MAX,
    ) -> list[ReceivedMessage]:
        """Return up to *messages_max* messages of *topic* that have *key*, the oldest first."""
        return await self._call(
            partial(
                self._client.messages_by_key, topic, key, begin_ms=begin_ms, end_ms=end_ms, messages_max=messages_max
            )
        )

    async def messages_by_unique_key(self, topic: str, key: str) -> list[ReceivedMessage]:
        """Return the messages of *topic* with this unique key."""
        return await self._call(partial(self._client.messages_by_unique_key, topic, key))


async def _consumed(listener: Listener, message: ReceivedMessage) -> Outcome | None:
    result = listener(message)
    return await result if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Outcome | None]) -> Outcome | None:
    return await result


async def _wait(future: "Future[T]") -> T:
    """Wait in trio for a future of another thread; cancelling the wait cancels the future."""
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def settled(_: "Future[T]") -> None:
        try:
            token.run_sync_soon(done.set)
        except trio.RunFinishedError:
            return

    future.add_done_callback(settled)
    try:
        await done.wait()
    except trio.Cancelled:
        future.cancel()
        raise
    return future.result()
