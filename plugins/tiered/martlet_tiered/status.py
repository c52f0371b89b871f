"""How far the uploads of a running broker are: the socket ``tiered.sock`` in its data directory tells.

Whoever connects gets one line of JSON (`TierStatus`). Only the broker's user and root can connect.
"""

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, final

import msgspec
import trio
from msgspec import Struct

from martlet.broker import Broker
from martlet.net.unix_sockets import connect_unix, listen_unix

__all__ = ["NAME", "StatusSocket", "TierStatus", "read_status"]

logger = logging.getLogger("martlet.tiered")

NAME: Final = "tiered.sock"
# A command reads its line and ends.
SEND_S: Final = 10.0
CONNECTIONS_MAX: Final = 16
ANSWER_S: Final = 10.0
RECEIVE_BYTES: Final = 1 << 16
STATUS_BYTES_MAX: Final = 1 << 20


class TierStatus(Struct):
    """The tier at `url` of `broker`, and how far its uploads are.

    The log is uploaded up to `position`; `behind_bytes` of it are durable and not uploaded, the oldest of them for
    `behind_ms`: these would be lost with the disk. `reason` says why, and is empty if nothing is behind.
    """

    url: str
    broker: str
    position: int
    behind_bytes: int
    behind_ms: int
    reason: str
    counters: Mapping[str, object]


@final
class StatusSocket:
    """Serves the socket of *broker*; *read* returns what it tells."""

    def __init__(self, broker: Broker, read: Callable[[], Awaitable[TierStatus]]) -> None:
        self._disk = broker.store.disk
        self._path = os.path.abspath(f"{broker.store.data_directory.path}/{NAME}")
        self._read = read
        self._connections = trio.CapacityLimiter(CONNECTIONS_MAX)

    async def run(self) -> None:
        """Serve until cancelled. Without the socket, only the status is missing."""
        self._remove()  # one that is there at the start was left behind by a broker that was killed
        try:
            made = listen_unix(self._path)
        except OSError as error:
            logger.warning("%s cannot be made, so `martlet tiered status` shows the table alone; %s", self._path, error)
            return
        try:
            async with trio.SocketListener(trio.socket.from_stdlib_socket(made)) as listener:
                await trio.serve_listeners(self._serve, [listener])
        finally:
            self._remove()

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            self._disk.unlink(self._path)

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with stream:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(SEND_S):
                async with self._connections:
                    await stream.send_all(msgspec.json.encode(await self._read()) + b"\n")


def read_status(directory: str) -> TierStatus | None:
    """Return the status that the broker of the data directory *directory* tells; None if no broker runs there.

    Raises:
      OSError: the broker does not answer, or its answer cannot be understood.
    """
    data = bytearray()
    try:
        connection = connect_unix(f"{directory}/{NAME}", ANSWER_S)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    with connection:
        while more := connection.recv(RECEIVE_BYTES):
            data += more
            if len(data) > STATUS_BYTES_MAX:
                break
    try:
        return msgspec.json.decode(data, type=TierStatus)
    except msgspec.MsgspecError as error:
        raise OSError(f"the broker at {directory!r} gave an answer that cannot be understood: {error}") from error
