"""Runs: they say the same as their frames one by one, and what is unusual is left to the codec."""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stomp.frame_strategies import VERSIONS, events_of, streams

from martlet_stomp.wire import scanner
from martlet_stomp.wire.codec import Limits
from martlet_stomp.wire.connection import StompConnection
from martlet_stomp.wire.packets import AckRun, SendRun, Version
from martlet_stomp.wire.scanner import KnownHeads, known_heads, scan_ack_frames, scan_send_frames

V1_0, V1_1, V1_2 = Version
LIMITS = Limits()


def connect(version: Version) -> StompConnection:
    connection = StompConnection(known_heads(LIMITS), 0.0)
    lines = b"" if version is V1_0 else b"accept-version:%b\n" % version.text.encode()
    connection.receive_data(b"CONNECT\n%b\n\0" % lines, 0.0)
    list(connection.events())
    connection.open(0, 0.0)
    return connection


def one_by_one(version: Version, data: bytes) -> list[Any]:
    """Return the events of *data* without the scanner."""
    with patch.object(StompConnection, "_run_at", return_value=None):
        return events_of(connect(version), [data])


@given(VERSIONS.flatmap(lambda version: st.tuples(st.just(version), streams(version))))
def test_runs_say_what_their_frames_say(case: tuple[Version, bytes]) -> None:
    version, data = case
    assert events_of(connect(version), [data]) == one_by_one(version, data)


@given(
    VERSIONS.flatmap(lambda version: st.tuples(st.just(version), streams(version))),
    st.integers(0, 300),
    st.sampled_from([b"", b"\0", b"\n", b"\r", b":", b"\\", b"\xff", b"9", b"-", b"receipt:", b"\nreceipt:x\n"]),
    st.integers(0, 2),
)
def test_damaged_runs_say_what_their_frames_say(
    case: tuple[Version, bytes], at: int, piece: bytes, removed: int
) -> None:
    version, data = case
    damaged = data[:at] + piece + data[at + removed :]
    assert events_of(connect(version), [damaged]) == one_by_one(version, damaged)


def scan(
    data: bytes, version: Version = V1_2, limits: Limits = LIMITS, heads: KnownHeads | None = None
) -> tuple[SendRun, int]:
    found = scan_send_frames(data, 0, heads if heads is not None else KnownHeads(version, limits))
    assert found is not None
    return found


def test_a_run_has_messages_of_several_destinations_and_sizes() -> None:
    data = b"".join(
        b"SEND\ndestination:/queue/%d\ncontent-length:%d\n\n%b\0" % (each % 2, each, b"x" * each) for each in range(9)
    )
    run, end = scan(data)
    assert end == len(data)
    assert [headers.destination for headers in run.headers] == [f"/queue/{each % 2}" for each in range(9)]
    assert [len(body) for body in run.bodies] == list(range(9))
    assert len(set(run.headers)) == 2  # equal ones are one object, whatever the size
    assert (run.receipts, run.asking) == ([], [])


def test_receipts_do_not_end_a_run() -> None:
    frames = [
        b"SEND\ndestination:/queue/a\n%b\nx\0\n" % (b"receipt:m-%d\n" % each if each % 3 else b"") for each in range(9)
    ]
    run, end = scan(b"".join(frames))
    assert end == sum(map(len, frames))
    assert run.receipts == [b"m-1", b"m-2", b"m-4", b"m-5", b"m-7", b"m-8"]
    assert run.asking == [1, 2, 4, 5, 7, 8]
    assert [run.receipt_of(each) for each in (0, 1, 8)] == [None, b"m-1", b"m-8"]
    assert len(set(run.headers)) == 1


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("receipt", [b"", b"a:b", b"a\\c", b" a", "ä".encode(), b"a\r", b"a\tb"])
def test_an_unusual_receipt_is_left_to_the_codec(receipt: bytes, place: str) -> None:
    lines = [b"destination:/queue/a\n", b"receipt:%b\n" % receipt]
    odd = b"SEND\n%b\nx\0" % b"".join(lines if place == "last" else lines[::-1])
    usual = odd.replace(b":%b\n" % receipt, b":r\n", 2) if receipt else odd.replace(b"receipt:", b"receipt:r")
    run, end = scan(usual * 2 + odd + usual)
    assert (run.receipts, end) == ([b"r", b"r"], 2 * len(usual))
    assert scan_send_frames(odd, 0, KnownHeads(V1_2, LIMITS)) is None


def test_a_body_with_a_length_may_contain_frames() -> None:
    inner = b"SEND\ndestination:/queue/a\n\ninner\0"
    frame = b"SEND\ndestination:/queue/a\ncontent-length:%d\n\n%b\0" % (len(inner), inner)
    run, end = scan(frame * 3)
    assert (run.bodies, end) == ([inner] * 3, 3 * len(frame))


def test_a_run_ends_where_the_transaction_changes() -> None:
    outside, inside = (b"SEND\ndestination:/queue/a\n%b\nx\0" % each for each in (b"", b"transaction:t\n"))
    run, end = scan(inside * 2 + outside)
    assert (run.transaction, len(run.bodies), end) == ("t", 2, 2 * len(inside))
    run, end = scan(outside + inside)
    assert (run.transaction, len(run.bodies), end) == (None, 1, len(outside))
    assert run.headers[0].pairs == ()


@pytest.mark.parametrize(
    "second",
    [
        b"SEND\ndestination:/queue/a\ncontent-length:1\n\nxy\0",  # too short
        b"SEND\ndestination:/queue/a\ncontent-length:1\n\nx",  # incomplete
        b"SEND\ndestination:/queue/a\ncontent-length:0\n\nx\0",
        b"SEND\ndestination:/queue/a\n\nx",
        b"SEND\ndestination:/queue/a\ncontent-length:-1\n\nx\0",
        b"SEND\ndestination:/queue/a\ncontent-length:99999999999\n\nx\0",
        b"SEND\r\ndestination:/queue/a\r\n\r\nx\0",
        b"SEND\ndestination:/queue/a\nfoo:\\t\n\nx\0",
        b"SEND\ndestination:/queue/a\nfoo\n\nx\0",
        b"SEND\ndestination:/queue/a\n\0",
        b"SEND\n\nx\0",
        b"SEND\ndestination:/queue/a\nlong:%b\n\nx\0" % (b"x" * 5000),
        b"\nSEND\ndestination:/queue/a\n\nx\0",
        b"SENDS\ndestination:/queue/a\n\nx\0",
        b"ACK\nid:1-2-3\n\n\0",
        b"",
    ],
)
def test_a_run_ends_before_any_other_frame(second: bytes) -> None:
    first = b"SEND\ndestination:/queue/a\ncontent-length:1\n\nx\0\n"
    run, end = scan(first + second)
    assert (run.bodies, end) == ([b"x"], len(first))
    if second:
        assert scan_send_frames(second, 0, KnownHeads(V1_2, LIMITS)) is None


def test_runs_respect_the_limits() -> None:
    limits = Limits(frame_bytes_max=100, header_bytes_max=60, headers_max=2)
    frame = b"SEND\ndestination:/queue/a\n\n%b\0"
    room = limits.frame_bytes_max - len(frame) + 2
    run, end = scan(frame % (b"x" * room) * 2 + frame % (b"x" * (room + 1)), limits=limits)
    assert (len(run.bodies), end) == (2, 200)
    assert scan_send_frames(frame.replace(b"/a", b"/a\nb:c\nd:e") % b"", 0, KnownHeads(V1_2, limits)) is None
    with_receipt = b"SEND\ndestination:/queue/a\nreceipt:%b\n\n\0"
    run, end = scan(with_receipt % b"1" + with_receipt % (b"1" * 53), limits=limits)
    assert len(run.bodies) == 1


def test_a_run_has_a_limited_number_of_frames() -> None:
    frame = b"SEND\ndestination:/queue/a\n\n\0"
    run, end = scan(frame * 2000)
    assert (len(run.bodies), end) == (scanner.RUN_FRAMES_MAX, scanner.RUN_FRAMES_MAX * len(frame))


def test_a_run_has_a_limited_number_of_headers_that_were_never_seen() -> None:
    heads, count = KnownHeads(V1_2, LIMITS), scanner.RUN_LEARNED_MAX
    data = b"".join(b"SEND\ndestination:/queue/a\nid:%d\n\nx\0" % each for each in range(3 * count))
    run, end = scan(data, heads=heads)
    assert len(run.bodies) == count
    run, end = scan(data[end:], heads=heads)
    assert len(run.bodies) == count
    run, end = scan(data, heads=heads)  # of which the first two thirds are known by now
    assert len(run.bodies) == 3 * count


def test_versions_read_the_same_bytes_in_their_own_way() -> None:
    data = b"SEND\ndestination:/queue/\\n\nfoo: \\c \n\n\0"
    for version, expected in ((V1_0, ("/queue/\\n", "\\c")), (V1_1, ("/queue/\n", " : "))):
        run, _ = scan(data, version)
        assert (run.headers[0].destination, run.headers[0].get("foo")) == expected


def test_no_more_than_some_header_lines_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "HEADS_KEPT", 100)
    heads = KnownHeads(V1_2, LIMITS)
    for each in range(1000):
        run, _ = scan(b"SEND\ndestination:/queue/a\nid:%d\n\n\0" % each, heads=heads)
        assert run.headers[0].get("id") == str(each)
        assert 0 < len(heads) <= 100
    monkeypatch.setattr(scanner, "HEADS_BYTES_KEPT", 10_000)
    for each in range(100):
        scan(b"SEND\ndestination:/queue/a\nid:%d%b\n\n\0" % (each, b"x" * 1000), heads=heads)
        assert sum(map(len, heads.table)) <= 10_000
        # Also those that only the codec sees.
        heads.run_of({"destination": "/queue/a", "id": f"{each} of the codec"}, 1000, b"")
        assert len(heads) <= 10


def test_very_long_header_lines_are_not_remembered() -> None:
    heads = KnownHeads(V1_2, LIMITS)
    run = heads.run_of({"destination": "/queue/a", "id": "x" * 5000}, 5030, b"")
    assert run.headers[0].get("id") == "x" * 5000
    assert len(heads) == 0


def scanned_acks(data: bytes, version: Version) -> tuple[AckRun, int]:
    found = scan_ack_frames(data, 0, version)
    assert found is not None
    return found


@pytest.mark.parametrize("version", list(Version))
def test_acks_are_runs(version: Version) -> None:
    name = b"id" if version is V1_2 else b"message-id"
    data = b"".join(b"ACK\n%b:%d-%d-%d\n\n\0" % (name, each % 3, each % 2, each * 10**15) for each in range(400))
    found, end = scanned_acks(data + b"NACK", version)
    assert end == len(data)
    assert found.subscriptions == [each % 3 for each in range(400)]
    assert found.queue_ids == [each % 2 for each in range(400)]
    assert found.offsets == [each * 10**15 for each in range(400)]
    assert (found.receipts, found.asking) == ((), ())


@pytest.mark.parametrize("version", list(Version))
@pytest.mark.parametrize("subscription", [0, 1, 2])
def test_acks_with_subscriptions_and_receipts_are_runs(version: Version, subscription: int) -> None:
    name = b"id" if version is V1_2 else b"message-id"
    frames = []
    for each in range(300):
        lines = [b"%b:1-0-%d\n" % (name, each), *([b"receipt:r%d\n" % each] if each % 2 else [])]
        lines.insert(subscription, b"subscription:s-%d\n" % (each % 3))
        frames.append(b"ACK\n%b\n\0" % b"".join(lines))
    found, end = scanned_acks(b"".join(frames) + b"NACK", version)
    assert end == sum(map(len, frames))
    assert found.offsets == list(range(300))
    assert found.receipts == [b"r%d" % each for each in range(1, 300, 2)]
    assert [found.receipt_of(each) for each in (0, 1, 299)] == [None, b"r1", b"r299"]


@pytest.mark.parametrize(
    "frame",
    [
        b"ACK\nmessage-id:1-2-3\n\n\0",  # of another version
        b"ACK\nid:1-2-3\n\n",
        b"ACK\nid:1-2\n\n\0",
        b"ACK\nid:1-2-x\n\n\0",
        b"ACK\nid:1-2-3\ntransaction:t\n\n\0",
        b"ACK\r\nid:1-2-3\r\n\r\n\0",
        b"ACK\nid:1-2-3\n\nbody\0",
        b"ACK\nid:1-2-3\nreceipt:\n\n\0",
        b"ACK\nid:1-2-3\nreceipt:a:b\n\n\0",
        b"ACK\nid:1-2-3\nreceipt:\xc3\xa4\n\n\0",
        b"ACK\nid:1-2-3\nsubscription:\\c\n\n\0",
        b"ACK\nid:1-2-3\nsubscription:\xff\n\n\0",
        b"ACK\nid:1-2-%b\n\n\0" % (b"9" * 19),
        b"NACK\nid:1-2-3\n\n\0",
    ],
)
def test_an_unusual_ack_is_left_to_the_codec(frame: bytes) -> None:
    assert scan_ack_frames(frame, 0, V1_2) is None
    usual = b"ACK\nid:1-2-3\n\n\0"
    found, end = scanned_acks(usual * 2 + frame, V1_2)
    assert (found.offsets, end) == ([3, 3], 2 * len(usual))
    usual = b"ACK\nid:1-2-3\nreceipt:r\n\n\0"
    found, end = scanned_acks(usual * 2 + frame, V1_2)
    assert (found.offsets, end) == ([3, 3], 2 * len(usual))


@pytest.mark.parametrize("receipt", [b"", b"receipt:r\n"])
def test_more_acks_than_a_run_may_have_are_several_runs(receipt: bytes) -> None:
    frame = b"ACK\nid:1-2-3\n%b\n\0\n" % receipt
    connection = connect(V1_2)
    connection.receive_data(frame * 10_000, 0.0)
    runs = [event for event in connection.events() if isinstance(event, AckRun)]
    assert sum(len(run.offsets) for run in runs) == 10_000
    assert len(runs) < 20
