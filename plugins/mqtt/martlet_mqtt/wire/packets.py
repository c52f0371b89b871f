"""Packets of clients and brokers as records; `codec.py` converts between packets and bytes."""

from typing import TypeAlias, final

from msgspec import Struct

from martlet_mqtt.wire.codes import V5, PacketType, ReasonCode
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties

__all__ = [
    "Ack",
    "Auth",
    "Connack",
    "Connect",
    "Disconnect",
    "FilterSubscription",
    "Packet",
    "Pingreq",
    "Pingresp",
    "Publish",
    "Suback",
    "Subscribe",
    "Unsuback",
    "Unsubscribe",
    "Will",
]


@final
class Will(Struct, frozen=True):
    """A message that the broker publishes when the connection of its client ends without DISCONNECT."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Properties = NO_PROPERTIES


@final
class Connect(Struct, frozen=True):
    """CONNECT: the client's identity, its session options and its will; ``version`` is the protocol level.

    ``is_bridge`` is the upper bit of the level: the client is a bridge of another broker that speaks MQTT 3, such as
    Mosquitto's.
    """

    client_id: str
    version: int = V5
    clean_start: bool = True
    keep_alive_s: int = 0
    will: Will | None = None
    user_name: str | None = None
    password: bytes | None = None
    properties: Properties = NO_PROPERTIES
    is_bridge: bool = False


@final
class Connack(Struct, frozen=True):
    """CONNACK; with MQTT 3 ``reason`` is the return code."""

    session_present: bool
    reason: int = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


@final
class Publish(Struct, frozen=True):
    """PUBLISH; ``packet_id`` is 0 with QoS 0, and ``topic`` is empty if a known alias replaces it."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    is_duplicate: bool = False
    packet_id: int = 0
    properties: Properties = NO_PROPERTIES


@final
class Ack(Struct, frozen=True):
    """PUBACK, PUBREC, PUBREL or PUBCOMP, according to ``kind``."""

    kind: PacketType
    packet_id: int
    reason: int = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


@final
class FilterSubscription(Struct, frozen=True):
    """A topic filter and its options (MQTT 5 section 3.8.3.1); MQTT 3 has only the QoS."""

    topic_filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


@final
class Subscribe(Struct, frozen=True):
    """SUBSCRIBE."""

    packet_id: int
    subscriptions: tuple[FilterSubscription, ...]
    properties: Properties = NO_PROPERTIES


@final
class Suback(Struct, frozen=True):
    """SUBACK: one code for each subscription."""

    packet_id: int
    codes: tuple[int, ...]
    properties: Properties = NO_PROPERTIES


@final
class Unsubscribe(Struct, frozen=True):
    """UNSUBSCRIBE."""

    packet_id: int
    filters: tuple[str, ...]
    properties: Properties = NO_PROPERTIES


@final
class Unsuback(Struct, frozen=True):
    """UNSUBACK: one code for each filter; none with MQTT 3."""

    packet_id: int
    codes: tuple[int, ...] = ()
    properties: Properties = NO_PROPERTIES


@final
class Pingreq(Struct, frozen=True):
    """PINGREQ."""


@final
class Pingresp(Struct, frozen=True):
    """PINGRESP."""


@final
class Disconnect(Struct, frozen=True):
    """DISCONNECT."""

    reason: int = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


@final
class Auth(Struct, frozen=True):
    """AUTH, a step of enhanced authentication; MQTT 5 only."""

    reason: int = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


Packet: TypeAlias = (
    Connect
    | Connack
    | Publish
    | Ack
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
