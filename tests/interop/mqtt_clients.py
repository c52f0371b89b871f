"""MQTT clients of several languages behind one interface: paho-mqtt in this process, MQTT.js and Paho's Java client in
processes of their own that are steered by lines of JSON.
"""

import base64
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from . import fetch
from .steered import LIMIT_S, SteeredProcess

T = TypeVar("T")
KEEP_ALIVE_S = 600  # so that a machine that stands still for a while costs no connection


@dataclass(frozen=True)
class Message:
    """A message as every client gives or shows it; all after ``retain`` is for MQTT 5."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    user: tuple[tuple[str, str], ...] = ()
    content_type: str | None = None
    response_topic: str | None = None
    correlation: bytes | None = None
    expiry_s: int | None = None
    is_text: bool = False

    def plain(self) -> "Message":
        """Return what a client of MQTT 3.1.1 sends and gets of it."""
        return Message(self.topic, self.payload, self.qos, self.retain)


@dataclass(frozen=True)
class Link:
    """Where and how to connect."""

    url: str  # mqtt, mqtts, ws or wss
    version: int = 5  # 4 is MQTT 3.1.1
    ca: str | None = None
    user: str | None = None
    password: str | None = None


class LoginRefused(Exception):
    """The broker accepted no connection; the text is the client's."""


class Inbox:
    """What came to one client, in its order; filled by another thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[Message] = []
        self.on_message: Callable[[Message], None] = lambda message: None

    def add(self, message: Message) -> None:
        self.on_message(message)
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def wait(self, count: int) -> list[Message]:
        """Return all messages once there are *count*."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while len(self._messages) < count:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{len(self._messages)} messages instead of {count} came: {self._messages}")
                self._changed.wait(deadline - time.monotonic())
            return list(self._messages)

    def now(self) -> list[Message]:
        with self._changed:
            return list(self._messages)


class Client(Protocol):
    """One connected client."""

    inbox: Inbox
    session_present: bool

    def subscribe(self, topic_filter: str, qos: int = 2) -> int:
        """Subscribe; return the QoS that was granted."""

    def publish(self, message: Message) -> None:
        """Publish, to the end of the exchange."""

    def disconnect(self) -> None: ...

    def drop(self) -> None:
        """End the connection without DISCONNECT."""


class Clients(Protocol):
    """A client library."""

    def connect(
        self, link: Link, client_id: str, *, clean: bool = True, expiry_s: int = 0, will: Message | None = None
    ) -> Client: ...

    def close(self) -> None:
        """End whatever a failed test left."""


# paho-mqtt


def _properties(kind: int, message: Message) -> Properties:
    found = Properties(kind)  # type: ignore[no-untyped-call]
    values = {
        "PayloadFormatIndicator": 1 if message.is_text else None,
        "MessageExpiryInterval": message.expiry_s,
        "ContentType": message.content_type,
        "ResponseTopic": message.response_topic,
        "CorrelationData": message.correlation,
        "UserProperty": list(message.user) or None,
    }
    for name, value in values.items():
        if value is not None:
            setattr(found, name, value)
    return found


def _shown(message: paho.MQTTMessage) -> Message:
    found = vars(message.properties) if message.properties is not None else {}
    return Message(
        message.topic,
        bytes(message.payload),
        message.qos,
        message.retain,
        tuple(found.get("UserProperty", ())),
        found.get("ContentType"),
        found.get("ResponseTopic"),
        found.get("CorrelationData"),
        found.get("MessageExpiryInterval"),
        found.get("PayloadFormatIndicator") == 1,
    )


class Paho:
    """One client of paho-mqtt."""

    def __init__(self, link: Link, client_id: str, *, clean: bool, expiry_s: int, will: Message | None) -> None:
        url = urlsplit(link.url)
        self.inbox = Inbox()
        self.session_present = False
        self._is_newest = link.version == 5
        self._granted: dict[int | None, int] = {}
        self._changed = threading.Condition()
        self._ended = ""  # why the connection ended
        transport = "websockets" if url.scheme in ("ws", "wss") else "tcp"
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if self._is_newest else clean,
            protocol=MQTTProtocolVersion(link.version),
            transport=transport,  # type: ignore[arg-type]
            reconnect_on_failure=False,
        )
        if transport == "websockets":
            self._client.ws_set_options(path="/")
        if link.ca is not None:
            self._client.tls_set(link.ca)
        if link.user is not None:
            self._client.username_pw_set(link.user, link.password)
        self._client.connect_timeout = LIMIT_S
        self._client.on_message = lambda client, data, message: self.inbox.add(_shown(message))
        self._client.on_connect = self._connected
        self._client.on_subscribe = self._subscribed
        self._client.on_disconnect = self._disconnected
        if will is not None:
            properties = _properties(PacketTypes.WILLMESSAGE, will) if self._is_newest else None
            self._client.will_set(will.topic, will.payload, will.qos, will.retain, properties)
        assert url.hostname is not None
        assert url.port is not None
        if self._is_newest:
            asked = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            asked.SessionExpiryInterval = expiry_s
            self._client.connect(url.hostname, url.port, KEEP_ALIVE_S, clean_start=clean, properties=asked)
        else:
            self._client.connect(url.hostname, url.port, KEEP_ALIVE_S)
        self._client.loop_start()
        answer = self._wait(lambda: self._connack)
        if answer.is_failure:
            self.wait_end()
            raise LoginRefused(str(answer))

    _connack: Any = None

    def _connected(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        with self._changed:
            self.session_present = flags.session_present
            self._connack = reason
            self._changed.notify_all()

    def _subscribed(self, client: Any, data: Any, number: int, reasons: Sequence[Any], properties: Any) -> None:
        with self._changed:
            self._granted[number] = reasons[0].value
            self._changed.notify_all()

    def _disconnected(self, client: Any, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        with self._changed:
            self._ended = str(reason)
            self._changed.notify_all()

    def wait_end(self) -> str:
        """Wait for the end of the connection; return its reason."""
        ended = self._wait(lambda: self._ended or None)
        self._client.loop_stop()
        del self._client  # which closes its last sockets
        return ended

    @property
    def ended(self) -> bool:
        return bool(self._ended)

    def _wait(self, look: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while (found := look()) is None:
                assert time.monotonic() < deadline, "paho-mqtt waits in vain"
                self._changed.wait(deadline - time.monotonic())
            return found

    def subscribe(self, topic_filter: str, qos: int = 2) -> int:
        if self._is_newest:
            _, number = self._client.subscribe(topic_filter, options=SubscribeOptions(qos))
        else:
            _, number = self._client.subscribe(topic_filter, qos)
        return self._wait(lambda: self._granted.get(number))

    def send(self, message: Message) -> paho.MQTTMessageInfo:
        """Begin to publish."""
        properties = _properties(PacketTypes.PUBLISH, message) if self._is_newest else None
        return self._client.publish(message.topic, message.payload, message.qos, message.retain, properties)

    def publish(self, message: Message) -> None:
        sent = self.send(message)
        sent.wait_for_publish(LIMIT_S)
        assert sent.is_published(), message

    def disconnect(self) -> None:
        self._client.disconnect()
        self.wait_end()

    def drop(self) -> None:
        used = self._client.socket()
        if used is not None:
            with socket.socket(fileno=os.dup(used.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)
        self.wait_end()


class PahoClients:
    def __init__(self) -> None:
        self._open: list[Paho] = []

    def connect(
        self, link: Link, client_id: str, *, clean: bool = True, expiry_s: int = 0, will: Message | None = None
    ) -> Paho:
        client = Paho(link, client_id, clean=clean, expiry_s=expiry_s, will=will)
        self._open.append(client)
        return client

    def close(self) -> None:
        for client in self._open:
            if not client.ended:
                client.drop()
        self._open.clear()


# steered processes


def _as_json(message: Message) -> dict[str, Any]:
    correlation = None if message.correlation is None else base64.b64encode(message.correlation).decode()
    return {**asdict(message), "payload": base64.b64encode(message.payload).decode(), "correlation": correlation}


def _from_json(said: dict[str, Any]) -> Message:
    correlation = said["correlation"]
    return Message(
        **{
            **said,
            "payload": base64.b64decode(said["payload"]),
            "correlation": None if correlation is None else base64.b64decode(correlation),
            "user": tuple((key, value) for key, value in said["user"]),
        }
    )


class Steered(SteeredProcess):
    """A process with MQTT clients."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._inboxes: dict[str, Inbox] = {}
        self._open: list[SteeredClient] = []
        super().__init__(words, folder)

    def hear(self, event: dict[str, Any]) -> None:
        self._inboxes[event["client"]].add(_from_json(event["message"]))

    def connect(
        self, link: Link, client_id: str, *, clean: bool = True, expiry_s: int = 0, will: Message | None = None
    ) -> Client:
        name = self.new_name(client_id)
        inbox = self._inboxes[name] = Inbox()
        said = {"url": link.url, "version": link.version, "ca": link.ca, "client_id": client_id}
        said |= {"user": link.user, "password": link.password}
        said |= {"clean": clean, "expiry_s": expiry_s, "will": _as_json(will) if will is not None else None}
        try:
            answer = self.call("connect", client=name, **said)
        except RuntimeError as error:
            raise LoginRefused(str(error)) from error
        client = SteeredClient(self, name, inbox, answer["session_present"])
        self._open.append(client)
        return client

    def close(self) -> None:
        for client in self._open:
            if not client.ended:
                client.drop()
        self._open.clear()


class SteeredClient:
    def __init__(self, process: Steered, name: str, inbox: Inbox, session_present: bool) -> None:
        self.inbox = inbox
        self.session_present = session_present
        self.ended = False
        self._process = process
        self._name = name

    def subscribe(self, topic_filter: str, qos: int = 2) -> int:
        return int(self._process.call("subscribe", client=self._name, filter=topic_filter, qos=qos)["granted"])

    def publish(self, message: Message) -> None:
        self._process.call("publish", client=self._name, message=_as_json(message))

    def wait_end(self) -> str:
        """Wait until the broker has ended the connection; return the reason code of its DISCONNECT."""
        self.ended = True
        return str(self._process.call("ended", client=self._name)["reason"])

    def disconnect(self) -> None:
        self.ended = True
        self._process.call("disconnect", client=self._name)

    def drop(self) -> None:
        self.ended = True
        self._process.call("drop", client=self._name)


def node_words() -> list[str]:
    """Return the command of the process with MQTT.js."""
    return fetch.node_program("node-mqtt", fetch.HERE / "mqtt" / "client.js")


def java_words() -> list[str]:
    """Return the command of the process with Paho's Java client."""
    words = [fetch.tool("java"), "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
    return [*words, "-cp", fetch.mqtt_driver(), "interop.MqttDriver"]


def without_expiry(message: Message) -> Message:
    return replace(message, expiry_s=None)
