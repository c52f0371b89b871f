"""Replies between MQTT clients and clients of other protocols (see `requests.py`)."""

from functools import partial
from typing import Final

from martlet.access import NO_CORRELATION, Gate, is_uncorrelated
from martlet.errors import Reason, Refused
from martlet.message import CORRELATION_ID, Message, Placed, decode_properties, encode_properties
from martlet.records.compression import CompressionError, decompress
from martlet_mqtt.mapping.messages import record_of, users_of
from martlet_mqtt.mapping.requests import address_of, requester_of
from martlet_mqtt.shared.context import PROTOCOL, Context
from martlet_mqtt.shared.storing import queue_count
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.errors import MqttError, NotAccepted
from martlet_mqtt.wire.names import Name, check_name
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Properties, Property

__all__ = ["name_of_reply", "send_reply", "take_replies"]

# A reply is delivered with the QoS of the subscription, up to this one.
REPLY_QOS: Final = 1


def name_of_reply(topic: str, bytes_max: int) -> Name:
    """Return the `Name` of *topic*, ``$REPLY/...``, without caching it. Raises `NotAccepted` and `MqttError`."""
    if len(topic.encode()) > bytes_max:
        text = f"topic name {topic[:80]!r} has more than {bytes_max} bytes; mqtt.name_bytes_max is that"
        raise NotAccepted(text, ReasonCode.TOPIC_NAME_INVALID)
    check_name(topic)
    return Name.of(topic, "")


def send_reply(context: Context, gate: Gate, packet: Publish, name: Name, host: bytes) -> int:
    """Send *packet* to the client of another protocol that waits for this reply.

    Returns the log position to pass to `Peer.hold_until`; 0 if that client no longer waits.

    Raises:
      Refused: the client may not reply, or the reply cannot be stored.
      NotAccepted: the reply has RETAIN, or no correlation data that a property can hold.
    """
    address = address_of(name.text)
    data = packet.properties.data(Property.CORRELATION_DATA)
    try:
        correlation = NO_CORRELATION if data is None and is_uncorrelated(address) else (data or b"").decode()
    except UnicodeDecodeError:
        correlation = ""
    if not correlation or packet.retain:
        what = "is to be retained" if packet.retain else "lacks the correlation data of the request"
        text = f"a reply to {name.text[:80]!r} {what}; publish it without RETAIN, with the request's correlation data"
        raise NotAccepted(text, ReasonCode.TOPIC_NAME_INVALID)
    now_ms = context.broker.clock.now_ms()
    body, properties = record_of(packet, Name.of("", ""), now_ms)
    users = {key: value for key, value in users_of(decode_properties(properties)) if key != CORRELATION_ID}
    content = packet.properties.text(Property.CONTENT_TYPE)
    if content and "CONTENT_TYPE" not in users:
        users["CONTENT_TYPE"] = content
    try:
        encoded = encode_properties({**users, CORRELATION_ID: correlation})
    except ValueError as error:
        raise NotAccepted(str(error), ReasonCode.TOPIC_NAME_INVALID) from error
    reply = Message("", body, encoded, 0, 0, 0, now_ms, host)
    try:
        return gate.reply(address, reply).end
    except Refused as refused:
        if refused.reason is Reason.NOT_FOUND:
            return 0
        raise


def take_replies(context: Context) -> None:
    """Register the plugin for replies of other protocols' clients to MQTT clients."""
    context.broker.replies.add(PROTOCOL, partial(_take, context))


def _take(context: Context, gate: Gate, address: str, reply: Message) -> Placed:
    """Publish *reply* to the response topic in *address*, as a message of the client that replies."""
    topic, correlation = requester_of(address, reply.property(CORRELATION_ID))
    texts = decode_properties(reply.properties)
    values: dict[Property, object] = {}
    if correlation is not None:
        values[Property.CORRELATION_DATA] = correlation
    if texts.get("CONTENT_TYPE"):
        values[Property.CONTENT_TYPE] = texts["CONTENT_TYPE"]
    try:
        name = context.names.find(topic)
        payload = decompress(reply.body, reply.sys_flag, context.broker.delivered_bytes_max)
        packet = Publish(topic, payload, REPLY_QOS, properties=Properties(values, users_of(texts)))
        body, properties = record_of(packet, name, reply.born_ms)
    except (MqttError, CompressionError) as error:
        raise Refused(Reason.ILLEGAL, f"the reply cannot be published; {error}") from error
    queue_id = name.place % queue_count(context, gate, name)
    return gate.publish(Message(name.topic, body, properties, queue_id, reply.flag, 0, reply.born_ms, reply.born_host))
