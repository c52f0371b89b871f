"""The queues of a push consumer: which are its share, and how it takes and leaves them."""

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from typing import final

import trio

from martlet_client.allocation import Allocation
from martlet_client.consumption import CacheLimits, ConsumedQueue
from martlet_client.network import Network
from martlet_client.offsets import Offsets, StartingOffsets
from martlet_client.outages import level_of
from martlet_client.pulling import QueuePulls, TopicSelection
from martlet_client.workers import Workers
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import ClientError, RouteNotFound
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["AssignedQueues", "QueueShare"]

log = logging.getLogger(__name__)


@final
class QueueShare:
    """A member's share of the queues of a topic, by *allocation*; None gives each member all queues."""

    def __init__(self, network: Network, group: str, allocation: Allocation | None) -> None:
        self.network = network
        self.group = group
        self._allocation = allocation

    async def find(self, topic: str) -> list[MessageQueue] | None:
        """Return our queues of *topic*; None if they cannot be determined at the moment."""
        route = self.network.routes.get(topic)
        if route is None:
            return None
        queues = route.read_queues(topic)
        if self._allocation is None or not queues:
            return queues
        try:
            members = await self._members(topic)
        except ClientError as error:
            log.log(level_of(error), "members of group %r are unknown, keeping its queues: %s", self.group, error)
            return None
        return self._allocation.allocate(self.group, self.network.client_id, queues, members)

    async def _members(self, topic: str) -> list[str]:
        """Return the group's members from a broker of *topic*, sorted; send it a heartbeat if it does not know us."""
        members = await self._ask_members(topic)
        if self.network.client_id not in members:
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


@final
class AssignedQueues:
    """The queues that a member consumes now, by queue in *current*, and those that it leaves.

    *left* is called when a queue has been left and could be taken again.
    """

    def __init__(
        self,
        make_pulls: Callable[[MessageQueue, TopicSelection], QueuePulls],
        limits: CacheLimits,
        offsets: Offsets,
        starting_offsets: StartingOffsets,
        workers: Workers,
        current: dict[MessageQueue, ConsumedQueue],
        left: Callable[[MessageQueue], None],
    ) -> None:
        self.current = current
        self.leaving: dict[MessageQueue, ConsumedQueue] = {}
        self._make_pulls = make_pulls
        self._limits = limits
        self._offsets = offsets
        self._starting_offsets = starting_offsets
        self._workers = workers
        self._left = left
        self._nursery: trio.Nursery | None = None

    def start(self, nursery: trio.Nursery) -> None:
        """Start the workers; all tasks run in *nursery*."""
        self._nursery = nursery
        self._workers.start(nursery)

    def update(self, subscription: TopicSelection, share: Iterable[MessageQueue]) -> bool:
        """Take the queues of *share* and leave all others of the topic; return whether they differ from ours."""
        shared_queues = set(share)
        our_queues = {queue for queue in self.current if queue.topic == subscription.topic}
        for queue in our_queues - shared_queues:
            self._leave(queue)
        # A queue that is still being released is taken at the next turn.
        new_queues = shared_queues - our_queues - self.leaving.keys()
        for queue in sorted(new_queues):
            self._take(queue, subscription)
        return our_queues != shared_queues

    def leave_topic(self, topic: str) -> None:
        """Leave all queues of *topic*."""
        for queue in [queue for queue in self.current if queue.topic == topic]:
            self._leave(queue)

    def stop_pulling(self) -> None:
        """Pull no more; the results of running listeners still count."""
        for queue in self.current.values():
            queue.stop_pulling()

    def _take(self, queue: MessageQueue, subscription: TopicSelection) -> None:
        assert self._nursery is not None
        pulls = self._make_pulls(queue, subscription)
        consumed = ConsumedQueue(pulls, self._limits, self._offsets, self._starting_offsets.find)
        self.current[queue] = consumed
        self._nursery.start_soon(self._workers.run, consumed)

    def _leave(self, queue: MessageQueue) -> None:
        assert self._nursery is not None
        consumed = self.current.pop(queue)
        self.leaving[queue] = consumed
        consumed.stop()
        self._nursery.start_soon(self._farewell, consumed)

    async def _farewell(self, consumed: ConsumedQueue) -> None:
        """Commit the offset reached, before the queue goes to another member."""
        await consumed.commit()
        await self._workers.finish(consumed)
        self.leaving.pop(consumed.queue, None)
        self._left(consumed.queue)

    async def commit_all(self) -> None:
        """Commit the offsets of all queues."""
        async with trio.open_nursery() as nursery:
            for queue in [*self.current.values(), *self.leaving.values()]:
                nursery.start_soon(queue.commit)
        await self._offsets.flush()

    async def reset_offsets(self, table: Mapping[MessageQueue, int]) -> None:
        """Continue at the given offsets, forward or back, in those queues that this member consumes."""
        for queue, offset in table.items():
            consumed = self.current.get(queue)
            if consumed is not None:
                await self._offsets.write(queue, offset)
                consumed.jump(offset)
