"""Which shared group consumes a queue.

There is one on each topic, one for each filter of names in a topic, and one for each application that consumes a
virtual topic.
"""

from typing import Final
from urllib.parse import quote, unquote

from martlet_stomp.mapping.destinations import Destination, Kind, destination_of

__all__ = ["GROUP", "destination_of_group", "is_queue_group", "queue_group"]

GROUP: Final = "queue"
APPLICATION: Final = "application/"


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
