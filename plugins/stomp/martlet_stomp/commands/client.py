"""An administrator's request to a STOMP port, with blocking calls."""

import socket
from typing import Any, Final

import orjson

from martlet.cli.outcome import Unreachable
from martlet.cli.server import ServerSettings, connect
from martlet.errors import MartletError
from martlet_stomp.wire.codec import Limits, decode_head, encode_frame
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import Version

__all__ = ["StompFailed", "browse"]

RECEIVE_BYTES: Final = 65_536
LIMITS: Final = Limits()


class StompFailed(MartletError):
    """The broker refused a request; the text has its reason."""


def browse(settings: ServerSettings, destination: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the session of a new connection, and the rows of the broker's answer to SUBSCRIBE to *destination*.

    Raises:
      Unreachable: nothing answers at the address, or it does not speak STOMP.
      StompFailed: the broker refused the client, or the request.
    """
    login = [("login", settings.user)] if settings.user is not None else []
    if settings.password is not None:
        login.append(("passcode", settings.password.decode()))
    hello = [("accept-version", "1.2"), ("host", settings.host), *login]
    request = [("id", "0"), ("destination", destination)]
    rows: list[dict[str, Any]] = []
    with connect(settings) as stream:
        stream.settimeout(settings.timeout_s)
        frames = _Frames(stream, settings)
        frames.send("CONNECT", hello)
        _, headers, _ = frames.receive("CONNECTED")
        session = headers.get("session", "")
        frames.send("SUBSCRIBE", request)
        while True:
            _, headers, body = frames.receive("MESSAGE")
            if headers.get("browser") == "end":
                frames.send("DISCONNECT", [])
                return session, rows
            rows += orjson.loads(body)


class _Frames:
    """Sends and receives the frames of one connection."""

    def __init__(self, stream: socket.socket, settings: ServerSettings) -> None:
        self._stream = stream
        self._settings = settings
        self._data = bytearray()

    def send(self, command: str, headers: list[tuple[str, str]]) -> None:
        try:
            self._stream.sendall(encode_frame(command, headers, b"", Version.V1_2))
        except OSError as error:
            raise self._closed(str(error)) from error

    def receive(self, wanted: str) -> tuple[str, dict[str, str], bytes]:
        """Return the command, headers and body of the next frame, a *wanted* one. Raises as `browse`."""
        while b"\n\n" not in (data := self._data.lstrip(b"\n")):  # heart-beats may precede a frame
            self._receive_more()
        self._data, end = data, data.index(b"\n\n")
        try:
            command, headers = decode_head(bytes(data[:end]), None if wanted == "CONNECTED" else Version.V1_2, LIMITS)
        except StompError as error:
            raise Unreachable(f"{self._settings.where} does not answer in STOMP; is it a STOMP port?") from error
        begin = end + 2
        stop = begin + int(headers.get("content-length", "0"))  # CONNECTED has no body
        while len(self._data) <= stop:
            self._receive_more()
        body = bytes(self._data[begin:stop])
        del self._data[: stop + 1]
        if command == "ERROR":
            raise StompFailed(f"broker {self._settings.where} refused; {body.decode('utf-8', 'backslashreplace')}")
        if command != wanted:
            raise StompFailed(f"broker {self._settings.where} sent {command}, which was not asked for")
        return command, headers, body

    def _receive_more(self) -> None:
        try:
            data = self._stream.recv(RECEIVE_BYTES)
        except TimeoutError as error:
            text = f"STOMP broker {self._settings.where} did not answer within {self._settings.timeout_s:g} s"
            raise Unreachable(text) from error
        except OSError as error:
            raise self._closed(str(error)) from error
        if not data:
            raise self._closed("is it a STOMP port?")
        self._data += data

    def _closed(self, why: str) -> Unreachable:
        return Unreachable(f"STOMP broker {self._settings.where} closed the connection; {why}")
