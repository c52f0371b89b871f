"""The pull consumer: reads queues where and when the caller says, and commits what the caller says."""

from collections import deque
from typing import Final, Self, final

import trio

from martlet_remoting.codes import RequestCode
from martlet_remoting.headers import PULL_SUBSCRIPTION, PULL_SUSPEND, PullHeader
from martlet_remoting.packets import MessageQueue

from .errors import ClientError
from .messages import ReceivedMessage, check_group
from .network import Client, Settings
from .offsets import BrokerOffsets, max_offset, min_offset, search_offset
from .pulling import Expression, Pulled, pull, subscription_of

__all__ = ["PullConsumer", "Reading"]

WAIT_S: Final = 15.0
PULL_MESSAGES: Final = 32


@final
class PullConsumer(Client):
    """Reads queues at any offset; does not take part in the sharing of its group's queues.

    async with PullConsumer("127.0.0.1:9876", "my-group") as consumer:
        for queue in await consumer.queues("Greetings"):
            async for message in consumer.read(queue):
                print(message.body)
    """

    def __init__(self, name_server: str | Settings, group: str) -> None:
        check_group(group)
        super().__init__(Settings.of(name_server))
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
        """Return what *queue* holds from *offset* on; go on at its ``next_offset``.

        With *wait_s* the broker holds the request that long for a message to arrive.

        Raises:
          BrokerError, RouteNotFound, ConnectionLost, RequestTimeout: it cannot be read.
        """
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
        """Return an iterator over *queue* from *start* (its oldest by default) to the last message there is now.

        With *follow* it goes on for ever, with every message that arrives.
        """
        return Reading(self, queue, start, expression, follow)

    async def poll(self, queue: MessageQueue, *, expression: Expression = "*", wait_s: float = 0.0) -> Pulled:
        """Return what comes next at the position of *queue*, and move the position behind it.

        The position starts at the group's committed offset, or at the oldest message.
        """
        pulled = await self.pull(queue, await self.position(queue), expression=expression, wait_s=wait_s)
        self._positions[queue] = pulled.next_offset
        return pulled

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Let the next `poll` of *queue* begin at *offset*."""
        self._positions[queue] = offset

    async def position(self, queue: MessageQueue) -> int:
        """Return where the next `poll` of *queue* begins."""
        if queue not in self._positions:
            committed = await self.committed(queue)
            self._positions[queue] = await self.min_offset(queue) if committed is None else committed
        return self._positions[queue]

    async def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's committed offset, None when it has none."""
        return await self._offsets.read(queue)

    async def commit(self, queue: MessageQueue, offset: int | None = None) -> None:
        """Commit *offset*, the position of *queue* by default."""
        await self._offsets.write(queue, await self.position(queue) if offset is None else offset)

    async def min_offset(self, queue: MessageQueue) -> int:
        """Return the offset of the oldest message that is left."""
        return await min_offset(self.network, queue)

    async def max_offset(self, queue: MessageQueue) -> int:
        """Return the offset that the queue's next message will get."""
        return await max_offset(self.network, queue)

    async def search_offset(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the first offset stored at *timestamp_ms* or later; the maximum if there is none."""
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
            # Nothing more although the end was not reached: what was there is gone.
            self._end = self._offset
        self._offset = pulled.next_offset
