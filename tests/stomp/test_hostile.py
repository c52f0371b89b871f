"""Hostile bytes over real sockets: they end their own connection, and neither disturb others nor use up memory."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.interop.martlet_process import Martlet
from tests.stomp import hostile
from tests.stomp.hostile import FENCE, Asking, Case, connected

GROWTH_BYTES_MAX = 4 << 20
GIGABYTE = 1 << 30
PIECE_BYTES = 1 << 16


@pytest.fixture(scope="module")
def martlet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Martlet]:
    broker = Martlet(tmp_path_factory.mktemp("martlet"))
    yield broker
    output = broker.process.output()
    broker.close()
    assert "because of a bug" not in output
    assert "Traceback" not in output


@pytest.fixture
def port(martlet: Martlet) -> int:
    return int(martlet.stomp.rpartition(":")[2])


def is_right(case: Case, outcome: str) -> bool:
    """Return whether the broker may do *outcome* with *case*."""
    if case.is_cut:
        return outcome == "closed"
    if case.is_error is None:
        return outcome.endswith(("open", "closed"))
    return outcome.endswith("ERROR, closed" if case.is_error else "open")


def test_every_error_is_told_and_ends_the_connection(port: int) -> None:
    wrong = [(case, told) for case in hostile.cases() if not is_right(case, told := hostile.outcome(port, case))]
    assert wrong == []


def memory_bytes(martlet: Martlet, line: str) -> int:
    found = re.search(rf"{line}:\s+(\d+) kB", Path(f"/proc/{martlet.process.pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


def serve(asking: Asking) -> None:
    """Check that the broker serves a client that does nothing wrong."""
    asking.send(FENCE)
    assert asking.frame() == ("RECEIPT", {"receipt-id": "the fence"})


def test_others_are_served_meanwhile_and_memory_stays_flat(martlet: Martlet, port: int) -> None:
    bystander = connected(port)
    outcomes = Counter(hostile.outcome(port, case) for case in hostile.mutated(1000, 1))  # so that everything is loaded
    assert len(outcomes) > 3
    before = memory_bytes(martlet, "RssAnon")
    for index, case in enumerate(hostile.mutated(1000, 2)):
        hostile.outcome(port, case)
        if index % 50 == 0:
            serve(bystander)
    serve(bystander)
    bystander.close()
    assert memory_bytes(martlet, "RssAnon") - before < GROWTH_BYTES_MAX


@pytest.mark.parametrize(
    "start",
    [
        b"SEND\ndestination:/queue/hostile\nkey:",  # a header line
        b"SEND\ndestination:/queue/hostile\nkey:x\n\n",  # a body
        b"",  # a command
        b"SEND\ndestination:/queue/hostile\nkey:x",  # a line in which there is a CR
    ],
)
@pytest.mark.parametrize("is_connected", [True, False])
def test_a_gigabyte_without_an_end_is_refused_at_the_limit(
    martlet: Martlet, port: int, start: bytes, is_connected: bool
) -> None:
    asking = connected(port) if is_connected else Asking(port)
    before = memory_bytes(martlet, "RssAnon")
    asking.send(start + b"\r" * start.endswith(b"x"))
    sent, piece = 0, b"x" * PIECE_BYTES
    while sent < GIGABYTE and asking.send(piece):
        sent += PIECE_BYTES
    asking.close()
    # Bytes that the kernel holds count as sent, too.
    assert sent < GIGABYTE // 16
    serve(other := connected(port))
    other.close()
    assert memory_bytes(martlet, "RssAnon") - before < 2 * GROWTH_BYTES_MAX


@pytest.mark.parametrize("length", [b"1073741824", b"4294967295", b"9999999999"])
def test_a_body_of_a_gigabyte_is_refused_when_it_is_announced(port: int, length: bytes) -> None:
    asking = connected(port)
    asking.send(b"SEND\ndestination:/queue/hostile\nreceipt:r\ncontent-length:%b\n\n" % length)
    command, headers = asking.frame() or ("", {})
    assert (command, headers["receipt-id"]) == ("ERROR", "r")
    assert asking.frame() is None
    asking.close()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_flood_of_heart_beats_is_no_error_and_uses_no_memory(martlet: Martlet, port: int, line_end: bytes) -> None:
    asking, other = connected(port), connected(port)
    serve(asking)
    before = memory_bytes(martlet, "RssAnon")
    for _ in range(64):
        asking.send(line_end * (PIECE_BYTES // len(line_end)))
        serve(other)
    serve(asking)
    asking.close()
    other.close()
    assert memory_bytes(martlet, "RssAnon") - before < GROWTH_BYTES_MAX


@pytest.mark.parametrize(("value_bytes", "lines", "frames"), [(900, 1, 500), (7900, 8, 8), (5, 90, 50)])
def test_header_lines_that_never_repeat_use_a_limited_memory(
    martlet: Martlet, port: int, value_bytes: int, lines: int, frames: int
) -> None:
    asking, value, counter = connected(port), b"v" * value_bytes, count()

    def flood(rounds: int) -> None:
        for _ in range(rounds):
            heads = [b"".join(b"key-%d:%b\n" % (next(counter), value) for _ in range(lines)) for _ in range(frames)]
            asking.send(b"".join(b"SEND\ndestination:/queue/hostile\n%b\n\0" % head for head in heads))
            serve(asking)

    flood(40)
    before = memory_bytes(martlet, "RssAnon")
    flood(100)
    asking.close()
    # The store keeps the end of the log in memory; the header lines of all of these frames would be 100 MB.
    assert memory_bytes(martlet, "RssAnon") - before < 8 * GROWTH_BYTES_MAX
