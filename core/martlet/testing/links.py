"""In-memory links, which treat bytes as a network does, in a test's own time.

A `MemoryLink` has two ends, each a `martlet.net.transports.Transport`: give one to `Server.serve` and speak through the
other, best by a `Caller`. A link can be slow, deliver data in pieces cut at any byte, stall, and break; with a seeded
random source it does so the same way each time. Time is trio's, so with a mock clock nothing really waits.
"""

import errno
import random
from collections import deque
from collections.abc import Callable
from typing import Final, final

import trio
from msgspec import Struct

from martlet.contracts import Buffer

__all__ = ["Caller", "Conditions", "End", "MemoryLink"]

CAPACITY_BYTES: Final = 65536


class Conditions(Struct, frozen=True):
    """Conditions on a link. *chance* cuts received data at random bytes and makes the delays vary."""

    capacity_bytes: int = CAPACITY_BYTES  # bytes sent and not yet received; a sender can send no more then
    latency_s: float = 0.0
    jitter_s: float = 0.0  # largest extra delay; later data never overtakes
    chance: random.Random | None = None


@final
class _Way:
    """One direction: pieces in transit, in order, each with its time of arrival."""

    __slots__ = ("_changed", "_conditions", "_flying", "_last_arrival", "_size", "broken", "finished", "stalled_until")

    def __init__(self, conditions: Conditions) -> None:
        self._conditions = conditions
        self._flying: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._last_arrival = 0.0
        self._changed: trio.Event | None = None
        self.finished = False  # whether the sender has finished
        self.broken = False
        self.stalled_until = 0.0

    @property
    def room(self) -> int:
        return max(0, self._conditions.capacity_bytes - self._size)

    @property
    def empty(self) -> bool:
        return not self._flying

    def put(self, pieces: list[Buffer]) -> int:
        """Take the bytes for which there is room; return their number."""
        data = b"".join(pieces)[: self.room]
        if data:
            self._flying.append((self._arrival(), data))
            self._size += len(data)
            self.stir()
        return len(data)

    def _arrival(self) -> float:
        conditions = self._conditions
        extra = conditions.chance.random() * conditions.jitter_s if conditions.chance else 0.0
        self._last_arrival = max(self._last_arrival, trio.current_time() + conditions.latency_s + extra)
        return self._last_arrival

    def next_time(self) -> float:
        """Return when the next piece, or the end, arrives; infinity while nothing is in transit."""
        if self.broken:
            return 0.0
        if self._flying:
            return max(self._flying[0][0], self.stalled_until)
        return self.stalled_until if self.finished else float("inf")

    def take(self, limit: int) -> bytes | None:
        """Return the bytes that have arrived: empty at the end, None if there are none yet."""
        if self.next_time() > trio.current_time():
            return None
        if not self._flying:
            return b""
        arrival, data = self._flying.popleft()
        limit = min(limit, len(data))
        chance = self._conditions.chance
        if chance is not None and limit > 1 and chance.random() < 0.5:
            limit = chance.randrange(1, limit + 1)
        if limit < len(data):
            self._flying.appendleft((arrival, data[limit:]))
        self._size -= limit
        self.stir()
        return data[:limit]

    def lose(self) -> None:
        """Drop everything in transit."""
        self._flying.clear()
        self._size = 0

    def stir(self) -> None:
        """Wake all waiting tasks, because the state has changed."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_until(self, ready: Callable[[], bool], at: Callable[[], float]) -> None:
        """Wait until *ready*, which a change or the time *at* may make true."""
        await trio.lowlevel.checkpoint()
        while not ready():
            if self._changed is None:
                self._changed = trio.Event()
            with trio.move_on_at(at()):
                await self._changed.wait()


@final
class End:
    """One end of a link (`martlet.net.transports.Transport`)."""

    __slots__ = ("_closed", "_in", "_out", "received_bytes", "sent_bytes")

    def __init__(self, incoming: _Way, outgoing: _Way) -> None:
        self._in = incoming
        self._out = outgoing
        self._closed = False
        self.sent_bytes = 0
        self.received_bytes = 0

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def broken(self) -> bool:
        """Whether nothing sent by this end can arrive any more."""
        return self._out.broken

    @property
    def unread(self) -> bool:
        """Whether bytes sent by this end have not been received yet."""
        return not self._out.empty

    def receive(self, limit: int) -> bytes | None:
        if self._closed:
            raise OSError(errno.EBADF, "this end is closed")
        if self._in.broken:
            raise ConnectionResetError(errno.ECONNRESET, "the link broke")
        data = self._in.take(limit)
        self.received_bytes += len(data or b"")
        return data

    def send(self, pieces: list[Buffer]) -> int:
        if self._closed:
            raise OSError(errno.EBADF, "this end is closed")
        if self._out.broken:
            raise BrokenPipeError(errno.EPIPE, "the link broke")
        taken = self._out.put(pieces)
        self.sent_bytes += taken
        return taken

    def pending(self) -> bool:
        return False

    async def wait_readable(self) -> None:
        self._check_open()
        way = self._in
        await way.wait_until(lambda: self._closed or way.next_time() <= trio.current_time(), way.next_time)
        self._check_open()

    async def wait_writable(self) -> None:
        self._check_open()
        way = self._out
        await way.wait_until(lambda: self._closed or way.broken or way.room > 0, lambda: float("inf"))
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this end is closed")

    def finish(self) -> None:
        """Send no more (a half-closed connection); the other end still can."""
        self._out.finished = True
        self._out.stir()

    def close(self) -> None:
        """Stop sending and receiving; bytes already sent still arrive."""
        if not self._closed:
            self._closed = True
            self.finish()
            self._in.broken = True
            self._in.lose()
            self._in.stir()

    def linger(self) -> None:
        self.close()


@final
class MemoryLink:
    """Two ends; bytes sent by one are received by the other."""

    __slots__ = ("_back", "_forth", "far", "near")

    def __init__(self, conditions: Conditions | None = None) -> None:
        self._forth = _Way(conditions or Conditions())
        self._back = _Way(conditions or Conditions())
        self.near = End(self._back, self._forth)
        self.far = End(self._forth, self._back)

    def cut(self) -> None:
        """Break the link: both ends get errors, and bytes in transit are lost."""
        for way in (self._forth, self._back):
            way.broken = True
            way.lose()
            way.stir()

    @property
    def stalled(self) -> bool:
        """Whether `stall` still lasts."""
        return self._forth.stalled_until > trio.current_time()

    def stall(self, seconds: float) -> None:
        """Let nothing arrive for *seconds*."""
        for way in (self._forth, self._back):
            way.stalled_until = trio.current_time() + seconds
            way.stir()


@final
class Caller:
    """The client's side of a link, with methods that wait."""

    __slots__ = ("_kept", "end")

    def __init__(self, end: End) -> None:
        self.end = end
        self._kept = b""

    async def send(self, data: bytes) -> None:
        """Send all of *data*. Raises `OSError` when the link broke."""
        rest = memoryview(data)
        while rest:
            await self.end.wait_writable()
            rest = rest[self.end.send([rest]) :]

    async def receive(self, limit: int = 1 << 20) -> bytes:
        """Return the next bytes that arrive; empty at the end."""
        if self._kept:
            kept, self._kept = self._kept[:limit], self._kept[limit:]
            return kept
        while True:
            await self.end.wait_readable()
            data = self.end.receive(limit)
            if data is not None:
                return data

    async def receive_exactly(self, size: int) -> bytes:
        """Return the next *size* bytes. Raises `EOFError` when the other end sends no more."""
        parts: list[bytes] = []
        while size:
            data = await self.receive(size)
            if not data:
                raise EOFError(f"{size} bytes are missing")
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    async def receive_line(self) -> bytes:
        """Return the next line without its end. Raises `EOFError` when the other end sends no more."""
        line = b""
        while b"\n" not in line:
            data = await self.receive()
            if not data:
                raise EOFError(f"no line end after {line!r}")
            line += data
        line, _, rest = line.partition(b"\n")
        self._kept = rest + self._kept
        return line

    async def receive_all(self) -> bytes:
        """Return everything until the other end sends no more, or the link breaks."""
        parts: list[bytes] = []
        try:
            while data := await self.receive():
                parts.append(data)
        except OSError:
            pass
        return b"".join(parts)

    def close(self) -> None:
        self.end.close()
