"""Light queues: one record in the log, entries in further queues that the record names itself."""

import errno
from functools import partial
from pathlib import Path
from random import Random

import pytest

from martlet.errors import Refused
from martlet.message import Message, Record
from martlet.records.codec import decode_records, record_size, tags_code
from martlet.records.layout import ENTRY, ENTRY_BYTES, RecordView
from martlet.runtime.steps import finish_now
from martlet.store import Store
from martlet.store.append import writer
from martlet.store.format.light import light_places, light_topics
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, append_batch, append_group, bodies, drain, message, small_config

from .test_derived_files import set_content
from .test_foreign import OURS_AT, exchange, flip, forget_martlet

CONFIG = small_config(segment_bytes=8192)


async def open_on(disk: FakeDisk, **changes: object) -> Store:
    store = await Store.open(Path("/data"), small_config(**{"segment_bytes": 8192, **changes}), ManualClock(), disk)
    store.writer.store_host = HOST
    store.writer.light_queues = True
    return store


def routed(body: str, *names: str, topic: str = "P", tags: str = "", more: bytes = b"") -> Message:
    """A message of *topic* that light topics ``%LMQ%<name>`` are to index."""
    made = message(body, topic, tags)
    listed = ",".join(f"%LMQ%{name}" for name in names)
    made.properties += f"INNER_MULTI_DISPATCH\x01{listed}\x02".encode() + more
    return made


def light(store: Store, name: str) -> list[bytes]:
    return drain(store, store.queue(f"%LMQ%{name}", 0))


def stored(store: Store, position: int) -> bytes:
    data = store.lookup.record_at(position)
    assert data is not None
    return data


async def test_one_record_has_entries_in_every_light_queue_that_it_names() -> None:
    store = await open_on(FakeDisk())
    first = store.writer.append(routed("1", "a", "b"), 0)
    store.writer.append(message("2", "P"), 0)
    store.writer.append(routed("3", "b", topic="Q"), 3)
    store.committer.commit()
    store.flusher.flush_now()
    assert store.appended == store.readable
    assert (light(store, "a"), light(store, "b")) == ([b"1"], [b"1", b"3"])
    assert drain(store, store.queue("P", 0)) == [b"1", b"2"]
    assert store.queues.position_at(store.queue("%LMQ%b", 0), 0) == first.position
    assert finish_now(store.lookup.offset_by_time(store.queue("%LMQ%b", 0), 0)) == 0
    store.crash()


async def test_the_record_contains_its_offset_in_each_light_queue() -> None:
    store = await open_on(FakeDisk())
    store.writer.append(routed("1", "a"), 0)
    placed = store.writer.append(routed("2", "b", "a"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    (record,) = decode_records(stored(store, placed.position))
    assert record.property("INNER_MULTI_DISPATCH") == "%LMQ%b,%LMQ%a"
    assert record.property("INNER_MULTI_QUEUE_OFFSET") == "0,1"
    assert light_places(b"P", record.properties) == [(b"%LMQ%b", 0), (b"%LMQ%a", 1)]
    store.crash()


@pytest.mark.parametrize("record_crcs", [False, True])
@pytest.mark.parametrize("again", [False, True])
async def test_a_record_read_through_a_light_queue_has_its_offset_there(again: bool, record_crcs: bool) -> None:
    disk = FakeDisk()
    store = await open_on(disk, record_crcs=record_crcs)
    for number in range(40):
        names = ["a"] * (number % 3 == 0) + ["b"] * (number % 2)
        made = routed(f"{number}", *names) if names else message(f"{number}", "P")
        made.flag = 7
        store.writer.append(made, number % 2)
    store.committer.commit()
    store.flusher.flush_now()
    if again:
        await store.close()
        store = await open_on(disk)
    queue = store.queue("%LMQ%a", 0)
    records: list[Record] = []
    while (offset := 4 + len(records)) < queue.next_offset:
        result = store.readers.read(queue, offset, 3, 10**6)
        records += decode_records(b"".join(result.pieces))
    assert [record.queue_offset for record in records] == list(range(4, 14))
    assert {(record.topic, record.queue_id, record.flag) for record in records} == {("P", 0, 7)}
    assert [record.body for record in records] == [b"%d" % (3 * n) for n in range(4, 14)]
    result = await store.readers.read_far(queue, 4, 100, 10**6)
    assert result.next_offset > 7
    result.cut(3)
    assert (result.next_offset, len(bodies(result.pieces))) == (7, 3)
    (plain,) = decode_records(stored(store, records[0].position))
    assert (plain.queue_offset, plain.queue_id) == (6, 0), "the log has it as it was stored"
    assert store.readers.damaged_records == 0
    store.crash()


def all_of(store: Store) -> dict[str, list[bytes]]:
    """The messages of every queue."""
    return {f"{queue.topic}/{queue.queue_id}": drain(store, queue) for queue in store.queues.all() if queue.next_offset}


async def filled(disk: FakeDisk) -> dict[str, list[bytes]]:
    """Fill a store whose last checkpoint is before half of its records; it is left as a killed process leaves it."""
    store = await open_on(disk)
    for number in range(60):
        names = [name for name, each in (("a", 1), ("b", 3), ("c", 7)) if number % each == 0]
        store.writer.append(routed(f"{number}", *names, topic="PQ"[number % 2], tags=f"t{number % 3}"), 0)
        store.writer.append(message(f"plain {number}", "P", f"t{number % 2}"), 0)
        store.committer.commit()
        if number == 30:
            store.flusher.flush_now()
            await store.upkeep.checkpointer.checkpoint()
    store.flusher.flush_now()
    found = all_of(store)
    assert found["%LMQ%b/0"] == [b"%d" % number for number in range(0, 60, 3)]
    store.crash()
    return found


GONE = {
    "nothing": (),
    "all queues": ("/data/consumequeue",),
    "a light queue": ("/data/consumequeue/%LMQ%b",),
    "all light queues": ("/data/consumequeue/%LMQ%",),
    "the parent's queues": ("/data/consumequeue/P", "/data/consumequeue/Q"),
    "the checkpoint": ("/data/checkpoint",),
    "everything": ("/data/checkpoint", "/data/consumequeue", "/data/index", "/data/queues."),
}


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("gone", GONE)
async def test_light_queues_are_rebuilt_from_the_log_alone(gone: str, enabled: bool) -> None:
    disk = FakeDisk()
    expected = await filled(disk)
    for path in [path for path in disk.files if path.startswith(GONE[gone])]:
        disk.unlink(path)
    for ending in ("killed", "stopped"):
        store = await Store.open(Path("/data"), CONFIG, ManualClock(), disk)
        store.writer.light_queues = enabled
        assert all_of(store) == expected, f"{gone}, {ending}"
        assert store.readers.damaged_records == 0
        codes = frozenset([tags_code("t1")])
        assert store.readers.read(store.queue("%LMQ%a", 0), 1, 1, 10**6, codes).count == 1
        assert store.readers.read(store.queue("%LMQ%a", 0), 2, 1, 10**6, codes).count == 0
        await (store.close() if ending == "stopped" else store.upkeep.checkpointer.checkpoint())
        store.crash()


# ---- appends that are refused or taken back


@pytest.mark.parametrize("how", ["one", "run", "batch", "group"])
async def test_a_write_that_fails_leaves_no_entry_in_any_queue(how: str) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    store.writer.append(routed("kept", "a"), 0)
    store.committer.commit()
    disk.fail_next("write", errno.ENOSPC)
    made = [routed(f"lost {n}", "a", "b") for n in range(3)]
    if how == "one":
        store.writer.append(made[0], 0)
    elif how == "run":
        store.writer.append_all([store.writer.item(each, 0) for each in made])
    elif how == "batch":
        append_batch(store, made, 0)
    else:
        append_group(store, made, [0, 1, 2])
    with pytest.raises(Refused):
        store.committer.commit()
    store.upkeep.retention.look()
    placed = store.writer.append(routed("next", "b", "a"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    assert all_of(store) == {"P/0": [b"kept", b"next"], "%LMQ%a/0": [b"kept", b"next"], "%LMQ%b/0": [b"next"]}
    assert light_places(b"P", RecordView(stored(store, placed.position)).properties) == [(b"%LMQ%b", 0), (b"%LMQ%a", 1)]
    store.crash()
    store = await open_on(disk)
    assert all_of(store)["%LMQ%a/0"] == [b"kept", b"next"]
    assert store.readers.damaged_records == 0
    store.crash()


@pytest.mark.parametrize("before", [0, 99])
async def test_a_group_is_in_its_light_queues_as_a_whole(before: int) -> None:
    disk = FakeDisk()
    store = await open_on(disk, segment_bytes=1 << 15)
    for number in range(before):
        store.writer.append(routed(f"{number}", "a"), 0)
    store.committer.commit()
    group = [routed("1", "a", topic="P"), message("2", "Q"), routed("3", "b", "a", topic="Q")]
    as_sent = sum(record_size(each, each.topic.encode(), HOST) for each in group)
    # Room for the group with an offset of one digit in each light queue.
    offsets = len(b"INNER_MULTI_QUEUE_OFFSET\x010\x02") + len(b"INNER_MULTI_QUEUE_OFFSET\x010,0\x02")
    room = as_sent + offsets if before else as_sent
    left = (1 << 15) - store.appended - 8 - room
    store.writer.append(message("x" * (left - 92), "F"), 0)
    assert (1 << 15) - store.appended - 8 == room
    placed = append_group(store, group, [0, 0, 0])
    store.committer.commit()
    store.flusher.flush_now()
    assert placed[0].position == 1 << 15, "with the offsets they would not all have had room in the first segment"
    assert (light(store, "a")[before:], light(store, "b")) == ([b"1", b"3"], [b"3"])
    store.crash()
    store = await open_on(disk, segment_bytes=1 << 15)
    assert (light(store, "a")[before:], light(store, "b")) == ([b"1", b"3"], [b"3"])
    store.crash()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("a", "'a' in INNER_MULTI_DISPATCH is no light topic; its name must begin with %LMQ%"),
        ("%LMQ%", "'%LMQ%' in INNER_MULTI_DISPATCH is no light topic"),
        ("%LMQ%a,b", "'b' in INNER_MULTI_DISPATCH is no light topic"),
        ("%LMQ%a/b", "is an invalid light topic"),
        ("%LMQ%$", "is an invalid light topic"),
        ("%LMQ%$parent", "and %LMQ%[$] only for %LMQ%[$]parent[$]child"),
        ("%LMQ%$parent$", "is an invalid light topic"),
        ("%LMQ%$$child", "is an invalid light topic"),
        ("%LMQ%$parent$child$more", "is an invalid light topic"),
        ("%LMQ%" + "x" * 251, "is an invalid light topic"),
        (",".join(f"%LMQ%{n}" for n in range(7)), r"[79] or more light topics are named together; the maximum is 6"),
        ("%LMQ%1,%LMQ%2,%LMQ%3,%LMQ%4", r"4 more are needed; the maximum is 3 \(store.light_queues_max\)"),
    ],
)
async def test_light_topics_that_cannot_be_are_refused(names: str, text: str) -> None:
    store = await open_on(FakeDisk(), light_names_max=6, light_queues_max=3)
    bad = message("x", "P")
    bad.properties = f"INNER_MULTI_DISPATCH\x01{names}\x02".encode()
    good = routed("good", "1", "2")
    for attempt in (
        lambda: store.writer.append(bad, 0),
        lambda: append_batch(store, [good, bad], 0),
        lambda: append_group(store, [good, bad], [0, 0]),
    ):
        with pytest.raises(Refused, match=text):
            attempt()
        assert store.queues.light == 0
    result = store.writer.append_all([store.writer.item(each, 0) for each in (bad, good, bad)])
    assert sorted(result.refused) == [0, 2]
    store.committer.commit()
    store.flusher.flush_now()
    assert all_of(store) == {"P/0": [b"good"], "%LMQ%1/0": [b"good"], "%LMQ%2/0": [b"good"]}
    store.writer.append(routed("known", "1", "2"), 0)
    store.queue("%LMQ%read", 0)
    with pytest.raises(Refused, match=r"there are 3 light queues and 1 more are needed"):
        store.queue("%LMQ%read too", 0)
    store.crash()


async def test_the_messages_of_a_batch_or_group_share_the_limit_of_names() -> None:
    store = await open_on(FakeDisk(), light_names_max=4)
    three = [routed("x", "1", "2"), message("plain", "P"), routed("y", "1", "2"), routed("z", "1")]
    for append in (partial(append_batch, store, three, 0), partial(append_group, store, three, [0] * 4)):
        with pytest.raises(Refused, match=r"5 or more light topics are named together; the maximum is 4"):
            append()
    assert store.writer.append_all([store.writer.item(each, 0) for each in three]).refused == {}
    assert len(append_batch(store, three[:3], 0)) == 3
    store.crash()


async def test_properties_that_offsets_make_too_long_are_refused() -> None:
    store = await open_on(FakeDisk(), segment_bytes=1 << 16)
    made = routed("x", "a")
    made.properties += b"k\x01" + b"v" * (32767 - len(made.properties) - 3) + b"\x02"
    assert len(made.properties) == 32767
    with pytest.raises(Refused, match="the properties have 32794 bytes"):
        store.writer.append(made, 0)
    with pytest.raises(Refused, match="the properties have"):
        append_batch(store, [made, made], 0)
    assert store.queues.light == 0
    store.crash()


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(
    "properties",
    [
        b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02INNER_MULTI_QUEUE_OFFSET\x017\x02",
        b"INNER_MULTI_QUEUE_OFFSET\x017\x02INNER_MULTI_DISPATCH\x01%LMQ%a",
        b"INNER_MULTI_QUEUE_OFFSET\x017\x02k\x01v\x02INNER_MULTI_DISPATCH\x01%LMQ%a\x02INNER_MULTI_QUEUE_OFFSET\x018\x02",
    ],
)
@pytest.mark.parametrize("topic", ["P", "%RETRY%g", "%DLQ%g", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_x", "%LMQ%a"])
async def test_only_the_store_decides_where_a_record_is_indexed(topic: str, properties: bytes, enabled: bool) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    store.writer.light_queues = enabled
    made = message("x", topic)
    made.properties = properties
    placed = [store.writer.append(made, 1), *append_batch(store, [made, made], 1)]
    placed.append(store.writer.append_all([store.writer.item(made, 1)]).placed(0))
    store.committer.commit()
    store.flusher.flush_now()
    indexed = enabled and topic == "P"
    for number, each in enumerate(placed):
        (record,) = decode_records(stored(store, each.position))
        assert record.property("INNER_MULTI_QUEUE_OFFSET") == (str(number) if indexed else "")
        assert record.property("INNER_MULTI_DISPATCH") == "%LMQ%a"
    expected = all_of(store)
    assert ("%LMQ%a/0" in expected) == indexed
    store.crash()
    for path in [path for path in disk.files if path.startswith(GONE["everything"])]:
        disk.unlink(path)
    store = await open_on(disk)
    assert all_of(store) == expected
    assert store.readers.damaged_records == 0
    store.crash()


async def test_half_messages_and_rollbacks_are_in_no_light_queue() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    for sys_flag in (0x4, 0xC):
        made = routed("half", "a")
        made.sys_flag = sys_flag
        store.writer.append(made, 0)
    store.writer.append(routed("whole", "a"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    assert light(store, "a") == [b"whole"]
    store.crash()
    store = await open_on(disk)
    assert light(store, "a") == [b"whole"]
    store.crash()


def test_a_name_counts_once() -> None:
    names = ["%LMQ%a", "%LMQ%b", "%LMQ%$parent$child", "%LMQ%a$b$c"]
    assert light_topics(f"INNER_MULTI_DISPATCH\x01{','.join(names)},%LMQ%a,,\x02".encode()) == names


@pytest.mark.parametrize(
    ("names", "offsets", "places"),
    [
        ("%LMQ%a", "3", [("%LMQ%a", 3)]),
        ("%LMQ%a,%LMQ%b,", "3,4", [("%LMQ%a", 3), ("%LMQ%b", 4)]),
        ("%LMQ%a,%LMQ%a", "3,3", [("%LMQ%a", 3)]),
        ("%LMQ%a,b", "3,", [("%LMQ%a", 3)]),
        ("%LMQ%a,%LMQ%b", "3", []),
        ("%LMQ%a", "", []),
        ("", "3", []),
        ("%LMQ%a", "-3", []),
        ("%LMQ%a", "x", []),
        ("%LMQ%a", "9" * 19, []),
        ("%LMQ%a/b,%LMQ%\0,%LMQ%c", "1,2,3", [("%LMQ%c", 3)]),
    ],
)
def test_what_rocketmq_may_have_stored_is_understood(names: str, offsets: str, places: list[tuple[str, int]]) -> None:
    properties = f"INNER_MULTI_DISPATCH\x01{names}\x02INNER_MULTI_QUEUE_OFFSET\x01{offsets}\x02".encode()
    found = light_places(b"P", properties)
    assert [(name.decode(), offset) for name, offset in found] == places
    for topic in (b"%RETRY%g", b"%DLQ%g", b"rmq_sys_x", b"SCHEDULE_TOPIC_XXXX"):
        assert light_places(topic, properties) == []


# ---- deletion and retention


def remove_derived(disk: FakeDisk, what: str) -> None:
    for path in [path for path in disk.files if path.startswith(GONE[what])]:
        disk.unlink(path)


@pytest.mark.parametrize("gone", ["nothing", "everything", "all queues"])
async def test_a_deletion_voids_the_queues_of_that_topic_alone(gone: str) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    for body in ("1", "2", "3"):
        store.writer.append(routed(body, "a", "b"), 0)
    store.deletions.delete_topic("%LMQ%a")
    assert store.queues.light == 1
    store.writer.append(routed("4", "a", "b"), 0)
    store.deletions.delete_topic("P")
    placed = store.writer.append(routed("5", "a", "b"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    expected = {
        "P/0": [b"5"],
        "%LMQ%a/0": [b"4", b"5"],
        "%LMQ%b/0": [b"1", b"2", b"3", b"4", b"5"],
    }
    assert all_of(store) == expected
    assert light_places(b"P", RecordView(stored(store, placed.position)).properties) == [(b"%LMQ%a", 1), (b"%LMQ%b", 4)]
    await store.upkeep.checkpointer.checkpoint()
    store.crash()
    remove_derived(disk, gone)
    store = await open_on(disk)
    assert all_of(store) == expected
    assert store.readers.damaged_records == 0
    await store.close()


@pytest.mark.parametrize("gone", ["nothing", "everything", "all queues"])
async def test_offsets_of_a_light_queue_continue_after_its_last_record_was_removed(gone: str) -> None:
    disk = FakeDisk()
    store = await open_on(disk, disk_clean_ratio=0.9)
    for number in range(30):
        store.writer.append(routed(f"{number}", "old", *["both"] * (number % 2)), 0)
    for number in range(400):
        store.writer.append(routed(f"new {number}", "both", topic="Q"), 0)
        store.committer.commit()
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    disk.used_ratio = 0.95
    store.upkeep.retention.look()
    disk.used_ratio = 0.1
    both, old = store.queue("%LMQ%both", 0), store.queue("%LMQ%old", 0)
    assert (old.first_offset, old.next_offset) == (30, 30)
    assert 15 < both.first_offset < both.next_offset == 415
    expected = all_of(store)
    assert len(expected["%LMQ%both/0"]) == 415 - both.first_offset == len(expected["Q/0"])
    store.crash()
    remove_derived(disk, gone)
    store = await open_on(disk)
    assert all_of(store) == expected
    assert store.queue("%LMQ%both", 0).first_offset == both.first_offset
    placed = store.writer.append(routed("next", "old"), 0)
    assert light_places(b"P", RecordView(store.tail.data, placed.position - store.tail.page_base).properties) == [
        (b"%LMQ%old", 30)
    ]
    assert store.readers.damaged_records == 0
    await store.close()


# ---- stores that RocketMQ has written, wholly or last


async def rocketmqs(retention: bool, killed: bool) -> tuple[FakeDisk, dict[str, list[bytes]]]:
    """A store with light queues as RocketMQ leaves one, and what it holds."""
    disk, clock = FakeDisk(), ManualClock()
    store = await Store.open(Path("/data"), CONFIG, clock, disk)
    store.writer.store_host = HOST
    store.writer.light_queues = True
    for number in range(150):
        clock.ms += 1000
        names = [name for name, each in (("a", 1), ("b", 3), ("c", 7)) if number % each == 0]
        store.writer.append(routed(f"{number}", *names, topic="PQ"[number % 2], tags=f"t{number % 3}"), number % 3)
        store.writer.append(message(f"plain {number}", "P"), 0)
        store.committer.commit()
    store.flusher.flush_now()
    if retention:
        await store.upkeep.checkpointer.checkpoint()
        store.segments.remove_first()
        store.upkeep.retention._update_after_removal()
        assert store.queue("%LMQ%a", 0).first_offset > 20
    expected = all_of(store)
    await store.close()
    forget_martlet(disk, killed=killed)
    return disk, expected


FOREIGN_DAMAGES = {
    "none": ("/none", lambda data, random: None),
    "a light file is gone": ("/data/consumequeue/%LMQ%a/0/", None),
    "an entry of a light queue is damaged": ("/data/consumequeue/%LMQ%b", flip),
    "entries of a light queue changed places": ("/data/consumequeue/%LMQ%a", exchange),
    "a light queue is zeroed": (
        "/data/consumequeue/%LMQ%a",
        lambda data, random: data.__setitem__(slice(None), bytes(len(data))),
    ),
    "every light queue is gone": ("/data/consumequeue/%LMQ%", None),
    "every directory of a light queue is gone": ("/data/consumequeue/%LMQ%", None),
    "an entry of the parent is damaged": ("/data/consumequeue/P/0", flip),
    "every queue is gone": ("/data/consumequeue/", None),
}


@pytest.mark.parametrize("damage", FOREIGN_DAMAGES)
@pytest.mark.parametrize("retention", [False, True])
@pytest.mark.parametrize("killed", [False, True])
async def test_light_queues_of_a_store_that_rocketmq_wrote_are_read_from_the_log(
    killed: bool, retention: bool, damage: str
) -> None:
    disk, expected = await rocketmqs(retention, killed)
    disk.make_directory("/data/config")
    disk.close(disk.open("/data/config/lmqConsumerOffset.json", create=True))
    prefix, change = FOREIGN_DAMAGES[damage]
    for path in [path for path in disk.files if path.startswith(prefix)]:
        if change is None:
            disk.unlink(path)
        else:
            data = bytearray(disk.files[path].data)
            change(data, Random(1))
            set_content(disk, path, bytes(data))
    if "directory" in damage:
        for name in [name for name in disk.names("/data/consumequeue") if "LMQ" in name]:
            disk.remove_directory(f"/data/consumequeue/{name}/0")
            disk.remove_directory(f"/data/consumequeue/{name}")
    for _ in range(2):
        store = await open_on(disk)
        assert all_of(store) == expected
        assert store.readers.damaged_records == 0
        await store.close()
    assert store.statistics().recovered_records == 0


async def test_a_store_of_rocketmqs_without_the_table_is_known_by_its_light_queues() -> None:
    disk, expected = await rocketmqs(retention=False, killed=False)
    for path in [path for path in disk.files if path.startswith("/data/consumequeue/%LMQ%a/0/")]:
        disk.unlink(path)
    store = await open_on(disk)
    assert all_of(store) == expected
    store.crash()


@pytest.mark.parametrize("gone", ["nothing", "a light queue", "everything"])
async def test_what_rocketmq_appends_goes_into_the_light_queues_that_it_names(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    for number in range(4):
        store.writer.append(routed(f"{number}", "a"), 0)
    await store.close()
    checkpoint = bytes(disk.files["/data/checkpoint"].data)
    # As RocketMQ: properties in any order; the second came while its light queues were off.
    monkeypatch.setattr(writer, "without_offsets", lambda properties: properties)
    store = await open_on(disk)
    store.writer.light_queues = False
    for number, properties in enumerate(
        (
            b"INNER_MULTI_QUEUE_OFFSET\x014,0\x02TAGS\x01t\x02INNER_MULTI_DISPATCH\x01%LMQ%a,%LMQ%b",
            b"INNER_MULTI_DISPATCH\x01%LMQ%a\x02",
            b"WAIT\x01false\x02INNER_MULTI_DISPATCH\x01%LMQ%b,%LMQ%a,\x02INNER_MULTI_QUEUE_OFFSET\x011,5\x02",
        )
    ):
        made = message(f"theirs {number}", "P")
        made.properties = properties
        store.writer.append(made, 0)
    await store.close()
    monkeypatch.undo()
    set_content(disk, "/data/checkpoint", bytes(OURS_AT * [9]) + checkpoint[OURS_AT:])
    remove_derived(disk, gone)
    store = await open_on(disk)
    assert light(store, "a") == [b"0", b"1", b"2", b"3", b"theirs 0", b"theirs 2"]
    assert light(store, "b") == [b"theirs 0", b"theirs 2"]
    assert store.readers.damaged_records == 0
    store.writer.append(routed("ours", "b", "a"), 0)
    store.committer.commit()
    store.flusher.flush_now()
    assert (light(store, "a")[6:], light(store, "b")[2:]) == ([b"ours"], [b"ours"])
    store.crash()


# ---- damage to what a record says of its places


def changed(disk: FakeDisk, position: int, old: bytes, new: bytes) -> FakeDisk:
    """A copy of *disk* in which *old*, in the record at *position*, reads *new*."""
    found = disk.after_power_cut(Cut.KILLED, Random(0))
    path = max(path for path in found.files if "/commitlog/" in path and int(path[-20:]) <= position)
    data = found.files[path].data
    at = data.index(old, position - int(path[-20:]))
    data[at : at + len(old)] = new
    return found


DAMAGED_PLACES = {
    "another offset": (b"OFFSET\x01%d\x02", b"OFFSET\x01%d\x02", 1),
    "a much larger offset": (b"OFFSET\x01%d\x02", b"OFFSET\x01%d\x02", 40),
    "an offset that is no number": (b"OFFSET\x01%d\x02", b"OFFSET\x01xx\x02", 0),
    "another name": (b"DISPATCH\x01%%LMQ%%a,", b"DISPATCH\x01%%LMQ%%z,", 0),
    "no property": (b"MULTI_DISPATCH\x01", b"MULTI_DISPATCI\x01", 0),
    "no offsets": (b"QUEUE_OFFSET\x01", b"QUEUE_OFFSEU\x01", 0),
}


@pytest.mark.parametrize("gone", ["nothing", "all queues", "everything"])
@pytest.mark.parametrize("damage", DAMAGED_PLACES)
@pytest.mark.parametrize("number", [20, 21, 35, 58, 59])
async def test_a_damaged_property_costs_that_record_its_places_at_most(number: int, damage: str, gone: str) -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    position = 0
    for each in range(60):
        placed = store.writer.append(routed(f"{each}", "a"), 0)
        store.writer.append(routed(f"other {each}", "b"), 0)
        position = placed.position if each == number else position
        if each == 30:
            store.committer.commit()
            store.flusher.flush_now()
            await store.upkeep.checkpointer.checkpoint()
    store.committer.commit()
    store.flusher.flush_now()
    store.crash()
    old, new, more = DAMAGED_PLACES[damage]
    if b"%d" in old:
        old, new = old % number, new % (number + more) if b"%d" in new else new
    found = changed(disk, position, old.replace(b"%%", b"%").rstrip(b","), new.replace(b"%%", b"%").rstrip(b","))
    remove_derived(found, gone)
    for _ in range(2):
        store = await open_on(found)
        wanted = [b"%d" % each for each in range(60)]
        assert light(store, "a") in (wanted, wanted[:number] + wanted[number + 1 :])
        assert light(store, "b") == [b"other %d" % each for each in range(60)]
        assert len(drain(store, store.queue("P", 0))) == 120
        assert store.queue("%LMQ%a", 0).next_offset in (60, 59 if number == 59 else 60, 61)
        await store.close()


async def test_a_record_that_does_not_name_the_light_queue_is_not_served_through_it() -> None:
    disk = FakeDisk()
    store = await open_on(disk)
    positions = [store.writer.append(routed(f"{n}", "ab"[n % 2]), 0).position for n in range(6)]
    direct = store.writer.append(message("direct", "%LMQ%a"), 0).position
    await store.close()
    store = await open_on(disk)
    queue = store.queue("%LMQ%a", 0)
    assert light(store, "a") == [b"0", b"2", b"4", b"direct"]
    for number, (wrong, text) in enumerate([(positions[1], "b/0"), (positions[4], "a/2"), (direct, "a/3")]):
        size = RecordView(stored(store, wrong)).size
        entry = ENTRY.pack(wrong, size, 0)
        queue.mark = queue.mark[0], 0  # as if RocketMQ had begun the block: without a CRC
        (path,) = (path for path in disk.files if path.startswith("/data/consumequeue/%LMQ%a/"))
        disk.files[path].data[ENTRY_BYTES : 2 * ENTRY_BYTES] = entry
        store.queues.forget_blocks(queue)
        assert light(store, "a") == [b"0", b"4", b"direct"], text
        assert store.readers.damaged_records == number + 1
    store.crash()
