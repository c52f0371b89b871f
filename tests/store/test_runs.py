"""Runs of messages for many queues: stored as if each had been appended by itself, and refused one by one."""

import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from martlet.errors import Reason, Refused
from martlet.message import Message, Placed
from martlet.records.codec import decode_record, with_room_for_record_crc
from martlet.records.layout import PREPARED, ROLLBACK
from martlet.store import Store
from martlet.store.append.items import AppendItem
from martlet.store.disk.segments import Segment
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import HOST, ManualClock, drain, message, small_config

OpenStore = Callable[..., Awaitable[Store]]


def item(store: Store, message: Message, queue_id: int) -> AppendItem:
    queue = store.writer.open_queue(message.topic, queue_id)
    return (
        queue,
        memoryview(message.body),
        message.properties,
        store.writer.code_of(message.properties),
        message.flag,
        message.sys_flag,
        message.born_ms,
        message.born_host,
        message.reconsume_times,
        message.prepared_position,
    )


def all_kinds() -> list[tuple[Message, int]]:
    """Messages of every kind that a record can be of, enough to cross pages and segments."""
    made: list[tuple[Message, int]] = []
    for number in range(60):
        made += [
            (message(b"%d" % number * (number % 40), "T", tags=f"t{number % 3}", unique=f"U{number}"), number % 3),
            (message(b"wide", "w" * 200), 0),
            (Message("T6", b"", b"", born_host=bytes(20), flag=-number, reconsume_times=number), 0),
            (Message("T", b"half", b"KEYS\x01a\x02", sys_flag=PREPARED, prepared_position=number), 0),
            (Message("T", b"back", b"KEYS\x01a\x02", sys_flag=ROLLBACK), 0),
            (message(b"x" * 700, "T", keys=f"k{number} l{number}"), 1),
            (Message("SCHEDULE_TOPIC_XXXX", b"later", b"DELAY\x013\x02TAGS\x01a\x02"), 2),
            (Message("T", b"crc", with_room_for_record_crc(b"A\x01b\x02"), sys_flag=0x30), 0),
        ]
    return made


DISPATCHERS = {"SCHEDULE_TOPIC_XXXX": lambda properties, store_ms: store_ms + len(properties)}


@pytest.mark.parametrize("config", [{}, {"record_crcs": True}], ids=["plain", "with record CRCs"])
@pytest.mark.parametrize("host", [HOST, bytes(20)], ids=["IPv4", "IPv6"])
async def test_a_run_is_stored_as_if_each_message_were_appended_alone(config: dict[str, bool], host: bytes) -> None:
    disks = FakeDisk(), FakeDisk()
    stores = [
        await Store.open(Path("/data"), small_config(**config), ManualClock(), disk, dispatchers=DISPATCHERS)
        for disk in disks
    ]
    one, run = stores
    one.writer.store_host = run.writer.store_host = host
    placed = [one.writer.append(each, queue_id) for each, queue_id in all_kinds()]
    result = run.writer.append_all([item(run, each, queue_id) for each, queue_id in all_kinds()])
    assert result.refused == {}
    assert result.positions == [each.position for each in placed]
    assert result.offsets == [each.queue_offset for each in placed]
    assert result.ends == [each.end for each in placed]
    assert result.end == placed[-1].end
    for store in stores:
        store.committer.commit()
        store.flusher.flush_now()
    assert len(one.segments.items) > 5
    for segment in one.segments.items:
        assert run.segments.read(segment.start, 4096) == one.segments.read(segment.start, 4096)
    for queue in one.queues.all():
        same = run.queue(queue.topic, queue.queue_id)
        assert run.queues.entries(same, 0, 1000) == one.queues.entries(queue, 0, 1000)
        assert drain(run, same) == drain(one, queue)
    assert run.statistics().appended_messages == one.statistics().appended_messages == len(placed)
    for store in stores:
        await store.close()


async def test_a_message_that_is_refused_does_not_stop_the_others_of_its_run(open_store: OpenStore) -> None:
    store = await open_store(small_config(message_bytes_max=100))
    messages = [
        message("a"),
        message(b"x" * 101),
        Message("T", b"nul", b"A\x01\x00\x02", born_host=HOST),
        message("b"),
        Message("T", b"long", b"A\x01" + b"x" * 40000, born_host=HOST),
        message("c"),
    ]
    result = store.writer.append_all([item(store, each, 0) for each in messages])
    assert result.offsets == [0, -1, -1, 1, -1, 2]
    assert [position >= 0 for position in result.positions] == [True, False, False, True, False, True]
    assert [end >= 0 for end in result.ends] == [True, False, False, True, False, True]
    assert {place: str(refused) for place, refused in result.refused.items()} == {
        1: "the body has 101 bytes; the maximum is 100 (store.message_bytes_max)",
        2: "the properties contain U+0000, by which the store recognizes torn writes; remove it",
        4: "the properties have 40002 bytes; the maximum is 32767",
    }
    assert all(refused.reason is Reason.ILLEGAL for refused in result.refused.values())
    store.committer.commit()
    store.flusher.flush_now()
    assert drain(store, store.queue("T", 0)) == [b"a", b"b", b"c"]


async def test_a_run_for_a_deleted_topic_begins_its_queue_again(open_store: OpenStore) -> None:
    store = await open_store()
    old = item(store, message("old"), 0)
    store.writer.append_all([old])
    store.deletions.delete_topic("T")
    result = store.writer.append_all([old])
    store.committer.commit()
    store.flusher.flush_now()
    assert result.offsets == [0]
    queue = store.queue("T", 0)
    assert queue is not old[0]
    assert drain(store, queue) == [b"old"]


async def test_what_a_full_disk_took_back_of_a_run_is_refused_by_the_next_commit() -> None:
    disk = FakeDisk()
    store = await Store.open(Path("/data"), small_config(), ManualClock(), disk)
    store.writer.store_host = HOST
    store.writer.append_all([item(store, message("kept"), 0)])
    store.committer.commit()
    disk.free_bytes = 0
    result = store.writer.append_all([item(store, message(b"%02d" % number * 250), 0) for number in range(20)])
    first = min(result.refused)
    assert "is full" in str(result.refused[first])
    assert sorted(result.refused) == list(range(first, 20))
    assert result.offsets[first:] == result.positions[first:] == [-1] * (20 - first)
    with pytest.raises(Refused, match="is full"):
        store.committer.commit()
    assert store.appended == store.written
    stored = [b"%02d" % number * 250 for number in range(first) if result.positions[number] < store.written]
    assert 0 < len(stored) < first
    disk.free_bytes = None
    store.upkeep.retention.look()
    placed = store.writer.append(message("after"), 0)
    assert placed.queue_offset == 1 + len(stored)
    store.committer.commit()
    store.flusher.flush_now()
    assert drain(store, store.queue("T", 0)) == [b"kept", *stored, b"after"]
    await store.close()


async def test_a_value_that_does_not_fit_its_field_leaves_the_messages_before_it(open_store: OpenStore) -> None:
    store = await open_store()
    good, bad = item(store, message("good"), 0), item(store, message("bad"), 0)
    with pytest.raises((struct.error, OverflowError)):
        store.writer.append_all([good, (*bad[:6], 1 << 70, *bad[7:])])
    placed = store.writer.append(message("next"), 0)
    assert placed.queue_offset == 1
    store.committer.commit()
    store.flusher.flush_now()
    assert drain(store, store.queue("T", 0)) == [b"good", b"next"]


async def test_readable_is_no_further_than_everyone_has_confirmed(open_store: OpenStore) -> None:
    store = await open_store()
    first: Placed = store.writer.append(message("a"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    confirmed, moved = [first.end], [0]
    store.readable_end.confirmed.append(lambda: confirmed[0])
    store.readable_end.on_moved.append(lambda: moved.append(store.readable))
    queue = store.queue("T", 0)
    woken: list[int] = []
    queue.watchers = [lambda queue: woken.append(store.readers.end_offset(queue))]
    second = store.writer.append(message("b"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    assert (store.durable, store.readable) == (second.end, first.end)
    assert drain(store, queue) == [b"a"]
    assert store.lookup.record_at(second.position) is None
    confirmed[0] = second.end
    store.readable_end.update()
    assert (store.readable, moved[-1], woken[-1]) == (second.end, second.end, 2)
    assert drain(store, queue) == [b"a", b"b"]
    confirmed[0] = 0  # what was readable stays so
    store.readable_end.update()
    assert store.readable == second.end


@pytest.mark.parametrize("flush", ["sync", "async"])
async def test_a_segment_is_reported_once_when_it_is_complete_and_durable(open_store: OpenStore, flush: str) -> None:
    store = await open_store(small_config(flush=flush))
    sealed: list[tuple[Segment, bytes]] = []
    store.flusher.on_sealed.append(lambda each: sealed.append((each, store.segments.read(each.start, 4096))))
    for number in range(9):
        store.writer.append(message(b"%d" % number * 900), 0)
        store.committer.commit()
    assert sealed == []
    store.flusher.flush_now()
    assert [each.start for each, _ in sealed] == [segment.start for segment in store.segments.items[:-1]] == [0, 4096]
    for segment, content in sealed:
        assert store.segments.read(segment.start, 4096) == content
        assert decode_record(content).position == segment.start
    store.flusher.flush_now()
    assert len(sealed) == 2


async def test_invariants_of_the_ends_are_checked(open_store: OpenStore) -> None:
    store = await open_store()
    store.writer.append(message("a"), 0)
    store.committer.commit()
    with pytest.raises(AssertionError, match="out of order"):
        store.flusher._note_durable(store.written + 1, 0.0)
    store.readable_end.allow(store.written)
    with pytest.raises(AssertionError, match="cannot move back"):
        store.readable_end.allow(0)
