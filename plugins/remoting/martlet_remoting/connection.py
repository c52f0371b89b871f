"""One remoting connection as a state machine: decodes commands and detects silence.

Reads may split commands anywhere. The protocol allows commands in any order, so the only states are open and broken.
"""

import re
from collections.abc import Iterator, Sized
from typing import Final, final

from martlet.errors import RemoteProtocolError

from .codec import FrameBuffer
from .headers import AckRun, SendRun
from .packets import Command

__all__ = ["RemotingConnection"]

# The first bytes of other protocols, so that a client on the wrong port gets an understandable error.
HTTP_METHODS: Final = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"OPTIONS ", b"DELETE ", b"PATCH ", b"CONNECT ")
HTTP2: Final = b"PRI * HTTP/2"
STOMP_FRAMES: Final = (b"CONNECT\n", b"CONNECT\r\n", b"STOMP\n", b"STOMP\r\n")
MQTT_CONNECT: Final = re.compile(rb"\x10[\x80-\xff]{0,3}[\x00-\x7f](\x00\x04MQTT|\x00\x06MQIsdp)")
TLS_HELLO: Final = b"\x16\x03"
BEGINNING_BYTES: Final = 16  # the longest of these
THIS_PORT: Final = "this port speaks RocketMQ remoting"
USE_REMOTING: Final = "connect a RocketMQ client that uses the remoting protocol"


def _other_protocol(beginning: bytes) -> str:
    """Return which other protocol a client seems to speak, by its first bytes, and what to do; empty if unknown."""
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


@final
class RemotingConnection:
    """The received bytes of one connection, and when it last received any."""

    __slots__ = ("_beginning", "_frames", "_idle_s", "_last", "takes_runs", "waiting")

    def __init__(self, frame_bytes_max: int, idle_s: float, now: float) -> None:
        self._frames = FrameBuffer(frame_bytes_max)
        self._idle_s = idle_s
        self._last = now
        self._beginning = b""
        # What the client waits for, such as held pulls; until it is empty, the client may be silent.
        self.waiting: Sized = ()
        # Whether the handler accepts runs of requests.
        self.takes_runs = False

    @property
    def buffered_bytes(self) -> int:
        """The size of the incomplete command."""
        return self._frames.buffered_bytes

    def receive_data(self, data: bytes, now: float) -> None:
        """Add bytes from the socket."""
        if len(self._beginning) < BEGINNING_BYTES:
            self._beginning += bytes(data[:BEGINNING_BYTES])
        self._last = now
        self._frames.receive_data(data)

    def events(self) -> Iterator[Command | SendRun | AckRun]:
        """Yield every complete command; if `takes_runs` is set, consecutive frequent requests as a run.

        Raises:
          RemoteProtocolError: the bytes are not a valid command; the text says which other protocol they may be.
        """
        frames = self._frames
        try:
            while True:
                if self.takes_runs and (run := frames.next_run()) is not None:
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
        """Yield the requests that the handler does not take as commands, and what is between them as runs again."""
        frames = self._frames
        while len(run):
            if taken_to := run.taken_to():
                frames.skip_to(taken_to)
            if run.taken < run.count and (command := frames.next_command()) is not None:
                command.unusual = True
                yield command
            run = run.rest()
            if len(run):
                yield run

    def farewell(self, error: Exception) -> bytes:
        """Return an HTTP error for a client that speaks HTTP; a remoting client gets nothing."""
        if not self._beginning.startswith(HTTP_METHODS):
            return b""
        body = f"{error}\n".encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def deadline(self) -> float:
        """Return when the connection has been silent for too long."""
        return self._last + self._idle_s

    def handle_timeout(self, now: float) -> None:
        """Raise `RemoteProtocolError` if the client was silent for ``idle_s`` and waits for nothing."""
        if now < self.deadline():
            return
        if len(self.waiting):
            self._last = now
            return
        raise RemoteProtocolError(f"client was silent for {self._idle_s:g} s; remoting.idle_s is {self._idle_s:g}")
