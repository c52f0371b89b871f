"""Bytes <-> packets of MQTT 3.1, 3.1.1 and 5; pure functions.

A packet is a byte with its type and flags, the length of its content as a variable byte integer, and the content (MQTT
5 section 2.1). One decoder of each packet type serves all versions; only MQTT 5 has properties.
"""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from martlet.runtime.steps import Budget, Steps, finish_now
from martlet_mqtt.wire.codes import V3, V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.errors import Malformed, MqttError
from martlet_mqtt.wire.packets import (
    Ack,
    Auth,
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
    Unsuback,
    Unsubscribe,
    Will,
)
from martlet_mqtt.wire.properties import (
    NO_PROPERTIES,
    U16,
    WILL,
    Properties,
    Property,
    decode_data,
    decode_properties,
    decode_text,
    encode_data,
    encode_properties,
    encode_text,
    encode_varint,
)

__all__ = ["FILTERS_A_PACKET", "connect_version", "decode_in_steps", "decode_packet", "encode_packet", "packet_bytes"]

LENGTH_BYTES_MAX: Final = 4
# Protocol names with their levels. Bridges of MQTT 3 set the upper bit of the level; bridges of MQTT 5 use options of
# SUBSCRIBE instead.
_NAMES: Final = {"MQIsdp": (V3,), "MQTT": (V4, V5)}
BRIDGE: Final = 0x80
# Required flags, the lower four bits of the first byte (MQTT 5 section 2.1.3); 0 for types not listed. PUBLISH has free
# flags.
_FLAGS: Final[Mapping[int, int]] = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
_WITH_WILL: Final = 0x04
_WILL_FLAGS: Final = 0x3C
_FAILURE: Final = 0x80
# Most topic filters in one packet; the limit of a session may be lower.
FILTERS_A_PACKET: Final = 65_536


def packet_bytes(data: bytes, at: int) -> int:
    """Return the size of the packet at *at*; 0 if its length field is not complete yet.

    Raises:
      Malformed: the length field has more than four bytes.
    """
    value = shift = 0
    for end in range(at + 1, min(at + 1 + LENGTH_BYTES_MAX, len(data))):
        byte = data[end]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return end + 1 - at + value
        shift += 7
    if len(data) > at + LENGTH_BYTES_MAX:
        raise Malformed("the length of a packet does not end after four bytes")
    return 0


def decode_packet(first: int, data: bytes, version: int) -> Packet:
    """Return the packet of a client or a broker that has the first byte *first* and the content *data*.

    Raises:
      Malformed: the bytes are not a packet.
      MqttError: the packet breaks the protocol; ``reason`` is the code to send to the other side.
    """
    number = first >> 4
    decode = _DECODERS.get(number)
    if decode is None:
        raise Malformed(f"packet type {number} does not exist")
    if number != PacketType.PUBLISH:
        _check_flags(first)
    return decode(first, data, version)


def decode_in_steps(first: int, data: bytes, version: int) -> Steps[Subscribe | Unsubscribe]:
    """Decode SUBSCRIBE or UNSUBSCRIBE in slices; otherwise like `decode_packet`."""
    _check_flags(first)
    is_subscribe = first >> 4 == PacketType.SUBSCRIBE
    return _subscribe_in_steps(data, version) if is_subscribe else _unsubscribe_in_steps(data, version)


def _check_flags(first: int) -> None:
    kind = first >> 4
    if first & 15 != _FLAGS.get(kind, 0):
        raise Malformed(f"{PacketType(kind).name} has the flags {first & 15}, which are reserved")


def connect_version(data: bytes) -> int:
    """Return the version for the answer to a CONNECT with the content *data*, which may be damaged."""
    is_newest = data.startswith(b"\0\4MQTT") and len(data) > 6 and data[6] & ~BRIDGE >= V5
    return V5 if is_newest else V4


def _properties(data: bytes, at: int, version: int, place: int) -> tuple[Properties, int]:
    return decode_properties(data, at, place) if version == V5 else (NO_PROPERTIES, at)


def _check_end(at: int, data: bytes, kind: PacketType) -> None:
    if at != len(data):
        raise Malformed(f"{kind.name} has {len(data) - at} bytes too many")


def _packet_id(data: bytes, at: int) -> tuple[int, int]:
    if at + 2 > len(data):
        raise Malformed("the packet identifier is missing")
    found = data[at] << 8 | data[at + 1]
    if not found:
        raise MqttError("the packet identifier is 0; use 1 to 65535")
    return found, at + 2


def _decode_connect(first: int, data: bytes, version: int) -> Connect:
    name, at = decode_text(data, 0)
    if at + 4 > len(data):
        raise Malformed("CONNECT ends before its keep alive")
    version, flags, keep_alive_s = data[at] & ~BRIDGE, data[at + 1], data[at + 2] << 8 | data[at + 3]
    is_bridge = bool(data[at] & BRIDGE)
    if version not in _NAMES.get(name, ()) or (is_bridge and version == V5):
        reason = ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
        raise MqttError(f"protocol {name[:20]!r} level {data[at]} is not supported; MQTT 3.1, 3.1.1 and 5 are", reason)
    has_user, has_password, will_flags = flags & 0x80, flags & 0x40, flags & _WILL_FLAGS
    if flags & 1:
        raise Malformed("CONNECT has the reserved flag")
    if (will_flags and not flags & _WITH_WILL) or will_flags & 0x18 == 0x18:
        raise Malformed(f"CONNECT has the will flags {will_flags:#x}, which contradict each other")
    if has_password and not has_user and version != V5:
        raise Malformed("CONNECT has a password without a user name")
    properties, at = _properties(data, at + 4, version, PacketType.CONNECT)
    if properties.get(Property.AUTHENTICATION_DATA) is not None and not properties.text(Property.AUTHENTICATION_METHOD):
        raise MqttError("CONNECT has authentication data without an authentication method")
    client_id, at = decode_text(data, at)
    will = user_name = password = None
    if flags & _WITH_WILL:
        of_will, at = _properties(data, at, version, WILL)
        topic, at = decode_text(data, at)
        payload, at = decode_data(data, at)
        will = Will(topic, payload, flags >> 3 & 3, bool(flags & 0x20), of_will)
    if has_user:
        user_name, at = decode_text(data, at)
    if has_password:
        password, at = decode_data(data, at)
    _check_end(at, data, PacketType.CONNECT)
    is_clean = bool(flags & 2)
    return Connect(client_id, version, is_clean, keep_alive_s, will, user_name, password, properties, is_bridge)


def _decode_connack(first: int, data: bytes, version: int) -> Connack:
    if len(data) < 2 or data[0] > 1:
        raise Malformed("CONNACK has no reason, or reserved flags")
    properties, at = _properties(data, 2, version, PacketType.CONNACK)
    _check_end(at, data, PacketType.CONNACK)
    return Connack(bool(data[0]), data[1], properties)


def _decode_publish(first: int, data: bytes, version: int) -> Publish:
    qos = first >> 1 & 3
    if qos == 3:
        raise Malformed("PUBLISH has QoS 3; send 0, 1 or 2")
    if first & 8 and not qos:
        raise Malformed("PUBLISH has QoS 0 and DUP")
    topic, at = decode_text(data, 0)
    packet_id = 0
    if qos:
        packet_id, at = _packet_id(data, at)
    properties, at = _properties(data, at, version, PacketType.PUBLISH)
    return Publish(topic, data[at:], qos, bool(first & 1), bool(first & 8), packet_id, properties)


def _decode_ack(first: int, data: bytes, version: int) -> Ack:
    kind = PacketType(first >> 4)
    packet_id, at = _packet_id(data, 0)
    reason, properties = int(ReasonCode.SUCCESS), NO_PROPERTIES
    if version == V5 and at < len(data):
        reason, at = data[at], at + 1
        if at < len(data):
            properties, at = decode_properties(data, at, kind)
    _check_end(at, data, kind)
    return Ack(kind, packet_id, reason, properties)


def _decode_subscribe(first: int, data: bytes, version: int) -> Subscribe:
    return finish_now(_subscribe_in_steps(data, version))


def _subscribe_in_steps(data: bytes, version: int) -> Steps[Subscribe]:
    budget = Budget()
    packet_id, at = _packet_id(data, 0)
    properties, at = _properties(data, at, version, PacketType.SUBSCRIBE)
    found: list[FilterSubscription] = []
    while at < len(data):
        topic_filter, at = decode_text(data, at)
        if at >= len(data):
            raise Malformed(f"filter {topic_filter[:60]!r} has no options")
        found.append(_subscription(topic_filter, data[at], version))
        at += 1
        _check_count(len(found))
        if budget.is_over():
            yield
    if not found:
        raise MqttError("SUBSCRIBE has no filter")
    return Subscribe(packet_id, tuple(found), properties)


def _subscription(topic_filter: str, options: int, version: int) -> FilterSubscription:
    qos, handling = options & 3, options >> 4 & 3
    if qos == 3 or handling == 3 or options & (0xC0 if version == V5 else 0xFC):
        raise Malformed(f"filter {topic_filter[:60]!r} has the options {options:#04x}, which do not exist")
    return FilterSubscription(topic_filter, qos, bool(options & 4), bool(options & 8), handling)


def _check_count(count: int) -> None:
    if count > FILTERS_A_PACKET:
        text = f"a packet has more than {FILTERS_A_PACKET} topic filters; send several packets"
        raise MqttError(text, ReasonCode.QUOTA_EXCEEDED)


def _decode_unsubscribe(first: int, data: bytes, version: int) -> Unsubscribe:
    return finish_now(_unsubscribe_in_steps(data, version))


def _unsubscribe_in_steps(data: bytes, version: int) -> Steps[Unsubscribe]:
    budget = Budget()
    packet_id, at = _packet_id(data, 0)
    properties, at = _properties(data, at, version, PacketType.UNSUBSCRIBE)
    found: list[str] = []
    while at < len(data):
        topic_filter, at = decode_text(data, at)
        found.append(topic_filter)
        _check_count(len(found))
        if budget.is_over():
            yield
    if not found:
        raise MqttError("UNSUBSCRIBE has no filter")
    return Unsubscribe(packet_id, tuple(found), properties)


def _decode_suback(first: int, data: bytes, version: int) -> Suback:
    packet_id, at = _packet_id(data, 0)
    properties, at = _properties(data, at, version, PacketType.SUBACK)
    return Suback(packet_id, tuple(data[at:]), properties)


def _decode_unsuback(first: int, data: bytes, version: int) -> Unsuback:
    packet_id, at = _packet_id(data, 0)
    properties, at = _properties(data, at, version, PacketType.UNSUBACK)
    if version != V5:  # UNSUBACK of MQTT 3 has no codes
        _check_end(at, data, PacketType.UNSUBACK)
    return Unsuback(packet_id, tuple(data[at:]), properties)


def _decode_pingreq(first: int, data: bytes, version: int) -> Pingreq:
    _check_end(0, data, PacketType.PINGREQ)
    return Pingreq()


def _decode_pingresp(first: int, data: bytes, version: int) -> Pingresp:
    _check_end(0, data, PacketType.PINGRESP)
    return Pingresp()


def _decode_reason(data: bytes, version: int, kind: PacketType) -> tuple[int, Properties]:
    """Return the reason and the properties of DISCONNECT or AUTH; the packet may omit both."""
    if not data:
        return ReasonCode.SUCCESS, NO_PROPERTIES
    if version != V5:
        raise Malformed(f"{kind.name} has {len(data)} bytes too many")
    properties, at = decode_properties(data, 1, kind) if len(data) > 1 else (NO_PROPERTIES, 1)
    _check_end(at, data, kind)
    return data[0], properties


def _decode_disconnect(first: int, data: bytes, version: int) -> Disconnect:
    return Disconnect(*_decode_reason(data, version, PacketType.DISCONNECT))


def _decode_auth(first: int, data: bytes, version: int) -> Auth:
    if version != V5:
        raise Malformed("AUTH exists in MQTT 5 only")
    return Auth(*_decode_reason(data, version, PacketType.AUTH))


Decode: TypeAlias = Callable[[int, bytes, int], Packet]
_DECODERS: Final[Mapping[int, Decode]] = {
    PacketType.CONNECT: _decode_connect,
    PacketType.CONNACK: _decode_connack,
    PacketType.PUBLISH: _decode_publish,
    PacketType.PUBACK: _decode_ack,
    PacketType.PUBREC: _decode_ack,
    PacketType.PUBREL: _decode_ack,
    PacketType.PUBCOMP: _decode_ack,
    PacketType.SUBSCRIBE: _decode_subscribe,
    PacketType.SUBACK: _decode_suback,
    PacketType.UNSUBSCRIBE: _decode_unsubscribe,
    PacketType.UNSUBACK: _decode_unsuback,
    PacketType.PINGREQ: _decode_pingreq,
    PacketType.PINGRESP: _decode_pingresp,
    PacketType.DISCONNECT: _decode_disconnect,
    PacketType.AUTH: _decode_auth,
}


# encoding


def encode_packet(packet: Packet, version: int) -> bytes:
    """Return *packet* as bytes of MQTT *version*."""
    kind, flags, content = _content(packet, version)
    return bytes((kind << 4 | flags,)) + encode_varint(len(content)) + content


def _content(packet: Packet, version: int) -> tuple[PacketType, int, bytes]:
    match packet:
        case Publish():
            return PacketType.PUBLISH, _publish_flags(packet), _publish_content(packet, version)
        case Ack():
            return packet.kind, _FLAGS.get(packet.kind, 0), _ack_content(packet, version)
        case Connect():
            return PacketType.CONNECT, 0, _connect_content(packet)
        case Connack():
            head = bytes((packet.session_present, packet.reason))
            return PacketType.CONNACK, 0, head + _encoded(packet.properties, version)
        case Subscribe():
            parts = [encode_text(each.topic_filter) + bytes((_options(each),)) for each in packet.subscriptions]
            return PacketType.SUBSCRIBE, 2, _numbered(packet.packet_id, packet.properties, version) + b"".join(parts)
        case Suback():
            head = _numbered(packet.packet_id, packet.properties, version)
            return PacketType.SUBACK, 0, head + bytes(_suback_codes(packet, version))
        case Unsubscribe():
            head = _numbered(packet.packet_id, packet.properties, version)
            return PacketType.UNSUBSCRIBE, 2, head + b"".join(map(encode_text, packet.filters))
        case Unsuback():
            head = _numbered(packet.packet_id, packet.properties, version)
            return PacketType.UNSUBACK, 0, head + (bytes(packet.codes) if version == V5 else b"")
        case Pingreq():
            return PacketType.PINGREQ, 0, b""
        case Pingresp():
            return PacketType.PINGRESP, 0, b""
        case Disconnect():
            return PacketType.DISCONNECT, 0, _reason_content(packet, version)
        case Auth():
            return PacketType.AUTH, 0, _reason_content(packet, version)


def _encoded(properties: Properties, version: int) -> bytes:
    return encode_properties(properties) if version == V5 else b""


def _numbered(packet_id: int, properties: Properties, version: int) -> bytes:
    return U16.pack(packet_id) + _encoded(properties, version)


def _publish_flags(packet: Publish) -> int:
    return packet.is_duplicate << 3 | packet.qos << 1 | packet.retain


def _publish_content(packet: Publish, version: int) -> bytes:
    number = U16.pack(packet.packet_id) if packet.qos else b""
    return encode_text(packet.topic) + number + _encoded(packet.properties, version) + packet.payload


def _ack_content(packet: Ack, version: int) -> bytes:
    content = U16.pack(packet.packet_id)
    if version == V5 and (packet.reason or packet.properties):
        content += bytes((packet.reason,))
        if packet.properties:
            content += encode_properties(packet.properties)
    return content


def _suback_codes(packet: Suback, version: int) -> tuple[int, ...]:
    """Return the codes of *packet*; MQTT 3.1.1 has one code for all failures."""
    return packet.codes if version == V5 else tuple(min(code, _FAILURE) for code in packet.codes)


def _options(each: FilterSubscription) -> int:
    return each.qos | each.no_local << 2 | each.retain_as_published << 3 | each.retain_handling << 4


def _reason_content(packet: Disconnect | Auth, version: int) -> bytes:
    if version != V5 or not (packet.reason or packet.properties):
        return b""
    return bytes((packet.reason,)) + (encode_properties(packet.properties) if packet.properties else b"")


def _connect_content(packet: Connect) -> bytes:
    version, will = packet.version, packet.will
    flags = packet.clean_start << 1 | (packet.user_name is not None) << 7 | (packet.password is not None) << 6
    if will is not None:
        flags |= _WITH_WILL | will.qos << 3 | will.retain << 5
    name = encode_text("MQIsdp" if version == V3 else "MQTT")
    level = version | BRIDGE if packet.is_bridge else version
    parts = [name, bytes((level, flags)), U16.pack(packet.keep_alive_s), _encoded(packet.properties, version)]
    parts.append(encode_text(packet.client_id))
    if will is not None:
        parts += _encoded(will.properties, version), encode_text(will.topic), encode_data(will.payload)
    if packet.user_name is not None:
        parts.append(encode_text(packet.user_name))
    if packet.password is not None:
        parts.append(encode_data(packet.password))
    return b"".join(parts)
