"""Closes sockets so that a client which is still writing can read the last frame: the lingering close of web servers.

If a socket is closed while the client writes, the kernel answers with a reset, and many clients then drop received
bytes that they have not read: the frame that says why the connection ends. So the server ends only its own direction
first (``SHUT_WR``): the client reads the frame, then the end. The server discards further bytes from the client until
the client closes as well or a limit is reached (RFC 9112 section 9.6 describes this for HTTP).

A lingering socket is a number and two limits: its peer has ended, so its session, client id and will are those of a
closed connection. One task looks at all lingering sockets every 10 ms. It does not wait for readable ones: nobody needs
an answer, a wake-up per connection would cost more than everything else, and clients that flood the server get only
their share.
"""

import os
import select
from typing import Final, final

import trio

__all__ = ["LingeringSockets"]

# Counted from the end of the connection. nginx waits 5 s for more data (lingering_timeout) and 30 s in all, Apache 2 s
# and 30 s. Both must continue to read while a browser uploads a file; our clients stop at the end that they read.
LINGER_S: Final = 5.0
# Per socket. More than the largest frame of any protocol, because a client may write a whole frame before it reads.
DISCARD_BYTES_MAX: Final = 32 << 20
TURN_S: Final = 0.01
TURN_BYTES: Final = 1 << 20  # bytes discarded per turn, shared by all sockets with data; takes 0.1 to 0.3 ms
SOCKETS_A_TURN: Final = 64  # sockets read per turn, and closed per turn after LINGER_S: thousands may end together


@final
class LingeringSockets:
    """Connected sockets whose server side has ended, while `run` runs; the client's side is still open."""

    def __init__(self) -> None:
        self._limits: dict[int, list[float]] = {}  # descriptor -> [end in s, bytes left]; the first one ends first
        self._epoll: select.epoll | None = None  # None if sockets do not linger: without `run`, or on macOS
        self._buffer = memoryview(bytearray(TURN_BYTES))
        self._added = trio.Event()
        self._emptied = trio.Event()

    def __len__(self) -> int:
        return len(self._limits)

    def add(self, fd: int) -> None:
        """Take over the socket *fd*, on which everything was sent, and close it later."""
        if self._epoll is None:
            os.close(fd)
            return
        try:
            self._epoll.register(fd, select.EPOLLIN)
        except OSError:  # fs.epoll.max_user_watches
            os.close(fd)
            return
        self._limits[fd] = [trio.current_time() + LINGER_S, DISCARD_BYTES_MAX]
        self._added.set()

    def give_way(self) -> bool:
        """Close the oldest lingering socket to make room for a new connection; return False if there is none."""
        if not self._limits:
            return False
        self._close(next(iter(self._limits)))
        return True

    async def wait_none(self) -> None:
        """Return when no socket lingers."""
        while self._limits:
            await self._emptied.wait()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Discard what clients send, until cancelled; then close all sockets."""
        if not hasattr(select, "epoll"):
            task_status.started()
            return
        epoll = self._epoll = select.epoll()
        task_status.started()
        try:
            while True:
                while not self._limits:
                    await self._added.wait()
                await trio.sleep(TURN_S)
                self._discard(epoll)
                self._close_late()
        finally:
            for fd in list(self._limits):
                self._close(fd)
            self._epoll = None
            epoll.close()

    def _discard(self, epoll: select.epoll) -> None:
        """Read once from sockets that are ready; close those at their end, or with too many bytes."""
        ready = epoll.poll(0, SOCKETS_A_TURN)
        share = self._buffer[: TURN_BYTES // max(1, len(ready))]
        for fd, _ in ready:
            limits = self._limits[fd]
            try:
                received = os.readv(fd, (share,))
            except BlockingIOError:
                continue
            except OSError:  # the client has reset the connection
                received = 0
            limits[1] -= received
            if not received or limits[1] <= 0:
                self._close(fd)

    def _close_late(self) -> None:
        """Close sockets whose time limit has passed."""
        now = trio.current_time()
        for fd in [fd for fd, _ in zip(self._limits, range(SOCKETS_A_TURN), strict=False)]:
            if self._limits[fd][0] > now:
                return
            self._close(fd)

    def _close(self, fd: int) -> None:
        del self._limits[fd]
        if self._epoll is not None:
            self._epoll.unregister(fd)
        os.close(fd)
        if not self._limits:
            self._added = trio.Event()
            self._emptied.set()
            self._emptied = trio.Event()
