"""What a start may rely on: the ``checkpoint`` file, and ``queues``, the list of what consume queues held.

``checkpoint`` is RocketMQ's page of 4096 bytes with its timestamps (StoreCheckpoint.java). Behind
them, in the same 512 bytes and hence written with them or not at all, stand the log position up to
which consume queues and key index are durable, and a CRC over everything; RocketMQ leaves
them alone, and when it has changed the timestamps the CRC no longer fits and they count for nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import Struct, error
from typing import Final
from zlib import crc32

from martlet.store.files import Files, atomic_write, read_file, read_generation

__all__ = ["Checkpoint", "QueueList", "read_checkpoint", "read_queue_list", "write_checkpoint", "write_queue_list"]

PAGE_BYTES: Final = 4096
TIMES: Final = Struct(">5q")
OURS_AT: Final = 128
OURS: Final = Struct(">8s3q")
OURS_MAGIC: Final = b"martlet1"
CRC: Final = Struct(">I")


@dataclass(slots=True)
class Checkpoint:
    """Below ``position`` the log and its consume-queue entries are durable, below ``index_position`` its keys.

    Both are -1 when the file was written by RocketMQ, which only says times: the store times up to
    which log, consume queues and index were flushed.
    """

    log_ms: int = 0
    queues_ms: int = 0
    index_ms: int = 0
    master_position: int = 0
    confirmed_position: int = 0
    position: int = -1
    index_position: int = -1
    index_entries: int = 0


def read_checkpoint(files: Files, path: str) -> Checkpoint | None:
    """Return the checkpoint; None when there is none or it is too short."""
    data = read_file(files.disk, path)
    if data is None or len(data) < TIMES.size:
        return None
    found = Checkpoint(*TIMES.unpack_from(data))
    if len(data) >= OURS_AT + OURS.size + CRC.size:
        magic, position, index_position, index_entries = OURS.unpack_from(data, OURS_AT)
        (crc,) = CRC.unpack_from(data, OURS_AT + OURS.size)
        if magic == OURS_MAGIC and crc == _crc(data):
            found.position, found.index_position, found.index_entries = position, index_position, index_entries
    return found


def _crc(data: bytes | bytearray) -> int:
    return crc32(data[OURS_AT : OURS_AT + OURS.size], crc32(data[: TIMES.size]))


def write_checkpoint(files: Files, path: str, checkpoint: Checkpoint) -> None:
    """Write and sync the page; one sector changes, so a crash leaves the old or the new."""
    page = bytearray(PAGE_BYTES)
    TIMES.pack_into(
        page,
        0,
        checkpoint.log_ms,
        checkpoint.queues_ms,
        checkpoint.index_ms,
        checkpoint.master_position,
        checkpoint.confirmed_position,
    )
    OURS.pack_into(page, OURS_AT, OURS_MAGIC, checkpoint.position, checkpoint.index_position, checkpoint.index_entries)
    CRC.pack_into(page, OURS_AT + OURS.size, _crc(page))
    try:
        files.write(path, page[: OURS_AT + OURS.size + CRC.size], 0)
    except FileNotFoundError:
        files.create(path, PAGE_BYTES)
        files.write(path, page, 0)
        files.disk.sync_directory(path.rpartition("/")[0])
    files.sync(path)


@dataclass(slots=True)
class QueueList:
    """First and next offset of each queue at least, and below which position a deleted topic's records are void."""

    queues: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    deleted: dict[str, int] = field(default_factory=dict)
    log_start: int = 0


LIST_MAGIC: Final = b"martletQ"
LIST_HEAD: Final = Struct(">8sIIq")  # magic, topics, CRC of the rest, first position of the log
LIST_TOPIC: Final = Struct(">hqi")  # bytes of the name, position below which it is deleted, number of queues
LIST_QUEUE: Final = Struct(">iqq")


def encode_queue_list(
    topics: Mapping[str, Mapping[int, tuple[int, int]]], deleted: Mapping[str, int], log_start: int
) -> bytes:
    """Return the file's bytes; *topics* holds first and next offset by topic and queue id."""
    parts: list[bytes] = []
    names = topics.keys() | deleted.keys()
    for name in sorted(names):
        queues = topics.get(name, {})
        encoded = name.encode()
        parts.append(LIST_TOPIC.pack(len(encoded), deleted.get(name, 0), len(queues)) + encoded)
        parts.extend(LIST_QUEUE.pack(queue_id, *queues[queue_id]) for queue_id in sorted(queues))
    body = b"".join(parts)
    return LIST_HEAD.pack(LIST_MAGIC, len(names), crc32(body, log_start & 0xFFFFFFFF), log_start) + body


def decode_queue_list(data: bytes) -> QueueList:
    """The inverse of `encode_queue_list`.

    Raises:
      ValueError: these are not its bytes, or they are damaged.
    """
    found = QueueList()
    try:
        magic, count, crc, found.log_start = LIST_HEAD.unpack_from(data)
        if magic != LIST_MAGIC or crc32(data[LIST_HEAD.size :], found.log_start & 0xFFFFFFFF) != crc:
            raise ValueError("the list of queues is damaged")
        at = LIST_HEAD.size
        for _ in range(count):
            size, deleted, queues = LIST_TOPIC.unpack_from(data, at)
            at += LIST_TOPIC.size
            name = data[at : at + size].decode()
            at += size
            if deleted:
                found.deleted[name] = deleted
            for _ in range(queues):
                queue_id, first_offset, next_offset = LIST_QUEUE.unpack_from(data, at)
                found.queues[name, queue_id] = (first_offset, next_offset)
                at += LIST_QUEUE.size
    except error as reason:
        raise ValueError("the list of queues is cut short") from reason
    return found


def read_queue_list(files: Files, path: str) -> QueueList | None:
    """Return the newest intact list; None when there is none."""
    return read_generation(files.disk, path, decode_queue_list)


def write_queue_list(
    files: Files,
    path: str,
    topics: Mapping[str, Mapping[int, tuple[int, int]]],
    deleted: Mapping[str, int],
    log_start: int,
) -> None:
    """Replace the list."""
    atomic_write(files.disk, path, encode_queue_list(topics, deleted, log_start))
