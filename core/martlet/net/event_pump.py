"""One task that reads from all plain sockets in rounds, and waits briefly for more before it returns to trio.

A turn of trio's loop costs about as much as a small request: re-arming the socket, waking the task, and bookkeeping.
The pump has its own epolls, in which each socket is registered once. A round handles all sockets that are ready: one
read of each, then one commit, one flush request, one wake pass (`martlet.net.rounds`). If no socket is ready, the pump
waits up to a millisecond for more. It also waits for trio's own epoll, so that a finished thread, a new connection or
data on a TLS connection ends the wait immediately. It returns to trio when another task can run, when a deadline is
near, and after a millisecond at the latest.

docs/decisions/0016-one-reader-for-all-plain-sockets.md describes the private attribute of trio that the pump uses, and
how the server works without it.
"""

import select
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Generic, TypeVar, final

import trio

from martlet.net.peer import ServerPeer
from martlet.net.rounds import Rounds

__all__ = ["EventPump", "PumpReading", "trio_epoll_fd"]

T = TypeVar("T")

TURN_S: Final = 0.001  # the longest time without a turn of trio's loop, and the longest wait for more data
SOCKETS_A_ROUND: Final = 64


def trio_epoll_fd() -> int:
    """Return the file descriptor of trio's epoll; -1 if this version of trio stores it elsewhere."""
    try:
        fd: int = trio._core._run.GLOBAL_RUN_CONTEXT.runner.io_manager._epoll.fileno()  # type: ignore[attr-defined,unused-ignore]
    except AttributeError:
        return -1
    return fd


@final
class TaskWatch(trio.abc.Instrument):
    """Knows the tasks that can run and have not run yet, including those of the current turn of trio's loop.

    trio's own statistics do not count tasks of the current turn: it empties its queue before it runs them, in any
    order.
    """

    def __init__(self) -> None:
        self.runnable: set[trio.lowlevel.Task] = set()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.runnable.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.runnable.discard(task)


@final
class EventPump(Generic[T]):
    """Calls *readable* with the object passed to `watch` for each socket that is ready; *T* is the type of that
    object.
    """

    def __init__(self, rounds: Rounds, readable: Callable[[T], None]) -> None:
        self._rounds = rounds
        self._readable = readable
        # Trio waits for the first, and the pump for the second, which also has trio's own epoll.
        self._sockets, self._all = select.epoll(), select.epoll()
        self._watched: dict[int, T] = {}
        self._calls: dict[int, Callable[[], None]] = {}
        self._ready: list[tuple[int, int]] = []  # ready sockets that the last round had no time for
        self._tasks = TaskWatch()
        self._trio_fd = -1
        self._is_trio_ready = False
        self._last_read_s = 0.0  # time of the last read in s

    def watch(self, fd: int, reading: T) -> None:
        """Read from the socket *fd* from now on; ignored after `run` was cancelled."""
        if self._register(fd):
            self._watched[fd] = reading

    def unwatch(self, fd: int, reading: T) -> None:
        """Stop reading from *fd*; call it before closing *fd*. Ignored if *fd* is not watched for *reading*."""
        if self._watched.get(fd) is reading:
            del self._watched[fd]
            self._unregister(fd)

    def watch_call(self, fd: int, call: Callable[[], None]) -> None:
        """Call *call* in a round while *fd* is readable; ignored after `run` was cancelled."""
        if self._register(fd):
            self._calls[fd] = call

    def unwatch_call(self, fd: int) -> None:
        """End `watch_call`; call it before closing *fd*."""
        if self._calls.pop(fd, None) is not None:
            self._unregister(fd)

    def _register(self, fd: int) -> bool:
        """Wait for *fd* from now on; return False after the end of `run`."""
        if self._sockets.closed:
            return False
        self._sockets.register(fd, select.EPOLLIN)
        self._all.register(fd, select.EPOLLIN)
        return True

    def _unregister(self, fd: int) -> None:
        if not self._sockets.closed:
            self._sockets.unregister(fd)
            self._all.unregister(fd)

    def watched(self, fd: int) -> T | None:
        """Return the object that `watch` got for *fd*; None if the pump does not read from *fd* now."""
        return self._watched.get(fd)

    async def run(self) -> None:
        """Read until cancelled."""
        self._trio_fd = trio_epoll_fd()
        try:
            if self._trio_fd >= 0:
                self._all.register(self._trio_fd, select.EPOLLIN)
                self._calls[self._trio_fd] = self._leave
            trio.lowlevel.add_instrument(self._tasks)
            while True:
                await trio.lowlevel.wait_readable(self._sockets)
                while self._run_rounds():
                    await trio.lowlevel.checkpoint()
        finally:
            trio.lowlevel.remove_instrument(self._tasks)
            self._all.close()
            self._sockets.close()

    def _leave(self) -> None:
        """Note that trio's epoll is ready."""
        self._is_trio_ready = True

    def _run_rounds(self) -> bool:
        """Run rounds; return True when another task must run, False when waiting in trio is cheaper."""
        tasks, clock = self._tasks.runnable, time.perf_counter
        may_wait, wait_s = False, 0.0
        turn_ends = clock() + TURN_S
        self._is_trio_ready = False
        while True:
            events, self._ready = self._ready or self._all.poll(wait_s, SOCKETS_A_ROUND), []
            if events:
                if len(events) == 1 and events[0][0] == self._trio_fd:
                    return True
                self._run_round(events)
                if self._is_trio_ready or self._last_read_s >= turn_ends:
                    return True
                if tasks:  # such as the flusher; trio reports new requests after it has run them
                    return bool(self._ready)
                if self._ready:
                    continue
            elif wait_s or clock() - self._last_read_s > TURN_S:
                return False
            if not may_wait:
                if tasks or self._trio_fd < 0:
                    return False
                if trio.lowlevel.current_statistics().seconds_to_next_deadline <= TURN_S:
                    return False
                may_wait, wait_s = True, TURN_S

    def _run_round(self, events: list[tuple[int, int]]) -> None:
        """Read from the sockets of *events* until the time of a round is over."""
        clock = time.perf_counter
        ends = clock() + TURN_S
        self._rounds.begin()
        try:
            for number, (fd, _) in enumerate(events, 1):
                reading = self._watched.get(fd)
                if reading is not None:
                    self._readable(reading)
                    if clock() >= ends:
                        self._ready = events[number:]
                        break
                elif fd in self._calls:
                    self._calls[fd]()
        finally:
            self._rounds.end()
        self._last_read_s = clock()


@final
class PumpReading:
    """The state of the pump's reading from one peer, which needs no task of its own while it only waits.

    The pump calls ``attend`` when it cannot continue: the client speaks TLS or WebSocket, a request must wait, the
    output has no room, or the connection ends. ``attend`` may call `watch` once the pump can continue.
    """

    __slots__ = (
        "_call_attend",
        "_fd",
        "_pump",
        "attended",
        "closed",
        "ended",
        "events",
        "first",
        "in_round",
        "now",
        "peer",
        "plain",
        "received",
        "unfinished",
    )

    def __init__(
        self, peer: ServerPeer, pump: "EventPump[PumpReading]", fd: int, attend: Callable[["PumpReading"], None]
    ) -> None:
        self.peer = peer
        self._pump = pump
        self._fd = fd
        self._call_attend = attend
        self.attended = False  # whether `attend` was called since `watch`
        self.in_round = False  # whether the pump is reading now; it checks afterwards whether it can continue
        self.plain = False  # whether the first bytes were of the protocol itself
        self.first: bytes | None = None  # the first bytes, if they were of TLS or WebSocket
        self.events: Iterator[Any] | None = None  # the events left of a read that must wait
        self.unfinished: Awaitable[None] | bool = False  # what must be awaited before these: the rest of a request
        self.received = 0  # size of that read
        self.now = 0.0  # time of that read
        self.ended = False  # whether the pump has read the end, or the last request
        self.closed = False  # whether the server has closed the socket

    def watch(self) -> None:
        """Let the pump read from now on."""
        self.attended = False
        self._pump.watch(self._fd, self)

    def stop(self) -> None:
        """Stop reading, and call ``attend`` for the peer."""
        self._pump.unwatch(self._fd, self)
        if not self.attended and not self.in_round:
            self.attended = True
            self._call_attend(self)

    def close(self) -> None:
        """Prepare for the closing of the socket."""
        self.closed = True
        self.stop()
