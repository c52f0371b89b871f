"""Atomic groups: all records of one are there or none, whatever is left of its bytes.

``MARTLET_GROUP_CUTS`` is at how many bytes of the last group a write is cut (default 150; 0: at each), and
``MARTLET_GROUP_SEEDS`` how many sets of lost sectors are tried (default 150).
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from struct import Struct

import pytest
from tests.store.conftest import OpenStore
from tests.stored import records_in

from martlet.errors import Reason, Refused
from martlet.message import Message, Placed
from martlet.records.codec import check_record, decode_record, decode_records
from martlet.records.layout import BLANK_MAGIC, FILLER, FILLER_BYTES, GROUP_MASK
from martlet.store import Store, StoreConfig
from martlet.store.format.atomic import FIRST, INNER, LAST, MARK_AT, group_marks, valid_after
from martlet.store.recovery.inspect import inspect
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, append_batch, append_group, drain, message, small_config

CUTS = int(os.environ.get("MARTLET_GROUP_CUTS", "150"))
SEEDS = int(os.environ.get("MARTLET_GROUP_SEEDS", "150"))
ROOT = Path("/data/store")
LOG = f"{ROOT}/commitlog"
CONFIG = small_config(segment_bytes=16384, page_bytes=1024)
SECTOR = 512


async def open_on(disk: FakeDisk, config: StoreConfig = CONFIG) -> Store:
    store = await Store.open(ROOT, config, ManualClock(), disk)
    store.writer.store_host = HOST
    return store


def members(name: str, *sizes: int) -> tuple[list[Message], list[int]]:
    """Messages with bodies of *sizes* bytes for two topics and three queues, and their queue ids."""
    messages = [
        message(f"{name}:{number}:".encode() + b"x" * size, "AB"[number % 2], f"tag{number}", "key")
        for number, size in enumerate(sizes)
    ]
    return messages, [number % 3 for number in range(len(sizes))]


def put(store: Store, name: str, *sizes: int) -> list[Placed]:
    return append_group(store, *members(name, *sizes))


def labels(store: Store) -> list[str]:
    """What is readable, as ``group:number``, in log order."""
    found = [record for queue in store.queues.all() for record in records_in(store, queue)]
    return [label(record.body) for record in sorted(found, key=lambda record: record.position)]


def label(body: bytes) -> str:
    return b":".join(body.split(b":")[:2]).decode()


def flush(store: Store) -> None:
    store.committer.commit()
    store.flusher.flush_now()


def image(store: Store, disk: FakeDisk) -> FakeDisk:
    """What a killed process leaves, all of it durable."""
    store.crash()
    for file in disk.files.values():
        file.sync()
    return disk.after_power_cut(Cut.KILLED, Random(0))


def log_of(disk: FakeDisk) -> dict[str, bytearray]:
    return {path: file.data for path, file in disk.files.items() if path.startswith(LOG)}


def with_log(disk: FakeDisk, path: str, data: bytes) -> FakeDisk:
    found = disk.after_power_cut(Cut.KILLED, Random(0))
    file = found.files[path]
    file.data[:] = data
    file.stable[:] = data
    return found


def marks_of(store: Store, placed: Sequence[Placed]) -> list[int]:
    return [store.segments.read(each.position + MARK_AT, 1)[0] & LAST for each in placed]


# what is stored


async def test_a_group_goes_to_several_queues_side_by_side(open_store: OpenStore) -> None:
    store = await open_store()
    placed = put(store, "g", 1, 2, 3, 4)
    flush(store)
    assert [each.queue_offset for each in placed] == [0, 0, 0, 0]
    assert [each.queue_id for each in placed] == [0, 1, 2, 0]
    assert [each.position for each in placed[1:]] == [each.end for each in placed[:-1]]
    assert marks_of(store, placed) == [FIRST, INNER, INNER, LAST]
    assert labels(store) == ["g:0", "g:1", "g:2", "g:3"]


async def test_offsets_of_a_group_follow_one_another_in_each_queue(open_store: OpenStore) -> None:
    store = await open_store()
    store.writer.append(message("before"), 0)
    placed = append_group(store, [message("1"), message("2", "U"), message("3")], [0, 0, 0])
    assert [each.queue_offset for each in placed] == [1, 0, 2]
    flush(store)
    assert drain(store, store.queue("T", 0)) == [b"before", b"1", b"3"]


@pytest.mark.parametrize("record_crcs", [False, True])
async def test_members_get_record_crcs_and_keep_every_field(open_store: OpenStore, record_crcs: bool) -> None:
    store = await open_store(small_config(record_crcs=record_crcs))
    wide = Message("W" * 130, b"wide", b"", 0, 7, 0x1, 5, bytes(20), 3, 0)
    prepared = Message("T", b"half", b"", sys_flag=0x4, born_host=HOST)
    placed = append_group(store, [wide, prepared, message("plain", keys="k")], [0, 0, 0])
    flush(store)
    data = b"".join(store.segments.read(each.position, each.end - each.position) for each in placed)
    first, half, plain = decode_records(data)
    assert (first.topic, first.flag, first.sys_flag, first.born_ms) == ("W" * 130, 7, 0x20000011, 5)
    assert (first.reconsume_times, first.born_host) == (3, bytes(20))
    assert (half.sys_flag, half.queue_offset) == (0x40000004, 0)
    assert (plain.sys_flag, plain.body) == (0x60000000, b"plain")
    assert store.queue("T", 0).next_offset == 1
    assert all(check_record(data, *span) for span in _spans(placed))


def _spans(placed: Sequence[Placed]) -> list[tuple[int, int, int]]:
    base = placed[0].position
    return [(each.position - base, each.end - base, each.position) for each in placed]


async def test_a_group_of_one_is_a_plain_record_and_one_of_none_nothing(open_store: OpenStore) -> None:
    store = await open_store()
    assert put(store, "none") == []
    placed = put(store, "one", 5)
    flush(store)
    assert marks_of(store, placed) == [0]


async def test_batches_are_groups(open_store: OpenStore) -> None:
    store = await open_store()
    small = append_batch(store, [message("a"), message("b"), message("c")], 0)
    large = append_batch(store, [message(bytes(700)), message(bytes(700))], 0)
    one = append_batch(store, [message("d")], 0)
    flush(store)
    assert marks_of(store, [*small, *large, *one]) == [FIRST, INNER, LAST, FIRST, LAST, 0]


@pytest.mark.parametrize("sys_flag", [0x20000000, 0x40000000, 0x60000001, -1 & 0x7FFFFFFF & ~0x3C])
async def test_these_bits_of_a_client_are_not_stored(open_store: OpenStore, sys_flag: int) -> None:
    store = await open_store()
    said = [Message("T", b"m" * size, b"", sys_flag=sys_flag, born_host=HOST) for size in (10, 2000)]
    wide = Message("T", b"m", b"", sys_flag=sys_flag, born_host=bytes(20))
    placed = [store.writer.append(each, 0) for each in (*said, wide)] + append_batch(store, said[:1], 0)
    batch = append_batch(store, [*said[:1], said[0]], 0)
    group = append_group(store, said, [0, 0])
    flush(store)
    assert marks_of(store, placed) == [0, 0, 0, 0]
    assert marks_of(store, [*batch, *group]) == [FIRST, LAST, FIRST, LAST]
    assert decode_record(store.segments.read(placed[0].position, 500)).sys_flag == sys_flag & ~GROUP_MASK


# what is refused


@pytest.mark.parametrize(
    ("config", "sizes", "says"),
    [
        (CONFIG, (1,) * 2001, "the group has 2001 messages; the maximum is 2000 .store.group_messages_max."),
        (small_config(group_messages_max=3), (1,) * 4, "4 messages; the maximum is 3"),
        (
            small_config(group_bytes_max=1500, message_bytes_max=740, segment_bytes=1 << 22),
            (700,) * 200,
            r"the maximum is 132552 .store.group_bytes_max, or two messages of store.message_bytes_max.",
        ),
        (small_config(segment_bytes=2048), (1000, 1000), "a segment has 2048"),
        (small_config(message_bytes_max=100), (5, 101), "the body has .* the maximum is 100"),
    ],
)
async def test_a_group_that_cannot_be_stored_is_refused_whole(
    open_store: OpenStore, config: StoreConfig, sizes: tuple[int, ...], says: str
) -> None:
    store = await open_store(config)
    with pytest.raises(Refused, match=says) as caught:
        put(store, "g", *sizes)
    assert caught.value.reason is Reason.ILLEGAL
    assert store.appended == 0 == sum(queue.next_offset for queue in store.queues.all())


async def test_one_bad_member_refuses_all(open_store: OpenStore) -> None:
    store = await open_store()
    with pytest.raises(Refused, match=r"U\+0000"):
        append_group(store, [message("good"), Message("T", b"", b"a\x01\x00\x02", born_host=HOST)], [0, 0])
    with pytest.raises(Refused, match="cannot be a directory"):
        append_group(store, [message("good"), message("bad", "..")], [0, 0])
    with pytest.raises(Refused, match="negative"):
        append_group(store, [message("good"), message("bad")], [0, -1])
    too_large_for_its_field = message("x")
    too_large_for_its_field.flag = 1 << 40
    for size in (1, 900):  # within the page, and beyond its end
        with pytest.raises(Exception, match="format"):
            append_group(store, [message(bytes(size)), too_large_for_its_field], [0, 0])
    store.writer.append(message("after"), 0)
    flush(store)
    assert drain(store, store.queue("T", 0)) == [b"after"]


async def test_an_atomic_run_is_a_group_and_stored_whole_or_not_at_all(open_store: OpenStore) -> None:
    store = await open_store(small_config(message_bytes_max=1000))
    good = [store.writer.item(message(f"good {number}"), number % 2) for number in range(3)]
    bad = store.writer.item(message(bytes(1001)), 0)
    with pytest.raises(Refused, match="the maximum is 1000"):
        store.writer.append_all([good[0], bad, good[1]], atomic=True)
    assert store.appended == 0
    result = store.writer.append_all(good, atomic=True)
    assert (result.offsets, result.refused) == ([0, 0, 1], {})
    assert store.writer.append_all([], atomic=True).positions == []
    flush(store)
    marks = [(store.lookup.record_at(position) or b"")[MARK_AT] & LAST for position in result.positions]
    assert marks == [FIRST, INNER, LAST]
    assert drain(store, store.queue("T", 0)) == [b"good 0", b"good 2"]
    loose = store.writer.append_all([good[0], bad, good[1]])
    assert list(loose.refused) == [1]


async def test_a_full_disk_takes_a_group_back_and_gives_it_room_later() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    put(store, "kept", 10, 10)
    flush(store)
    disk.free_bytes = 0
    put(store, "lost", 3000, 3000)
    with pytest.raises(Refused):
        store.committer.commit()
    disk.free_bytes = None
    assert labels(store) == ["kept:0", "kept:1"]
    store.admission.refusal = ""
    put(store, "later", 10, 10)
    flush(store)
    again = await open_on(image(store, disk))
    assert labels(again) == ["kept:0", "kept:1", "later:0", "later:1"]
    again.crash()


# where it lies


def note_labels(store: Store, seen: list[list[str]]) -> None:
    seen.append(labels(store))


@pytest.mark.parametrize("flushing", ["sync", "async"])
async def test_readers_see_all_of_a_group_or_none_however_full_a_segment_is(flushing: str) -> None:
    config = small_config(segment_bytes=4096, page_bytes=512, flush=flushing)
    for filled in range(100, 4000, 97):
        store = await open_on(FakeDisk(), config)
        seen: list[list[str]] = []
        store.readable_end.on_moved.append(partial(note_labels, store, seen))
        store.writer.append(message(b"first:0:" + bytes(filled - 100)), 0)
        put(store, "g", 300, 300, 300)
        append_batch(store, [message(f"b:{number}:" + "x" * 200) for number in range(4)], 0)
        put(store, "h", 10, 10)
        flush(store)
        whole = ["g:0", "g:1", "g:2"], ["b:0", "b:1", "b:2", "b:3"], ["h:0", "h:1"]
        for labels in seen:
            for group in whole:
                assert len(set(group) & set(labels)) in (0, len(group)), f"{labels} with {filled} bytes before"
        assert seen[-1] == ["first:0", *whole[0], *whole[1], *whole[2]]
        store.crash()


async def test_a_group_lies_in_one_segment(open_store: OpenStore) -> None:
    store = await open_store()
    for number in range(40):
        placed = put(store, str(number), 400, number * 20, 5)
        assert len({store.segments.find(each.position) for each in placed}) == 1
    flush(store)
    assert len(store.segments.items) > 5


# what a crash leaves


async def three_groups(record_crcs: bool) -> tuple[FakeDisk, list[Placed], list[str]]:
    """A killed store with groups after a checkpoint, the places of the last group, and what was before it."""
    disk = FakeDisk()
    store = await open_on(disk, small_config(segment_bytes=16384, record_crcs=record_crcs))
    put(store, "old", 10, 10)
    flush(store)
    await store.upkeep.checkpointer.checkpoint()
    put(store, "first", 0, 40, 3)
    store.writer.append(message("plain:0:"), 0)
    append_batch(store, [message(f"batch:{number}:", "B") for number in range(3)], 0)
    before = 10
    placed = put(store, "last", 0, 600, 7, 60)
    flush(store)
    every = labels(store)
    return image(store, disk), placed, every[: before - 1]


@pytest.mark.parametrize("record_crcs", [False, True])
async def test_no_half_group_is_there_at_whatever_byte_its_write_ended(record_crcs: bool) -> None:
    disk, placed, before = await three_groups(record_crcs)
    (path,) = log_of(disk)
    whole = bytes(log_of(disk)[path])
    start, end = placed[0].position, placed[-1].end
    assert len(before) == 9
    step = (end - start) // CUTS or 1 if CUTS else 1
    for at in (*range(start, end, step), end - 1):
        store = await open_on(with_log(disk, path, whole[:at] + bytes(len(whole) - at)))
        assert labels(store) == before, f"cut at byte {at - start}"
        assert store.appended == start
        store.crash()
    store = await open_on(disk)
    assert labels(store) == [*before, "last:0", "last:1", "last:2", "last:3"]
    store.crash()


async def test_no_half_group_is_there_whichever_sectors_are_lost() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    put(store, "old", 10, 10)
    flush(store)
    await store.upkeep.checkpointer.checkpoint()
    start = store.appended
    random = Random(5)
    for number in range(12):
        put(store, str(number), *(random.choice((0, 5, 200, 480, 700)) for _ in range(random.choice((2, 3, 5)))))
        if number % 3 == 0:
            store.writer.append(message(f"plain{number}:0:"), 0)
    flush(store)
    every = labels(store)
    end = store.appended
    disk = image(store, disk)
    (path,) = log_of(disk)
    whole = bytes(log_of(disk)[path])
    halves = 0
    for seed in range(SEEDS):
        lost, chance = bytearray(whole), Random(seed)
        for at in range(start - start % SECTOR, end, SECTOR):
            if chance.random() < (0.03, 0.2, 0.5)[seed % 3]:
                begin = max(at, start)
                lost[begin : at + SECTOR] = bytes(at + SECTOR - begin)
        found = with_log(disk, path, bytes(lost))
        store = await open_on(found)
        there = labels(store)
        assert_no_half(every, there)
        halves += len(there) < len(every)
        # Not even when everything but the log is made again from it, as often as one likes.
        for name in ("checkpoint", "abort"):
            store.crash()
            found.files.pop(f"{ROOT}/{name}", None)
            store = await open_on(found)
            assert labels(store) == there
        await store.close()
    assert halves > SEEDS // 2


def assert_no_half(every: list[str], there: list[str]) -> None:
    for group in {label.split(":")[0] for label in every}:
        expected = [label for label in every if label.startswith(f"{group}:")]
        assert [label for label in there if label.startswith(f"{group}:")] in ([], expected)


def seen_by_rocketmq(disk: FakeDisk) -> list[str]:
    """The records up to the first bytes that are none: RocketMQ's recovery (CommitLog.recoverAbnormally)."""
    found: list[str] = []
    for path, data in sorted(log_of(disk).items()):
        at, base = 0, int(path[-20:])
        while at + FILLER_BYTES <= len(data):
            size, magic = FILLER.unpack_from(data, at)
            if magic == BLANK_MAGIC:
                at = len(data)
            elif size > 0 and check_record(data, at, at + size, base + at):
                found.append(label(decode_record(data, at).body))
                at += size
            else:
                return found
    return found


async def test_a_killed_process_leaves_no_half_group_even_for_rocketmq() -> None:
    disk = FakeDisk()
    store = await open_on(disk, small_config(page_bytes=512))
    cuts: list[FakeDisk] = []
    disk.on_change = lambda name: cuts.append(disk.after_power_cut(Cut.KILLED, Random(0)))
    for number in range(8):
        store.writer.append(message(f"plain{number}:0:"), 0)
        put(store, f"g{number}", 10, 300, 700, 3)
        append_batch(store, [message(f"b{number}:{index}:") for index in range(3)], 0)
        store.committer.commit()
    disk.on_change = None
    store.flusher.flush_now()
    every = seen_by_rocketmq(disk)
    assert len(every) == 8 * 8
    assert len(cuts) > 8 * 2
    completed = 0
    for cut in cuts:
        there = seen_by_rocketmq(cut)
        assert there == every[: len(there)]
        assert_no_half(every, there)
        ours = await open_on(cut)
        kept = labels(ours)
        assert kept == every[: len(kept)]
        assert len(kept) >= len(there)
        assert_no_half(every, kept)
        assert ours.readers.damaged_records == 0
        completed += len(kept) > len(there)
        ours.crash()
    assert completed
    store.crash()


async def test_a_group_longer_than_a_block_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("recovery.scan", "format.atomic"):
        monkeypatch.setattr(f"martlet.store.{module}.BLOCK_BYTES", 1000)
    disk = FakeDisk()
    store = await open_on(disk)
    put(store, "a", 5, 5)
    placed = put(store, "long", *[300] * 12)
    put(store, "z", 5, 5)
    flush(store)
    every = labels(store)
    disk = image(store, disk)
    store = await open_on(disk.after_power_cut(Cut.KILLED, Random(0)))
    assert labels(store) == every
    assert store.readers.damaged_records == 0
    store.crash()
    (path,) = log_of(disk)
    broken = bytearray(log_of(disk)[path])
    broken[placed[-1].position + 90] ^= 1
    store = await open_on(with_log(disk, path, bytes(broken)))
    assert labels(store) == ["a:0", "a:1", "z:0", "z:1"]
    store.crash()


# what is not judged


async def test_damage_below_the_checkpoint_costs_one_member_only() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    placed = put(store, "g", 30, 30, 30)
    flush(store)
    await store.upkeep.checkpointer.checkpoint()
    store.writer.append(message("after:0:"), 0)
    flush(store)
    disk = image(store, disk)
    (path,) = log_of(disk)
    data = bytearray(log_of(disk)[path])
    data[placed[1].end - 60] ^= 1
    store = await open_on(with_log(disk, path, bytes(data)))
    assert labels(store) == ["g:0", "g:2", "after:0"]
    store.crash()


@pytest.mark.parametrize("mark", [FIRST, INNER, LAST])
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_mark_on_a_record_of_no_group_costs_nothing(mark: int, at: int) -> None:
    """As RocketMQ's late deliveries have it, or a bit that flipped; unless it is the first of a group at the end."""
    disk = FakeDisk()
    store = await open_on(disk)
    placed = [store.writer.append(message(f"m:{number}:"), 0) for number in range(3)]
    flush(store)
    disk = image(store, disk)
    (path,) = log_of(disk)
    data = bytearray(log_of(disk)[path])
    data[placed[at].position + MARK_AT] |= mark
    store = await open_on(with_log(disk, path, bytes(data)))
    expected = ["m:0", "m:1", "m:2"]
    assert labels(store) == (expected[:2] if (mark, at) == (FIRST, 2) else expected)
    store.crash()


async def test_a_log_that_rocketmq_had_since_the_checkpoint_is_not_judged() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    placed = [store.writer.append(message(f"m:{number}:"), 0) for number in range(3)]
    flush(store)
    disk = image(store, disk)
    (path,) = log_of(disk)
    data = bytearray(log_of(disk)[path])
    data[placed[2].position + MARK_AT] |= FIRST
    found = with_log(disk, path, bytes(data))
    page = found.files[f"{ROOT}/checkpoint"]
    Struct(">q").pack_into(page.data, 0, 1)
    store = await open_on(found)
    assert labels(store) == ["m:0", "m:1", "m:2"]
    store.crash()


async def test_resynchronisation_never_enters_a_group(open_store: OpenStore) -> None:
    store = await open_store()
    first = put(store, "g", 5, 5, 5)
    second = put(store, "h", 5, 5)
    flush(store)
    segments, told = store.segments, list[int]()
    assert valid_after(segments, first[0].position, 0, told.append) == second[0].position
    assert told == [first[1].position, first[2].position]
    assert valid_after(segments, first[0].position) == first[1].position
    assert valid_after(segments, second[0].position, 0) == -1


async def test_inspect_counts_a_half_group_as_what_the_next_start_cuts() -> None:
    disk, placed, before = await three_groups(record_crcs=False)
    (path,) = log_of(disk)
    data = bytes(log_of(disk)[path])
    cut = placed[3].position + 10
    found = inspect(str(ROOT), with_log(disk, path, data[:cut] + bytes(len(data) - cut)))
    assert found.records == len(before)
    assert found.log_end == placed[0].position
    assert found.torn_bytes >= placed[2].end - placed[0].position
    assert not found.damage
    assert inspect(str(ROOT), disk).records == len(before) + 4


def test_marks_say_where_in_a_group_a_record_is() -> None:
    assert [group_marks(count) for count in range(4)] == [[], [0], [FIRST, LAST], [FIRST, INNER, LAST]]
