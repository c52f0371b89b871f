"""STOMP clients of several languages behind one interface: stomp.py in this process, @stomp/stompjs over WebSocket and
Vert.x's client over TCP in processes of their own.
"""

import base64
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import stomp  # type: ignore[import-untyped]
from stomp.utils import Frame  # type: ignore[import-untyped]

from . import fetch
from .process import eventually
from .steered import LIMIT_S, SteeredProcess

T = TypeVar("T")
STALL: Final = 1000  # how many intervals without a heart-beat a client endures
_numbers = count(1)


@dataclass(frozen=True)
class Message:
    """A message that came; *number* counts those of its client."""

    number: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class LoginRefused(RuntimeError):
    """The broker accepted no connection; the text is that of its ERROR."""


class Heard:
    """What came to one client; filled by another thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = 0
        self.messages: list[Message] = []
        self.receipts: set[str] = set()
        self.errors: list[tuple[str, str]] = []  # text, and the receipt of the frame that caused it
        self.beats = 0
        self.connected = 0  # how often

    def note(self, change: Callable[["Heard"], object]) -> None:
        with self._changed:
            change(self)
            self._changed.notify_all()

    def wait(self, look: Callable[["Heard"], T | None]) -> T:
        """Return what *look* finds once it is not None."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while (found := look(self)) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited in vain; messages {self.messages}, errors {self.errors}")
                self._changed.wait(deadline - time.monotonic())
            return found

    def take(self, number: int) -> list[Message]:
        """Return the next *number* messages."""
        first, end = self._taken, self._taken + number
        self._taken = end
        return self.wait(lambda heard: heard.messages[first:end] if len(heard.messages) >= end else None)


class Client(Protocol):
    """One connected client. All but what is in a transaction waits for its receipt if the library offers that."""

    heard: Heard

    def subscribe(self, destination: str, ack: str = "auto", number: str = "0", **headers: str) -> None: ...

    def unsubscribe(self, destination: str, number: str = "0", **headers: str) -> None: ...

    def send(self, destination: str, body: str | bytes, transaction: str = "", **headers: str) -> None: ...

    def settle(self, message: Message, how: str = "ack", transaction: str = "") -> None: ...

    def begin(self, transaction: str) -> None: ...

    def end(self, how: str, transaction: str) -> None:
        """Commit or abort; *how* is the name of that."""

    def disconnect(self) -> None:
        """Disconnect in order."""

    def drop(self) -> None:
        """Break the connection, and wait until the client knows."""

    def reconnect(self) -> None:
        """Wait for a connection after one that broke: libraries that do not see to it themselves are asked."""


class Clients(Protocol):
    """A client library."""

    def connect(self, address: str, heart_beat: tuple[int, int] = (0, 0), **headers: str) -> Client: ...

    def close(self) -> None:
        """End all clients."""


def named(headers: Mapping[str, str]) -> dict[str, str]:
    """Return *headers* with ``-`` for ``_`` in names that are all lower-case."""
    return {name.replace("_", "-") if name.islower() else name: value for name, value in headers.items()}


# stomp.py

CONNECTIONS: Final = {"1.0": stomp.Connection10, "1.1": stomp.Connection11, "1.2": stomp.Connection12}


class Listener(stomp.ConnectionListener):  # type: ignore[misc]
    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    def on_connected(self, frame: Frame) -> None:
        self._heard.note(lambda heard: setattr(heard, "connected", heard.connected + 1))

    def on_message(self, frame: Frame) -> None:
        message = Message(len(self._heard.messages), dict(frame.headers), frame.body)
        self._heard.note(lambda heard: heard.messages.append(message))

    def on_receipt(self, frame: Frame) -> None:
        self._heard.note(lambda heard: heard.receipts.add(frame.headers["receipt-id"]))

    def on_heartbeat(self) -> None:
        self._heard.note(lambda heard: setattr(heard, "beats", heard.beats + 1))

    def on_error(self, frame: Frame) -> None:
        said = frame.headers["message"], frame.headers.get("receipt-id", "")
        self._heard.note(lambda heard: heard.errors.append(said))


class StompPy:
    """One client of stomp.py."""

    def __init__(self, version: str, address: str, heart_beat: tuple[int, int], headers: dict[str, str]) -> None:
        host, _, port = address.rpartition(":")
        self.heard = Heard()
        self._version = version
        self._headers = headers
        more: dict[str, Any] = {}
        if version != "1.0":
            more = {"heartbeats": heart_beat, "heart_beat_receive_scale": STALL}
        self.connection = CONNECTIONS[version]([(host, int(port))], auto_decode=False, **more)
        self.connection.set_listener("heard", Listener(self.heard))
        try:
            self.connection.connect(wait=True, headers=headers)
        except stomp.exception.ConnectFailedException as error:
            raise LoginRefused(self.heard.wait(lambda heard: heard.errors or None)[-1][0]) from error

    def _receipt(self) -> dict[str, str]:
        return {"receipt": f"receipt-{next(_numbers)}"}

    def _wait(self, receipt: dict[str, str]) -> None:
        def look(heard: Heard) -> bool | None:
            refused = [text for text, cause in heard.errors if cause == receipt["receipt"]]
            if refused:
                raise RuntimeError(refused[0])
            return receipt["receipt"] in heard.receipts or None

        self.heard.wait(look)

    def subscribe(self, destination: str, ack: str = "auto", number: str = "0", **headers: str) -> None:
        receipt = self._receipt()
        self.connection.subscribe(destination, id=number, ack=ack, headers=named(headers) | receipt)
        self._wait(receipt)

    def unsubscribe(self, destination: str, number: str = "0", **headers: str) -> None:
        receipt = self._receipt()
        self.connection.unsubscribe(id=number, headers=named(headers) | receipt)
        self._wait(receipt)

    def send(self, destination: str, body: str | bytes, transaction: str = "", **headers: str) -> None:
        more = {"transaction": transaction} if transaction else self._receipt()
        self.connection.send(destination, body, headers=named(headers) | more)
        if not transaction:
            self._wait(more)

    def settle(self, message: Message, how: str = "ack", transaction: str = "") -> None:
        more = {"transaction": transaction} if transaction else self._receipt()
        words = [message.headers["ack" if self._version == "1.2" else "message-id"]]
        if self._version == "1.1":
            words.append(message.headers["subscription"])
        getattr(self.connection, how)(*words, **more)
        if not transaction:
            self._wait(more)

    def begin(self, transaction: str) -> None:
        self.connection.begin(transaction)

    def end(self, how: str, transaction: str) -> None:
        receipt = self._receipt()
        getattr(self.connection, how)(transaction, headers=receipt)
        self._wait(receipt)

    def disconnect(self) -> None:
        receipt = self._receipt()
        self.connection.disconnect(**receipt)
        self._wait(receipt)

    def drop(self) -> None:
        self.connection.transport.disconnect_socket()
        self._wait_lost()

    def _wait_lost(self) -> None:
        """Wait for the thread of the broken connection, which would close its successor, too."""
        thread = self.connection.transport.io_thread
        thread.join(LIMIT_S)
        assert not thread.is_alive()

    def reconnect(self) -> None:
        def connected() -> bool | None:
            try:
                self.connection.connect(wait=True, headers=self._headers)
            except stomp.exception.ConnectFailedException:
                return None
            return True

        self._wait_lost()
        eventually(connected)


class StompPyClients:
    def __init__(self, version: str) -> None:
        self._version = version
        self._open: list[StompPy] = []

    def connect(self, address: str, heart_beat: tuple[int, int] = (0, 0), **headers: str) -> StompPy:
        self._open.append(StompPy(self._version, address, heart_beat, named(headers)))
        return self._open[-1]

    def close(self) -> None:
        for client in self._open:
            if client.connection.is_connected():
                client.drop()
        self._open.clear()


# steered processes


class Steered(SteeredProcess):
    """A process with STOMP clients."""

    def __init__(self, words: Sequence[str], folder: Path, *, reconnects: bool) -> None:
        self.version = "1.2"
        self.ca = ""  # the file with the broker's authority, for clients with TLS
        self._heard: dict[str, Heard] = {}
        self._open: list[SteeredClient] = []
        self.reconnects = reconnects
        super().__init__(words, folder)

    def hear(self, event: dict[str, Any]) -> None:
        what = event["event"]
        heard = self._heard[event["client"]]
        if what == "message":
            message = Message(event["number"], event["headers"], base64.b64decode(event["body"]))
            heard.note(lambda heard: heard.messages.append(message))
        elif what == "error":
            heard.note(lambda heard: heard.errors.append((event["text"], event["receipt"])))
        else:
            name = {"beat": "beats", "connected": "connected"}[what]
            heard.note(lambda heard: setattr(heard, name, getattr(heard, name) + 1))

    def connect(self, address: str, heart_beat: tuple[int, int] = (0, 0), **headers: str) -> "SteeredClient":
        name = self.new_name("client")
        self._heard[name] = Heard()
        client = SteeredClient(self, name, self._heard[name], address, heart_beat, named(headers))
        self._open.append(client)
        return client

    def close(self) -> None:
        for client in self._open:
            if not client.ended:
                client.forget()
        self._open.clear()


class SteeredClient:
    """One client in a process; its methods are the commands."""

    def __init__(
        self,
        process: Steered,
        name: str,
        heard: Heard,
        address: str,
        heart_beat: tuple[int, int],
        headers: dict[str, str],
    ) -> None:
        self.heard = heard
        self.ended = False
        self._process = process
        self._name = name
        host, _, port = address.rpartition(":")
        place = {"url": f"ws{'s' if process.ca else ''}://{address}/", "host": host, "port": int(port)}
        how = {"version": process.version, "ca": process.ca}
        self._asked = {**place, **how, "heart_beat": heart_beat, "headers": headers}
        try:
            self._call("connect", **self._asked)
        except RuntimeError as error:
            self.forget()  # it would try again and again
            raise LoginRefused(str(error)) from error
        self._connected = 1

    def _call(self, command: str, **arguments: Any) -> None:
        self._process.call(command, client=self._name, **arguments)

    def subscribe(self, destination: str, ack: str = "auto", number: str = "0", **headers: str) -> None:
        self._call("subscribe", destination=destination, ack=ack, number=number, headers=named(headers))

    def unsubscribe(self, destination: str, number: str = "0", **headers: str) -> None:
        self._call("unsubscribe", destination=destination, number=number, headers=named(headers))

    def send(self, destination: str, body: str | bytes, transaction: str = "", **headers: str) -> None:
        is_text = isinstance(body, str)
        raw = body.encode() if isinstance(body, str) else body
        said = {"destination": destination, "body": base64.b64encode(raw).decode(), "is_text": is_text}
        self._call("send", **said, transaction=transaction, headers=named(headers))

    def settle(self, message: Message, how: str = "ack", transaction: str = "") -> None:
        self._call("settle", number=message.number, how=how, transaction=transaction)

    def begin(self, transaction: str) -> None:
        self._call("begin", transaction=transaction)

    def end(self, how: str, transaction: str) -> None:
        self._call("end", how=how, transaction=transaction)

    def disconnect(self) -> None:
        self.ended = True
        self._call("disconnect")

    def forget(self) -> None:
        """End whatever there is."""
        self.ended = True
        self._call("forget")

    def drop(self) -> None:
        self._connected = self.heard.connected
        self._call("drop")

    def reconnect(self) -> None:
        if self._process.reconnects:
            before = self._connected
            self._connected = self.heard.wait(lambda heard: heard.connected if heard.connected > before else None)
        else:
            eventually(self._connect_again)

    def _connect_again(self) -> bool | None:
        try:
            self._call("connect", **self._asked)
        except RuntimeError:
            return None
        return True


def node_words() -> list[str]:
    """Return the command of the process with @stomp/stompjs."""
    return fetch.node_program("node-stomp", fetch.HERE / "stomp" / "client.js")


def java_words() -> list[str]:
    """Return the command of the process with Vert.x's client."""
    words = [fetch.tool("java"), "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
    return [*words, "-cp", fetch.stomp_driver(), "interop.StompDriver"]
