"""What a range of the log needs, except decisions and the commit: reading, sorting, encoding, storing, reading back."""

from array import array
from collections.abc import Callable
from typing import TypeVar, final

import pyarrow as pa
from msgspec import structs

from martlet.runtime.steps import Steps, finish_now
from martlet.store.disk.segments import Segments
from martlet_tiered.errors import LogUnreadable
from martlet_tiered.names import DataName
from martlet_tiered.objects import Objects
from martlet_tiered.upload.encoding import encode_file
from martlet_tiered.upload.entries import Entries, find_entries, sort_entries
from martlet_tiered.upload.messages import (
    PART_COUNT,
    AtWork,
    FindRange,
    FoundRange,
    Opened,
    Reply,
    RunsPart,
    Setup,
    SpansPart,
    StoredFile,
    StoredRange,
    StoreRange,
    decode_request,
)
from martlet_tiered.upload.passing_errors import failure_of
from martlet_tiered.upload.storing import check_file, store_file

__all__ = ["RangeWork"]

T = TypeVar("T")


@final
class RangeWork:
    """Answers requests of a broker, one after the other.

    Args:
      open_place: opens the files of the log, read-only, and the objects.
      send: takes each reply.
    """

    def __init__(self, open_place: Callable[[Setup], tuple[Segments, Objects]], send: Callable[[Reply], None]) -> None:
        self._open_place = open_place
        self._send = send
        self._place: tuple[Segments, Objects] | None = None
        self._broker = ""
        self._entries: Entries | None = None

    def answer(self, data: bytes | bytearray | memoryview) -> None:
        """Do what the request in *data* says, and send the replies; whatever fails is the last of them."""
        try:
            request = decode_request(data)
            if isinstance(request, Setup):
                self._broker = request.broker
                self._place = self._open_place(request)
                self._send(Opened())
            elif isinstance(request, FindRange):
                self._send(self._find(request))
            else:
                self._send(self._store(request))
        except Exception as error:  # the broker raises it again
            self._send(failure_of(error))

    def _find(self, wanted: FindRange) -> FoundRange:
        assert self._place is not None
        segments, _ = self._place
        segments.show(wanted.segments)
        self._entries = None
        found = self._finish(find_entries(segments, wanted.begin, wanted.limit, wanted.bytes_max, wanted.records_max))
        reply = FoundRange(found.end, found.damaged, found.damaged_at, found.removed)
        self._entries = entries = self._finish(sort_entries(found))
        for begin in range(0, len(entries.runs), PART_COUNT):
            self._send(RunsPart(entries.runs[begin : begin + PART_COUNT]))
        return reply

    def _store(self, wanted: StoreRange) -> StoredRange:
        assert self._place is not None
        assert self._entries is not None
        firsts = array("q", wanted.firsts)
        entries, self._entries = self._entries.keep(firsts.tolist()), None
        for date, kind, first, end in entries.files():
            name = DataName(date, kind, wanted.epoch, entries.begin, entries.end)
            self._store_file(name, entries, first, end, wanted)
        self._place[0].files.close()  # a file that retention removes takes its space until then
        return StoredRange(len(entries.rows))

    def _store_file(self, name: DataName, entries: Entries, first: int, end: int, wanted: StoreRange) -> None:
        assert self._place is not None
        segments, objects = self._place
        rows, ranks = entries.rows[first:end], entries.ranks[first:end]
        bytes_max = None if end - first == 1 else wanted.bytes_max
        encoded = self._finish(encode_file(segments, name, self._broker, rows, ranks, wanted.now_ms, bytes_max))
        store_file(objects, encoded, self._beat)
        file, footer, keys_bytes = encoded.file, encoded.footer, len(encoded.keys)
        del encoded  # the bytes of the file
        pa.default_memory_pool().release_unused()
        check_file(objects, file, footer, keys_bytes, self._beat)
        for begin in range(0, len(footer.spans), PART_COUNT):
            self._send(SpansPart(footer.spans[begin : begin + PART_COUNT]))
        self._send(StoredFile(file, structs.replace(footer, spans=[])))

    def _beat(self) -> None:
        self._send(AtWork())

    def _finish(self, steps: Steps[T]) -> T:
        """Return the result of *steps*, which read the log; the broker hears that the work goes on.

        Raises:
          LogUnreadable: a file of the log is gone.
        """
        try:
            return finish_now(steps, self._beat)
        except FileNotFoundError as error:
            raise LogUnreadable(f"{error.filename!r} of the log is gone; retention has removed it") from error
