"""Browsers of a web application: STOMP 1.2 over WebSocket to Spring's relay, many in one process."""

from collections.abc import Callable
from contextlib import suppress
from typing import Self, final

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Request, TextMessage

from martlet_stomp.wire.codec import Limits, decode_head, encode_frame
from martlet_stomp.wire.packets import Version

__all__ = ["Browser"]

RECEIVE_BYTES = 65_536


@final
class Browser:
    """One session of *user*, with what it was told."""

    def __init__(self, user: str, stream: trio.SocketStream) -> None:
        self.user = user
        self.bodies: list[str] = []
        self._stream = stream
        self._web = WSConnection(ConnectionType.CLIENT)
        self._text = ""
        self._receipts: set[str] = set()
        self._is_connected = False
        self.has_ended = False
        self._changed = trio.Event()
        self._scope = trio.CancelScope()

    @classmethod
    async def open(cls, nursery: trio.Nursery, port: int, user: str) -> Self:
        """Return a session that is subscribed to its user's queue and to the news."""
        browser = cls(user, await trio.open_tcp_stream("127.0.0.1", port))
        request = Request(host=f"127.0.0.1:{port}", target=f"/ws?{user}", subprotocols=["v12.stomp"])
        await browser._stream.send_all(browser._web.send(request))
        nursery.start_soon(browser._receive)
        await browser._wait(lambda: browser._is_connected)
        personal = {"destination": "/user/queue/notify", "auto-delete": "true", "durable": "false"}
        await browser._subscribe("0", personal)
        await browser._subscribe("1", {"destination": "/topic/news"})
        return browser

    async def _subscribe(self, name: str, headers: dict[str, str]) -> None:
        await self._send("SUBSCRIBE", {"id": name, "receipt": f"sub-{name}", **headers})
        await self._wait(lambda: f"sub-{name}" in self._receipts)

    async def wait_body(self, body: str) -> None:
        """Wait until *body* has come."""
        await self._wait(lambda: body in self.bodies)

    async def wait_ended(self) -> None:
        """Wait until the application or the broker has ended the session."""
        while not self.has_ended:
            await self._changed.wait()

    def close(self) -> None:
        """Leave without a word."""
        self._scope.cancel()

    async def _wait(self, look: Callable[[], bool]) -> None:
        while not look():
            if self.has_ended:
                raise EOFError(f"the session of {self.user} has ended; {self.bodies}")
            await self._changed.wait()

    async def _send(self, command: str, headers: dict[str, str]) -> None:
        frame = encode_frame(command, list(headers.items()), b"", Version.V1_2)
        await self._stream.send_all(self._web.send(TextMessage(frame.decode())))

    async def _receive(self) -> None:
        with self._scope, suppress(trio.BrokenResourceError):
            async with self._stream:
                while not self.has_ended:
                    data = await self._stream.receive_some(RECEIVE_BYTES)
                    self._web.receive_data(data or None)
                    for event in self._web.events():
                        await self._take(event)
        self.has_ended = True
        self._tell()

    async def _take(self, event: object) -> None:
        if isinstance(event, AcceptConnection):
            await self._send("CONNECT", {"accept-version": "1.2", "heart-beat": "0,0", "host": "martlet"})
        elif isinstance(event, TextMessage | BytesMessage):
            self._text += event.data if isinstance(event, TextMessage) else bytes(event.data).decode()
            while "\0" in self._text:
                frame, _, self._text = self._text.partition("\0")
                self._hear(frame.lstrip("\n"))
        elif isinstance(event, CloseConnection):
            self.has_ended = True

    def _hear(self, frame: str) -> None:
        head, _, body = frame.partition("\n\n")
        command, headers = decode_head(head.encode(), None if head.startswith("CONNECTED") else Version.V1_2, Limits())
        if command == "CONNECTED":
            self._is_connected = True
        elif command == "RECEIPT":
            self._receipts.add(headers["receipt-id"])
        elif command == "MESSAGE":
            self.bodies.append(body)
        else:
            self.has_ended = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
