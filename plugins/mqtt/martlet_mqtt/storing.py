"""Stores one message of a client or a will, with everything that belongs to it, all or nothing."""

from martlet.access import Gate
from martlet.delivery.sessions import JointChanges
from martlet.errors import Reason, Refused
from martlet.message import Message

from .context import Context
from .errors import MqttError
from .messages import record_of
from .names import Name
from .packets import Publish
from .properties import Property
from .retained import RETAINED_TOPIC

__all__ = ["place_of", "store"]


def place_of(context: Context, gate: Gate, name: Name) -> tuple[str, int]:
    """Return the topic and the queue of messages of *name*. Raises `Refused`."""
    topic = gate.find_topic(name.topic, "publish", context.config.queues)
    return name.topic, name.place % topic.write_queues if topic is not None and topic.write_queues else 0


def store(
    context: Context,
    gate: Gate,
    packet: Publish,
    name: Name,
    host: bytes,
    client_id: str = "",
    changes: JointChanges | None = None,
) -> int:
    """Store *packet* together with *changes*, and return what to pass to `Peer.hold_until`.

    Args:
      host: where it comes from, as a record holds it.
      client_id: of the publisher, if the message must not come back to it.

    Raises:
      MqttError: the packet breaks the protocol.
      Refused: the client may not publish it, or the store does not accept it.
    """
    _check_response_topic(packet)
    now_ms = context.broker.clock.now_ms()
    body, properties = record_of(packet, name, now_ms, client_id, context.broker.config.cluster)
    topic, queue_id = place_of(context, gate, name)
    message = Message(topic, body, properties, queue_id, 0, 0, now_ms, host)
    own = [_retained(context, message, packet, name)] if packet.retain else []
    notes = changes.notes if changes is not None else ()
    if not own and not notes:
        end = gate.publish(message).end
    else:
        end = gate.publish_run([message], atomic=True, acknowledgements=notes, own=own).end
    if changes is not None:
        changes.apply()
    return end


def _retained(context: Context, message: Message, packet: Publish, name: Name) -> Message:
    """Return the copy of *message* that is kept as the retained one of its name. Raises `Refused`."""
    limit = context.config.retained_max
    if packet.payload and len(context.retained) >= limit and name.text not in context.retained:
        raise Refused(Reason.BUSY, f"{limit} messages are retained; mqtt.retained_max is {limit}")
    return Message(RETAINED_TOPIC, message.body, message.properties, 0, 0, 0, message.born_ms, message.born_host)


def _check_response_topic(packet: Publish) -> None:
    response = packet.properties.text(Property.RESPONSE_TOPIC)
    if response is not None and (not response or "+" in response or "#" in response):
        raise MqttError(f"response topic {response[:80]!r} is empty or has a wildcard; send a topic name")
