"""Unix sockets by paths of any length, which only their owner can open."""

import os
import socket
from pathlib import Path

import pytest

from martlet.net.unix_sockets import PATH_BYTES_MAX, connect_unix, listen_unix, peer_user


@pytest.mark.parametrize("length", [0, PATH_BYTES_MAX, PATH_BYTES_MAX + 1, 400])
def test_a_path_of_any_length_is_reached(tmp_path: Path, length: int) -> None:
    folder = tmp_path
    while len(f"{folder}/s") < length:
        folder /= "d" * min(max(length - len(f"{folder}/s") - 1, 1), 200)
    folder.mkdir(parents=True, exist_ok=True)
    path = f"{folder}/s"
    descriptors = set(os.listdir("/proc/self/fd"))
    with listen_unix(path) as listener, connect_unix(path, 10.0) as client:
        assert Path(path).is_socket()
        assert Path(path).stat().st_mode & 0o777 == 0o600
        listener.setblocking(True)
        server, _ = listener.accept()
        with server:
            assert peer_user(server) == os.geteuid()
            client.sendall(b"hello")
            assert server.recv(10) == b"hello"
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_where_nobody_listens_there_is_an_error(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    with pytest.raises(FileNotFoundError):
        connect_unix(path, 1.0)
    listen_unix(path).close()
    with pytest.raises(ConnectionRefusedError):
        connect_unix(path, 1.0)
    with pytest.raises(OSError, match="in use"):
        listen_unix(path)
    with pytest.raises(FileNotFoundError):
        listen_unix(f"{tmp_path}/missing/{'x' * 200}")


def test_a_listener_is_not_open_before_its_mode_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{tmp_path}/s"
    chmod = os.chmod

    def try_first(place: str, mode: int) -> None:
        with pytest.raises(ConnectionRefusedError), socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
        chmod(place, mode)

    monkeypatch.setattr(os, "chmod", try_first)
    listen_unix(path).close()
