"""Notices that a topic was deleted and created again between two runs of an archive.

Its offsets begin at 0 again, and once it has as many messages as before, the checkpoint of a query fits it: the first
messages would be missing, and the others follow those of the old topic. So the end of a run notes which message is the
last of each queue, and the next run looks whether that is still there.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from martlet_spark.connection import ConnectionLost
from martlet_spark.errors import PipelineError, ReadError
from martlet_spark.options import SELECTION, SOURCE, named
from martlet_spark.pipelines.checkpoints import read_offsets, read_text, write_text
from martlet_spark.read.topics import Subscribed
from martlet_spark.source import MartletDataSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_ends", "note_ends"]

log = logging.getLogger("martlet.spark")

NOTE: Final = "martlet-ends.json"
# A queue: topic, broker and number; as one key in JSON.
Queue = tuple[str, str, int]


def note_ends(session: "SparkSession", source: Mapping[str, str], checkpoint: str) -> None:
    """Note the last message that was read of each queue; without brokers, what was noted before counts."""
    offsets = {(q.topic, q.broker_name, q.queue_id): offset for q, offset in read_offsets(session, checkpoint).items()}
    try:
        found = _messages(source, {queue: offset - 1 for queue, offset in offsets.items() if offset > 0})
    except (ReadError, ConnectionLost):
        return
    lines = [[*queue, offsets[queue] - 1, msg_id] for queue, msg_id in sorted(found.items())]
    if lines:
        write_text(session, f"{checkpoint}/{NOTE}", json.dumps(lines))


def check_ends(session: "SparkSession", source: Mapping[str, str], checkpoint: str) -> None:
    """Raise `PipelineError` if a noted message is another one now; only warn if losses are allowed."""
    try:
        lines = json.loads(read_text(session, f"{checkpoint}/{NOTE}") or "[]")
    except ValueError:  # a run was killed while it wrote
        return
    noted = {(topic, broker, queue): (offset, msg_id) for topic, broker, queue, offset, msg_id in lines}
    try:
        found = _messages(source, {queue: offset for queue, (offset, _) in noted.items()})
    except (ReadError, ConnectionLost):  # the query finds that too, and says it
        return
    for queue, msg_id in sorted(found.items()):
        offset, before = noted[queue]
        if msg_id != before:
            topic, broker, number = queue
            text = f"topic {topic!r} was deleted and created again since the last run: message {offset} of queue"
            text += f" {broker}/{number} is {msg_id}, and was {before}"
            if named(source, SOURCE).get("failOnDataLoss", "").lower() != "false":
                raise PipelineError(f"{text}; archive it to another path, with another checkpoint")
            log.warning("%s; continuing with the messages that follow", text)


def _messages(source: Mapping[str, str], offsets: Mapping[Queue, int]) -> dict[Queue, str]:
    """Return the id of the message at each of *offsets* that is still there."""
    if not offsets:
        return {}
    first: dict[str, dict[str, int]] = {}
    after: dict[str, dict[str, int]] = {}
    for queue, (least, end) in Subscribed.of(source).bounds().items():
        offset = offsets.get((queue.topic, queue.broker_name, queue.queue_id), -1)
        name, is_there = f"{queue.broker_name}/{queue.queue_id}", least <= offset < end
        first.setdefault(queue.topic, {})[name] = offset if is_there else end
        after.setdefault(queue.topic, {})[name] = offset + 1 if is_there else end
    limits = {"startingOffsets": json.dumps(first), "endingOffsets": json.dumps(after), "failOnDataLoss": "false"}
    options = {**named(source, SELECTION), **limits}
    return {(row["topic"], row["broker"], row["queue"]): row["msg_id"] for row in _rows(options)}


def _rows(options: Mapping[str, str]) -> Iterable[dict[str, Any]]:
    source = MartletDataSource({**options, "columns": "topic,broker,queue,msg_id"})
    reader = source.reader(source.schema())
    for partition in reader.partitions():
        for batch in reader.read(partition):
            assert isinstance(batch, pa.RecordBatch)
            yield from batch.to_pylist()
