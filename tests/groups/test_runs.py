"""Many messages of a group at once: acknowledged, failed, given back in order, or settled as they leave."""

import math

import pytest
import trio
from tests.delivery.pushing import LINES, broker_in_memory, publish, told
from tests.groups.test_names import Names
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.delivery.subscriptions import Delivery, from_earliest
from martlet.errors import Reason, Refused
from martlet.groups.group import SharedGroup
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message
from martlet.tables.groups import Group
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer

QUEUE = GroupPolicy("test", retries_max=1, dead_letters="dead", leaving_counts=False)
BODIES = [b"%d" % number for number in range(10)]


def join(
    broker: Broker, *, lease_s: float = math.inf, credit: int = 100, policy: GroupPolicy | None = QUEUE, names: str = ""
) -> Member:
    return broker.shared_groups.join(
        RecordingPeer(),
        "t",
        "G",
        LINES,
        Membership(lease_s=lease_s, credit=credit, start=from_earliest),
        policy,
        permit=Names(*names.split()) if names else None,
    )


def cached_disk() -> FakeDisk:
    """A disk whose files stay in the page cache, so that a restarted broker reads them without a thread."""
    disk = FakeDisk()
    disk.cached = True
    return disk


def take(member: Member) -> list[str]:
    return told(member.collect(1 << 20))


def unsettled(shared_group: SharedGroup) -> int:
    return shared_group.queues.by_queue[0].leases.table.unsettled


async def test_a_run_is_acknowledged_at_once_and_gives_its_credit_back() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = join(broker, credit=4), join(broker, credit=4)
        publish(broker, "t", 0, *BODIES)
        assert take(one) == ["0:0:0", "0:1:1", "0:2:2", "0:3:3"]
        assert take(two) == ["0:4:4", "0:5:5", "0:6:6", "0:7:7"]
        assert list(one.ack_all(0, range(1, 6))) == [1, 2, 3]
        assert (one.credit, two.credit) == (3, 0)
        assert list(one.ack_all(0, range(1, 6))) == list(one.ack_all(7, range(1, 6))) == []
        assert take(one) == ["0:8:8", "0:9:9"]
        assert list(one.ack_all(0, [9, 0, 8])) == [9, 0, 8]
        assert list(two.ack_all(0, range(4, 8))) == [4, 5, 6, 7]
        broker.store.committer.commit()
        assert broker.shared_groups.unsettled == 0


async def test_a_run_of_failed_messages_comes_again_and_then_is_dead(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = join(broker, credit=3)
        publish(broker, "t", 0, *BODIES[:3])
        assert len(take(one)) == 3
        assert one.nack_all(0, range(1, 9), 5.0) == [1, 2]
        assert one.credit == 2
        autojump_clock.jump(5.1)
        two = join(broker)
        broker.shared_groups.upkeep.tick(broker.shared_groups.now())
        assert take(two) == ["0:1:1", "0:2:2"]
        assert two.nack_all(0, [2]) == [2]
        broker.shared_groups.upkeep.tick(broker.shared_groups.now())
        broker.store.committer.commit()
        assert broker.store.queue("dead", 0).next_offset == 1


async def test_messages_that_are_given_up_are_dead_at_once() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = join(broker, credit=3)
        publish(broker, "t", 0, *BODIES)
        assert len(take(one)) == 3
        assert one.give_up_all(0, [2, 0, 9]) == [2, 0]
        assert one.give_up_all(0, [2]) == one.give_up_all(7, [0]) == []
        assert not one.ack(0, 2)
        assert one.credit == 2
        broker.shared_groups.upkeep.tick(broker.shared_groups.now())
        broker.store.committer.commit()
        assert broker.store.queue("dead", 0).next_offset == 2
        assert take(one) == ["0:3:3", "0:4:4"]


async def test_what_a_member_leaves_comes_again_at_once_in_order_however_often() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *BODIES)
        for delivery in range(1, 10):
            member = join(broker)
            found = member.collect(1 << 20)
            assert told(found) == [f"0:{n}:{n}" for n in range(10)]
            assert found[0].delivery == delivery
            member.leave()
        last = join(broker)
        assert len(take(last)) == 10
        assert last.nack(0, 3)
        assert last.group.queues.by_queue[0].leases.dead() == [3]


async def test_a_restart_buries_nothing_for_which_leaving_does_not_count() -> None:
    disk = cached_disk()
    for _ in range(4):
        async with broker_in_memory(disk) as broker:
            broker.topics.ensure("t", 1)
            if not broker.store.queue("t", 0).next_offset:
                publish(broker, "t", 0, b"a", b"b")
            assert take(join(broker)) == ["0:0:a", "0:1:b"]
    async with broker_in_memory(disk) as broker:
        assert broker.topics.get("dead") is None


async def test_a_member_that_need_not_acknowledge_settles_what_it_collects() -> None:
    disk = cached_disk()
    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *BODIES[:4])
        first, member = join(broker, credit=2), join(broker, lease_s=0, credit=1)
        assert take(first) == ["0:0:0", "0:1:1"]
        assert take(member) == ["0:2:2"]
        assert take(member) == ["0:3:3"]
        first.leave()
        found = member.collect(1 << 20)
        assert [told([each]) for each in found] == [["0:0:0"]]
        assert found[0].delivery == 2
        assert (member.credit, unsettled(member.group)) == (1, 1)
        assert take(member) == ["0:1:1"]
        broker.store.committer.commit()
        assert broker.shared_groups.unsettled == 0
        await broker.store.flusher.wait_flushed(broker.store.appended)
    async with broker_in_memory(disk) as broker:
        again = join(broker)
        publish(broker, "t", 0, b"new")
        assert take(again) == ["0:4:new"]


async def test_a_member_that_need_not_acknowledge_settles_what_another_one_read() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = join(broker, lease_s=0, names="a"), join(broker, lease_s=0, names="b")
        for name in (b"a", b"b", b"a"):
            broker.publish(Message("t", name, b"TAGS\x01%b\x02" % name, 0))
        broker.store.committer.commit()
        assert take(one) == ["0:0:a", "0:2:a"]
        assert (unsettled(one.group), one.credit) == (1, 100)
        assert take(two) == ["0:1:b"]
        assert (unsettled(one.group), two.credit) == (0, 100)


async def test_held_messages_are_acknowledged_in_an_atomic_group() -> None:
    disk = cached_disk()
    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 1)
        broker.topics.ensure("out", 1)
        publish(broker, "t", 0, *BODIES)
        member, other = join(broker, credit=6), join(broker, credit=1)
        assert (len(take(member)), len(take(other))) == (6, 1)
        with pytest.raises(Refused) as refused:
            member.acknowledgements(0, [1, 6])
        assert refused.value.reason is Reason.NOT_FOUND
        notes = member.acknowledgements(0, [0, 1, 4])
        assert member.acknowledgements(0, []) == member.acknowledgements(0, ())
        assert [member.holds(0, offset) for offset in (0, 2, 6, 7, 99)] == [False, True, False, False, False]
        with pytest.raises(Refused):
            broker.publish_all([Message("nowhere", b"x")], atomic=True, notes=notes)
        member.withdraw(0, [0, 1, 4])
        notes = member.acknowledgements(0, [0, 1, 4])
        assert list(member.ack_all(0, range(3))) == [2]
        broker.publish_all([Message("out", b"result", queue_id=0)], atomic=True, notes=notes)
        broker.store.committer.commit()
        assert (unsettled(member.group), member.credit) == (3, 4)
        await broker.store.flusher.wait_flushed(broker.store.appended)
    async with broker_in_memory(disk) as broker:
        assert take(join(broker)) == ["0:3:3", "0:5:5", "0:6:6", "0:7:7", "0:8:8", "0:9:9"]


async def test_many_acknowledgements_of_an_atomic_group_are_several_notes() -> None:
    async with broker_in_memory(cached_disk()) as broker:
        broker.topics.ensure("t", 1)
        count = 4000
        member = join(broker, credit=count)
        for _ in range(count):
            broker.publish(Message("t", b"", b"", 0))
        broker.store.committer.commit()
        taken = sum(delivery.count for _ in range(count) for delivery in member.collect(1 << 20))
        assert taken == count
        offsets = range(0, count, 2)
        notes = member.acknowledgements(0, offsets)
        broker.store.committer.commit()
        limit = broker.shared_groups.notes.journal.note_bytes_max
        assert len(notes) > 1
        assert all(len(note) <= limit for _, note in notes)
        broker.publish_all([], atomic=True, notes=notes)
        broker.store.committer.commit()
        assert (unsettled(member.group), member.credit) == (count // 2, count // 2)


async def test_a_delivery_has_each_frame_by_itself() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *BODIES[:3])
        (delivery,) = join(broker).collect(1 << 20)
        assert isinstance(delivery, Delivery)
        assert delivery.frames == [b"0:0:0\n", b"0:1:1\n", b"0:2:2\n"]
        assert bytes(delivery.data) == b"".join(delivery.frames)
        assert delivery.size == len(delivery.data)


async def test_an_exclusive_member_gets_everything_while_it_is_there() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        plain = join(broker, credit=2)
        first, second = (
            broker.shared_groups.join(
                RecordingPeer(), "t", "G", LINES, Membership(lease_s=9, credit=3, is_exclusive=True), QUEUE
            )
            for _ in range(2)
        )
        publish(broker, "t", 0, *BODIES[:8])
        assert (take(plain), take(second)) == ([], [])
        assert take(first) == ["0:0:0", "0:1:1", "0:2:2"]
        assert (take(plain), take(second)) == ([], [])
        first.leave()
        assert take(plain) == []
        assert take(second) == ["0:0:0", "0:1:1", "0:2:2"]
        assert [second.group.is_settled(0, offset) for offset in (0, 5)] == [False, False]
        assert list(second.ack_all(0, range(2))) == [0, 1]
        assert [second.group.is_settled(0, offset) for offset in (0, 2, 5)] == [True, False, False]
        assert (second.group.first_unsettled(0), second.group.first_unsettled(7)) == (2, -1)
        second.leave()
        assert take(plain) == ["0:2:2", "0:3:3"]


async def test_the_next_exclusive_member_is_woken() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        peers = [RecordingPeer() for _ in range(3)]
        members = [
            broker.shared_groups.join(
                peer, "t", "G", LINES, Membership(lease_s=9, credit=3, is_exclusive=place > 0), QUEUE
            )
            for place, peer in enumerate(peers)
        ]
        for member in members:
            take(member)
        for peer in peers:
            peer.wakes = 0
        publish(broker, "t", 0, b"x")
        assert [peer.wakes for peer in peers] == [0, 1, 0]
        assert take(members[1]) == ["0:0:x"]
        members[1].leave()
        assert [peer.wakes > 0 for peer in peers] == [False, True, True]


@pytest.mark.parametrize(("policy", "topic"), [(QUEUE, "dead"), (None, "%DLQ%G")])
async def test_no_message_dies_in_the_topic_of_the_dead_letters(
    autojump_clock: MockClock, policy: GroupPolicy | None, topic: str
) -> None:
    async with broker_in_memory(cached_disk()) as broker:
        broker.topics.ensure(topic, 1)
        broker.groups.update(Group("G", retry_max_times=1))
        member = broker.shared_groups.join(
            RecordingPeer(), topic, "G", LINES, Membership(lease_s=math.inf, credit=1, start=from_earliest), policy
        )
        publish(broker, topic, 0, b"letter")
        for failures in range(6):
            await trio.sleep(5.1)
            assert take(member) == ["0:0:letter"]
            assert (member.give_up_all if failures % 2 else member.nack_all)(0, (0,)) == [0]
        await trio.sleep(5.1)
        assert broker.store.queue(topic, 0).next_offset == 1
        assert broker.shared_groups.statistics()["dead_letters"] == 0
