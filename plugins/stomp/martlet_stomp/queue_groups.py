"""Which shared group consumes a queue: one on each topic, and one for each filter of names in a topic."""

from typing import Final

from .destinations import Destination, Kind, destination_of

__all__ = ["GROUP", "destination_of_group", "is_queue_group", "queue_group"]

GROUP: Final = "queue"


def queue_group(destination: Destination) -> str:
    """Return the group that consumes the queue *destination*."""
    return f"{GROUP}/{destination.name}" if destination.name else GROUP


def is_queue_group(group: str) -> bool:
    """Return whether *group* consumes a queue; others are durable subscriptions."""
    return group == GROUP or group.startswith(f"{GROUP}/")


def destination_of_group(topic: str, group: str) -> str:
    """Return what *group* consumes on *topic*, as a client writes it; without the name of a durable subscription."""
    if group.startswith(f"{GROUP}/"):
        return f"{Kind.QUEUE.value}{topic}/{group.removeprefix(f'{GROUP}/')}"
    queue = destination_of(topic)
    return queue if group == GROUP else Kind.TOPIC.value + queue.removeprefix(Kind.QUEUE.value)
