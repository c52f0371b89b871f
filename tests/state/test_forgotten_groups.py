"""A shared group that is forgotten has nothing of what it had before, and whoever joins then gets all that follows."""

import errno
import math
from collections.abc import Iterator
from itertools import permutations, product
from random import Random
from typing import Any

import pytest
import trio
from tests.delivery.pushing import LINES, broker_in_memory
from tests.groups.test_shared_groups import Competitor
from tests.state.group_talk import POLICY, collect, drain
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.delivery.subscriptions import from_tail
from martlet.errors import Refused
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.message import Message
from martlet.runtime.steps import finish_now
from martlet.state.log_order import LogOrder
from martlet.tables.groups import Group
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import ManualClock

# What comes after an action, before the next one: nothing, a commit, or a commit and its flush.
SAME, WRITTEN, FLUSHED = range(3)
GAPS = sorted({*product((SAME, WRITTEN), repeat=3), *product((SAME, FLUSHED), repeat=3)})
ACTIONS = ("forget", "join", "publish", "ack")


def join(broker: Broker) -> Member:
    return broker.shared_groups.join(
        RecordingPeer(), "t", "g", LINES, Membership(lease_s=math.inf, credit=100, start=from_tail), POLICY
    )


async def store(broker: Broker, gap: int = FLUSHED) -> None:
    if gap != SAME:
        broker.store.committer.commit()
    if gap == FLUSHED:
        await broker.store.flusher.flush()


def publish(broker: Broker, *bodies: str) -> None:
    for body in bodies:
        broker.publish(Message("t", body.encode(), queue_id=0))


def broker_on(disk: FakeDisk) -> Any:
    disk.cached = True
    return broker_in_memory(disk, clock=ManualClock(), flush="sync")


class Story:
    """A group that has a message, and what becomes of it; ``wanted`` is what the group has to get, None without it."""

    def __init__(self, broker: Broker, *, at_once: bool) -> None:
        self.broker = broker
        self.at_once = at_once  # forget it whether it has members or not
        self.member: Member | None = None
        self.wanted: set[str] | None = {"old"}

    async def begin(self) -> None:
        self.broker.topics.ensure("t", 1)
        member = join(self.broker)
        publish(self.broker, "had", "old")
        await store(self.broker)
        assert collect(member)[0] == ["had", "old"]
        assert member.ack(0, 0)
        member.leave()
        await store(self.broker)

    def act(self, action: str) -> None:
        if action == "forget":
            self.forget()
        elif action == "join":
            self.member = join(self.broker)
            self.wanted = self.wanted or set()
        elif action == "publish":
            publish(self.broker, "new")
            if self.wanted is not None:
                self.wanted.add("new")
        elif self.member is not None:
            self.ack(self.member)

    def forget(self) -> None:
        if self.at_once:
            self.broker.shared_groups.forget("t", "g", POLICY)
            self.member = self.wanted = None
        else:
            finish_now(self.broker.shared_groups.forget_groups(POLICY, {"g"}))
            self.wanted = None if self.member is None else self.wanted

    def ack(self, member: Member) -> None:
        bodies, found = collect(member)
        assert self.wanted is not None
        assert set(bodies) <= self.wanted
        self.wanted -= set(bodies)
        for delivery in found:
            for offset in delivery.offsets:
                assert member.ack(delivery.queue_id, offset)


async def check(broker: Broker, wanted: set[str] | None) -> None:
    member = join(broker)
    assert set((await drain(member))[0]) == (wanted or set())
    publish(broker, "after")
    await store(broker)
    assert (await drain(member))[0] == ["after"]


async def tell(order: tuple[str, ...], gaps: tuple[int, ...], end: str, *, at_once: bool) -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        story = Story(broker, at_once=at_once)
        await story.begin()
        for action, gap in zip(order, (*gaps, FLUSHED), strict=True):
            story.act(action)
            await store(broker, gap)
        if end == "another member":
            if story.member is not None:
                story.member.leave()
            await check(broker, story.wanted)
            return
        if end == "snapshot":
            await broker.projections.snapshots.write(broker.projections._driven[0])
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker_on(disk if end == "restart" else killed) as broker:
        await check(broker, story.wanted)


def stories() -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    return product(permutations(ACTIONS), GAPS)


@pytest.mark.parametrize("end", ["another member", "restart", "kill -9", "snapshot"])
async def test_a_forgotten_group_begins_anew_in_every_order_of_actions_and_commits(end: str) -> None:
    for number, (order, gaps) in enumerate(stories()):
        try:
            await tell(order, gaps, end, at_once=number % 2 == 0)
        except BaseException as error:
            error.add_note(f"{order}, gaps {gaps}")
            raise


@pytest.mark.parametrize("gap", [SAME, WRITTEN, FLUSHED])
@pytest.mark.parametrize("end", ["restart", "kill -9"])
async def test_a_topic_that_is_deleted_and_created_again_has_new_messages_for_its_groups(gap: int, end: str) -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        await Story(broker, at_once=True).begin()
        broker.topics.delete("t")
        await store(broker, gap)
        broker.topics.ensure("t", 1)
        publish(broker, "one", "two", "three")
        member = broker.shared_groups.join(
            RecordingPeer(), "t", "g", LINES, Membership(lease_s=math.inf, credit=100), POLICY
        )
        publish(broker, "four")
        await store(broker)
        assert collect(member)[0] == ["four"]
        assert member.ack(0, 3)
        publish(broker, "five")
        await store(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker_on(disk if end == "restart" else killed) as broker:
        broker.topics.ensure("t", 1)
        assert (await drain(join(broker)))[0] == ["five"]


@pytest.mark.parametrize("gap", [SAME, WRITTEN, FLUSHED])
async def test_a_consumer_group_that_is_deleted_and_created_again_gets_everything(gap: int) -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "one", "two")
        await store(broker)
        before = Competitor(broker)
        assert before.turn() == ["0:0:one", "0:1:two"]
        assert before.member.ack(0, 1)
        before.member.leave()
        await store(broker)
        broker.groups.delete("G", clean_offsets=True)
        await store(broker, gap)
        broker.groups.update(Group("G"))
        after = Competitor(broker, lease_s=math.inf)
        assert after.turn() == ["0:0:one", "0:1:two"]
        assert after.member.ack(0, 0)
        await store(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker_on(killed) as broker:
        assert await Competitor(broker).drain() == ["0:1:two"]


@pytest.mark.parametrize("joins", ["before it works again", "later", "never"])
async def test_a_group_stays_forgotten_although_the_commit_that_says_so_fails(
    autojump_clock: MockClock, joins: str
) -> None:
    disk = FakeDisk()
    async with broker_on(disk) as broker:
        await Story(broker, at_once=True).begin()
        finish_now(broker.shared_groups.forget_groups(POLICY, {"g"}))
        disk.free_bytes = 0
        disk.fail_next("write", errno.ENOSPC)
        with pytest.raises(Refused):
            broker.store.committer.commit()
        assert not list(broker.shared_groups.groups_of("tested"))
        if joins == "before it works again":
            join(broker)
        disk.free_bytes = None
        await trio.sleep(100)  # nothing else has to be stored meanwhile
        await store(broker)
        if joins == "later":
            join(broker)
            await store(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    async with broker_on(killed) as broker:
        assert len(broker.shared_groups.state) == (joins != "never")
        await check(broker, None)


async def test_a_group_stays_in_memory_until_its_state_is_applied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """After very many changes, projections are behind what is readable."""
    async with broker_on(FakeDisk()) as broker:
        broker.topics.ensure("t", 1)
        one = join(broker)
        publish(broker, "a", "b")
        await store(broker)
        assert collect(one)[0] == ["a", "b"]
        await store(broker)
        with monkeypatch.context() as patch:
            patch.setattr(LogOrder, "next_run_nowait", lambda order: None)
            assert one.ack(0, 0)
            assert one.ack(0, 1)
            await store(broker)
            one.leave()
            assert collect(join(broker))[0] == []
