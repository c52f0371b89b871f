"""Groups whose members compete: each message is with one member, comes back when it must, and is not forgotten."""

import errno
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.delivery import pushing
from tests.delivery.pushing import LINES, publish, told
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.subscriptions import Start, from_earliest, from_tail
from martlet.errors import Reason, Refused
from martlet.groups.group import SharedGroup
from martlet.groups.handing_out.collection import READS_A_CALL
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.strategy.policy import GroupPolicy
from martlet.groups.strategy.redelivery import LONGEST_MS, pause_ms
from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, decode_properties, encode_properties
from martlet.records.codec import decode_records, tags_code
from martlet.settings import DeliveryConfig
from martlet.store import Queue, ReadResult
from martlet.store.read.readers import Readers
from martlet.tables.groups import Group
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import message


def broker_in_memory(disk: FakeDisk | None = None, **more: Any) -> AbstractAsyncContextManager[Broker]:
    """A broker on *disk*; without one, on a disk whose files are in the page cache."""
    if disk is None:
        disk = FakeDisk()
        disk.cached = True
    return pushing.broker_in_memory(disk, **more)


class Competitor:
    """A peer that is a member."""

    def __init__(
        self,
        broker: Broker,
        *,
        lease_s: float = 30,
        credit: int = 10,
        group: str = "G",
        start: Start = from_earliest,
        selection: Selection | None = None,
    ) -> None:
        self.peer = RecordingPeer()
        self.member: Member = broker.shared_groups.join(
            self.peer,
            "t",
            group,
            LINES,
            Membership(lease_s=lease_s, credit=credit, start=start, selection=selection or EVERYTHING),
        )
        self.deliveries: list[int] = []

    def turn(self, budget_bytes: int = 1 << 20) -> list[str]:
        """Collect once if somebody woke the peer."""
        if not self.peer.wakes:
            return []
        self.peer.wakes = 0
        found = self.member.collect(budget_bytes)
        self.deliveries = [delivery.delivery for delivery in found for _ in range(delivery.count)]
        return told(found)

    async def drain(self) -> list[str]:
        """Collect until nobody wakes the peer; reads in threads are run in between."""
        came: list[str] = []
        while self.peer.wakes or self.peer.started:
            await self.peer.run_started()
            came += self.turn()
        return came


def committed(broker: Broker, queue_id: int = 0, group: str = "G") -> int:
    return broker.groups.offsets.get(group, "t", queue_id)


async def test_members_share_and_the_committed_offset_follows_acknowledgements() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = Competitor(broker, credit=2), Competitor(broker, credit=2)
        publish(broker, "t", 0, b"a", b"b", b"c", b"d", b"e")
        came = [*one.turn(), *two.turn()]
        assert sorted(came) == ["0:0:a", "0:1:b", "0:2:c", "0:3:d"]
        assert committed(broker) == 0
        assert one.member.ack(0, 1)
        broker.store.committer.commit()
        assert committed(broker) == 0
        assert one.member.ack(0, 0)
        broker.store.committer.commit()
        assert committed(broker) == 2
        assert one.turn() == ["0:4:e"]
        assert not two.member.ack(0, 4)
        assert not two.member.ack(9, 4)


async def test_a_group_whose_last_member_leaves_is_the_same_for_one_that_joins_before_the_commit() -> None:
    async with broker_in_memory(flush="sync") as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a", b"b", b"c")
        await broker.store.flusher.wait_flushed(broker.store.appended)
        one = Competitor(broker, credit=2)
        assert one.turn() == ["0:0:a", "0:1:b"]
        assert one.member.ack(0, 0)
        assert one.member.ack(0, 1)
        one.member.leave()
        two = Competitor(broker)
        assert two.turn() == ["0:2:c"]
        assert two.member.ack(0, 2)
        two.member.leave()
        assert broker.shared_groups.statistics()["shares"] == 1, "what it has is not stored yet"
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(broker.store.appended)
        assert Competitor(broker).turn() == []


async def test_a_group_that_cannot_be_stored_stays_in_memory_until_it_can(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, delivery=DeliveryConfig(share_memory_s=1)) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a", b"b")
        one = Competitor(broker)
        assert one.turn() == ["0:0:a", "0:1:b"]
        broker.store.committer.commit()
        disk.free_bytes = 0
        disk.fail_next("write", errno.ENOSPC)
        assert one.member.ack(0, 0)
        one.member.leave()
        await trio.sleep(100)
        assert broker.shared_groups.statistics()["shares"] == 1
        disk.free_bytes = None
        await trio.sleep(100)
        assert broker.shared_groups.statistics()["shares"] == 0
        assert await Competitor(broker).drain() == ["0:1:b"]


async def test_a_new_group_remembers_where_it_began() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"before")
        late = Competitor(broker, start=lambda queue: queue.next_offset)
        assert late.turn() == []
        late.member.leave()
        publish(broker, "t", 0, b"after")
        assert Competitor(broker).turn() == ["0:1:after"]


async def test_messages_of_a_leaving_member_go_to_another_at_once() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = Competitor(broker), Competitor(broker)
        publish(broker, "t", 0, b"a", b"b")
        assert one.turn() == ["0:0:a", "0:1:b"]
        one.member.ack(0, 0)
        assert two.turn() == []
        one.member.leave()
        assert two.turn() == ["0:1:b"]
        assert two.deliveries == [2]
        one.member.leave()
        assert two.turn() == []


async def test_returned_messages_far_from_each_other_come_in_several_turns() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *[b"x"] * (4 * READS_A_CALL))
        one, two = Competitor(broker, credit=4 * READS_A_CALL), Competitor(broker, credit=1000)
        assert len(await one.drain()) == 4 * READS_A_CALL
        for offset in range(0, 4 * READS_A_CALL, 2):
            assert one.member.ack(0, offset)
        one.member.leave()
        assert len(two.turn()) == READS_A_CALL
        assert len(two.turn()) == READS_A_CALL
        assert two.turn() == []


async def test_a_group_that_leaves_memory_still_knows_what_was_settled(autojump_clock: MockClock) -> None:
    async with broker_in_memory(delivery=DeliveryConfig(share_memory_s=100)) as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        publish(broker, "t", 0, b"a", b"b")
        one.turn()
        one.member.ack(0, 1)
        one.member.leave()
        await trio.sleep(99)
        two = Competitor(broker)
        assert two.turn() == ["0:0:a"]
        two.member.leave()
        await trio.sleep(101)
        assert broker.shared_groups.statistics()["shares"] == 0
        assert broker.shared_groups.unsettled == 0
        last = Competitor(broker)
        await trio.sleep(1)
        assert last.turn() == ["0:0:a"]


async def test_a_group_with_nothing_to_remember_is_forgotten_soon(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        Competitor(broker).member.leave()
        await trio.sleep(2)
        assert broker.shared_groups.statistics()["shares"] == 0
        assert broker.store.queue("t", 0).watchers is None


async def test_a_window_bounds_what_is_out_and_a_settled_message_makes_room() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(lease_window=3)) as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker, credit=100)
        publish(broker, "t", 0, *(b"%d" % n for n in range(10)))
        assert one.turn() == ["0:0:0", "0:1:1", "0:2:2"]
        one.member.ack(0, 1)
        assert one.turn() == []
        one.member.ack(0, 0)
        assert one.turn() == ["0:3:3", "0:4:4"]


async def test_every_member_that_has_credit_hears_of_room_in_the_window() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(lease_window=1)) as broker:
        broker.topics.ensure("t", 1)
        one, two = Competitor(broker), Competitor(broker)
        publish(broker, "t", 0, b"a", b"b")
        assert [*one.turn(), *two.turn(), *one.turn()] == ["0:0:a"]
        assert two.peer.wakes == 0
        one.member.ack(0, 0)
        broker.store.committer.commit()
        assert two.turn() == ["0:1:b"]


async def test_a_full_disk_stops_no_group() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(lease_window=1, leases_max=1)) as broker:
        broker.topics.ensure("t", 1)
        one, wanted = Competitor(broker), [0]
        publish(broker, "t", 0, b"a", b"b", b"c")
        assert one.turn() == ["0:0:a"]
        broker.store.committer.commit()
        broker.store.admission.refusal = "the disk is full"
        broker.store.committer.on_commit_wanted = lambda: wanted.append(1)
        for offset, following in enumerate(("0:1:b", "0:2:c")):
            wanted.clear()
            assert one.member.ack(0, offset)
            assert wanted
            broker.store.committer.commit()
            assert committed(broker) == offset + 1
            assert one.turn() == [following]


async def test_messages_that_do_not_fit_into_one_turn_come_in_the_next() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(lease_window=5000)) as broker:
        broker.topics.ensure("t", 2)
        one = Competitor(broker, credit=5000)
        for queue_id in range(2):
            publish(broker, "t", queue_id, *(b"x" for _ in range(1500)))
        assert len(await one.drain()) == 3000
        two = Competitor(broker, credit=5000)
        one.member.leave()
        came: list[str] = []
        while two.peer.wakes or two.peer.started:
            await two.peer.run_started()
            came += two.turn(100)
        assert len(came) == 3000
        assert two.deliveries == [2] * len(two.deliveries)


async def test_a_waiting_member_hears_of_what_a_silent_one_lost(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        silent, waiting = Competitor(broker, lease_s=20), Competitor(broker)
        publish(broker, "t", 0, b"a")
        assert [*silent.turn(), *waiting.turn()] == ["0:0:a"]
        await trio.sleep(19.9)
        assert waiting.peer.wakes == 0
        await trio.sleep(0.2)
        assert waiting.turn() == ["0:0:a"]
        assert waiting.deliveries == [2]
        assert not silent.member.ack(0, 0)


async def test_the_bound_over_all_groups_holds_and_wakes_the_others() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(leases_max=3)) as broker:
        broker.topics.ensure("t", 1)
        one, two = Competitor(broker, credit=2), Competitor(broker, credit=2, group="H")
        publish(broker, "t", 0, b"a", b"b", b"c")
        assert one.turn() == ["0:0:a", "0:1:b"]
        assert two.turn() == ["0:0:a"]
        assert broker.shared_groups.unsettled == 3
        assert two.turn() == []
        assert one.member.ack(0, 0)
        broker.store.committer.commit()
        assert two.turn() == ["0:1:b"]
        assert broker.shared_groups.unsettled == 3


async def test_a_dead_message_is_settled_only_when_its_copy_is_durable() -> None:
    async with broker_in_memory(flush="sync") as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=0))
        publish(broker, "t", 0, b"poison", properties=b"k\x01v\x02")
        await broker.store.flusher.wait_flushed(broker.store.appended)
        one = Competitor(broker)
        assert one.turn() == ["0:0:poison"]
        before = broker.store.appended
        one.member.nack(0, 0)
        while broker.store.appended == before:
            assert committed(broker) <= 0
            await trio.lowlevel.checkpoint()
        letter_end = broker.store.appended
        while committed(broker) <= 0:
            assert broker.shared_groups.unsettled == 1
            await trio.lowlevel.checkpoint()
            assert committed(broker) <= 0 or broker.store.readable >= letter_end
        assert broker.shared_groups.unsettled == 0
        queue = broker.store.queue("%DLQ%G", 0)
        (letter,) = decode_records(b"".join(broker.store.readers.read(queue, 0, 9, 9999).pieces))
        assert letter.body == b"poison"
        properties = decode_properties(letter.properties)
        assert properties.pop("DLQ_ORIGIN_MESSAGE_ID")
        assert properties == {"k": "v", "DLQ_ORIGIN_TOPIC": "t"}
        assert queue.next_offset == 1


async def test_a_group_without_a_limit_of_retries_buries_nothing(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=-1))
        one = Competitor(broker)
        publish(broker, "t", 0, b"a")
        for delivery in range(1, 50):
            assert one.turn() == ["0:0:a"]
            assert one.deliveries == [delivery]
            one.member.nack(0, 0)
            await trio.sleep(LONGEST_MS / 1000 + 0.01)


async def test_a_message_waits_longer_after_each_failure_until_it_is_dead(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker, lease_s=1000)
        publish(broker, "t", 0, b"a")
        assert one.turn() == ["0:0:a"]
        for failures in range(1, 17):
            one.member.nack(0, 0)
            await trio.sleep(pause_ms(failures) / 1000 - 0.01)
            assert one.turn() == []
            await trio.sleep(0.02)
            assert one.turn() == ["0:0:a"]
            assert one.deliveries == [failures + 1]
        assert trio.current_time() >= 60
        one.member.nack(0, 0)
        await trio.sleep(1)
        assert [letter.body for letter in dead_letters(broker)] == [b"a"]


async def test_other_messages_do_not_wait_for_one_that_failed(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        publish(broker, "t", 0, b"a")
        one.turn()
        one.member.nack(0, 0)
        publish(broker, "t", 0, b"b")
        assert one.turn() == ["0:1:b"]


async def test_a_longer_delay_that_a_member_asks_for_is_kept(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        publish(broker, "t", 0, b"a")
        one.turn()
        one.member.nack(0, 0, delay_s=60)
        await trio.sleep(59)
        assert one.turn() == []
        await trio.sleep(2)
        assert one.turn() == ["0:0:a"]


async def test_a_message_that_several_members_leave_unsettled_waits_from_the_second_on(
    autojump_clock: MockClock,
) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two, three = (Competitor(broker) for _ in range(3))
        publish(broker, "t", 0, b"a")
        assert one.turn() == ["0:0:a"]
        one.member.leave()
        assert two.turn() == ["0:0:a"]
        two.member.leave()
        assert three.turn() == []
        await trio.sleep(pause_ms(1) / 1000 + 0.01)
        assert three.turn() == ["0:0:a"]


async def test_a_refused_dead_letter_is_tried_again(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=0))
        one = Competitor(broker)
        publish(broker, "t", 0, b"a")
        one.turn()
        broker.store.admission.refusal = "the disk is full"
        one.member.nack(0, 0)
        await trio.sleep(1)
        assert committed(broker) == 0
        broker.store.admission.refusal = ""
        await trio.sleep(10)
        assert committed(broker) == 1
        assert broker.shared_groups.statistics()["dead_letters"] == 1


async def test_a_dead_message_that_was_tried_as_often_as_a_record_can_say_becomes_a_dead_letter(
    autojump_clock: MockClock,
) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=0))
        one = Competitor(broker)
        broker.publish(Message("t", b"a", queue_id=0, reconsume_times=(1 << 31) - 1))
        broker.store.committer.commit()
        one.turn()
        one.member.nack(0, 0)
        await trio.sleep(1)
        assert committed(broker) == 1
        assert broker.shared_groups.statistics()["dead_letters"] == 1


def dead_letters(broker: Broker) -> list[Record]:
    queue = broker.store.queue("%DLQ%G", 0)
    pieces = [broker.store.readers.read(queue, offset, 1, 1).pieces for offset in range(queue.next_offset)]
    return list(decode_records(b"".join(piece for found in pieces for piece in found)))


@pytest.mark.parametrize(
    ("room", "named"),
    [
        (0, set()),
        (30, {"DLQ_ORIGIN_TOPIC"}),
        (200, {"DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID"}),
    ],
)
async def test_a_dead_message_without_room_for_more_properties_becomes_a_dead_letter_with_its_own(
    autojump_clock: MockClock, room: int, named: set[str]
) -> None:
    async with broker_in_memory(segment_bytes=1 << 18) as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=0))
        one = Competitor(broker)
        own = {"k": "v" * (PROPERTIES_BYTES_MAX - 3 - room)}
        publish(broker, "t", 0, b"a", properties=encode_properties(own))
        await one.drain()
        one.member.nack(0, 0)
        await trio.sleep(1)
        assert committed(broker) == 1
        (letter,) = dead_letters(broker)
        found = decode_properties(letter.properties)
        assert {name: found.pop(name, "") != "" for name in named} == dict.fromkeys(named, True)
        assert (letter.body, found) == (b"a", own)


async def test_a_full_disk_delays_a_dead_letter_and_neither_loses_nor_doubles_it(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=0))
        one = Competitor(broker, lease_s=1000)
        publish(broker, "t", 0, b"a", b"b")
        one.turn()
        disk.fail_next("write", errno.ENOSPC)
        one.member.nack(0, 0)
        await trio.sleep(1)
        assert committed(broker) == 0
        await trio.sleep(100)
        assert committed(broker) == 1
        assert [letter.body for letter in dead_letters(broker)] == [b"a"]
        assert one.member.ack(0, 1)
        broker.store.committer.commit()
        assert committed(broker) == 2


async def test_a_group_continues_after_a_dead_message_that_no_dead_letter_can_hold(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=0))
        one = Competitor(broker)
        publish(broker, "t", 0, b"large", b"small")
        one.turn()
        broker.store.writer.config = replace(broker.store.config, message_bytes_max=4)
        one.member.nack(0, 0)
        await trio.sleep(1)
        assert committed(broker) == 1
        assert dead_letters(broker) == []
        assert "message 0 of queue 0 of topic[t] has no dead letter although group 'G' gave it up" in caplog.text
        assert broker.shared_groups.statistics()["dead_without_letter"] == 1


class Unwalked(dict[tuple[str, str], SharedGroup]):
    """Counts how often somebody looked at all shares."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()


async def test_a_flush_looks_only_at_queues_whose_dead_letters_wait_for_it() -> None:
    async with broker_in_memory(flush="sync") as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", retry_max_times=0))
        publish(broker, "t", 0, b"a")
        await broker.store.flusher.wait_flushed(broker.store.appended)
        one, _ = Competitor(broker), Competitor(broker, group="H")
        shared_groups = broker.shared_groups
        watched: Any = Unwalked(shared_groups.in_memory.by_place)  # type: ignore[arg-type]
        shared_groups.in_memory.by_place = watched
        publish(broker, "t", 0, b"b")
        await broker.store.flusher.wait_flushed(broker.store.appended)
        await wait_all_tasks_blocked()
        assert watched.walks == 0
        one.turn()
        one.member.nack(0, 0)
        while not shared_groups.dead_letters.unflushed:
            await trio.lowlevel.checkpoint()
        walks = watched.walks
        while committed(broker) == 0:
            await trio.lowlevel.checkpoint()
        assert (watched.walks, shared_groups.dead_letters.unflushed, shared_groups.dead_letters.stored) == (
            walks,
            {},
            1,
        )


async def test_a_group_whose_name_is_too_long_for_a_dead_letter_topic_continues(autojump_clock: MockClock) -> None:
    name = "g" * 255
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        table = {"subscriptionGroupTable": {name: {"groupName": name, "retryMaxTimes": 0}}}
        broker.groups.load(json.dumps(table).encode())
        one = Competitor(broker, group=name)
        publish(broker, "t", 0, b"a")
        one.turn()
        one.member.nack(0, 0)
        await trio.sleep(1)
        assert committed(broker, group=name) == 1
        assert broker.shared_groups.statistics()["dead_without_letter"] == 1


async def test_messages_that_retention_removed_are_not_waited_for() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one, two = Competitor(broker), Competitor(broker)
        publish(broker, "t", 0, b"a", b"b")
        one.turn()
        broker.store.queue("t", 0).store_from(1)
        one.member.leave()
        assert two.turn() == ["0:1:b"]
        broker.store.committer.commit()
        assert committed(broker) == 1


async def test_far_behind_the_tail_members_wait_without_stopping_others() -> None:
    async with broker_in_memory(FakeDisk(), cache_bytes=0) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *(b"%0200d" % n for n in range(60)))
        one = Competitor(broker, credit=1000)
        assert one.turn() == []
        assert one.peer.started
        assert len(await one.drain()) == 60


@asynccontextmanager
async def broker_with_far_messages(count: int, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    """A broker whose first messages are on the disk only; that they are not read on the event loop is checked."""
    async with broker_in_memory(FakeDisk(), cache_bytes=0) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *(b"%0200d" % n for n in range(count)))
        read = Readers.read

        def checked(readers: Readers, queue: Queue, offset: int, *more: Any) -> ReadResult:
            assert readers.read_near(queue, offset, 1, 1) is not None, f"offset {offset} is read on the event loop"
            return read(readers, queue, offset, *more)

        monkeypatch.setattr(Readers, "read", checked)
        yield broker


async def test_redeliveries_from_far_behind_the_tail_are_read_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with broker_with_far_messages(60, monkeypatch) as broker:
        one, two = Competitor(broker, credit=60, lease_s=1000), Competitor(broker, credit=0)
        came = await one.drain()
        assert len(came) == 60
        for offset in (5, 2, 40):
            assert one.member.nack(0, offset)
        await trio.sleep(1)
        assert one.turn() == []
        (work,) = one.peer.started
        assert one.turn() == []
        assert one.peer.started == [work]
        assert await one.drain() == [came[2], came[5], came[40]]
        assert one.deliveries == [2, 2, 2]
        assert one.member.ack(0, 2)
        assert not two.member.ack(0, 5)
        # Its reader goes, and the other member gets what was read.
        assert one.member.nack(0, 5)
        await trio.sleep(1)
        assert one.turn() == []
        two.member.add_credit(1)
        one.member.leave()
        await one.peer.run_started()
        assert await two.drain() == [came[0]]


async def test_results_of_a_thread_are_dropped_with_the_last_member(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with broker_with_far_messages(60, monkeypatch) as broker:
        one = Competitor(broker, credit=60, lease_s=1000)
        came = await one.drain()
        one.member.nack(0, 1)
        await trio.sleep(1)
        assert one.turn() == []
        one.member.leave()
        await trio.sleep(1)
        await one.peer.run_started()
        (queue,) = one.member.group.queues.by_queue.values()
        assert (queue.reader._line.results, queue.reader._line.pending, queue.reader.working) == ({}, {}, False)
        assert sorted(await Competitor(broker, credit=60).drain()) == sorted(came)


async def test_a_dead_message_far_behind_the_tail_is_read_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with broker_with_far_messages(60, monkeypatch) as broker:
        broker.groups.update(Group("G", retry_max_times=0))
        one = Competitor(broker, credit=60, lease_s=1000)
        await one.drain()
        for offset in range(3):
            assert one.member.nack(0, offset)
        await trio.sleep(1)
        assert committed(broker) == 3
        monkeypatch.undo()
        assert [int(letter.body) for letter in dead_letters(broker)] == [0, 1, 2]


async def test_a_reset_group_continues_at_the_new_offset() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        publish(broker, "t", 0, b"a", b"b", b"c")
        assert len(one.turn()) == 3
        broker.groups.offsets.reset("G", "t", {0: 1})
        assert one.turn() == ["0:1:b", "0:2:c"]
        assert one.member.ack(0, 1)
        broker.store.committer.commit()
        assert committed(broker) == 2


async def test_a_group_never_begins_beyond_the_end_of_a_queue() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.ensure("G")
        broker.groups.offsets.commit("G", "t", 0, 5)
        one = Competitor(broker)
        publish(broker, "t", 0, b"a")
        assert one.turn() == ["0:0:a"]


async def test_new_queues_are_shared_and_a_deleted_topic_is_told() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        broker.topics.update("t", 2, 2)
        publish(broker, "t", 1, b"a")
        assert one.turn() == ["1:0:a"]
        broker.topics.delete("t")
        assert one.peer.wakes
        assert one.member.group.gone
        assert one.turn() == []
        assert not one.member.ack(1, 0)
        one.member.leave()
        assert broker.shared_groups.unsettled == 0


async def test_a_group_selects_the_same_for_all_its_members() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        wanted = Selection("tag A", frozenset({tags_code("A")}))
        one = Competitor(broker, selection=wanted)
        publish(broker, "t", 0, *(b"no" for _ in range(2000)))
        publish(broker, "t", 0, b"yes", properties=b"TAGS\x01A\x02")
        assert await one.drain() == ["0:2000:yes"]
        assert committed(broker) == 2000
        with pytest.raises(Refused, match="use the same selection"):
            Competitor(broker)
        one.member.ack(0, 2000)
        one.member.leave()
        broker.store.committer.commit()
        assert committed(broker) == 2001
        Competitor(broker)


async def test_what_cannot_be_joined_is_refused() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(shares_max=1, share_members_max=1)) as broker:
        with pytest.raises(Refused) as caught:
            Competitor(broker)
        assert caught.value.reason is Reason.NO_TOPIC
        broker.topics.ensure("t", 1)
        Competitor(broker)
        with pytest.raises(Refused, match=r"delivery\.share_members_max is 1"):
            Competitor(broker)
        with pytest.raises(Refused, match=r"delivery\.shares_max is 1"):
            Competitor(broker, group="H")
        broker.groups.auto_create = False
        with pytest.raises(Refused) as caught:
            Competitor(broker, group="unknown")
        assert caught.value.reason is Reason.NO_GROUP


async def test_a_group_that_may_not_consume_is_refused() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G", consume_enable=False))
        broker.groups.set_forbidden("H", "t", readable=False)
        for group in ("G", "H"):
            with pytest.raises(Refused, match="may not read") as caught:
                Competitor(broker, group=group)
            assert caught.value.reason is Reason.NO_PERMISSION
        broker.groups.set_forbidden("H", "t", readable=True)
        Competitor(broker, group="H")


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 1), st.integers(1, 5)),
        st.tuples(st.just("turn"), st.integers(0, 2), st.integers(1, 900)),
        st.tuples(st.just("ack"), st.integers(0, 2), st.integers(0, 9)),
        st.tuples(st.just("nack"), st.integers(0, 2), st.integers(0, 9)),
        st.tuples(st.just("extend"), st.integers(0, 2), st.integers(0, 9)),
        st.tuples(st.just("join"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("leave"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("time"), st.just(0), st.integers(1, 12)),
    ),
    max_size=60,
)
Key = tuple[int, int]


class Model:
    """Three peers that come and go, and what each may hold."""

    def __init__(self, clock: MockClock) -> None:
        self.clock = clock
        self.published: list[int] = [0, 0]
        self.members: dict[int, Competitor] = {}
        self.held: dict[Key, tuple[int, float]] = {}  # message -> (peer, until)
        self.delayed: dict[Key, float] = {}
        self.acked: set[Key] = set()

    async def run(self, operations: list[tuple[str, int, int]]) -> None:
        async with broker_in_memory(delivery=DeliveryConfig(lease_window=6)) as broker:
            broker.topics.ensure("t", 2)
            broker.groups.update(Group("G", retry_max_times=-1))
            for name, which, number in operations:
                await self.step(broker, name, which, number)
                await self.expire()
            await self.finish(broker)

    async def step(self, broker: Broker, name: str, which: int, number: int) -> None:
        competitor = self.members.get(which)
        mine = sorted(key for key, (peer, _) in self.held.items() if peer == which)
        if name == "publish":
            publish(broker, "t", which, *(b"x" for _ in range(number)))
            self.published[which] += number
        elif name == "time":
            self.clock.jump(number)
        elif name == "join" and competitor is None:
            self.members[which] = Competitor(broker, lease_s=20, credit=number)
        elif competitor is None:
            return
        elif name == "turn":
            self.took(which, competitor.turn(number))
        elif name == "leave":
            competitor.member.leave()
            del self.members[which]
            self.held = {key: value for key, value in self.held.items() if value[0] != which}
        elif mine:
            self.say(competitor, name, mine[number % len(mine)], number)

    def took(self, which: int, lines: list[str]) -> None:
        for line in lines:
            queue_id, offset, _ = line.split(":")
            key = int(queue_id), int(offset)
            assert key not in self.acked, f"{key} was acknowledged and came again"
            assert key not in self.held, f"{key} is with two members"
            assert self.delayed.pop(key, 0.0) <= trio.current_time(), f"{key} came before its time"
            self.held[key] = which, trio.current_time() + 20

    def say(self, competitor: Competitor, name: str, key: Key, number: int) -> None:
        if name == "extend":
            assert competitor.member.extend(*key)
            self.held[key] = self.held[key][0], trio.current_time() + 20
            return
        del self.held[key]
        if name == "ack":
            assert competitor.member.ack(*key)
            assert not competitor.member.ack(*key)
            self.acked.add(key)
        else:
            assert competitor.member.nack(*key, delay_s=number)
            self.delayed[key] = trio.current_time() + number

    async def expire(self) -> None:
        await wait_all_tasks_blocked()
        now = trio.current_time()
        self.held = {key: value for key, value in self.held.items() if value[1] > now}

    async def finish(self, broker: Broker) -> None:
        """Everything comes to one who acknowledges all, and to nobody twice."""
        for competitor in self.members.values():
            competitor.member.leave()
        self.held.clear()
        self.clock.jump(20)
        await self.expire()
        last = Competitor(broker, credit=1000)
        while last.peer.wakes:
            for line in last.turn():
                queue_id, offset, _ = line.split(":")
                self.took(9, [line])
                del self.held[int(queue_id), int(offset)]
                self.acked.add((int(queue_id), int(offset)))
                assert last.member.ack(int(queue_id), int(offset))
        broker.store.committer.commit()
        assert self.acked == {(q, n) for q, count in enumerate(self.published) for n in range(count)}
        assert [committed(broker, queue_id) for queue_id in range(2)] == self.published
        assert broker.shared_groups.unsettled == 0


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
def test_every_message_is_acknowledged_once_and_never_with_two_members(operations: list[tuple[str, int, int]]) -> None:
    clock = MockClock()
    model = Model(clock)
    trio.run(model.run, operations, clock=clock)
    assert len(model.acked) == sum(model.published)


async def test_published_messages_of_other_protocols_are_shared_as_well() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        broker.store.writer.append(Message("t", b"by hand"), 0)
        broker.store.committer.commit()
        assert one.turn() == ["0:0:by hand"]


async def test_redelivered_messages_of_a_selection_are_delivered_again(autojump_clock: MockClock) -> None:
    """Each message is followed by others that nobody selects."""
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker, selection=Selection("A", frozenset((tags_code("A"),))))
        for tag in ("A", "C", "A", "C"):
            broker.store.writer.append(message(tag, "t", tag), 0)
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(broker.store.appended)
        first = await one.drain()
        assert len(first) == 2
        for offset in (0, 2):
            one.member.nack(0, offset)
        await trio.sleep(1)
        assert await one.drain() == first


async def test_leaving_a_deleted_topic_does_not_end_the_share_of_its_successor() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        old = Competitor(broker)
        broker.topics.delete("t")
        broker.groups.offsets.forget_topic("t")
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        old.member.leave()
        two = Competitor(broker)
        publish(broker, "t", 0, b"a", b"b", b"c")
        assert one.turn() == ["0:0:a", "0:1:b", "0:2:c"]
        assert two.turn() == []


async def test_a_queue_that_came_while_a_group_was_away_is_read_from_its_beginning() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker, start=from_tail)
        one.member.leave()
        broker.topics.update("t", 2, 2)
        publish(broker, "t", 1, b"a")
        assert Competitor(broker, start=from_tail).turn() == ["1:0:a"]


RULES = (None, GroupPolicy("tested"), GroupPolicy("other"))


def consume(broker: Broker, topic: str, group: str, policy: GroupPolicy | None, *, both: bool = True) -> Member:
    """Join, take two messages, and acknowledge both or the first."""
    member = broker.shared_groups.join(
        RecordingPeer(), topic, group, LINES, Membership(lease_s=30, credit=2, start=from_earliest), policy
    )
    assert len(told(member.collect(1 << 20))) == 2
    assert member.ack(0, 0)
    assert not both or member.ack(0, 1)
    return member


async def known(broker: Broker, *groups: tuple[str, str, GroupPolicy | None]) -> list[bool]:
    """Whether the broker knows how far each of *groups* (topic, group, policy) has consumed."""
    broker.store.committer.commit()
    await broker.store.flusher.wait_flushed(broker.store.appended)
    await wait_all_tasks_blocked()
    return [broker.shared_groups.find(*group) is not None for group in groups]


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_group_that_is_forgotten_takes_no_other_with_it(in_memory: bool) -> None:
    async with broker_in_memory() as broker:
        for topic in ("t", "u"):
            broker.topics.ensure(topic, 1)
            publish(broker, topic, 0, b"a", b"b")
        policy = GroupPolicy("tested")
        groups = [("t", "one", policy), ("t", "two", policy), ("u", "one", policy), ("t", "one", GroupPolicy("other"))]
        members = [consume(broker, *group, both=not in_memory) for group in groups]
        assert await known(broker, *groups) == [True] * 4
        for member in members:
            member.leave()
        await wait_all_tasks_blocked()
        assert broker.shared_groups.statistics()["shares"] == (4 if in_memory else 0)
        broker.shared_groups.forget("t", "one", policy)
        assert await known(broker, *groups) == [False, True, True, True]


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_consumer_group_that_is_deleted_takes_its_state_along_and_no_other(in_memory: bool) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a", b"b")
        groups = [("t", name, policy) for name in ("G", "H") for policy in RULES]
        members = [consume(broker, *group, both=not in_memory) for group in groups]
        assert await known(broker, *groups) == [True] * 6
        for member in members:
            member.leave()
        await wait_all_tasks_blocked()
        assert broker.shared_groups.statistics()["shares"] == (6 if in_memory else 0)
        broker.groups.delete("G", clean_offsets=True)
        assert await known(broker, *groups) == [False, True, True, True, True, True]


async def test_a_group_that_is_forbidden_a_topic_takes_no_other_with_it() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a", b"b")
        members = [consume(broker, "t", name, policy) for name in ("G", "H") for policy in RULES]
        broker.groups.set_forbidden("G", "t", readable=False)
        assert [member.group.gone for member in members] == [True, False, False, False, False, False]
        broker.groups.set_forbidden("G", "t", readable=True)
        assert not members[0].group.gone
        broker.topics.update("t", 1, 1, perm=2)
        assert [member.group.gone for member in members] == [True] * 6
