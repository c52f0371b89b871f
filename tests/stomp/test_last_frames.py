"""A client that is still writing when the broker closes reads ERROR, then the end."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.last_frames import MORE, read_after_writing
from tests.wire_clients.stomp import StompPort, stomp_port

from martlet.store.disk.files import Files

CONNECT = b"CONNECT\naccept-version:1.2\nhost:h\n\n\0"
SEND = b"SEND\ndestination:/queue/a\nreceipt:%d\n\n%b\0"
ENFORCING = {"tls": "enforcing", "tls_cert": "server"}


async def answer(port: StompPort, data: bytes, *, secured: bool = False) -> bytes:
    wire = await (port.tls_wire() if secured else port.wire())
    return await read_after_writing(wire.stream, CONNECT + data)


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"NONSENSE\n\n\0" + MORE, b"NONSENSE"),
        (b"SEND\ndestination:/queue/a\n\n" + b"x" * len(MORE) + b"\0", b"a frame has more than"),
        (b"SUBSCRIBE\nid:1\n\n\0" + MORE, b"destination"),
    ],
)
async def test_error_arrives(tmp_path: Path, data: bytes, reason: bytes, secured: bool) -> None:
    async with stomp_port(tmp_path, ENFORCING if secured else {}) as port:
        received = await answer(port, data, secured=secured)
        connected, _, error = received.partition(b"\0")
        assert connected.startswith(b"CONNECTED\n")
        assert error.lstrip(b"\n").startswith(b"ERROR\n")
        assert reason in error
        assert not port.broker.context.clients


def full(write: Callable[..., None]) -> Callable[..., None]:
    def fail(files: Files, path: str, data: bytes, at: int) -> None:
        if "/commitlog/" in path:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write(files, path, data, at)

    return fail


async def test_error_arrives_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stomp_port(tmp_path) as port:
        frames = b"".join(SEND % (number, b"x" * 10_000) for number in range(1500))
        with monkeypatch.context() as patch:
            patch.setattr(Files, "write", full(Files.write))
            received = await answer(port, frames)
        *_, error, rest = received.split(b"\0")
        assert error.lstrip(b"\n").startswith(b"ERROR\n")
        assert (b"receipt-id:" in error, b"is full" in error, rest.strip()) == (True, True, b"")
        assert b"RECEIPT\n" not in received
