"""Many shared groups: what happens in one of them costs the same, however many others there are."""

import pytest
from tests.broker.calls import Calls
from tests.delivery.pushing import LINES, publish, told
from tests.groups.test_shared_groups import Competitor, broker_in_memory
from trio.lowlevel import checkpoint
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.delivery.feed import Feed
from martlet.delivery.subscriptions import from_earliest
from martlet.errors import Refused
from martlet.groups.journal.journal_writer import DROPS_A_TURN
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.runtime.steps import finish_now
from martlet.settings import DeliveryConfig
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer

POLICY = GroupPolicy("tested")


def counted_calls() -> Calls:
    """Return a counter of calls of functions of the broker's delivery."""
    return Calls(lambda code: "/martlet/delivery/" in code.co_filename)


def noted(broker: Broker) -> int:
    """How many queues have something to note with the next commit."""
    return len(broker.shared_groups.notes._pending)


@pytest.mark.parametrize("how", ["topic deleted", "forgotten", "restart"])
async def test_very_many_groups_go_in_turns_and_come_back_with_new_messages_at_once(how: str) -> None:
    policy, disk, groups = POLICY, FakeDisk(), DROPS_A_TURN // 8 + 20
    disk.cached = True

    def join(broker: Broker, number: int) -> Member:
        return broker.shared_groups.join(
            RecordingPeer(), "t", f"g{number}", LINES, Membership(lease_s=30, credit=9, start=from_earliest), policy
        )

    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 8)
        publish(broker, "t", 7, b"old", b"older")
        for number in range(groups):
            member = join(broker, number)
            member.collect(1 << 20)
            assert member.ack(7, 0)
            member.leave()
        broker.store.committer.commit()
        assert len(broker.shared_groups.state) == groups * 8
        if how == "restart":
            broker.topics.delete("t")
    async with broker_in_memory(disk) as broker:
        if how == "forgotten":
            finish_now(broker.shared_groups.forget_groups(policy, [f"g{number}" for number in range(groups)]))
        elif how == "topic deleted":
            broker.topics.delete("t")
        await checkpoint()
        assert noted(broker) <= 2 * DROPS_A_TURN
        assert list(broker.shared_groups.groups_of("tested")) == []
        broker.topics.ensure("t", 8)
        member = join(broker, groups - 1)
        publish(broker, "t", 7, b"new")
        came = told(member.collect(1 << 20))
        assert came == (["7:0:old", "7:1:older", "7:2:new"] if how == "forgotten" else ["7:0:new"])
        await wait_all_tasks_blocked()
        broker.store.committer.commit()
        assert len(broker.shared_groups.state) == 8
        assert not broker.shared_groups.notes.has_undropped


async def calls_of_a_return(groups: int) -> int:
    """Return how many functions are called when a message is given back, and again when a member leaves."""
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        members = [Competitor(broker, group=f"G{number}", credit=1) for number in range(groups)]
        publish(broker, "t", 0, b"a")
        one = members[groups // 2]
        assert one.turn() == ["0:0:a"]
        await wait_all_tasks_blocked()
        with counted_calls() as calls:
            assert one.member.nack(0, 0)
            one.member.leave()
            await wait_all_tasks_blocked()
        return calls.count


async def test_a_message_that_is_given_back_costs_the_same_beside_many_groups(autojump_clock: MockClock) -> None:
    assert 0 < await calls_of_a_return(300) <= await calls_of_a_return(3) + 10


async def calls_of_a_publish(groups: int, *, is_wanted: bool) -> int:
    """Return how many functions are called when a message is published that one group takes, or none."""
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 8)
        feed, peers = broker.cursors.open(["t"]), [RecordingPeer() for _ in range(groups)]
        members = [
            broker.shared_groups.join(
                peer,
                "t",
                f"a{i}/+",
                LINES,
                Membership(lease_s=30, credit=9, names=MessageSelection(feed, f"a{i}/+")),
                POLICY,
            )
            for i, peer in enumerate(peers)
        ]
        await wait_all_tasks_blocked()
        for member, peer in zip(members, peers, strict=True):
            assert not member.collect(1 << 20)
            peer.wakes = 0
        name = f"a{groups // 2}/x" if is_wanted else "other"
        for properties in (b"TAGS\x01a0/x\x02", f"TAGS\x01{name}\x02".encode()):  # the first one fills caches
            with counted_calls() as calls:
                publish(broker, "t", 3, b"x", properties=properties)
        assert sum(peer.wakes for peer in peers) == 1 + is_wanted
        assert told(members[groups // 2].collect(1 << 20)) == (["3:1:x"] if is_wanted else [])
        return calls.count


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_message_costs_what_its_matches_cost_and_not_the_groups(is_wanted: bool) -> None:
    few = await calls_of_a_publish(3, is_wanted=is_wanted)
    assert 0 < await calls_of_a_publish(300, is_wanted=is_wanted) <= few + 10


async def test_groups_that_come_back_together_read_the_log_once() -> None:
    disk, groups = FakeDisk(), 50
    disk.cached = True

    def join(broker: Broker, feed: Feed, number: int) -> Member:
        return broker.shared_groups.join(
            RecordingPeer(),
            "t",
            f"{number}/#",
            LINES,
            Membership(lease_s=30, names=MessageSelection(feed, f"{number}/#")),
            POLICY,
        )

    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 4)
        feed = broker.cursors.open(["t"])
        for member in [join(broker, feed, number) for number in range(groups)]:
            member.leave()
        for number in range(1000):
            publish(broker, "t", number % 4, b"x", properties=f"TAGS\x01{number % groups}/x\x02".encode())
        await wait_all_tasks_blocked()
        before = feed.catch_up.viewed
        members = [join(broker, feed, number) for number in range(groups)]
        await wait_all_tasks_blocked()
        assert feed.catch_up.viewed - before <= 1000 + 256  # a slice may be read again for those that join it late
        for member in members:
            member.credit = 100
            assert len(told(member.collect(1 << 20))) == 1000 // groups


async def test_a_group_without_members_holds_no_messages_and_finds_them_for_the_next_member() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        feed = broker.cursors.open(["t"])

        def join() -> Member:
            return broker.shared_groups.join(
                RecordingPeer(),
                "t",
                "g",
                LINES,
                Membership(lease_s=30, credit=9, names=MessageSelection(feed, "a/+")),
                POLICY,
            )

        one = join()
        publish(broker, "t", 0, b"held", properties=b"TAGS\x01a/1\x02")
        assert told(one.collect(1 << 20)) == ["0:0:held"]
        one.leave()
        publish(broker, "t", 0, b"later", properties=b"TAGS\x01a/2\x02")
        assert (len(feed), feed.pending_bytes) == (0, 0)
        two = join()
        await wait_all_tasks_blocked()
        assert broker.shared_groups.statistics()["shares"] == 1
        assert told(two.collect(1 << 20)) == ["0:0:held", "0:1:later"]


async def test_a_group_without_members_makes_room_for_another_one() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(shares_max=2)) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a", b"b")
        one, two = Competitor(broker, group="one", credit=1), Competitor(broker, group="two")
        assert one.turn() == ["0:0:a"]
        with pytest.raises(Refused, match="2 shared groups are in use"):
            Competitor(broker, group="three")
        one.member.leave()
        broker.store.committer.commit()
        assert Competitor(broker, group="three").turn() == ["0:0:a", "0:1:b"]
        two.member.leave()
        broker.store.committer.commit()
        assert Competitor(broker, group="one").turn() == ["0:0:a", "0:1:b"]


async def test_a_group_that_takes_some_names_counts_with_all_queues() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(share_queues_max=20)) as broker:
        broker.topics.ensure("t", 8)
        feed = broker.cursors.open(["t"])

        def join(group: str) -> Member:
            names = MessageSelection(feed, "#")
            return broker.shared_groups.join(
                RecordingPeer(), "t", group, LINES, Membership(lease_s=30, names=names), POLICY
            )

        for group in ("one", "two", "one"):
            join(group)
        with pytest.raises(Refused, match="16 queues of shared groups are in use"):
            join("three")


async def test_groups_count_with_all_queues_of_all_their_topics() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(share_queues_max=30)) as broker:
        for topic in ("t", "u"):
            broker.topics.ensure(topic, 8)
        feed = broker.cursors.open(["t", "u"])

        def join(group: str, topic: str) -> Member:
            names = MessageSelection(feed, "#")
            return broker.shared_groups.join(
                RecordingPeer(), topic, group, LINES, Membership(lease_s=30, names=names), POLICY
            )

        for group, topic in (("one", "t"), ("one", "u"), ("two", "t"), ("one", "u")):
            join(group, topic)
        with pytest.raises(Refused, match="24 queues of shared groups are in use"):
            join("two", "u")
