"""The push consumer: takes its share of a group's queues, pulls them, and calls a listener with each message."""

import logging
from collections.abc import Mapping
from enum import Enum, unique
from pathlib import Path
from typing import Final, TypedDict, final

import trio

from martlet_client.allocation import Allocation, Average, check_allocation
from martlet_client.arguments import I32_MAX, check_integer, check_seconds, check_type
from martlet_client.assigned_queues import AssignedQueues, QueueShare
from martlet_client.broker_requests import ConsumerRequests
from martlet_client.consumption import CacheLimits, ConsumedQueue
from martlet_client.listening import Listener, Listening
from martlet_client.locks import Locks
from martlet_client.messages import check_group
from martlet_client.network import ClientSettings, NetworkClient, heartbeat_body
from martlet_client.offsets import BrokerOffsets, ConsumeFrom, LocalOffsets, Offsets, StartingOffsets
from martlet_client.producer import unregister
from martlet_client.pulling import Expression, QueuePulls
from martlet_client.sendback import GiveBack
from martlet_client.subscriptions import SubscribedTopics
from martlet_client.workers import ConcurrentWorkers, OrderedWorkers, Workers
from martlet_remoting.wire.answers.messages import DamagedMessage, ReceivedMessage
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["MessageModel", "PushConsumer", "PushConsumerOptions"]

log = logging.getLogger(__name__)

# RocketMQ's numbers of retries before a dead letter; an ordered queue retries without end.
RETRIES_MAX: Final = 16
UNLIMITED: Final = 2**31 - 1
COMMIT_INTERVAL_S: Final = 5.0
REBALANCE_INTERVAL_S: Final = 20.0
# Pause while a topic has no route yet, such as a new group's retry topic; doubled each time.
ROUTELESS_INTERVAL_S: Final = 1.0
UNREACHABLE_MAX_S: Final = 2.5  # the same while no name server can be reached; doubled once


@final
@unique
class MessageModel(Enum):
    """Who gets a message: with ``CLUSTERING`` one member of the group, with ``BROADCASTING`` every member."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class PushConsumerOptions(TypedDict, total=False):
    """The keyword arguments of `PushConsumer`, also for the asyncio and blocking classes."""

    model: MessageModel
    orderly: bool
    consume_from: ConsumeFrom
    consume_from_ms: int
    concurrency: int
    max_reconsume_times: int
    retry_delay_level: int
    suspend_s: float
    pull_messages: int
    cached_messages_max: int
    cached_bytes_max: int
    offsets_folder: Path | None
    allocation: Allocation | None


@final
class PushConsumer(NetworkClient):
    """Calls *listener* with each message of the subscribed topics, as a member of *group*.

    Example:
        async with PushConsumer("127.0.0.1:9876", "my-group", print, {"Greetings": "*"}):
            await trio.sleep_forever()

    It may start before its brokers, name servers and topics, and finds them within some seconds.

    The listener takes one `ReceivedMessage`. It is a coroutine function, or a plain function, which runs in
    a thread. It returns `Outcome.SUCCESS` or None when the message is done, and `Outcome.RETRY`, or raises,
    when it failed. A failed message is delivered again later; after *max_reconsume_times* it becomes a dead letter.
    If the listener returns anything else, the consumer logs an error, commits what is done, closes, and raises
    a TypeError out of its ``async with`` block; the message is delivered again once a corrected consumer runs.

    Args:
      name_server: ``host:port``, several separated by ``;``, or `ClientSettings`.
      group: the consumer group; its members share the messages.
      listener: called with each message.
      subscriptions: topic to expression: ``*``, ``tag``, ``tag || tag``, or `Sql`.
      model: whether one member gets a message, or every member.
      orderly: calls the listener with one message of a queue at a time, in order; a failure blocks the queue.
      consume_from: where to begin in a queue that the group never consumed.
      consume_from_ms: the time for `ConsumeFrom.TIMESTAMP`, in milliseconds since 1970; half an hour ago by default.
      concurrency: how many calls of the listener may run at once, 1 to 10000.
      max_reconsume_times: how often a failed message is retried; -1 means 16, or without end when *orderly*.
      retry_delay_level: delay of a failed message; 0 grows with each failure, -1 makes it a dead letter at once.
      suspend_s: how long a failure blocks an ordered queue before the next try.
      pull_messages: how many messages one request to the broker asks for, 1 to 1024.
      cached_messages_max: how many messages of one queue wait for the listener before pulling pauses.
      cached_bytes_max: the same in bytes.
      offsets_folder: where a broadcasting consumer keeps its offsets; without it, only in memory.
      allocation: how members share queues; all members must use the same. `Average` by default.

    Raises:
      TypeError, ValueError: an argument is wrong.
      MessageRefused: a topic or the group has a name that brokers refuse.
      BrokerError: on entry, when a broker does not evaluate SQL92, or the name server's address is a broker's.
    """

    def __init__(
        self,
        name_server: str | ClientSettings,
        group: str,
        listener: Listener,
        subscriptions: Mapping[str, Expression],
        *,
        model: MessageModel = MessageModel.CLUSTERING,
        orderly: bool = False,
        consume_from: ConsumeFrom = ConsumeFrom.LAST,
        consume_from_ms: int = 0,
        concurrency: int = 20,
        max_reconsume_times: int = -1,
        retry_delay_level: int = 0,
        suspend_s: float = 1.0,
        pull_messages: int = 32,
        cached_messages_max: int = 1000,
        cached_bytes_max: int = 100 * 1024 * 1024,
        offsets_folder: Path | None = None,
        allocation: Allocation | None = None,
    ) -> None:
        check_group(group)
        super().__init__(ClientSettings.of(name_server))
        check_type("model", model, MessageModel, "for example MessageModel.BROADCASTING")
        check_type("orderly", orderly, bool)
        check_integer("max_reconsume_times", max_reconsume_times, -1, I32_MAX)
        check_integer("retry_delay_level", retry_delay_level, -1, I32_MAX)
        check_seconds("suspend_s", suspend_s)
        _check_folder(offsets_folder, model)
        network, is_shared = self.network, model is MessageModel.CLUSTERING
        times_max = max_reconsume_times if max_reconsume_times >= 0 else UNLIMITED if orderly else RETRIES_MAX
        back = GiveBack(network, group, times_max, retry_delay_level)
        offsets: Offsets = BrokerOffsets(network, group) if is_shared else LocalOffsets(offsets_folder)
        self.group = group
        self.model = model
        self.orderly = orderly
        self.started_ms = network.clock.now_ms()
        self.listening = Listening(listener, concurrency, self._fail)
        self.subscriptions = SubscribedTopics(network, group, subscriptions, is_shared, self._fail)
        self.queues: dict[MessageQueue, ConsumedQueue] = {}
        self._share = QueueShare(network, group, _allocation(allocation) if is_shared else None)
        self._locks = Locks(network, group, self.queues) if orderly and is_shared else None
        workers: Workers
        if orderly:
            give_up = back.send_to_retry_topic if is_shared else _log_failure
            workers = OrderedWorkers(self.listening, give_up, suspend_s, times_max, self._locks)
        else:
            workers = ConcurrentWorkers(self.listening, back.give_back if is_shared else _log_failure, concurrency)
        self._starting_offsets = StartingOffsets(network, offsets, consume_from, consume_from_ms)
        self._assigned = AssignedQueues(
            lambda queue, selection: QueuePulls(network, group, queue, selection, pull_messages, is_shared),
            CacheLimits(pull_messages, cached_messages_max, cached_bytes_max),
            offsets,
            self._starting_offsets,
            workers,
            self.queues,
            self._rebalance_after_leaving,
        )
        self._rebalance_wanted = trio.Event()
        self._loops = trio.CancelScope()
        network.heartbeat = self._heartbeat
        network.routes_changed = self._rebalance_soon
        ConsumerRequests(self, self._rebalance_soon, self._assigned.reset_offsets).register(network)

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member consumes now, sorted."""
        return sorted(self.queues)

    def statistics(self) -> dict[str, int]:
        """Return numbers: queues, cached messages, and listener calls running, succeeded and failed."""
        return {
            "queues": len(self.queues),
            "cached": sum(len(queue.backlog) for queue in self.queues.values()),
            "running": self.listening.running,
            "succeeded": self.listening.succeeded,
            "failed": self.listening.failed,
        }

    async def subscribe(self, topic: str, expression: Expression = "*") -> None:
        """Consume *topic* as well, or with another expression from now on; all members should subscribe alike.

        Raises:
          TypeError, ValueError, MessageRefused: the topic or the expression is wrong.
          BrokerError: a broker does not evaluate the expression.
        """
        await self.subscriptions.add(topic, expression)
        await self.network.send_heartbeats()
        self._assigned.leave_topic(topic)
        self._rebalance_soon()

    async def unsubscribe(self, topic: str) -> None:
        """Stop consuming *topic*; its offsets are committed."""
        check_type("topic", topic, str)
        if self.subscriptions.by_topic.pop(topic, None) is not None:
            self._assigned.leave_topic(topic)
            await self.network.send_heartbeats()

    def _heartbeat(self) -> bytes:
        consumer: dict[str, object] = {
            "consumeFromWhere": self._starting_offsets.consume_from.value,
            "consumeType": "CONSUME_PASSIVELY",
            "groupName": self.group,
            "messageModel": self.model.value,
            "subscriptionDataSet": self.subscriptions.fields(),
            "unitMode": False,
        }
        return heartbeat_body(self.client_id, [], [consumer])

    async def _open(self, nursery: trio.Nursery) -> None:
        await self.subscriptions.introduce()
        self._assigned.start(nursery)
        await self._rebalance()
        nursery.start_soon(self._run_loops)

    async def _run_loops(self) -> None:
        with self._loops:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._rebalance_loop)
                nursery.start_soon(self._commit_loop)
                if self._locks is not None:
                    nursery.start_soon(self._locks.renew)

    async def _close(self) -> None:
        # First stop rebalancing: nobody would release a queue that is taken from here on.
        self._loops.cancel()
        self._assigned.stop_pulling()
        with trio.move_on_after(self.network.settings.close_timeout_s * 0.6):
            await self.listening.wait_idle()
        await self._assigned.commit_all()
        if self._locks is not None:
            await self._locks.let_go([*self.queues, *self._assigned.leaving])
        await unregister(self.network, consumer_group=self.group)

    def _rebalance_soon(self) -> None:
        """Wake the rebalance loop instead of waiting for its next turn."""
        self._rebalance_wanted.set()

    def _rebalance_after_leaving(self, queue: MessageQueue) -> None:
        if queue.topic in self.subscriptions.by_topic:
            # It may be assigned to us again, with another expression.
            self._rebalance_soon()

    async def _rebalance_loop(self) -> None:
        interval_s = ROUTELESS_INTERVAL_S / 2
        while True:
            is_route_missing = self.subscriptions.is_route_missing
            interval_s = min(interval_s * 2, REBALANCE_INTERVAL_S) if is_route_missing else REBALANCE_INTERVAL_S
            with trio.move_on_after(interval_s):
                await self._rebalance_wanted.wait()
            self._rebalance_wanted = trio.Event()
            if is_route_missing and not await self.subscriptions.fetch_missing_routes():
                interval_s = min(interval_s, UNREACHABLE_MAX_S)
            await self._rebalance()

    async def _rebalance(self) -> None:
        """Take the queues that are assigned now, and release those that no longer are."""
        is_changed = False
        for topic, subscription in list(self.subscriptions.by_topic.items()):
            share = await self._share.find(topic)
            # The subscription may have changed during the request.
            if share is not None and self.subscriptions.by_topic.get(topic) is subscription:
                is_changed = self._assigned.update(subscription, share) or is_changed
        if is_changed:
            log.info("group %r: %s consumes %d queues", self.group, self.client_id, len(self.queues))
            await self.network.send_heartbeats()

    async def _commit_loop(self) -> None:
        while True:
            await trio.sleep(COMMIT_INTERVAL_S)
            await self._assigned.commit_all()


def _allocation(allocation: Allocation | None) -> Allocation:
    return Average() if allocation is None else check_allocation(allocation)


def _check_folder(folder: object, model: MessageModel) -> None:
    if folder is None:
        return
    check_type("offsets_folder", folder, Path)
    if model is MessageModel.CLUSTERING:
        text = f"offsets_folder {str(folder)!r} is for broadcasting consumers; brokers keep the offsets of all others"
        raise ValueError(f"{text}, so leave it out")


async def _log_failure(message: ReceivedMessage | DamagedMessage) -> bool:
    """Log the failure: a broadcasting group has no retry topic."""
    log.warning("message at offset %d of %s failed and is not tried again", message.queue_offset, message.queue)
    return True
