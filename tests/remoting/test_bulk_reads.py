"""Bulk reads: many frames for one request, in order and within its limits."""

import gc
import re
from collections.abc import Mapping

import pytest
import trio
from trio.testing import MockClock

from martlet.contracts import Identity, Predicate, RecordView
from martlet.records.codec import decode_records
from martlet.records.layout import BLANK_ENTRY, ENTRY_BYTES
from martlet_remoting.consumers.bulk_reads import BulkRead
from martlet_remoting.handlers import bulk
from martlet_remoting.wire.codec import FrameBuffer
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, pull_ext
from .test_pull import fill, with_backlog

BULK = RequestCode.BULK_READ
MOVED = ResponseCode.PULL_OFFSET_MOVED


def ext(topic: str, offset: int, **more: object) -> dict[str, object]:
    return {"topic": topic, "queueId": "0", "offset": str(offset), **{name: str(value) for name, value in more.items()}}


def frames(client: FakeClient) -> list[Command]:
    """Take the frames that the broker has sent."""
    sent, client.peer.sent = client.peer.sent, []
    buffer = FrameBuffer()
    found: list[Command] = []
    for data in sent:
        buffer.receive_data(data)
        found += buffer.commands()
    return found


async def read(harness: Harness, fields: Mapping[str, object], client: FakeClient | None = None) -> list[Command]:
    """Send a bulk read and return its frames, after checking what holds for all of them."""
    client = client or harness.client()
    harness.clients.remove(client)  # so that `step` leaves the frames of one request to us
    opaque = client.send(BULK, fields)
    await settle(harness, client)
    found = frames(client)
    assert {frame.opaque for frame in found} == {opaque}
    assert [frame.boolean("more") for frame in found] == [True] * (len(found) - 1) + [False]
    assert not client.handler.context.bulk.unfinished
    harness.clients.append(client)
    return found


async def settle(harness: Harness, client: FakeClient) -> None:
    for _ in range(100):
        await harness.step()
        if not client.peer.woken:
            return
        client.peer.woken = False
        client.handler.collect(1 << 20)
    raise AssertionError("the client was woken 100 times")


def offsets(found: list[Command]) -> list[int]:
    return [record.queue_offset for frame in found for record in decode_records(frame.body)]


async def test_a_backlog_comes_in_frames_of_the_configured_size(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=4096)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 20, body=bytes(1000))
    found = await read(harness, ext(topic, 3, endOffset=17))
    assert offsets(found) == list(range(3, 17))
    assert len(found) == 5
    assert all(len(frame.body) <= 4096 for frame in found)
    assert [frame.integer("nextBeginOffset") for frame in found] == [6, 9, 12, 15, 17]
    assert {(frame.integer("minOffset"), frame.integer("maxOffset")) for frame in found} == {(0, 20)}


async def test_a_credit_ends_the_read_after_the_record_that_uses_it_up(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=4096)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 20, body=bytes(1000))
    found = await read(harness, ext(topic, 0, creditBytes=5000))
    assert offsets(found) == [0, 1, 2, 3, 4]  # of 1.1 kB each
    assert found[-1].integer("nextBeginOffset") == 5
    assert offsets(await read(harness, ext(topic, 5, creditBytes=1))) == [5]


async def test_records_far_behind_the_tail_are_read_in_threads(open_harness: OpenHarness) -> None:
    harness, topic = await with_backlog(open_harness, 30)
    assert offsets(await read(harness, ext(topic, 0))) == list(range(30))


async def test_a_filter_leaves_messages_out(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, *"ABABABC")
    found = await read(harness, ext(topic, 1, endOffset=6, expressionType="TAG", subscription="A || C"))
    assert offsets(found) == [2, 4]
    assert found[-1].integer("nextBeginOffset") == 6
    found = await read(harness, ext(topic, 0, expressionType="TAG", subscription="nobody"))
    assert (offsets(found), found[-1].integer("nextBeginOffset")) == ([], 7)


async def test_a_filter_of_a_plugin_ends_at_the_end_offset(harness: Harness) -> None:
    def odd(expression: str) -> Predicate:
        def holds(record: RecordView) -> bool:
            return record.queue_offset % 2 == 1

        return holds

    harness.broker.filters = {"ODD": odd}
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 9)
    found = await read(harness, ext(topic, 0, endOffset=6, expressionType="ODD", subscription="x"))
    assert (offsets(found), found[-1].integer("nextBeginOffset")) == ([1, 3, 5], 6)


@pytest.mark.parametrize(
    ("offset", "code", "remark"), [(-1, MOVED, "TOO_SMALL"), (3, 0, "AT_END"), (4, MOVED, "BEYOND_END")]
)
async def test_an_offset_outside_the_queue_is_answered_with_its_bounds(
    harness: Harness, offset: int, code: int, remark: str
) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, *"AAA")
    (answer,) = await read(harness, ext(topic, offset))
    assert (answer.code, answer.remark, answer.body) == (code, remark, b"")
    assert (answer.integer("minOffset"), answer.integer("maxOffset")) == (0, 3)


async def test_it_waits_at_the_end_for_a_record(harness: Harness, autojump_clock: MockClock) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A")
    client = harness.client()
    opaque = client.send(BULK, ext(topic, 1, waitMs=10_000))
    await harness.step()
    assert not client.answers
    await fill(harness, topic, "B")
    await harness.step()
    answer = client.answers.pop(opaque)
    assert [record.queue_offset for record in decode_records(answer.body)] == [1]
    assert not answer.boolean("more")
    assert harness.state.bulk_reads.count == 0


async def test_it_waits_no_longer_than_asked(harness: Harness, autojump_clock: MockClock) -> None:
    harness.nursery.start_soon(harness.state.timeouts.run)
    topic = harness.topic("T")
    client = harness.client()
    opaque = client.send(BULK, ext(topic, 0, waitMs=10_000))
    await harness.step()
    await trio.sleep(9)
    harness.collect()
    assert not client.peer.sent
    await trio.sleep(2)
    await harness.step()
    assert (client.answers[opaque].code, client.answers[opaque].remark) == (0, "AT_END")


async def test_it_creates_no_group_and_leaves_resets_pending(harness: Harness) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, "A")
    before = list(harness.broker.groups.names())
    harness.broker.groups.offsets.reset("G", topic, {0: 1})
    assert offsets(await read(harness, ext(topic, 0, consumerGroup="G"))) == [0]
    assert list(harness.broker.groups.names()) == before
    answer = await harness.client().ask(RequestCode.PULL_MESSAGE, pull_ext(topic, 0))
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "1")


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"topic": "nobody"}, ResponseCode.TOPIC_NOT_EXIST, "not exist"),
        ({"brokerName": "other"}, ResponseCode.TOPIC_NOT_EXIST, r"this is broker\[.+\], not broker\[other\]"),
        ({"queueId": "4"}, ResponseCode.INVALID_PARAMETER, r"queueId\[4\] is illegal"),
        ({"queueId": "-1"}, ResponseCode.INVALID_PARAMETER, r"queueId\[-1\] is illegal"),
        ({"topic": "W"}, ResponseCode.NO_PERMISSION, "its perm lacks 4"),
        ({"offset": "x"}, ResponseCode.SYSTEM_ERROR, "offset 'x' is not a 64-bit integer"),
        (
            {"expressionType": "XPATH"},
            ResponseCode.SYSTEM_ERROR,
            "does not support .* XPATH",
        ),
        ({"subscription": "||"}, ResponseCode.SUBSCRIPTION_PARSE_FAILED, "contains no tag"),
    ],
)
async def test_a_bad_request_is_refused(harness: Harness, fields: dict[str, object], code: int, text: str) -> None:
    harness.topic("W", perm=2)
    topic = harness.topic("T")
    answer = await harness.client().ask(BULK, {**ext(topic, 0), **fields})
    assert answer.code == code
    assert re.search(text, answer.remark or "")


async def test_internal_topics_are_closed(harness: Harness) -> None:
    harness.broker.topics.ensure("RMQ_SYS_TRANS_HALF_TOPIC", 1)
    answer = await harness.client().ask(BULK, ext("RMQ_SYS_TRANS_HALF_TOPIC", 0))
    assert (answer.code, "internal to the broker" in str(answer.remark)) == (ResponseCode.NO_PERMISSION, True)


async def test_a_permission_that_is_revoked_ends_the_read(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=4096)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 20, body=bytes(1000))
    client = harness.client()
    opaque = client.send(BULK, ext(topic, 0))
    client.handler.collect(1)
    first = frames(client)
    assert first[0].boolean("more")

    def nobody(identity: Identity, action: str, name: str) -> bool:
        return False

    harness.broker.rules.authorizers = (nobody,)
    client.handler.collect(1 << 20)
    (answer,) = frames(client)
    assert (answer.opaque, answer.code) == (opaque, ResponseCode.NO_PERMISSION)
    assert harness.state.bulk_reads.count == 0


@pytest.mark.parametrize("waits", [False, True])
async def test_a_deleted_topic_ends_the_read(open_harness: OpenHarness, waits: bool) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=4096)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 20, body=bytes(1000))
    client = harness.client()
    client.send(BULK, ext(topic, 20 if waits else 0, waitMs=60_000))
    client.handler.collect(1)
    frames(client)
    harness.broker.topics.delete(topic)
    client.handler.collect(1 << 20)
    (answer,) = frames(client)
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert harness.state.bulk_reads.count == 0


async def test_too_many_reads_are_refused(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_reads_peer_max=2, bulk_reads_max=3)
    topic = harness.topic("T")
    clients = [harness.client(), harness.client()]
    for _ in range(2):
        clients[0].send(BULK, ext(topic, 0, waitMs=60_000))
    await harness.step()
    answer = await clients[0].ask(BULK, ext(topic, 0))
    assert answer.code == ResponseCode.SYSTEM_BUSY
    assert "remoting.bulk_reads_peer_max is 2" in str(answer.remark)
    clients[1].send(BULK, ext(topic, 0, waitMs=60_000))
    await harness.step()
    answer = await clients[1].ask(BULK, ext(topic, 0))
    assert "remoting.bulk_reads_max is 3" in str(answer.remark)
    clients[0].close()
    assert harness.state.bulk_reads.count == 1
    assert (await clients[1].ask(BULK, ext(topic, 0))).code == 0


async def test_reads_of_one_connection_take_turns(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, bulk_frame_bytes=4096)
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 12, body=bytes(1000))
    client = harness.client()
    harness.clients.remove(client)
    client.send(BULK, ext(topic, 0))
    client.send(BULK, ext(topic, 0))
    await settle(harness, client)
    assert [frame.opaque for frame in frames(client)] == [1, 2, 1, 2, 1, 2, 1, 2]


async def test_a_stopping_broker_ends_the_waits(harness: Harness) -> None:
    topic = harness.topic("T")
    client = harness.client()
    opaque = client.send(BULK, ext(topic, 0, waitMs=60_000))
    await harness.step()
    harness.state.bulk_reads.stop()
    bulk.finish(client.handler.context)
    client.receive()
    assert client.answers[opaque].remark == "the broker is stopping"
    client.send(BULK, ext(topic, 0, waitMs=60_000))
    await harness.step()
    assert not client.handler.context.bulk.unfinished


async def test_a_oneway_read_is_ignored(harness: Harness) -> None:
    client = harness.client()
    client.send(BULK, ext(harness.topic("T"), 0), flag=FLAG_ONEWAY)
    await harness.step()
    assert harness.state.bulk_reads.count == 0


async def test_a_closed_connection_leaves_nothing(open_harness: OpenHarness) -> None:
    harness, topic = await with_backlog(open_harness, 5)
    client = harness.client()
    for offset in (0, 5):  # one reads from the disk, one waits
        client.send(BULK, ext(topic, offset, waitMs=60_000))
    client.handler.collect(1 << 20)
    client.close()
    await harness.step()
    harness.state.bulk_reads.sweep()
    assert harness.state.bulk_reads.count == 0
    del client
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, BulkRead)]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("expression", ["*", "A", "x"])
async def test_entries_without_a_record_are_said_to_be_lost(
    harness: Harness, mock_clock: MockClock, expression: str, checked: bool
) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, *"ABABABABAB")
    blank(harness, topic, 0, 3, 4, 9)
    harness.broker.filters = {"ODD": lambda _: lambda record: record.queue_offset % 2 == 1}
    kind = "ODD" if expression == "x" else "TAG"
    fields = ext(topic, 0, endOffset=9, expressionType=kind, subscription=expression, checked=checked)
    found = await read(harness, fields)
    assert ",".join(filter(None, (frame.text("lost", "") for frame in found))) == "0-1,3-5"
    assert offsets(found) == {"*": [1, 2, 5, 6, 7, 8], "A": [2, 6, 8], "x": [1, 5, 7]}[expression]


async def test_very_many_losses_are_said_in_few_ranges(harness: Harness, mock_clock: MockClock) -> None:
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 500)
    blank(harness, topic, *range(0, 500, 2))
    found = await read(harness, ext(topic, 0, expressionType="TAG", subscription="nobody"))
    (ranges,) = [frame.text("lost").split(",") for frame in found]
    assert ranges[:3] == ["0-1", "2-3", "4-5"]
    assert (len(ranges), ranges[-1]) == (bulk.LOST_RANGES_MAX, f"{2 * bulk.LOST_RANGES_MAX - 2}-499")


async def test_losses_are_said_in_time(harness: Harness, mock_clock: MockClock) -> None:
    """A frame without records is sent before the ranges are too many; adjacent ones are one."""
    topic = harness.topic("T")
    await fill(harness, topic, *["A"] * 500)
    blank(harness, topic, *range(100, 400))
    found = await read(harness, ext(topic, 0))
    assert [frame.text("lost") for frame in found if "lost" in frame.ext] == ["100-400"]
    assert offsets(found) == [*range(100), *range(400, 500)]


def blank(harness: Harness, topic: str, *numbers: int) -> None:
    """Replace entries of the queue by those that a rebuild leaves for damaged records.

    They must not have been saved yet, so the clock has to stand still.
    """
    queue = harness.store.queue(topic, 0)
    assert queue.tail_offset == 0
    for number in numbers:
        queue.tail[number * ENTRY_BYTES : (number + 1) * ENTRY_BYTES] = BLANK_ENTRY
