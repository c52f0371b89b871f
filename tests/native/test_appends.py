"""Usual messages are appended by the kernel as by Python: the same bytes, entries and results."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.records.codec import RECORD_CRC_ROOM, with_room_for_record_crc
from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.usual import measure_usual, put_usual
from martlet.store.queues.queues import Queue

IPV4, IPV6 = b"\x7f\0\0\x01\0\0\x30\x39", bytes(range(20))
I32 = st.integers(-(1 << 31), (1 << 31) - 1)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
BODY_BYTES_MAX = 300


def with_flipped_bit(bit: int) -> bytes:
    """Return the property with a record CRC, with *bit* flipped unless that is after its end."""
    return ((int.from_bytes(RECORD_CRC_ROOM, "little") ^ (1 << bit)) % (1 << 160)).to_bytes(20, "little")


PROPERTIES = st.one_of(
    st.lists(st.sampled_from([b"UNIQ_KEY\x01ABC\x02", b"TAGS\x01a\x02", b"KEYS\x01k j\x02", b"x\x01y"])).map(b"".join),
    st.binary(max_size=60),
    st.sampled_from([b"A\x01b\x02INNER_MULTI_DISPATCH\x01%LMQ%a\x02", b"A\x01\0\x02", b"x" * 32_740, b"x" * 32_768]),
    st.sampled_from(
        [RECORD_CRC_ROOM, b"a\x01b\x02" + RECORD_CRC_ROOM, RECORD_CRC_ROOM + b"a\x01b", b"_" * 20, b"\x01" * 25]
    ),
    st.binary(max_size=40).map(with_room_for_record_crc),
    st.tuples(st.binary(max_size=9), st.integers(0, 160)).map(lambda each: each[0] + with_flipped_bit(each[1])),
)
BODIES = st.one_of(
    st.binary(max_size=BODY_BYTES_MAX + 1),
    st.binary(max_size=9).map(lambda body: memoryview(body)),
    st.binary().map(bytearray),
)


class Item(NamedTuple):
    """An `AppendItem` with the number of its queue."""

    queue: int
    rest: tuple[Any, ...]


ITEMS = st.builds(
    Item,
    st.sampled_from([0, 0, 0, 1, 1, 2, 3]),
    st.tuples(
        BODIES,
        PROPERTIES,
        I64,
        I32,
        st.sampled_from([0, 0, 0, 1, 4, 8, 0x10, 0x60000021, -1]),
        I64,
        st.sampled_from([IPV4, IPV4, IPV4, IPV6]),
        I32,
        I64,
    ),
)


class World:
    """The end of a log, and queues."""

    def __init__(self, room: int, offsets: Sequence[int]) -> None:
        self.queues = [
            Queue("t", 0),
            Queue("a topic of another name ☃", 1),
            Queue("x" * 200, 2),
            Queue("d", 3, lambda *_: 7),
        ]
        for queue, offset in zip(self.queues, offsets, strict=True):
            queue.next_offset = offset
        self.touched: list[int] = []
        self.tail = SimpleNamespace(data=bytearray(b"\xee" * 5000), page_base=1000, position=1010, room=1000 + room)
        self.pending: list[Any] = []

    def touch(self, queue: Queue) -> None:
        queue.dirty = True
        self.touched.append(self.queues.index(queue))

    def put(self, function: Any, items: Sequence[Item], *rest: object) -> list[object]:
        """Return everything that *function* has done with *items*."""
        own = [cast("AppendItem", (self.queues[each.queue], *each.rest)) for each in items]
        result = AppendResult(own)
        done = function(own, 0, (self.tail, self, self.pending, result, *rest))
        states = [(q.next_offset, q.put_bytes, q.last_end, bytes(q.tail), q.dirty) for q in self.queues]
        pending = [(self.queues.index(queue), *more) for queue, *more in self.pending]
        ends = [result.positions, result.ends, result.offsets, self.tail.position]
        return [done, bytes(self.tail.data), states, pending, ends, self.touched]


@given(
    st.lists(ITEMS, max_size=8),
    st.sampled_from([4900, 4900, 1200, 300]),
    st.lists(st.integers(0, 1 << 60), min_size=4, max_size=4),
    st.sampled_from([IPV4, IPV4, IPV6]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_kernel_appends_what_python_appends(
    items: list[Item], room: int, offsets: list[int], host: bytes, is_odd: bool, record_crcs: bool, is_group: bool
) -> None:
    marks = [0x20000000, *[0x40000000] * len(items)] if is_group else []
    rest = host, 1_732_000_000_000, BODY_BYTES_MAX, is_odd, record_crcs, marks
    python = World(room, offsets).put(put_usual, items, *rest)
    assert World(room, offsets).put(kernel_of(put_usual), items, *rest) == python


def test_the_kernel_leaves_numbers_that_no_record_has_to_python() -> None:
    world, usual = World(4900, [0] * 4), (b"body", b"", 0, 0, 0, 0, IPV4, 0, 0)
    for place in (3, 4, 7):
        odd = [*usual]
        odd[place] = 1 << 31
        items = [Item(0, usual), Item(0, tuple(odd)), Item(0, usual)]
        done, *_ = world.put(kernel_of(put_usual), items, IPV4, 1, BODY_BYTES_MAX, False, False, [])
        assert done == 1


@pytest.mark.parametrize("put", [put_usual, kernel_of(put_usual)])
def test_properties_that_only_resemble_a_record_crc_are_usual(put: Any) -> None:
    properties = [b"CONTENT_TYPE\x01text/plain\x02", b"__underlined\x01name\x02", b"_" * 20]
    items = [Item(0, (b"body", each, 0, 0, 0, 0, IPV4, 0, 0)) for each in properties]
    done, *_ = World(4900, [0] * 4).put(put, items, IPV4, 1, BODY_BYTES_MAX, False, False, [])
    assert done == len(items)


@given(st.lists(ITEMS, max_size=8))
def test_the_kernel_measures_what_python_measures(items: list[Item]) -> None:
    queues = World(0, [0] * 4).queues
    own = [cast("AppendItem", (queues[each.queue], *each.rest)) for each in items]
    assert kernel_of(measure_usual)(own, BODY_BYTES_MAX) == measure_usual(own, BODY_BYTES_MAX)
