"""Internal records of the store: facts about queues that no other record in the log contains.

A *deletion* invalidates all earlier records of a topic. An *offset note* gives the next offsets of queues whose records
retention removes, or which have none yet. An *expiry note* gives the first offsets of queues whose topic's own
retention expired messages. All are records of `NOTES_TOPIC`, a name that no client can use, with the transaction state
ROLLBACK, which neither Martlet nor RocketMQ puts into a consume queue or the key index. A scan of the log applies them
in log order, so deletions and expiries hold in every rebuild, wherever it begins.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgpack  # type: ignore[import-untyped]

from martlet.message import Message
from martlet.records.layout import ROLLBACK

__all__ = [
    "NOTES_TOPIC",
    "OWN_PREFIX",
    "Note",
    "QueueEnd",
    "deletion",
    "expiry_notes",
    "is_note",
    "offset_notes",
    "read_note",
]

# Prefix of no legal topic name: no client can create, list, read or write such a topic (TopicValidator allows no dot).
OWN_PREFIX: Final = "martlet."
NOTES_TOPIC: Final = OWN_PREFIX + "store"
NOTES_BYTES: Final = NOTES_TOPIC.encode()

QueueEnd = tuple[str, int, int]


class Note(NamedTuple):
    """The content of a note, with queues as topic, queue id and offset; a note of a later version counts as empty.

    ``deleted`` is the topic that was deleted, or empty. The queues of ``ends`` continue at these offsets, and consumers
    get no message of the queues of ``expired`` before these offsets.
    """

    deleted: str = ""
    ends: Sequence[QueueEnd] = ()
    expired: Sequence[QueueEnd] = ()


def _note(content: dict[str, object], host: bytes, now_ms: int) -> Message:
    body: bytes = msgpack.packb(content)
    return Message(NOTES_TOPIC, body, b"", sys_flag=ROLLBACK, born_ms=now_ms, born_host=host)


def deletion(topic: str, host: bytes, now_ms: int) -> Message:
    """Return the record that invalidates all earlier records of *topic*."""
    return _note({"deleted": topic}, host, now_ms)


def offset_notes(ends: Iterable[QueueEnd], body_bytes_max: int, host: bytes, now_ms: int) -> Iterator[Message]:
    """Return records of limited size with the next offset of each queue in *ends* (topic, queue id, offset)."""
    return _notes("next", ends, body_bytes_max, host, now_ms)


def expiry_notes(firsts: Iterable[QueueEnd], body_bytes_max: int, host: bytes, now_ms: int) -> Iterator[Message]:
    """Return records of limited size with the first offset of each queue in *firsts* (topic, queue id, offset)."""
    return _notes("expired", firsts, body_bytes_max, host, now_ms)


def _notes(key: str, offsets: Iterable[QueueEnd], body_bytes_max: int, host: bytes, now_ms: int) -> Iterator[Message]:
    part: list[QueueEnd] = []
    size = 0
    for each in offsets:
        cost = len(each[0].encode()) + 24
        if part and size + cost > body_bytes_max:
            yield _note({key: part}, host, now_ms)
            part, size = [], 0
        part.append(each)
        size += cost
    if part:
        yield _note({key: part}, host, now_ms)


def is_note(topic: bytes) -> bool:
    """Return whether *topic* is the topic of these records."""
    return topic == NOTES_BYTES


def read_note(body: bytes) -> Note:
    """Return the content of the note with *body*."""
    try:
        content = msgpack.unpackb(body)
        deleted, ends, expired = (content.get(key, ()) for key in ("deleted", "next", "expired"))
        return Note(deleted if isinstance(deleted, str) else "", _offsets(ends), _offsets(expired))
    except (ValueError, TypeError, AttributeError):
        return Note()  # written by a later version


def _offsets(rows: Iterable[tuple[object, int, int]]) -> list[QueueEnd]:
    return [(str(topic), int(queue_id), int(offset)) for topic, queue_id, offset in rows]
