"""Properties of MQTT 5 packets (section 2.2.2): their types, the packets that may have them, and their bytes.

A list of properties is its length, followed by an identifier and a value of the identifier's type for each property.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum, unique
from struct import Struct
from typing import Any, Final, TypeAlias, final

from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.errors import Malformed, MqttError

__all__ = [
    "NO_PROPERTIES",
    "PROPERTIES_BYTES_MAX",
    "USER_PROPERTIES_MAX",
    "WILL",
    "Properties",
    "Property",
    "allowed_in",
    "decode_data",
    "decode_properties",
    "decode_text",
    "decode_varint",
    "encode_data",
    "encode_properties",
    "encode_text",
    "encode_varint",
]

U16: Final = Struct(">H")
U32: Final = Struct(">I")
VARINT_BYTES_MAX: Final = 4
# Longest list in one packet, so that decoding it does not delay other clients: a user property takes 5 to 10 us.
PROPERTIES_BYTES_MAX: Final = 65_536
USER_PROPERTIES_MAX: Final = 1000
# The *place* of a will's properties: CONNECT has two lists.
WILL: Final = 0


@unique
class Property(IntEnum):
    """Identifiers (MQTT 5 table 2-4)."""

    PAYLOAD_FORMAT = 1
    MESSAGE_EXPIRY = 2
    CONTENT_TYPE = 3
    RESPONSE_TOPIC = 8
    CORRELATION_DATA = 9
    SUBSCRIPTION_IDENTIFIER = 11
    SESSION_EXPIRY = 17
    ASSIGNED_CLIENT_IDENTIFIER = 18
    SERVER_KEEP_ALIVE = 19
    AUTHENTICATION_METHOD = 21
    AUTHENTICATION_DATA = 22
    REQUEST_PROBLEM_INFORMATION = 23
    WILL_DELAY = 24
    REQUEST_RESPONSE_INFORMATION = 25
    RESPONSE_INFORMATION = 26
    SERVER_REFERENCE = 28
    REASON_STRING = 31
    RECEIVE_MAXIMUM = 33
    TOPIC_ALIAS_MAXIMUM = 34
    TOPIC_ALIAS = 35
    MAXIMUM_QOS = 36
    RETAIN_AVAILABLE = 37
    USER_PROPERTY = 38
    MAXIMUM_PACKET_SIZE = 39
    WILDCARD_SUBSCRIPTION_AVAILABLE = 40
    SUBSCRIPTION_IDENTIFIERS_AVAILABLE = 41
    SHARED_SUBSCRIPTION_AVAILABLE = 42


# Types of values: a byte of 0 or 1, numbers, a string, bytes, and a pair of strings.
_FLAG, _U16, _U32, _VARINT, _TEXT, _DATA, _PAIR = range(7)
_P: TypeAlias = Property
_ALL: Final = frozenset(PacketType) - {PacketType.PINGREQ, PacketType.PINGRESP}
_ANSWERS: Final = frozenset(
    (
        PacketType.CONNACK,
        PacketType.PUBACK,
        PacketType.PUBREC,
        PacketType.PUBREL,
        PacketType.PUBCOMP,
        PacketType.SUBACK,
        PacketType.UNSUBACK,
        PacketType.DISCONNECT,
        PacketType.AUTH,
    )
)
_MESSAGE: Final = frozenset((PacketType.PUBLISH, WILL))
_CONNECTS: Final = frozenset((PacketType.CONNECT, PacketType.CONNACK))
_CONNACK: Final = frozenset((PacketType.CONNACK,))
_CONNECT: Final = frozenset((PacketType.CONNECT,))
# For each property, its type and the packets that may have it.
_TABLE: Final[Mapping[int, tuple[Property, int, frozenset[int]]]] = {
    kind.value: (kind, type_, frozenset(places))
    for kind, type_, places in (
        (_P.PAYLOAD_FORMAT, _FLAG, _MESSAGE),
        (_P.MESSAGE_EXPIRY, _U32, _MESSAGE),
        (_P.CONTENT_TYPE, _TEXT, _MESSAGE),
        (_P.RESPONSE_TOPIC, _TEXT, _MESSAGE),
        (_P.CORRELATION_DATA, _DATA, _MESSAGE),
        (_P.SUBSCRIPTION_IDENTIFIER, _VARINT, {PacketType.PUBLISH, PacketType.SUBSCRIBE}),
        (_P.SESSION_EXPIRY, _U32, _CONNECTS | {PacketType.DISCONNECT}),
        (_P.ASSIGNED_CLIENT_IDENTIFIER, _TEXT, _CONNACK),
        (_P.SERVER_KEEP_ALIVE, _U16, _CONNACK),
        (_P.AUTHENTICATION_METHOD, _TEXT, _CONNECTS | {PacketType.AUTH}),
        (_P.AUTHENTICATION_DATA, _DATA, _CONNECTS | {PacketType.AUTH}),
        (_P.REQUEST_PROBLEM_INFORMATION, _FLAG, _CONNECT),
        (_P.WILL_DELAY, _U32, {WILL}),
        (_P.REQUEST_RESPONSE_INFORMATION, _FLAG, _CONNECT),
        (_P.RESPONSE_INFORMATION, _TEXT, _CONNACK),
        (_P.SERVER_REFERENCE, _TEXT, _CONNACK | {PacketType.DISCONNECT}),
        (_P.REASON_STRING, _TEXT, _ANSWERS),
        (_P.RECEIVE_MAXIMUM, _U16, _CONNECTS),
        (_P.TOPIC_ALIAS_MAXIMUM, _U16, _CONNECTS),
        (_P.TOPIC_ALIAS, _U16, {PacketType.PUBLISH}),
        (_P.MAXIMUM_QOS, _FLAG, _CONNACK),
        (_P.RETAIN_AVAILABLE, _FLAG, _CONNACK),
        (_P.USER_PROPERTY, _PAIR, _ALL | {WILL}),
        (_P.MAXIMUM_PACKET_SIZE, _U32, _CONNECTS),
        (_P.WILDCARD_SUBSCRIPTION_AVAILABLE, _FLAG, _CONNACK),
        (_P.SUBSCRIPTION_IDENTIFIERS_AVAILABLE, _FLAG, _CONNACK),
        (_P.SHARED_SUBSCRIPTION_AVAILABLE, _FLAG, _CONNACK),
    )
}
# A 0 here breaks the protocol (MQTT 5 sections 3.1.2.11.3, 3.1.2.11.4, 3.3.2.3.4 and 3.8.2.1.2).
_NOT_ZERO: Final = frozenset((_P.RECEIVE_MAXIMUM, _P.MAXIMUM_PACKET_SIZE, _P.TOPIC_ALIAS, _P.SUBSCRIPTION_IDENTIFIER))


@final
class Properties:
    """The properties of a packet, by identifier; user properties and subscription identifiers may repeat."""

    __slots__ = ("_values", "identifiers", "user")

    def __init__(
        self,
        values: Mapping[Property, Any],
        user: Sequence[tuple[str, str]] = (),
        identifiers: Sequence[int] = (),
    ) -> None:
        self._values = values
        self.user = tuple(user)
        self.identifiers = tuple(identifiers)

    def get(self, which: Property) -> Any:
        """Return the value of property *which*, of any type; None if absent."""
        return self._values.get(which)

    def having(self, which: Property, value: Any) -> "Properties":
        """Return a copy with *which* set to *value*."""
        return Properties({**self._values, which: value}, self.user, self.identifiers)

    def without(self, which: Property) -> "Properties":
        """Return a copy without *which*."""
        if which not in self._values:
            return self
        rest = {each: value for each, value in self._values.items() if each is not which}
        return Properties(rest, self.user, self.identifiers)

    def number(self, which: Property, default: int) -> int:
        """Return the number or flag *which*; *default* if absent."""
        found: int = self._values.get(which, default)
        return found

    def text(self, which: Property) -> str | None:
        """Return the string *which*; None if absent."""
        found: str | None = self._values.get(which)
        return found

    def data(self, which: Property) -> bytes | None:
        """Return the bytes *which*; None if absent."""
        found: bytes | None = self._values.get(which)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Properties):
            return NotImplemented
        return (self._values, self.user, self.identifiers) == (other._values, other.user, other.identifiers)

    def __hash__(self) -> int:
        return hash((self.user, self.identifiers, len(self._values)))

    def __bool__(self) -> bool:
        return bool(self._values or self.user or self.identifiers)

    def __repr__(self) -> str:
        named = {which.name.lower(): value for which, value in self._values.items()}
        return f"Properties({named}, user={self.user}, identifiers={self.identifiers})"


NO_PROPERTIES: Final = Properties({})


# basic types (MQTT 5 section 1.5)


def decode_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable byte integer at *at*, and the position after it.

    Raises:
      Malformed: it has more than four bytes, or is cut off.
    """
    value = shift = 0
    for end in range(at, min(at + VARINT_BYTES_MAX, len(data))):
        byte = data[end]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, end + 1
        shift += 7
    raise Malformed("a variable byte integer does not end after four bytes, or goes beyond its packet")


def encode_varint(value: int) -> bytes:
    """Return *value*, at most 268,435,455, as a variable byte integer."""
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def decode_data(data: bytes, at: int) -> tuple[bytes, int]:
    """Return the bytes at *at*, which follow a two-byte length, and the position after them. Raises `Malformed`."""
    begin = at + 2
    if begin > len(data):
        raise Malformed("a length goes beyond its packet")
    end = begin + (data[at] << 8 | data[at + 1])
    if end > len(data):
        raise Malformed(f"{end - begin} bytes go beyond their packet, which has {len(data) - begin} more")
    return data[begin:end], end


def decode_text(data: bytes, at: int) -> tuple[str, int]:
    """Return the UTF-8 string at *at*, and the position after it.

    Raises:
      Malformed: the string is cut off, is not UTF-8, or contains U+0000 [MQTT-1.5.4-1, MQTT-1.5.4-2].
    """
    raw, end = decode_data(data, at)
    if 0 in raw:
        raise Malformed(f"string {raw[:60]!r} contains U+0000; leave it out")
    try:
        return raw.decode(), end
    except UnicodeDecodeError as error:
        raise Malformed(f"string {raw[:60]!r} is not UTF-8; send UTF-8") from error


def encode_data(data: bytes) -> bytes:
    """Return *data*, at most 65,535 bytes, preceded by its two-byte length."""
    return U16.pack(len(data)) + data


def encode_text(text: str) -> bytes:
    """Return *text*, at most 65,535 bytes, as UTF-8 preceded by its two-byte length."""
    return encode_data(text.encode())


# lists of properties


def allowed_in(which: Property, place: int) -> bool:
    """Return whether a packet of type *place* (or `WILL`) may have the property *which*."""
    return place in _TABLE[which][2]


def decode_properties(data: bytes, at: int, place: int) -> tuple[Properties, int]:
    """Return the properties at *at* in a packet of type *place* (or `WILL`), and the position after them.

    Raises:
      Malformed: a property is unknown, not allowed here, or cut off.
      MqttError: a property occurs twice that may occur once, or has a value that is not allowed.
    """
    size, at = decode_varint(data, at)
    if not size:
        return NO_PROPERTIES, at
    end = at + size
    if end > len(data):
        raise Malformed(f"the properties take {size} bytes, which is more than the rest of the packet")
    if size > PROPERTIES_BYTES_MAX:
        text = f"the properties of a packet take {size} bytes; at most {PROPERTIES_BYTES_MAX} are accepted"
        raise MqttError(text, ReasonCode.QUOTA_EXCEEDED)
    values: dict[Property, Any] = {}
    user: list[tuple[str, str]] = []
    identifiers: list[int] = []
    data = data[:end]  # so that no value extends beyond the list
    while at < end:
        number, at = decode_varint(data, at)
        entry = _TABLE.get(number)
        if entry is None or place not in entry[2]:
            raise Malformed(f"property {number} is not one that this packet may have")
        which, type_, _ = entry
        value, at = _decode_value(data, at, which, type_)
        if which is Property.USER_PROPERTY:
            user.append(value)
            if len(user) > USER_PROPERTIES_MAX:
                text = f"a packet has more than {USER_PROPERTIES_MAX} user properties; send fewer"
                raise MqttError(text, ReasonCode.QUOTA_EXCEEDED)
        elif which is Property.SUBSCRIPTION_IDENTIFIER and (not identifiers or place == PacketType.PUBLISH):
            identifiers.append(value)
        elif which in values or which is Property.SUBSCRIPTION_IDENTIFIER:
            raise MqttError(f"property {which.name} is there twice; send it once")
        else:
            values[which] = value
    return Properties(values, user, identifiers), end


def _decode_value(data: bytes, at: int, which: Property, type_: int) -> tuple[Any, int]:
    value: Any
    if type_ == _TEXT:
        return decode_text(data, at)
    if type_ == _DATA:
        return decode_data(data, at)
    if type_ == _PAIR:
        name, at = decode_text(data, at)
        value, at = decode_text(data, at)
        return (name, value), at
    if type_ == _VARINT:
        value, end = decode_varint(data, at)
    else:
        end = at + (1, 2, 4)[type_]
        if end > len(data):
            raise Malformed(f"property {which.name} goes beyond the properties")
        value = int.from_bytes(data[at:end])
    if (type_ == _FLAG and value > 1) or (not value and which in _NOT_ZERO):
        reason = ReasonCode.TOPIC_ALIAS_INVALID if which is Property.TOPIC_ALIAS else ReasonCode.PROTOCOL_ERROR
        raise MqttError(f"property {which.name} has the value {value}, which is not allowed", reason)
    return value, end


def encode_properties(properties: Properties) -> bytes:
    """Return the encoded *properties*, preceded by their length."""
    if not properties:
        return b"\0"
    parts = [_encode_value(which, value) for which, value in properties._values.items()]
    parts += [_encode_value(Property.SUBSCRIPTION_IDENTIFIER, value) for value in properties.identifiers]
    parts += encode_user(properties.user)
    content = b"".join(parts)
    return encode_varint(len(content)) + content


def encode_user(user: Iterable[tuple[str, str]]) -> list[bytes]:
    """Return each user property encoded, with its identifier."""
    return [b"\x26" + encode_text(name) + encode_text(value) for name, value in user]


def _encode_value(which: Property, value: Any) -> bytes:
    type_ = _TABLE[which][1]
    mark = bytes((which,))
    if type_ == _TEXT:
        return mark + encode_text(value)
    if type_ == _DATA:
        return mark + encode_data(value)
    if type_ == _VARINT:
        return mark + encode_varint(value)
    return mark + int(value).to_bytes((1, 2, 4)[type_])
