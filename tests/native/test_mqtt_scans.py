"""The kernel finds the runs of MQTT packets that Python finds, wherever the stream is cut."""

from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.store import Queue
from martlet_mqtt.mapping.frames import number_frames, publish_frame
from martlet_mqtt.mapping.items import run_items
from martlet_mqtt.wire.codes import V4, V5
from martlet_mqtt.wire.names import Name, Names, usual_name
from martlet_mqtt.wire.scanner import PUBLISH_FIRST, scan_publishes


def publish(first: int, name: bytes, packet_id: bytes, properties: bytes, body: bytes, length_bytes: int) -> bytes:
    content = len(name).to_bytes(2) + name + packet_id + properties + body
    size, length = len(content), b""
    while size > 127 or len(length) + 1 < length_bytes:
        length += bytes((size & 127 | 128,))
        size >>= 7
    return bytes((first,)) + length + bytes((size,)) + content


PACKETS = st.builds(
    publish,
    st.sampled_from([0x30, 0x30, 0x30, 0x32, 0x32, 0x34, 0x31, 0x3A]),
    st.sampled_from([b"a", b"a", b"a/b", "ä/☃".encode(), b"a/#", b"", b"\xff", b"x" * 200, b"x" * 300]),
    st.sampled_from([b"", b"\0\x01", b"\0\x01", b"\xff\xff", b"\0\0"]),
    st.sampled_from([b"", b"\0", b"\0", b"\x02\x01\x01"]),
    st.one_of(st.binary(max_size=20), st.sampled_from([b"x" * 120, b"x" * 130, b"y" * 20_000])),
    st.sampled_from([1, 1, 1, 2, 4]),
)
STREAMS = st.one_of(
    st.lists(PACKETS, max_size=6).map(b"".join),
    st.tuples(PACKETS, st.integers(1, 30)).map(lambda pair: pair[0] * pair[1]),
    st.binary(max_size=40).map(lambda noise: b"\x30" + noise),
)


@given(STREAMS, st.integers(0, 400), st.sampled_from([V4, V5]), st.sampled_from([150, 1 << 20]), st.integers(1, 9))
def test_the_kernel_finds_the_publishes_that_python_finds(
    data: bytes, cut: int, version: int, bytes_max: int, packets_max: int
) -> None:
    data = data[: len(data) - cut] or data
    if not data or data[0] not in PUBLISH_FIRST:
        return
    names = Names(250)
    python = scan_publishes(data, 0, version, names, bytes_max, packets_max)
    native = kernel_of(scan_publishes)(data, 0, version, names, bytes_max, packets_max)
    assert type(native) is type(python)
    assert native == python


FRAMES = st.lists(
    st.builds(
        lambda name, payload, flags, properties: publish_frame(name, payload, flags, properties),
        st.sampled_from([b"", b"a", b"x" * 300]),
        st.sampled_from([b"", b"y" * 130, b"z" * 20_000]),
        st.sampled_from([2, 4, 3]),
        st.sampled_from([None, b"", b"\x01\x01"]),
    ),
    max_size=6,
)


@given(FRAMES, st.integers(1, 65_530), st.sampled_from([0, 8]))
def test_the_kernel_numbers_frames_as_python_does(frames: list[bytes], first_id: int, flags: int) -> None:
    starts = list(accumulate(map(len, frames), initial=0))[:-1]
    ids = range(first_id, first_id + len(frames))
    python, native = bytearray(b"".join(frames)), bytearray(b"".join(frames))
    number_frames(python, starts, ids, flags)
    kernel_of(number_frames)(native, starts, ids, flags)
    assert native == python


@given(st.binary(max_size=40), st.integers(0, 50))
def test_the_kernel_refuses_to_number_what_is_no_frame(data: bytes, start: int) -> None:
    python, native = bytearray(data), bytearray(data)
    try:
        number_frames(python, [start], [0x0102])
    except IndexError:
        with pytest.raises(IndexError):
            kernel_of(number_frames)(native, [start], [0x0102])
    else:
        kernel_of(number_frames)(native, [start], [0x0102])
        assert native == python


CHARACTERS = st.sampled_from(
    [*"abcz/$#+ä☃\U0001f426\u0000\u001f\u007f\u0080\u009f\u00a0\ufeff\ud7ff", "a" * 60, "/" * 99]
)
TEXTS = st.one_of(st.lists(CHARACTERS, max_size=9).map("".join).map(str.encode), st.text(max_size=9).map(str.encode))


@given(TEXTS, st.binary(max_size=3), st.integers(0, 9), st.sampled_from([1 << 16, 1 << 16, 5]))
@example(b"/" * 199, b"", 0, 1 << 16)
@example(b"/" * 200, b"", 0, 1 << 16)
def test_the_kernel_accepts_the_names_that_python_accepts(text: bytes, noise: bytes, at: int, bytes_max: int) -> None:
    for raw in text, text[:at] + noise + text[at:]:
        assert kernel_of(usual_name)(raw, bytes_max) == usual_name(raw, bytes_max)


NAMES = [Name.of(text, "mqtt") for text in ("a", "a/b", "ä")]
QUEUES = {name: Queue("mqtt", number) for number, name in enumerate(NAMES)}


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.binary(max_size=3))), st.integers(0, 2))
def test_the_kernel_makes_the_messages_that_python_makes(sent: list[tuple[Name, bytes]], qos: int) -> None:
    names, bodies = [name for name, _ in sent], [body for _, body in sent]
    rest = QUEUES, qos, 1 << 40, bytes(8)
    assert kernel_of(run_items)(names, bodies, *rest) == run_items(names, bodies, *rest)
