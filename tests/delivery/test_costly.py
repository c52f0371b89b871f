"""Runs and reads end at compressed bodies and after many properties, wherever these are, and lose no message."""

from itertools import pairwise, product
from typing import cast

import pytest
from tests.delivery.pushing import broker_in_memory, subscribe
from tests.delivery.test_cursor import Client, feed_of, settle

from martlet.delivery.costly import PROPERTIES_FREE, PROPERTIES_MAX, cut_after_costly
from martlet.delivery.routing.division import Found
from martlet.delivery.runs import make_runs
from martlet.message import Message
from martlet.records.codec import encode_record
from martlet.records.compression import COMPRESSED
from martlet.records.layout import record_views
from martlet.store import Queue, ReadResult, ReadStatus

KINDS = [kinds for count in range(1, 6) for kinds in product((0, COMPRESSED), repeat=count)]
NO_QUEUE = cast(Queue, None)


def records_of(kinds: tuple[int, ...]) -> list[bytes]:
    """Return records with these sysFlags, which follow each other in the log and in their queue."""
    position, found = 0, list[bytes]()
    for offset, kind in enumerate(kinds):
        message = Message("t", b"%d" % offset, b"", 0, 0, kind)
        found.append(encode_record(message, 0, offset, position, 0, bytes(8)))
        position += len(found[-1])
    return found


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_compressed_message_is_alone_in_its_run(kinds: tuple[int, ...]) -> None:
    records = records_of(kinds)
    data, at, found = b"".join(records), 0, list[Found]()
    for record in records:
        found.append((at, data, at, at + len(record), "", NO_QUEUE))
        at += len(record)
    runs = make_runs(found)
    assert b"".join(run.data for run in runs) == data
    assert runs[0].position == 0
    assert runs[-1].end == len(data)
    assert all(one.end == other.position for one, other in pairwise(runs))
    for run in runs:
        flags = [record.sys_flag for record in record_views(run.data)]
        assert run.count == len(flags)
        assert flags == [COMPRESSED] if run.is_compressed else not any(flags)
    assert all(one.is_compressed or other.is_compressed for one, other in pairwise(runs))


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_a_read_ends_after_the_first_compressed_message(kinds: tuple[int, ...], is_joined: bool) -> None:
    records = records_of(kinds)
    result = ReadResult(ReadStatus.FOUND, len(kinds), 0, len(kinds))
    result.pieces += [b"".join(records)] if is_joined else records
    result.count, result.size = len(records), sum(map(len, records))
    cut_after_costly(result)
    count = kinds.index(COMPRESSED) + 1 if COMPRESSED in kinds else len(kinds)
    assert (result.count, result.next_offset) == (count, count)
    assert b"".join(map(bytes, result.pieces)) == b"".join(records[:count])


def with_properties(*counts: int, body: bytes = b"x") -> list[bytes]:
    position, found = 0, list[bytes]()
    for offset, count in enumerate(counts):
        properties = b"".join(b"%d\x01v\x02" % number for number in range(count))
        found.append(encode_record(Message("t", body, properties, 0), 0, offset, position, 0, bytes(8)))
        position += len(found[-1])
    return found


MANY = PROPERTIES_MAX + PROPERTIES_FREE + 1
HALF = PROPERTIES_MAX // 2 + PROPERTIES_FREE


@pytest.mark.parametrize(
    ("counts", "parts"),
    [
        ([5] * 300, [300]),
        ([PROPERTIES_FREE] * 300, [300]),
        ([MANY], [1]),
        ([MANY] * 3, [1, 1, 1]),
        ([0, MANY, 0], [1, 1, 1]),
        ([HALF] * 5, [2, 2, 1]),
        ([*[5] * 100, HALF, HALF, HALF, 5], [102, 2]),
        ([*[60] * 300], [23] * 13 + [1]),
    ],
)
@pytest.mark.parametrize("body", [b"x", b"\x02" * 3000], ids=["short", "of separators"])
def test_messages_with_many_properties_are_in_small_runs_and_reads(
    counts: list[int], parts: list[int], body: bytes
) -> None:
    records = with_properties(*counts, body=body)
    data, at, found = b"".join(records), 0, list[Found]()
    for record in records:
        found.append((at, data, at, at + len(record), "", NO_QUEUE))
        at += len(record)
    runs = make_runs(found)
    assert [run.count for run in runs] == parts
    assert b"".join(run.data for run in runs) == data
    assert {run.is_heavy for run in runs} == {len(parts) > 1 or counts[0] >= MANY}
    result = ReadResult(ReadStatus.FOUND, len(counts), 0, len(counts))
    result.pieces += [data]
    result.count, result.size = len(records), len(data)
    cut_after_costly(result)
    assert parts[0] <= result.count <= parts[0] + 1


async def test_a_receiver_collects_one_run_with_many_properties_at_a_time() -> None:
    async with broker_in_memory(segment_bytes=1 << 20) as broker:
        client = Client(feed_of(broker), "#")
        group = subscribe(broker, "t")
        for number in range(5):
            properties = b"TAGS\x01n\x02" + b"".join(b"%d\x01v\x02" % each for each in range(MANY))
            broker.publish(Message("t", b"%d" % number, properties, 0))
        await settle(broker)
        assert [client.take() for _ in range(6)] == [["0"], ["1"], ["2"], ["3"], ["4"], []]
        counts = [len(await group.turn()) for _ in range(8)]
        assert (sum(counts), max(counts)) == (5, 1)
