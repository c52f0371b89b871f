"""One connection to a broker or name server: many requests in flight, answers in any order.

Callers append requests to one buffer and a single task writes it, so a cancelled caller
never leaves half a frame. Requests *from* the other side have their own numbers
and go to `Handle`, each in its own task.
"""

import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, TypeAlias, final

import trio

from martlet.errors import RemoteProtocolError
from martlet_client.arguments import check_utf8
from martlet_remoting.wire.answers.errors import ConnectionLost, RequestTimeout
from martlet_remoting.wire.codec import READ_BYTES_MAX, FrameBuffer, encode_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import SigningKey

__all__ = ["Answer", "Handle", "Link"]

log = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
# Above this callers wait, so that a server that does not read costs no memory.
OUTGOING_BYTES_MAX: Final = 16 * 1024 * 1024
# A batch of 4 MiB can hold 190,000 messages, and the header of the answer has an id for each.
HEADER_BYTES_MAX: Final = 8 * 1024 * 1024
# A broker sends few requests to a client; more than this at once is a defect of the broker.
REQUESTS_MAX: Final = 64
SHOWN_BYTES: Final = 16  # of data in another protocol, for the error text


@final
class Answer:
    """A client's answer to a request from its broker."""

    __slots__ = ("body", "code", "remark")

    def __init__(self, code: int = ResponseCode.SUCCESS, body: bytes = b"", remark: str | None = None) -> None:
        self.code = code
        self.body = body
        self.remark = remark


Handle: TypeAlias = Callable[[Command], Awaitable[Answer]]


@final
class _Waiting:
    __slots__ = ("answer", "event")

    def __init__(self) -> None:
        self.event = trio.Event()
        self.answer: Command | None = None


@final
class Link:
    """A connection to *address*; `run` must be running for requests to be answered.

    Requests are signed with *key*, if there is one; answers never are.
    """

    def __init__(self, stream: trio.abc.Stream, address: str, handle: Handle, key: SigningKey | None = None) -> None:
        self.address = address
        self.closed = False
        self._stream = stream
        self._handle = handle
        self._key = key
        self._waiting: dict[int, _Waiting] = {}
        self._opaque = 0
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._writable = trio.Event()
        self._drained = trio.Event()
        self._drained.set()
        self._requests = 0
        self._answered = False
        self._why = "was closed"
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Read and write until the connection ends; all waiting callers then get `ConnectionLost`."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    await self._read(nursery)
                    nursery.cancel_scope.cancel()
        finally:
            self.close()
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(self._stream)

    def close(self, why: str = "") -> None:
        """End the connection: fail all waiting callers, and accept no more requests."""
        if not self.closed:
            self._why = why or self._why
        self.closed = True
        self._scope.cancel()
        for waiting in self._waiting.values():
            waiting.event.set()
        self._waiting.clear()
        self._drained.set()
        self._writable.set()

    async def ask(self, code: int, ext: Mapping[str, object], body: bytes = b"", timeout_s: float = 3.0) -> Command:
        """Return the answer of the other side, whatever its code.

        Raises:
          ConnectionLost: the connection ended first.
          RequestTimeout: it took longer than *timeout_s*.
        """
        opaque = self._next_opaque()
        waiting = _Waiting()
        self._waiting[opaque] = waiting
        try:
            with trio.move_on_after(timeout_s):
                await self._post(self._request(code, ext, body, opaque))
                await waiting.event.wait()
        finally:
            self._waiting.pop(opaque, None)
        if waiting.answer is not None:
            return waiting.answer
        if self.closed:
            raise ConnectionLost(self.address, self._why)
        raise RequestTimeout(self.address, code, timeout_s)

    async def tell(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> None:
        """Send a request that gets no answer.

        Raises:
          ConnectionLost: the connection has ended. If it has not, the request may still be lost.
        """
        await self._post(self._request(code, ext, body, self._next_opaque(), FLAG_ONEWAY))

    def _request(self, code: int, ext: Mapping[str, object], body: bytes, opaque: int, flag: int = 0) -> Command:
        if self._key is not None:
            try:
                ext = self._key.sign(code, ext, body)
            except UnicodeEncodeError:
                _check_fields(ext)
                raise
        return Command(code, ext, body, opaque, flag)

    def _next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque

    async def _post(self, command: Command) -> None:
        while self._outgoing_bytes > OUTGOING_BYTES_MAX and not self.closed:
            await self._drained.wait()
        if self.closed:
            raise ConnectionLost(self.address, self._why)
        try:
            frame = encode_command(command)
        except TypeError:
            _check_fields(command.ext)
            raise
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)
        if self._outgoing_bytes > OUTGOING_BYTES_MAX:
            self._drained = trio.Event()
        self._writable.set()

    async def _write(self) -> None:
        while not self.closed:
            await self._writable.wait()
            self._writable = trio.Event()
            data = b"".join(self._outgoing)
            self._outgoing.clear()
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                self.close("broke while writing")
                return
            self._outgoing_bytes = sum(map(len, self._outgoing))
            if self._outgoing_bytes <= OUTGOING_BYTES_MAX:
                self._drained.set()

    async def _read(self, nursery: trio.Nursery) -> None:
        frames = FrameBuffer(READ_BYTES_MAX, HEADER_BYTES_MAX)
        first = b""
        while not self.closed:
            try:
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._why = self._why_ended(f"broke while reading{_tls_reason(error)}")
                return
            if not data:
                self._why = self._why_ended("was closed by the peer")
                return
            first = first or bytes(data[:SHOWN_BYTES])
            frames.receive_data(bytes(data))
            try:
                for command in frames.commands():
                    self._answered = True
                    self._take(command, nursery)
            except RemoteProtocolError as error:
                self._why = f"was closed: {error}"
                if not self._answered:
                    self._why = f"was closed: the port speaks another protocol, its first bytes are {first!r}"
                log.warning("connection to %s %s", self.address, self._why)
                return

    def _why_ended(self, how: str) -> str:
        if self._answered:
            return how
        hint = "" if isinstance(self._stream, trio.SSLStream) else "; it may require TLS, or speak another protocol"
        return f"{how} without an answer{hint}"

    def _take(self, command: Command, nursery: trio.Nursery) -> None:
        if not command.is_response:
            nursery.start_soon(self._answer, command)
            return
        waiting = self._waiting.pop(command.opaque, None)
        if waiting is None:
            log.debug("answer %d of %s came too late", command.opaque, self.address)
            return
        waiting.answer = command
        waiting.event.set()

    async def _answer(self, command: Command) -> None:
        if self._requests >= REQUESTS_MAX:
            answer = Answer(ResponseCode.SYSTEM_BUSY, remark=f"client already handles {REQUESTS_MAX} requests")
        else:
            self._requests += 1
            try:
                answer = await self._handle(command)
            finally:
                self._requests -= 1
        if command.is_oneway or self.closed:
            return
        reply = Command(answer.code, {}, answer.body, command.opaque, FLAG_RESPONSE, answer.remark)
        with suppress(ConnectionLost):
            await self._post(reply)


def _tls_reason(error: Exception) -> str:
    """Return the TLS error, for example that a certificate is required; trio hides it in the cause."""
    cause = error.__cause__
    return f" ({cause.reason or cause})" if isinstance(cause, ssl.SSLError) else ""


def _check_fields(ext: Mapping[str, object]) -> None:
    """Say which field of a request could not be encoded. Raises ValueError."""
    for name, value in ext.items():
        if isinstance(value, str):
            check_utf8(name, value)
