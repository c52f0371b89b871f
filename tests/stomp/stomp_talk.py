"""A scripted client for the tests. It decodes what it gets by itself, not with the codec of the broker."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from martlet_stomp.codec import encode_frame
from martlet_stomp.packets import Version

__all__ = ["V1_0", "V1_1", "V1_2", "Frame", "Talk", "Wire"]

V1_0, V1_1, V1_2 = Version


class Wire(Protocol):
    """The client's end of a connection."""

    async def send(self, data: bytes) -> None: ...

    async def receive_some(self) -> bytes: ...

    def close(self) -> None: ...


class Frame(NamedTuple):
    """A frame of the broker; ``headers`` has the first value of each name."""

    command: str
    headers: dict[str, str]
    body: bytes


class Talk:
    """One connection; keeps MESSAGE frames until they are asked for."""

    def __init__(self, wire: Wire, version: Version = V1_2) -> None:
        self.wire = wire
        self.version = version
        self.beats = 0  # line ends between frames
        self._data = b""
        self._came: list[Frame] = []
        self._receipts = 0

    # frames

    async def send(self, command: str, body: bytes = b"", /, **headers: Any) -> None:
        """Send a frame; an underscore in the name of a header is a hyphen."""
        pairs = [(name.replace("_", "-"), str(value)) for name, value in headers.items()]
        await self.wire.send(encode_frame(command, pairs, body, self.version))

    async def receive(self) -> Frame:
        """Return the next frame. Raises `EOFError` when the broker closes before."""
        while True:
            stripped = self._data.lstrip(b"\n")
            self.beats += len(self._data) - len(stripped)
            self._data = stripped
            found = _split(self._data, self.version)
            if found is not None:
                frame, end = found
                self._data = self._data[end:]
                return frame
            more = await self.wire.receive_some()
            if not more:
                raise EOFError(f"the broker closed after {self._data!r}")
            self._data += more

    async def expect(self, command: str) -> Frame:
        """Return the next frame that is no MESSAGE, which must be *command*."""
        while True:
            frame = await self.receive()
            if frame.command == command:
                return frame
            assert frame.command == "MESSAGE", frame
            self._came.append(frame)

    async def messages(self, count: int) -> list[Frame]:
        """Return the next *count* MESSAGE frames."""
        while len(self._came) < count:
            frame = await self.receive()
            assert frame.command == "MESSAGE", frame
            self._came.append(frame)
        found, self._came = self._came[:count], self._came[count:]
        return found

    async def bodies(self, count: int) -> list[bytes]:
        return [frame.body for frame in await self.messages(count)]

    # exchanges

    async def connect(self, **headers: Any) -> Frame:
        """Connect, and return CONNECTED."""
        if self.version is not V1_0:
            headers = {"accept_version": self.version.text, "host": "localhost", **headers}
        await self.send("CONNECT", **headers)
        frame = await self.expect("CONNECTED")
        assert frame.headers["version"] == self.version.text
        return frame

    async def ask(self, command: str, body: bytes = b"", /, **headers: Any) -> None:
        """Send a frame, and wait for its receipt."""
        self._receipts += 1
        receipt = f"r{self._receipts}"
        await self.send(command, body, receipt=receipt, **headers)
        assert (await self.expect("RECEIPT")).headers == {"receipt-id": receipt}

    async def subscribe(self, destination: str, **headers: Any) -> None:
        """Subscribe with the id ``1`` unless *headers* say otherwise, and wait for the receipt."""
        await self.ask("SUBSCRIBE", destination=destination, **{"id": "1", **headers})

    async def publish(self, destination: str, body: bytes = b"", /, **headers: Any) -> None:
        """Send a message, and wait for its receipt."""
        await self.ask("SEND", body, destination=destination, content_length=len(body), **headers)

    async def settle(self, command: str, message: Frame, **headers: Any) -> None:
        """Send ACK or NACK for *message*, and wait for the receipt."""
        if self.version is V1_2:
            await self.ask(command, id=message.headers["ack"], **headers)
            return
        if self.version is V1_1:
            headers["subscription"] = message.headers["subscription"]
        await self.ask(command, message_id=message.headers["message-id"], **headers)

    async def rest(self) -> list[Frame]:
        """Return the MESSAGE frames that came until the broker answered a harmless frame."""
        await self.ask("BEGIN", transaction="rest")
        await self.ask("ABORT", transaction="rest")
        found, self._came = self._came, []
        return found

    async def error(self) -> Frame:
        """Return the ERROR frame that comes next, after which the broker must close."""
        frame = await self.expect("ERROR")
        assert await self.closed() is None
        return frame

    async def closed(self) -> Frame | None:
        """Wait until the broker closes the connection; return its last frame."""
        last: Frame | None = None
        while True:
            try:
                last = await self.receive()
            except EOFError:
                assert self._data == b""
                return last

    async def disconnect(self) -> None:
        """Disconnect in order."""
        await self.ask("DISCONNECT")
        assert await self.closed() is None

    def hang_up(self) -> None:
        self.wire.close()


def _split(data: bytes, version: Version) -> tuple[Frame, int] | None:
    """Return the frame at the beginning of *data*, and where it ends; None if it is not complete."""
    head, blank, _ = data.partition(b"\n\n")
    if not blank:
        return None
    command, *lines = head.decode().split("\n")
    plain: Callable[[str], str] = str
    if command != "CONNECTED" and version is not V1_0:
        plain = _unescaped
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        assert colon, data
        headers.setdefault(plain(name), plain(value))
    begin = len(head) + 2
    if "content-length" in headers:
        end = begin + int(headers["content-length"])
        if len(data) <= end:
            return None
        assert data[end] == 0, data
    else:
        end = data.find(0, begin)
        if end < 0:
            return None
    return Frame(command, headers, data[begin:end]), end + 1


def _unescaped(text: str) -> str:
    parts = text.split("\\\\")
    return "\\".join(part.replace("\\c", ":").replace("\\n", "\n").replace("\\r", "\r") for part in parts)
