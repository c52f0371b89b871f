"""One remoting connection as a state machine: decodes commands and detects silence.

Reads may split commands anywhere. The protocol allows commands in any order, so the only states are open and broken.
"""

import re
from collections.abc import Callable, Iterator, Sized
from struct import Struct
from typing import Final, final

from martlet.errors import Refused, RemoteProtocolError
from martlet_remoting.wire.codec import FrameBuffer
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.runs import AckRun, RunSigners, SendRun

__all__ = ["RemotingConnection"]

# The first bytes of other protocols, so that a client on the wrong port gets an understandable error.
HTTP_METHODS: Final = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS ", b"DELETE ", b"PATCH ", b"CONNECT ")
HTTP2: Final = b"PRI * HTTP/2"
# The head of an HTTP/2 frame: a length of 24 bits, type, flags, stream (RFC 9113 4.1).
HTTP2_HEAD: Final = Struct(">BHBBI")
LAST_STREAM: Final = Struct(">II")  # the content of a GOAWAY: the last handled stream, and the error code
SETTINGS: Final = HTTP2_HEAD.pack(0, 0, 4, 0, 0)
EVERY_STREAM: Final = (1 << 31) - 1  # as the last handled stream: the client retries none over another connection
PREFACE_BYTES: Final = 24  # an HTTP/2 client's bytes before its first frame
HTTP2_BYTES_MAX: Final = 65536  # read from an HTTP/2 client that makes no call
HEADERS, GO_AWAY = 1, 7
PROTOCOL_ERROR: Final = 1
DEBUG_BYTES_MAX: Final = 1024
STOMP_FRAMES: Final = (b"CONNECT\n", b"CONNECT\r\n", b"STOMP\n", b"STOMP\r\n")
MQTT_CONNECT: Final = re.compile(rb"\x10[\x80-\xff]{0,3}[\x00-\x7f](\x00\x04MQTT|\x00\x06MQIsdp)")
TLS_HELLO: Final = b"\x16\x03"
BEGINNING_BYTES: Final = 16  # the longest of these beginnings
THIS_PORT: Final = "this port speaks RocketMQ remoting"
USE_REMOTING: Final = "connect a RocketMQ client that uses the remoting protocol"


def _other_protocol(beginning: bytes) -> str:
    """Return the other protocol of a client, guessed by its first bytes, with a hint; empty if unknown."""
    if beginning.startswith(HTTP_METHODS):
        return f"client speaks HTTP; {THIS_PORT}, {USE_REMOTING}"
    if beginning.startswith(HTTP2):
        return f"client speaks HTTP/2, as RocketMQ's gRPC clients do; {THIS_PORT}, {USE_REMOTING}"
    if beginning.startswith(TLS_HELLO):
        return "client speaks TLS; this port has no certificate or refuses TLS, see remoting.tls_cert"
    if beginning.startswith(STOMP_FRAMES):
        return f"client speaks STOMP; {THIS_PORT}, connect to the STOMP port of a broker, usually 61613"
    if MQTT_CONNECT.match(beginning):
        return f"client speaks MQTT; {THIS_PORT}, connect to the MQTT port of a broker, usually 1883"
    return ""


def _has_call(data: bytearray) -> bool:
    """Return whether an HTTP/2 client has sent the HEADERS of a call."""
    at = PREFACE_BYTES
    while len(data) - at >= HTTP2_HEAD.size:
        high, low, kind, _, _ = HTTP2_HEAD.unpack_from(data, at)
        if kind == HEADERS:
            return True
        at += HTTP2_HEAD.size + (high << 16 | low)
    return False


def _go_away(text: str) -> bytes:
    """Return a GOAWAY frame; gRPC clients show its debug data (RFC 9113 6.8)."""
    debug = text.encode()[:DEBUG_BYTES_MAX]
    return HTTP2_HEAD.pack(0, 8 + len(debug), GO_AWAY, 0, 0) + LAST_STREAM.pack(EVERY_STREAM, PROTOCOL_ERROR) + debug


def _no_answers(refused: Refused) -> bytes:
    return b""


@final
class RemotingConnection:
    """The received bytes of one connection, and the time of the last ones.

    *key* names the setting of *frame_bytes_max* in errors.
    """

    __slots__ = (
        "_beginning",
        "_frames",
        "_http2",
        "_idle_s",
        "_last",
        "refuse_waiting",
        "send",
        "signers",
        "takes_runs",
        "waiting",
    )

    def __init__(self, frame_bytes_max: int, idle_s: float, now: float, key: str = "") -> None:
        self._frames = FrameBuffer(frame_bytes_max, key=key)
        self._idle_s = idle_s
        self._last = now
        self._beginning = b""
        self._http2: bytearray | None = None  # received from a client that speaks HTTP/2
        # Function that sends to the client, or None. A client of gRPC needs an answer before the error: if its first
        # connection ends before its call, it reconnects at once, until the call's timeout.
        self.send: Callable[[bytes], None] | None = None
        # Requests that the client waits for, such as held pulls; until there are none, the client may be silent.
        self.waiting: Sized = ()
        # Ends these requests, and returns the answers that refuse them.
        self.refuse_waiting: Callable[[Refused], bytes] = _no_answers
        # Whether the handler accepts runs of requests.
        self.takes_runs = False
        # Finds the signers of the requests in runs; None if signatures do not matter.
        self.signers: RunSigners | None = None

    @property
    def buffered_bytes(self) -> int:
        """The size of the incomplete command."""
        return self._frames.buffered_bytes + len(self._http2 or b"")

    def receive_data(self, data: bytes, now: float) -> None:
        """Add bytes from the socket."""
        if len(self._beginning) < BEGINNING_BYTES:
            self._beginning += bytes(data[:BEGINNING_BYTES])
            if self.send is not None and self._beginning.startswith(HTTP2) and not self._frames.buffered_bytes:
                self._http2 = bytearray()
                self.send(SETTINGS)
        self._last = now
        if self._http2 is not None:
            self._http2 += data
            return
        self._frames.receive_data(data)

    def events(self) -> Iterator[Command | SendRun | AckRun]:
        """Yield every complete command; if `takes_runs` is set, yield consecutive frequent requests as a run.

        Raises:
          RemoteProtocolError: the bytes are not a valid command; the text names another protocol that they may be.
        """
        frames = self._frames
        if self._http2 is not None:
            if _has_call(self._http2) or len(self._http2) > HTTP2_BYTES_MAX:
                raise RemoteProtocolError(_other_protocol(self._beginning))
            return
        try:
            while True:
                if self.takes_runs and (run := frames.next_run(self.signers)) is not None:
                    yield run
                    if run.taken < run.count:
                        yield from self._rest_of(run)
                    elif not frames.skip_to(run.end):
                        return
                elif (command := frames.next_command()) is not None:
                    yield command
                else:
                    return
        except RemoteProtocolError as error:
            if hint := _other_protocol(self._beginning):
                raise RemoteProtocolError(hint) from error
            raise

    def _rest_of(self, run: SendRun | AckRun) -> Iterator[Command | SendRun | AckRun]:
        """Yield requests that the handler has not taken as commands, and the requests between them as runs again."""
        frames = self._frames
        while len(run):
            if taken_to := run.taken_to():
                frames.skip_to(taken_to)
            if run.taken < run.count and (command := frames.next_command()) is not None:
                command.unusual = True
                yield command
            if self.signers is not None and not self.signers.is_current(run.signer):
                return  # the credentials changed during that command
            run = run.rest()
            if len(run):
                yield run

    def farewell(self, error: Exception) -> bytes:
        """Return the last bytes for the client: an error that HTTP or gRPC understands.

        A remoting client gets only the answers to requests that wait, if they are refused.
        """
        if self._beginning.startswith(HTTP2):
            return (SETTINGS if self._http2 is None else b"") + _go_away(str(error))
        if isinstance(error, Refused):
            return self.refuse_waiting(error)
        if not self._beginning.startswith(HTTP_METHODS):
            return b""
        body = f"{error}\n".encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def deadline(self) -> float:
        """Return the time at which the connection will have been silent for too long."""
        return self._last + self._idle_s

    def handle_timeout(self, now: float) -> None:
        """Raise `RemoteProtocolError` if the client was silent for ``idle_s`` and waits for no request."""
        if now < self.deadline():
            return
        if len(self.waiting):
            self._last = now
            return
        raise RemoteProtocolError(f"client was silent for {self._idle_s:g} s; remoting.idle_s is {self._idle_s:g}")
