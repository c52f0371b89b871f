"""Bulk reads against odd requests, damaged and removed records, and readers that do not read or that leave."""

from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from martlet.contracts import Identity
from martlet.errors import CorruptRecord
from martlet.message import Message
from martlet.records.codec import decode_records
from martlet.records.layout import RecordView, record_views
from martlet.settings import ServerConfig
from martlet.testing.cold import remove_sealed, use_memory_tier
from martlet_remoting.handlers import bulk
from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import Harness, OpenHarness, pull_ext
from .test_bulk_reads import BULK, MOVED, ext, frames, offsets, read
from .test_in_server import serve
from .test_pull import fill, with_backlog

MIB = 1 << 20


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"creditBytes": 0}, [2]),
        ({"creditBytes": -(1 << 63)}, [2]),
        ({"creditBytes": (1 << 63) - 1}, [2, 3, 4]),
        ({"waitMs": -1}, [2, 3, 4]),
        ({"endOffset": 3}, [2]),
        ({"endOffset": 2}, []),
        ({"endOffset": 1}, []),
        ({"endOffset": -(1 << 63)}, []),
        ({"endOffset": (1 << 63) - 1}, [2, 3, 4]),
    ],
)
async def test_any_number_is_a_limit(harness: Harness, fields: dict[str, object], expected: list[int]) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, *"AAAAA")
    found = await read(harness, ext(topic, 2, **fields))
    assert (offsets(found), found[-1].code) == (expected, ResponseCode.SUCCESS)
    assert found[-1].integer("nextBeginOffset") == 2 + len(expected)


@pytest.mark.parametrize("name", ["topic", "queueId", "offset"])
@pytest.mark.parametrize("value", [None, "", "9" * 40, "0x1", "1.5", "-", "\0"])
async def test_a_field_that_makes_no_sense_is_refused(harness: Harness, name: str, value: str | None) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A")
    fields = {**ext(topic, 0), name: value}
    answer = await harness.client().ask(BULK, {key: value for key, value in fields.items() if value is not None})
    assert answer.code not in (ResponseCode.SUCCESS, MOVED)
    assert answer.remark
    assert harness.state.bulk_reads.count == 0


@pytest.mark.parametrize("name", ["endOffset", "creditBytes", "waitMs"])
@pytest.mark.parametrize("value", ["9" * 40, "0x1", "1.5", "-"])
async def test_an_optional_field_that_makes_no_sense_is_refused(harness: Harness, name: str, value: str) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A")
    answer = await harness.client().ask(BULK, ext(topic, 0, **{name: value}))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert name in str(answer.remark)
    assert harness.state.bulk_reads.count == 0


@pytest.mark.parametrize(("queues", "perm", "code"), [(1, 6, ResponseCode.SUCCESS), (4, 2, ResponseCode.NO_PERMISSION)])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_topic_that_changes_ends_only_reads_that_it_no_longer_allows(
    open_harness: OpenHarness, queues: int, perm: int, code: int, waits: bool
) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=4096)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 20, queue_id=3, body=bytes(1000))
    client = harness.client()
    opaque = client.send(BULK, {**ext(topic, 20 if waits else 0, waitMs=60_000), "queueId": "3"})
    client.handler.collect(1)
    assert all(frame.boolean("more") for frame in frames(client))
    harness.broker.topics.update(topic, queues, queues, perm)
    if waits:
        harness.state.bulk_reads.end_waits()
    client.handler.collect(1 << 20)
    answer = frames(client)[-1]
    assert (answer.opaque, answer.code) == (opaque, code)
    assert harness.state.bulk_reads.count == 0


def damage(harness: Harness, topic: str, offset: int) -> None:
    """Change a byte of the body of a message on the disk, and let the store forget that it wrote the log itself."""
    store = harness.store
    (piece,) = store.readers.read(store.queue(topic, 0), offset, 1, 1).pieces
    position = RecordView(piece).position
    segment = store.segments.find(position)
    assert segment is not None
    with Path(segment.path).open("r+b") as file:
        file.seek(position - segment.start + 500)
        file.write(b"?")
    store.pages.trusted_from = 1 << 62


def offsets_of(body: bytes) -> list[int]:
    return [record.queue_offset for record in record_views(body)]


async def test_a_damaged_record_is_skipped_by_pulls_and_left_to_the_reader_by_bulk_reads(
    open_harness: OpenHarness,
) -> None:
    harness, topic = await with_backlog(open_harness, 30)
    damage(harness, topic, 3)
    found = await read(harness, ext(topic, 0, endOffset=10))
    assert [offset for frame in found for offset in offsets_of(frame.body)] == list(range(10))
    with pytest.raises(CorruptRecord, match="CRC"):
        decode_records(b"".join(frame.body for frame in found))
    client = harness.client()
    pulled: list[int] = []
    while len(pulled) < 9:
        opaque = client.send(RequestCode.PULL_MESSAGE, pull_ext(topic, pulled[-1] + 1 if pulled else 0))
        while opaque not in client.answers:
            await harness.step()
        pulled += offsets_of(client.answers.pop(opaque).body)
    assert pulled[:9] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert harness.store.readers.damaged_records == 1


async def test_records_that_retention_removes_meanwhile_end_the_read(open_harness: OpenHarness) -> None:
    harness = await open_harness(
        store={"flush": "async", "segment_bytes": 65_536, "page_bytes": 4096}, bulk_frame_bytes=4096
    )
    topic = harness.topic("T")
    for _ in range(10):
        await fill(harness, topic, *["A"] * 20, body=bytes(1000))
    await harness.store.flusher.flush()
    await harness.store.upkeep.checkpointer.checkpoint()
    client = harness.client()
    opaque = client.send(BULK, ext(topic, 0))
    client.handler.collect(1)
    (first,) = frames(client)
    assert first.boolean("more")
    harness.store.segments.remove_first()
    harness.store.upkeep.retention._update_after_removal()
    client.handler.collect(1 << 20)
    *rest, last = frames(client)
    assert (last.opaque, last.code, last.boolean("more"), rest) == (opaque, MOVED, False, [])
    assert last.integer("minOffset") > first.integer("nextBeginOffset")
    assert harness.state.bulk_reads.count == 0


async def test_a_read_continues_from_the_cold_tier_to_the_log_without_a_gap(open_harness: OpenHarness) -> None:
    harness = await open_harness(
        store={"flush": "async", "segment_bytes": 65_536, "page_bytes": 4096}, bulk_frame_bytes=4096
    )
    topic = harness.topic("T")
    for _ in range(10):
        await fill(harness, topic, *["A"] * 20, body=bytes(1000))
    store, queue = harness.store, harness.store.queue(topic, 0)
    use_memory_tier(store)
    await remove_sealed(store)
    assert queue.first_offset == 0
    assert 4 < queue.local_from < 190
    assert offsets(await read(harness, ext(topic, 0))) == list(range(200))


async def test_nothing_of_an_unwritten_atomic_group_is_read(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"})
    topic = harness.topic("T")
    await fill(harness, topic, *"AAA")
    gate = harness.broker.gate(Identity())
    gate.publish_all([Message(topic, b"x", queue_id=0) for _ in range(3)], atomic=True)
    client = harness.client()
    client.send(BULK, ext(topic, 0))
    client.handler.collect(1 << 20)
    assert offsets(frames(client)) == [0, 1, 2]
    await harness.step()
    assert offsets(await read(harness, ext(topic, 0))) == [0, 1, 2, 3, 4, 5]


async def test_a_client_that_does_not_read_costs_no_more_for_a_thousand_reads(
    open_harness: OpenHarness, autojump_clock: MockClock
) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=65_536, bulk_reads_peer_max=1000)
    served = await serve(harness, ServerConfig(unsent_bytes_max=MIB))
    await fill(harness, "T", *["A"] * 200, body=bytes(1000))
    client = served.dial()
    for _ in range(1000):
        await client.send(BULK, ext("T", 0))
    await trio.testing.wait_all_tasks_blocked()
    asked = harness.state.bulk_reads.count
    assert asked > 990
    assert 0 < served.unsent() < MIB + 2 * 65_536
    found: dict[int, list[int]] = {}
    while len(found) < 3 or harness.state.bulk_reads.count > asked - 10:
        frame = await client.receive()
        found.setdefault(frame.opaque, []).extend(offsets_of(frame.body))
    assert served.unsent() < MIB + 2 * 65_536
    assert all(each == list(range(len(each))) for each in found.values())
    client.link.cut()
    await trio.testing.wait_all_tasks_blocked()
    assert (harness.state.bulk_reads.count, served.unsent()) == (0, 0)


async def test_silent_connections_cannot_keep_others_from_reading(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_reads_peer_max=8, bulk_reads_max=16)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 20)
    silent = [harness.client(), harness.client()]
    harness.clients.clear()  # so that nobody takes their frames
    kinds = (0, 0, 20, 20)  # ready, and waiting for a record
    opaques = [[client.send(BULK, ext(topic, offset, waitMs=60_000)) for offset in kinds * 2] for client in silent]
    assert harness.state.bulk_reads.count == 16
    others = [harness.client() for _ in range(3)]
    for client in others:
        assert offsets(await read(harness, ext(topic, 0), client)) == list(range(20))
    # The newest reads of a connection made room, which is answered once for each.
    refused = [
        [frame.opaque for frame in frames(client) if frame.code == ResponseCode.SYSTEM_BUSY] for client in silent
    ]
    assert [sorted(each) for each in refused] == [opaques[0][4:], []]
    assert [len(client.handler.context.bulk.unfinished) for client in silent] == [4, 8]
    harness.clients += silent
    for client in silent:
        client.close()
    assert (harness.state.bulk_reads.count, harness.state.bulk_reads.weight) == (0, 0)


async def test_room_is_made_until_all_connections_have_the_same(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_reads_peer_max=64, bulk_reads_max=64)
    topic = harness.topic("T")
    clients = [harness.client() for _ in range(64)]
    for client in clients:
        for _ in range(64):
            client.send(BULK, ext(topic, 0, waitMs=60_000))
    assert [len(client.handler.context.bulk.unfinished) for client in clients] == [1] * 64
    late = harness.client()
    answer = await late.ask(BULK, ext(topic, 0))
    assert (answer.code, "remoting.bulk_reads_max is 64" in str(answer.remark)) == (ResponseCode.SYSTEM_BUSY, True)


async def test_a_long_expression_counts_as_several_reads(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_reads_peer_max=8, bulk_reads_max=12)
    topic = harness.topic("T")
    client, other = harness.client(), harness.client()
    long = ext(topic, 0, waitMs=60_000, subscription="a" * 5000)
    for _ in range(4):
        client.send(BULK, long)
    await harness.step()
    assert (harness.state.bulk_reads.count, harness.state.bulk_reads.weight) == (2, 6)
    assert "remoting.bulk_reads_peer_max is 8" in str((await client.ask(BULK, long)).remark)
    huge = ext(topic, 0, waitMs=60_000, subscription="a" * 16_384)
    assert "remoting.bulk_reads_peer_max is 8" in str((await other.ask(BULK, huge)).remark)
    client.close()
    assert (harness.state.bulk_reads.count, harness.state.bulk_reads.weight) == (0, 0)


async def test_a_stopping_broker_ends_reads_where_they_are(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=4096)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 200, body=bytes(1000))
    client = harness.client()
    for _ in range(3):
        client.send(BULK, ext(topic, 0))
    client.handler.collect(1)
    first = frames(client)
    assert [frame.opaque for frame in first] == [1]
    harness.state.bulk_reads.stop()
    bulk.finish(client.handler.context)
    last = frames(client)
    assert [(frame.opaque, frame.integer("nextBeginOffset"), frame.boolean("more")) for frame in last] == [
        (1, first[0].integer("nextBeginOffset"), False),
        (2, 0, False),
        (3, 0, False),
    ]
    assert not any(frame.body for frame in last)
    assert harness.state.bulk_reads.count == 0
    client.handler.collect(1 << 20)
    assert not frames(client)
