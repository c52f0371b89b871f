"""The server side of WebSocket (RFC 6455) as a byte stream over another transport, plain or TLS.

Message boundaries are ignored: the payloads of all binary frames form one byte stream, as MQTT over WebSocket requires
(MQTT 5 section 6). Payload is passed on as it arrives, so even a long frame takes no memory. The HTTP request is
limited in size, and control frames have 125 bytes at most. A refusal is an HTTP response whose body states the reason.
"""

import contextlib
from collections.abc import Collection, Sequence
from http import HTTPStatus
from typing import Final, TypeAlias, final
from urllib.parse import urlsplit

import trio
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason, FrameProtocol
from wsproto.handshake import H11Handshake
from wsproto.utilities import RemoteProtocolError as Rejected

from martlet.contracts import Buffer, WebSocket
from martlet.errors import RemoteProtocolError
from martlet.net.transports import Transport

__all__ = ["WebSocketTransport", "may_connect"]

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

# Encodes frames. `Connection` cannot do that: after it has received a close frame it sends no more data, although
# earlier requests must still be answered.
FRAMES: Final = FrameProtocol(client=False, extensions=[])
HEAD_END: Final = b"\r\n\r\n"
HEAD_BYTES_MAX: Final = 32768  # of the HTTP request; cookies of a site can take most of it
PAYLOAD_BYTES: Final = 262144  # largest payload of a frame sent by the server
RECEIVE_BYTES: Final = 4096  # bytes parsed at once: up to hundreds of tiny frames, of about 8 us each
REASON_CHARACTERS_MAX: Final = 500  # of a refusal, which quotes the client's request
UNSENT_PONG_BYTES_MAX: Final = 4096  # above this number of bytes, pings are not answered (RFC 6455 5.5.3 allows that)
# Hosts of web pages that this machine serves itself. A page from another host could use a broker that only this machine
# should reach.
LOCAL: Final = frozenset(("localhost", "127.0.0.1", "::1"))


@final
class WebSocketTransport:
    """A WebSocket over *inner*; *first* holds the bytes that were read to detect it."""

    __slots__ = (
        "_close_frame",
        "_closed",
        "_ended",
        "_failure",
        "_frames",
        "_head",
        "_inner",
        "_opened",
        "_payload",
        "_settings",
        "_unparsed",
        "_unsent",
    )

    def __init__(self, inner: Transport, settings: WebSocket, first: bytes) -> None:
        self._inner = inner
        self._settings = settings
        self._head = bytearray()
        self._unparsed = first
        self._frames: Connection | None = None  # set after the handshake
        self._payload = b""  # payload received together with the handshake
        self._unsent = b""
        self._ended = False  # receiving has ended
        self._failure = ""  # why receiving has ended, if the client is at fault
        self._closed = False  # sending has ended
        self._close_frame = b""  # the last frame to send
        self._opened: trio.Event | None = None  # set while a task waits for the end of the handshake

    # receiving

    def receive(self, limit: int) -> bytes | None:
        if self._ended:
            return self._end_or_none()
        if not self._unparsed:
            received = self._inner.receive(min(limit, RECEIVE_BYTES))
            if received is None:
                self._flush()
                return None
            if not received:
                self._ended = True
                return b""
            self._unparsed = received
        raw, self._unparsed = self._unparsed[:RECEIVE_BYTES], self._unparsed[RECEIVE_BYTES:]
        if self._frames is None:
            self._receive_head(raw)
        else:
            self._receive_frames(self._frames, raw)
        self._flush()
        payload, self._payload = self._payload, b""
        return payload or self._end_or_none()

    def _end_or_none(self) -> bytes | None:
        """Return None, or empty at the end of the stream. Raises `RemoteProtocolError` if the client aborted it."""
        if self._failure:
            raise RemoteProtocolError(self._failure)
        return b"" if self._ended else None

    def _receive_head(self, raw: bytes) -> None:
        search_from = max(len(self._head) - len(HEAD_END) + 1, 0)
        self._head += raw
        head_end = self._head.find(HEAD_END, search_from)
        head_size = head_end + len(HEAD_END) if head_end >= 0 else len(self._head) + 1
        if head_size > HEAD_BYTES_MAX:
            if head_end >= 0 or len(self._head) >= HEAD_BYTES_MAX:
                self._reject(f"the HTTP request has more than {HEAD_BYTES_MAX} bytes, such as cookies", 431)
        elif head_end >= 0:
            self._shake_hands(bytes(self._head[:head_size]), bytes(self._head[head_size:]))

    def _shake_hands(self, head: bytes, frame_bytes: bytes) -> None:
        """Answer the HTTP request *head*; *frame_bytes* holds the bytes after it, which are frames."""
        self._head.clear()
        handshake = H11Handshake(ConnectionType.SERVER)
        try:
            handshake.receive_data(head)
        except Rejected as error:
            hint = error.event_hint
            if isinstance(hint, RejectConnection):
                self._reject(f"{error}; this port is for WebSocket", hint.status_code, hint.headers)
            else:
                self._reject(str(error), 400)
            return
        except UnicodeError:
            self._reject("Host or target is not ASCII", 400)
            return
        for request in handshake.events():
            if isinstance(request, Request):
                self._answer(handshake, request, frame_bytes)
                return
        self._reject("no HTTP request", 400)

    def _answer(self, handshake: H11Handshake, request: Request, frame_bytes: bytes) -> None:
        settings, offered = self._settings, request.subprotocols
        subprotocol = next((name for name in offered if name in settings.subprotocols), None)
        origin = next((value for name, value in request.extra_headers if name == b"origin"), b"").decode("latin-1")
        if offered and subprotocol is None:
            accepted = ", ".join(settings.subprotocols)
            self._reject(f"the client offers the subprotocols {', '.join(offered)}; this port has {accepted}", 400)
        elif not may_connect(settings.origins, origin, request.host):
            key = f"; {settings.origins_key} can allow it" if settings.origins_key else ""
            self._reject(f"a web page of origin {origin} may not connect{key}", 403)
        else:
            self._unsent += handshake.send(AcceptConnection(subprotocol=subprotocol))
            assert handshake.connection is not None
            self._frames = handshake.connection
            self._note_opened()
            if frame_bytes:
                self._receive_frames(self._frames, frame_bytes)

    def _reject(self, why: str, status: int, headers: Headers = ()) -> None:
        """Refuse the handshake and end the connection."""
        self._unsent += _response(status, headers, why)
        self._closed = self._ended = True
        self._head.clear()
        self._failure = f"WebSocket handshake refused ({status}): {_printable(why)}"
        self._note_opened()

    def _receive_frames(self, frames: Connection, raw: bytes) -> None:
        frames.receive_data(raw)
        parts: list[bytes] = []
        for event in frames.events():
            if isinstance(event, BytesMessage):
                parts.append(bytes(event.data))
            elif isinstance(event, TextMessage) and self._settings.text:
                parts.append(event.data.encode())
            elif isinstance(event, Ping):
                if len(self._unsent) < UNSENT_PONG_BYTES_MAX:
                    self._unsent += FRAMES.pong(event.payload)
            elif isinstance(event, CloseConnection):
                # A close event without a frame from the client is wsproto's report of a parse error.
                broken = frames.state is ConnectionState.OPEN
                why = f"broke the WebSocket protocol: {event.reason}" if broken else ""
                self._end(event.code, event.reason or "", why)
                break
            elif isinstance(event, TextMessage):
                why = "sent a text frame; this protocol accepts only binary frames"
                self._end(CloseReason.UNSUPPORTED_DATA, "text frames are not accepted", why)
                break
        self._payload += b"".join(parts)

    def _end(self, code: int, reason: str, failure: str) -> None:
        """Stop receiving. Earlier requests are still answered; `close` and `linger` send the close frame."""
        self._ended = True
        self._close_frame = bytes(FRAMES.close(code, reason))
        self._failure = f"peer {failure}" if failure else ""

    # sending

    def send(self, pieces: list[Buffer]) -> int:
        if self._closed:
            self._flush()
            return sum(map(len, pieces))
        if not self._flush() or self._frames is None:
            return 0
        payload, payload_bytes = _join_for_frame(pieces)
        self._unsent += FRAMES.send_data(payload)
        self._flush()
        return payload_bytes

    def _flush(self) -> bool:
        """Send encoded frames; return True if none are left."""
        if self._unsent:
            self._unsent = self._unsent[self._inner.send([self._unsent]) :]
        return not self._unsent

    def pending(self) -> bool:
        return bool(self._unsent) or self._inner.pending()

    async def wait_readable(self) -> None:
        if self._unparsed or self._ended:
            await trio.lowlevel.checkpoint()
        else:
            await self._inner.wait_readable()

    async def wait_writable(self) -> None:
        if self._frames is not None or self._unsent or self._closed:
            await self._inner.wait_writable()
            return
        # The socket is writable, but no application data can be sent before the handshake is over.
        if self._opened is None:
            self._opened = trio.Event()
        await self._opened.wait()

    def _note_opened(self) -> None:
        if self._opened is not None:
            self._opened.set()
            self._opened = None

    def close(self) -> None:
        self._send_close_frame()
        self._inner.close()
        self._note_opened()

    def linger(self) -> None:
        self._send_close_frame()
        self._inner.linger()
        self._note_opened()

    def _send_close_frame(self) -> None:
        """Send the close frame."""
        if not self._closed and self._frames is not None:
            self._closed = True
            self._unsent += self._close_frame or bytes(FRAMES.close(CloseReason.NORMAL_CLOSURE))
            with contextlib.suppress(OSError, trio.ClosedResourceError):
                self._flush()


def _join_for_frame(pieces: Sequence[Buffer]) -> tuple[bytes, int]:
    """Return as many of *pieces* as fit into one frame, joined, and their size in bytes."""
    parts: list[Buffer] = []
    size = 0
    for piece in pieces:
        room = PAYLOAD_BYTES - size
        parts.append(piece if len(piece) <= room else memoryview(piece)[:room])
        size += min(len(piece), room)
        if size == PAYLOAD_BYTES:
            break
    return b"".join(parts), size


def _response(status: int, headers: Headers, why: str) -> bytes:
    """Return an HTTP response with the body *why*, for a human who opens the address in a browser."""
    body = f"{_printable(why)}\n".encode()
    fixed_headers = [
        (b"Connection", b"close"),
        (b"Content-Type", b"text/plain; charset=utf-8"),
        (b"Content-Length", b"%d" % len(body)),
    ]
    lines = [b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())]
    lines += [b"%s: %s" % header for header in (*headers, *fixed_headers)]
    return b"\r\n".join(lines) + HEAD_END + body


def _printable(text: str) -> str:
    """Return *text*, arbitrary bytes of a client, as one printable line of moderate length."""
    return "".join([each if each.isprintable() else "?" for each in text[:REASON_CHARACTERS_MAX]])


def may_connect(origins: Collection[str], origin: str, host: str = "") -> bool:
    """Return whether a web page of *origin* may connect if *origins* are allowed (`WebSocket`).

    A browser lets any page connect over WebSocket, and sends the page's origin.

    Args:
      origin: empty for a client that is no browser.
      host: the broker's host as the client addressed it, from the header Host. A page of the same host is not foreign,
        whatever the ports: a web server beside the broker, or in front of it.
    """
    if not origin or "*" in origins or origin in origins:
        return True
    page = _host_of(origin)
    return page in LOCAL or (page != "" and page == _host_of(f"//{host}"))


def _host_of(url: str) -> str:
    """Return the host in *url*, in lower case; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
