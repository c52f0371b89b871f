"""Shared groups, most of which find messages by name, get each message until it is acknowledged, whatever happens.

``MARTLET_FOUND_SEEDS`` runs more random stories.
"""

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from errno import ENOSPC
from random import Random

import pytest
import trio
from tests.delivery.pushing import LINES, broker_in_memory, told
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.delivery.feed import Feed
from martlet.delivery.routing.selection import Selection
from martlet.delivery.subscriptions import Delivery
from martlet.errors import Refused
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues import finder, group_source
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message
from martlet.runtime.steps import finish_now
from martlet.settings import DeliveryConfig
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import ManualClock

SEEDS = range(int(os.environ.get("MARTLET_FOUND_SEEDS", "12")))
POLICY = GroupPolicy("named")
QUEUES = 3
NAMES = {
    "a/#": ("a", "a/x", "a/y/z"),
    "+/x": ("a/x", "b/x"),
    "b/x": ("b/x",),
    "none/+": (),
    "all": ("a", "a/x", "a/y/z", "b/x", "c", ""),  # a group that reads its queues
}
ACTIONS = (
    "publish",
    "gap",
    "join",
    "leave",
    "collect",
    "ack",
    "nack",
    "forget",
    "look",
    "save",
    "roll",
    "stop",
    "kill",
)
WEIGHTS = (14, 8, 4, 3, 10, 8, 3, 1, 2, 1, 1, 1, 1)


def selection(topic_filter: str) -> Selection:
    return Selection(topic_filter, None, lambda record: (record.property("TAGS") or "") in NAMES[topic_filter])


class Group:
    """What a group has to get: by its body, whether a message is held by which member."""

    def __init__(self) -> None:
        self.wanted: dict[str, Member | None] | None = None
        self.members: list[Member] = []
        # Where the messages are that members hold.
        self.places: dict[str, tuple[int, int]] = {}


class Story:
    """A broker that is stopped and killed, and what its groups must get."""

    def __init__(self, seed: int, flush: str) -> None:
        self.random = Random(seed)
        self.flush = flush
        self.disk = FakeDisk()
        self.groups = {topic_filter: Group() for topic_filter in NAMES}
        self.published = 0
        self.seen = 0
        self.unwritten: list[str] = []  # published since the last commit
        self.written: dict[str, set[str] | None] = dict.fromkeys(NAMES)  # what each group had to get at that time

    @asynccontextmanager
    async def life(self) -> AsyncIterator[tuple[Broker, Feed]]:
        self.disk.cached = self.random.random() < 0.5
        config = DeliveryConfig(lease_window=4, share_memory_s=self.random.choice((0, 600)))
        sizes = {"segment_bytes": 1 << 14, "page_bytes": 512, "cache_bytes": 1 << 12}
        async with broker_in_memory(self.disk, config, ManualClock(), flush=self.flush, **sizes) as broker:
            for topic in ("t", "u"):
                broker.topics.ensure(topic, QUEUES)
            yield broker, broker.cursors.open(["t", "u"])

    async def live(self) -> None:
        """Do random things until the broker stops."""
        killed: FakeDisk | None = None
        async with self.life() as (broker, feed):
            while True:
                (action,) = self.random.choices(ACTIONS, WEIGHTS)
                if action == "full" and await self.fail(broker):
                    killed = self.disk.after_power_cut(Cut.KILLED, self.random)
                    found = self.written
                    break
                if action == "stop":
                    await self.settle(broker)
                    if self.random.random() < 0.5:
                        killed = self.disk.after_power_cut(Cut.KILLED, self.random)
                    found = self.written
                    break
                if action != "full":
                    await self.act(broker, feed, action)
        self.disk = killed if killed is not None else self.disk
        for topic_filter, group in self.groups.items():
            wanted = found[topic_filter]
            group.members, group.places = [], {}
            group.wanted = dict.fromkeys(wanted) if wanted is not None else None

    async def settle(self, broker: Broker) -> None:
        broker.store.committer.commit()
        self.unwritten.clear()
        self.written = {
            topic_filter: set(group.wanted) if group.wanted is not None else None
            for topic_filter, group in self.groups.items()
        }
        await broker.store.flusher.flush()
        await wait_all_tasks_blocked()

    async def fail(self, broker: Broker) -> bool:
        """Let a commit fail because the disk is full; return whether the broker is killed then."""
        self.publish(broker)
        self.disk.free_bytes = 0
        self.disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            broker.store.committer.commit()
        for group in self.groups.values():
            if group.wanted is not None:
                group.wanted = {body: held for body, held in group.wanted.items() if body not in self.unwritten}
        self.unwritten.clear()
        self.disk.free_bytes = None
        if self.random.random() < 0.5:
            return True
        await trio.sleep(100)  # until the store accepts writes again
        await self.settle(broker)
        return False

    async def act(self, broker: Broker, feed: Feed, action: str) -> None:
        topic_filter = self.random.choice(list(NAMES))
        group = self.groups[topic_filter]
        if action == "publish":
            self.publish(broker)
        elif action == "gap":
            await self.settle(broker)
        elif action == "join":
            group.members.append(self.join(broker, feed, topic_filter))
            group.wanted = {} if group.wanted is None else group.wanted
        elif action == "look":
            broker.shared_groups.upkeep._check_positions_at = -math.inf
            broker.shared_groups.upkeep._work.set()
            await wait_all_tasks_blocked()
        elif action == "save":
            await broker.projections.snapshots.write(broker.projections._driven[0])
        elif action == "roll":
            with suppress(Refused):  # while notes are not applied
                finish_now(broker.shared_groups.state.roll(0, broker.store.readable))
        elif action == "delete":
            await self.delete(broker)
        elif action == "forget":
            finish_now(broker.shared_groups.forget_groups(POLICY, [topic_filter]))
            if not group.members:
                group.wanted = None
        elif group.members:
            await self.use(group, action, self.random.choice(group.members))

    async def delete(self, broker: Broker) -> None:
        """Delete the topic, and create it again."""
        await self.settle(broker)
        broker.topics.delete("t")
        for group in self.groups.values():
            assert all(member.group.gone for member in group.members)
            if self.random.random() < 0.5:
                for member in group.members:
                    member.leave()
            group.members, group.wanted = [], None
        broker.topics.ensure("t", QUEUES)
        await self.settle(broker)

    def join(self, broker: Broker, feed: Feed, topic_filter: str) -> Member:
        return broker.shared_groups.join(
            RecordingPeer(),
            "t",
            topic_filter,
            LINES,
            Membership(
                lease_s=math.inf,
                credit=self.random.choice((0, 1, 3, 100)),
                selection=selection(topic_filter),
                names=MessageSelection(feed, topic_filter) if topic_filter != "all" else None,
            ),
            POLICY,
        )

    def publish(self, broker: Broker) -> None:
        for _ in range(self.random.randrange(1, 6)):
            self.published += 1
            name, body = self.random.choice(NAMES["all"]), f"{self.published}"
            properties = f"TAGS\x01{name}\x02".encode() if name else b""
            topic = self.random.choice("ttu")
            broker.publish(Message(topic, body.encode(), properties, self.random.randrange(QUEUES)))
            self.unwritten.append(body)
            for topic_filter, group in self.groups.items():
                if topic == "t" and name in NAMES[topic_filter] and group.wanted is not None:
                    group.wanted[body] = None

    async def use(self, group: Group, action: str, member: Member) -> None:
        assert group.wanted is not None
        if action == "collect":
            if self.random.random() < 0.3:
                member.credit += 2
            await self.collect(group, member)
        elif action == "leave":
            group.members.remove(member)
            member.leave()
            group.wanted = {body: None if holder is member else holder for body, holder in group.wanted.items()}
        held = [body for body, holder in group.wanted.items() if holder is member]
        for body in self.random.sample(held, min(len(held), 2)):
            if action == "ack":
                assert member.ack(*group.places[body])
                del group.wanted[body]
            elif action == "nack":
                assert member.nack(*group.places[body])
                group.wanted[body] = None

    async def collect(self, group: Group, member: Member) -> int:
        """Collect what there is, and return how many messages came."""
        peer, came = member.peer, 0
        assert isinstance(peer, RecordingPeer)
        assert group.wanted is not None
        peer.wakes = 1
        while peer.wakes or peer.started:
            await peer.run_started()
            peer.wakes = 0
            came += sum(self.note(group, member, delivery) for delivery in member.collect(200))
            await wait_all_tasks_blocked()
        return came

    def note(self, group: Group, member: Member, delivery: Delivery) -> int:
        assert group.wanted is not None
        for line in told([delivery]):
            queue_id, offset, body = line.split(":")
            assert body in group.wanted, "it was acknowledged, or is for others"
            assert group.wanted[body] is None, "another member holds it"
            group.wanted[body] = member
            group.places[body] = int(queue_id), int(offset)
        return delivery.count

    async def end(self) -> None:
        """Let a new member of each group get what is left."""
        async with self.life() as (broker, feed):
            await self.settle(broker)
            for topic_filter, group in self.groups.items():
                expected = set(group.wanted or ())
                group.wanted = dict.fromkeys(expected)
                member = self.join(broker, feed, topic_filter)
                while group.wanted:
                    member.credit = 100
                    await trio.sleep(10)  # the longest pause after a failure is over
                    await self.collect(group, member)
                    held = [body for body, holder in group.wanted.items() if holder is not None]
                    assert held, f"{topic_filter} misses {sorted(group.wanted, key=int)}"
                    self.seen += len(held)
                    for body in held:
                        assert member.ack(*group.places[body])
                        del group.wanted[body]
                    await self.settle(broker)


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_group_gets_all_messages_of_its_names_until_they_are_acknowledged(
    seed: int, flush: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(finder, "PENDING_BYTES", 300)
    monkeypatch.setattr(group_source, "FOUND_MAX", 3)
    monkeypatch.setattr(group_source, "REACH_BYTES", 100)
    monkeypatch.setattr(group_source, "REACH_BYTES_AT_END", 100)
    story = Story(seed, flush)
    for _ in range(4):
        await story.live()
    await story.end()
    assert story.published > 0
