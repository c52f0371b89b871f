"""The kernel scans a block of the log as Python does: the same records, entries, keys and stops."""

from typing import Any, NamedTuple, cast

from hypothesis import example, given
from hypothesis import strategies as st
from tests.native.kernel import kernel_of

from martlet.message import Message, find_property
from martlet.records.codec import encode_record, with_room_for_record_crc, write_record_crc
from martlet.records.layout import RecordView
from martlet.store.format.tags import TagCodes
from martlet.store.queues.queues import Queue, Queues
from martlet.store.recovery.usual import STORE_MS_END, KnownQueues, scan_usual

BASE = 1 << 33
IPV4, IPV6 = b"\x7f\0\0\x01\0\0\x30\x39", bytes(range(20))
# The first queue of each of these is known; the second is skipped; the third has a dispatcher.
TOPICS = "t", "a topic of another name ☃", "x" * 127
OTHERS = "unknown", "x" * 128
PROPERTIES = st.one_of(
    st.lists(st.sampled_from([b"UNIQ_KEY\x01ABC\x02", b"TAGS\x01a\x02", b"KEYS\x01k j\x02", b"TAGS\x01\xff"])).map(
        b"".join
    ),
    st.sampled_from([b"A\x01b\x02INNER_MULTI_DISPATCH\x01%LMQ%a\x02", b"A\x01\0\x02", b"xTAGS\x01b\x02", b"_" * 20]),
    st.binary(max_size=40),
)


class Stored(NamedTuple):
    """A record to be encoded; ``step`` is added to the offset that its queue expects."""

    topic: str
    queue_id: int
    step: int
    flags: int
    body: bytes
    properties: bytes
    store_ms: int
    born_host: bytes
    has_record_crc: bool


RECORDS = st.builds(
    Stored,
    st.sampled_from([*TOPICS[:1] * 6, *TOPICS, *OTHERS]),
    st.sampled_from([0] * 8 + [1, 2, 3, -1]),
    st.sampled_from([0] * 12 + [1, -1, 1 << 60]),
    st.sampled_from([0] * 12 + [1, 4, 8, 0xC, 0x20000000, 0x40000000, 0x60000000]),
    st.binary(max_size=40),
    PROPERTIES,
    st.one_of(st.integers(0, STORE_MS_END - 1), st.sampled_from([-1, STORE_MS_END, 1 << 60])),
    st.sampled_from([IPV4] * 9 + [IPV6]),
    st.booleans(),
)


def log_of(records: list[Stored], first_offset: int) -> bytes:
    """Return the bytes of *records* from position `BASE` on."""
    data, counts = b"", dict[tuple[str, int], int]()
    for each in records:
        place = each.topic, each.queue_id
        offset = first_offset + counts.get(place, 0)
        counts[place] = counts.get(place, 0) + 1
        properties = with_room_for_record_crc(each.properties) if each.has_record_crc else each.properties
        message = Message(each.topic, each.body, properties, 0, each.flags, 0, 1, each.born_host)
        record = bytearray(
            encode_record(message, each.queue_id, offset + each.step, BASE + len(data), each.store_ms, IPV4)
        )
        record[36] |= each.flags >> 24  # `encode_record` clears the marks of groups
        if each.has_record_crc:
            write_record_crc(record, 0, len(record))
        data += record
    return data


class World:
    """Queues that a scan knows."""

    def __init__(self, next_offset: int, *, wants_keys: bool) -> None:
        self.touched: list[str] = []
        self.keys: list[Any] | None = [] if wants_keys else None
        self.known: KnownQueues = {}
        for topic in TOPICS:
            queues = [Queue(topic, 0), None, Queue(topic, 2, lambda *_: 7)]
            self.known[topic.encode()] = dict(enumerate(queues))
            for queue in filter(None, queues):
                queue.next_offset = next_offset

    def touch(self, queue: Queue) -> None:
        queue.dirty = True
        self.touched.append(queue.topic)

    def scan(self, function: Any, data: bytes, at: int, limit: int, groups_from: int) -> list[object]:
        """Return everything that *function* has done with *data*."""
        terms = BASE, limit, groups_from, self.known, cast("Queues", self), TagCodes(), self.keys
        answer = function(data, at, terms)
        queues = [queue for of_topic in self.known.values() for queue in of_topic.values() if queue is not None]
        states = [(bytes(q.tail), q.next_offset, q.last_end, q.put_bytes, q.dirty) for q in queues]
        keys = [(queue.topic, *rest) for queue, *rest in self.keys or ()]
        return [answer, states, keys, self.touched]


@given(
    st.lists(RECORDS, max_size=10),
    st.sampled_from([0, 7, 1 << 62]),
    st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), max_size=1),
    st.integers(0, 3000),
    st.sampled_from([0] * 8 + [1, 88]),
    st.sampled_from([1 << 62, 1 << 62, BASE + 300, BASE, 0]),
    st.sampled_from([1 << 62, 0, BASE + 200]),
    st.booleans(),
)
@example([], 0, [], 0, 0, 1 << 62, 0, False)
def test_the_kernel_scans_what_python_scans(
    records: list[Stored],
    first_offset: int,
    damages: list[tuple[int, int]],
    size: int,
    at: int,
    limit: int,
    groups_from: int,
    wants_keys: bool,
) -> None:
    data = bytearray(log_of(records, first_offset)[:size])
    for place, value in damages:
        if place < len(data):
            data[place] = value
    rest = bytes(data), at, limit, groups_from
    kernel = World(first_offset, wants_keys=wants_keys).scan(kernel_of(scan_usual), *rest)
    python = World(first_offset, wants_keys=wants_keys).scan(scan_usual, *rest)
    stop = cast("tuple[int, int, int]", kernel[0])[0]
    if stop < cast("tuple[int, int, int]", python[0])[0]:  # tags that are no UTF-8: left to Python
        assert not _has_text_tags(rest[0], stop)
        rest = rest[0][:stop], *rest[1:]
        python = World(first_offset, wants_keys=wants_keys).scan(scan_usual, *rest)
    assert kernel == python


def _has_text_tags(data: bytes, start: int) -> bool:
    try:
        find_property(RecordView(data, start).properties, b"TAGS").decode()
    except UnicodeDecodeError:
        return False
    return True


@given(st.binary(max_size=300), st.integers(0, 400), st.booleans())
def test_any_bytes_are_scanned_alike(data: bytes, at: int, wants_keys: bool) -> None:
    outcomes = [
        World(0, wants_keys=wants_keys).scan(function, data, at, 1 << 62, 0)
        for function in (kernel_of(scan_usual), scan_usual)
    ]
    assert outcomes[0] == outcomes[1]


def test_many_usual_records_are_scanned_in_one_call() -> None:
    """As many as the kernel checks without the interpreter's lock, and more."""
    usual = Stored("t", 0, 0, 0, b"body", b"TAGS\x01a\x02KEYS\x01k", 1_732_000_000_000, IPV4, has_record_crc=False)
    data = log_of([usual] * 10_000, 5)
    for wants_keys in (False, True):
        python = World(5, wants_keys=wants_keys).scan(scan_usual, data, 0, 1 << 62, 0)
        assert python[0] == (len(data), 10_000, 1_732_000_000_000)
        assert World(5, wants_keys=wants_keys).scan(kernel_of(scan_usual), data, 0, 1 << 62, 0) == python
