"""What subscribers at a tail share: slices of one encoding, and no more memory than allowed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from martlet.contracts import Buffer
from martlet.delivery.fanout import Batch, Encoding, Encodings, encode_result, parts
from martlet.delivery.routing.selection import EVERYTHING, Selection
from martlet.delivery.runs import Frames
from martlet.message import Message
from martlet.records.codec import decode_records, encode_record
from martlet.store import Queue, ReadResult, ReadStatus


def record(offset: int, body: bytes, properties: bytes = b"", topic: str = "t", host: bytes = bytes(8)) -> bytes:
    message = Message(topic, body, properties, sys_flag=0x100, born_host=host)
    return encode_record(message, 3, offset, 0, 0, bytes(8))


def framed(piece: Buffer) -> list[bytes]:
    return [b"<%d %b>" % (offset, body) for _, offset, _, body, _ in parts(piece)]


FRAMED = Encoding("framed", framed)


def read(start: int, next_offset: int, offsets: list[int]) -> ReadResult:
    result = ReadResult(ReadStatus.FOUND, next_offset, 0, next_offset)
    result.pieces = [b"".join(record(offset, b"x" * offset) for offset in offsets)] if offsets else []
    result.count = len(offsets)
    return result


@settings(deadline=None)
@given(
    gaps=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    sizes=st.lists(st.integers(0, 9), min_size=8, max_size=8),
    tail=st.integers(0, 2),
    cursor=st.integers(0, 40),
    count=st.integers(1, 9),
    budget=st.integers(1, 40),
)
def test_a_cut_is_what_a_reader_of_single_frames_would_take(
    gaps: list[int], sizes: list[int], tail: int, cursor: int, count: int, budget: int
) -> None:
    offsets, at = [], 0
    for gap in gaps:
        offsets.append(at + gap)
        at += gap + 1
    frames = [b"f" * size for size in sizes[: len(offsets)]]
    end = at + tail
    cursor = min(cursor, end - 1)
    dense = offsets == list(range(len(offsets)))
    batch = Batch(0, end, frames, range(len(offsets)) if dense else offsets)
    taken, after = batch.span(cursor, count, budget)
    at = batch.index(cursor)
    data, alone = batch.cut(at, taken), batch.frames[at : at + taken]
    expected: list[bytes] = []
    at = end
    for offset, frame in zip(offsets, frames, strict=True):
        if offset < cursor:
            continue
        if len(expected) == count or (expected and sum(map(len, expected)) > budget):
            at = offset
            break
        expected.append(frame)
    assert bytes(data) == b"".join(expected)
    assert alone == expected
    assert bytes(batch.cut(batch.index(cursor), taken)) == b"".join(expected)
    assert taken == len(expected)
    assert after == at


def test_a_whole_batch_is_sent_without_copying() -> None:
    batch = encode_result(read(0, 3, [0, 1, 2]), 0, FRAMED)
    assert batch.span(0, 100, 1000) == (3, 3)
    assert batch.cut(0, 3) is batch.data
    assert batch.size == len(batch.data)


def test_offsets_are_read_from_the_records_where_some_are_missing() -> None:
    batch = encode_result(read(4, 9, [5, 8]), 4, FRAMED)
    assert list(batch.offsets) == [5, 8]
    assert (batch.span(6, 9, 1000), batch.cut(batch.index(6), 1)) == ((1, 9), b"<8 xxxxxxxx>")
    assert (batch.span(4, 1, 1000), batch.cut(batch.index(4), 1)) == ((1, 8), b"<5 xxxxx>")


def test_parts_agree_with_whole_records_whatever_their_layout() -> None:
    data = b"".join(
        (
            record(1, b"a", b"k\x01v\x02"),
            record(2, b"", host=bytes(20)),
            record(3, b"c" * 500, topic="t" * 200),
            record(4, b"d", b"\x01\x02", topic="\u00e9"),
        )
    )
    expected = [(r.queue_id, r.queue_offset, r.sys_flag, r.body, r.properties) for r in decode_records(data)]
    assert parts(memoryview(data)) == expected


def batch_of(start: int, size: int = 10) -> Batch:
    return Batch(start, start + 1, [b"x" * size], range(start, start + 1))


def test_only_what_several_readers_want_is_kept() -> None:
    cache = Encodings(1000)
    queue = Queue("t", 0)
    one = cache.join(queue, FRAMED, EVERYTHING)
    one.encode(read(0, 1, [0]), 0)
    assert (one.find(0), cache.kept_bytes) == (None, 0)
    two = cache.join(queue, FRAMED, EVERYTHING)
    assert two is one
    kept = one.encode(read(0, 2, [0, 1]), 0)
    assert two.find(1) is kept
    assert two.find(2) is None
    cache.leave(two)
    assert (one.find(0), cache.kept_bytes) == (None, 0)
    cache.leave(one)
    assert cache.join(queue, FRAMED, EVERYTHING) is not one


def test_encodings_and_selections_do_not_mix() -> None:
    cache = Encodings(1000)
    queue = Queue("t", 0)
    tails = [
        cache.join(queue, FRAMED, EVERYTHING),
        cache.join(queue, Encoding("other", framed), EVERYTHING),
        cache.join(queue, FRAMED, Selection("tags A", frozenset({1}))),
        cache.join(Queue("t", 1), FRAMED, EVERYTHING),
    ]
    assert len(set(map(id, tails))) == 4


@settings(deadline=None)
@given(
    limit=st.integers(0, 200),
    batches=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), max_size=60),
)
def test_the_bound_holds_and_the_newest_stay(limit: int, batches: list[tuple[int, int]]) -> None:
    cache = Encodings(limit)
    tails = []
    for queue_id in range(4):
        queue = Queue("t", queue_id)
        tails.append(cache.join(queue, FRAMED, EVERYTHING))
        cache.join(queue, FRAMED, EVERYTHING)
    kept: list[tuple[int, Batch]] = []
    for number, (which, size) in enumerate(batches):
        batch = batch_of(number, size)
        cache.keep(tails[which], batch)
        kept.append((which, batch))
        assert cache.kept_bytes <= limit
        assert cache.kept_bytes == sum(len(b.data) for tail in tails for b in tail.batches)
        assert all(len(tail.batches) <= 8 for tail in tails)
        if size <= limit:
            assert tails[which].find(number) is batch


@given(st.lists(st.binary(max_size=3), max_size=9), st.integers(0, 9), st.integers(0, 9))
def test_each_frame_of_a_run_can_be_taken_alone(each: list[bytes], first: int, last: int) -> None:
    ends = [sum(map(len, each[: index + 1])) for index in range(len(each))]
    frames = Frames(b"".join(each), ends)
    assert frames.each == each
    assert frames.each is frames.each
    if first < last <= len(each):
        assert frames.part(first, last).each == each[first:last]
