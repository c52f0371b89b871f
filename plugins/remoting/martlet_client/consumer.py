"""The push consumer: takes its share of a group's queues, pulls them, and calls a listener with each message."""

import logging
import math
import random
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from enum import Enum, unique
from pathlib import Path
from typing import Final, TypedDict, final

import trio

from martlet_client.allocation import Allocation, Average, check_allocation
from martlet_client.arguments import I32_MAX, check_integer, check_seconds, check_time_ms, check_type
from martlet_client.broker_requests import ConsumerRequests
from martlet_client.consumption import LOCK_RETRY_S, CacheLimits, Concurrent, ConsumedQueue, Offsets, Ordered, Work
from martlet_client.listening import Listener, Listening
from martlet_client.locks import Locks
from martlet_client.messages import check_group, check_topic
from martlet_client.network import ClientSettings, NetworkClient, heartbeat_body
from martlet_client.offsets import BrokerOffsets, LocalOffsets, max_offset, search_offset
from martlet_client.outages import level_of
from martlet_client.producer import unregister
from martlet_client.pulling import TAG, Expression, TopicSelection, subscription_of
from martlet_client.sendback import GiveBack
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BrokerError, ClientError, NameServerUnreachable, RouteNotFound
from martlet_remoting.wire.answers.messages import RETRY_PREFIX, DamagedMessage, ReceivedMessage
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["ConsumeFrom", "MessageModel", "PushConsumer", "PushConsumerOptions"]

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


@final
@unique
class ConsumeFrom(Enum):
    """Where a group begins in a queue in which it has committed no offset; RocketMQ's rules.

    ``FIRST``: with the oldest message. ``LAST``: with messages stored from now on. ``TIMESTAMP``: with messages
    stored at ``consume_from_ms`` or later.

    The broker overrules ``LAST`` and ``TIMESTAMP`` for a *young* queue, one that still has its first message in
    memory: the group begins with that message. So a group never misses the first messages of a new topic, and a
    new group also gets everything in a small existing topic (docs/client.md says how small). To be sure to skip
    old messages, call `Admin.create_group` and `Admin.reset_offsets` before the first member starts.
    """

    LAST = "CONSUME_FROM_LAST_OFFSET"
    FIRST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


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
        _check_start(consume_from, consume_from_ms)
        check_integer("max_reconsume_times", max_reconsume_times, -1, I32_MAX)
        check_integer("retry_delay_level", retry_delay_level, -1, I32_MAX)
        check_seconds("suspend_s", suspend_s)
        _check_folder(offsets_folder, model)
        self.group = group
        self.model = model
        self.orderly = orderly
        self.consume_from = consume_from
        self.listening = Listening(listener, concurrency, self._fail)
        self.queues: dict[MessageQueue, ConsumedQueue] = {}
        self.started_ms = self.network.clock.now_ms()
        self.subscriptions = self._subscribe(subscriptions)
        self._consume_from_ms = consume_from_ms or self.started_ms - 30 * 60 * 1000
        self._concurrency = concurrency
        self._limits = CacheLimits(pull_messages, cached_messages_max, cached_bytes_max)
        self._allocation = Average() if allocation is None else check_allocation(allocation)
        times_max = max_reconsume_times if max_reconsume_times >= 0 else UNLIMITED if orderly else RETRIES_MAX
        self._times_max = times_max
        self._suspend_s = suspend_s
        self._give_back = GiveBack(self.network, group, times_max, retry_delay_level)
        clustering = self._is_clustering
        self.offsets: Offsets = BrokerOffsets(self.network, group) if clustering else LocalOffsets(offsets_folder)
        self._locks = Locks(self.network, group, self.queues)
        self._leaving: dict[MessageQueue, ConsumedQueue] = {}
        self._rebalance_wanted = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._loops = trio.CancelScope()
        self._sink, self._source = trio.open_memory_channel[Work](math.inf)
        self.network.heartbeat = self._heartbeat
        self.network.routes_changed = self._rebalance_soon
        ConsumerRequests(self, self._rebalance_soon, self._reset_offsets).register(self.network)

    @property
    def _is_clustering(self) -> bool:
        """Whether the members share the messages, rather than each getting all."""
        return self.model is MessageModel.CLUSTERING

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
        check_topic(topic)
        subscription = subscription_of(topic, expression, self.network.clock.now_ms())
        with suppress(RouteNotFound):
            await self.network.fetch_route(topic)
        await self._check_expression(subscription)
        self.subscriptions[topic] = subscription
        await self.network.send_heartbeats()
        self._leave_topic(topic)
        self._rebalance_soon()

    async def unsubscribe(self, topic: str) -> None:
        """Stop consuming *topic*; its offsets are committed."""
        check_type("topic", topic, str)
        if self.subscriptions.pop(topic, None) is not None:
            self._leave_topic(topic)
            await self.network.send_heartbeats()

    def _leave_topic(self, topic: str) -> None:
        for queue in [queue for queue in self.queues if queue.topic == topic]:
            self._leave(queue)

    def _subscribe(self, subscriptions: Mapping[str, Expression]) -> dict[str, TopicSelection]:
        check_type("subscriptions", subscriptions, Mapping, "for example {'Greetings': '*'}")
        wanted = dict(subscriptions)
        for topic in wanted:
            check_topic(topic)
        if self._is_clustering:
            wanted[RETRY_PREFIX + self.group] = "*"
        return {topic: subscription_of(topic, wish, self.started_ms) for topic, wish in wanted.items()}

    def _heartbeat(self) -> bytes:
        consumer: dict[str, object] = {
            "consumeFromWhere": self.consume_from.value,
            "consumeType": "CONSUME_PASSIVELY",
            "groupName": self.group,
            "messageModel": self.model.value,
            "subscriptionDataSet": [found.fields() for found in self.subscriptions.values()],
            "unitMode": False,
        }
        return heartbeat_body(self.client_id, [], [consumer])

    async def _open(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        for topic in self.subscriptions:
            try:
                await self.network.fetch_route(topic)
            except RouteNotFound as error:
                # The first heartbeat of a new group creates its retry topic.
                log.log(logging.DEBUG if topic.startswith(RETRY_PREFIX) else logging.INFO, "%s", error)
            except NameServerUnreachable:
                break  # it may start later than this consumer; `_fetch_missing_routes` goes on
        await self.network.send_heartbeats()
        for subscription in self.subscriptions.values():
            await self._check_expression(subscription)
        if not self.orderly:
            pool = Concurrent(self.listening, self._give_back.give_back if self._is_clustering else _let_go)
            for _ in range(self._concurrency):
                nursery.start_soon(pool.work, self._source.clone(), nursery, self._sink)
        await self._rebalance()
        nursery.start_soon(self._run_loops)

    async def _check_expression(self, subscription: TopicSelection) -> None:
        """Ask a broker whether it evaluates our SQL92; raises BrokerError instead of consuming nothing for ever."""
        route = self.network.routes.get(subscription.topic)
        if route is None or subscription.expression_type == TAG:
            return
        fields = {"clientId": self.client_id, "group": self.group, "subscriptionData": subscription.fields()}
        address = random.choice(route.addresses())
        await self.network.ask(address, RequestCode.CHECK_CLIENT_CONFIG, {}, bodies.dump(fields))

    async def _run_loops(self) -> None:
        with self._loops:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._rebalance_loop)
                nursery.start_soon(self._commit_loop)
                if self._needs_lock:
                    nursery.start_soon(self._locks.renew)

    @property
    def _needs_lock(self) -> bool:
        return self.orderly and self._is_clustering

    async def _close(self) -> None:
        # First stop rebalancing: nobody would release a queue that is taken from here on.
        self._loops.cancel()
        for queue in self.queues.values():
            queue.stop_pulling()
        with trio.move_on_after(self.network.settings.close_timeout_s * 0.6):
            await self.listening.wait_idle()
        await self._commit_all()
        if self._needs_lock:
            await self._locks.let_go([*self.queues, *self._leaving])
        await unregister(self.network, consumer_group=self.group)

    # Rebalancing

    def _rebalance_soon(self) -> None:
        """Wake the rebalance loop instead of waiting for its next turn."""
        self._rebalance_wanted.set()

    async def _rebalance_loop(self) -> None:
        interval_s = ROUTELESS_INTERVAL_S / 2
        while True:
            missing = any(topic not in self.network.routes for topic in self.subscriptions)
            interval_s = min(interval_s * 2, REBALANCE_INTERVAL_S) if missing else REBALANCE_INTERVAL_S
            with trio.move_on_after(interval_s):
                await self._rebalance_wanted.wait()
            self._rebalance_wanted = trio.Event()
            if missing and not await self._fetch_missing_routes():
                interval_s = min(interval_s, UNREACHABLE_MAX_S)
            await self._rebalance()

    async def _fetch_missing_routes(self) -> bool:
        """Look for topics that had no route; return whether a name server could be reached."""
        is_reached = True
        before = self.network.broker_addresses()
        for topic, subscription in list(self.subscriptions.items()):
            if topic not in self.network.routes:
                try:
                    await self.network.fetch_route(topic)
                    await self._check_expression(subscription)
                except BrokerError as error:
                    self._fail(error)  # as when the consumer opens
                except ClientError as error:
                    is_reached = is_reached and not isinstance(error, NameServerUnreachable)
                    log.debug("%s", error)
        if self.network.broker_addresses() != before:
            await self.network.send_heartbeats()
        return is_reached

    async def _rebalance(self) -> None:
        """Take the queues that are assigned now, and release those that no longer are."""
        changed = False
        for topic, subscription in list(self.subscriptions.items()):
            share = await self._share(topic)
            # The subscription may have changed during the request.
            if share is not None and self.subscriptions.get(topic) is subscription:
                changed = self._take_and_leave(subscription, share) or changed
        if changed:
            log.info("group %r: %s consumes %d queues", self.group, self.client_id, len(self.queues))
            await self.network.send_heartbeats()

    async def _share(self, topic: str) -> list[MessageQueue] | None:
        """Return our queues of *topic*; None if they cannot be determined at the moment."""
        route = self.network.routes.get(topic)
        if route is None:
            return None
        queues = route.read_queues(topic)
        if not self._is_clustering or not queues:
            return queues
        try:
            members = await self._members(topic)
        except ClientError as error:
            log.log(level_of(error), "members of group %r are unknown, keeping its queues: %s", self.group, error)
            return None
        return self._allocation.allocate(self.group, self.client_id, queues, members)

    async def _members(self, topic: str) -> list[str]:
        """Return the group's members from a broker of *topic*, sorted; send it a heartbeat if it does not know us."""
        members = await self._ask_members(topic)
        if self.client_id not in members:
            await self.network.send_heartbeats()
            members = await self._ask_members(topic)
        return members

    async def _ask_members(self, topic: str) -> list[str]:
        route = await self.network.route(topic)
        name = random.choice(sorted(route.brokers))
        address = route.address(name)
        if address is None:
            raise RouteNotFound(topic, f"has no broker {name!r} at the moment")
        ext = {"consumerGroup": self.group, "bname": name}
        answer = await self.network.ask(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
        return sorted(bodies.texts(bodies.load_object(answer.body), "consumerIdList"))

    def _take_and_leave(self, subscription: TopicSelection, share: Iterable[MessageQueue]) -> bool:
        wanted = set(share)
        ours = {queue for queue in self.queues if queue.topic == subscription.topic}
        for queue in ours - wanted:
            self._leave(queue)
        # A queue that is still being released is taken at the next turn.
        new = wanted - ours - self._leaving.keys()
        for queue in sorted(new):
            self._take(queue, subscription)
        return ours != wanted

    def _take(self, queue: MessageQueue, subscription: TopicSelection) -> None:
        assert self._nursery is not None
        sink = self._sink
        if self.orderly:
            sink, source = trio.open_memory_channel[Work](math.inf)
        consumed = ConsumedQueue(
            self.network,
            self.group,
            queue,
            subscription,
            self._limits,
            self.offsets,
            self._first_offset,
            sink,
            self._is_clustering,
        )
        self.queues[queue] = consumed
        if self.orderly:
            give_up = self._give_back.send_to_retry_topic if self._is_clustering else _let_go
            worker = Ordered(self.listening, give_up, self._suspend_s, self._times_max, self._needs_lock)
            self._nursery.start_soon(self._run_ordered, consumed, worker, sink, source)
        else:
            self._nursery.start_soon(consumed.run)

    async def _run_ordered(
        self,
        consumed: ConsumedQueue,
        worker: Ordered,
        sink: "trio.MemorySendChannel[Work]",
        source: "trio.MemoryReceiveChannel[Work]",
    ) -> None:
        """Lock, then pull and consume; read the offset only under the lock, when nobody else commits any more."""
        async with AsyncExitStack() as stack:
            stack.callback(consumed.finished.set)
            stack.callback(source.close)
            while self._needs_lock and not consumed.is_locked:
                if consumed.stopped:
                    return
                await self._locks.take([consumed.queue])
                if not consumed.is_locked:
                    await trio.sleep(LOCK_RETRY_S)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.work, source)
                with sink:
                    await consumed.run()

    def _leave(self, queue: MessageQueue) -> None:
        assert self._nursery is not None
        consumed = self.queues.pop(queue)
        self._leaving[queue] = consumed
        consumed.stop()
        self._nursery.start_soon(self._farewell, consumed)

    async def _farewell(self, consumed: ConsumedQueue) -> None:
        """Commit the offset reached; for an ordered queue also release the lock once its listener is done."""
        await consumed.commit()
        if self.orderly:
            await consumed.finished.wait()
            await consumed.commit()
        if self._needs_lock:
            await self._locks.let_go([consumed.queue])
        self._leaving.pop(consumed.queue, None)
        if consumed.queue.topic in self.subscriptions:
            # It may be assigned to us again, with another expression.
            self._rebalance_soon()

    async def _first_offset(self, queue: MessageQueue) -> int:
        """Return where to begin: the committed offset, or else the one that RocketMQ's RebalancePushImpl computes."""
        committed = await self.offsets.read(queue)
        if committed is not None and committed >= 0:
            return committed
        is_retry = queue.topic.startswith(RETRY_PREFIX)
        if self.consume_from is ConsumeFrom.FIRST or (is_retry and self.consume_from is ConsumeFrom.LAST):
            return 0
        if self.consume_from is ConsumeFrom.LAST or is_retry:
            return await max_offset(self.network, queue)
        return await search_offset(self.network, queue, self._consume_from_ms)

    # Offsets

    async def _commit_loop(self) -> None:
        while True:
            await trio.sleep(COMMIT_INTERVAL_S)
            await self._commit_all()

    async def _commit_all(self) -> None:
        async with trio.open_nursery() as nursery:
            for queue in [*self.queues.values(), *self._leaving.values()]:
                nursery.start_soon(queue.commit)
        await self.offsets.flush()

    async def _reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Continue at the given offsets, forward or back, in those queues that this member consumes."""
        for queue, offset in table.items():
            consumed = self.queues.get(queue)
            if consumed is not None:
                await self.offsets.write(queue, offset)
                consumed.jump(offset)


def _check_start(consume_from: object, consume_from_ms: object) -> None:
    check_type("consume_from", consume_from, ConsumeFrom, "for example ConsumeFrom.FIRST")
    check_time_ms("consume_from_ms", consume_from_ms)
    if consume_from_ms and consume_from is not ConsumeFrom.TIMESTAMP:
        raise ValueError(f"consume_from_ms {consume_from_ms} has no effect; give consume_from=ConsumeFrom.TIMESTAMP")


def _check_folder(folder: object, model: MessageModel) -> None:
    if folder is None:
        return
    check_type("offsets_folder", folder, Path)
    if model is MessageModel.CLUSTERING:
        text = f"offsets_folder {str(folder)!r} is for broadcasting consumers; brokers keep the offsets of all others"
        raise ValueError(f"{text}, so leave it out")


async def _let_go(message: ReceivedMessage | DamagedMessage) -> bool:
    """Log the failure: a broadcasting group has no retry topic."""
    log.warning("message at offset %d of %s failed and is not tried again", message.queue_offset, message.queue)
    return True
