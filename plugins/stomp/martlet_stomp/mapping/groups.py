"""Which shared group consumes a queue, and which one is a durable subscription.

A queue's group is one on each topic, one for each filter of names in a topic, and one for each application that
consumes a virtual topic.

A durable subscription to a topic is a shared group of one member, so that messages wait for it, and what is
acknowledged stays so. With ActiveMQ, ``client-id`` of CONNECT and ``activemq.subscriptionName`` name one; with
RabbitMQ, ``durable:true`` makes ``id`` its name, unless ``auto-delete:true``. The user is part of its name: nobody gets
the subscription of another one.
"""

from typing import Final, NamedTuple, final
from urllib.parse import quote, unquote

from martlet_stomp.mapping.destinations import Destination, Kind, destination_of
from martlet_stomp.wire.errors import StompError
from martlet_stomp.wire.packets import Subscribe, Unsubscribe

__all__ = ["GROUP", "Durable", "destination_of_group", "durable_group", "is_queue_group", "queue_group"]

GROUP: Final = "queue"
APPLICATION: Final = "application/"
# Of a durable subscription: as long as a session's name may be.
NAME_BYTES_MAX: Final = 1000


def queue_group(destination: Destination) -> str:
    """Return the group that consumes the queue *destination*."""
    if destination.application:
        return APPLICATION + quote(destination.application, safe="")
    return f"{GROUP}/{destination.name}" if destination.name else GROUP


def is_queue_group(group: str) -> bool:
    """Return whether *group* consumes a queue of its own; others have what is sent to a topic since they began."""
    return group == GROUP or group.startswith(f"{GROUP}/")


def destination_of_group(topic: str, group: str) -> str:
    """Return what *group* consumes on *topic*, as a client writes it; without the name of a durable subscription."""
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
    """Return the group of the durable subscription that *request* is about; empty for none. Raises `StompError`."""
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
