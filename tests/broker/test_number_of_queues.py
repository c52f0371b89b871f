"""A topic gets fewer queues, and more again: every kind of consumer gets every message, also over a restart."""

import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from tests.delivery.pushing import LINES, broker_in_memory, publish, subscribe, told
from tests.delivery.test_cursor import Client, feed_of, send, settle
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.contracts import Identity
from martlet.delivery.subscriptions import from_earliest
from martlet.draining import BEGUN_A_TURN, LOOK_S, Unread
from martlet.errors import Reason, Refused
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message
from martlet.runtime.steps import finish_now
from martlet.tables.groups import Group
from martlet.tables.topics import Topic
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer

BODIES = [b"%d" % number for number in range(8)]
EXPECTED = sorted(f"{number}:0:{number}" for number in range(8))
POLICY = GroupPolicy("toys")


def fill(broker: Broker, queues: int = 8) -> None:
    """Publish a message to each queue."""
    broker.topics.ensure("t", queues)
    for queue_id, body in enumerate(BODIES[:queues]):
        publish(broker, "t", queue_id, body)


def topic(broker: Broker, name: str = "t") -> Topic:
    found = broker.topics.get(name)
    assert found is not None
    return found


def numbers(broker: Broker) -> tuple[int, int]:
    return topic(broker).read_queues, topic(broker).write_queues


def unread(broker: Broker, first_queue: int = 1) -> tuple[int, str]:
    found: Unread = finish_now(broker.draining.unread(topic(broker), first_queue))
    return found.messages, found.reader


@asynccontextmanager
async def shrunk(*, restart: bool) -> AsyncIterator[Broker]:
    """A broker whose topic had eight queues with messages, and should have one; perhaps started again since."""
    disk = FakeDisk()
    disk.cached = True
    async with broker_in_memory(disk) as broker:
        fill(broker)
        broker.topics.update("t", 1, 1)
        if not restart:
            yield broker
            return
    async with broker_in_memory(disk) as broker:
        yield broker


async def by_subscription(broker: Broker) -> list[str]:
    return await subscribe(broker, "t", start=from_earliest).drain()


async def by_group(broker: Broker) -> list[str]:
    return await _by_group(broker, None)


async def by_group_with_a_policy(broker: Broker) -> list[str]:
    return await _by_group(broker, POLICY)


async def _by_group(broker: Broker, policy: GroupPolicy | None) -> list[str]:
    peer = RecordingPeer()
    member = broker.shared_groups.join(
        peer, "t", "G", LINES, Membership(lease_s=30, credit=100, start=from_earliest), policy
    )
    found = told(member.collect(1 << 20))
    for line in found:
        assert member.ack(int(line.split(":")[0]), 0)
    return found


async def by_cursor(broker: Broker) -> list[str]:
    client = Client(broker.cursors.open(("t",)), "#", position=0)
    await settle(broker)
    return [f"{body}:0:{body}" for body in client.take()]


async def by_reads(broker: Broker) -> list[str]:
    """As admin commands, pulls and Spark: a queue by its number."""
    gate = broker.gate(Identity())
    grant = gate.consume("G", "t")
    found: list[str] = []
    for queue_id in topic(broker).queue_ids():
        result = await grant.read(queue_id, 0, 10, 1 << 20)
        found += [f"{queue_id}:0:{queue_id}"] * result.count
    return found


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("consume", [by_subscription, by_group, by_group_with_a_policy, by_cursor, by_reads])
async def test_what_was_sent_before_is_read_after(
    consume: Callable[[Broker], Awaitable[list[str]]], restart: bool, mock_clock: MockClock
) -> None:
    async with shrunk(restart=restart) as broker:
        assert numbers(broker) == (8, 1)
        assert sorted(await consume(broker)) == EXPECTED


async def test_new_messages_go_only_to_the_queues_that_are_left() -> None:
    async with shrunk(restart=False) as broker:
        placed = [broker.publish(Message("t", b"x")) for _ in range(20)]
        assert {each.queue_offset for each in placed} == set(range(1, 21))  # all in one queue
        assert broker.find_queue("t", 7) is not None, "who has an old route still sends there"


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("consume", [by_group, by_group_with_a_policy])
async def test_queues_go_once_all_known_consumers_have_read_them(
    consume: Callable[[Broker], Awaitable[list[str]]],
    restart: bool,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with shrunk(restart=restart) as broker:
        await trio.sleep(2 * LOOK_S)
        assert numbers(broker) == (8, 1), "nobody has read them"
        broker.groups.update(Group("Slow"))
        broker.groups.offsets.commit("Slow", "t", 0, 1)
        caplog.set_level(logging.INFO, "martlet.delivery")
        await consume(broker)
        await settle(broker)
        await trio.sleep(2 * LOOK_S)
        assert (numbers(broker), unread(broker)) == ((8, 1), (7, "group Slow"))
        broker.groups.delete("Slow", clean_offsets=True)
        assert unread(broker)[0] == 0
        await trio.sleep(2 * LOOK_S)
        assert numbers(broker) == (1, 1)
        assert "topic t has 1 queues instead of 8: the rest is consumed" in caplog.text
        assert not broker.draining.topics
        with pytest.raises(Refused) as refused:
            broker.publish(Message("t", b"x", queue_id=7))
        assert refused.value.reason is Reason.PARAMETER


@pytest.mark.parametrize("restart", [False, True])
async def test_a_group_that_found_everything_by_names_and_left_keeps_no_queues(
    restart: bool, autojump_clock: MockClock
) -> None:
    disk = FakeDisk()
    disk.cached = True
    async with broker_in_memory(disk) as broker:
        names = MessageSelection(feed_of(broker, 8), "n")
        member = broker.shared_groups.join(
            RecordingPeer(), "t", "G", LINES, Membership(lease_s=30, credit=100, names=names), POLICY
        )
        for number in range(8):
            send(broker, "n", str(number), number)
        await settle(broker)
        found = told(member.collect(1 << 20))
        assert len(found) == 8
        assert all(member.ack(int(line.split(":")[0]), 0) for line in found)
        await settle(broker)
        member.leave()
        await trio.sleep(2 * LOOK_S)
        broker.topics.update("t", 1, 1)
        assert numbers(broker) == (8, 1)
        if not restart:
            await trio.sleep(2 * LOOK_S)
            assert numbers(broker) == (1, 1)
            return
    async with broker_in_memory(disk) as broker:
        await trio.sleep(2 * LOOK_S)
        assert numbers(broker) == (1, 1)


async def test_queues_without_messages_go_at_once() -> None:
    async with broker_in_memory() as broker:
        fill(broker, 3)
        broker.topics.update("t", 8, 8)
        broker.topics.update("t", 1, 1)
        assert numbers(broker) == (3, 1)


async def test_a_session_keeps_the_queues_until_it_is_after_their_messages(autojump_clock: MockClock) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 8)
        session, _ = broker.sessions.open("toy", "owner", "me", 0, lambda reason: None, expiry_s=1000)
        session.subscribe("#")
        await settle(broker)
        fill(broker)
        await settle(broker)
        session.leave()
        broker.topics.update("t", 1, 1)
        assert unread(broker) == (7, "session toy me")
        broker.sessions.missed.topics_of["toy"] = lambda filters: ["other"]
        assert unread(broker) == (7, ""), "no consumer is known"
        broker.sessions.missed.topics_of["toy"] = lambda filters: ["t"]
        await trio.sleep(2 * LOOK_S)
        assert numbers(broker) == (8, 1)
        await settle(broker)
        session, _ = broker.sessions.open("toy", "owner", "me", 0, lambda reason: None, expiry_s=1000)
        session.move(broker.store.readable)
        await settle(broker)
        assert unread(broker)[0] == 0
        await trio.sleep(2 * LOOK_S)
        assert numbers(broker) == (1, 1)


async def test_those_who_do_not_say_how_far_they_are_keep_the_queues(autojump_clock: MockClock) -> None:
    async with shrunk(restart=False) as broker:
        broker.draining.others.append(lambda name: "some reader" if name == "t" else "")
        await by_group(broker)
        await settle(broker)
        await trio.sleep(2 * LOOK_S)
        assert (numbers(broker), unread(broker)) == ((8, 1), (7, "some reader"))


async def test_by_force_the_messages_are_gone_also_after_a_restart() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        fill(broker)
        late = subscribe(broker, "t", start=from_earliest, credit=0)
        broker.groups.update(Group("G"))
        broker.groups.offsets.commit("G", "t", 3, 1)
        assert unread(broker) == (6, "group G")
        forced = broker.topics.update("t", 1, 1, force=True)
        finish_now(broker.draining.drop(forced))
        assert numbers(broker) == (1, 1)
        assert broker.store.upkeep.topic_retention.removed_to("t") > 0, "sessions count them as missed"
        late.subscription.add_credit(100)
        assert await late.drain() == ["0:0:0"]
        await settle(broker)
    async with broker_in_memory(disk) as broker:
        assert numbers(broker) == (1, 1)
        broker.topics.update("t", 8, 8)
        assert await by_subscription(broker) == ["0:0:0"]


async def test_what_rocketmq_took_away_is_read_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Its topics.json says one queue, and there are messages in eight; an older version of ours wrote the same."""
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        fill(broker)
        await settle(broker)
    path = "/data/config/topics.json"
    fd = disk.open(path)
    written = json.loads(disk.read(fd, disk.size(fd), 0))
    written["topicConfigTable"]["t"].update(readQueueNums=1, writeQueueNums=1)
    disk.truncate(fd, 0)
    disk.write(fd, json.dumps(written).encode(), 0)
    disk.close(fd)
    async with broker_in_memory(disk) as broker:
        assert numbers(broker) == (8, 1)
        assert "topic t has 1 queues, but messages in up to 8" in caplog.text
        assert sorted(await by_subscription(broker)) == EXPECTED


# more queues


@pytest.mark.parametrize("restart", [False, True])
async def test_a_group_begins_at_the_beginning_of_queues_that_are_added(restart: bool) -> None:
    """However large they are when its client asks, which may be later than the first messages."""
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        fill(broker, 2)
        for name in ("G", "Other"):
            broker.groups.update(Group(name))
        broker.groups.offsets.commit("G", "t", 0, 1)
        if not restart:
            broker.topics.update("t", 4, 4)
            assert dict(broker.groups.offsets.committed("G", "t")) == {0: 1, 2: 0, 3: 0}
            assert not broker.groups.offsets.committed("Other", "t"), "it begins where its client wants"
            return
    async with broker_in_memory(disk) as broker:
        broker.topics.update("t", 4, 4)
        assert dict(broker.groups.offsets.committed("G", "t")) == {0: 1, 2: 0, 3: 0}


async def test_offsets_of_very_many_groups_are_committed_over_several_turns() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        names = [f"G{number}" for number in range(BEGUN_A_TURN // 8 + 10)]
        for name in names:
            broker.groups.update(Group(name))
            broker.groups.offsets.commit(name, "t", 0, 0)
        broker.topics.update("t", 17, 17)
        assert len(broker.groups.offsets.committed(names[-1], "t")) == 1
        await wait_all_tasks_blocked()
        assert {len(broker.groups.offsets.committed(name, "t")) for name in names} == {17}


async def test_a_group_without_room_for_offsets_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.update(Group("G"))
        broker.groups.offsets.commit("G", "t", 0, 0)
        broker.groups.offsets._offsets_max = 3
        broker.topics.update("t", 8, 8)
        assert dict(broker.groups.offsets.committed("G", "t")) == {0: 0}
        assert "new queues of topic t: group G begins where its client wants" in caplog.text


@pytest.mark.parametrize("restart", [False, True])
async def test_queues_that_come_back_bring_nobody_what_was_read(restart: bool, autojump_clock: MockClock) -> None:
    """They were taken away once they were consumed; who began to read since then begins at their end."""
    disk = FakeDisk()
    disk.cached = True
    async with broker_in_memory(disk) as broker:
        feed_of(broker, 8)
        for number in range(8):
            send(broker, "n", str(number), number)
        await settle(broker)
        broker.topics.update("t", 1, 1)
        await by_group(broker)
        await settle(broker)
        await trio.sleep(2 * LOOK_S)
        assert numbers(broker) == (1, 1)
    async with broker_in_memory(disk) as broker:
        late, reader = subscribe(broker, "t"), Client(feed_of(broker, 1), "#")
        peer = RecordingPeer()
        group = broker.shared_groups.join(peer, "t", "New", LINES, Membership(lease_s=30, credit=100))
        policed = broker.shared_groups.join(peer, "t", "New", LINES, Membership(lease_s=30, credit=100), POLICY)
        await settle(broker)
        broker.topics.update("t", 8, 8)
        assert dict(broker.groups.offsets.committed("New", "t")) == {0: 1, **dict.fromkeys(range(1, 8), 1)}
        send(broker, "n", "new", 7)
        await settle(broker)
        assert (await late.drain(), reader.take()) == (["7:1:new"], ["new"])
        assert (told(group.collect(1 << 20)), told(policed.collect(1 << 20))) == (["7:1:new"], ["7:1:new"])
    if restart:
        async with broker_in_memory(disk) as broker:
            later = broker.shared_groups.join(RecordingPeer(), "t", "Newer", LINES, Membership(lease_s=30, credit=100))
            assert told(later.collect(1 << 20)) == []
            assert broker.topics.update("t", 9, 9).begins == dict.fromkeys(range(1, 8), 1)
