"""Where queries begin and end by time, per topic and queue, compared with the times in the messages; without a JVM."""

import json
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import pyarrow as pa
import pytest
from tests.client.patient import PATIENCE_S, patient
from tests.interop.process import eventually

from martlet_client.blocking import Admin, Producer
from martlet_client.messages import Message
from martlet_spark.errors import OptionError
from martlet_spark.read.offsets import decode_new

from .conftest import Topic
from .test_selections import batch
from .test_stream_reader import ALL, reader

# The place of a message: topic, queue and offset.
Place: TypeAlias = tuple[str, int, int]


class Timed:
    """Two topics with three queues, and when each message was stored, by its offset."""

    def __init__(self, endpoints: str) -> None:
        self.several, self.single = Topic(endpoints, queues=1), Topic(endpoints, queues=1)
        with Producer(patient(endpoints), "spark-tests", send_timeout_s=PATIENCE_S) as producer:
            for count in (1, 3, 2):
                producer.send_batch([Message(self.several.name, b"equal times")] * count)
                wait_ms()
        self.several.create(2)
        with Admin(patient(endpoints)) as admin:
            eventually(lambda: admin.topic_route(self.several.name).queues[0].read_queues == 2 or None)
        for queue in (1, 0, 1, 1, 0):
            self.several.send(1, queues=(queue,))
            wait_ms()
            self.single.send(1, queues=(0,))
            wait_ms()
        self.queues = (self.several.name, 0), (self.several.name, 1), (self.single.name, 0)
        self.stored: dict[tuple[str, int], list[int]] = {queue: [] for queue in self.queues}
        for topic, queue, _, ms in sorted(messages(self.several, self.options())):
            self.stored[topic, queue].append(ms)

    def options(self) -> dict[str, str]:
        return {"subscribe": f"{self.several.name},{self.single.name}"}

    def of(self, times: Sequence[int]) -> str:
        """Return *times* as an option has them, one for each queue; a queue may be named with its broker."""
        first, second, third = times
        return json.dumps({self.several.name: {"0": first, "martlet/1": second}, self.single.name: {"0": third}})

    def begins(self, times: Sequence[int]) -> dict[tuple[str, int], int]:
        """Return the first offset of each queue that was stored at its time or later."""
        return {queue: bisect_left(self.stored[queue], ms) for queue, ms in zip(self.queues, times, strict=True)}

    def between(self, begins: Mapping[tuple[str, int], int], ends: Mapping[tuple[str, int], int]) -> set[Place]:
        return {(*queue, offset) for queue in self.stored for offset in range(begins[queue], ends[queue])}


def wait_ms() -> None:
    """Wait until the clock, which is the broker's too, shows another millisecond."""
    before = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == before:
        pass


def messages(topic: Topic, options: Mapping[str, str]) -> list[tuple[str, int, int, int]]:
    """The topic, queue, offset and time of each message of a batch."""
    found = batch(topic, **options, columns="topic,queue,offset,store_ts")
    rows: list[tuple[str, int, int, int]] = []
    for partition in found.partitions():
        for part in found.read(partition):
            times = part.column("store_ts").cast(pa.int64()).to_pylist()  # microseconds
            columns = (part.column(name).to_pylist() for name in ("topic", "queue", "offset"))
            rows += zip(*columns, (us // 1000 for us in times), strict=True)
    return rows


def places(topic: Topic, **options: str) -> set[Place]:
    found = [(name, queue, offset) for name, queue, offset, _ in messages(topic, options)]
    assert len(found) == len(set(found))
    return set(found)


@pytest.fixture(scope="module")
def timed(endpoints: str) -> Timed:
    return Timed(endpoints)


def tries(timed: Timed) -> list[tuple[int, int, int]]:
    """Times for the three queues: each just before, at and just after a message, before the first and after the last.

    Each queue has another of these times in the same query.
    """
    stored = {ms for times in timed.stored.values() for ms in times}
    found = sorted({ms + more for ms in stored for more in (-1, 0, 1)} | {0, min(stored) - 1000, max(stored) + 1000})
    return [(ms, found[at - 3], found[at - 7]) for at, ms in enumerate(found)]


def test_there_are_messages_with_equal_times(timed: Timed) -> None:
    first = timed.stored[timed.several.name, 0]
    assert len(first) == 8
    assert first[1] == first[3] < first[4] == first[5] < first[6]


def test_a_query_begins_and_ends_in_each_queue_at_its_time(timed: Timed) -> None:
    everything = {queue: len(times) for queue, times in timed.stored.items()}
    nothing = dict.fromkeys(timed.stored, 0)
    lenient = {**timed.options(), "startingOffsetsByTimestampStrategy": "latest"}
    for times in tries(timed):
        found = places(timed.several, **lenient, startingOffsetsByTimestamp=timed.of(times))
        assert found == timed.between(timed.begins(times), everything)
        found = places(timed.several, **timed.options(), endingOffsetsByTimestamp=timed.of(times))
        assert found == timed.between(nothing, timed.begins(times))


def test_a_query_reads_what_lies_between_two_times_of_each_queue(timed: Timed) -> None:
    all_times = [timed.stored[queue] for queue in timed.stored]
    begins, ends = [times[1] for times in all_times], [times[-1] for times in all_times]
    given = {"startingOffsetsByTimestamp": timed.of(begins), "endingOffsetsByTimestamp": timed.of(ends)}
    found = places(timed.several, **timed.options(), **given)
    assert found == timed.between(timed.begins(begins), timed.begins(ends))
    assert len(found) == 6 + 1 + 3  # each but the first and the last; three of the first queue's have one time


def test_a_stream_begins_in_each_queue_at_its_time(timed: Timed) -> None:
    for times in tries(timed):
        option = {"startingOffsetsByTimestamp": timed.of(times), "startingOffsetsByTimestampStrategy": "latest"}
        found = reader(timed.several, **timed.options(), **option, startingOffsets="")
        begins = decode_new(found.latestOffset(found.initialOffset(), ALL))
        assert {(queue.topic, queue.queue_id): offset for queue, offset in begins.items()} == timed.begins(times)


def test_a_time_after_the_last_message_of_a_queue_fails_the_query(timed: Timed) -> None:
    times = [stored[-1] for stored in timed.stored.values()]
    times[1] += 1
    text = rf"queue martlet/1 of topic '{timed.several.name}' has no message stored at {times[1]} ms or later; set"
    with pytest.raises(OptionError, match=text):
        places(timed.several, **timed.options(), startingOffsetsByTimestamp=timed.of(times))
