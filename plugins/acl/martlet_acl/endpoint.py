"""The socket ``acl.sock`` in the data directory: administration without a password for whoever owns the directory.

Each line is a request (`martlet_acl.requests`), and is answered by one. Only the broker's user and root can connect.
"""

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Final, final

import msgspec
import trio

from martlet.broker import Broker
from martlet.errors import Refused, StoreError
from martlet.net.unix_sockets import listen_unix, peer_user
from martlet_acl.requests import AclAnswer, Request, decode_request

__all__ = ["NAME", "Endpoint"]

log = logging.getLogger("martlet.acl")

NAME: Final = "acl.sock"
# A request is a rule or a user: with 256 networks it has some 12 KiB.
LINE_BYTES_MAX: Final = 256 << 10
READ_BYTES: Final = 65_536
CONNECTIONS_MAX: Final = 16
# A command asks and ends; one that stands still gives its place to another.
IDLE_S: Final = 60.0
ROOT: Final = 0


@final
class Endpoint:
    """Serves the socket of one broker; *answer* never raises `Refused`."""

    def __init__(self, broker: Broker, answer: Callable[[Request], Awaitable[AclAnswer]]) -> None:
        self._disk = broker.store.disk
        self._path = os.path.abspath(f"{broker.store.data_directory.path}/{NAME}")
        self._broker = broker
        self._answer = answer
        self._connections = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; ready once commands can connect, or if they never can: clients need no socket."""
        self._remove()
        try:
            made = listen_unix(self._path)
        except OSError as error:
            raise StoreError(f"{self._path} cannot be made, so no command can be used; {error.strerror}") from error
        finally:
            task_status.started()
        try:
            async with trio.SocketListener(trio.socket.from_stdlib_socket(made)) as listener:
                while self._broker.saver is None:  # noqa: ASYNC110 - a change must not count as saved before it is
                    await trio.sleep(0.01)
                await trio.serve_listeners(self._serve, [listener])
        finally:
            self._remove()

    def _remove(self) -> None:
        """Remove the socket; one that is there at the start was left behind by a broker that was killed."""
        try:
            self._disk.unlink(self._path)
        except FileNotFoundError:
            return

    async def _serve(self, stream: trio.SocketStream) -> None:
        self._connections += 1
        try:
            async with stream:
                await self._talk(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            return  # the command has ended, or reads no answer
        finally:
            self._connections -= 1

    async def _talk(self, stream: trio.SocketStream) -> None:
        user = peer_user(stream.socket)  # type: ignore[arg-type]
        if user not in (ROOT, os.geteuid()):
            log.warning("refused user %d on %s", user, self._path)
            await _send(stream, AclAnswer(error="only the user of the broker may do this"))
            return
        if self._connections > CONNECTIONS_MAX:
            await _send(stream, AclAnswer(error=f"{CONNECTIONS_MAX} commands are connected already; try again"))
            return
        data = bytearray()
        while True:
            while (end := data.find(b"\n")) < 0:
                if len(data) > LINE_BYTES_MAX:
                    await _send(stream, AclAnswer(error=f"request is longer than {LINE_BYTES_MAX} bytes"))
                    return
                with trio.move_on_after(IDLE_S):
                    more = await stream.receive_some(READ_BYTES)
                    if more:
                        data += more
                        continue
                return
            line = bytes(data[:end])
            del data[: end + 1]
            await _send(stream, await self._answer_line(line))

    async def _answer_line(self, line: bytes) -> AclAnswer:
        try:
            return await self._answer(decode_request(line))
        except Refused as refused:
            return AclAnswer(error=str(refused), reason=refused.reason.value)
        except Exception:  # a bug in one request must not cost the other connections
            log.exception("a request on %s was not answered because of a bug", self._path)
            return AclAnswer(error="the broker has a bug; see its log")


async def _send(stream: trio.SocketStream, answer: AclAnswer) -> None:
    with trio.fail_after(IDLE_S):
        await stream.send_all(msgspec.json.encode(answer) + b"\n")
