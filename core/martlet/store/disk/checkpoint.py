"""The ``checkpoint`` page: the ends of the durable and of the indexed log, and the id of the valid journal of queues.

``checkpoint`` is RocketMQ's page of 4096 bytes with its timestamps (StoreCheckpoint.java). Martlet's fields follow in
the same 512 bytes, so both are written or neither is; they have their own CRC. RocketMQ does not change those bytes, so
they stay valid when it writes its timestamps.
"""

from struct import Struct
from typing import Final
from zlib import crc32

import msgspec

from martlet.store.disk.files import Files, read_file

__all__ = ["Checkpoint", "parse_checkpoint", "read_checkpoint", "stopped_in_order", "write_checkpoint"]

PAGE_BYTES: Final = 4096
TIMES: Final = Struct(">5q")
OURS_AT: Final = 128
# Magic, log position; position, entries and headers' CRC of the key index; generation, length and CRC of the journal;
# orderly stop; a copy of the timestamps: if it differs from them, RocketMQ has opened the store since.
OURS: Final = Struct(">8s3qI2qI?5q")
OURS_MAGIC: Final = b"martlet2"
CRC: Final = Struct(">I")
OURS_END: Final = OURS_AT + OURS.size + CRC.size
NO_JOURNAL: Final = -1


class Checkpoint(msgspec.Struct):
    """Below ``position`` the log and its consume-queue entries are durable; below ``index_position`` the keys are.

    ``position`` is -1 if only RocketMQ's part of the page could be read: its timestamps give the store time up to which
    the log, consume queues and index were flushed. ``journal_generation`` is -1 if the queues must be rebuilt from the
    log.
    """

    log_ms: int = 0
    queues_ms: int = 0
    index_ms: int = 0
    master_position: int = 0
    confirmed_position: int = 0
    position: int = -1
    index_position: int = -1
    index_entries: int = 0
    index_crc: int = 0
    journal_generation: int = NO_JOURNAL
    journal_length: int = 0
    journal_crc: int = 0
    # The store was closed in order, and nothing was appended after `position`.
    orderly: bool = False
    # After a read: whether another program has written the timestamps since, and whether Martlet may ever have written
    # this page.
    shared: bool = False
    known: bool = True


def read_checkpoint(files: Files, path: str) -> Checkpoint | None:
    """Return the checkpoint; None if there is none or it is too short."""
    return parse_checkpoint(read_file(files.disk, path))


def parse_checkpoint(data: bytes | None) -> Checkpoint | None:
    """Return the checkpoint in the page *data*; None if there is none or it is too short."""
    if data is None or len(data) < TIMES.size:
        return None
    times = TIMES.unpack_from(data)
    checkpoint = Checkpoint(*times)
    # RocketMQ creates the file as a whole page.
    checkpoint.known = len(data) < PAGE_BYTES or any(data[OURS_AT:OURS_END])
    if len(data) < OURS_END:
        return checkpoint
    (page_crc,) = CRC.unpack_from(data, OURS_AT + OURS.size)
    if data[OURS_AT : OURS_AT + 8] == OURS_MAGIC and page_crc == crc32(data[OURS_AT : OURS_AT + OURS.size]):
        (
            _,
            checkpoint.position,
            checkpoint.index_position,
            checkpoint.index_entries,
            checkpoint.index_crc,
            checkpoint.journal_generation,
            checkpoint.journal_length,
            checkpoint.journal_crc,
            checkpoint.orderly,
            *copied,
        ) = OURS.unpack_from(data, OURS_AT)
        checkpoint.shared = tuple(copied) != times
    return checkpoint


def stopped_in_order(checkpoint: Checkpoint | None, *, abort: bool) -> bool:
    """Return whether the last process closed the store; *abort*: whether RocketMQ's mark, that file, exists."""
    if checkpoint is None or checkpoint.position < 0:
        return not abort
    return checkpoint.orderly and not (abort and checkpoint.shared)


def write_checkpoint(files: Files, path: str, checkpoint: Checkpoint) -> None:
    """Write and sync the page. Only one sector changes, so a crash leaves the old page or the new one."""
    page = bytearray(PAGE_BYTES)
    times = (
        checkpoint.log_ms,
        checkpoint.queues_ms,
        checkpoint.index_ms,
        checkpoint.master_position,
        checkpoint.confirmed_position,
    )
    TIMES.pack_into(page, 0, *times)
    OURS.pack_into(
        page,
        OURS_AT,
        OURS_MAGIC,
        checkpoint.position,
        checkpoint.index_position,
        checkpoint.index_entries,
        checkpoint.index_crc,
        checkpoint.journal_generation,
        checkpoint.journal_length,
        checkpoint.journal_crc,
        checkpoint.orderly,
        *times,
    )
    CRC.pack_into(page, OURS_AT + OURS.size, crc32(page[OURS_AT : OURS_AT + OURS.size]))
    try:
        short = files.size(path) < PAGE_BYTES
        files.write(path, page[:OURS_END], 0)
        if short:
            files.truncate(path, PAGE_BYTES)
    except FileNotFoundError:
        files.create(path, PAGE_BYTES)
        files.write(path, page, 0)
        files.disk.sync_directory(path.rpartition("/")[0])
    files.sync(path)
