"""Dead letters: copies of messages that a shared group has given up on."""

from typing import Final

from martlet.errors import Reason
from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, find_property, put_property
from martlet.store import Store
from martlet.tables.topics import Topics

__all__ = ["NEVER_STORED", "put_dead_letter"]

RECONSUME_TIMES_MAX: Final = (1 << 31) - 1  # the field's maximum; a sender may set any value
# Permanent reasons to refuse a dead letter: the record itself, or a group name too long for a dead letter topic
# (a table written by RocketMQ may have one).
NEVER_STORED: Final = frozenset((Reason.ILLEGAL, Reason.PARAMETER))


def put_dead_letter(store: Store, topics: Topics, name: str, record: Record) -> int:
    """Store a copy of *record* in the dead letter topic *name*; return its end in the log.

    The property names are those of RocketMQ's SendMessageBackHook.

    Raises:
      Refused: it cannot be stored now, or never (`NEVER_STORED`).
      StoreError: the store has failed.
    """
    topic = topics.ensure(name, 1)
    message = Message(
        topic.name,
        record.body,
        _letter_properties(record),
        0,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        min(record.reconsume_times + 1, RECONSUME_TIMES_MAX),
    )
    end = store.append(message, 0).end
    store.committer.commit_early()
    return end


def _letter_properties(record: Record) -> bytes:
    """Return the properties of *record*, plus its origin topic and message id if they fit."""
    # The store refuses U+0000, which a log written by RocketMQ may contain.
    properties = record.properties.replace(b"\x00", b"")
    origin_id = (record.store_host + record.position.to_bytes(8, "big")).hex().upper()
    for name, value in ((b"DLQ_ORIGIN_TOPIC", record.topic), (b"DLQ_ORIGIN_MESSAGE_ID", origin_id)):
        longer = properties if find_property(properties, name) else put_property(properties, name, value.encode())
        if len(longer) <= PROPERTIES_BYTES_MAX:
            properties = longer
    return properties
