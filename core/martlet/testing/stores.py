"""Parts of tests of and around the store: a clock set by hand, small files, short messages."""

from collections.abc import Sequence
from typing import Any, Final, final

from msgspec.structs import replace

from martlet.message import Message, Placed
from martlet.records.codec import decode_records
from martlet.records.layout import Buffer
from martlet.store import Store, StoreConfig
from martlet.store.append.items import AppendResult
from martlet.store.queues.queues import Queue

__all__ = ["HOST", "ManualClock", "bodies", "drain", "message", "small_config"]

HOST: Final = bytes((127, 0, 0, 1)) + (10911).to_bytes(4, "big")


@final
class ManualClock:
    """A wall clock that only advances when a test sets it."""

    def __init__(self, ms: int = 1_700_000_000_000) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms


def small_config(**changes: Any) -> StoreConfig:
    """Segments of 4 KiB and pages of 1 KiB, so that a short test meets every border; no disk is ever too full."""
    small = StoreConfig(
        segment_bytes=4096,
        page_bytes=1024,
        cache_bytes=4096,
        queue_file_entries=16,
        index_slots=64,
        index_entries=128,
        open_files_max=8,
        disk_used_ratio_max=1.0,
        disk_clean_ratio=1.0,
        disk_full_ratio=1.0,
        delete_when="",
    )
    return replace(small, **changes)


def message(
    body: bytes | str = b"hello", topic: str = "T", tags: str = "", keys: str = "", unique: str = ""
) -> Message:
    """A message with the properties that the store reads."""
    pairs = (("TAGS", tags), ("KEYS", keys), ("UNIQ_KEY", unique))
    properties = "".join(f"{name}\x01{value}\x02" for name, value in pairs if value).encode()
    return Message(topic, body.encode() if isinstance(body, str) else body, properties, born_ms=1, born_host=HOST)


def append_group(store: Store, messages: Sequence[Message], queue_ids: Sequence[int]) -> list[Placed]:
    """Append *messages* as an atomic group, each to its queue; return locations. Raises as `Writer.append_all`."""
    items = [store.writer.item(each, queue_id) for each, queue_id in zip(messages, queue_ids, strict=True)]
    return placed_of(store.writer.append_all(items, atomic=True))


def append_batch(store: Store, messages: Sequence[Message], queue_id: int) -> list[Placed]:
    """Append *messages* as an atomic group to the queues of that id; return locations. Raises as `append_all`."""
    return append_group(store, messages, [queue_id] * len(messages))


def placed_of(result: AppendResult) -> list[Placed]:
    """Return the location of each message of *result*. Raises `Refused` if one was not stored."""
    return [result.placed(place) for place in range(len(result.positions))]


def bodies(pieces: list[Buffer]) -> list[bytes]:
    """Return the bodies of the records in *pieces*; a record may continue in the next piece."""
    return [record.body for record in decode_records(b"".join(pieces))]


def drain(store: Store, queue: Queue, *, max_messages: int = 5, budget_bytes: int = 700) -> list[bytes]:
    """Read everything readable of *queue* as a consumer would, answer by answer; return the bodies."""
    found: list[bytes] = []
    offset = queue.local_from
    while offset < store.readers.end_offset(queue):
        result = store.readers.read(queue, offset, max_messages, budget_bytes)
        if result.next_offset <= offset:
            raise AssertionError(f"read of {queue} at {offset} did not move on: {result}")
        found += bodies(result.pieces)
        offset = result.next_offset
    return found
