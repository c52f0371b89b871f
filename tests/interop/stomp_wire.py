"""A STOMP client that sends what a test says, frame by frame, and hides nothing of what comes."""

import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

PATIENCE_S: Final = 120.0
BLOCK_BYTES: Final = 1 << 16
NAMES: Final = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", ":": "\\c"}
ESCAPES: Final = {escape: char for char, escape in NAMES.items()}
_numbers = count(1)


@dataclass(frozen=True)
class Frame:
    """A frame from the broker; of a repeated header, the first one."""

    command: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        return self.body.decode()


def frame(command: str, body: bytes | str = b"", **headers: str) -> bytes:
    """Return the bytes of a frame. In names of headers that are all lower-case, ``_`` stands for ``-``."""
    lines = [command]
    for name, value in headers.items():
        escaped = "".join([NAMES.get(char, char) for char in value]) if command != "CONNECT" else value
        lines.append(f"{name.replace('_', '-') if name.islower() else name}:{escaped}")
    raw = body.encode() if isinstance(body, str) else body
    return "\n".join([*lines, "", ""]).encode() + raw + b"\0"


class Closed(ConnectionError):
    """The broker closed the connection."""


class Wire:
    """One connection. All that waits fails after `PATIENCE_S`.

    ``connected`` is the answer to `connect`.
    """

    connected: Frame

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._data = b""
        self._kept: list[Frame] = []

    def connect(self, **headers: str) -> None:
        """Send CONNECT with a login that each broker accepts, and wait for the answer."""
        usual = {"accept_version": "1.2", "host": "/", "login": "guest", "passcode": "guest"}
        self.send("CONNECT", **{**usual, **headers})
        self.connected = self.read()

    def send(self, command: str, body: bytes | str = b"", **headers: str) -> None:
        self.socket.sendall(frame(command, body, **headers))

    def ask(self, command: str, body: bytes | str = b"", **headers: str) -> Frame:
        """Send a frame with a receipt; return its RECEIPT or the ERROR; MESSAGE frames are kept for `message`."""
        receipt = f"r{next(_numbers)}"
        self.send(command, body, receipt=receipt, **headers)
        return self.answer(receipt)

    def do(self, command: str, body: bytes | str = b"", **headers: str) -> None:
        """Send a frame, and see it succeed."""
        answer = self.ask(command, body, **headers)
        assert answer.command == "RECEIPT", answer

    def answer(self, receipt: str) -> Frame:
        while True:
            found = self.read()
            if found.command == "ERROR" or (found.command, found.headers.get("receipt-id")) == ("RECEIPT", receipt):
                return found
            self._kept.append(found)

    def subscribe(self, destination: str, ack: str = "auto", number: str = "0", **headers: str) -> None:
        self.do("SUBSCRIBE", id=number, destination=destination, ack=ack, **headers)

    def publish(self, destination: str, *bodies: str, **headers: str) -> None:
        for body in bodies:
            self.do("SEND", body, destination=destination, **{"persistent": "true", **headers})

    def message(self) -> Frame:
        """Return the next MESSAGE."""
        found = self._kept.pop(0) if self._kept else self.read()
        assert found.command == "MESSAGE", found
        return found

    def messages(self, number: int) -> list[Frame]:
        return [self.message() for _ in range(number)]

    def until(self, body: str) -> list[str]:
        """Return the bodies that come before *body*."""
        found: list[str] = []
        while (text := self.message().text) != body:
            found.append(text)
        return found

    def settle(self, command: str, message: Frame, **headers: str) -> None:
        """Send ACK or NACK of STOMP 1.2, and see it succeed."""
        self.do(command, id=message.headers["ack"], **headers)

    def read(self) -> Frame:
        """Return the next frame. Raises `Closed`."""
        while (found := self._parsed()) is None:
            self.receive()
        return found

    def has_message(self) -> bool:
        """Whether `message` returns at once."""
        if not self._kept and (found := self._parsed()) is not None:
            self._kept.append(found)
        return bool(self._kept)

    def wait_beat(self) -> None:
        """Wait for a heart-beat: a line feed with no frame around it."""
        assert self._data.strip(b"\n\r") == b"", self._data
        if self._data:  # what may follow a frame
            self._data = b""
        self.receive()
        assert self._data[:1] in (b"\n", b"\r"), self._data

    def is_closed(self) -> bool:
        """Whether the broker closes the connection, instead of answering further frames."""
        try:
            for _ in range(3):  # an ERROR may be about something earlier
                answer = self.ask("SEND", "still there", destination="/queue/probe")
                if answer.command == "RECEIPT":
                    break
        except ConnectionError:
            return True
        return False

    def wait_closed(self) -> None:
        """Wait until the broker closes the connection."""
        try:
            while True:
                self.read()
        except ConnectionError:
            return

    def leave(self) -> None:
        """Disconnect, and wait until the broker has closed the connection."""
        self.do("DISCONNECT")
        self.wait_closed()
        self.close()

    def close(self) -> None:
        """End the connection without DISCONNECT."""
        self.socket.close()

    def receive(self) -> None:
        """Wait for bytes. Raises `Closed`."""
        data = self.socket.recv(BLOCK_BYTES)
        if not data:
            raise Closed
        self._data += data

    def _parsed(self) -> Frame | None:
        data = self._data.lstrip(b"\r\n")
        head, blank, rest = data.partition(b"\n\n")
        if not blank:
            return None
        command, *lines = head.decode().split("\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers.setdefault(name, "".join(_unescaped(value)))
        length = int(headers["content-length"]) if "content-length" in headers else rest.find(b"\0")
        if not 0 <= length < len(rest):
            return None
        assert rest[length] == 0, rest[: length + 1]
        self._data = rest[length + 1 :]
        return Frame(command, headers, rest[:length])


def next_message(*wires: Wire) -> tuple[Wire, Frame]:
    """Return the next MESSAGE that comes to one of *wires*."""
    while True:
        for wire in wires:
            if wire.has_message():
                return wire, wire.message()
        ready, _, _ = select.select([wire.socket for wire in wires], (), (), PATIENCE_S)
        assert ready, "no message came"
        for wire in wires:
            if wire.socket in ready:
                wire.receive()


def _unescaped(value: str) -> Iterator[str]:
    chars = iter(value)
    for char in chars:
        yield char if char != "\\" else ESCAPES[f"\\{next(chars)}"]
