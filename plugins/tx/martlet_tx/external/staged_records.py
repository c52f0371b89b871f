"""The records of staged messages, in an internal topic.

Body of a record: a head in msgpack, after its length (u16), then for each message the lengths of body (u32) and
properties (u16) and its flag (i32), then body and properties of each message. If the body is longer than a record may
be, because of one message of the largest size, further records continue it.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from struct import Struct
from typing import Any, Final, TypeAlias

import msgpack  # type: ignore[import-untyped]

from martlet.contracts import StagedBatch
from martlet.records.layout import Buffer
from martlet.store.format.notes import OWN_PREFIX

__all__ = ["STAGED_TOPIC", "Member", "cut", "decode_batch", "encode_batch", "staged_bytes"]

STAGED_TOPIC: Final = OWN_PREFIX + "external-staged"

HEAD: Final = Struct(">HI")
ROW: Final = Struct(">IHi")

# Body, encoded properties, flag.
Member: TypeAlias = tuple[Buffer, bytes, int]


def staged_bytes(batch: StagedBatch) -> int:
    """Return the approximate size of the record of *batch* in bytes."""
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
    """Return *body* in pieces that fit a record, each with its number of messages: 0 for all but the first."""
    pieces = [body[at : at + bytes_max] for at in range(0, len(body), bytes_max)] if len(body) > bytes_max else [body]
    return pieces, [messages] + [0] * (len(pieces) - 1)


def decode_batch(data: Buffer) -> tuple[StagedBatch, Iterator[Member]]:
    """Return the batch in *data*, without members, and an iterator over its members."""
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
