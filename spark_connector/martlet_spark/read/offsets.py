"""Offsets of a query, as JSON in Spark's checkpoint: they define the messages of each batch.

A stream's offset is ``{"v": 1, "t": {topic: {"broker/queue": next}}, "new": {topic: {"broker/queue": first}}}``: the
offset after the last message of each queue, and the first offset of each queue that the previous offset lacks. Spark
asks for the initial offset several times, also after a restart, and "latest" would differ each time. So the initial
offset is always empty: every queue is new in the first batch, and the checkpoint has both bounds of that batch.

``"last": {topic: {"broker/queue": [offset, identity]}}`` identifies the last message of one queue per topic and broker.
So the source detects a topic that was deleted and created again.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.errors import SparkConnectorError

__all__ = [
    "EARLIEST",
    "LATEST",
    "Last",
    "Offsets",
    "decode",
    "decode_last",
    "decode_new",
    "encode",
    "find_queues",
    "queue_name",
    "words",
]

Offsets: TypeAlias = dict[MessageQueue, int]
T = TypeVar("T")
# Offset and identity of the last message, for some queues.
Last: TypeAlias = dict[MessageQueue, tuple[int, str]]

VERSION: Final = 1
# Words for offsets in options, as in Spark's Kafka source.
EARLIEST: Final = -2
LATEST: Final = -1


def queue_name(queue: MessageQueue) -> str:
    """Return the name of *queue* in its topic: ``broker/number``."""
    return f"{queue.broker_name}/{queue.queue_id}"


def words(queue: MessageQueue) -> str:
    """Return *queue* in words, for errors."""
    return f"queue {queue_name(queue)} of topic {queue.topic!r}"


def encode(
    offsets: Mapping[MessageQueue, int], new: Mapping[MessageQueue, int] | None = None, last: Last | None = None
) -> dict[str, Any]:
    """Return *offsets* as JSON; *new* has the first offset of each queue that the previous offset lacks."""
    fields: dict[str, Any] = {"v": VERSION, "t": _table(offsets)}
    if new:
        fields["new"] = _table(new)
    if last:
        fields["last"] = _table({queue: list(each) for queue, each in last.items()})
    return fields


def decode(value: Mapping[str, Any]) -> Offsets:
    """Return the offsets that `encode` encoded.

    Raises:
      SparkConnectorError: *value* is no offset of this source; the checkpoint is another source's or a later version's.
    """
    return _queues(value, "t", int)


def decode_new(value: Mapping[str, Any]) -> Offsets:
    """Return the first offsets of new queues from the same JSON as `decode`."""
    return _queues(value, "new", int) if value.get("new") else {}


def decode_last(value: Mapping[str, Any]) -> Last:
    """Return the last messages that `encode` encoded; empty if an earlier version did."""
    return _queues(value, "last", lambda each: (int(each[0]), str(each[1]))) if value.get("last") else {}


def _table(values: Mapping[MessageQueue, T]) -> dict[str, dict[str, T]]:
    found: dict[str, dict[str, T]] = {}
    for queue in sorted(values):
        found.setdefault(queue.topic, {})[queue_name(queue)] = values[queue]
    return found


def _queues(value: Mapping[str, Any], field: str, parse: Callable[[Any], T]) -> dict[MessageQueue, T]:
    found: dict[MessageQueue, T] = {}
    try:
        if value["v"] != VERSION:
            raise ValueError("version")
        for topic, queues in value[field].items():
            for name, each in queues.items():
                broker, _, number = name.rpartition("/")
                found[MessageQueue(topic, broker, int(number))] = parse(each)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        text = f"the checkpoint has the offset {json.dumps(value)[:200]}, which this version did not write"
        raise SparkConnectorError(f"{text}; use the checkpoint of this query, or a new one") from error
    return found


def find_queues(topic: str, name: str, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Return the queues of *queues* with *name*, ``number`` or ``broker/number``; several if it names no broker."""
    broker, _, number = name.rpartition("/")
    return [
        queue
        for queue in queues
        if queue.topic == topic and queue.queue_id == int(number) and broker in ("", queue.broker_name)
    ]
