"""Runs: messages that the same receivers get together, and their frames in each encoding.

Receivers share a run, and each encoding of it is made once. A publisher may pass on its frames: if a run consists of
exactly these messages, they are sent as they were received.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol, TypeVar, final
from weakref import ref

from martlet.contracts import Buffer
from martlet.delivery.costly import (
    COMPRESSION_AT,
    LONG_BYTES,
    PROPERTIES_MAX,
    SIZE_FLAG_BODY,
    USUAL_BYTES,
    property_cost,
)
from martlet.delivery.fanout import Encoding, record_places
from martlet.delivery.routing.division import Found
from martlet.records.compression import COMPRESSED
from martlet.records.layout import I32, RecordView, record_views
from martlet.runtime.native import native

__all__ = ["Frames", "Receiver", "Run", "make_runs", "note_positions", "survey"]

T = TypeVar("T")

# Number of compressed runs that keep their decompressed frames. Slow receivers may hold thousands of runs.
EXPANDED_MAX: Final = 4


class Receiver(Protocol):
    """Receives runs at the tail; any hashable object."""

    def matched(self, run: "Run", grants: tuple[Hashable, ...]) -> None:
        """Take *run*; *grants* are the values of the matching filters. It must not raise or wait."""
        ...


@final
class Frames:
    """The messages of a run in one encoding: ``data``, in which message *i* ends before ``ends[i]``.

    ``is_whole`` is False if the encoding left out some messages, whose frames are empty. ``payloads`` maps the index of
    a message to bytes that follow its frame in ``data``; ``size`` includes them.
    """

    __slots__ = ("_each", "data", "ends", "is_whole", "payloads", "size")

    def __init__(
        self,
        data: bytes,
        ends: Sequence[int],
        is_whole: bool = True,
        payloads: Mapping[int, bytes] | None = None,
    ) -> None:
        self._each: list[bytes] | None = None
        self.payloads = payloads
        self.size = len(data)
        if payloads is not None:
            self.size += sum(map(len, payloads.values()))
        self.data = data
        self.ends = ends
        self.is_whole = is_whole

    @property
    def each(self) -> list[bytes]:
        """The frame of each message, for protocols that put bytes before each."""
        if self._each is None:
            self._each = [self.data[begin:end] for begin, end in pairwise([0, *self.ends])]
        return self._each

    def part(self, first: int, last: int) -> "Frames":
        """Return the frames of the messages from *first* up to *last*."""
        begin = self.ends[first - 1] if first else 0
        ends = [end - begin for end in self.ends[first:last]]
        payloads: dict[int, bytes] | None = None
        if self.payloads is not None:
            payloads = {index - first: each for index, each in self.payloads.items() if first <= index < last}
        return Frames(self.data[begin : begin + ends[-1]], ends, self.is_whole, payloads or None)


@final
class Run:
    """Messages of a topic that the same receivers get for the same filters.

    ``data`` has their records, whole and in log order; ``position`` is the begin of the first, ``end`` the end of the
    last. Messages for other receivers may be between them in the log. A message whose body ``is_compressed`` is alone.
    A run whose messages have many properties ``is_heavy``.
    """

    __slots__ = (
        "__weakref__",
        "_decoded",
        "_first",
        "_frames",
        "_parent",
        "_positions",
        "count",
        "data",
        "end",
        "is_compressed",
        "is_heavy",
        "position",
    )

    def __init__(self, data: bytes, count: int, position: int, end: int, *, is_compressed: bool = False) -> None:
        self.is_compressed = is_compressed
        self.is_heavy = False
        self.data = data
        self.count = count
        self.position = position
        self.end = end
        self._frames: dict[str, Frames] | None = None
        self._decoded: Sequence[Any] | None = None
        self._positions: list[int] | None = None
        self._parent: Run | None = None  # the run of which this is a part
        self._first = 0  # the index in that run of the first message

    def records(self) -> Iterator[RecordView]:
        """Yield each record: queue id, queue offset, position, properties, body."""
        return record_views(self.data)

    def positions(self) -> list[int]:
        """Return the log position of each message."""
        if self._positions is None:
            self._positions = native(record_places)(self.data)[1] if self.count > 1 else [self.position]
        return self._positions

    def decoded(self, decode: Callable[[Buffer], Sequence[T]]) -> Sequence[T]:
        """Return the result of *decode* on the records, one item for each; *decode* is called once for all receivers.

        Each feed has runs of its own, so a protocol that always passes the same function gets results of that function.
        """
        if self._parent is not None:
            return self._parent.decoded(decode)[self._first : self._first + self.count]
        items = self._decoded
        if items is None:
            items = self._decoded = decode(self.data)
            if self.is_compressed:
                _note_expanded(self)
        return items

    def frames(self, encoding: Encoding) -> Frames:
        """Return the frames of the messages in *encoding*; they are encoded once for all receivers."""
        if self._parent is not None:
            return self._parent.frames(encoding).part(self._first, self._first + self.count)
        frames = self._frames.get(encoding.name) if self._frames is not None else None
        if frames is None:
            message_frames = encoding.encode(self.data)
            frames = Frames(b"".join(message_frames), list(accumulate(map(len, message_frames))), all(message_frames))
            self.keep(encoding.name, frames)
        return frames

    def split(self, count: int) -> tuple["Run", "Run"]:
        """Return the first *count* messages, at least one and not all, and the others; both share the frames."""
        cut = last_start = 0
        for _ in range(count):
            last_start, cut = cut, cut + I32.unpack_from(self.data, cut)[0]
        end = RecordView(self.data, last_start).position + cut - last_start
        head = Run(self.data[:cut], count, self.position, end)
        tail = Run(self.data[cut:], self.count - count, RecordView(self.data, cut).position, self.end)
        head.is_heavy = tail.is_heavy = self.is_heavy
        head._parent = tail._parent = self._parent or self
        head._first, tail._first = self._first, self._first + count
        return head, tail

    def keep(self, encoding: str, frames: Frames) -> None:
        """Use *frames* for *encoding*; a publisher passed them on, or they are the same for all its receivers."""
        if self._frames is None:
            self._frames = {}
        self._frames[encoding] = frames
        if self.is_compressed:
            _note_expanded(self)

    def forget(self) -> None:
        """Drop frames and decoded records; both are made again when they are needed."""
        self._frames = self._decoded = None


def note_positions(run: Run, positions: list[int]) -> None:
    """Note the log positions of the messages of *run*, so that `Run.positions` need not find them."""
    run._positions = positions


_expanded: Final[deque[ref[Run]]] = deque()


def _note_expanded(run: Run) -> None:
    """Let *run* keep its decompressed frames, and drop those of an earlier run."""
    if all(each() is not run for each in _expanded):
        _expanded.append(ref(run))
        if len(_expanded) > EXPANDED_MAX and (oldest := _expanded.popleft()()) is not None:
            oldest.forget()


def make_runs(records: Sequence[Found]) -> list[Run]:
    """Return the records that `merge` returned, as one run if none is compressed, and they have few properties."""
    flags, head_bytes, head_bytes_max, is_together = native(survey)(records)
    if head_bytes_max > LONG_BYTES or head_bytes > USUAL_BYTES * len(records):
        parts = list(_split_by_cost(records))
        if len(parts) > 1 or property_cost(records[0][1], records[0][2]) > PROPERTIES_MAX:
            return [run for part in parts for run in _make_heavy_runs(part)]
    return _split_at_compressed(records) if flags & COMPRESSED else [_make_run(records, is_together)]


def survey(records: Sequence[Found]) -> tuple[int, int, int, bool]:
    """Return what a run must know about *records*: all bits of their sysFlags, the number of their bytes that are not
    body, the largest such number of one record, and whether they are adjacent in one object.

    A record whose body size is unknown counts as `LONG_BYTES` + 1 bytes. The native kernel has this function as
    well; see `martlet.runtime.native`.
    """
    unpack, flags, total, most, is_together = SIZE_FLAG_BODY.unpack_from, 0, 0, 0, True
    _, first_data, expected, _, _, _ = records[0]
    for _, data, start, end, _, _ in records:
        size, sys_flag, body_bytes = unpack(data, start)
        head_bytes = size - body_bytes
        if head_bytes < 0:
            head_bytes = LONG_BYTES + 1
        flags |= sys_flag
        total += head_bytes
        if head_bytes > most:
            most = head_bytes
        if start != expected or data is not first_data:
            is_together = False
        expected = end
    return flags, total, most, is_together


def _split_by_cost(records: Sequence[Found]) -> Iterator[Sequence[Found]]:
    """Yield *records* in parts with at most `PROPERTIES_MAX` properties, or one message with more."""
    begin, cost, unpack = 0, 0, SIZE_FLAG_BODY.unpack_from
    for index, (_, data, start, _, _, _) in enumerate(records):
        size, _, body_bytes = unpack(data, start)
        head_bytes = size - body_bytes
        record_cost = property_cost(data, start) if head_bytes > USUAL_BYTES or head_bytes < 0 else 0
        if begin < index and cost + record_cost > PROPERTIES_MAX:
            yield records[begin:index]
            begin, cost = index, 0
        cost += record_cost
    yield records[begin:]


def _make_heavy_runs(records: Sequence[Found]) -> list[Run]:
    runs = _split_at_compressed(records)
    for run in runs:
        run.is_heavy = True
    return runs


def _split_at_compressed(records: Sequence[Found]) -> list[Run]:
    compressed = [index for index, each in enumerate(records) if each[1][each[2] + COMPRESSION_AT] & COMPRESSED]
    if not compressed:
        return [_make_run(records)]
    runs: list[Run] = []
    part_begin = 0
    for index in compressed:
        if part_begin < index:
            runs.append(_make_run(records[part_begin:index]))
        position, data, start, end, _, _ = records[index]
        runs.append(Run(data[start:end], 1, position, position + end - start, is_compressed=True))
        part_begin = index + 1
    if part_begin < len(records):
        runs.append(_make_run(records[part_begin:]))
    return runs


def _make_run(records: Sequence[Found], is_together: bool = False) -> Run:
    position, data, start, end, _, _ = records[0]
    if len(records) == 1:
        return Run(data[start:end], 1, position, position + end - start)
    last_position, _, last_start, last_end, _, _ = records[-1]
    run_data = data[start:last_end] if is_together else b"".join([each[1][each[2] : each[3]] for each in records])
    return Run(run_data, len(records), position, last_position + last_end - last_start)
