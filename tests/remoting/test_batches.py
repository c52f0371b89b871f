"""Batch bodies: what goes in comes out, and lengths that contradict each other are refused."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import Refused
from martlet_remoting.wire.batches import BATCH_MESSAGES_MAX, BatchMessage, decode_batch, encode_batch

members = st.builds(BatchMessage, st.binary(max_size=50), st.binary(max_size=50), st.integers(-(2**31), 2**31 - 1))


def test_batch_follows_the_documented_layout() -> None:
    expected = struct.pack(">iiiii3sh2s", 27, 0, 0, 7, 3, b"abc", 2, b"pp")
    assert encode_batch([BatchMessage(b"abc", b"pp", 7)]) == expected


@given(st.lists(members, max_size=5))
def test_round_trip(messages: list[BatchMessage]) -> None:
    assert decode_batch(encode_batch(messages)) == messages


WHOLE = encode_batch([BatchMessage(b"abc", b"pp"), BatchMessage(b"defg", b"")])


@pytest.mark.parametrize("cut", [n for n in range(1, len(WHOLE)) if n != 27])
def test_batch_cut_anywhere_is_refused(cut: int) -> None:
    with pytest.raises(Refused, match=r"batch message [01]"):
        decode_batch(WHOLE[:cut])


def member(size: int, body_length: int, properties_length: int) -> bytes:
    return struct.pack(">iiiii3sh2s", size, 0, 0, 0, body_length, b"abc", properties_length, b"pp")


@pytest.mark.parametrize(
    "data",
    [
        member(-1, 3, 2),
        member(0, 3, 2),
        member(21, 3, 2),
        member(28, 3, 2),
        member(26, 3, 2),
        member(27, -1, 2),
        member(27, 4, 2),
        member(27, 2**31 - 1, 2),
        member(27, 3, 1),
        member(27, 3, -1),
        member(27, 3, 32767),
    ],
)
def test_contradicting_lengths_are_refused(data: bytes) -> None:
    with pytest.raises(Refused, match="batch message 0"):
        decode_batch(data)


@given(st.binary(max_size=100))
def test_garbage_never_raises_anything_else(data: bytes) -> None:
    try:
        assert encode_batch(decode_batch(data))[:4] == data[:4]
    except Refused as error:
        assert str(error)  # noqa: PT017


def test_number_of_members_is_limited() -> None:
    one = encode_batch([BatchMessage(b"")])
    assert len(decode_batch(one * BATCH_MESSAGES_MAX)) == BATCH_MESSAGES_MAX
    with pytest.raises(Refused, match="smaller batches"):
        decode_batch(one * (BATCH_MESSAGES_MAX + 1))


def test_properties_that_no_record_can_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="32767"):
        encode_batch([BatchMessage(b"", b"x" * 32768)])
