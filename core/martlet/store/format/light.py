"""Light queues: further queues that index a record, named by the record itself (RocketMQ's light message queues, LMQ).

A light queue is queue 0 of a light topic, whose name begins with ``%LMQ%``. The property `DISPATCH` of a record lists
light topics, and `OFFSETS` the record's offset in each, both separated by commas (RocketMQ LmqDispatch.java). Only the
store writes `OFFSETS`, so each record in the log tells all its queues and offsets.
"""

import re
from collections.abc import Iterable
from typing import Final

from martlet.errors import Reason, Refused
from martlet.message import Record, find_property, put_property, remove_property
from martlet.records.layout import RecordView

__all__ = [
    "DISPATCH",
    "LIGHT_PREFIX",
    "MULTI",
    "OFFSETS",
    "check_light_name",
    "is_light",
    "light_places",
    "light_topics",
    "may_be_indexed",
    "names_place",
    "places",
    "with_light_topics",
    "with_places",
    "without_offsets",
]

LIGHT_PREFIX: Final = "%LMQ%"
DISPATCH: Final = "INNER_MULTI_DISPATCH"
OFFSETS: Final = "INNER_MULTI_QUEUE_OFFSET"
# The common prefix of both names, for a quick test of properties.
MULTI: Final = b"INNER_MULTI_"

PREFIX_BYTES: Final = LIGHT_PREFIX.encode()
DISPATCH_BYTES: Final = DISPATCH.encode()
OFFSETS_BYTES: Final = OFFSETS.encode()
CONTROL: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # would break lines of logs and listings
TOPIC_BYTES_MAX: Final = 255  # of a directory name
OFFSET_DIGITS_MAX: Final = 18

# Messages of these topics are copies of other messages, with the same properties (RocketMQ MixAll.topicAllowsLMQ).
NEVER_PREFIXES: Final = (b"%RETRY%", b"%DLQ%", b"rmq_sys_")
SCHEDULE_TOPIC: Final = b"SCHEDULE_TOPIC_XXXX"
# RocketMQ indexes half messages as well, but nobody may see them before their transaction is committed. `martlet.` is
# ours.
NEVER_STORED: Final = (b"RMQ_SYS_TRANS_", b"martlet.")


def is_light(topic: str) -> bool:
    """Return whether *topic* is the name of a light topic."""
    return topic.startswith(LIGHT_PREFIX) and len(topic) > len(LIGHT_PREFIX)


def may_be_indexed(topic: bytes) -> bool:
    """Return whether messages of *topic* are indexed in the light queues that they name."""
    return _may_name_places(topic) and not topic.startswith(NEVER_STORED) and not topic.startswith(PREFIX_BYTES)


def _may_name_places(topic: bytes) -> bool:
    return not topic.startswith(NEVER_PREFIXES) and topic != SCHEDULE_TOPIC


def light_topics(properties: bytes) -> list[str]:
    """Return the light topics that a message with *properties* names, without duplicates.

    Raises:
      Refused: a name is invalid (Reason.ILLEGAL).
    """
    names = find_property(properties, DISPATCH_BYTES)
    return [_checked(name) for name in dict.fromkeys(names.split(b",")) if name]


def check_light_name(topic: str) -> None:
    """Raise `Refused` (ILLEGAL) unless *topic* is a valid name for a new light topic."""
    _checked(topic.encode("utf-8", "surrogatepass"))


def _checked(name: bytes) -> str:
    if not name.startswith(PREFIX_BYTES) or len(name) == len(PREFIX_BYTES):
        raise Refused(
            Reason.ILLEGAL, f"{_quoted(name)} in {DISPATCH} is no light topic; its name must begin with %LMQ%"
        )
    if b"/" in name or len(name) > TOPIC_BYTES_MAX or _is_half_lite(name[len(PREFIX_BYTES) :]):
        limit = f"use no / and at most {TOPIC_BYTES_MAX} bytes, and %LMQ%$ only for %LMQ%$parent$child"
        raise Refused(Reason.ILLEGAL, f"{_quoted(name)} in {DISPATCH} is an invalid light topic; {limit}")
    try:
        text = name.decode()
    except UnicodeDecodeError as error:
        raise Refused(Reason.ILLEGAL, f"{_quoted(name)} in {DISPATCH} is not UTF-8") from error
    if CONTROL.search(text) is not None:
        raise Refused(
            Reason.ILLEGAL, f"{_quoted(name)} in {DISPATCH} has a control character; use none in a light topic"
        )
    return text


def _is_half_lite(rest: bytes) -> bool:
    """Return whether *rest* of a name is almost a lite topic of RocketMQ 5.5, whose dispatcher stops at such names."""
    if not rest.startswith(b"$"):
        return False
    parts = rest[1:].split(b"$")
    return len(parts) != 2 or not all(parts)


def _quoted(name: bytes) -> str:
    return repr(name[:100].decode("utf-8", "replace"))


def with_light_topics(properties: bytes, names: Iterable[str]) -> bytes:
    """Return *properties* changed so that exactly the light topics *names* index the message."""
    listed = ",".join(names).encode()
    if find_property(properties, DISPATCH_BYTES) == listed:
        return properties
    return put_property(properties, DISPATCH_BYTES, listed) if listed else remove_property(properties, DISPATCH_BYTES)


def with_places(properties: bytes, names: list[str], offsets: list[int]) -> bytes:
    """Return *properties*, a result of `without_offsets`, with light topics *names* and *offsets*, one for each."""
    properties = with_light_topics(properties, names)
    separator = b"" if properties[-1] == 2 else b"\x02"
    return b"%b%b%b\x01%b\x02" % (properties, separator, OFFSETS_BYTES, ",".join(map(str, offsets)).encode())


def without_offsets(properties: bytes) -> bytes:
    """Return *properties* without offsets sent by a client or copied from another record."""
    return remove_property(properties, OFFSETS_BYTES)


def light_places(topic: bytes, properties: bytes) -> list[tuple[bytes, int]]:
    """Return the light topics that a stored record of *topic* names as its indexes, and its offset in each."""
    if not _may_name_places(topic):
        return []
    names, offsets = _listed(properties)
    if len(names) != len(offsets):
        return []
    places: dict[bytes, int] = {}
    for name, offset in zip(names, offsets, strict=True):
        legal = name.startswith(PREFIX_BYTES) and len(name) <= TOPIC_BYTES_MAX and b"/" not in name
        if legal and 0 not in name and offset.isdigit() and len(offset) <= OFFSET_DIGITS_MAX:
            places.setdefault(name, int(offset))
    return list(places.items())


def places(record: Record) -> list[tuple[str, int, int]]:
    """Return topic, queue id and offset of every queue that *record* names, its own first."""
    queue_places = [(record.topic, record.queue_id, record.queue_offset)]
    if record.properties.find(MULTI) >= 0:
        named = light_places(record.topic.encode(), record.properties)
        queue_places += [(name.decode("utf-8", "replace"), 0, offset) for name, offset in named]
    return queue_places


def names_place(record: RecordView, topic: bytes, offset: int) -> bool:
    """Return whether *record* claims *offset* in the light topic *topic*."""
    if not _may_name_places(record.topic_bytes):
        return False
    names, offsets = _listed(record.properties)
    if len(names) != len(offsets) or topic not in names:
        return False
    said = offsets[names.index(topic)]
    return said.isdigit() and len(said) <= OFFSET_DIGITS_MAX and int(said) == offset


def _listed(properties: bytes) -> tuple[list[bytes], list[bytes]]:
    """Return the names of light topics and the offsets that *properties* list."""
    names = find_property(properties, DISPATCH_BYTES).rstrip(b",").split(b",")
    return names, find_property(properties, OFFSETS_BYTES).split(b",")
