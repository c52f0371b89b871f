"""Frames of several queues in one buffer: what comes out is what came in, and nothing that was not asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.columns.stored import HOST, stored, usual

from martlet.message import Message
from martlet.records.codec import encode_record
from martlet_columns.decode import VECTOR_MIN, Decoder
from martlet_columns.records import Records
from martlet_columns.schema import COLUMNS
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.inner_batches import INNER_BATCH
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.errors import ReadError
from martlet_spark.read.frames import BUFFER_BYTES, BYTES_ENOUGH, FrameBodies, FramePart
from martlet_spark.read.planner import Range
from martlet_spark.read.progress import RangeProgress


def frame(queue: int, first: int, count: int, body: bytes = b"body") -> bytes:
    """The records of *count* messages of *queue*."""
    parts = (encode_record(usual(n, body), queue, n, n << 10, n, HOST) for n in range(first, first + count))
    return b"".join(parts)


def add(frames: FrameBodies, data: bytes | bytearray, queue: int, first: int, end: int = 1 << 60) -> None:
    """Receive a frame of messages from *first* on, of which those before *end* are wanted."""
    frames.room(len(data))[:] = data
    if data:
        progress = RangeProgress(Range(MessageQueue("Orders", "b", queue), first, end))
        frames.add(FramePart(frames.end, len(data), progress, first, 1 << 60, end))


def places(frames: FrameBodies) -> list[tuple[int, int]]:
    """The queue and the offset of each record in *frames*."""
    found = frames.take()
    heads = Records(bytearray()).heads if found is None else found.heads
    return list(zip(heads["queue"].tolist(), heads["offset"].tolist(), strict=True))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(0, 5), st.integers(0, 60)), max_size=8))
def test_records_are_those_of_all_frames_in_their_ranges(parts: list[tuple[int, int, int, int]]) -> None:
    frames = FrameBodies()
    for queue, first, count, end in parts:
        add(frames, frame(queue, first, count), queue, first, end)
    wanted = [(queue, n) for queue, first, count, end in parts for n in range(first, min(first + count, end))]
    assert places(frames) == wanted
    assert places(frames) == []


def test_the_buffer_is_used_again_but_columns_stay() -> None:
    frames, decoder = FrameBodies(), Decoder(tuple(COLUMNS))
    add(frames, frame(1, 0, VECTOR_MIN, b"first"), 1, 0)
    found = frames.take()
    assert found is not None
    columns = decoder.decode(found, "b")
    before = columns.to_pylist()
    add(frames, frame(2, 0, VECTOR_MIN, b"other"), 2, 0)
    again = frames.take()
    assert again is not None
    assert bytes(again.data) == bytes(found.data)  # it was overwritten
    assert columns.to_pylist() == before
    assert {row["body"] for row in before} == {b"first"}


def test_a_frame_may_be_larger_than_the_buffer() -> None:
    frames = FrameBodies()
    for first in (0, 5):
        add(frames, frame(1, first, 3), 1, first)
        add(frames, frame(1, first + 3, 2, bytes(BUFFER_BYTES)), 1, first + 3)
        assert frames.enough
        assert places(frames) == [(1, n) for n in range(first, first + 5)]


def test_there_are_enough_bytes_before_the_buffer_is_full() -> None:
    frames = FrameBodies()
    data = frame(1, 0, 1, bytes(BYTES_ENOUGH // 4 - 1000))
    for number in range(5):
        assert frames.enough == (number > 4)
        add(frames, data, 1, 0)
    assert frames.enough
    assert len(places(frames)) == 5


@pytest.mark.parametrize(
    ("queue", "first", "wrong"),
    [(2, 5, "message 5 of queue 1"), (1, 6, "message 5 of queue 1")],
    ids=["another queue", "before the range"],
)
def test_a_frame_with_messages_that_were_not_asked_for_is_refused(queue: int, first: int, wrong: str) -> None:
    for place in range(3):
        frames = FrameBodies()
        for number in range(3):
            add(frames, frame(1, 5, 4), *((queue, first) if number == place else (1, 5)))
        with pytest.raises(ReadError, match=f"the broker sent {wrong} "):
            frames.take()


def test_a_message_that_comes_twice_in_a_frame_is_refused() -> None:
    frames = FrameBodies()
    add(frames, frame(1, 0, 3), 1, 0)
    add(frames, frame(1, 3, 2) + frame(1, 4, 2), 1, 3)
    with pytest.raises(ReadError, match="the broker sent message 4 of queue 1"):
        frames.take()


@pytest.mark.parametrize("cut", [1, 60, 150])
def test_a_record_that_goes_on_in_another_frame_is_refused(cut: int) -> None:
    data = frame(1, 0, 4)
    frames = FrameBodies()
    add(frames, data[:-cut], 1, 0)
    add(frames, data[-cut:], 1, 3)
    with pytest.raises(ReadError, match="the broker sent damaged data"):
        frames.take()


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_records_of_zeros_are_refused_with_the_range_of_their_frame(wrong: int) -> None:
    frames = FrameBodies()
    for number in range(3):
        data = frame(number, 10, 4)
        add(frames, bytes(len(data)) if number == wrong else data, number, 10)
    text = rf"messages 10 to \d+ of queue .*{wrong} of topic 'Orders': .*damaged data$"
    with pytest.raises(ReadError, match=text):
        frames.take()


def test_a_flipped_bit_in_any_frame_is_found() -> None:
    for place in range(3):
        frames = FrameBodies()
        for number in range(3):
            data = bytearray(frame(number, 0, 3, b"hello"))
            if number == place:
                data[data.rindex(b"hello")] ^= 1
            add(frames, data, number, 0)
        with pytest.raises(ReadError, match=f"message 2 of queue {place} .* does not match its CRC"):
            frames.take()


def test_a_record_without_its_end_is_found() -> None:
    frames = FrameBodies()
    data = frame(0, 0, 3, b"hello")
    add(frames, data[:-3] + bytes(3), 0, 0)
    with pytest.raises(ReadError, match=r"message 2 of queue 0 .* has lost the end of its properties$"):
        frames.take()


def test_inner_batches_are_unrolled_among_other_frames() -> None:
    batch = Message("Orders", encode_batch([BatchMessage(b"%d" % n) for n in range(10, 20)]), b"", 3, 0, INNER_BATCH)
    frames = FrameBodies()
    add(frames, frame(1, 0, 2), 1, 0)
    add(frames, stored([batch], first=10), 3, 12, 18)
    add(frames, frame(2, 0, 2), 2, 0)
    assert places(frames) == [(1, 0), (1, 1), *((3, n) for n in range(12, 18)), (2, 0), (2, 1)]
