"""Members of a group that may not read all names: each message goes to one that may, with its lease and its credit."""

from functools import partial

from tests.delivery.pushing import LINES, broker_in_memory, told
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.delivery.subscriptions import from_earliest
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.strategy.policy import GroupPolicy
from martlet.groups.strategy.sticky import Sticky
from martlet.message import Message
from martlet.testing.peers import RecordingPeer


class Names:
    """Allows some names."""

    asks = True

    def __init__(self, *names: str) -> None:
        self.allowed = set(names)

    def check(self) -> None:
        """The member may take part."""

    def allows(self, name: str) -> bool:
        return name in self.allowed


class Reader:
    """A member that may read some names."""

    def __init__(self, broker: Broker, *names: str, credit: int = 10, lease_s: float = 30) -> None:
        self.peer = RecordingPeer()
        self.names = Names(*names)
        self.member: Member = broker.shared_groups.join(
            self.peer,
            "t",
            "G",
            LINES,
            Membership(lease_s=lease_s, credit=credit, start=from_earliest),
            permit=self.names,
        )

    def turn(self) -> list[str]:
        return told(self.member.collect(1 << 20))


def publish(broker: Broker, *names: str) -> None:
    for name in names:
        broker.publish(Message("t", name.encode(), b"TAGS\x01%b\x02" % name.encode(), 0))
    broker.store.committer.commit()


def all_settled(broker: Broker) -> bool:
    return broker.shared_groups.statistics()["unsettled"] == 0


async def test_what_one_member_reads_is_kept_for_those_that_may_have_it() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = Reader(broker, "a"), Reader(broker, "b", credit=2)
        publish(broker, "a", "b", "c", "b", "b", "a")
        assert one.turn() == ["0:0:a", "0:5:a"]
        assert one.member.credit == 8
        assert two.turn() == ["0:1:b", "0:3:b"]
        assert two.turn() == []  # no credit is left
        assert two.member.ack(0, 1)
        assert two.turn() == ["0:4:b"]
        assert broker.shared_groups.statistics()["withheld"] == 1
        for reader, offsets in ((one, (0, 5)), (two, (3, 4))):
            assert all(reader.member.ack(0, offset) for offset in offsets)
        broker.store.committer.commit()
        assert all_settled(broker)
        assert broker.groups.offsets.get("G", "t", 0) == 6


async def test_what_is_kept_for_a_member_that_leaves_goes_to_another_or_to_nobody() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two, three = Reader(broker, "a"), Reader(broker, "b", "c", credit=0), Reader(broker, "c", credit=5)
        publish(broker, "b", "a")
        assert one.turn() == ["0:1:a"]
        two.member.leave()
        assert three.turn() == []
        assert broker.shared_groups.statistics()["withheld"] == 1
        assert one.member.ack(0, 1)
        assert three.member.credit == 5
        broker.store.committer.commit()
        assert all_settled(broker)


async def test_a_kept_message_whose_lease_ends_is_not_delivered_twice(mock_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = Reader(broker, "a"), Reader(broker, "b", credit=3, lease_s=10)
        publish(broker, "b", "a")
        assert one.turn() == ["0:1:a"]
        mock_clock.jump(11)
        await wait_all_tasks_blocked()
        three = Reader(broker, "b")
        assert three.turn() == ["0:0:b"]
        two.member.touch()
        assert two.turn() == []
        assert two.member.credit == 3
        assert three.member.ack(0, 0)


async def test_a_kept_message_that_its_member_may_no_longer_read_is_passed_on() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = Reader(broker, "a"), Reader(broker, "b")
        publish(broker, "b", "a")
        assert one.turn() == ["0:1:a"]
        two.names.allowed, one.names.allowed = set(), {"a", "b"}
        assert two.turn() == []
        assert one.turn() == ["0:0:b"]
        assert two.member.credit == 10


async def test_messages_with_one_key_stay_with_a_member_that_may_have_them() -> None:
    sticky = Sticky(lambda record: "key")
    sticky.seen = True
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        policy, membership = GroupPolicy("tested", sticky=sticky), Membership(lease_s=30, credit=10)
        join = partial(broker.shared_groups.join, RecordingPeer(), "t", "G", LINES, membership, policy)
        # The first one may read the topic, which has the empty name, but not the name b.
        one, two = join(permit=Names("a", "")), join(permit=Names("a", "b"))
        publish(broker, "a")
        assert told(one.collect(1 << 20)) == ["0:0:a"]
        publish(broker, "b", "a", "c")
        assert told(two.collect(1 << 20)) == ["0:1:b"]
        assert told(one.collect(1 << 20)) == ["0:2:a"]
        assert broker.shared_groups.statistics()["withheld"] == 1
