"""Unix sockets by a path of any length, open to the owner of the process alone.

The kernel takes paths of up to 107 bytes (``sun_path`` in unix(7)). A longer one is reached through a descriptor of its
directory.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

__all__ = ["connect_unix", "listen_unix", "peer_user"]

PATH_BYTES_MAX: Final = 107
SOCKET_MODE: Final = 0o600
BACKLOG: Final = 16
# struct ucred of unix(7): pid, uid, gid, each 4 bytes.
CREDENTIALS_BYTES: Final = 12


@contextmanager
def _short(path: str) -> Iterator[str]:
    """Yield a path to the same place that the kernel takes."""
    if len(os.fsencode(path)) <= PATH_BYTES_MAX:
        yield path
        return
    directory, name = os.path.split(path)
    descriptor = os.open(directory or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen_unix(path: str) -> socket.socket:
    """Return a socket that listens at *path*, which must not exist; only its owner and root can connect.

    Raises:
      OSError: it cannot be made.
    """
    with ExitStack() as unless_listening:
        listener = unless_listening.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.setblocking(False)
        with _short(path) as place:
            listener.bind(place)
            os.chmod(place, SOCKET_MODE)  # before anybody can connect
            listener.listen(BACKLOG)
        unless_listening.pop_all()
    return listener


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """Return a blocking socket that is connected to *path*; each of its calls takes *timeout_s* at most.

    Raises:
      OSError: nobody listens there.
    """
    with ExitStack() as unless_connected:
        connection = unless_connected.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.settimeout(timeout_s)
        with _short(path) as place:
            connection.connect(place)
        unless_connected.pop_all()
    return connection


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process that connected."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS_BYTES)
    return int.from_bytes(data[4:8], "little")
