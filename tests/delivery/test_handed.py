"""Frames that were handed on: found for exactly the messages that they belong to, and forgotten in order."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from martlet.delivery.handed import HandedFrames


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), max_size=6), st.data())
def test_frames_are_those_of_the_messages_or_none(reads: list[list[bool]], data: st.DataObject) -> None:
    """True stands for a message that was handed on, False for one of somebody else between."""
    handed, frame_of, position = HandedFrames(), dict[int, bytes](), 0
    for read in reads:
        own = [position + index for index, is_own in enumerate(read) if is_own]
        position += len(read)
        frames = [b"<%d>" % each for each in own]
        frame_of.update(zip(own, frames, strict=True))
        if own:
            before = data.draw(st.sampled_from([b"", b"other"]))
            ends = [end + len(before) for end in accumulate(map(len, frames))]
            handed.add("e", own, before + b"".join(frames) + b"rest", ends, len(before))
    assert handed.size == sum(map(len, frame_of.values()))
    wanted = sorted(data.draw(st.sets(st.integers(0, max(position - 1, 0)), min_size=1)))
    found = list(handed.find(wanted))
    if all(each in frame_of for each in wanted):
        frames = [frame_of[each] for each in wanted]
        assert found == [("e", b"".join(frames), list(accumulate(map(len, frames))))]
    else:
        assert found == []


def test_frames_of_one_read_leave_without_a_copy() -> None:
    handed, data, ends = HandedFrames(), b"onetwo", [3, 6]
    handed.add("e", [10, 20], data, ends, 0)
    ((encoding, frames, found),) = handed.find([10, 20])
    assert (encoding, found) == ("e", ends)
    assert frames is data


def test_each_encoding_is_found_for_itself_and_dropped_when_its_last_message_is_routed() -> None:
    handed = HandedFrames()
    handed.add("a", [10, 20], b"onetwo", [3, 6], 0)
    handed.add("b", [10, 20], b"12", [1, 2], 0)
    handed.add("b", [30], b"3", [1], 0)
    assert [encoding for encoding, _, _ in handed.find([20])] == ["a", "b"]
    assert [encoding for encoding, _, _ in handed.find([20, 30])] == ["b"]
    handed.drop_before(20)
    assert handed.size == 9
    handed.drop_before(21)
    assert (handed.size, list(handed.find([20])), bool(handed)) == (1, [], True)
    handed.drop_before(31)
    assert (handed.size, bool(handed)) == (0, False)
