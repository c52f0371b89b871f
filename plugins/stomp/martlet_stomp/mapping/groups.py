"""The shared groups of queues and of durable subscriptions.

A topic has one group for the destination ``/queue/TOPIC``, one for each ``/queue/TOPIC/NAME`` (which selects messages
by their name, `destinations.py`), and one for each application that consumes it as a virtual topic.

A durable subscription to a topic is a shared group of one member, so messages wait for it, and acknowledgements last.
As with ActiveMQ, ``client-id`` of CONNECT and ``activemq.subscriptionName`` name it; as with RabbitMQ, ``durable:true``
makes ``id`` its name, unless ``auto-delete:true``. The user is part of the name, so no user gets the subscription of
another one.
"""

from typing import Final, NamedTuple, final
from urllib.parse import quote, unquote

from martlet_stomp.mapping.destinations import Destination, Kind, destination_of
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import Subscribe, Unsubscribe

__all__ = ["GROUP", "Durable", "destination_of_group", "durable_group", "is_queue_group", "queue_group"]

GROUP: Final = "queue"
APPLICATION: Final = "application/"
# Longest name of a durable subscription, the same as of a session.
NAME_BYTES_MAX: Final = 1000


def queue_group(destination: Destination) -> str:
    """Return the name of the group that consumes the queue *destination*."""
    if destination.application:
        return APPLICATION + quote(destination.application, safe="")
    return f"{GROUP}/{destination.name}" if destination.name else GROUP


def is_queue_group(group: str) -> bool:
    """Return whether *group* consumes a queue; other groups have the messages sent to a topic since they began."""
    return group == GROUP or group.startswith(f"{GROUP}/")


def destination_of_group(topic: str, group: str) -> str:
    """Return the destination that *group* consumes on *topic*; without the name of a durable subscription."""
    if group.startswith(f"{GROUP}/"):
        return f"{Kind.QUEUE.value}{topic}/{group.removeprefix(f'{GROUP}/')}"
    queue = destination_of(topic)
    if group.startswith(APPLICATION):
        application = unquote(group.removeprefix(APPLICATION))
        return f"{Kind.QUEUE.value}Consumer.{application}.{queue.removeprefix(Kind.QUEUE.value)}"
    return queue if group == GROUP else Kind.TOPIC.value + queue.removeprefix(Kind.QUEUE.value)


@final
class Durable(NamedTuple):
    """A durable subscription: the platform topic, and its group there."""

    topic: str
    group: str


def durable_group(user: str, client_id: str | None, request: Subscribe | Unsubscribe, kind: Kind) -> str:
    """Return the group of the durable subscription in *request*; empty for none. Raises `StompError`."""
    name, owner = request.durable_name, client_id or ""
    if name is None and request.is_durable and not (isinstance(request, Subscribe) and request.auto_delete):
        name, owner = request.id, ""
    if kind is not Kind.TOPIC or name is None:
        return ""
    group = "/".join(("topic", *(quote(each, safe="") for each in (user, owner, name))))
    if len(group) > NAME_BYTES_MAX:
        text = f"the durable subscription has a name of {len(group)} bytes with its user and client-id"
        raise StompError(f"{text}; shorten them to {NAME_BYTES_MAX} together")
    return group
