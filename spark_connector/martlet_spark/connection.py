"""One blocking connection to a broker or name server, for Spark's Python workers, which have no event loop.

Requests may be pipelined: `BrokerConnection.send` returns the number of a request, and `BrokerConnection.receive` the
next answer to any request. Brokers answer pipelined pulls in any order. The body of a large answer is received into a
buffer of its own, without a copy.
"""

import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Final, final

import orjson

from martlet.errors import RemoteProtocolError
from martlet.net.addresses import split_address
from martlet_remoting.wire.codec import READ_BYTES_MAX, encode_command_in_pieces
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.signatures import SigningKey
from martlet_spark.errors import OptionError, ReadError, SparkConnectorError

__all__ = ["CONNECTIONS", "AnswerFrame", "BrokerConnection", "ConnectionBroken", "Connections", "Security", "attempts"]

# length of the frame after this field, length of the header; the first byte of the second, 0, means JSON
PREFIX: Final = Struct(">iI")
READ_BYTES: Final = 16_384  # bytes that are read ahead are copied
CONNECT_S: Final = 5.0
COPIED_BYTES_MAX: Final = 65_536  # a larger body is sent by itself, not copied after its header
# Requests sent before their answers are received: if requests and answers fill the sockets' buffers, both sides wait
# for ever.
TOGETHER_MAX: Final = 64
ANSWER_S: Final = 1.0  # minimum time for an answer, also without retries

# Hints for a certificate that is refused for another reason than its authority, by OpenSSL's number of the reason.
NAMES_OTHERS: Final = "use an address that it names (broker.advertise of the broker), or issue one that names this one"
TLS_HINTS: Final = {
    9: "check the clocks of both machines",  # not valid yet
    10: "renew it",
    62: NAMES_OTHERS,  # host name
    64: NAMES_OTHERS,  # IP address
}

PAUSE_S: Final = 0.1  # between attempts; doubled each time up to a second


def attempts(timeout_s: float) -> Iterator[int]:
    """Yield the number of each attempt, pausing between them, until *timeout_s* have passed; at least two."""
    end, pause_s, number = time.monotonic() + timeout_s, PAUSE_S, 0
    while number < 2 or time.monotonic() < end:
        if number > 1:  # the second follows at once: the first may have used a connection that had been lost before
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
        yield number
        number += 1


class ConnectionBroken(SparkConnectorError):
    """The connection broke, could not be opened, or no answer arrived in time."""


@final
@dataclass(frozen=True, slots=True)
class Security:
    """Security settings of a connection: TLS, and the key that signs requests. Equal settings share connections."""

    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify: bool = True
    signing_key: SigningKey | None = None

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS settings; None without TLS.

        Raises:
          OptionError: a file cannot be read, or has no certificate or key.
        """
        if not self.tls:
            return None
        file = self.ca_file
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            file = " or ".join(filter(None, (self.cert_file, self.key_file)))
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file or None)
        except OSError as error:
            why = error.strerror or str(error)
            text = f"options tlsCa, tlsCert and tlsKey name the file {file}, which cannot be used: {why}"
            raise OptionError(f"{text}; every executor needs it at that path") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@final
class AnswerFrame:
    """One frame of an answer: the number of its request, a response code, header fields as text, and the body."""

    __slots__ = ("body", "code", "ext", "opaque", "remark")

    def __init__(
        self, opaque: int, code: int, ext: Mapping[str, str], remark: str, body: bytearray | memoryview
    ) -> None:
        self.opaque = opaque
        self.code = code
        self.ext = ext
        self.remark = remark
        self.body = body

    def integer(self, name: str) -> int:
        """Return the number in header field *name*.

        Raises:
          RemoteProtocolError: the field is missing or is not a number.
        """
        try:
            return int(self.ext[name])
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"answer {self.code} lacks the number {name}") from error


@final
class BrokerConnection:
    """An open connection to *address*, ``host:port``, which waits up to *timeout_s* for each piece of an answer.

    Raises:
      ConnectionBroken: no connection can be opened.
      ReadError: TLS with the peer fails.
      OptionError: a file of the options for TLS cannot be read.
    """

    def __init__(self, address: str, security: Security, timeout_s: float) -> None:
        self.address = address
        self.security = security
        self._key = security.signing_key
        self._opaque = 0
        self._buffer = bytearray(READ_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # bounds of the received bytes that are not taken yet
        self._is_silent = True  # no byte was received yet
        self.outstanding = 0
        context = security.context()
        with contextlib.ExitStack() as undo:
            try:
                host, port = split_address(address)
                self._socket = undo.enter_context(socket.create_connection((host, port), CONNECT_S))
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if context is not None:
                    self._socket = undo.enter_context(context.wrap_socket(self._socket, server_hostname=host))
                self.set_timeout(timeout_s)
            except ssl.SSLEOFError as error:
                text = f"{address} closed the connection while TLS began, as a port without TLS does"
                raise ConnectionBroken(f"{text}; if it has none, leave out the options that begin with tls") from error
            except OSError as error:
                raise _tls_error(address, error) or ConnectionBroken(
                    f"cannot connect to {address}: {error.strerror or error}"
                ) from error
            undo.pop_all()

    @property
    def buffered(self) -> bool:
        """Whether received bytes are left to take: there may be a frame although the socket is silent."""
        pending = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        return self._end > self._start or pending > 0

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout for each piece of an answer to *timeout_s*, but at least a second."""
        self._socket.settimeout(max(timeout_s, ANSWER_S))

    def fileno(self) -> int:
        """Return the socket's file descriptor, to wait for it."""
        return self._socket.fileno()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()

    def send(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> int:
        """Send a request; return its number."""
        self._opaque += 1
        fields = ext if self._key is None else self._key.sign(code, ext, body)
        pieces = encode_command_in_pieces(Command(code, fields, b"", self._opaque), (body,))
        if len(body) <= COPIED_BYTES_MAX:
            pieces = [b"".join(pieces)]
        try:
            for piece in pieces:
                self._socket.sendall(piece)
        except OSError as error:
            raise self._lost(error) from error
        self.outstanding += 1
        return self._opaque

    def request(self, code: int, ext: Mapping[str, object], body: bytes = b"") -> AnswerFrame:
        """Send a request and return its answer; no other request may be outstanding."""
        opaque = self.send(code, ext, body)
        answer = self.receive()
        if answer.opaque != opaque:
            raise RemoteProtocolError(f"{self.address} answered request {answer.opaque} instead of {opaque}")
        self.outstanding -= 1
        return answer

    def request_all(self, code: int, ext: Sequence[Mapping[str, object]]) -> list[AnswerFrame]:
        """Send a request for each of *ext*, pipelined, and return the answers in the order of *ext*."""
        found: list[AnswerFrame] = []
        for first in range(0, len(ext), TOGETHER_MAX):
            asked = [self.send(code, each) for each in ext[first : first + TOGETHER_MAX]]
            answers = {answer.opaque: answer for answer in (self.receive() for _ in asked)}
            if answers.keys() != set(asked):
                raise RemoteProtocolError(f"{self.address} answered other requests than it was sent")
            self.outstanding -= len(asked)
            found += [answers[opaque] for opaque in asked]
        return found

    def receive(self, room: Callable[[int], memoryview] | None = None) -> AnswerFrame:
        """Return the next frame from the peer; skip requests of the peer. An answer may have several frames.

        *room* is called with the size of the body and returns the buffer to receive it into; None allocates a new one.

        Raises:
          ConnectionBroken: the connection broke, or no answer arrived in time.
          RemoteProtocolError: the peer sent bytes that are no frame.
        """
        while True:
            answer = self._receive(room)
            if answer is not None:
                return answer

    def _receive(self, room: Callable[[int], memoryview] | None) -> AnswerFrame | None:
        length, header_bytes = PREFIX.unpack(self._take(PREFIX.size))
        body_bytes = length - 4 - header_bytes
        if not 4 <= length <= READ_BYTES_MAX or body_bytes < 0 or header_bytes > length:
            raise RemoteProtocolError(f"{self.address} sent a frame of {length} bytes with a header of {header_bytes}")
        try:
            header = orjson.loads(self._take(header_bytes))
            opaque, code, flag = header["opaque"], header["code"], header["flag"]
            ext = header.get("extFields") or {}
            if not (type(opaque) is type(code) is type(flag) is int and type(ext) is dict):
                raise TypeError("type of a field")
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise RemoteProtocolError(f"{self.address} sent a header that is not one of RocketMQ's") from error
        if room is None or not flag & 1:
            body: bytearray | memoryview = self._take(body_bytes)
        else:
            body = room(body_bytes)
            self._take_into(body)
        if not flag & 1:
            return None
        return AnswerFrame(opaque, code, ext, header.get("remark") or "", body)

    def _take(self, size: int) -> bytearray:
        """Return the next *size* bytes from the peer, in a buffer of their own."""
        here = self._end - self._start
        if here < size and size <= READ_BYTES // 4:
            self._fill(size)
            here = self._end - self._start
        if here >= size:
            found = self._buffer[self._start : self._start + size]
            self._start += size
            return found
        found = bytearray(size)
        self._take_into(memoryview(found))
        return found

    def _take_into(self, view: memoryview) -> None:
        """Fill *view* with the next bytes from the peer."""
        here = min(self._end - self._start, len(view))
        view[:here] = self._view[self._start : self._start + here]
        self._start += here
        view = view[here:]
        while view:
            view = view[self._read_into(view) :]

    def _fill(self, size: int) -> None:
        """Read until the buffer has *size* bytes left to take."""
        rest = self._buffer[self._start : self._end]
        self._buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        while self._end < size:
            self._end += self._read_into(self._view[self._end :])

    def _read_into(self, view: memoryview) -> int:
        try:
            count = self._socket.recv_into(view)
        except OSError as error:
            raise self._lost(error) from error
        if not count:
            text = f"{self.address} closed the connection"
            if self._is_silent and not self.security.tls:
                text += " without an answer, as a port does that takes TLS only; if it is one, set the option tls"
            raise ConnectionBroken(text)
        self._is_silent = False
        return count

    def _lost(self, error: OSError) -> SparkConnectorError:
        refused = _tls_error(self.address, error)
        if refused is not None:
            return refused
        why = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return ConnectionBroken(f"connection to {self.address} is lost: {why}")


def _tls_error(address: str, error: OSError) -> ReadError | None:
    """Return the error if the peer refuses TLS or its certificate is refused; None for any other failure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = TLS_HINTS.get(error.verify_code, "name the authority that signed its certificate by the option tlsCa")
        return ReadError(f"the certificate of {address} is not valid: {error.verify_message.rstrip('.')}; {hint}")
    if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        hint = "check that the port takes TLS, and whether the broker asks for a certificate (options tlsCert, tlsKey)"
        return ReadError(f"TLS with {address} failed: {error.reason or error}; {hint}")
    return None


@final
class Connections:
    """Idle connections of this process, which the tasks of one Python worker share."""

    def __init__(self) -> None:
        self._pid = 0
        self._idle: dict[tuple[str, Security], list[BrokerConnection]] = {}

    def borrow(self, address: str, security: Security, timeout_s: float) -> BrokerConnection:
        """Return an open connection, which may turn out to be lost; the caller closes or returns it (`give_back`).

        Raises:
          ConnectionBroken: no connection can be opened.
        """
        self._forget_others()
        idle = self._idle.get((address, security))
        if idle:
            connection = idle.pop()
            connection.set_timeout(timeout_s)
            return connection
        return BrokerConnection(address, security, timeout_s)

    @contextlib.contextmanager
    def lent(self, address: str, security: Security, timeout_s: float) -> Iterator[BrokerConnection]:
        """A connection for the block: returned at its end, or closed if the block fails.

        Raises:
          ConnectionBroken: no connection can be opened.
        """
        with contextlib.ExitStack() as undo:
            connection = self.borrow(address, security, timeout_s)
            undo.callback(connection.close)
            yield connection
            undo.pop_all()
        self.give_back(connection)

    def give_back(self, connection: BrokerConnection) -> None:
        """Keep *connection* for others; close it if answers are outstanding."""
        self._forget_others()
        if connection.outstanding:
            connection.close()
        else:
            self._idle.setdefault((connection.address, connection.security), []).append(connection)

    def close(self) -> None:
        """Close all idle connections."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()

    def _forget_others(self) -> None:
        """Forget connections that were opened before this process was forked: processes must not share one."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._idle = {}


CONNECTIONS: Final = Connections()
