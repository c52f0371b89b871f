"""Internal records of the store: facts on queues that the other records in the log do not tell.

A *deletion* invalidates all earlier records of a topic. An *offset note* gives the next offsets of queues whose records
retention removes, or which have none yet. Both are records of `NOTES_TOPIC`, a name that no client can use, with the
transaction state ROLLBACK, which neither Martlet nor RocketMQ puts into a consume queue or the key index. A scan of the
log applies them in log order, so deletions hold in every rebuild, wherever it begins.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import msgpack  # type: ignore[import-untyped]

from martlet.message import Message
from martlet.records.layout import ROLLBACK

__all__ = ["NOTES_TOPIC", "OWN_PREFIX", "deletion", "is_note", "offset_notes", "read_note"]

# No legal name of a topic begins with it: no client can create, list, read or write one (TopicValidator allows no dot).
OWN_PREFIX: Final = "martlet."
NOTES_TOPIC: Final = OWN_PREFIX + "store"
NOTES_BYTES: Final = NOTES_TOPIC.encode()

QueueEnd = tuple[str, int, int]


def _note(content: dict[str, object], host: bytes, now_ms: int) -> Message:
    body: bytes = msgpack.packb(content)
    return Message(NOTES_TOPIC, body, b"", sys_flag=ROLLBACK, born_ms=now_ms, born_host=host)


def deletion(topic: str, host: bytes, now_ms: int) -> Message:
    """Return the record that invalidates all earlier records of *topic*."""
    return _note({"deleted": topic}, host, now_ms)


def offset_notes(ends: Iterable[QueueEnd], body_bytes_max: int, host: bytes, now_ms: int) -> Iterator[Message]:
    """Return records of limited size with the next offset of each queue in *ends* (topic, queue id, offset)."""
    part: list[QueueEnd] = []
    size = 0
    for end in ends:
        cost = len(end[0].encode()) + 24
        if part and size + cost > body_bytes_max:
            yield _note({"next": part}, host, now_ms)
            part, size = [], 0
        part.append(end)
        size += cost
    if part:
        yield _note({"next": part}, host, now_ms)


def is_note(topic: bytes) -> bool:
    """Return whether *topic* is the topic of these records."""
    return topic == NOTES_BYTES


def read_note(body: bytes) -> tuple[str, list[QueueEnd]]:
    """Return the topic that a note deletes, or an empty name, and the queue ends that it contains."""
    try:
        content = msgpack.unpackb(body)
        deleted = content.get("deleted", "")
        ends = [(str(topic), int(queue_id), int(offset)) for topic, queue_id, offset in content.get("next", ())]
        return (deleted if isinstance(deleted, str) else ""), ends
    except (ValueError, TypeError, AttributeError):
        return "", []  # written by a later version
