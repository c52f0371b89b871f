"""Requests from brokers to a consumer: rebalance, reset offsets, report its state, consume one message."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, final

from martlet_client.consumption import ConsumedQueue
from martlet_client.link import Answer
from martlet_client.listening import Listening, Outcome
from martlet_client.network import Network
from martlet_client.pulling import decode_messages
from martlet_client.subscriptions import SubscribedTopics
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_remoting.wire.codes import VERSION, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command, MessageQueue

__all__ = ["ConsumerRequests"]

BYTES_PER_MIB: Final = 1024 * 1024


class Consumer(Protocol):
    """A push consumer as these requests see it."""

    group: str
    network: Network
    queues: dict[MessageQueue, ConsumedQueue]
    subscriptions: SubscribedTopics
    listening: Listening
    orderly: bool
    started_ms: int

    @property
    def assigned(self) -> list[MessageQueue]: ...

    def statistics(self) -> dict[str, int]: ...


@final
class ConsumerRequests:
    """Answers requests from brokers; *rebalance_soon* and *reset_offsets* are methods of the consumer."""

    def __init__(
        self,
        consumer: Consumer,
        rebalance_soon: Callable[[], None],
        reset_offsets: Callable[[Mapping[MessageQueue, int]], Awaitable[None]],
    ) -> None:
        self.consumer = consumer
        self._rebalance_soon = rebalance_soon
        self._move_offsets = reset_offsets

    def register(self, network: Network) -> None:
        """Register this object with *network* as the handler of these requests."""
        network.handlers[RequestCode.NOTIFY_CONSUMER_IDS_CHANGED] = self._members_changed
        network.handlers[RequestCode.RESET_CONSUMER_CLIENT_OFFSET] = self._reset_offsets
        network.handlers[RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT] = self._status
        network.handlers[RequestCode.GET_CONSUMER_RUNNING_INFO] = self._running_info
        network.handlers[RequestCode.CONSUME_MESSAGE_DIRECTLY] = self._consume_directly

    async def _members_changed(self, command: Command) -> Answer:
        self._rebalance_soon()
        return Answer()

    async def _reset_offsets(self, command: Command) -> Answer:
        if command.text("group") != self.consumer.group:
            return self._wrong_group(command.text("group"))
        table = bodies.queue_map(bodies.load_object(command.body).get("offsetTable"))
        await self._move_offsets({queue: int(str(offset)) for queue, offset in table.items()})
        return Answer()

    def _wrong_group(self, group: str) -> Answer:
        return Answer(
            ResponseCode.SYSTEM_ERROR,
            remark=f"this client is not a member of group {group!r}, but of {self.consumer.group!r}",
        )

    async def _status(self, command: Command) -> Answer:
        topic = command.text("topic")
        found = self.consumer.queues.items()
        table = {queue: consumed.backlog.commit_offset for queue, consumed in found if queue.topic == topic}
        return Answer(body=bodies.dump({"messageQueueTable": table}))

    async def _running_info(self, command: Command) -> Answer:
        if command.text("consumerGroup") != self.consumer.group:
            return self._wrong_group(command.text("consumerGroup"))
        return Answer(body=bodies.dump(self._info()))

    def _info(self) -> dict[str, object]:
        consumer = self.consumer
        return {
            "mqPopTable": {},
            "mqTable": {queue: self._queue_info(queue) for queue in consumer.assigned},
            "properties": {
                "PROP_CLIENT_VERSION": str(VERSION),
                "PROP_CONSUMEORDERLY": "true" if consumer.orderly else "false",
                "PROP_CONSUMER_START_TIMESTAMP": str(consumer.started_ms),
                "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
                "PROP_NAMESERVER_ADDR": consumer.network.settings.name_server,
                "PROP_THREADPOOL_CORE_SIZE": str(consumer.statistics()["running"]),
            },
            "statusTable": {},
            "subscriptionSet": consumer.subscriptions.fields(),
            "userConsumerInfo": {},
        }

    def _queue_info(self, queue: MessageQueue) -> dict[str, object]:
        consumed = self.consumer.queues[queue]
        backlog = consumed.backlog
        return {
            "cachedMsgCount": len(backlog),
            "cachedMsgMaxOffset": backlog.end,
            "cachedMsgMinOffset": backlog.commit_offset,
            "cachedMsgSizeInMiB": backlog.bytes // BYTES_PER_MIB,
            "commitOffset": backlog.commit_offset,
            "droped": backlog.dropped,
            "lastConsumeTimestamp": consumed.last_consume_ms,
            "lastLockTimestamp": 0,
            "lastPullTimestamp": consumed.pulls.last_ms,
            "locked": consumed.is_locked,
            "transactionMsgCount": 0,
            "transactionMsgMaxOffset": 0,
            "transactionMsgMinOffset": 0,
            "tryUnlockTimes": 0,
        }

    async def _consume_directly(self, command: Command) -> Answer:
        if command.text("consumerGroup") != self.consumer.group:
            return self._wrong_group(command.text("consumerGroup"))
        messages = decode_messages(command.body, command.text("brokerName", ""))
        if len(messages) != 1 or not isinstance(messages[0], ReceivedMessage):
            return Answer(ResponseCode.SYSTEM_ERROR, remark="body does not hold one intact message")
        clock = self.consumer.network.clock
        start = clock.now_ms()
        outcome, text = await self.consumer.listening.call(messages[0])
        result = "CR_SUCCESS" if outcome is Outcome.SUCCESS else "CR_THROW_EXCEPTION" if text else "CR_LATER"
        fields: dict[str, object] = {
            "autoCommit": True,
            "consumeResult": result,
            "order": self.consumer.orderly,
            "remark": text,
            "spentTimeMills": clock.now_ms() - start,
        }
        return Answer(body=bodies.dump(fields))
