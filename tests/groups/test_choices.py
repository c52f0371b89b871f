"""Members that take only some messages: each message goes to one that takes it, or waits for one."""

import math
import random
from collections.abc import Callable

import pytest
from tests.delivery.pushing import LINES, broker_in_memory, told
from tests.groups.test_runs import cached_disk
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.delivery.subscriptions import from_earliest
from martlet.errors import LocalProtocolError
from martlet.groups.handing_out.receivers import PARKED_MAX
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message
from martlet.records.layout import RecordView
from martlet.testing.peers import RecordingPeer

QUEUE = GroupPolicy("test", leaving_counts=False)


def of_colour(*colours: str) -> Callable[[RecordView], bool]:
    return lambda record: record.property(b"colour") in colours


def join(broker: Broker, *colours: str, credit: int = 100, lease_s: float = math.inf) -> Member:
    """Return a member that takes messages of these *colours*; without any, all messages."""
    takes = of_colour(*colours) if colours else None
    return broker.shared_groups.join(
        RecordingPeer(),
        "t",
        "G",
        LINES,
        Membership(lease_s=lease_s, credit=credit, start=from_earliest, takes=takes),
        QUEUE,
    )


def publish(broker: Broker, *colours: str) -> None:
    for colour in colours:
        broker.publish(Message("t", colour.encode(), b"colour\x01%b\x02" % colour.encode(), 0))
    broker.store.committer.commit()


def take(member: Member) -> list[str]:
    return told(member.collect(1 << 20))


async def test_each_message_goes_to_a_member_that_takes_it() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        red, blue = join(broker, "red"), join(broker, "blue", "green", credit=2)
        publish(broker, "red", "blue", "red", "green", "blue")
        found = red.collect(1 << 20)
        assert [(told([each]), each.count) for each in found] == [(["0:0:red", "0:2:red"], 2)]
        assert (red.credit, list(found[0].offsets), found[0].frames) == (98, [0, 2], [b"0:0:red\n", b"0:2:red\n"])
        positions = [broker.store.queues.position_now(broker.store.queue("t", 0), offset) for offset in (0, 2)]
        assert list(found[0].positions) == positions
        assert take(blue) == ["0:1:blue", "0:3:green"]
        assert take(blue) == []
        assert list(blue.ack_all(0, [1, 3])) == [1, 3]
        assert take(blue) == ["0:4:blue"]
        assert list(red.ack_all(0, [0, 1, 2])) == [0, 2]


async def test_what_nobody_takes_waits_for_a_member_that_does() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        red = join(broker, "red")
        publish(broker, "green", "red", "blue", "blue", "red")
        assert take(red) == ["0:1:red", "0:4:red"]
        green = join(broker, "green")
        found = green.collect(1 << 20)
        assert (told(found), found[0].delivery) == (["0:0:green"], 1)
        assert take(red) == []
        publish(broker, "yellow", "red")
        assert take(red) == ["0:6:red"]
        everything = join(broker)
        assert take(everything) == ["0:2:blue", "0:3:blue", "0:5:yellow"]
        broker.store.committer.commit()
        assert broker.shared_groups.unsettled == 7


async def test_what_waits_does_so_over_a_restart_and_counts_as_never_delivered() -> None:
    disk = cached_disk()
    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 1)
        red = join(broker, "red")
        publish(broker, "green", "red", "blue", "red", "green")
        assert len(take(red)) == 2
        red.ack(0, 1)
    for _ in range(2):
        async with broker_in_memory(disk) as broker:
            blue = join(broker, "blue", credit=0)
            blue.credit = 1
            found = blue.collect(1 << 20)
            assert told(found) == ["0:2:blue"]
    async with broker_in_memory(disk) as broker:
        found = join(broker).collect(1 << 20)
        came = [(line, each.delivery) for each in found for line in told([each])]
        assert came == [("0:0:green", 1), ("0:2:blue", 3), ("0:3:red", 2), ("0:4:green", 1)]


async def test_a_returned_message_goes_to_a_member_that_takes_it(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        red, other, blue = join(broker, "red"), join(broker, "red"), join(broker, "blue")
        publish(broker, "red", "red", "blue")
        assert take(red) == ["0:0:red", "0:1:red"]
        assert take(blue) == ["0:2:blue"]
        red.leave()
        blue.leave()
        assert take(other) == ["0:0:red", "0:1:red"]
        other.leave()
        last = join(broker, "blue")
        assert take(last) == ["0:2:blue"]
        leases = last.group.queues.by_queue[0].leases
        assert (len(leases.returns.parked), leases.waiting) == (2, 0)
        assert take(join(broker, "red")) == ["0:0:red", "0:1:red"]


async def test_a_member_that_need_not_acknowledge_chooses_as_well() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        red, blue = join(broker, "red", lease_s=0), join(broker, "blue", lease_s=0)
        publish(broker, "red", "blue", "red")
        assert take(red) == ["0:0:red", "0:2:red"]
        assert take(blue) == ["0:1:blue"]
        broker.store.committer.commit()
        assert (broker.shared_groups.unsettled, red.credit, blue.credit) == (0, 100, 100)


async def test_messages_that_wait_are_limited_and_later_ones_wait_for_them() -> None:
    async with broker_in_memory(cached_disk()) as broker:
        broker.topics.ensure("t", 1)
        red = join(broker, "red")
        publish(broker, *["blue"] * (PARKED_MAX + 5), "red")
        came = [line for _ in range(20) for line in take(red)]
        assert came == []
        blue = join(broker, "blue", credit=10)
        assert len(take(blue)) == 10
        came = [line for _ in range(20) for line in take(red)]
        assert came == [f"0:{PARKED_MAX + 5}:red"]


async def test_a_message_that_retention_removed_is_settled() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        red = join(broker, "red")
        publish(broker, "red", "blue", "red")
        assert len(take(red)) == 2
        red.leave()
        broker.store.queue("t", 0).store_from(1)
        again = join(broker, "red", credit=5)
        assert take(again) == ["0:2:red"]
        broker.store.committer.commit()
        assert (broker.shared_groups.unsettled, again.credit) == (2, 4)


async def test_names_and_choices_exclude_each_other() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        names = MessageSelection(broker.cursors.open(["t"]), "a")
        with pytest.raises(LocalProtocolError):
            Membership(lease_s=1, names=names, takes=of_colour("red"))


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_or_delivered_to_the_wrong_member(seed: int) -> None:
    chance, colours = random.Random(seed), ("red", "green", "blue")
    async with broker_in_memory(cached_disk()) as broker:
        broker.topics.ensure("t", 1)
        members: list[tuple[Member, tuple[str, ...]]] = []
        published, settled, held = 0, set[str](), dict[Member, list[str]]()
        for _ in range(200):
            action = chance.randrange(5)
            if action == 0 and len(members) < 4:
                wanted = tuple(chance.sample(colours, chance.randrange(0, 3)))
                members.append((join(broker, *wanted, credit=chance.randrange(1, 5)), wanted))
            elif action == 1:
                count = chance.randrange(1, 6)
                publish(broker, *chance.choices(colours, k=count))
                published += count
            elif action == 2 and members:
                member, wanted = chance.choice(members)
                came = take(member)
                assert not wanted or all(line.rpartition(":")[2] in wanted for line in came)
                assert not settled & set(came)
                held.setdefault(member, []).extend(came)
            elif action == 3 and members:
                member, _ = chance.choice(members)
                lines = held.pop(member, [])
                for line in lines:
                    assert member.ack(0, int(line.split(":")[1]))
                settled.update(lines)
            elif members and chance.random() < 0.3:
                member, _ = members.pop(chance.randrange(len(members)))
                held.pop(member, None)
                member.leave()
        for member, _ in members:
            member.leave()
        last = join(broker, credit=10_000)
        rest = [line for _ in range(100) for line in take(last)]
        assert len(rest) + len(settled) == published
        assert not settled & set(rest)


async def test_with_parts_all_members_get_some() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        policy = GroupPolicy("parts", in_parts=True)

        def member(credit: int) -> Member:
            return broker.shared_groups.join(
                RecordingPeer(), "t", "G", LINES, Membership(lease_s=9, credit=credit), policy
            )

        alone = member(100)
        publish(broker, *["x"] * 10)
        assert len(take(alone)) == 10
        members = [alone, member(100), member(0), member(100)]
        publish(broker, *["x"] * 12)
        assert [len(take(each)) for each in members] == [4, 3, 0, 2]
        assert [len(take(each)) for each in members] == [1, 1, 0, 1]
