"""Requests to a running broker about its cold tier: the socket ``tiered.sock`` in its data directory.

Whoever connects sends one line of JSON (`TierRequest`) and gets one or more: the status of the tier (`TierStatus`), or
how far a purge is (`PurgeStatus`), again and again until it is over. Only the broker's user and root can connect.
"""

import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from typing import Final, final

import msgspec
import trio
from msgspec import Struct

from martlet.broker import Broker
from martlet.errors import MartletError
from martlet.net.unix_sockets import connect_unix, listen_unix

__all__ = ["NAME", "PurgeStatus", "StatusSocket", "TierRequest", "TierStatus", "read_status", "request_purge"]

logger = logging.getLogger("martlet.tiered")

NAME: Final = "tiered.sock"
# A command reads its line and ends.
SEND_S: Final = 10.0
CONNECTIONS_MAX: Final = 16
ANSWER_S: Final = 10.0
RECEIVE_BYTES: Final = 1 << 16
STATUS_BYTES_MAX: Final = 1 << 20
REQUEST_BYTES_MAX: Final = 1 << 16


class TierStatus(Struct):
    """The tier at `url` of `broker`, and how far its uploads are.

    The log is uploaded up to `position`; `behind_bytes` of it are durable and not uploaded, the oldest of them for
    `behind_ms`: these would be lost with the disk. `reason` says why, and is empty if nothing is behind. With an
    `error`, the rest is empty.
    """

    url: str
    broker: str
    position: int
    behind_bytes: int
    behind_ms: int
    reason: str
    counters: Mapping[str, object]
    error: str = ""


class TierRequest(Struct):
    """Asks for the status, or for a purge of all deleted topics, or of `topic` if that is not empty."""

    purge: bool = False
    topic: str = ""


class PurgeStatus(Struct):
    """How far a purge is: `done` files were rewritten or removed, and `left` are to be looked at.

    `waits` says what it waits for; `error` ends it. In the end, `objects` is the number of objects that were removed.
    `damaged` has files that could not be rewritten.
    """

    done: int = 0
    left: int = 0
    messages: int = 0
    objects: int = 0
    damaged: list[str] = []
    waits: str = ""
    error: str = ""
    is_over: bool = False


@final
class StatusSocket:
    """Serves the socket of *broker*; *read* returns the status, and *purge* how far a purge of a topic is."""

    def __init__(
        self,
        broker: Broker,
        read: Callable[[], Awaitable[TierStatus]],
        purge: Callable[[str], AsyncGenerator[PurgeStatus, None]],
    ) -> None:
        self._disk = broker.store.disk
        self._path = os.path.abspath(f"{broker.store.data_directory.path}/{NAME}")
        self._read = read
        self._purge = purge
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
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                async with self._connections:
                    await self._answer(stream)

    async def _answer(self, stream: trio.SocketStream) -> None:
        line = bytearray()
        with trio.move_on_after(SEND_S):
            while not line.endswith(b"\n") and len(line) < REQUEST_BYTES_MAX:
                more = await stream.receive_some(RECEIVE_BYTES)
                if not more:
                    break
                line += more
        try:
            request = msgspec.json.decode(line, type=TierRequest)
        except msgspec.MsgspecError:
            return
        try:
            await self._do(stream, request)
        except (MartletError, OSError) as error:  # of the disk, for example; it is not the end of other connections
            failed = TierStatus("", "", 0, 0, 0, "", {}, str(error))
            await _send(stream, PurgeStatus(error=str(error), is_over=True) if request.purge else failed)

    async def _do(self, stream: trio.SocketStream, request: TierRequest) -> None:
        if not request.purge:
            await _send(stream, await self._read())
            return
        async with aclosing(self._purge(request.topic)) as states:
            async for state in states:
                await _send(stream, state)


async def _send(stream: trio.SocketStream, answer: TierStatus | PurgeStatus) -> None:
    with trio.move_on_after(SEND_S) as waiting:
        await stream.send_all(msgspec.json.encode(answer) + b"\n")
    if waiting.cancelled_caught:
        raise trio.BrokenResourceError


def request_purge(directory: str, topic: str) -> Iterator[PurgeStatus]:
    """Let the broker of the data directory *directory* purge *topic*, or all deleted topics if that is empty.

    Yields how far it is, until it is over; nothing if no broker runs there.

    Raises:
      OSError: the broker does not answer, or its answer cannot be understood.
    """
    try:
        connection = connect_unix(f"{directory}/{NAME}", ANSWER_S)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    with connection:
        connection.sendall(msgspec.json.encode(TierRequest(purge=True, topic=topic)) + b"\n")
        state = PurgeStatus()
        for line in connection.makefile("rb"):
            try:
                state = msgspec.json.decode(line, type=PurgeStatus)
            except msgspec.MsgspecError as error:
                raise OSError(f"its answer cannot be understood: {error}") from error
            yield state
        if not state.is_over:
            raise OSError("it closed the connection; is it stopping?")


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
        connection.sendall(msgspec.json.encode(TierRequest()) + b"\n")
        while more := connection.recv(RECEIVE_BYTES):
            data += more
            if len(data) > STATUS_BYTES_MAX:
                break
    try:
        status = msgspec.json.decode(data, type=TierStatus)
    except msgspec.MsgspecError as error:
        raise OSError(f"the broker at {directory!r} gave an answer that cannot be understood: {error}") from error
    if status.error:
        raise OSError(f"the broker at {directory!r} cannot tell: {status.error}")
    return status
