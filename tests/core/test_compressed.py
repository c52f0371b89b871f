"""Runs and reads end at compressed bodies, wherever these are, and lose no message."""

from itertools import pairwise, product
from typing import cast

import pytest

from martlet.delivery.compressed import cut_after_compressed
from martlet.delivery.routing import Found
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
    cut_after_compressed(result)
    count = kinds.index(COMPRESSED) + 1 if COMPRESSED in kinds else len(kinds)
    assert (result.count, result.next_offset) == (count, count)
    assert b"".join(map(bytes, result.pieces)) == b"".join(records[:count])
