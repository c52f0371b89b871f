"""An MQTT 5 client with blocking calls, for the commands: one connection, no reconnect, no stored session."""

import time
from collections import deque
from types import TracebackType
from typing import Final, Self, TypeVar, final

from martlet.cli.outcome import Unreachable
from martlet.cli.server import ServerSettings, connect
from martlet.errors import MartletError
from martlet_mqtt.wire.codec import decode_packet, encode_packet, packet_bytes
from martlet_mqtt.wire.codes import V5, PacketType, ReasonCode
from martlet_mqtt.wire.errors import MqttError
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
)
from martlet_mqtt.wire.properties import Properties, Property

__all__ = ["MqttClient", "MqttFailed"]

KEEP_ALIVE_S: Final = 60
RECEIVE_BYTES: Final = 65_536
P = TypeVar("P", bound=Packet)


class MqttFailed(MartletError):
    """The broker refused a request; the text has its reason."""


@final
class MqttClient:
    """A connected client; a context manager."""

    def __init__(self, settings: ServerSettings, client_id: str = "") -> None:
        """Connect.

        Raises:
          Unreachable: nothing answers at the address, or it does not speak MQTT.
          MqttFailed: the broker refused the client.
        """
        self._settings = settings
        self._where = settings.where
        self._socket = connect(settings)
        self._buffer = bytearray()
        self._came: deque[Publish] = deque()
        self._packet_id = 0
        try:
            self._open(Connect(client_id, V5, True, KEEP_ALIVE_S, None, settings.user, settings.password))
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect."""
        try:
            self._send(Disconnect())
        except MartletError:
            pass  # the connection is closed already
        finally:
            self._socket.close()

    def _open(self, hello: Connect) -> None:
        self._send(hello)
        try:
            answer = self._expect(Connack)
        except MqttError as error:
            raise Unreachable(f"{self._where} does not answer in MQTT; is it an MQTT port?") from error
        if answer.reason:
            raise MqttFailed(f"broker {self._where} refused the connection; {_explained(answer.reason, answer)}")

    # packets

    def _send(self, packet: Packet) -> None:
        try:
            self._socket.sendall(encode_packet(packet, V5))
        except OSError as error:
            raise Unreachable(f"MQTT broker {self._where} closed the connection; {error}") from error

    def _next_id(self) -> int:
        self._packet_id = self._packet_id % 65_535 + 1
        return self._packet_id

    def _receive(self, deadline: float | None) -> Packet | None:
        """Return the next packet; None if none comes before *deadline* on the monotonic clock."""
        while True:
            size = packet_bytes(bytes(self._buffer[:5]), 0) if len(self._buffer) > 1 else 0
            if size and len(self._buffer) >= size:
                break
            if not self._receive_more(deadline):
                return None
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        head = 2
        while data[head - 1] > 127:
            head += 1
        packet = decode_packet(data[0], data[head:], V5)
        if isinstance(packet, Disconnect):
            raise MqttFailed(f"broker {self._where} disconnected; {_explained(packet.reason, packet)}")
        return packet

    def _receive_more(self, deadline: float | None) -> bool:
        """Receive some bytes; return False if none come before *deadline*. Sends PINGREQ meanwhile."""
        while True:
            left_s = KEEP_ALIVE_S / 2 if deadline is None else max(0.001, deadline - time.monotonic())
            self._socket.settimeout(min(left_s, KEEP_ALIVE_S / 2))
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    return False
                self._send(Pingreq())
                continue
            except OSError as error:
                raise Unreachable(f"MQTT broker {self._where} closed the connection; {error}") from error
            if not data:
                raise Unreachable(f"MQTT broker {self._where} closed the connection; is it an MQTT port?")
            self._buffer += data
            return True

    def _expect(self, kind: type[P]) -> P:
        """Return the next packet of *kind*. Raises `Unreachable` and `MqttFailed`."""
        deadline = time.monotonic() + self._settings.timeout_s
        while True:
            packet = self._receive(deadline)
            if packet is None:
                raise Unreachable(f"MQTT broker {self._where} did not answer within {self._settings.timeout_s:g} s")
            if isinstance(packet, kind):
                return packet
            self._keep(packet)

    def _keep(self, packet: Packet) -> None:
        if isinstance(packet, Publish):
            self._came.append(packet)
        elif not isinstance(packet, Pingresp):
            raise MqttFailed(f"broker {self._where} sent {type(packet).__name__}, which was not asked for")

    # calls for the commands

    def publish(self, packet: Publish) -> None:
        """Publish *packet* under a new identifier, and wait for its last acknowledgement. Raises `MqttFailed`."""
        packet_id = self._next_id() if packet.qos else 0
        self._send(
            Publish(packet.topic, packet.payload, packet.qos, packet.retain, False, packet_id, packet.properties)
        )
        if not packet.qos:
            return
        answer = self._expect(Ack)
        if answer.reason >= ReasonCode.UNSPECIFIED_ERROR:
            raise MqttFailed(f"message to {packet.topic!r} was refused; {_explained(answer.reason, answer)}")
        if packet.qos == 2:
            self._send(Ack(PacketType.PUBREL, packet_id))
            self._expect(Ack)

    def subscribe(self, *subscriptions: FilterSubscription) -> None:
        """Subscribe, and wait for SUBACK. Raises `MqttFailed`."""
        self._send(Subscribe(self._next_id(), subscriptions))
        answer = self._expect(Suback)
        for each, code in zip(subscriptions, answer.codes, strict=True):
            if code >= ReasonCode.UNSPECIFIED_ERROR:
                raise MqttFailed(f"subscription to {each.topic_filter!r} was refused; {_explained(code, answer)}")

    def next_message(self, deadline: float | None = None) -> Publish | None:
        """Return and acknowledge the next message; None if none comes before *deadline* (monotonic)."""
        while not self._came:
            packet = self._receive(deadline)
            if packet is None:
                return None
            if isinstance(packet, Ack) and packet.kind is PacketType.PUBREL:
                self._send(Ack(PacketType.PUBCOMP, packet.packet_id))
            else:
                self._keep(packet)
        message = self._came.popleft()
        if message.qos:
            kind = PacketType.PUBACK if message.qos == 1 else PacketType.PUBREC
            self._send(Ack(kind, message.packet_id))
        return message


def _explained(code: int, packet: Connack | Ack | Suback | Disconnect) -> str:
    """Return the reason *code* of *packet* in words."""
    known = {each.value: each.name.replace("_", " ").lower() for each in ReasonCode}
    text = packet.properties.text(Property.REASON_STRING)
    name = known.get(code, f"reason {code:#04x}")
    return f"{name}: {text}" if text else name


def request_properties(user: list[tuple[str, str]], values: dict[Property, object]) -> Properties:
    """Return the properties of a message: the user properties, and *values* without the Nones."""
    return Properties({which: value for which, value in values.items() if value is not None}, user)
