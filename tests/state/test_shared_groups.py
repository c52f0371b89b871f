"""Shared groups through restarts: acknowledgements, delivery counts and the rest of leases are in the log."""

import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.delivery.pushing import LINES, broker_in_memory, publish
from tests.groups.test_shared_groups import Competitor
from tests.state.group_talk import NEVER, POLICY, collect, drain, handles, join, known
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.delivery.subscriptions import from_earliest
from martlet.errors import Reason, Refused, StoreError
from martlet.groups.journal.journal_codec import (
    ACK,
    AGAIN,
    BACK,
    BEGIN,
    DROP,
    KEEP,
    NEW,
    RENEW,
    SETTLE,
    Change,
    Key,
    decode_note,
    encode_changes,
    head,
)
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message
from martlet.runtime.steps import begin, finish_now
from martlet.settings import DeliveryConfig
from martlet.tables.groups import Group
from martlet.testing import disk as disk_module
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.peers import RecordingPeer
from martlet.testing.stores import ManualClock

NUMBERS = st.integers(0, 1 << 44)
OFFSETS = st.lists(st.integers(0, 1 << 40), max_size=40, unique=True).map(sorted)
CHANGES = st.one_of(
    st.builds(Change, st.just(KEEP), NUMBERS, NUMBERS, NUMBERS, OFFSETS, st.just(0)),
    st.builds(Change, st.just(NEW), NUMBERS, NUMBERS, NUMBERS, OFFSETS, NUMBERS),
    st.builds(Change, st.sampled_from([AGAIN, BACK, RENEW]), NUMBERS, NUMBERS, st.just(0), OFFSETS, st.just(0)),
    st.builds(Change, st.just(ACK), st.just(0), st.just(0), st.just(0), OFFSETS, st.just(0)),
    st.builds(Change, st.just(SETTLE), st.just(0), st.just(0), NUMBERS, OFFSETS, st.just(0)),
    st.builds(Change, st.just(BEGIN), st.just(0), st.just(0), NUMBERS, st.just(()), st.just(0)),
    st.just(Change(DROP)),
)
KEY = Key("tested", "gruppe ä", "t", 3)
DAY_MS = 86_400_000


@given(number=NUMBERS, changes=st.lists(CHANGES, max_size=10), bytes_max=st.integers(100, 1000))
def test_notes_come_back_as_they_were(number: int, changes: list[Change], bytes_max: int) -> None:
    notes = encode_changes(head(number, KEY), changes, bytes_max, head(number))
    assert all(len(note) <= bytes_max for note in notes)
    found: list[Change] = []
    for index, note in enumerate(notes):
        back, key, each = decode_note(note)
        assert (back, key) == (number, None if index else KEY)
        found += each
    assert _joined(found) == _joined(changes)


def _joined(changes: list[Change]) -> list[tuple[Any, ...]]:
    """Changes of one kind after each other as one: a note may split them."""
    found: list[list[Any]] = []
    for change in changes:
        last = found[-1] if found else None
        if last and last[:3] == list(change[:3]) and (last[3] == change.number or last[3] == change.first):
            last[3] = change.number
            last[4] = sorted({*last[4], *change.offsets})
        else:
            found.append([*change[:4], sorted(change.offsets), change.first])
    return [tuple(each) for each in found]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_note_or_a_store_error(data: bytes) -> None:
    try:
        number, _, changes = decode_note(data)
        found = list(changes)
    except StoreError as error:
        assert str(error)  # noqa: PT017
    else:
        assert number >= 0
        assert all(isinstance(each, Change) for each in found)


def test_acknowledgements_in_batches_take_little() -> None:
    offsets = list(range(1000, 1256))
    together = encode_changes(head(1), [Change(ACK, offsets=offsets)], 1 << 16, head(1))[0]
    assert len(together) <= 10
    every_second = encode_changes(head(1), [Change(ACK, offsets=offsets[::2])], 1 << 16, head(1))[0]
    assert len(every_second) <= 1.1 * len(offsets) / 2
    out = encode_changes(head(1), [Change(NEW, 1_790_000_000_000, 30_000, 1032, offsets[:32])], 1 << 16, head(1))[0]
    assert len(out) <= 28


@asynccontextmanager
async def again(disk: FakeDisk, clock: ManualClock, **options: Any) -> AsyncIterator[Broker]:
    disk.cached = True  # what a broker has just written is in the page cache
    async with broker_in_memory(disk, clock=clock, **options) as broker:
        broker.topics.ensure("t", 1)
        yield broker


async def durable(broker: Broker) -> None:
    broker.store.committer.commit()
    await broker.store.flusher.flush()


async def test_what_was_acknowledged_out_of_order_stays_so_after_a_restart() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a", b"b", b"c", b"d")
        member = join(broker)
        assert collect(member)[0] == ["a", "b", "c", "d"]
        assert member.ack(0, 1)
        assert member.ack(0, 3)
        await durable(broker)
    clock.ms += 31_000
    async with again(disk, clock) as broker:
        member = join(broker)
        bodies, found = collect(member)
        assert bodies == ["a", "c"]
        assert [delivery.delivery for delivery in found] == [2, 2]


async def test_after_kill_9_leases_hold_for_the_rest_of_their_time(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a", b"b")
        found = handles(collect(join(broker, lease_s=30))[1])
        await durable(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    clock.ms += 10_000
    async with again(killed, clock) as broker:
        member = join(broker)
        assert collect(member)[0] == []
        shared_group = broker.shared_groups.find("t", "gruppe ä", POLICY)
        assert shared_group is not None
        assert shared_group.ack(0, 0, found[0])
        assert not shared_group.ack(0, 0, found[0])
        await trio.sleep(19.9)
        assert collect(member)[0] == []
        await trio.sleep(0.2)
        bodies, deliveries = collect(member)
        assert (bodies, deliveries[0].delivery) == (["b"], 2)
        assert deliveries[0].generation > found[1]
        assert not shared_group.ack(0, 1, found[1])


async def test_a_lease_without_end_ends_with_the_broker() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a")
        member = join(broker, lease_s=NEVER)
        assert collect(member)[0] == ["a"]
        assert (
            broker.shared_groups.in_memory.by_place["t", "gruppe ä", "tested"].queues.by_queue[0].leases.deadline()
            == NEVER
        )
        await durable(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    async with again(killed, clock) as broker:
        bodies, found = collect(join(broker))
        assert (bodies, found[0].delivery) == (["a"], 2)


async def test_what_is_kept_by_a_holder_is_acknowledged_over_its_next_connection() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a", b"b")
        first = join(broker, keep="session", credit=2)
        assert collect(first)[0] == ["a", "b"]
        first.leave(keep=True)
        other = join(broker)
        assert collect(other)[0] == []
        second = join(broker, keep="session", credit=0)
        assert second.ack(0, 0)
        assert second.credit == 1
        second.leave()
        assert collect(other)[0] == ["b"]


async def test_a_handle_shortens_extends_and_is_replaced(autojump_clock: MockClock) -> None:
    disk = FakeDisk()
    disk.cached = True
    async with broker_in_memory(disk) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a", b"b")
        member, other = join(broker, lease_s=30, credit=2), join(broker, lease_s=1000)
        found = handles(collect(member)[1])
        shared_group = member.group
        shorter, longer = shared_group.renew(0, 0, found[0], 5), shared_group.renew(0, 1, found[1], 60)
        assert shorter > found[0]
        assert shared_group.renew(0, 0, found[0], 5) == 0
        assert not shared_group.nack(0, 1, found[1])
        await trio.sleep(5.1)
        assert collect(other)[0] == ["a"]
        await trio.sleep(50)
        assert collect(other)[0] == []
        assert shared_group.nack(0, 1, longer)
        await trio.sleep(1)
        assert collect(other)[0] == ["b"]
        assert member.credit == 1  # of the message that was given back; the other lapsed in silence


async def test_messages_and_acknowledgements_are_stored_together() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        broker.topics.ensure("out", 1)
        publish(broker, "t", 0, b"a", b"b")
        member = join(broker, credit=2)
        found = handles(collect(member)[1])
        note = member.group.acknowledgement(0, 0, found[0])
        assert not member.ack(0, 0)
        with pytest.raises(Refused) as refused:
            member.group.acknowledgement(0, 0, found[0])
        assert refused.value.reason is Reason.NOT_FOUND
        broker.publish_all([Message("out", b"result", queue_id=0)], atomic=True, notes=[note])
        assert member.group.queues.by_queue[0].leases.table.unsettled == 2
        broker.store.committer.commit()
        assert member.group.queues.by_queue[0].leases.table.unsettled == 1
        assert member.credit == 1
        await durable(broker)
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    async with again(killed, clock) as broker:
        assert known(broker.shared_groups.state)[1].keys() == {1}
        assert broker.store.queue("out", 0).next_offset == 1


async def test_a_withdrawn_acknowledgement_changes_nothing() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a")
        member = join(broker)
        found = handles(collect(member)[1])
        note = member.group.acknowledgement(0, 0, found[0])
        with pytest.raises(Refused):
            broker.publish_all([Message("nowhere", b"x")], atomic=True, notes=[note])
        member.group.withdraw(0, 0)
        assert member.ack(0, 0)


async def test_a_full_disk_does_not_stop_acknowledgements_and_they_are_noted_when_it_heals() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a", b"b", b"c")
        member = join(broker)
        collect(member)
        await durable(broker)
        broker.store.admission.refusal = "the disk is full"
        assert member.ack(0, 1)
        broker.store.committer.commit()
        broker.store.admission.refusal = ""
        await durable(broker)
        assert known(broker.shared_groups.state)[1].keys() == {0, 2}


async def test_a_commit_that_fails_is_noted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a", b"b", b"c")
        member = join(broker)
        collect(member)
        await durable(broker)
        assert member.ack(0, 1)
        tail = broker.store.tail
        write_out = type(tail).write_out

        def full(self: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(tail), "write_out", full)
        with pytest.raises(Refused):
            broker.store.committer.commit()
        monkeypatch.setattr(type(tail), "write_out", write_out)
        assert known(broker.shared_groups.state)[1].keys() == {0, 1, 2}
        broker.store.admission.refusal, broker.store.admission.disk_full = "", False
        assert member.ack(0, 2)
        await durable(broker)
        assert known(broker.shared_groups.state)[1].keys() == {0}


@pytest.mark.parametrize("how", ["failed commit", "full disk", "retention"])
@pytest.mark.parametrize("set_by_ms", [DAY_MS, -DAY_MS], ids=["ahead", "back"])
async def test_a_clock_that_is_set_changes_no_lease_that_is_noted_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, how: str, set_by_ms: int
) -> None:
    """Once the clock is right again, a message that is held or pauses returns after its own time."""
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"held", b"given back", b"renewed", b"acked", b"acked later")
        member = join(broker, lease_s=30)
        found = handles(collect(member)[1])
        assert member.group.nack(0, 1, found[1], 20)
        assert member.group.renew(0, 2, found[2], 50)
        await durable(broker)
        clock.ms += set_by_ms
        admission, tail = broker.store.admission, broker.store.tail
        assert member.ack(0, 3)
        if how == "retention":
            finish_now(broker.shared_groups.state.roll(0, broker.store.readable))
        elif how == "full disk":
            admission.refusal = "the disk is full"
            broker.store.committer.commit()
        else:
            with monkeypatch.context() as patch:
                patch.setattr(type(tail), "write_out", _refuse_to_write)
                with pytest.raises(Refused):
                    broker.store.committer.commit()
        admission.refusal, admission.disk_full = "", False
        assert member.ack(0, 4)
        await durable(broker)
        clock.ms -= set_by_ms
        assert known(broker.shared_groups.state)[1].keys() == {0, 1, 2}
    async with again(disk, clock) as broker:
        member = join(broker, lease_s=1000)
        assert collect(member)[0] == []
        for wait_s, bodies in ((20.1, ["given back"]), (10, ["held"]), (19, []), (1, ["renewed"])):
            await trio.sleep(wait_s)
            assert collect(member)[0] == bodies


def _refuse_to_write(tail: Any) -> None:
    raise OSError(28, "No space left on device")


async def test_a_deleted_topic_a_deleted_group_and_a_forgotten_one_leave_nothing() -> None:
    async with broker_in_memory() as broker:
        for name in ("t", "u"):
            broker.topics.ensure(name, 1)
        publish(broker, "t", 0, b"a")
        member = join(broker)
        collect(member)
        other = join(broker, group="other")
        collect(other)
        broker.store.committer.commit()
        assert len(broker.shared_groups.state) == 2
        broker.shared_groups.forget("t", "other", POLICY)
        broker.store.committer.commit()
        assert len(broker.shared_groups.state) == 1
        broker.topics.delete("t")
        broker.store.committer.commit()
        assert len(broker.shared_groups.state) == 0
        assert broker.shared_groups.state.leases == 0


async def test_a_consumer_group_that_is_deleted_begins_anew() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a")
        broker.groups.update(Group("G"))
        one = Competitor(broker)
        assert one.turn() == ["0:0:a"]
        one.member.ack(0, 0)
        one.member.leave()
        broker.groups.delete("G", clean_offsets=True)
        broker.store.committer.commit()
        assert len(broker.shared_groups.state) == 0
        assert Competitor(broker).turn() == ["0:0:a"]


async def test_remembered_queues_are_bounded() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(share_queues_max=1)) as broker:
        broker.topics.ensure("t", 1)
        join(broker)
        with pytest.raises(Refused, match="share_queues_max is 1") as refused:
            join(broker, group="another")
        assert refused.value.reason is Reason.BUSY


async def test_one_member_is_woken_for_a_message_and_a_slow_one_is_passed_over(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        members = [join(broker) for _ in range(20)]
        for member in members:
            collect(member)
            member.peer.wakes = 0  # type: ignore[attr-defined]
        publish(broker, "t", 0, b"a")
        woken = [member for member in members if member.peer.wakes]  # type: ignore[attr-defined]
        assert len(woken) == 1
        await trio.sleep(0.2)
        second = [m for m in members if m.peer.wakes and m is not woken[0]]  # type: ignore[attr-defined]
        assert second
        assert collect(second[0])[0] == ["a"]


async def test_a_dead_message_without_a_dead_letter_topic_is_dropped_and_with_one_is_there(
    autojump_clock: MockClock,
) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a")
        for policy in (GroupPolicy("x", 0), GroupPolicy("y", 0, "dead")):
            member = broker.shared_groups.join(
                RecordingPeer(), "t", "g", LINES, Membership(lease_s=5, credit=1, start=from_earliest), policy
            )
            collect(member)
            assert member.nack(0, 0)
            await trio.sleep(1)
            assert member.group.queues.by_queue[0].leases.table.low == 1
        assert broker.store.queue("dead", 0).next_offset == 1


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("orderly", [False, True])
async def test_a_refused_message_is_dead_after_a_restart_too(
    gives_up: bool, orderly: bool, autojump_clock: MockClock
) -> None:
    """Killed or stopped before its dead letter is stored; only a refusal makes messages of this group dead."""
    policy = GroupPolicy("x", 0, "dead", leaving_counts=False)
    disk, clock = FakeDisk(), ManualClock()

    def joined(broker: Broker) -> Member:
        return broker.shared_groups.join(
            RecordingPeer(), "t", "g", LINES, Membership(lease_s=NEVER, credit=9, start=from_earliest), policy
        )

    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a", b"b", b"c")
        member = joined(broker)
        assert collect(member)[0] == ["a", "b", "c"]
        assert member.give_up_all(0, [0, 2]) == [0, 2] if gives_up else member.nack_all(0, [0, 2]) == [0, 2]
        broker.store.committer.commit()
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
        assert broker.store.queue("dead", 0).next_offset == 0
    async with again(disk if orderly else killed, clock) as broker:
        member = joined(broker)
        assert collect(member)[0] == ["b"]
        await trio.sleep(1)
        assert collect(member)[0] == []
        assert broker.store.queue("dead", 0).next_offset == 2
        assert member.ack(0, 1)
        assert member.group.queues.by_queue[0].leases.table.low == 3


async def test_100_000_leases_of_the_dead_come_again(autojump_clock: MockClock) -> None:
    """Held by 100 holders that are never heard of; from the log, after kill -9."""
    count, config = 100_000, DeliveryConfig(lease_window=100_000)
    sizes: dict[str, int] = {"segment_bytes": 1 << 26, "page_bytes": 1 << 16, "cache_bytes": 1 << 26}
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock, delivery=config, **sizes) as broker:
        for _ in range(count // 1000):
            publish(broker, "t", 0, *(b"x",) * 1000)
        for number in range(100):
            member = join(broker, keep=f"holder {number}", credit=1000, lease_s=60)
            while member.credit:
                assert collect(member)[0]
            member.leave(keep=True)
        await durable(broker)
        assert broker.shared_groups.state.leases == count
        killed = disk.after_power_cut(Cut.KILLED, Random(1))
    clock.ms += 59_000
    async with again(killed, clock, delivery=config, **sizes) as broker:
        member = join(broker, credit=count)
        assert collect(member)[0] == []
        await trio.sleep(1.1)
        bodies, found = await drain(member)
        assert len(bodies) == count
        assert all(delivery.delivery == 2 for delivery in found)


async def test_a_lease_takes_little_memory_and_12_bytes_of_a_snapshot_at_most() -> None:
    """Each lease has a generation and a duration of its own, and every other message is settled: the worst case."""
    count, config = 20_000, DeliveryConfig(lease_window=100_000)
    sizes: dict[str, int] = {"segment_bytes": 1 << 24, "page_bytes": 1 << 16, "cache_bytes": 1 << 24}
    clock = ManualClock()
    async with again(FakeDisk(), clock, delivery=config, **sizes) as broker:
        for _ in range(count // 1000):
            publish(broker, "t", 0, *(b"x",) * 1000)
        member = join(broker, credit=count, lease_s=60)
        gc.collect()
        tracemalloc.start()
        while member.credit:
            assert collect(member)[0]
        await durable(broker)
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, disk_module.__file__)])
        used = sum(each.size for each in ours.statistics("filename"))
        tracemalloc.stop()
        random, renew = Random(1), member.group.settlement.renew_held
        for offset in range(count):
            clock.ms += random.randrange(50)
            assert member.ack(0, offset) if offset % 2 else renew(member.holder, 0, offset, offset)
        await durable(broker)
        state = broker.shared_groups.state
        began = time.perf_counter()
        rows = begin(state.freeze())
        took_ms = (time.perf_counter() - began) * 1000
        size = sum(map(len, finish_now(rows)))
        print(
            f"{used / count:.0f} B of memory, {size / state.leases:.2f} B of snapshot a lease; freeze {took_ms:.3f} ms"
        )
        assert state.leases == count // 2
        assert size <= 12 * state.leases
        assert used <= 600 * count


async def test_what_a_group_needs_is_noted_again_before_retention_removes_it() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with again(disk, clock) as broker:
        publish(broker, "t", 0, b"a", b"b", b"c")
        member, left = join(broker), join(broker, group="left")
        collect(member)
        collect(left)
        member.ack(0, 1)
        await durable(broker)
        before = known(broker.shared_groups.state)
        queue = broker.shared_groups.state.get(KEY._replace(queue_id=0))
        assert queue is not None
        floor, end = broker.shared_groups.state.floor(), broker.store.appended
        assert floor == queue.since
        for _ in broker.shared_groups.state.roll(0, end):
            pass
        await durable(broker)
        assert broker.shared_groups.state.floor() >= end
        assert known(broker.shared_groups.state)[1].keys() == before[1].keys()
        assert known(broker.shared_groups.state)[0] == before[0]
