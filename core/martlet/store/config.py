"""The store's configuration, with the names of RocketMQ's corresponding keys."""

from typing import Final, Literal

from martlet.config import Settings, setting

__all__ = ["QUEUE_FILE_ENTRIES", "StoreConfig"]

MIB: Final = 1024 * 1024

# mappedFileSizeConsumeQueue is 6,000,000 bytes by default.
QUEUE_FILE_ENTRIES: Final = 300_000
# Maximum size of a record beside its body: properties, topic, and fields of fixed size.
SPARE_BYTES: Final = 64 * 1024


def check_hours(text: str) -> str:
    """Return an empty text if *text* is a list of hours of the day, which may be empty; otherwise the requirement."""
    parts = [part.strip() for part in text.split(";")] if text else []
    is_valid = all(part.isascii() and part.isdecimal() and len(part) <= 2 and int(part) < 24 for part in parts)
    return "" if is_valid else "hours from 0 to 23, separated by ; such as 04 or 04;16"


class StoreConfig(Settings):
    """The log and its files."""

    flush: Literal["sync", "async"] = setting(
        "sync",
        "sync: acknowledge after fdatasync; async: acknowledge after the write to the page cache (lost at a power cut)",
    )
    flush_interval_ms: int = setting(
        500,
        "time between fdatasyncs with flush async, and with sync for what nobody waits for, such as MQTT's QoS 0: "
        "the most that a power cut can lose",
        unit="ms",
        low=1,
    )
    segment_bytes: int = setting(
        1024 * MIB,
        "size of a log file of a new store; retention removes whole files (mappedFileSizeCommitLog)",
        unit="bytes",
        low=1024,
        high=2**31 - 1,
    )
    page_bytes: int = setting(
        MIB, "size of the pages in which the log is cached and read from disk", unit="bytes", low=256, high=64 * MIB
    )
    cache_bytes: int = setting(16 * MIB, "cache for pages that consumers read from disk", unit="bytes", low=0)
    message_bytes_max: int = setting(
        4 * MIB, "largest body of a message (maxMessageSize)", unit="bytes", low=1, high=512 * MIB
    )
    group_messages_max: int = setting(
        2000,
        "messages and notes of an atomic group, such as all of one read of a client, which are up to 1024; "
        "one append blocks the event loop from start to end",
        unit="messages",
        low=1200,
    )
    group_bytes_max: int = setting(
        8 * MIB,
        "total size of an atomic group's records; two of the largest messages may always be one",
        unit="bytes",
        low=1024,
        high=1024 * MIB,
    )
    queue_file_entries: int = setting(
        QUEUE_FILE_ENTRIES,
        "entries per consume queue file of a new store (mappedFileSizeConsumeQueue / 20)",
        unit="entries",
        low=1,
    )
    light_queues_max: int = setting(
        20_000,
        "maxLmqConsumeQueueNum: each takes 1.4 KB of memory and 12 KB of disk; messages for more are refused",
        unit="queues",
        low=0,
    )
    light_names_max: int = setting(
        1000,
        "light topics that a message, batch or atomic group may name; each costs 2 to 3 us on the event loop",
        unit="names",
        low=1,
    )
    persist_interval_ms: int = setting(
        1000,
        "how often consume queues and the key index are written; with more than 1,000 queues, only at checkpoints",
        unit="ms",
        low=1,
    )
    checkpoint_interval_ms: int = setting(
        10_000,
        "time between checkpoints; a start after a crash reads the log from the last one on",
        unit="ms",
        low=1,
    )
    checkpoint_bytes: int = setting(
        128 * MIB,
        "growth of the log that causes an earlier checkpoint; ignored with more than 1,000 changed queues",
        unit="bytes",
        low=1,
    )
    keys_index: bool = setting(True, "index messages by key and unique key (messageIndexEnable)")
    index_slots: int = setting(
        5_000_000,
        "hash slots per file of the key index of a new store (maxHashSlotNum)",
        unit="slots",
        low=1,
    )
    index_entries: int = setting(
        20_000_000,
        "entries per file of the key index of a new store (maxIndexNum)",
        unit="entries",
        low=2,
    )
    verify_reads: bool = setting(
        True, "check the CRC of records that are read from disk, except those that this process wrote"
    )
    record_crcs: bool = setting(
        False,
        "add a CRC of the whole record as property __CRC32# (enabledAppendPropCRC); "
        "the CRC that every record has covers only its body",
    )
    open_files_max: int = setting(
        256, "open files of the store; the least recently used are closed", unit="files", low=4
    )
    file_reserved_hours: int = setting(
        72, "age at which retention removes a segment (fileReservedTime)", unit="h", low=1
    )
    delete_when: str = setting(
        "04",
        "hours of the day at which retention removes segments, separated by ; (deleteWhen)",
        check=check_hours,
    )
    disk_used_ratio_max: float = setting(
        0.75, "disk usage above which old segments are removed at any hour (diskMaxUsedSpaceRatio)", low=0, high=1
    )
    disk_clean_ratio: float = setting(
        0.85,
        "disk usage above which the oldest segments are removed whatever their age (diskSpaceCleanForciblyRatio)",
        low=0,
        high=1,
    )
    disk_full_ratio: float = setting(
        0.90, "disk usage above which writes are refused (diskSpaceWarningLevelRatio)", low=0, high=1
    )
    retention_interval_ms: int = setting(
        10_000, "how often retention checks age and disk usage (cleanResourceInterval)", unit="ms", low=1
    )

    @property
    def group_room(self) -> int:
        """The maximum size of an atomic group in bytes; two of the largest records fit."""
        return max(self.group_bytes_max, 2 * (self.message_bytes_max + SPARE_BYTES))
