"""The records of external transactions, in two internal topics.

`STAGED_TOPIC` has the staged messages. Body of a record: a head in msgpack, after its length (u16), then for each
message the lengths of body (u32) and properties (u16) and its flag (i32), then body and properties of each message. If
that is longer than a record may be, because of one message of the largest size, further records continue it.

`EVENTS_TOPIC` has what happens to them, one event in msgpack a record. The projection follows only this topic, so that
a replay does not read the messages. Records that depend on each other are in one atomic group, or the first is durable
before the second is appended: after a power cut, a later one may be there and an earlier one not.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]

from martlet.contracts import StagedBatch
from martlet.records.layout import Buffer
from martlet.store.format.notes import OWN_PREFIX

__all__ = [
    "EVENTS_TOPIC",
    "STAGED_TOPIC",
    "Chunk",
    "EventKind",
    "Key",
    "Member",
    "Place",
    "Stored",
    "cut",
    "decode_batch",
    "encode_batch",
    "encode_event",
    "staged_bytes",
]

EVENTS_TOPIC: Final = OWN_PREFIX + "external-events"
STAGED_TOPIC: Final = OWN_PREFIX + "external-staged"

HEAD: Final = Struct(">HI")
ROW: Final = Struct(">IHi")

# The identity and the name of a producer.
Key: TypeAlias = tuple[str, str]
# Body, encoded properties, flag.
Member: TypeAlias = tuple[Buffer, bytes, int]
# The next message to deliver: number of the part in the transaction, of the chunk in the part, of the message in it.
Place: TypeAlias = tuple[int, int, int]


class Stored(NamedTuple):
    """A record of staged messages: its offset in its queue, its size, its number of messages, 0 if it continues one."""

    offset: int
    size: int
    messages: int


class Chunk(NamedTuple):
    """The records of a chunk, which are several if its messages go to several queues.

    They are in one atomic group with the event at log position ``position``, hence in one segment with it.
    """

    position: int
    records: tuple[Stored, ...]


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


def staged_bytes(batch: StagedBatch) -> int:
    """Return about how many bytes the record of *batch* needs."""
    return 1024 + sum([ROW.size + len(body) + len(properties) for body, properties, _ in batch.members])


def encode_batch(batch: StagedBatch) -> bytes:
    """Return the body of a record of `STAGED_TOPIC`."""
    head = msgpack.packb(
        (batch.topic, batch.queue_id, batch.sys_flag, batch.born_ms, batch.born_host, batch.reconsume_times)
    )
    members = batch.members
    rows = [ROW.pack(len(body), len(properties), flag) for body, properties, flag in members]
    payload = chain.from_iterable([member[:2] for member in members])
    return b"".join([HEAD.pack(len(head), len(members)), head, *rows, *payload])


def cut(body: bytes, messages: int, bytes_max: int) -> tuple[list[bytes], list[int]]:
    """Return *body* in pieces that fit a record, and the number of messages of each: 0 for all but the first."""
    pieces = [body[at : at + bytes_max] for at in range(0, len(body), bytes_max)] if len(body) > bytes_max else [body]
    return pieces, [messages] + [0] * (len(pieces) - 1)


def decode_batch(data: Buffer) -> tuple[StagedBatch, Iterator[Member]]:
    """Return the batch in *data*, without its members, and an iterator over these."""
    head_bytes, count = HEAD.unpack_from(data)
    rows_at = HEAD.size + head_bytes
    fields: Sequence[Any] = msgpack.unpackb(data[HEAD.size : rows_at])
    topic, queue_id, sys_flag, born_ms, born_host, reconsume_times = fields
    batch = StagedBatch(topic, queue_id, (), sys_flag, born_ms, born_host, reconsume_times)
    return batch, _members(data, rows_at, rows_at + count * ROW.size)


def _members(data: Buffer, rows_at: int, at: int) -> Iterator[Member]:
    for body_bytes, properties_bytes, flag in ROW.iter_unpack(data[rows_at:at]):
        body_end = at + body_bytes
        end = body_end + properties_bytes
        yield data[at:body_end], bytes(data[body_end:end]), flag
        at = end
