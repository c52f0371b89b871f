"""The protocol of one client as a state machine: bytes to packets, their legal order (`TRANSITIONS`), and keep alive.

A run of common packets is one event (`scanner.py`). CONNECT decides the version. Before it no other packet is allowed,
and none longer than ``connect_bytes_max``.
"""

import math
from collections.abc import Iterator
from enum import IntEnum, unique
from typing import Final, NamedTuple, TypeAlias, final

from msgspec.structs import replace

from martlet.contracts import Buffer
from martlet.runtime.native import native
from martlet.runtime.steps import Steps
from martlet_mqtt.wire.codec import connect_version, decode_in_steps, decode_packet, encode_packet, packet_bytes
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode, return_code
from martlet_mqtt.wire.errors import MqttError, reason_of
from martlet_mqtt.wire.names import Names
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import Properties, Property
from martlet_mqtt.wire.scanner import PUBLISH_FIRST, RUN_PACKETS_MAX, AckRun, PublishRun, scan_acks, scan_publishes

__all__ = ["ANY_BYTES", "PACKET_KEYS", "TRANSITIONS", "LargePublish", "Limits", "LongPacket", "MqttConnection", "State"]

# A client may be silent for one and a half times its keep alive [MQTT-3.1.2-22].
GRACE: Final = 1.5
# Packets that an acknowledgement counts as if the next one is not for the next identifier, or if the messages may be
# those of a shared group: it takes up to 10 us.
ACK_ROOM: Final = 4

ANY_BYTES: Final = 1 << 30
# The settings that limit the size of a packet, for error texts.
PACKET_KEYS: Final = "broker.message_bytes_max and mqtt.packet_bytes_max"

# SUBSCRIBE and UNSUBSCRIBE packets longer than this are decoded in slices.
LONG_BYTES: Final = 4096
# A packet longer than this is copied alone, not with the packets before and after it.
LARGE_BYTES: Final = 1 << 20
_WITH_FILTERS: Final = (PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE)


@final
class LongPacket(NamedTuple):
    """A long SUBSCRIBE or UNSUBSCRIBE, not decoded yet; its steps decode it."""

    steps: Steps[Subscribe | Unsubscribe]


@final
class LargePublish(NamedTuple):
    """A PUBLISH of MQTT 3 with *size* bytes, more than the limit; its payload was skipped, and is empty."""

    packet: Publish
    size: int


Event: TypeAlias = Packet | PublishRun | AckRun | LongPacket | LargePublish
# Packets with a reason string.
Explained: TypeAlias = Ack | Connack | Disconnect | Suback | Unsuback

# Errors in CONNECT that MQTT 3 clients also get a CONNACK for; others just close the connection [MQTT-3.1.4-1].
_TOLD_TO_ALL: Final = (ReasonCode.UNSUPPORTED_PROTOCOL_VERSION, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
# Ends of logins, for which only DISCONNECT has codes.
_TOLD_LATER: Final = (ReasonCode.ADMINISTRATIVE_ACTION, ReasonCode.MAXIMUM_CONNECT_TIME)
# Protocol errors without a return code in MQTT 3: the connection closes without CONNACK.
_TOLD_TO_NONE: Final = (ReasonCode.MALFORMED_PACKET, ReasonCode.PROTOCOL_ERROR, ReasonCode.TOPIC_NAME_INVALID)


@unique
class State(IntEnum):
    NEW = 0  # waits for CONNECT
    ACCEPTING = 1  # CONNECT came, and the broker decides; AUTH may come
    OPEN = 2
    ENDED = 3  # reads no more packets


_OPEN: Final = (
    PacketType.PUBLISH,
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
    PacketType.SUBSCRIBE,
    PacketType.UNSUBSCRIBE,
    PacketType.PINGREQ,
    PacketType.AUTH,
)
# The packets that a client may send in each state, and the next state. Any other packet breaks the protocol.
TRANSITIONS: Final[dict[tuple[State, int], State]] = {
    (State.NEW, PacketType.CONNECT): State.ACCEPTING,
    (State.ACCEPTING, PacketType.AUTH): State.ACCEPTING,
    (State.ACCEPTING, PacketType.DISCONNECT): State.ENDED,
    **{(State.OPEN, kind): State.OPEN for kind in _OPEN},
    (State.OPEN, PacketType.DISCONNECT): State.ENDED,
}


@final
class Limits(NamedTuple):
    """The longest packets that a client may send, and its time for CONNECT."""

    connect_bytes_max: int = 65_536
    packet_bytes_max: int = 16 << 20
    connect_s: float = 10.0


@final
class MqttConnection:
    """The protocol of one client (martlet.contracts.Connection)."""

    __slots__ = (
        "_buffer",
        "_heard",
        "_limits",
        "_meets_names",
        "_names",
        "_need",
        "_previous",
        "_room",
        "_scan_publishes",
        "_silence_s",
        "_skip",
        "_skipped",
        "accepted_bytes_max",
        "explains",
        "has_leases",
        "is_bridge",
        "state",
        "version",
    )

    def __init__(self, limits: Limits, names: Names, now: float) -> None:
        self._limits = limits
        self._names = names
        self._scan_publishes = native(scan_publishes)
        self._buffer = bytearray()
        self._need = 2  # buffered bytes needed to continue
        self._room = RUN_PACKETS_MAX  # packets of runs left in this turn
        self._meets_names = True  # whether names of the last run were new
        self._heard = now
        # A packet over the limit, and the number of its bytes still to come.
        self._skipped: LargePublish | None = None
        self._skip = 0
        self._silence_s = limits.connect_s
        self.state = self._previous = State.NEW
        self.version = V4
        # Whether errors may carry a reason string, and the largest packet in bytes that the client accepts.
        self.explains = True
        self.accepted_bytes_max = ANY_BYTES
        self.is_bridge = False
        self.has_leases = False  # whether acknowledgements may be for messages of shared groups

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def receive_data(self, data: bytes, now: float) -> None:
        self._room = RUN_PACKETS_MAX
        if self.state is State.OPEN:
            self._heard = now  # not before OPEN, when each byte of a slow client would extend its time to connect
        if self._skip:
            passed = min(self._skip, len(data))
            self._skip -= passed
            data = data[passed:]
        if self.state is not State.ENDED:
            self._buffer += data

    def open(self, version: int, keep_alive_s: int, now: float) -> None:
        """Note that the broker accepted the client. *keep_alive_s* is its keep alive, 0 for none."""
        self.state = State.OPEN
        self.version = version
        self._heard = now
        self._silence_s = keep_alive_s * GRACE or math.inf

    def end(self) -> None:
        """Read nothing more."""
        self.state = self._previous = State.ENDED

    def events(self) -> Iterator[Event]:
        if self._skipped is not None and not self._skip:
            passed, self._skipped = self._skipped, None
            yield passed
        if len(self._buffer) < self._need:
            return
        if self._need > LARGE_BYTES and self.state is not State.ENDED:
            yield self._large_packet()
        data, at, size = bytes(self._buffer), 0, len(self._buffer)
        self._need = 2
        try:
            while at + 1 < size and self.state is not State.ENDED:
                event, end = self._run_at(data, at) if self.state is State.OPEN else (None, at)
                if event is None:
                    end = at + self._size_at(data, at)
                    if self._is_too_large(data, at, end):
                        large, at = self._pass_over(data, at, end)
                        if large is None:
                            break
                        yield large
                        continue
                    if end == at or end > size:
                        self._need = end - at or size - at + 1
                        break
                    event = self._packet(data[at], data[_content_at(data, at) : end])
                at = end
                yield event
        finally:
            del self._buffer[:at]

    def _run_at(self, data: bytes, at: int) -> tuple[Event | None, int]:
        """Return the run of packets at *at* and its end; None and *at* if the codec must decode the packet there."""
        room = self._room or RUN_PACKETS_MAX
        if data[at] in PUBLISH_FIRST:
            names, count = self._names, room
            if self._meets_names:  # all names of the run may be new
                count = min(room, RUN_PACKETS_MAX // (1 + names.room))
            known = names.learned
            run = self._scan_publishes(data, at, self.version, names, self._limits.packet_bytes_max, count)
            if run is None:
                return None, at
            self._meets_names = names.learned > known
            self._room = max(room - len(run.ends) - names.room * (names.learned - known), 0)
            return run, run.ends[-1]
        return self._acks_at(data, at, room)

    def _acks_at(self, data: bytes, at: int, room: int) -> tuple[Event | None, int]:
        """As `_run_at`, for acknowledgements that count as *room* packets at most."""
        count = max(room // ACK_ROOM, 1)
        acks = scan_acks(data, at, count if self.has_leases else room)
        if acks is None:
            return None, at
        each = 1 if isinstance(acks[0].ids, range) and not self.has_leases else ACK_ROOM
        if each > 1 and len(acks[0].ids) > count:
            acks = scan_acks(data, at, count)
            assert acks is not None, "the same packets were acknowledgements"
        self._room = max(room - each * len(acks[0].ids), 0)
        return acks

    @property
    def is_turn_over(self) -> bool:
        """Whether the runs of this read had `RUN_PACKETS_MAX` packets, and other clients must have their turn."""
        return not self._room

    def _size_at(self, data: bytes, at: int) -> int:
        """Return the size of the packet at *at*; 0 if it is not known yet."""
        size = packet_bytes(data, at)
        if self.state is State.NEW:
            if data[at] != PacketType.CONNECT << 4:
                raise MqttError(f"the first byte is {data[at]:#04x}, not that of CONNECT; this port speaks MQTT")
            limit, keys = self._limits.connect_bytes_max, "mqtt.connect_bytes_max"
        else:
            limit, keys = self._limits.packet_bytes_max, PACKET_KEYS
        if size > limit and not self._may_pass_over(data[at]):
            text = f"a packet has {size} bytes; at most {limit} are accepted ({keys})"
            raise MqttError(text, ReasonCode.PACKET_TOO_LARGE)
        return size

    def _may_pass_over(self, first: int) -> bool:
        """Return whether to skip a packet over the limit with the first byte *first*, instead of disconnecting.

        A client of MQTT 3 does not know the limit, and would send its PUBLISH again at each connection.
        """
        return self.state is State.OPEN and self.version != V5 and first >> 4 == PacketType.PUBLISH

    def _is_too_large(self, data: bytes, at: int, end: int) -> bool:
        return end - at > self._limits.packet_bytes_max and self._may_pass_over(data[at])

    def _pass_over(self, data: bytes, at: int, end: int) -> tuple[LargePublish | None, int]:
        """Skip the payload of the PUBLISH at *at*; return the packet without it, and the position after it in *data*.

        The packet is None if bytes of its head or payload are still to come.
        """
        head, size = _content_at(data, at), len(data)
        begin = head + 2 + int.from_bytes(data[head : head + 2]) + (2 if data[at] & 6 else 0)
        if head + 2 > size or begin > size:
            self._need = max(begin, head + 2) - at
            return None, at
        packet = decode_packet(data[at], data[head : min(begin, end)], self.version)
        assert isinstance(packet, Publish)
        event, self._skip = LargePublish(packet, end - at), max(end - size, 0)
        if self._skip:
            self._skipped = event
            return None, size
        return event, end

    def _large_packet(self) -> Packet | LongPacket:
        """Remove the complete packet at the beginning of the buffer and return it; copies it only once."""
        buffer, end = self._buffer, self._need
        self._need = 2
        with memoryview(buffer) as view:
            first, content = view[0], bytes(view[_content_at(buffer, 0) : end])
        del buffer[:end]
        return self._packet(first, content)

    def _packet(self, first: int, content: bytes) -> Packet | LongPacket:
        kind = first >> 4
        state = TRANSITIONS.get((self.state, kind))
        if state is None:
            raise MqttError(f"packet type {kind} is not allowed in state {self.state.name.lower()!r}")
        if kind == PacketType.CONNECT:
            self.version = connect_version(content)
        if kind in _WITH_FILTERS and len(content) > LONG_BYTES:
            return LongPacket(decode_in_steps(first, content, self.version))
        packet = decode_packet(first, content, self.version)
        self._previous, self.state = self.state, state
        if isinstance(packet, Connect):
            self.version = packet.version
            self.is_bridge = packet.is_bridge
            self.explains = packet.properties.number(Property.REQUEST_PROBLEM_INFORMATION, 1) == 1
            self.accepted_bytes_max = packet.properties.number(Property.MAXIMUM_PACKET_SIZE, ANY_BYTES)
        return packet

    def farewell(self, error: Exception) -> bytes:
        """Return CONNACK or DISCONNECT for *error*; empty for a connected client of MQTT 3."""
        reason = reason_of(error)
        # ENDED by DISCONNECT: an error in that packet is answered, too.
        before = self._previous if self.state is State.ENDED else self.state
        self.state = State.ENDED
        if before is State.NEW and self.version != V5 and reason not in _TOLD_TO_ALL:
            return b""  # the client may not speak MQTT at all
        return self.refusal(reason, str(error), before)

    def refusal(self, reason: ReasonCode, text: str, before: State, properties: Properties | None = None) -> bytes:
        """Return the last packet to a client in state *before*; empty if its version has none."""
        if before is State.ENDED:
            return b""
        if before is not State.OPEN and reason in _TOLD_LATER:
            reason = ReasonCode.NOT_AUTHORIZED
        if self.version != V5:
            is_told = before is not State.OPEN and reason not in _TOLD_TO_NONE
            return encode_packet(Connack(False, return_code(reason)), V4) if is_told else b""
        known = properties or Properties({})
        if before is State.OPEN:
            return self.explained(Disconnect(reason, known), text if self.explains else "")
        return self.explained(Connack(False, reason, known), text)

    def explained(self, packet: Explained, text: str) -> bytes:
        """Return *packet* encoded in MQTT 5, with *text* as its reason string unless that makes it too large.

        Empty if the packet is too large for the client even without the text [MQTT-3.1.2-24].
        """
        if text:
            properties = packet.properties.having(Property.REASON_STRING, text)
            data = encode_packet(replace(packet, properties=properties), V5)
            if len(data) <= self.accepted_bytes_max:
                return data
        data = encode_packet(packet, V5)
        return data if len(data) <= self.accepted_bytes_max else b""

    def deadline(self) -> float:
        return self._heard + self._silence_s

    def handle_timeout(self, now: float) -> None:
        if now < self.deadline():
            return
        if self.state is State.OPEN:
            text = f"nothing was heard for {self._silence_s:g} s; send PINGREQ within the keep alive"
            raise MqttError(text, ReasonCode.KEEP_ALIVE_TIMEOUT)
        raise MqttError(f"the client did not connect within {self._silence_s:g} s", ReasonCode.UNSPECIFIED_ERROR)


def _content_at(data: Buffer, at: int) -> int:
    """Return the position at which the content of the packet at *at* begins, after its length field."""
    head = at + 2
    while data[head - 1] > 127:
        head += 1
    return head
