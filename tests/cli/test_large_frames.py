"""What a broker's memory is after large frames on its ports, good and bad: what it was before."""

import contextlib
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from .conftest import Process

MIB = 1 << 20
BODY = bytes(12 * MIB)
CONNECTIONS = 6  # for each kind of frame; all together send a GiB
REGISTRATION = {"brokerName": "b", "brokerAddr": "1.1.1.1:1", "clusterName": "c", "brokerId": "0", "haServerAddr": "h"}


def frame(header: bytes, body: bytes = BODY, kind: int = 0, missing: int = 0) -> bytes:
    return struct.pack(">iI", 4 + len(header) + len(body) + missing, kind << 24 | len(header)) + header + body


def request(code: int, fields: dict[str, str], body: bytes = BODY) -> bytes:
    return frame(orjson.dumps({"code": code, "extFields": fields, "opaque": 1}), body)


FRAMES = [
    frame(b"no JSON"),
    frame(b"?" * MIB),
    frame(b'{"code":34,"extFields":[]}'),
    frame(b"\xff" * 22, kind=1),
    frame(b"{}", missing=1000),  # its end never comes
    request(9999, {}),  # unknown
    request(34, {}),  # a heartbeat that is no JSON
    request(34, {}, b"[" * len(BODY)),
    request(103, REGISTRATION),
    request(103, {**REGISTRATION, "compressed": "true"}),
    request(310, {}),
    request(310, {"a": "P", "b": "T", "c": "TBW102", "d": "1", "e": "0"}),  # a good one, whose message is too large
]


def say(address: str, data: bytes) -> None:
    """Connect, send *data* and no more, and wait for the broker to close."""
    host, port = address.rsplit(":", 1)
    # OSError: shutdown of a connection that was reset says ENOTCONN, which is no ConnectionError.
    with socket.create_connection((host, int(port))) as caller, contextlib.suppress(OSError):
        caller.sendall(data)
        caller.shutdown(socket.SHUT_WR)
        while caller.recv(MIB):
            pass


def resident_bytes(process: Process) -> int:
    lines = Path(f"/proc/{process.child.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("port", ["remoting", "nameserver"])
def test_large_frames_leave_nothing_behind(start: Callable[..., Process], port: str) -> None:
    process = start("run")
    address = process.addresses()[port]
    for data in FRAMES:
        say(address, data[: len(data) // 100])  # what every kind of refusal loads and keeps once
    before = resident_bytes(process)
    for data in FRAMES * CONNECTIONS:
        say(address, data)
    process.until(lambda: resident_bytes(process) - before < 24 * MIB)
    assert "Traceback" not in process.log.read_text()


def test_many_incomplete_frames_leave_nothing_behind(start: Callable[..., Process]) -> None:
    """They are too small to be unmapped one by one, and some of them outlive the blocks around them."""
    process = start("run")
    host, port = process.addresses()["remoting"].rsplit(":", 1)
    before = resident_bytes(process)
    data = frame(b"{}", bytes(240_000), missing=1000)
    kept: list[socket.socket] = []
    for _ in range(2):
        callers = [socket.create_connection((host, int(port))) for _ in range(300)]
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            for caller in callers:
                caller.sendall(part)
        process.until(lambda: resident_bytes(process) - before >= 64 * MIB)
        for number, caller in enumerate(callers):
            if number % 10:
                caller.close()
            else:
                kept.append(caller)
    for caller in kept:
        caller.close()
    process.until(lambda: resident_bytes(process) - before <= 24 * MIB)
    assert "Traceback" not in process.log.read_text()
