"""Encodes and decodes the events of external transactions, the entries of their journal.

The journal is an internal topic of its own, with one event in msgpack a record. The projection follows only this topic,
so that a replay does not read the staged messages. Records that depend on each other are in one atomic group, or the
first is durable before the second is appended: a power cut may keep a later record and lose an earlier one.
"""

from typing import Any, Final, NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]

from martlet.records.layout import Buffer
from martlet.store.format.notes import OWN_PREFIX

__all__ = ["EVENTS_TOPIC", "EventKind", "Key", "Place", "StagedChunk", "StagedRecord", "decode_event", "encode_event"]

EVENTS_TOPIC: Final = OWN_PREFIX + "external-events"

# The identity and the name of a producer.
Key: TypeAlias = tuple[str, str]
# The next message to deliver: number of the part in the transaction, of the chunk in the part, of the message in it.
Place: TypeAlias = tuple[int, int, int]


class StagedRecord(NamedTuple):
    """A record of staged messages: offset in its queue, size, and number of messages, 0 if it continues a record."""

    offset: int
    size: int
    messages: int


class StagedChunk(NamedTuple):
    """The records of a chunk; several if its messages go to several queues.

    The records are in one atomic group with the event at log position ``position``, hence in the same segment.
    """

    position: int
    records: tuple[StagedRecord, ...]


class EventKind:
    """The first item of an event. The next two are identity and name of the producer, except in HOUR."""

    STATE: Final = 0  # epoch, runs, committed sequence, hour of the last use, and the rest of `state.Producer`
    STAGED: Final = 1  # sequence, part, epoch, number of the chunk, its records, its topics, whether it was moved
    COMMIT: Final = (
        2  # sequence, epoch, [part, chunks] of each, place, hour, whether it is a copy, the last one, content
    )
    PROGRESS: Final = 3  # sequence, place
    DROPPED: Final = 4  # sequence, parts
    FORGOTTEN: Final = 5
    HOUR: Final = 6  # the number of hours that the broker has run
    PREPARED: Final = (
        7  # sequence (-1 if the prepared one was dropped), epoch, [part, chunks] of each, hour, whether last, content
    )


def encode_event(kind: int, *items: object) -> bytes:
    """Return the body of an event's record."""
    return bytes(msgpack.packb((kind, *items)))


def decode_event(body: Buffer) -> list[Any]:
    """Return the kind of the event in *body*, and its other items."""
    items: list[Any] = msgpack.unpackb(body)
    return items
