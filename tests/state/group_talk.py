"""What the tests of shared groups through restarts share: a broker that is stopped, cut or killed, and who consumes."""

import math
from collections.abc import Iterable

from tests.delivery.pushing import LINES, told

from martlet.broker import Broker
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import Delivery, from_earliest
from martlet.groups.journal.journal_codec import Key, LeaseState
from martlet.groups.journal.state import GroupState
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.testing.peers import RecordingPeer

# offset -> generation
Handles = dict[int, int]

POLICY = GroupPolicy("tested")


def join(
    broker: Broker,
    selection: Selection = EVERYTHING,
    names: MessageSelection | None = None,
    *,
    credit: int = 100,
    lease_s: float = 30,
    group: str = "gruppe ä",
    keep: str = "",
) -> Member:
    """A member of a group that is no consumer group."""
    return broker.shared_groups.join(
        RecordingPeer(),
        "t",
        group,
        LINES,
        Membership(
            lease_s=lease_s, credit=credit, start=from_earliest, holder=keep or None, selection=selection, names=names
        ),
        POLICY,
    )


def handles(deliveries: Iterable[Delivery]) -> Handles:
    return {offset: delivery.generation for delivery in deliveries for offset in delivery.offsets}


def collect(member: Member) -> tuple[list[str], list[Delivery]]:
    found = member.collect(1 << 20)
    return [line.split(":")[2] for line in told(found)], found


async def drain(member: Member) -> tuple[list[str], list[Delivery]]:
    """Collect until nothing comes; reads in threads are run in between."""
    bodies: list[str] = []
    deliveries: list[Delivery] = []
    peer = member.peer
    assert isinstance(peer, RecordingPeer)
    while True:
        more, found = collect(member)
        bodies += more
        deliveries += found
        if peer.started:
            await peer.run_started()
        elif not found:
            return bodies, deliveries


def known(state: GroupState, *, group: str = "gruppe ä") -> tuple[int, dict[int, LeaseState]]:
    queue = state.get(Key("tested", group, "t", 0))
    return (queue.next, dict(queue.leases)) if queue is not None else (0, {})


NEVER = math.inf
