"""What a transaction becomes: every step with every other one, in RocketMQ's formats, and what is refused."""

import pytest
from msgspec.structs import replace
from tests.tx.talk import CONFIG, GROUP, TOPIC, Sellers, half, op_bodies, sellers

from martlet.contracts import Stage
from martlet.errors import ConfigError, Reason, Refused
from martlet.message import Message, decode_properties
from martlet.plugins.loader import load
from martlet.records.layout import TRANSACTION_MASK
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock
from martlet_tx.formats import HALF_TOPIC, OP_TOPIC, PARK_TOPIC, half_offsets, immunity_ms


async def test_a_half_message_is_stored_as_rocketmq_stores_it() -> None:
    found = await sellers()
    placed = found.prepare("k1", "TAGS\x01red\x02")
    await found.settle()
    assert found.stored() == []
    (record,) = found.records(HALF_TOPIC)
    assert (record.queue_id, record.queue_offset, record.position) == (0, 0, placed.position)
    assert (record.sys_flag & TRANSACTION_MASK, record.flag, record.body) == (0, 7, b"k1")
    assert decode_properties(record.properties) == {
        "TRAN_MSG": "true",
        "PGROUP": GROUP,
        "UNIQ_KEY": "k1",
        "TAGS": "red",
        "__transactionId__": "k1",
        "REAL_TOPIC": TOPIC,
        "REAL_QID": "0",
    }
    assert found.pending() == [0]


async def test_a_commit_stores_the_message_and_an_op_record_as_rocketmq_does() -> None:
    found = await sellers()
    first, second = found.prepare("k1"), found.prepare("k2", "TAGS\x01red\x02")
    await found.settle()
    end = await found.end(second, commit=True)
    await found.settle()
    assert found.store.readable >= end
    (record,) = found.records(TOPIC)
    assert (record.topic, record.queue_id, record.body, record.flag) == (TOPIC, 0, b"k2", 7)
    assert record.sys_flag & TRANSACTION_MASK == 0x8
    assert record.prepared_position == second.position
    assert (record.born_ms, record.born_host) == (1_700_000_000_000, HOST)
    assert decode_properties(record.properties)["TRAN_MSG"] == "true"
    (op,) = found.records(OP_TOPIC)
    assert (op.body, op.properties, op.queue_id) == (b"1", b"TAGS\x01d\x02", 0)
    assert found.pending() == [first.queue_offset]
    assert found.state.held() == 1


async def test_a_rollback_stores_only_an_op_record() -> None:
    found = await sellers()
    placed = found.prepare("k1")
    await found.settle()
    await found.end(placed, commit=False)
    await found.settle()
    assert (found.stored(), op_bodies(found), found.pending()) == ([], [b"0"], [])


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("then", [True, False])
@pytest.mark.parametrize("first", [True, False])
async def test_a_transaction_ends_once(first: bool, then: bool, settled: bool) -> None:
    found = await sellers()
    placed = found.prepare("k1")
    await found.settle()
    await found.end(placed, commit=first)
    if settled:
        await found.settle()
    with pytest.raises(Refused, match="transaction of half message 0 has ended") as refused:
        await found.end(placed, commit=then)
    assert refused.value.reason is Reason.NOT_FOUND
    await found.settle()
    assert (found.stored(), op_bodies(found)) == (["k1"] if first else [], [b"0"])
    assert found.state.ending == {}


async def test_an_end_whose_commit_failed_can_be_repeated() -> None:
    disk = FakeDisk()
    found = await sellers(disk, segment_bytes=1 << 16)
    placed = found.prepare("k1" * 3000)
    await found.settle()
    disk.free_bytes = 0
    await found.end(placed, commit=True)
    with pytest.raises(Refused):
        found.store.committer.commit()
    disk.free_bytes = None
    found.store.upkeep.retention.look()
    await found.end(placed, commit=True)
    await found.settle()
    assert (found.stored(), op_bodies(found), found.pending()) == (["k1" * 3000], [b"0"], [])


async def test_a_delayed_transactional_message_passes_the_later_stages_at_its_commit() -> None:
    found = await sellers()
    broker = found.broker
    broker.topics.ensure("later", 1)

    def delay(message: Message) -> Message:
        if b"DELAY\x01" in message.properties and message.topic != HALF_TOPIC:
            message.topic = "later"
        return message

    broker.set_stages([*broker.stages.pairs, ("timer", Stage(delay))])
    placed = found.prepare("k1", "DELAY\x013\x02")
    await found.settle()
    assert found.pending() == [0]
    await found.end(placed, commit=True)
    await found.settle()
    assert (found.stored(), found.stored("later"), found.pending()) == ([], ["k1"], [])


def test_the_plugin_refuses_to_come_after_the_timer() -> None:
    load(["tx", "timer"], {})
    with pytest.raises(ConfigError, match=r"plugin 'tx' must come before 'timer' in plugins\.enabled; a delayed"):
        load(["timer", "tx"], {})


async def test_a_message_goes_to_any_queue_if_its_topic_has_fewer_now() -> None:
    found = await sellers()
    found.broker.topics.update(TOPIC, 4, 4)
    placed = found.prepare("k1", queue_id=3)
    await found.settle()
    found.broker.topics.update(TOPIC, 1, 1)
    await found.end(placed, commit=True)
    await found.settle()
    assert found.stored() == ["k1"]


async def test_a_commit_that_its_topic_refuses_leaves_the_transaction_pending() -> None:
    found = await sellers()
    placed = found.prepare("k1")
    await found.settle()
    found.broker.topics.update(TOPIC, 1, 1, perm=4)
    with pytest.raises(Refused, match="not writable"):
        await found.end(placed, commit=True)
    found.broker.topics.update(TOPIC, 1, 1, perm=6)
    await found.end(placed, commit=True)
    await found.settle()
    assert (found.stored(), found.held.committed) == (["k1"], 1)


# what is no transaction


@pytest.mark.parametrize("topic", ["%RETRY%g", "%DLQ%g"])
async def test_a_copy_of_a_committed_message_for_a_group_begins_no_transaction(topic: str) -> None:
    found = await sellers()
    found.broker.topics.ensure(topic, 1)
    found.broker.publish(half("k1", topic=topic))
    await found.settle()
    assert (found.stored(topic), found.pending()) == (["k1"], [])


async def test_a_retry_of_an_old_client_begins_no_transaction() -> None:
    found = await sellers()
    message = half("k1", "DELAY\x013\x02")
    message.reconsume_times = 1
    found.broker.publish(message)
    await found.settle()
    assert found.stored() == ["k1"]


async def test_a_message_that_says_prepared_without_a_transaction_is_refused() -> None:
    found = await sellers()
    with pytest.raises(Refused, match="sysFlag"):
        found.broker.publish(Message(TOPIC, b"x", b"", 0, 0, 0x4, 1, HOST))


async def test_a_half_message_needs_a_producer_group() -> None:
    found = await sellers()
    with pytest.raises(Refused, match="PGROUP") as refused:
        found.broker.publish(Message(TOPIC, b"x", b"TRAN_MSG\x01TRUE\x02", 0, 0, 0x4, 1, HOST))
    assert refused.value.reason is Reason.ILLEGAL


@pytest.mark.parametrize(
    ("topic", "queue_id", "perm", "reason"),
    [("none", 0, 6, Reason.NO_TOPIC), (TOPIC, 9, 6, Reason.PARAMETER), (TOPIC, 0, 4, Reason.NO_PERMISSION)],
)
async def test_a_half_message_is_refused_where_its_message_would_be(
    topic: str, queue_id: int, perm: int, reason: Reason
) -> None:
    found = await sellers()
    found.broker.topics.update(TOPIC, 1, 1, perm)
    with pytest.raises(Refused) as refused:
        found.prepare("k1", topic=topic, queue_id=queue_id)
    assert refused.value.reason is reason
    assert found.held.half_queue.next_offset == 0


async def test_too_many_pending_transactions_are_refused() -> None:
    found = await sellers(config=replace(CONFIG, pending_max=2))
    placed = [found.prepare(f"k{number}") for number in range(2)]
    await found.settle()
    with pytest.raises(Refused, match=r"tx\.pending_max is 2") as refused:
        found.prepare("k2")
    assert refused.value.reason is Reason.BUSY
    await found.end(placed[0], commit=False)
    await found.settle()
    found.prepare("k2")


async def test_a_message_that_leaves_no_room_for_its_op_record_is_refused() -> None:
    found = await sellers(group_bytes_max=2000, message_bytes_max=1000)
    with pytest.raises(Refused, match=r"store\.group_bytes_max"):
        found.prepare("k" * 1000)


# formats


@pytest.mark.parametrize(
    ("body", "offsets"),
    [
        (b"5", [5]),  # 4.x and ours
        (b"5,", [5]),  # 5.x
        (b"5,6,7,", [5, 6, 7]),
        (b"", []),
        (b"x,6,-1,\xff,9999999999999999999", [6]),
    ],
)
def test_op_records_of_every_version_are_read(body: bytes, offsets: list[int]) -> None:
    assert half_offsets(b"TAGS\x01d\x02WAIT\x01true\x02", body) == offsets
    assert half_offsets(b"TAGS\x01e\x02", body) == []


@pytest.mark.parametrize(
    ("text", "expected"), [("", 6000), ("30", 30_000), ("1", 6000), ("-4", 6000), ("x", 6000), ("9" * 30, 6000)]
)
def test_the_immunity_of_a_message_is_never_shorter_than_the_broker_s(text: str, expected: int) -> None:
    properties = f"CHECK_IMMUNITY_TIME_IN_SECONDS\x01{text}\x02".encode() if text else b""
    assert immunity_ms(properties, 6000) == expected


# finding


async def test_only_half_messages_are_found() -> None:
    found = await sellers()
    other = found.broker.publish(Message(TOPIC, b"x" * 300, b"", 0, 0, 0, 1, HOST))
    placed = found.prepare("k1")
    await found.settle()
    assert (await found.held.find(placed.position)).record.queue_offset == 0
    assert found.held.find_nowait(0, placed.position) is not None
    for offset, position in [(0, other.position), (1, placed.position), (-1, 0), (1 << 62, 1 << 62)]:
        assert found.held.find_nowait(offset, position) is None
    for position in other.position, placed.position + 1, other.position + 90, -1, 1 << 62:
        with pytest.raises(Refused, match="Find prepared transaction message failed") as refused:
            await found.held.find(position)
        assert refused.value.reason is Reason.NOT_FOUND


async def test_pending_transactions_are_listed_in_order_within_limits() -> None:
    found = await sellers()
    placed = [found.prepare(f"k{number}") for number in range(20)]
    await found.settle()
    for number in range(0, 20, 2):
        await found.end(placed[number], commit=number % 4 == 0)
    await found.settle()
    listed = await found.held.pending(0, 100, 1 << 20)
    assert [each.half.record.queue_offset for each in listed] == list(range(1, 20, 2))
    assert {each.checks for each in listed} == {0}
    assert [each.half.record.queue_offset for each in await found.held.pending(4, 2, 1 << 20)] == [5, 7]
    assert len(await found.held.pending(0, 100, 1)) == 1  # one is always listed
    assert await found.held.pending(20, 5, 1 << 20) == []


# after a restart


async def restarted(found: Sellers, disk: FakeDisk) -> Sellers:
    found.broker.projections.save()
    await found.store.close()
    return await sellers(disk, ManualClock(found.broker.clock.now_ms()))


@pytest.mark.parametrize("snapshot", [True, False])
async def test_the_state_is_the_same_after_a_restart(snapshot: bool) -> None:
    disk = FakeDisk()
    found = await sellers(disk)
    placed = [found.prepare(f"k{number}") for number in range(6)]
    await found.settle()
    await found.end(placed[0], commit=True)
    await found.end(placed[3], commit=False)
    await found.settle()
    before = (found.pending(), found.state.ops.next, found.state.halves.next)
    if snapshot:
        found = await restarted(found, disk)
    else:
        await found.store.close()
        found = await sellers(disk)
    assert (found.pending(), found.state.ops.next, found.state.halves.next) == before
    with pytest.raises(Refused, match="has ended"):
        await found.end(placed[3], commit=True)
    await found.end(placed[4], commit=True)
    await found.settle()
    assert found.stored() == ["k0", "k4"]


async def test_statistics_tell_what_is_pending_and_for_how_long() -> None:
    clock = ManualClock()
    found = await sellers(clock=clock)
    assert found.checks.statistics()["pending"] == found.checks.statistics()["oldest_age_ms"] == 0
    placed = [found.prepare(f"k{number}") for number in range(3)]
    await found.settle()
    await found.end(placed[0], commit=True)
    clock.ms += 1500
    await found.end(placed[1], commit=False)
    await found.settle()
    figures = found.checks.statistics()
    assert {name: figures[name] for name in ("pending", "oldest_age_ms", "committed", "rolled_back", "parked")} == {
        "pending": 1,
        "oldest_age_ms": 1500,
        "committed": 1,
        "rolled_back": 1,
        "parked": 0,
    }
    assert PARK_TOPIC not in [topic.name for topic in found.broker.topics]
