"""Shared groups that nobody uses any more go, with topics that were created for them, and nobody misses anything."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio
from msgspec.structs import replace
from tests.broker.calls import Calls
from tests.delivery.pushing import LINES, publish, told
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.app import saving
from martlet.broker import Broker
from martlet.contracts import Identity
from martlet.delivery.feed import Feed
from martlet.delivery.subscriptions import from_earliest
from martlet.errors import Refused
from martlet.groups.journal.journal_codec import Key
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import AUTO_DELETE, OWNS_TOPIC, GroupPolicy
from martlet.message import Message
from martlet.runtime.steps import finish_now
from martlet.settings import DeliveryConfig
from martlet.state import Projection
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import RecordingPeer, serving
from martlet.testing.stores import ManualClock, small_config

POLICY = GroupPolicy("tested")
AFTER_S = 100
PERSONAL = OWNS_TOPIC | AUTO_DELETE


@asynccontextmanager
async def broker_of(disk: FakeDisk | None = None, delivery: DeliveryConfig | None = None) -> AsyncIterator[Broker]:
    """A broker that forgets groups of `POLICY` whose names do not begin with ``kept``."""
    disk = disk or FakeDisk()
    disk.cached = True

    def expire(broker: Broker) -> Sequence[Projection]:
        broker.shared_groups.unused.expire("tested", AFTER_S, lambda group: not group.startswith("kept"))
        return ()

    async with serving(
        Path("/data"),
        disk=disk,
        delivery=delivery,
        clock=ManualClock(),
        store=small_config(flush="async"),
        projections=expire,
    ) as running:
        yield running.broker


def join(
    broker: Broker,
    topic: str = "t",
    group: str = "g",
    marks: int = 0,
    user: str | None = None,
    feed: Feed | None = None,
) -> Member:
    if broker.topics.get(topic) is None:
        broker.topics.ensure(topic, 1)
    names = MessageSelection(feed, "a/#") if feed is not None else None
    return broker.shared_groups.join(
        RecordingPeer(),
        topic,
        group,
        LINES,
        Membership(lease_s=30, credit=9, start=from_earliest, marks=marks, names=names),
        POLICY,
        user=user,
    )


async def settle(broker: Broker) -> None:
    """Commit, and wait until nothing is left to do."""
    for _ in range(3):
        broker.store.committer.commit()
        await wait_all_tasks_blocked()


async def pass_time(broker: Broker) -> None:
    """Wait until unused groups have been looked at."""
    await settle(broker)
    await trio.sleep(AFTER_S + 1)
    await settle(broker)


def known(broker: Broker) -> list[str]:
    """Return the groups with a state, each with its topic."""
    state = broker.shared_groups.state.known
    return sorted(f"{topic}/{group}" for topic in state.topics() for _, group in state.groups(topic))


@pytest.mark.parametrize("marks", [0, OWNS_TOPIC])
async def test_a_group_in_which_nothing_waits_is_forgotten_after_a_while(autojump_clock: MockClock, marks: int) -> None:
    async with broker_of() as broker:
        join(broker, marks=marks).leave()
        await settle(broker)
        await trio.sleep(AFTER_S - 1)
        assert known(broker) == ["t/g"]
        await pass_time(broker)
        assert known(broker) == []
        assert len(broker.shared_groups.state) == 0
        assert (broker.topics.get("t") is None) is (marks == OWNS_TOPIC)


async def test_a_group_with_members_or_of_another_kind_stays(autojump_clock: MockClock) -> None:
    async with broker_of() as broker:
        join(broker, "t", "used", OWNS_TOPIC)
        for group in ("kept", "back"):
            join(broker, group, group, OWNS_TOPIC).leave()
        await settle(broker)
        join(broker, "back", "back")
        await pass_time(broker)
        assert known(broker) == ["back/back", "kept/kept", "t/used"]


async def test_what_waits_and_what_was_consumed_are_not_forgotten(autojump_clock: MockClock) -> None:
    async with broker_of() as broker:
        for topic in ("waiting", "held", "consumed"):
            member = join(broker, topic, marks=OWNS_TOPIC)
            publish(broker, topic, 0, b"1")
            if topic != "waiting":
                assert told(member.collect(1 << 20)) == ["0:0:1"]
            if topic == "consumed":
                assert member.ack(0, 0)
            member.leave()
        await pass_time(broker)
        assert known(broker) == ["consumed/g", "held/g", "waiting/g"]
        assert told(join(broker, "consumed").collect(1 << 20)) == []
        assert told(join(broker, "waiting").collect(1 << 20)) == ["0:0:1"]
        assert told(join(broker, "held").collect(1 << 20)) == ["0:0:1"]


async def test_a_group_goes_once_its_messages_have_expired(autojump_clock: MockClock) -> None:
    async with broker_of() as broker:
        member = join(broker, marks=OWNS_TOPIC)
        publish(broker, "t", 0, b"1", b"2")
        assert member.collect(1)
        member.leave()
        await pass_time(broker)
        queue = broker.store.queue("t", 0)
        queue.expire_to(2)
        await pass_time(broker)
        assert (known(broker), broker.topics.get("t")) == ([], None)


@pytest.mark.parametrize("is_settled", [True, False])
async def test_a_personal_group_goes_with_its_last_member(autojump_clock: MockClock, is_settled: bool) -> None:
    async with broker_of() as broker:
        one, two = join(broker, marks=PERSONAL), join(broker)
        publish(broker, "t", 0, b"1")
        assert told(one.collect(1 << 20)) == ["0:0:1"]
        if is_settled:
            assert one.ack(0, 0)
        one.leave()
        await settle(broker)
        assert known(broker) == ["t/g"]
        two.leave()
        await settle(broker)
        assert (broker.topics.get("t") is None) is is_settled
        if not is_settled:  # a client that comes back soon gets what waits
            three = join(broker)
            assert told(three.collect(1 << 20)) == ["0:0:1"]
            three.leave()
        await pass_time(broker)
        assert (known(broker), broker.topics.get("t")) == ([], None)


def _with_offsets(broker: Broker) -> None:
    broker.groups.offsets.commit("rocketmq", "t", 0, 0)


def _with_subscription(broker: Broker) -> None:
    broker.subscriptions.open(RecordingPeer(), "t", LINES)


def _with_another_group(broker: Broker) -> None:
    join(broker, "t", "kept").leave()


def _changed(broker: Broker) -> None:
    broker.topics.update("t", 2, 2)


def _with_delayed(broker: Broker) -> None:
    broker.queue_for_later(Message("t", b"later", b"", 0))


USES = [_with_offsets, _with_subscription, _with_another_group, _changed, _with_delayed]


@pytest.mark.parametrize("marks", [OWNS_TOPIC, PERSONAL])
@pytest.mark.parametrize("use", USES)
async def test_a_topic_that_is_used_otherwise_stays(
    autojump_clock: MockClock, use: Callable[[Broker], None], marks: int
) -> None:
    async with broker_of() as broker:
        member = join(broker, marks=marks)
        await settle(broker)
        use(broker)
        member.leave()
        await pass_time(broker)
        # The owner of the topic is remembered as long as somebody else may leave it.
        assert ("t/g" in known(broker)) is (use in (_with_subscription, _with_another_group))
        # What is delayed for a personal queue goes with it.
        assert (broker.topics.get("t") is None) is (use is _with_delayed and marks == PERSONAL)


@pytest.mark.parametrize("marks", [0, AUTO_DELETE])
async def test_a_group_that_finds_names_goes_if_nothing_can_wait(autojump_clock: MockClock, marks: int) -> None:
    async with broker_of() as broker:
        broker.topics.ensure("t", 4)
        feed = broker.cursors.open(["t"])
        join(broker, "t", "idle", marks, feed=feed).leave()
        await pass_time(broker)
        assert known(broker) == []
        join(broker, "t", "busy", marks, feed=feed).leave()
        publish(broker, "t", 2, b"1", properties=b"TAGS\x01a/1\x02")
        await pass_time(broker)
        assert known(broker) == ([] if marks else ["t/busy"])
        assert broker.topics.get("t") is not None


@pytest.mark.parametrize("is_killed", [True, False])
async def test_marks_and_deletions_survive_every_stop(autojump_clock: MockClock, is_killed: bool) -> None:
    disk = FakeDisk()
    async with broker_of(disk) as broker:
        join(broker, "gone", marks=PERSONAL).leave()
        for topic, marks in (("personal", PERSONAL), ("owned", OWNS_TOPIC), ("shown", OWNS_TOPIC), ("plain", 0)):
            join(broker, topic, marks=marks)
        await settle(broker)
        broker.topics.update("shown", 2, 2)
        publish(broker, "personal", 0, b"waits")
        await settle(broker)
        assert broker.topics.get("gone") is None
        saving.save(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(0))
    async with broker_of(killed if is_killed else disk) as broker:
        assert known(broker) == ["owned/g", "personal/g", "plain/g", "shown/g"]
        await pass_time(broker)
        assert known(broker) == []
        names = "gone", "personal", "owned", "shown", "plain"
        assert [name for name in names if broker.topics.get(name)] == ["shown", "plain"]


async def test_unused_groups_make_room_for_others(autojump_clock: MockClock) -> None:
    async with broker_of(delivery=DeliveryConfig(share_queues_max=3)) as broker:
        for number in range(3):
            join(broker, f"t{number}", marks=OWNS_TOPIC).leave()
        await settle(broker)
        publish(broker, "t0", 0, b"waits")
        member = join(broker, "t3")
        assert known(broker) == ["t0/g", "t3/g"]
        assert [broker.topics.get(f"t{number}") is not None for number in range(3)] == [True, False, False]
        join(broker, "t4")
        with pytest.raises(Refused, match="share_queues_max is 3"):
            join(broker, "t5")
        member.leave()


async def test_the_topic_that_needs_room_stays(autojump_clock: MockClock) -> None:
    async with broker_of(delivery=DeliveryConfig(share_queues_max=1)) as broker:
        join(broker, marks=OWNS_TOPIC).leave()
        await settle(broker)
        with pytest.raises(Refused, match="share_queues_max is 1"):
            join(broker, group="other")
        assert known(broker) == ["t/g"]
        assert broker.topics.get("t") is not None


async def test_unused_topics_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker_of() as broker:
        monkeypatch.setattr("martlet.tables.topics.TOPICS_MAX", len(broker.topics) + 2)
        join(broker, "t0", marks=OWNS_TOPIC).leave()
        join(broker, "t1", marks=OWNS_TOPIC)
        await settle(broker)
        join(broker, "t2")
        assert broker.topics.get("t0") is None
        with pytest.raises(Refused, match="the most a broker keeps"):
            join(broker, "t3")


async def test_one_user_does_not_use_up_the_room_of_others() -> None:
    config = replace(DeliveryConfig(), shares_max=4, shares_user_max=2)
    async with broker_of(delivery=config) as broker:
        members = [join(broker, f"t{number}", user="ann") for number in range(2)]
        with pytest.raises(Refused, match=r"user 'ann' has 2 shared groups in use; delivery.shares_user_max is 2"):
            join(broker, "t2", user="ann")
        join(broker, "t0", user="bob")  # there already
        join(broker, "t2", user="bob")
        members[1].leave()
        await settle(broker)
        join(broker, "t3", user="ann")
        anonymous = broker.gate(Identity())
        anonymous.join(RecordingPeer(), "t3", "other", LINES, Membership(lease_s=30), POLICY)
        with pytest.raises(Refused, match="4 shared groups are in use"):
            anonymous.join(RecordingPeer(), "t3", "another", LINES, Membership(lease_s=30), POLICY)


async def test_groups_that_a_user_has_begun_count_until_they_are_forgotten(autojump_clock: MockClock) -> None:
    async with broker_of(delivery=DeliveryConfig(share_queues_max=100, share_queues_user_max=5)) as broker:
        for topic in ("a", "b", "c"):
            broker.topics.ensure(topic, 2)
        publish(broker, "a", 0, b"waits")
        join(broker, "a", user="ann").leave()
        member = join(broker, "b", user="ann")
        with pytest.raises(Refused, match=r"user 'ann' has 4 queues of shared groups; delivery.share_queues_user_max"):
            join(broker, "c", user="ann")
        join(broker, "c", user="bob")
        join(broker, "c", user="ann")  # begun by bob
        member.leave()
        await settle(broker)
        join(broker, "c", "another", user="ann")  # that on topic b makes room
        assert known(broker) == ["a/g", "c/another", "c/g"]


async def calls_of_a_topic(groups: int) -> int:
    """Return how many functions are called when a topic is created, consumed and deleted beside *groups* others."""
    async with broker_of() as broker:
        for number in range(groups):
            join(broker, f"t{number}")
        await settle(broker)
        join(broker, "first", marks=PERSONAL).leave()
        await settle(broker)
        with Calls(lambda code: "/martlet/" in code.co_filename) as calls:
            join(broker, "last", marks=PERSONAL).leave()
            await settle(broker)
        assert broker.topics.get("last") is None
        return calls.count


async def test_a_topic_costs_the_same_beside_many_groups() -> None:
    few = await calls_of_a_topic(3)
    # A walk over the groups would cost 297 calls; the order in which Trio runs its tasks makes a difference of 67.
    assert 0 < await calls_of_a_topic(300) <= few + 150


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_topic_that_was_created_for_a_group_goes_though_nobody_ever_joined(
    autojump_clock: MockClock, is_killed: bool
) -> None:
    disk = FakeDisk()
    async with broker_of(disk) as broker:
        for name in ("empty", "used", "joined"):
            broker.shared_groups.begin(broker.topics.ensure(name, 2), "g", POLICY)
        publish(broker, "used", 1, b"1")
        member = join(broker, "joined")  # before its beginning is applied
        publish(broker, "joined", 1, b"2")
        assert told(member.collect(1 << 20)) == ["1:0:2"]
        await settle(broker)
        saving.save(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(0))
    async with broker_of(killed if is_killed else disk) as broker:
        await pass_time(broker)
        assert known(broker) == ["joined/g", "used/g"]
        assert broker.topics.get("empty") is None
        assert told(join(broker, "used").collect(1 << 20)) == ["1:0:1"]
        broker.store.queue("joined", 1).expire_to(1)
        await pass_time(broker)
        assert broker.topics.get("joined") is None


@pytest.mark.parametrize("is_open", [True, False])
async def test_marks_are_kept_when_old_notes_are_removed(is_open: bool) -> None:
    async with broker_of() as broker:
        member = join(broker, "t", "kept", PERSONAL)
        await settle(broker)
        if not is_open:
            member.leave()
            await settle(broker)
        end = broker.store.appended
        finish_now(broker.shared_groups.state.roll(0, end))
        await settle(broker)
        queue = broker.shared_groups.notes.stored(Key("tested", "kept", "t", 0))
        assert queue is not None
        assert queue.since >= end
        assert queue.marks == PERSONAL


async def test_topics_that_are_only_created_leave_room_for_groups() -> None:
    async with broker_of(delivery=DeliveryConfig(share_queues_max=4)) as broker:
        for number in range(4):
            broker.shared_groups.begin(broker.topics.ensure(f"t{number}", 1), "g", POLICY)
        assert known(broker) == ["t0/g", "t1/g"]
        for number in range(2, 4):
            join(broker, f"t{number}")
