"""The kernel finds the runs of STOMP frames that Python finds, wherever the stream is cut or damaged."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet_stomp.wire.codec import Limits
from martlet_stomp.wire.packets import MessageHeaders, Version
from martlet_stomp.wire.scanner import ACK, SEND, KnownHeads, scan_ack_frames, scan_send_frames

LINES = st.sampled_from(
    [
        *[b"destination:/queue/a\n"] * 4,
        b"destination:/queue/b\n",
        b"content-type:text/plain\n",
        b"content-length:3\n",
        b"content-length:0\n",
        b"content-length:9999999999\n",
        b"transaction:t\n",
        b"transaction:u\n",
        b"long:%b\n" % (b"x" * 300),
        b"odd\n",
        b"\\t:\\x\n",
        "ä:\x01\r\n".encode(),
    ]
)
RECEIPTS = st.sampled_from(
    [b"", b"", b"receipt:r-1\n", b"receipt:42\n", b"receipt:\n", b"receipt:a b\n", b"receipt:a\\c\n"]
)
HEADERS = st.tuples(st.lists(LINES, max_size=3), RECEIPTS, st.lists(LINES, max_size=2)).map(
    lambda parts: b"".join([b"destination:/queue/a\n", *parts[0], parts[1], *parts[2]])
)
FRAMES = st.builds(
    b"SEND\n%b\n%b\0%b".__mod__,
    st.tuples(
        HEADERS,
        st.sampled_from([b"abc", b"", b"a\0c", b"SEND\n\n\0", b"x" * 300]),
        st.sampled_from([b"", b"\n", b"\n\n"]),
    ),
)
ID_NUMBERS = st.sampled_from(
    [b"0", b"1", b"65535", b"123456", b"999999999", b"1234567890", b"9" * 18, b"9" * 19, b"", b"-1"]
)
SUBSCRIPTIONS = st.sampled_from(
    [b"", b"", b"", b"subscription:0\n", b"subscription:\n", b"subscription:%b\n" % (b"x" * 201)]
)
ACKS = st.builds(
    b"ACK\n%b%b:%b-%b-%b\n%b%b%b\n\0%b".__mod__,
    st.tuples(
        SUBSCRIPTIONS,
        st.sampled_from([b"id", b"id", b"id", b"message-id", b"message-id"]),
        st.one_of(st.just(b"1"), ID_NUMBERS),
        st.one_of(st.just(b"0"), ID_NUMBERS),
        st.one_of(st.integers(0, 10**18 - 1).map(b"%d".__mod__), ID_NUMBERS),
        SUBSCRIPTIONS,
        st.one_of(st.just(b""), RECEIPTS, st.just(b"receipt:%b\n" % (b"r" * 201))),
        SUBSCRIPTIONS,
        st.sampled_from([b"", b"\n", b"\n\n"]),
    ),
)


def streams(frames: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Return streams of *frames*: several, the same again and again, cut and damaged."""
    whole = st.one_of(
        st.lists(frames, min_size=1, max_size=6).map(b"".join),
        st.tuples(frames, st.integers(1, 40)).map(lambda pair: pair[0] * pair[1]),
    )
    damaged = st.builds(
        lambda data, at, piece: data[:at] + piece + data[at + len(piece) :],
        whole,
        st.integers(0, 200),
        st.sampled_from([b"\0", b"\n", b"\n\n", b"\xff", b"9", b"receipt:", b"\r"]),
    )
    cut = st.builds(lambda data, size: data[: max(len(data) - size, 1)], whole, st.integers(1, 80))
    return st.one_of(whole, cut, damaged).filter(lambda data: data.startswith((SEND, ACK)))


def seen(found: Any) -> Any:
    """Return what *found* says; headers are equal if they say the same."""
    if found is None:
        return None
    run, end = found
    headers = [(each.destination, each.pairs, each.size) for each in run.headers]
    first_uses = [run.headers.index(each) for each in run.headers]
    return type(run), headers, first_uses, run[1:], end


def same_from_table(heads: KnownHeads) -> list[tuple[bytes, str, int, object]]:
    table: list[tuple[bytes, tuple[MessageHeaders, int, object]]] = list(heads.table.items())
    return [(key, headers.destination, size, transaction) for key, (headers, size, transaction) in table]


@given(streams(FRAMES), st.sampled_from(Version), st.sampled_from([150, 1 << 20]), st.sampled_from([60, 400, 16_384]))
def test_the_kernel_finds_the_sends_that_python_finds(
    data: bytes, version: Version, bytes_max: int, header_bytes_max: int
) -> None:
    limits = Limits(frame_bytes_max=bytes_max, header_bytes_max=header_bytes_max)
    ours, theirs = KnownHeads(version, limits), KnownHeads(version, limits)
    for _ in range(2):  # with an empty table, and with a full one
        python = scan_send_frames(data, 0, ours)
        assert seen(kernel_of(scan_send_frames)(data, 0, theirs)) == seen(python)
        assert same_from_table(theirs) == same_from_table(ours)


def test_the_kernel_learns_as_many_heads_in_a_run_as_python() -> None:
    data = b"".join(b"SEND\ndestination:/queue/%d\n\nx\0" % each for each in range(300))
    ours, theirs = KnownHeads(Version.V1_2, Limits()), KnownHeads(Version.V1_2, Limits())
    for _ in range(4):
        python = scan_send_frames(data, 0, ours)
        assert seen(kernel_of(scan_send_frames)(data, 0, theirs)) == seen(python)
    assert python is not None
    assert python[1] == len(data)


def test_the_kernel_ends_runs_where_python_does() -> None:
    send, ack = b"SEND\ndestination:/queue/a\n\nx\0", b"ACK\nid:1-0-5\n\n\0"
    heads = KnownHeads(Version.V1_2, Limits())
    assert seen(kernel_of(scan_send_frames)(send * 2000, 0, heads)) == seen(scan_send_frames(send * 2000, 0, heads))
    for each in (ack, ack[:-2] + b"receipt:a\n\n\0"):
        python = scan_ack_frames(each * 2000, 0, Version.V1_2)
        assert kernel_of(scan_ack_frames)(each * 2000, 0, Version.V1_2) == python


@given(streams(ACKS), st.sampled_from([Version.V1_2, *Version]))
def test_the_kernel_finds_the_acks_that_python_finds(data: bytes, version: Version) -> None:
    python = scan_ack_frames(data, 0, version)
    native = kernel_of(scan_ack_frames)(data, 0, version)
    assert native == python
    assert native is None or python is None or type(native[0]) is type(python[0])
