"""A store that RocketMQ has used: what it popped and nobody acknowledged is leased, its handles are valid."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from struct import Struct

import pytest
import trio
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.config import fill
from martlet.groups.journal.journal_codec import Key, LeaseState
from martlet.message import Message, encode_properties
from martlet.settings import DeliveryConfig
from martlet.tables.groups import Group
from martlet.tables.rocketmq_json import parse
from martlet.tables.topics import TIMER_TOPIC
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import HOST, small_config
from martlet_remoting.config import RemotingConfig
from martlet_remoting.handover.revived_pops import REVIVE_GROUP, CheckPoints, PoppedQueue, RevivedPops
from martlet_remoting.wire.codes import RequestCode

from .conftest import FakeClock, Harness
from .pop_talk import ack, bodies, pop, run, waiting_ext
from .pop_talk import popped as popped_in

REVIVE = "rmq_sys_REVIVE_LOG_DefaultCluster"
CHECK = Struct(">qqqqqqq")
SIZES = {"segment_bytes": 1 << 18, "page_bytes": 1 << 14, "cache_bytes": 1 << 18}
LEASED = Key("", "G", "T", 0)


def popped(
    clock: FakeClock, start: int, offsets: Sequence[int], *, ago_ms: int = 1000, **more: object
) -> dict[str, object]:
    """A check point of messages that were popped for a minute."""
    point: dict[str, object] = {"so": start, "pt": clock.ms - ago_ms, "it": 60_000, "bm": 0, "n": len(offsets)}
    return {**point, "q": 0, "t": "T", "c": "G", "ro": 0, "d": [each - start for each in offsets], "bn": "b", **more}


def acked(point: dict[str, object], *offsets: int) -> dict[str, object]:
    """The acknowledgement of messages of a check point; of several in a batch."""
    found = {name: point[name] for name in ("so", "pt", "q", "t", "c", "bn")}
    return found | ({"ao": offsets[0]} if len(offsets) == 1 else {"ao": 0, "aol": list(offsets)})


def message(body: dict[str, object], topic: str = REVIVE, **properties: object) -> Message:
    tag = "ck" if "it" in body else "bAck" if "aol" in body else "ack"
    named = {"TAGS": tag, **{name: str(value) for name, value in properties.items()}}
    return Message(topic, json.dumps(body).encode(), encode_properties(named), 0, born_host=HOST)


def add(points: CheckPoints, *found: dict[str, object]) -> None:
    for body in found:
        tag = b"ck" if "it" in body else b"bAck" if "aol" in body else b"ack"
        points.add(tag, json.dumps(body).encode())


def left(points: CheckPoints) -> dict[tuple[str, str, int], list[int]]:
    return {queue: sorted(pops) for queue, pops in points.pops.items() if pops}


def test_acknowledgements_settle_check_points_in_any_order() -> None:
    clock, points = FakeClock(), CheckPoints()
    first, second = popped(clock, 5, [5, 6, 9]), popped(clock, 10, [10, 11])
    add(points, acked(second, 11), first, acked(first, 9), second, acked(first, 5), acked(first, 700))
    assert left(points) == {("G", "T", 0): [6, 10]}
    add(points, acked(first, 6, 7), acked(second, 10, 11))
    assert left(points) == {}
    assert points.damaged == 0


def test_the_newest_pop_of_a_message_counts() -> None:
    clock, points = FakeClock(), CheckPoints()
    old, new = popped(clock, 5, [5, 6]), popped(clock, 5, [5], ago_ms=10)
    add(points, new, old, acked(old, 5))
    assert points.pops[PoppedQueue("G", "T", 0)] == {
        5: (clock.ms - 10, 60_000),
        6: (clock.ms - 1000, 60_000),
    }
    add(points, acked(new, 5))
    assert left(points) == {("G", "T", 0): [6]}


def test_check_points_of_old_brokers_and_with_marks_are_read() -> None:
    clock, points = FakeClock(), CheckPoints()
    old = popped(clock, 5, range(5, 9))
    del old["d"]
    add(points, {**old, "bm": 0b0101}, popped(clock, 20, [20, 22], t="%RETRY%G_T", bm=1))
    assert left(points) == {("G", "T", 0): [6, 8], ("G", "%RETRY%G_T", 0): [22]}


@pytest.mark.parametrize(
    "body",
    [b"", b"1-2", b"[]", b"{", b"{}", b'{"so":1}', b'{"c":"G","t":"T","q":0,"so":-5,"pt":1}', b'{"c":1,"t":2}'],
)
def test_what_is_no_check_point_is_counted(body: bytes) -> None:
    points = CheckPoints()
    for tag in (b"ck", b"ack", b"bAck", b"other"):
        points.add(tag, body)
    assert left(points) == {}
    assert points.damaged == 3


def test_numbers_that_lie_cost_no_memory() -> None:
    clock, points = FakeClock(), CheckPoints()
    add(points, popped(clock, 0, range(10_000)), popped(clock, 0, [], q=1, n=1 << 40, bm=-1))
    assert {queue: len(pops) for queue, pops in points.pops.items()} == {("G", "T", 0): 256, ("G", "T", 1): 0}


def handle_ext(pop_ms: int, offset: int) -> dict[str, object]:
    """The header of an acknowledgement with a handle of RocketMQ."""
    where = {"consumerGroup": "G", "topic": "T", "queueId": "0", "offset": str(offset)}
    return {**where, "extraInfo": f"0 {pop_ms} 60000 3 0 b 0 {offset}"}


class Moved:
    """A store that both brokers use in turn."""

    def __init__(self) -> None:
        self.disk = FakeDisk()
        self.clock = FakeClock()

    @asynccontextmanager
    async def open(self, delivery: DeliveryConfig | None = None) -> AsyncIterator[Broker]:
        store = small_config(**SIZES)
        async with serving(Path("/data"), disk=self.disk, clock=self.clock, store=store, delivery=delivery) as made:
            yield made.broker

    @asynccontextmanager
    async def as_rocketmq(self, *, committed: int, revived: int = -1) -> AsyncIterator[Broker]:
        """Open it to write what RocketMQ would write, with the offsets of the group and of the revive group."""
        async with self.open() as broker:
            broker.topics.ensure("T", 1)
            broker.topics.ensure(REVIVE, 1)
            broker.topics.ensure(TIMER_TOPIC, 1)
            broker.groups.update(Group("G"))
            yield broker
            broker.groups.offsets.commit("G", "T", 0, committed)
            if revived >= 0:
                broker.groups.offsets.commit(REVIVE_GROUP, REVIVE, 0, revived)
            broker.store.committer.commit()
        path = "/data/config/consumerOffset.json"
        table = parse(bytes(self.disk.files[path].data), path)
        self.disk.files[path].data[:] = json.dumps({"offsetTable": table["offsetTable"]}).encode()

    @asynccontextmanager
    async def as_martlet(self, delivery: DeliveryConfig | None = None) -> AsyncIterator[Harness]:
        async with self.open(delivery) as broker, trio.open_nursery() as nursery:
            await RevivedPops(broker).run()
            yield Harness(broker, fill(RemotingConfig, {}, "remoting"), self.clock, nursery)
            nursery.cancel_scope.cancel()


def put(broker: Broker, *messages: Message) -> None:
    for each in messages:
        broker.store.writer.append(each, 0)


def fill_topic(broker: Broker, count: int) -> None:
    put(broker, *(Message("T", b"%d" % i, b"", 0, born_host=HOST) for i in range(count)))


def leases(broker: Broker, key: Key = LEASED) -> dict[int, LeaseState]:
    queue = broker.shared_groups.state.get(key)
    return dict(sorted(queue.leases.items())) if queue is not None else {}


async def test_what_was_not_acknowledged_is_leased_as_rocketmq_said(autojump_clock: MockClock) -> None:
    moved = Moved()
    first, second = popped(moved.clock, 0, [0, 1, 3]), popped(moved.clock, 4, [4, 5], ago_ms=100)
    async with moved.as_rocketmq(committed=6) as broker:
        fill_topic(broker, 8)
        put(broker, message(first), message(second), message(acked(first, 1)), message(acked(second, 4, 5)))
    pop_ms = moved.clock.ms - 1000
    async with moved.as_martlet() as harness:
        broker = harness.broker
        assert leases(broker) == {0: LeaseState(pop_ms, 60_000, 1), 3: LeaseState(pop_ms, 60_000, 1)}
        assert broker.groups.offsets.get("G", "T", 0) == 0
        client = harness.client()
        assert bodies(await pop(client, "T", invisibleTime="600000")) == [b"6", b"7"]
        answer = await client.ask(RequestCode.ACK_MESSAGE, handle_ext(pop_ms, 0))
        assert (answer.code, answer.remark) == (0, None)
        assert broker.groups.offsets.get("G", "T", 0) == 3
        run(harness, harness.nursery)
        await trio.sleep(58.9)
        assert await pop(client, "T") == []
        await trio.sleep(0.2)
        [again] = await pop(client, "T")
        assert (again.body, again.times) == (b"3", 1)


async def test_check_points_that_are_not_delivered_yet_are_read_from_the_timer_topic(
    autojump_clock: MockClock,
) -> None:
    moved = Moved()
    points = [popped(moved.clock, offset, [offset]) for offset in range(6)]
    now_ms = moved.clock.ms
    async with moved.as_rocketmq(committed=6, revived=0) as broker:
        fill_topic(broker, 6)
        # 0 and 1 were delivered to the revive topic, and 0 is done; 2 is due, 3 is in the wheel, 4 is not yet in it.
        for out_ms, point in zip((-9000, -8000, -7000, 50_000, -9000), points[:5], strict=True):
            put(broker, message(point, TIMER_TOPIC, TIMER_OUT_MS=now_ms + out_ms, REAL_TOPIC=REVIVE))
        put(broker, message(points[0]), message(points[1]))
        # Something else is to be delivered, too; and 3 is acknowledged.
        put(broker, message(points[5], TIMER_TOPIC, TAGS="mine", TIMER_OUT_MS=now_ms + 1, REAL_TOPIC="U"))
        put(broker, message(acked(points[3], 3), TIMER_TOPIC, TIMER_OUT_MS=now_ms + 51_000, REAL_TOPIC=REVIVE))
        broker.store.data_directory.write_file("config/timercheck", CHECK.pack(now_ms - 7000, 0, 4, 4, 0, 0, 0))
    async with moved.as_martlet() as harness:
        assert list(leases(harness.broker)) == [1, 2, 4]


async def test_a_time_that_is_newer_than_the_log_is_not_believed(autojump_clock: MockClock) -> None:
    """A flipped bit in RocketMQ's file would make all its timers ones that were delivered."""
    moved = Moved()
    now_ms = moved.clock.ms
    async with moved.as_rocketmq(committed=1, revived=0) as broker:
        fill_topic(broker, 1)
        point = popped(moved.clock, 0, [0])
        put(broker, message(point, TIMER_TOPIC, TIMER_OUT_MS=now_ms + 50_000, REAL_TOPIC=REVIVE))
        broker.store.data_directory.write_file("config/timercheck", CHECK.pack(now_ms + (1 << 40), 0, 1, 1, 0, 0, 0))
    async with moved.as_martlet() as harness:
        assert list(leases(harness.broker)) == [0]


async def test_they_are_taken_over_once(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=3) as broker:
        fill_topic(broker, 3)
        put(broker, message(popped(moved.clock, 0, [0, 1, 2])))
        later = popped(moved.clock, 0, [1], it=600_000)
        put(broker, message(later, TIMER_TOPIC, TIMER_OUT_MS=moved.clock.ms + 600_000))
    async with moved.as_martlet() as harness:
        assert list(leases(harness.broker)) == [0, 1, 2]
    async with moved.as_martlet() as harness:
        pop_ms = moved.clock.ms - 1000
        answer = await harness.client().ask(RequestCode.ACK_MESSAGE, handle_ext(pop_ms, 1))
        assert (answer.code, answer.remark) == (0, None)
        assert list(leases(harness.broker)) == [0, 2]
    # RocketMQ uses it again, and moves its offset: what it has read is the new truth, its old check points are done.
    async with moved.as_rocketmq(committed=3) as broker:
        broker.groups.offsets.commit("G", "T", 0, 3)
    async with moved.as_martlet() as harness:
        assert harness.broker.groups.offsets.get("G", "T", 0) == 3


async def test_a_start_that_was_killed_is_repeated(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=3) as broker:
        fill_topic(broker, 3)
        put(broker, message(popped(moved.clock, 0, [0, 1, 2])))
    async with moved.open() as broker:
        RevivedPops(broker)  # the broker ends, and writes its tables, before this has run
    async with moved.as_martlet() as harness:
        assert list(leases(harness.broker)) == [0, 1, 2]
        assert harness.broker.groups.offsets.get("G", "T", 0) == 0


async def test_they_are_taken_over_at_the_first_start_with_remoting(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=3) as broker:
        fill_topic(broker, 4)
        put(broker, message(popped(moved.clock, 0, [0, 1, 2])))
    for end in range(4, 6):
        async with moved.open() as broker:  # without remoting
            assert broker.groups.offsets.get("G", "T", 0) == end - 1
            broker.groups.offsets.commit("G", "T", 0, end)
            fill_topic(broker, 1)
    async with moved.as_martlet() as harness:
        assert list(leases(harness.broker)) == [0, 1, 2]
        client = harness.client()
        assert [each.offset for each in await pop(client, "T")] == [5]
    async with moved.open() as broker:
        assert not broker.groups.offsets.has_foreign_pops


def fill_retries(broker: Broker, topic: str, *bodies: bytes, user: str = "") -> None:
    """Put messages into a retry topic, as RocketMQ does once their invisible time has ended."""
    broker.topics.ensure(topic, 1)
    properties = encode_properties({"TAGS": "A", "ORIGIN_GROUP": "G", "1ST_POP_TIME": "1", "user": user})
    put(broker, *(Message(topic, body, properties, 0, born_host=HOST, reconsume_times=1) for body in bodies))


async def test_what_rocketmq_has_put_into_its_retry_topics_is_popped_first(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=1) as broker:
        fill_topic(broker, 3)
        fill_retries(broker, "%RETRY%G_T", b"done", b"old")
        broker.groups.offsets.commit("G", "%RETRY%G_T", 0, 1)
        fill_retries(broker, "%RETRY%G+T", b"new", b"newer")
    async with moved.as_martlet() as harness:
        run(harness, harness.nursery)
        client = harness.client()
        came = [*await pop(client, "T"), *await pop(client, "T", queue_id=0), *await pop(client, "T")]
        assert [(each.topic, each.body, each.times, each.handle.retry) for each in came] == [
            ("T", b"old", 1, "1"),
            ("T", b"new", 1, "2"),
            ("T", b"newer", 1, "2"),
            ("T", b"1", 0, "0"),
            ("T", b"2", 0, "0"),
        ]
        await ack(client, *came[:2], *came[3:])
        await harness.step()
        offsets = {name: harness.broker.groups.offsets.get("G", name, 0) for name in ("T", "%RETRY%G_T", "%RETRY%G+T")}
        assert offsets == {"T": 3, "%RETRY%G_T": 2, "%RETRY%G+T": 1}
        asks = client.send(RequestCode.NOTIFICATION, waiting_ext("T"))
        waits = client.send(RequestCode.POP_MESSAGE, waiting_ext("T", pollTime="60000"))
        await harness.step()
        assert not client.answers
        harness.state.pops.sweep()
        await trio.sleep(30.1)
        await harness.step()
        [again] = popped_in(client.answers.pop(waits))
        assert (again.topic, again.body, again.times) == ("T", b"newer", 2)
        assert client.answers.pop(asks).ext["hasMsg"] == "true"
        await ack(client, again)
    async with moved.as_martlet() as harness:
        assert await pop(harness.client(), "T") == []


async def test_a_retry_without_room_for_its_handle_comes_as_it_is_stored(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=0) as broker:
        fill_retries(broker, "%RETRY%G_T", b"old", user="x" * 32_700)
    async with moved.as_martlet() as harness:
        client = harness.client()
        [message] = await pop(client, "T")
        assert (message.topic, message.body, message.handle.retry) == ("%RETRY%G_T", b"old", "1")
        await ack(client, message)


async def test_in_order_no_retry_topic_is_popped(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=0) as broker:
        fill_topic(broker, 1)
        fill_retries(broker, "%RETRY%G_T", b"old")
    async with moved.as_martlet() as harness:
        assert bodies(await pop(harness.client(), "T", order="true")) == [b"0"]


async def test_the_retry_topic_of_another_group_is_left_alone(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=0) as broker:
        broker.groups.update(Group("G_T"))
        fill_retries(broker, "%RETRY%G_T", b"of G_T")
    async with moved.as_martlet() as harness:
        assert await pop(harness.client(), "T") == []


async def test_a_retry_topic_that_is_deleted_is_popped_no_longer(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=0) as broker:
        fill_topic(broker, 1)
        fill_retries(broker, "%RETRY%G_T", *[b"old"] * 40)
    async with moved.as_martlet() as harness:
        client = harness.client()
        assert len(await pop(client, "T")) == 32
        harness.broker.topics.delete("%RETRY%G_T")
        assert bodies(await pop(client, "T")) == [b"0"]


async def test_more_than_can_be_leased_is_delivered_from_the_first_one_on(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=40) as broker:
        fill_topic(broker, 40)
        put(broker, message(popped(moved.clock, 7, range(7, 39))), message(acked(popped(moved.clock, 7, []), 8)))
    async with moved.as_martlet(DeliveryConfig(leases_max=30)) as harness:
        assert leases(harness.broker) == {}
        assert (await pop(harness.client(), "T"))[0].offset == 7


async def test_what_is_gone_is_left_out(autojump_clock: MockClock) -> None:
    moved = Moved()
    clock = moved.clock
    async with moved.as_rocketmq(committed=3) as broker:
        fill_topic(broker, 3)
        put(broker, message(popped(clock, 0, [0])), message(popped(clock, 0, [0], c="gone")))
        put(broker, message(popped(clock, 0, [0], t="gone")), message(popped(clock, 0, [0], q=9)))
        put(broker, message(popped(clock, 2, [2, 3, 99])))
    async with moved.as_martlet() as harness:
        assert list(leases(harness.broker)) == [0, 2]
        assert len(harness.broker.shared_groups.state) == 1


async def test_a_group_whose_offset_was_never_written_begins_at_the_first_message(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=-1) as broker:
        fill_topic(broker, 9)
        put(broker, message(popped(moved.clock, 4, [4, 5])))
    async with moved.as_martlet() as harness:
        assert bodies(await pop(harness.client(), "T")) == [b"4", b"5", b"6", b"7", b"8"]


async def test_what_martlet_knew_of_later_messages_is_still_right(autojump_clock: MockClock) -> None:
    moved = Moved()
    async with moved.as_rocketmq(committed=0) as broker:
        fill_topic(broker, 6)
    async with moved.as_martlet() as harness:
        client = harness.client()
        taken = await pop(client, "T")
        await ack(client, taken[4])
    # RocketMQ begins at 0, and gets as far as 2.
    async with moved.as_rocketmq(committed=2) as broker:
        put(broker, message(popped(moved.clock, 0, [0, 1], ago_ms=5)))
        put(broker, message(acked(popped(moved.clock, 0, [0, 1], ago_ms=5), 1)))
    async with moved.as_martlet() as harness:
        assert {offset: lease.generation for offset, lease in leases(harness.broker).items()} == {
            0: moved.clock.ms - 5,
            **dict.fromkeys((2, 3, 5), taken[0].handle.pop_ms),
        }
        assert harness.broker.groups.offsets.get("G", "T", 0) == 0
