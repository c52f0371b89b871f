"""The tail of a topic: what is read, whom a message wakes, and what its receivers share. Counts, never times."""

import logging
from collections.abc import Callable, Hashable
from errno import ENOSPC

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from tests.delivery.pushing import LINES, broker_in_memory, publish, subscribe

from martlet.broker import Broker
from martlet.delivery import listeners, merge, tail_reader
from martlet.delivery.fanout import Encoding, parts
from martlet.delivery.routing.division import Found
from martlet.delivery.routing.route_cache import RouteCache
from martlet.delivery.routing.selection import EVERYTHING, select_tags
from martlet.delivery.runs import Run
from martlet.delivery.tail_reader import TailReader
from martlet.errors import Refused
from martlet.message import Message
from martlet.settings import DeliveryConfig
from martlet.store import Queue
from martlet.store.read.readers import Readers
from martlet.testing.disk import FakeDisk

BODIES = Encoding("bodies", lambda piece: [body for _, _, _, body, _ in parts(piece)])


class Listening:
    """A receiver that remembers what it was given."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.grants: list[tuple[Hashable, ...]] = []

    def matched(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        self.runs.append(run)
        self.grants.append(grants)

    @property
    def bodies(self) -> list[str]:
        return [bytes(record.body).decode() for run in self.runs for record in run.records()]

    @property
    def positions(self) -> list[int]:
        return [record.position for run in self.runs for record in run.records()]


class Ringing:
    """A listener for everything that does nothing."""

    selection = EVERYTHING

    def arrived_at(self, queue: Queue) -> None: ...


def tag(name: str) -> bytes:
    return f"TAGS\x01{name}\x02".encode()


def follow(broker: Broker, queues: int = 1) -> tuple[TailReader, RouteCache[Listening]]:
    routes: RouteCache[Listening] = RouteCache()
    reader = broker.tails.of(broker.topics.ensure("t", queues))
    reader.attach(routes)
    return reader, routes


async def test_a_message_goes_to_those_whose_filters_match_and_to_nobody_else() -> None:
    async with broker_in_memory() as broker:
        reader, routes = follow(broker)
        exact, wild, other = Listening(), Listening(), Listening()
        routes.add("a/b", exact, 1)
        routes.add("a/+", wild, 0)
        routes.add("#", wild, 2)
        routes.add("c/#", other)
        publish(broker, "t", 0, b"one", properties=tag("a/b"))
        publish(broker, "t", 0, b"two", properties=tag("a/c"))
        assert (exact.bodies, wild.bodies, other.bodies) == (["one"], ["one", "two"], [])
        assert exact.grants == [(1,)]
        assert sorted(wild.grants[0], key=str) == [0, 2]
        assert reader.viewed == 2


async def test_each_record_is_read_once_however_many_follow() -> None:
    async with broker_in_memory() as broker:
        reader, routes = follow(broker)
        crowd = [Listening() for _ in range(500)]
        for number, each in enumerate(crowd):
            routes.add(f"name/{number}", each)
        everyone = [Listening() for _ in range(50)]
        for each in everyone:
            routes.add("#", each)
        for number in range(20):
            broker.publish(Message("t", b"%d" % number, tag(f"name/{number}"), 0))
        broker.store.committer.commit()
        assert (reader.reads, reader.viewed) == (1, 20)
        assert [each.bodies for each in crowd[:20]] == [[str(number)] for number in range(20)]
        assert not any(each.runs for each in crowd[20:])
        assert all(each.bodies == [str(number) for number in range(20)] for each in everyone)
        assert all(run is first for each in everyone for run, first in zip(each.runs, everyone[0].runs, strict=True))


async def test_subscriptions_by_tag_are_woken_by_their_tags_alone_and_no_record_is_read_for_that() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        by_tag = {name: subscribe(broker, "t", selection=select_tags((name,))) for name in ("A", "B", "C")}
        everything = subscribe(broker, "t")
        for name in ("A", "B", "A"):
            publish(broker, "t", 0, name.encode(), properties=tag(name))
        assert [each.peer.wakes for each in by_tag.values()] == [2, 1, 0]
        assert everything.peer.wakes == 3
        assert await by_tag["A"].drain() == ["0:0:A", "0:2:A"]
        reader = broker.tails.of(broker.topics.ensure("t", 1))
        assert reader.viewed == 0
        publish(broker, "t", 0, b"C", properties=tag("C"))
        assert await by_tag["C"].drain() == ["0:3:C"]


async def test_a_commit_of_many_entries_wakes_every_tag_rather_than_look_at_each() -> None:
    async with broker_in_memory(segment_bytes=1 << 22) as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t", selection=select_tags(("B",)))
        for _ in range(listeners.CODES_MAX + 1):
            broker.publish(Message("t", b"x", tag("A"), 0))
        broker.store.committer.commit()
        assert collector.peer.wakes == 1
        assert await collector.drain() == []


async def test_messages_of_one_route_are_one_run_and_encoded_once() -> None:
    encoded: list[int] = []

    def encode(piece: object) -> list[bytes]:
        frames = BODIES.encode(piece)  # type: ignore[arg-type]
        encoded.append(len(frames))
        return frames

    async with broker_in_memory() as broker:
        _, routes = follow(broker)
        one, two, other = Listening(), Listening(), Listening()
        for each in (one, two):
            routes.add("a/#", each)
        routes.add("b", other)
        for name, body in (("a/1", b"x"), ("a/2", b"yy"), ("b", b"-"), ("a/1", b"zzz")):
            broker.publish(Message("t", body, tag(name), 0))
        broker.store.committer.commit()
        assert [run.count for run in one.runs] == [3]
        counting = Encoding("counting", encode)
        frames = [run.frames(counting) for each in (one, two) for run in each.runs]
        assert [(each.data, list(each.ends)) for each in frames[:1]] == [(b"xyyzzz", [1, 3, 6])]
        assert frames[:1] == frames[1:]
        assert encoded == [3]
        first = one.runs[0]
        assert (first.position, first.end) == (
            next(first.records()).position,
            [record.position + record.size for record in first.records()][-1],
        )


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", "c"]), st.booleans()), max_size=40))
def test_receivers_get_everything_in_log_order_over_all_queues(sent: list[tuple[int, str, bool]]) -> None:
    async def scenario() -> None:
        async with broker_in_memory(flush="sync") as broker:
            _, routes = follow(broker, 4)
            receiver = Listening()
            routes.add("a", receiver)
            routes.add("b", receiver)
            for number, (queue_id, name, commits) in enumerate(sent):
                broker.publish(Message("t", b"%d" % number, tag(name), queue_id))
                if commits:
                    broker.store.committer.commit()
                    await broker.store.flusher.wait_flushed(broker.store.appended)
            broker.store.committer.commit()
            await broker.store.flusher.wait_flushed(broker.store.appended)
            await trio.testing.wait_all_tasks_blocked()
            assert receiver.bodies == [str(n) for n, (_, name, _) in enumerate(sent) if name != "c"]
            assert receiver.positions == sorted(receiver.positions)

    trio.run(scenario)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_what_exceeds_a_slice_or_the_memory_is_routed_in_order_by_the_task(
    monkeypatch: pytest.MonkeyPatch, cache_bytes: int
) -> None:
    monkeypatch.setattr(tail_reader, "MESSAGES_A_SLICE", 8)
    async with broker_in_memory(flush="sync", cache_bytes=cache_bytes, page_bytes=4096) as broker:
        reader, routes = follow(broker, 3)
        receiver = Listening()
        routes.add("#", receiver)
        for number in range(100):
            broker.publish(Message("t", b"%d" % number, tag("n") + b"x\x01" + b"y" * 200, number * number % 3))
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(broker.store.appended)
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.bodies == [str(number) for number in range(100)]
        assert not reader.is_behind
        publish(broker, "t", 1, b"more", properties=tag("n"))
        await broker.store.flusher.wait_flushed(broker.store.appended)
        assert receiver.bodies[100:] == ["more"]


async def test_messages_that_arrive_during_a_read_are_routed_in_log_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A later read may see records that are behind those of a queue which is not read yet."""
    gates = [trio.Event()]

    async def off_loop(disk: FakeDisk, work: Callable[[], object]) -> object:
        if gates:
            await gates.pop().wait()
        return work()

    async with broker_in_memory() as broker:
        monkeypatch.setattr(FakeDisk, "off_loop", off_loop)
        monkeypatch.setattr(Readers, "read_near", lambda *arguments: None)
        _, routes = follow(broker, 3)
        receiver = Listening()
        routes.add("a", receiver)
        gate = gates[0]
        for queue_id in (0, 1):
            broker.publish(Message("t", b"%d" % queue_id, tag("a"), queue_id))
        broker.store.committer.commit()
        await trio.testing.wait_all_tasks_blocked()
        for queue_id, body in ((2, b"2"), (1, b"3")):
            publish(broker, "t", queue_id, body, properties=tag("a"))
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.bodies == ["0", "1", "2", "3"]


@pytest.mark.parametrize("more", [False, True])
async def test_a_read_for_an_interest_that_left_is_not_routed_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    gate = trio.Event()

    async def off_loop(disk: FakeDisk, work: Callable[[], object]) -> object:
        await gate.wait()
        return work()

    async with broker_in_memory() as broker:
        monkeypatch.setattr(FakeDisk, "off_loop", off_loop)
        monkeypatch.setattr(Readers, "read_near", lambda *arguments: None)
        reader, first = follow(broker, 2)
        for queue_id in (0, 1):
            broker.publish(Message("t", b"before", tag("a"), queue_id))
        broker.store.committer.commit()
        await trio.testing.wait_all_tasks_blocked()
        routes: RouteCache[Listening] = RouteCache()
        receiver = Listening()
        routes.add("a", receiver)
        reader.listen(listener := Ringing())  # so that the topic is followed all the time
        reader.detach(first)
        reader.attach(routes)
        if more:
            publish(broker, "t", 0, b"after", properties=tag("a"))
        gate.set()
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.bodies == ["after"] * more
        publish(broker, "t", 1, b"later", properties=tag("a"))
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.bodies == [*["after"] * more, "later"]
        reader.leave(listener)


@pytest.mark.parametrize("burst", [1, 3, 20])
async def test_a_slice_reads_the_first_messages_in_log_order_and_hardly_any_twice(
    monkeypatch: pytest.MonkeyPatch, burst: int
) -> None:
    """Publishers write many messages to one queue before others write to another one."""
    monkeypatch.setattr(tail_reader, "MESSAGES_A_SLICE", 8)
    read: list[int] = []
    records_in = merge.records_in

    def counted(data: bytes, queue: Queue) -> list[Found]:
        found = records_in(data, queue)
        read.extend(each[0] for each in found)
        return found

    for module in (merge, tail_reader):
        monkeypatch.setattr(module, "records_in", counted)
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        reader, routes = follow(broker, 4)
        receiver = Listening()
        routes.add("#", receiver)
        for number in range(100):
            broker.publish(Message("t", b"%d" % number, tag("n"), number // burst % 4))
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(broker.store.appended)
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.bodies == [str(number) for number in range(100)]
        assert reader.viewed == 100
        assert len(read) <= 110, "a slice leaves a few to the next one when others in front of them become readable"


async def test_frames_that_a_publisher_hands_on_leave_as_they_came() -> None:
    def never(piece: object) -> list[bytes]:
        raise AssertionError("it is encoded again")

    async with broker_in_memory() as broker:
        reader, routes = follow(broker, 2)
        receiver = Listening()
        routes.add("a", receiver)
        data = b"frame 0frame 1frame 2"
        placed = [broker.publish(Message("t", b"", tag("a"), queue_id)) for queue_id in (0, 1, 0)]
        reader.routing.hand_on("mqtt 3.1.1", [each.position for each in placed], data, [7, 14, 21])
        broker.store.committer.commit()
        frames = receiver.runs[0].frames(Encoding("mqtt 3.1.1", never))
        assert (frames.data, list(frames.ends)) == (data, [7, 14, 21])
        assert frames.data is data
        assert receiver.runs[0].frames(LINES).data == b"0:0:\n1:0:\n0:1:\n"
        assert reader.routing._handed.size == 0


async def test_frames_of_messages_that_were_not_stored_after_all_are_not_used_for_others() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk) as broker:
        reader, routes = follow(broker)
        receiver = Listening()
        routes.add("a", receiver)
        lost = broker.publish(Message("t", b"lost", tag("a"), 0)).position
        reader.routing.hand_on("bodies", [lost], b"lost", [4])
        disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            broker.store.committer.commit()
        broker.store.admission.refusal = ""
        assert broker.publish(Message("t", b"kept", tag("a"), 0)).position == lost
        broker.store.committer.commit()
        assert receiver.runs[0].frames(BODIES).data == b"kept"


async def test_frames_may_begin_anywhere_in_what_the_publisher_sent() -> None:
    async with broker_in_memory() as broker:
        reader, routes = follow(broker)
        receiver = Listening()
        routes.add("a", receiver)
        positions = [broker.publish(Message("t", b"", tag("a"), 0)).position for _ in range(2)]
        reader.routing.hand_on("e", positions, b"other onetwo rest", [9, 12], 6)
        reader.routing.hand_on("none", [], b"other", [])
        broker.store.committer.commit()
        (run,) = receiver.runs
        assert run.frames(Encoding("e", lambda piece: [b"new" for _ in parts(piece)])).data == b"onetwo"
        assert run.positions() == positions
        assert [each.positions() for each in run.split(1)] == [positions[:1], positions[1:]]


@pytest.mark.parametrize("left_out", [(), (0,), (1,), (2,), (0, 1, 2)])
async def test_frames_tell_whether_the_encoding_left_out_messages(left_out: tuple[int, ...]) -> None:
    async with broker_in_memory() as broker:
        _, routes = follow(broker)
        receiver = Listening()
        routes.add("a", receiver)
        for _ in range(3):
            broker.publish(Message("t", b"", tag("a"), 0))
        broker.store.committer.commit()
        (run,) = receiver.runs
        encoding = Encoding("e", lambda piece: [b"" if each[1] in left_out else b"x" for each in parts(piece)])
        frames = run.frames(encoding)
        assert (frames.is_whole, frames.part(0, 2).is_whole) == (not left_out, not left_out)
        assert len(frames.data) == 3 - len(left_out)


@pytest.mark.parametrize("publishers", [1, 2, 3, 5])
async def test_frames_of_several_publishers_leave_together(publishers: int) -> None:
    async with broker_in_memory() as broker:
        reader, routes = follow(broker)
        receiver = Listening()
        routes.add("a", receiver)
        sent = [b"first of %d, second of %d" % (number, number) for number in range(publishers)]
        for data in sent:
            placed = [broker.publish(Message("t", b"", tag("a"), 0)) for _ in range(2)]
            reader.routing.hand_on("e", [each.position for each in placed], data, [data.index(b",") + 1, len(data)])
        broker.store.committer.commit()
        (run,) = receiver.runs
        assert run.frames(Encoding("e", lambda piece: [b"new" for _ in parts(piece)])).data == b"".join(sent)


async def test_a_run_with_other_messages_between_is_joined_or_encoded() -> None:
    async with broker_in_memory() as broker:
        reader, routes = follow(broker)
        receiver = Listening()
        routes.add("a", receiver)
        names = ["a", "a", "b", "a"]
        placed = [broker.publish(Message("t", name.encode(), tag(name), 0)) for name in names]
        reader.routing.hand_on("e", [each.position for each in placed], b"AABA", [1, 2, 3, 4])
        broker.store.committer.commit()
        positions = [broker.publish(Message("t", b"a", tag("a"), 0)).position for _ in range(2)]
        reader.routing.hand_on("e", positions[:1], b"A", [1])  # the other one is of somebody else
        broker.store.committer.commit()
        encoding = Encoding("e", lambda piece: [b"new" for _ in parts(piece)])
        assert [run.frames(encoding).data for run in receiver.runs] == [b"AAA", b"newnew"]


async def test_frames_that_wait_are_bounded_and_forgotten() -> None:
    async with broker_in_memory(flush="sync", delivery=DeliveryConfig(encoded_bytes=10)) as broker:
        reader, routes = follow(broker)
        receiver = Listening()
        routes.add("a", receiver)
        encoding = Encoding("e", lambda piece: [b"new" for _ in parts(piece)])
        for frame in (b"12345", b"67890", b"x"):
            reader.routing.hand_on("e", [broker.publish(Message("t", b"", tag("a"), 0)).position], frame, [len(frame)])
        assert reader.routing._handed.size == 10
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(broker.store.appended)
        assert (reader.routing._handed.size, bool(reader.routing._handed)) == (0, False)
        assert receiver.runs[0].frames(encoding).data == b"newnewnew"  # one of the run is missing


async def test_a_reader_that_is_behind_forgets_the_frames_that_it_has_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_reader, "MESSAGES_A_SLICE", 8)
    handed: list[int] = []

    class Watching(Listening):
        def matched(self, run: Run, grants: tuple[Hashable, ...]) -> None:
            super().matched(run, grants)
            handed.append(reader.routing._handed.size)

    async with broker_in_memory(flush="sync") as broker:
        reader, routes = follow(broker)
        receiver = Watching()
        routes.add("a", receiver)
        positions = [broker.publish(Message("t", b"", tag("a"), 0)).position for _ in range(20)]
        reader.routing.hand_on("e", positions, b"x" * 20, range(1, 21))
        broker.store.committer.commit()
        await broker.store.flusher.wait_flushed(broker.store.appended)
        await trio.testing.wait_all_tasks_blocked()
        assert handed == [20, 20, 20]  # they came together
        assert (reader.routing._handed.size, bool(reader.routing._handed)) == (0, False)
        encoding = Encoding("e", lambda piece: [b"new" for _ in parts(piece)])
        assert b"".join(run.frames(encoding).data for run in receiver.runs) == b"x" * 20


async def test_nothing_before_an_interest_was_attached_is_routed_and_nothing_after_it_is_gone() -> None:
    async with broker_in_memory(flush="sync") as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"before", properties=tag("a"))
        await broker.store.flusher.wait_flushed(broker.store.appended)
        reader, routes = follow(broker)
        receiver = Listening()
        routes.add("a", receiver)
        publish(broker, "t", 0, b"during", properties=tag("a"))
        await broker.store.flusher.wait_flushed(broker.store.appended)
        reader.detach(routes)
        publish(broker, "t", 0, b"after", properties=tag("a"))
        await broker.store.flusher.wait_flushed(broker.store.appended)
        assert receiver.bodies == ["during"]
        assert broker.store.queue("t", 0).watchers is None
        assert broker.tails.statistics() == {"followed": 0, "reads": 0, "viewed": 0}


async def test_new_queues_are_followed_and_a_deleted_topic_until_nobody_is_interested() -> None:
    async with broker_in_memory() as broker:
        reader, routes = follow(broker, 1)
        receiver = Listening()
        routes.add("a", receiver)
        broker.topics.update("t", read_queues=2, write_queues=2)
        publish(broker, "t", 1, b"in the new one", properties=tag("a"))
        assert receiver.bodies == ["in the new one"]
        broker.topics.delete("t")
        assert not reader.is_behind
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"in the new topic", properties=tag("a"))
        assert receiver.bodies == ["in the new one", "in the new topic"]
        broker.topics.delete("t")
        reader.detach(routes)
        assert broker.tails.statistics()["followed"] == 0


async def test_other_topics_are_followed_when_one_of_them_is_deleted() -> None:
    async with broker_in_memory() as broker:
        listening = broker.tails.of(broker.topics.ensure("t", 1))
        listening.listen(Ringing())
        broker.topics.ensure("other", 1)
        both, routes, receiver = broker.tails.of_all(("t", "other")), RouteCache[Listening](), Listening()
        both.attach(routes)
        routes.add("#", receiver)
        broker.store.writer.append(Message("t", b"before", tag("a")), 0)
        broker.topics.delete("t")
        broker.store.committer.commit()
        assert broker.tails.statistics()["followed"] == 1, "a topic without interests is forgotten"
        publish(broker, "other", 0, b"of the other", properties=tag("a"))
        assert (receiver.bodies, both.is_behind) == (["before", "of the other"], False)


async def test_several_topics_are_routed_in_log_order() -> None:
    async with broker_in_memory() as broker:
        topics = ["a", "b", "c"]
        for each in topics:
            broker.topics.ensure(each, 2)
        reader, routes, receiver = broker.tails.of_all(topics), RouteCache[Listening](), Listening()
        reader.attach(routes)
        routes.add("#", receiver)
        sent = ["a", "c", "b", "b", "a", "c", "a", "b"]
        for number, topic in enumerate(sent):
            broker.store.writer.append(Message(topic, b"%d" % number, tag(topic)), number % 2)
        broker.store.committer.commit()
        assert receiver.bodies == [str(number) for number in range(len(sent))]
        assert receiver.positions == sorted(receiver.positions)


async def test_what_a_new_queue_has_already_is_routed_without_another_commit() -> None:
    async with broker_in_memory() as broker:
        _, routes = follow(broker, 1)
        receiver = Listening()
        routes.add("a", receiver)
        broker.store.writer.append(Message("t", b"before it was followed", tag("a")), 1)
        broker.store.committer.commit()
        broker.topics.update("t", read_queues=2, write_queues=2)
        await trio.testing.wait_all_tasks_blocked()
        assert receiver.bodies == ["before it was followed"]


async def test_a_receiver_that_raises_is_logged_and_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Listening):
        def matched(self, run: Run, grants: tuple[Hashable, ...]) -> None:
            raise ValueError("no room")

    async with broker_in_memory() as broker:
        _, routes = follow(broker)
        broken, sound = Broken(), Listening()
        routes.add("a", broken)
        routes.add("a", sound)
        with caplog.at_level(logging.ERROR):
            publish(broker, "t", 0, b"x", properties=tag("a"))
        assert sound.bodies == ["x"]
        assert "a receiver of topic[t] failed and misses 1 messages" in caplog.text


def test_frames_of_a_delivery_have_offsets_positions_and_ends() -> None:
    async def scenario() -> None:
        async with broker_in_memory() as broker:
            broker.topics.ensure("t", 1)
            collector = subscribe(broker, "t", selection=select_tags(("A",)), credit=2)
            placed = [broker.publish(Message("t", b"x" * n, tag("AB"[n % 2]), 0)) for n in range(7)]
            broker.store.committer.commit()
            (first,) = collector.subscription.collect(1 << 20)
            assert list(first.offsets) == [0, 2]
            collector.subscription.add_credit(9)
            (second,) = collector.subscription.collect(1 << 20)
            for delivery, offsets in ((first, [0, 2]), (second, [4, 6])):
                assert list(delivery.offsets) == offsets
                assert list(delivery.positions) == [placed[offset].position for offset in offsets]
                begin = 0
                for offset, end in zip(offsets, delivery.ends, strict=True):
                    assert bytes(delivery.data[begin:end]) == b"0:%d:%b\n" % (offset, b"x" * offset)
                    begin = end
                assert begin == len(delivery.data)

    trio.run(scenario)
