"""Conversion between MQTT messages and records of the log; pure functions.

| MQTT message | property of the record |
|---|---|
| topic name | ``TAGS`` |
| QoS of the publisher | ``MQTT_QOS``; 1 if it is absent |
| RETAIN | ``MQTT_RETAIN`` |
| payload format indicator | ``MQTT_UTF8`` |
| message expiry interval | ``EXPIRES_MS``: time of expiry, in ms since 1970 |
| content type, response topic | ``CONTENT_TYPE``, ``REPLY_TO`` |
| correlation data | ``CORRELATION_ID`` if it is text |
| user properties | properties of the same names |

A property cannot hold an empty text or a character up to U+0002, its name occurs only once, and some names have a
meaning for brokers. If any field of the last four rows does not fit, ``MQTT_BLOCK`` has all of these fields in MQTT's
own encoding, in Base64. If the properties would be longer than a record allows, the block follows the payload in the
body, and ``MQTT_PAYLOAD_BYTES`` is the size of the payload.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final, final

from martlet.message import CORRELATION_ID, PROPERTIES_BYTES_MAX, decode_properties, find_property
from martlet.records.compression import COMPRESSED, CompressionError, decompress
from martlet.records.reserved import BODY_BYTES, OF_PROTOCOLS, RESERVED
from martlet_mqtt.mapping.requests import correlation_of, request_of, response_of
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.errors import MqttError, NotAccepted
from martlet_mqtt.wire.names import Name
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Properties, Property, encode_properties
from martlet_mqtt.wire.properties import decode_properties as decode_list

__all__ = ["DELAYING", "Arrived", "record_of", "to_deliver", "users_of"]

# Room for properties that are added later: the timer's, a transaction's and the position of a queue.
SPARE_BYTES: Final = 1024
DATA_BYTES_MAX: Final = 65_535
_FORMATS: Final = {"0": 0, "1": 1}
_UNFIT: Final = re.compile("[\x00-\x02]")
# User properties of these names delay a message, as for clients of RocketMQ.
DELAYING: Final = frozenset(("DELAY", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"))
_ACTING: Final = DELAYING | {"KEYS"}
# Names that brokers and other clients use: a user property of such a name is only in the block.
_TAKEN: Final = (RESERVED | OF_PROTOCOLS | {"INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET"}) - _ACTING
# Properties of a record that subscribers do not get as user properties.
_HIDDEN: Final = _TAKEN | (_ACTING - {"KEYS"})
_IN_BLOCK: Final = (Property.CONTENT_TYPE, Property.RESPONSE_TOPIC, Property.CORRELATION_DATA)


def record_of(publish: Publish, name: Name, now_ms: int, client_id: str = "", cluster: str = "") -> tuple[bytes, bytes]:
    """Return the body and the properties of the record for *publish* to *name*.

    Args:
      client_id: the publisher's identifier, if the message must not come back to it; otherwise empty.
      cluster: the broker's cluster, which makes a message with a response topic a request for clients of RocketMQ;
        empty for a message that is no such request.

    Raises:
      NotAccepted: the payload format indicator says UTF-8, but the payload is not UTF-8.
    """
    properties = publish.properties
    found = name.properties[publish.qos]
    if publish.retain:
        found += b"MQTT_RETAIN\x011\x02"
    if client_id:
        found += b"MQTT_CLIENT\x01%b\x02" % client_id.encode()
    if not properties:
        return publish.payload, found
    payload_format = properties.number(Property.PAYLOAD_FORMAT, -1)
    if payload_format >= 0:
        if payload_format:
            _check_utf8(publish.payload)
        found += b"MQTT_UTF8\x01%d\x02" % payload_format
    expiry_s = properties.number(Property.MESSAGE_EXPIRY, -1)
    if expiry_s >= 0:
        found += b"EXPIRES_MS\x01%d\x02" % (now_ms + expiry_s * 1000)
    pairs, is_whole = _pairs(properties)
    if cluster and "REPLY_TO" in pairs:
        correlation, text = properties.data(Property.CORRELATION_DATA), pairs.get(CORRELATION_ID)
        pairs |= request_of(pairs["REPLY_TO"], correlation, text, cluster)
    more = b"".join([b"%b\x01%b\x02" % (key.encode(), value.encode()) for key, value in pairs.items()])
    block = b"" if is_whole else _block(properties)
    if block:
        more += b"MQTT_BLOCK\x01%b\x02" % b64encode(block)
    if len(found) + len(more) <= PROPERTIES_BYTES_MAX - SPARE_BYTES:
        return publish.payload, found + more
    body = publish.payload + (block or _block(properties))
    return body, found + b"MQTT_PAYLOAD_BYTES\x01%d\x02" % len(publish.payload)


def _check_utf8(payload: bytes) -> None:
    try:
        payload.decode()
    except UnicodeDecodeError as error:
        text = f"the payload is not UTF-8 at byte {error.start}, but its payload format indicator is 1"
        raise NotAccepted(text, ReasonCode.PAYLOAD_FORMAT_INVALID) from error


def _pairs(properties: Properties) -> tuple[dict[str, str], bool]:
    """Return the fields that fit into properties of a record, by name, and whether these are all fields."""
    found: dict[str, str] = {}
    is_whole = True
    for name, value in properties.user:
        if name in found or name in _TAKEN or not name or not value or _UNFIT.search(name + value):
            is_whole = False
        else:
            found[name] = value
            is_whole = is_whole and name not in DELAYING  # subscribers get these only from the block
    for own, text in (
        ("CONTENT_TYPE", properties.text(Property.CONTENT_TYPE)),
        ("REPLY_TO", properties.text(Property.RESPONSE_TOPIC)),
        ("CORRELATION_ID", _as_text(properties.data(Property.CORRELATION_DATA))),
    ):
        if text:
            found[own] = text
        is_whole = is_whole and text != "" and not (text and _UNFIT.search(text))
    return {key: value for key, value in found.items() if not _UNFIT.search(value)}, is_whole


def _as_text(data: bytes | None) -> str | None:
    """Return *data* as text; empty if it is not UTF-8, and None if it is None."""
    try:
        return data.decode() if data is not None else None
    except UnicodeDecodeError:
        return ""


def _block(properties: Properties) -> bytes:
    values: dict[Property, Any] = {}
    for which in _IN_BLOCK:
        value = properties.get(which)
        if value is not None:
            values[which] = value
    return encode_properties(Properties(values, properties.user))


@final
class Arrived:
    """A message read from the log, on its way to subscribers.

    A large payload is in ``large``, and ``payload`` is empty: the large payload follows the frame (`frames.py`).
    ``properties`` are in MQTT's encoding without their length, without expiry and subscription identifiers.
    ``expires_ms`` is 0 for never. ``client_id`` is the publisher's if the message must not come back to it, else empty.
    """

    __slots__ = ("client_id", "expires_ms", "large", "name", "payload", "properties", "qos", "retain")

    def __init__(self, name: bytes, payload: bytes, qos: int) -> None:
        self.name = name
        self.payload = payload
        self.large = b""
        self.qos = qos
        self.retain = False
        self.properties = b""
        self.expires_ms = 0
        self.client_id = ""

    @property
    def is_plain(self) -> bool:
        """Whether all subscribers of a shape get the same frame, now and later."""
        return not (self.expires_ms or self.client_id or self.retain)


def to_deliver(sys_flag: int, body: bytes, properties: bytes, bytes_max: int) -> Arrived | None:
    """Return the message in a record of any protocol; None if it has no name, or its body cannot be decompressed.

    A body decompresses to at most *bytes_max*. The name may be any bytes: the caller checks it (`Names`).
    """
    if properties.startswith(b"TAGS\x01") and not sys_flag & COMPRESSED:
        end = properties.find(2, 5)
        rest = properties[end + 1 :]
        if not rest:
            return Arrived(properties[5:end], body, 1)
        if rest == b"MQTT_QOS\x010\x02":
            return Arrived(properties[5:end], body, 0)
        if rest == b"MQTT_QOS\x012\x02":
            return Arrived(properties[5:end], body, 2)
    return _from_any(sys_flag, body, properties, bytes_max)


def _from_any(sys_flag: int, body: bytes, properties: bytes, bytes_max: int) -> Arrived | None:
    name, found = find_property(properties, b"TAGS"), decode_properties(properties)
    try:
        payload = decompress(body, sys_flag, bytes_max)
    except CompressionError:
        return None
    if not name:
        return None
    qos = {"0": 0, "2": 2}.get(found.get("MQTT_QOS", ""), 1)
    payload, block = _divided(found, payload)
    arrived = Arrived(name, payload, qos)
    arrived.retain = found.get("MQTT_RETAIN") == "1"
    arrived.client_id = found.get("MQTT_CLIENT", "")
    arrived.expires_ms = _number(found.get("EXPIRES_MS", "")) or 0
    arrived.properties = _encoded(found, block)
    return arrived


def _divided(found: Mapping[str, str], body: bytes) -> tuple[bytes, bytes]:
    """Return the payload in *body*, and the block of a record with the properties *found*; the block may be empty."""
    for name in BODY_BYTES:
        size = _number(found.get(name, ""))
        if size is not None:
            return body[:size], body[size:] if name == "MQTT_PAYLOAD_BYTES" else b""
    return body, _decoded(found.get("MQTT_BLOCK", ""))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""


def _encoded(found: dict[str, str], block: bytes) -> bytes:
    """Return a message's properties in MQTT's encoding, from *block*, or without a block from the record's *found*."""
    payload_format = _FORMATS.get(found.get("MQTT_UTF8", ""))
    values: dict[Property, Any] = {Property.PAYLOAD_FORMAT: payload_format} if payload_format is not None else {}
    if block:
        try:
            whole, _ = decode_list(block, 0, PacketType.PUBLISH)
        except MqttError:
            whole = Properties({})
        values |= {which: whole.get(which) for which in _IN_BLOCK if whole.get(which) is not None}
        return _content(Properties(values, whole.user))
    for which, value in (
        (Property.CONTENT_TYPE, found.get("CONTENT_TYPE")),
        (Property.RESPONSE_TOPIC, response_of(found)),
        (Property.CORRELATION_DATA, correlation_of(found)),
    ):
        if value is not None and _fits(value):
            values[which] = value
    users = [(key, value) for key, value in users_of(found) if _fits(key) and _fits(value)]
    return _content(Properties(values, users))


def _fits(value: str | bytes) -> bool:
    """Return whether MQTT can encode *value*; a value of another protocol may be too long, or contain U+0000."""
    if isinstance(value, bytes):
        return len(value) <= DATA_BYTES_MAX
    return "\0" not in value and (4 * len(value) <= DATA_BYTES_MAX or len(value.encode()) <= DATA_BYTES_MAX)


def users_of(found: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the user properties among the properties *found* in a record."""
    return [(key, value) for key, value in found.items() if key not in _HIDDEN]


def _content(properties: Properties) -> bytes:
    """Return *properties* in MQTT's encoding without their length."""
    whole = encode_properties(properties)
    at = 0
    while whole[at] > 127:
        at += 1
    return whole[at + 1 :]
