"""Partitions: every message in exactly one of them, within the limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.read.planner import Range, plan

KIB = 1024
MIB = 1 << 20


def queue(number: int, topic: str = "T") -> MessageQueue:
    return MessageQueue(topic, "b", number)


def test_small_queues_share_a_partition() -> None:
    ranges = [Range(queue(number), 0, 100, KIB) for number in range(64)]
    assert plan(ranges, target_bytes=64 * MIB) == [ranges]


def test_a_large_queue_is_split() -> None:
    found = plan([Range(queue(0), 10, 10 + 10 * KIB, KIB)], target_bytes=4 * MIB)
    assert [[(each.start, each.end) for each in part] for part in found] == [
        [(10, 4106)],
        [(4106, 8202)],
        [(8202, 10250)],
    ]


def test_the_number_of_messages_in_a_partition_is_limited() -> None:
    found = plan([Range(queue(0), 0, 25, 1), Range(queue(1), 0, 25, 1)], target_bytes=MIB, records_max=20)
    assert [sum(map(len, part)) for part in found] == [20, 20, 10]


def test_there_are_as_many_partitions_as_asked_for() -> None:
    ranges = [Range(queue(0), 0, 1), Range(queue(1), 0, 99)]
    found = plan(ranges, target_bytes=64 * MIB, partitions_min=8)
    assert [sum(map(len, part)) for part in found] == [12, 13, 12, 13, 12, 13, 12, 13]
    assert len(plan([Range(queue(0), 0, 3)], target_bytes=MIB, partitions_min=8)) == 3


@pytest.mark.parametrize("ranges", [[], [Range(queue(0), 5, 5)]])
def test_nothing_to_read_has_no_partitions(ranges: list[Range]) -> None:
    assert plan(ranges, target_bytes=MIB, partitions_min=4) == []


def test_a_message_larger_than_a_partition_is_read() -> None:
    found = plan([Range(queue(0), 0, 3, 4 * MIB)], target_bytes=KIB)
    assert [[(each.start, each.end) for each in part] for part in found] == [[(0, 1)], [(1, 2)], [(2, 3)]]


ranges_of = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 500), st.integers(1, 5000)), max_size=8)


@given(ranges_of, st.integers(1, 100_000), st.integers(0, 50), st.integers(0, 20))
def test_every_message_is_in_one_partition(
    sizes: list[tuple[int, int, int]], target: int, records_max: int, partitions_min: int
) -> None:
    ranges = [Range(queue(number), first, first + count, size) for number, (first, count, size) in enumerate(sizes)]
    found = plan(ranges, target_bytes=target, records_max=records_max, partitions_min=partitions_min)
    wanted = [(each.queue, offset) for each in ranges for offset in range(each.start, each.end)]
    assert [(each.queue, offset) for part in found for each in part for offset in range(each.start, each.end)] == wanted
    assert all(part and all(len(each) for each in part) for part in found)
    assert len(found) >= min(partitions_min, len(wanted))
    if records_max:
        assert all(sum(map(len, part)) <= records_max for part in found)
    for part in found:
        largest = max(each.message_bytes for each in part)
        assert sum(each.bytes for each in part) <= max(target, largest) or len(found) == partitions_min
