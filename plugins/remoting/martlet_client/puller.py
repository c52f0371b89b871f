"""The pull consumer: reads queues where and when the caller says, and commits what the caller says."""

from collections import deque
from typing import Final, Self, final

import trio

from martlet_client.arguments import check_integer, check_queue, check_seconds, check_time_ms, check_type
from martlet_client.messages import check_group, check_topic
from martlet_client.network import ClientSettings, NetworkClient
from martlet_client.offsets import BrokerOffsets, max_offset, min_offset, search_offset
from martlet_client.pulling import PULL_MESSAGES_MAX, Expression, Pulled, Sql, pull, subscription_of
from martlet_remoting.wire.answers.errors import ClientError
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.headers import PULL_SUBSCRIPTION, PULL_SUSPEND, PullHeader
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["PullConsumer", "Reading"]

WAIT_S: Final = 15.0
PULL_MESSAGES: Final = 32
WAIT_MAX_S: Final = 3600.0


@final
class PullConsumer(NetworkClient):
    """Reads queues where and when the caller says, without taking a share of its group's queues.

    Example:
        async with PullConsumer("127.0.0.1:9876", "my-group") as consumer:
            for queue in await consumer.queues("Greetings"):
                async for message in consumer.read(queue):
                    print(message.body)

    Args:
      name_server: ``host:port``, several separated by ``;``, or `ClientSettings`.
      group: the consumer group whose offsets `committed` and `commit` use.

    Raises:
      TypeError, ValueError: an argument is wrong.
      MessageRefused: the group has a name that brokers refuse.
    """

    def __init__(self, name_server: str | ClientSettings, group: str) -> None:
        check_group(group)
        super().__init__(ClientSettings.of(name_server))
        self.group = group
        self._offsets = BrokerOffsets(self.network, group)
        self._positions: dict[MessageQueue, int] = {}

    async def _open(self, nursery: trio.Nursery) -> None:
        """Connections are opened by the first call."""

    async def _close(self) -> None:
        """Nothing was registered."""

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues of *topic* that can be read.

        Raises:
          RouteNotFound: the topic does not exist.
        """
        check_topic(topic)
        return (await self.network.route(topic)).read_queues(topic)

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        expression: Expression = "*",
        messages_max: int = PULL_MESSAGES,
        wait_s: float = 0.0,
    ) -> Pulled:
        """Return up to *messages_max* messages of *queue* from *offset* on, and the offset to continue at.

        If there are none the broker waits up to *wait_s* seconds, at most an hour, for one to arrive. RocketMQ counts
        a batch in a topic with ``queue.type=BatchCQ`` as one message; all of its messages are returned.

        Raises:
          TypeError, ValueError: an argument is wrong.
          BrokerError, RouteNotFound, ConnectionLost, RequestTimeout: the queue cannot be read.
        """
        check_queue(queue)
        check_integer("offset", offset)
        check_integer("messages_max", messages_max, 1, PULL_MESSAGES_MAX)
        check_seconds("wait_s", wait_s, zero=True, high=WAIT_MAX_S)
        subscription = subscription_of(queue.topic, expression, self.network.clock.now_ms())
        header = PullHeader(
            self.group,
            queue.topic,
            queue.queue_id,
            offset,
            messages_max,
            PULL_SUBSCRIPTION | (PULL_SUSPEND if wait_s > 0 else 0),
            0,
            int(wait_s * 1000),
            subscription.expression,
            subscription.version,
            subscription.expression_type,
        )
        pulled = await pull(self.network, queue, header, RequestCode.PULL_MESSAGE)
        pulled.messages[:] = [message for message in pulled.messages if subscription.selects(message)]
        return pulled

    def read(
        self,
        queue: MessageQueue,
        start: int | None = None,
        *,
        expression: Expression = "*",
        follow: bool = False,
    ) -> "Reading":
        """Return an iterator over the messages of *queue* from offset *start* on, by default from the oldest.

        It ends with the last message that exists now; with *follow* it never ends and yields each new message.

        Raises:
          TypeError, ValueError: an argument is wrong.
          ClientError: while iterating, as for `pull`, or because a message is damaged.
        """
        check_queue(queue)
        if start is not None:
            check_integer("start", start)
        subscription_of(queue.topic, expression, 0)
        check_type("follow", follow, bool)
        return Reading(self, queue, start, expression, follow)

    async def poll(self, queue: MessageQueue, *, expression: Expression = "*", wait_s: float = 0.0) -> Pulled:
        """Return what `pull` finds at the position of *queue*, and advance the position.

        The position begins at the group's committed offset, or at the oldest message if there is none.

        Raises:
          TypeError, ValueError: an argument is wrong.
          BrokerError, RouteNotFound, ConnectionLost, RequestTimeout: the queue cannot be read.
        """
        pulled = await self.pull(queue, await self.position(queue), expression=expression, wait_s=wait_s)
        self._positions[queue] = pulled.next_offset
        return pulled

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Let the next `poll` of *queue* begin at *offset*."""
        check_queue(queue)
        check_integer("offset", offset)
        self._positions[queue] = offset

    async def position(self, queue: MessageQueue) -> int:
        """Return the offset at which the next `poll` of *queue* begins."""
        check_queue(queue)
        if queue not in self._positions:
            committed = await self.committed(queue)
            self._positions[queue] = await self.min_offset(queue) if committed is None else committed
        return self._positions[queue]

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's committed offset in *queue*, None if there is none."""
        check_queue(queue)
        return await self._offsets.read(queue)

    async def commit(self, queue: MessageQueue, offset: int | None = None) -> None:
        """Commit *offset*, by default the position of *queue*, for the group."""
        check_queue(queue)
        if offset is not None:
            check_integer("offset", offset)
        await self._offsets.write(queue, await self.position(queue) if offset is None else offset)

    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message that *queue* holds."""
        check_queue(queue)
        return await min_offset(self.network, queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the next message of *queue* will get."""
        check_queue(queue)
        return await max_offset(self.network, queue)

    async def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at *timestamp_ms* or later, `max_offset` if there is none."""
        check_queue(queue)
        check_time_ms("timestamp_ms", timestamp_ms)
        return await search_offset(self.network, queue, timestamp_ms)


@final
class Reading:
    """The messages of a queue, one after the other; there is nothing to close.

    Raises, while iterating:
      ClientError: as `PullConsumer.pull`, or when a message is damaged.
    """

    def __init__(
        self, consumer: PullConsumer, queue: MessageQueue, start: int | None, expression: Expression, follow: bool
    ) -> None:
        self._consumer = consumer
        self._queue = queue
        self._offset = -1 if start is None else start
        self._end: int | None = None
        self._expression = expression
        self._follow = follow
        self._ready: deque[ReceivedMessage] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage:
        message = await self.next_message()
        if message is None:
            raise StopAsyncIteration
        return message

    async def next_message(self) -> ReceivedMessage | None:
        """Return the next message, None after the last."""
        if self._end is None:
            await self._begin()
        while not self._ready and (self._follow or self._offset < (self._end or 0)):
            await self._pull()
        return self._ready.popleft() if self._ready else None

    async def _begin(self) -> None:
        if self._offset < 0:
            self._offset = await self._consumer.min_offset(self._queue)
        self._end = await self._consumer.max_offset(self._queue)
        if isinstance(self._expression, Sql) and self._offset >= self._end:
            # There is nothing to read, but the broker refuses an expression that it cannot evaluate.
            await self._consumer.pull(self._queue, self._offset, expression=self._expression)

    async def _pull(self) -> None:
        wait_s = WAIT_S if self._follow else 0.0
        pulled = await self._consumer.pull(self._queue, self._offset, expression=self._expression, wait_s=wait_s)
        if pulled.damaged:
            damaged = pulled.damaged[0]
            where = f"message at offset {damaged.queue_offset} of {self._queue}"
            raise ClientError(f"{where} is damaged: {damaged.text}")
        end = self._end or 0
        self._ready.extend(message for message in pulled.messages if self._follow or message.queue_offset < end)
        if pulled.next_offset == self._offset and not self._follow:
            # No messages although the end was not reached: they were removed meanwhile.
            self._end = self._offset
        self._offset = pulled.next_offset
