"""Storing one message of a client, or a will, in one atomic group with its session changes and its retained copy."""

from martlet.access import Gate
from martlet.message import Message
from martlet.sessions.session import JointChanges
from martlet_mqtt.mapping.messages import DELAYING, record_of
from martlet_mqtt.shared.context import Context
from martlet_mqtt.shared.retained import RETAINED_TOPIC, size_of
from martlet_mqtt.wire.codes import ReasonCode
from martlet_mqtt.wire.errors import MqttError, NotAccepted
from martlet_mqtt.wire.names import Name
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Property

__all__ = ["check_response_topic", "check_retain", "queue_count", "store"]


def queue_count(context: Context, gate: Gate, name: Name) -> int:
    """Return the number of queues of the topic of *name*, at least 1. Raises `Refused`."""
    grant = gate.publishable.get(name.topic)
    topic = grant.get() if grant is not None else None
    if topic is None:
        context.ensure_topics()
        topic = gate.find_topic(name.topic, "publish", context.rules.queues_of(name.topic))
    return topic.write_queues or 1 if topic is not None else 1


def store(
    context: Context,
    gate: Gate,
    packet: Publish,
    name: Name,
    host: bytes,
    client_id: str = "",
    changes: JointChanges | None = None,
) -> int:
    """Store *packet* together with *changes*; return the log position to pass to `Peer.hold_until`.

    Args:
      host: the publisher's address, encoded as in a record.
      client_id: the publisher's identifier, if the message must not come back to it; otherwise empty.

    Raises:
      MqttError: the packet breaks the protocol.
      Refused: the client may not publish it, or the store does not accept it.
    """
    check_response_topic(packet)
    check_retain(packet)
    now_ms = context.broker.clock.now_ms()
    body, properties = record_of(packet, name, now_ms, client_id, context.broker.config.cluster)
    queue_id = name.place % queue_count(context, gate, name)
    message = Message(name.topic, body, properties, queue_id, 0, 0, now_ms, host)
    notes = changes.notes if changes is not None else ()
    if packet.retain:
        size = _check_room(context, message, packet, name)
        end = gate.publish_all([message], atomic=True, notes=notes, own=_retained).end
        context.retained.appended(name.text, size, end)
    elif notes:
        end = gate.publish_all([message], atomic=True, notes=notes).end
    else:
        end = gate.publish(message).end
    if changes is not None:
        changes.apply()
    return end


def _check_room(context: Context, message: Message, packet: Publish, name: Name) -> int:
    """Return the size of *message* once retained; 0 if it removes the retained message. Raises `Refused`."""
    config = context.config
    size = size_of(message.body, message.properties) if packet.payload else 0
    if size:
        context.retained.check_room(name.text, size, config.retained_max, config.retained_bytes_max)
    return size


def _retained(message: Message) -> Message:
    """Return the hidden copy of *message* that becomes the retained message of its name."""
    flag, sys_flag = message.flag, message.sys_flag
    return Message(
        RETAINED_TOPIC, message.body, message.properties, 0, flag, sys_flag, message.born_ms, message.born_host
    )


def check_retain(packet: Publish) -> None:
    """Raise `NotAccepted` if *packet* asks for both RETAIN and a delay: it would be retained before its delivery."""
    if packet.retain and any(name in DELAYING for name, _ in packet.properties.user):
        text = f"a message with RETAIN cannot be delayed; leave out RETAIN, or {', '.join(sorted(DELAYING))}"
        raise NotAccepted(text, ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR)


def check_response_topic(packet: Publish) -> None:
    """Raise `MqttError` if the response topic of *packet* is no topic name."""
    response = packet.properties.text(Property.RESPONSE_TOPIC)
    if response is not None and (not response or "+" in response or "#" in response):
        raise MqttError(f"response topic {response[:80]!r} is empty or has a wildcard; send a topic name")
