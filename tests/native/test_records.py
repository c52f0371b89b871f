"""The kernel finds the names of records, surveys them, and cuts frames out of others, as Python does."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.delivery.handed import cut_frames
from martlet.delivery.merge import records_in
from martlet.delivery.routing.division import Found
from martlet.delivery.runs import survey
from martlet.message import Message
from martlet.records.codec import encode_record
from martlet.records.layout import find_names
from martlet.store import Queue

QUEUE = Queue("t", 0)
V6 = bytes(16) + b"\0\0\x10\0"
PROPERTIES = st.one_of(
    st.sampled_from(
        [b"", b"TAGS\x01a\x02", b"TAGS\x01a\x02", b"TAGS\x01a/b\x02MQTT_QOS\x010\x02", b"TAGS\x01", b"TAG"]
    ),
    st.sampled_from([b"MY_TAGS\x01x\x02", b"K\x01TAGS\x01y\x02", b"TAGS\x01a\x02TAGS\x01b\x02", b"TAGS\x01\xff\x02"]),
    st.sampled_from(
        ["TAGS\x01ä/☃".encode(), b"TAGS\x01\xed\xa0\x80\x02", b"K\x01v\x02TAGS\x01end", b"P\x01" + b"x" * 2000]
    ),
    st.lists(st.sampled_from([b"TAGS", b"\x01", b"\x02", b"a", b"S"]), max_size=8).map(b"".join),
)
RECORDS = st.lists(
    st.builds(
        lambda properties, body, topic, flag, host: encode_record(
            Message(topic, body, properties, 3, 0, flag, 7, host), 3, 5, 1 << 40, 9, bytes(8)
        ),
        PROPERTIES,
        st.sampled_from([b"", b"x", b"TAGS\x01body\x02", b"y" * 300]),
        st.sampled_from(["t", "t" * 127, "t" * 200]),
        st.sampled_from([0, 0, 1, 0x40000000, -0x80000000]),
        st.sampled_from([bytes(8), bytes(8), V6]),
    ),
    max_size=6,
)


@given(RECORDS, st.binary(max_size=100))
def test_the_kernel_finds_the_names_that_python_finds(records: list[bytes], noise: bytes) -> None:
    for data in (b"".join(records), b"".join(records) + noise, noise + b"".join(records)):
        python: list[Found] = []
        native: list[Found] = []
        assert kernel_of(find_names)(data, 0, QUEUE, native) == find_names(data, 0, QUEUE, python)
        assert native == python
        for names in ([each[4] for each in found] for found in (python, native)):
            assert all((one is other) == (one == other) for one, other in pairwise(names))


@given(RECORDS.filter(bool), RECORDS, st.integers(0, 3))
def test_the_kernel_surveys_records_as_python_does(records: list[bytes], others: list[bytes], leave_out: int) -> None:
    found = records_in(b"".join(records), QUEUE) + records_in(b"".join(others), QUEUE)
    if len(found) > 1:
        del found[leave_out % len(found)]
    assert kernel_of(survey)(found) == survey(found)


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=30, unique=True).map(sorted),
    st.lists(st.integers(0, 60), max_size=30, unique=True).map(sorted),
    st.lists(st.binary(max_size=5), min_size=30, max_size=30),
    st.sampled_from([[], [7]]),
)
def test_the_kernel_cuts_frames_as_python_does(
    positions: list[int], wanted: list[int], frames: list[bytes], ends: list[int]
) -> None:
    data, bounds = b"--" + b"".join(frames), list(accumulate(map(len, frames), initial=2))[: len(positions) + 1]
    for chosen in (wanted, [each for each in wanted if each in positions]):
        within = [each for each in chosen if each <= positions[-1]]
        python, native = list(ends), list(ends)
        cut = cut_frames(data, positions, bounds, within, python)
        assert kernel_of(cut_frames)(data, positions, bounds, within, native) == cut
        assert native == python
        if within == chosen != wanted:
            assert cut == b"".join(frames[positions.index(each)] for each in chosen)
