"""The client for plain synchronous code: the classes of `martlet_client` with the same methods.

Each object runs the trio client in a thread of its own. Its methods may be called from any thread, between
entering and leaving its ``with`` block.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial, wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, Self, TypeVar, Unpack, final

from martlet_client import admin, consumer, popping, producer, puller, transactions
from martlet_client.blocking_bridge import Bridged, direct
from martlet_client.consumer import PushConsumerOptions
from martlet_client.listening import Listener
from martlet_client.messages import Message
from martlet_client.network import ClientSettings, NetworkClient
from martlet_client.producer import ProducerOptions
from martlet_client.pulling import Expression
from martlet_client.transactions import Check, Execute, TransactionResult
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["Admin", "PopConsumer", "Producer", "PullConsumer", "PushConsumer", "TransactionProducer"]

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=NetworkClient)


class _Held(Bridged[C]):
    """A trio client in its own thread, as a context manager."""

    def __enter__(self) -> Self:
        try:
            self._portal.open().result()
        except KeyboardInterrupt:
            self._portal.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.close().result()

    def _call(self, function: Callable[[], Awaitable[T]]) -> T:
        return self._portal.call(function).result()


def forwarded(method: Callable[Concatenate[C, P], Awaitable[T]]) -> Callable[Concatenate[_Held[C], P], T]:
    """Return *method* of a trio client for its blocking class; it runs in the client's thread."""

    @wraps(method)
    def call(self: _Held[C], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(partial(method, self._client, *args, **kwargs))

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
    """As `martlet_client.TransactionProducer`; *check* and local transactions are called in its threads."""

    def __init__(
        self,
        name_server: str | ClientSettings,
        group: str,
        check: Check,
        *,
        checks_max: int = 16,
        **options: Unpack[ProducerOptions],
    ) -> None:
        client = transactions.TransactionProducer(name_server, group, check, checks_max=checks_max, **options)
        super(Producer, self).__init__(client)
        self._transactions = client

    def send_in_transaction(
        self, message: Message, execute: Execute, *, timeout_s: float | None = None
    ) -> TransactionResult:
        """Store *message* so that nobody receives it, call *execute*, and commit the message or roll it back."""
        return self._call(partial(self._transactions.send_in_transaction, message, execute, timeout_s=timeout_s))


@final
class PushConsumer(_Held[consumer.PushConsumer]):
    """As `martlet_client.PushConsumer`; the listener is called in its threads.

    If the listener returns an invalid value, the consumer logs an error and closes; further calls raise
    `ClientClosed`, and leaving the ``with`` block raises a TypeError.
    """

    def __init__(
        self,
        name_server: str | ClientSettings,
        group: str,
        listener: Listener,
        subscriptions: Mapping[str, Expression],
        **options: Unpack[PushConsumerOptions],
    ) -> None:
        super().__init__(consumer.PushConsumer(name_server, group, listener, subscriptions, **options))

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
    ) -> Iterator[ReceivedMessage]:
        """Return an iterator over the messages of *queue* up to the last one now; with *follow* it never ends."""
        return self._read(self._client.read(queue, start, expression=expression, follow=follow))

    def _read(self, reading: puller.Reading) -> Iterator[ReceivedMessage]:
        while (message := self._call(reading.next_message)) is not None:
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
