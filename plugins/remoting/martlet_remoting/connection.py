"""One remoting peer as a state machine: bytes to commands, and the silence after which it is given up.

Commands may be cut anywhere and come in any number; whatever they ask, their legal order
is free, so the only states are open and broken.
"""

from collections.abc import Iterator, Sized
from typing import Final, final

from martlet.errors import RemoteProtocolError

from .codec import FrameBuffer
from .headers import SendRun
from .packets import Command

__all__ = ["RemotingConnection"]

# How other protocols begin, so that who took the wrong port is told so in words it can show.
HTTP_METHODS: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC", b"CONN")
TLS_HELLO: Final = b"\x16\x03"
HELP: Final = "this port speaks RocketMQ remoting; connect a RocketMQ client of a 4.x or 5.x remoting kind"


@final
class RemotingConnection:
    """The bytes of one peer, and when it was last heard of."""

    __slots__ = ("_beginning", "_frames", "_idle_s", "_last", "sends_in_runs", "waiting")

    def __init__(self, frame_bytes_max: int, idle_s: float, now: float) -> None:
        self._frames = FrameBuffer(frame_bytes_max)
        self._idle_s = idle_s
        self._last = now
        self._beginning = b""
        # What the peer waits for, such as held pulls; while there is any it is right to be silent.
        self.waiting: Sized = ()
        # Whether the handler takes `SendRun`s.
        self.sends_in_runs = False

    @property
    def buffered_bytes(self) -> int:
        """How much is here of a command that is not complete."""
        return self._frames.buffered_bytes

    def receive_data(self, data: bytes, now: float) -> None:
        """Take what the socket gave."""
        if len(self._beginning) < 4:
            self._beginning += data[:4]
        self._last = now
        self._frames.receive_data(data)

    def events(self) -> Iterator[Command | SendRun]:
        """Yield every complete command; where `sends_in_runs` is set, consecutive sends together.

        Raises:
          RemoteProtocolError: the bytes are none; the text says what came instead.
        """
        next_command = self._frames.next_command
        try:
            if self.sends_in_runs and self._frames.may_hold_run():
                yield from self._runs()
            while (command := next_command()) is not None:
                yield command
        except RemoteProtocolError as error:
            if self._beginning.startswith(HTTP_METHODS):
                raise RemoteProtocolError(f"peer speaks HTTP; {HELP}") from error
            if self._beginning.startswith(TLS_HELLO):
                text = "peer speaks TLS; this port has no certificate or refuses TLS, see remoting.tls_cert"
                raise RemoteProtocolError(text) from error
            raise

    def _runs(self) -> Iterator[Command | SendRun]:
        frames = self._frames
        while True:
            sends = frames.next_sends()
            while sends:
                run = SendRun(sends)
                yield run
                taken = run.taken
                if taken:
                    frames.skip_to(sends[taken - 1][2])
                # The one that the handler did not take, and then those after it.
                if taken < len(sends) and (command := frames.next_command()) is not None:
                    yield command
                sends = sends[taken + 1 :]
            if (command := frames.next_command()) is None:
                return
            yield command

    def farewell(self, error: Exception) -> bytes:
        """Words for a peer that speaks HTTP; remoting itself has none."""
        if not self._beginning.startswith(HTTP_METHODS):
            return b""
        body = f"{error}\n".encode()
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def deadline(self) -> float:
        """When the silence has lasted too long."""
        return self._last + self._idle_s

    def handle_timeout(self, now: float) -> None:
        """Raises `RemoteProtocolError` for a peer that has been silent for ``idle_s`` and waits for nothing."""
        if now < self.deadline():
            return
        if len(self.waiting):
            self._last = now
            return
        raise RemoteProtocolError(f"peer was silent for {self._idle_s:g} s; remoting.idle_s is {self._idle_s:g}")
