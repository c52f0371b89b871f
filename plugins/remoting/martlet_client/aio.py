"""The client for asyncio: the classes of `martlet_client` with the same methods, as coroutines.

Each object runs the trio client in a thread of its own. Cancelling a call cancels it there.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, final

import trio

from martlet_client import admin, consumer, popping, producer, puller, transactions
from martlet_client.blocking_bridge import Bridged, direct
from martlet_client.consumer import PushConsumerOptions
from martlet_client.listening import Listener, Outcome, check_listener, is_coroutine_listener
from martlet_client.messages import Message
from martlet_client.network import ClientSettings, NetworkClient
from martlet_client.producer import ProducerOptions
from martlet_client.pulling import Expression
from martlet_client.transactions import Check, Execute, TransactionResult, TransactionState
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["Admin", "PopConsumer", "Producer", "PullConsumer", "PushConsumer", "TransactionProducer"]

P = ParamSpec("P")
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


def forwarded(
    method: Callable[Concatenate[C, P], Awaitable[T]],
) -> Callable[Concatenate[_Held[C], P], Coroutine[Any, Any, T]]:
    """Return *method* of a trio client for its asyncio class; it runs in the client's thread."""

    @wraps(method)
    async def call(self: _Held[C], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(partial(method, self._client, *args, **kwargs))

    return call


class Producer(_Held[producer.Producer]):
    """As `martlet_client.Producer`."""

    def __init__(self, name_server: str | ClientSettings, group: str, **options: Unpack[ProducerOptions]) -> None:
        super().__init__(producer.Producer(name_server, group, **options))

    queues = forwarded(producer.Producer.queues)
    send = forwarded(producer.Producer.send)
    request = forwarded(producer.Producer.request)
    reply = forwarded(producer.Producer.reply)
    send_oneway = forwarded(producer.Producer.send_oneway)
    recall = forwarded(producer.Producer.recall)
    send_batch = forwarded(producer.Producer.send_batch)


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

    statistics = direct(consumer.PushConsumer.statistics)
    subscribe = forwarded(consumer.PushConsumer.subscribe)
    unsubscribe = forwarded(consumer.PushConsumer.unsubscribe)


@final
class PullConsumer(_Held[puller.PullConsumer]):
    """As `martlet_client.PullConsumer`."""

    def __init__(self, name_server: str | ClientSettings, group: str) -> None:
        super().__init__(puller.PullConsumer(name_server, group))

    def read(
        self, queue: MessageQueue, start: int | None = None, *, expression: Expression = "*", follow: bool = False
    ) -> AsyncIterator[ReceivedMessage]:
        """Return an iterator over the messages of *queue* up to the last one now; with *follow* it never ends."""
        return self._read(self._client.read(queue, start, expression=expression, follow=follow))

    async def _read(self, reading: puller.Reading) -> AsyncIterator[ReceivedMessage]:
        while (message := await self._call(reading.next_message)) is not None:
            yield message

    queues = forwarded(puller.PullConsumer.queues)
    pull = forwarded(puller.PullConsumer.pull)
    poll = forwarded(puller.PullConsumer.poll)
    seek = direct(puller.PullConsumer.seek)
    position = forwarded(puller.PullConsumer.position)
    committed = forwarded(puller.PullConsumer.committed)
    commit = forwarded(puller.PullConsumer.commit)
    min_offset = forwarded(puller.PullConsumer.min_offset)
    max_offset = forwarded(puller.PullConsumer.max_offset)
    search_offset = forwarded(puller.PullConsumer.search_offset)


@final
class PopConsumer(_Held[popping.PopConsumer]):
    """As `martlet_client.PopConsumer`."""

    def __init__(self, name_server: str | ClientSettings, group: str, *, from_newest: bool = False) -> None:
        super().__init__(popping.PopConsumer(name_server, group, from_newest=from_newest))

    receive = forwarded(popping.PopConsumer.receive)
    ack = forwarded(popping.PopConsumer.ack)
    change_invisible = forwarded(popping.PopConsumer.change_invisible)


@final
class Admin(_Held[admin.Admin]):
    """As `martlet_client.Admin`."""

    def __init__(self, name_server: str | ClientSettings) -> None:
        super().__init__(admin.Admin(name_server))

    cluster = forwarded(admin.Admin.cluster)
    broker_config = forwarded(admin.Admin.broker_config)
    update_broker_config = forwarded(admin.Admin.update_broker_config)
    broker_runtime = forwarded(admin.Admin.broker_runtime)
    topics = forwarded(admin.Admin.topics)
    topic_route = forwarded(admin.Admin.topic_route)
    create_topic = forwarded(admin.Admin.create_topic)
    delete_topic = forwarded(admin.Admin.delete_topic)
    topic_stats = forwarded(admin.Admin.topic_stats)
    groups = forwarded(admin.Admin.groups)
    create_group = forwarded(admin.Admin.create_group)
    delete_group = forwarded(admin.Admin.delete_group)
    group_members = forwarded(admin.Admin.group_members)
    group_lag = forwarded(admin.Admin.group_lag)
    reset_offsets = forwarded(admin.Admin.reset_offsets)
    reset_queue_offset = forwarded(admin.Admin.reset_queue_offset)
    search_offset = forwarded(admin.Admin.search_offset)
    message = forwarded(admin.Admin.message)
    messages_by_key = forwarded(admin.Admin.messages_by_key)
    messages_by_unique_key = forwarded(admin.Admin.messages_by_unique_key)


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
