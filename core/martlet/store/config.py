"""The keys of the store's configuration, with RocketMQ's names beside ours where it has one."""

from dataclasses import dataclass
from typing import Final, Literal

from martlet.config import setting

__all__ = ["QUEUE_FILE_ENTRIES", "StoreConfig"]

MIB: Final = 1024 * 1024

# RocketMQ's readers insist on this length (mappedFileSizeConsumeQueue, 6,000,000 bytes).
QUEUE_FILE_ENTRIES: Final = 300_000


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """How the log is kept; every size is bytes."""

    flush: Literal["sync", "async"] = setting(
        "sync", "sync: acknowledged is behind an fdatasync; async: written to the page cache, a power cut loses it"
    )
    flush_interval_ms: int = setting(500, "async only: how much a power cut can lose", unit="ms", low=1)
    segment_bytes: int = setting(
        1024 * MIB,
        "mappedFileSizeCommitLog: a file of the log; retention removes whole files",
        unit="bytes",
        low=1024,
        high=2**31 - 1,
    )
    chunk_bytes: int = setting(
        MIB, "the log is kept in memory and read from disk in pieces of this size", unit="bytes", low=256, high=64 * MIB
    )
    cache_bytes: int = setting(16 * MIB, "memory for pieces of the log that consumers read", unit="bytes", low=0)
    message_bytes_max: int = setting(
        4 * MIB, "maxMessageSize: a larger body is refused", unit="bytes", low=1, high=512 * MIB
    )
    group_messages_max: int = setting(
        1000,
        "messages and notes of an atomic group; its append keeps the event loop all the time",
        unit="messages",
        low=2,
    )
    group_bytes_max: int = setting(
        8 * MIB,
        "records of an atomic group together; they also have to fit into a segment",
        unit="bytes",
        low=1024,
        high=1024 * MIB,
    )
    queue_file_entries: int = setting(
        QUEUE_FILE_ENTRIES, "entries in a consume-queue file; RocketMQ opens no other number", unit="entries", low=1
    )
    persist_interval_ms: int = setting(
        1000,
        "how often consume queues and the key index go to their files; of more than 1,000 queues, only at checkpoints",
        unit="ms",
        low=1,
    )
    checkpoint_interval_ms: int = setting(
        10_000, "how much of the log a start after a crash reads again", unit="ms", low=1
    )
    checkpoint_bytes: int = setting(
        128 * MIB,
        "the same by the log's growth, whichever comes first; with more than 1,000 changed queues time alone counts",
        unit="bytes",
        low=1,
    )
    keys_index: bool = setting(True, "messageIndexEnable: find messages by key and unique key")
    index_slots: int = setting(5_000_000, "maxHashSlotNum: RocketMQ opens no other number", unit="slots", low=1)
    index_entries: int = setting(20_000_000, "maxIndexNum: RocketMQ opens no other number", unit="entries", low=2)
    verify_reads: bool = setting(
        True, "check the CRC of records read back from disk that this process did not write itself"
    )
    seal_records: bool = setting(
        False,
        "enabledAppendPropCRC: add a CRC over all of a record, as the property __CRC32#; "
        "without it a flipped bit outside of the body that leaves all lengths right is not noticed",
    )
    open_files_max: int = setting(256, "file descriptors of the store; the least used are closed", unit="files", low=4)
    file_reserved_hours: int = setting(72, "fileReservedTime: older segments are removed", unit="h", low=1)
    delete_when: str = setting("04", "deleteWhen: the hours of the day at which old segments go, separated by ;")
    disk_used_ratio_max: float = setting(
        0.75, "diskMaxUsedSpaceRatio: above it old segments go at any hour", low=0, high=1
    )
    disk_clean_ratio: float = setting(
        0.85, "diskSpaceCleanForciblyRatio: above it the oldest segments go whatever their age", low=0, high=1
    )
    disk_full_ratio: float = setting(
        0.90, "diskSpaceWarningLevelRatio: above it writes are refused until there is space", low=0, high=1
    )
    retention_interval_ms: int = setting(
        10_000, "cleanResourceInterval: how often age and disk use are looked at", unit="ms", low=1
    )
