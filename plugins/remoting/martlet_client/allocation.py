"""Which queues of a topic a member of a group gets: RocketMQ's strategies, with the same results.

A strategy gets the group, the member, and all queues and members in order;
every member must use the same one. Tests compare them with a table of results
of the Java classes (client/consumer/rebalance).
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from hashlib import md5
from typing import Protocol, final

from martlet_client.arguments import check_integer
from martlet_remoting.wire.averages import Average, AverageByCircle
from martlet_remoting.wire.packets import MessageQueue

__all__ = [
    "Allocation",
    "Average",
    "AverageByCircle",
    "ByConfig",
    "ByMachineRoom",
    "ConsistentHash",
    "MachineRoomNearby",
    "check_allocation",
]


class Allocation(Protocol):
    """A strategy that decides which queues of a topic a member consumes; ``name`` is RocketMQ's name for it."""

    name: str

    def allocate(
        self, group: str, member: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        """Return the queues of *member*; empty when it is not among *members*."""
        ...


def check_allocation(allocation: "Allocation") -> "Allocation":
    """Return *allocation*. Raises TypeError if it is not a strategy, or if it is the class of one."""
    if isinstance(allocation, type):
        raise TypeError(f"allocation {allocation.__name__} is a class; give an object: {allocation.__name__}()")
    if not callable(getattr(allocation, "allocate", None)):
        raise TypeError(f"allocation {allocation!r:.60} has no method allocate; give a strategy, for example Average()")
    return allocation


@final
class ByConfig:
    """Exactly the given queues, whatever the other members consume."""

    name = "CONFIG"

    def __init__(self, queues: Sequence[MessageQueue]) -> None:
        self.queues = tuple(queues)

    def allocate(
        self, group: str, member: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        return list(self.queues)


@final
class ByMachineRoom:
    """Shares only the queues of brokers named ``room@name`` whose room is one of *rooms*."""

    name = "MACHINE_ROOM"

    def __init__(self, rooms: Collection[str]) -> None:
        self.rooms = frozenset(rooms)

    def allocate(
        self, group: str, member: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if member not in members:
            return []
        near = [queue for queue in queues if self._is_near(queue.broker_name)]
        index = members.index(member)
        size, more = divmod(len(near), len(members))
        rest = [near[index + size * len(members)]] if index < more else []
        return near[size * index : size * (index + 1)] + rest

    def _is_near(self, broker_name: str) -> bool:
        room, *rest = broker_name.split("@")
        # Java's split drops empty parts at the end.
        return len(rest) == 1 and rest[0] != "" and room in self.rooms


def _ring_position(text: str) -> int:
    return int.from_bytes(md5(text.encode(), usedforsecurity=False).digest()[:4], "big")


def _java_text(queue: MessageQueue) -> str:
    """Return MessageQueue.toString(), which consistent hashing hashes."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


@final
class ConsistentHash:
    """A ring of MD5 hashes with *virtual_nodes* points per member: few queues move when a member joins or leaves."""

    name = "CONSISTENT_HASH"

    def __init__(self, virtual_nodes: int = 10) -> None:
        check_integer("virtual_nodes", virtual_nodes, 1)
        self.virtual_nodes = virtual_nodes

    def allocate(
        self, group: str, member: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if member not in members:
            return []
        ring = {_ring_position(f"{name}-{node}"): name for name in members for node in range(self.virtual_nodes)}
        points = sorted(ring)
        if not points:
            return []
        return [
            queue
            for queue in queues
            if ring[points[bisect_left(points, _ring_position(_java_text(queue))) % len(points)]] == member
        ]


@final
class MachineRoomNearby:
    """Shares each room's queues among the members there, and the queues of empty rooms among all."""

    def __init__(
        self, within: Allocation, queue_room: Callable[[MessageQueue], str], member_room: Callable[[str], str]
    ) -> None:
        self.within = within
        self.queue_room = queue_room
        self.member_room = member_room
        self.name = f"MACHINE_ROOM_NEARBY-{within.name}"

    def allocate(
        self, group: str, member: str, queues: Sequence[MessageQueue], members: Sequence[str]
    ) -> list[MessageQueue]:
        if member not in members:
            return []
        queue_rooms: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            queue_rooms.setdefault(self.queue_room(queue), []).append(queue)
        member_rooms: dict[str, list[str]] = {}
        for name in members:
            member_rooms.setdefault(self.member_room(name), []).append(name)
        room = self.member_room(member)
        near_queues = queue_rooms.pop(room, [])
        allocated_queues = self.within.allocate(group, member, near_queues, member_rooms[room]) if near_queues else []
        for other_room in sorted(queue_rooms):
            if other_room not in member_rooms:
                allocated_queues += self.within.allocate(group, member, queue_rooms[other_room], members)
        return allocated_queues
