"""Uploaders of real stores for tests, and a reader that finds everything in a tier again."""

import logging
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import uuid4

import trio

from martlet.message import Message
from martlet.records.layout import BLANK_MAGIC, RecordView
from martlet.store import Store
from martlet.store.disk.segments import Segments
from martlet.testing.stores import HOST, ManualClock, message, small_config
from martlet_columns.rebuild import rebuild
from martlet_tiered.config import TieredConfig
from martlet_tiered.delta import TableLog
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, decode_group, footer_of, read_metadata
from martlet_tiered.format.writing import TABLE_SCHEMA
from martlet_tiered.objects import Objects
from martlet_tiered.opening import open_objects
from martlet_tiered.owners import Reach
from martlet_tiered.rewrite.rewriter import Facts, Rewriter
from martlet_tiered.table import ColdTable
from martlet_tiered.upload.messages import LENGTH, Setup, encode_message
from martlet_tiered.upload.ownership import Ownership
from martlet_tiered.upload.process import UploadWorker, run_worker
from martlet_tiered.upload.range_work import RangeWork
from martlet_tiered.upload.uploader import CommitFollower, RunWorker, Uploader
from martlet_tiered.upload.worker import open_place

from .cold import Tier, now_ms

__all__ = [
    "Followed",
    "Held",
    "Killed",
    "Place",
    "begin_upload",
    "check_tier",
    "fill",
    "filled_store",
    "log_records",
    "open_store",
    "table_of",
    "tier_records",
    "until",
    "upload_all",
    "uploader_of",
]

RANGE_BYTES: Final = 3000
COUNT: Final = 60
TOPICS: Final = ("T", "orders", "T", "%RETRY%G", "T", "%DLQ%G", "martlet.x")


class Killed(BaseException):
    """Ends an uploader as the end of its process does."""


class Place:
    """Opens the place of a tier for an uploader, through *wrap* for objects and tables.

    The work of the upload process is done in a thread, by its own code and with its messages; with *own_process* it is
    done in a process.
    """

    def __init__(
        self,
        tier: Tier,
        broker: str = "a",
        wrap: Callable[[Any], Any] = lambda found: found,
        *,
        own_process: bool = False,
    ) -> None:
        self.tier = tier
        self.broker = broker
        self.wrap = wrap
        self.own_process = own_process
        self.opened = 0

    def objects(self) -> Objects:
        found: Objects = self.wrap(self.tier.objects())
        return found

    def table(self) -> ColdTable:
        self.opened += 1
        tier = self.tier
        objects = open_objects(tier.location(), tier.config(), uuid4().hex, now_ms())
        found: ColdTable = self.wrap(ColdTable(objects, TableLog(objects, tier.location(), tier.config()), self.broker))
        return found

    def setup(self, store: Store) -> Setup:
        options, folder = self.tier.location().options, store.segments.directory
        return Setup(self.tier.config(), options, folder, self.broker, uuid4().hex, now_ms(), logging.INFO)

    def worker(self, store: Store) -> RunWorker:
        """Return what runs upload processes for *store*."""
        if self.own_process:
            return lambda deadline_s: run_worker(self.setup(store), deadline_s)
        return lambda _: self._in_thread(store)

    @asynccontextmanager
    async def _in_thread(self, store: Store) -> AsyncIterator[UploadWorker]:
        worker = UploadWorker(InThread(self.wrap))
        await worker.open(self.setup(store))
        yield worker


class InThread:
    """Sends each request to the code of the upload process, which answers in a thread."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        self._wrap = wrap
        self._replies: list[bytes] = []
        self._work = RangeWork(self._open, lambda reply: self._replies.append(encode_message(reply)))

    def _open(self, setup: Setup) -> tuple[Segments, Objects]:
        segments, objects = open_place(setup)
        return segments, self._wrap(objects)

    async def send(self, data: bytes) -> None:
        await trio.to_thread.run_sync(self._work.answer, data[LENGTH.size :], abandon_on_cancel=True)

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._replies.pop(0)[LENGTH.size :]


class Followed:
    """A follower that remembers what it was told, and checks that the store still has the records."""

    def __init__(self) -> None:
        self.files: dict[str, DataFile] = {}
        self.footers: list[FileFooter] = []
        self.released: Callable[[], int] = lambda: 0

    async def sync(self, files: Sequence[DataFile]) -> None:
        self.files = {file.path: file for file in files}

    async def beginning(self, epoch: int, reach: Reach) -> None:
        assert reach.end >= self.released() or not reach.end

    async def committed(self, files: Sequence[DataFile], footers: Sequence[FileFooter]) -> None:
        assert all(footer.begin >= self.released() for footer in footers)
        self.files.update((file.path, file) for file in files)
        self.footers += footers

    async def files_of_deleted(self) -> tuple[Sequence[str], dict[str, int]] | None:
        return [], {}

    async def replaced(
        self, removed: Sequence[DataFile], added: Sequence[DataFile], footers: Sequence[FileFooter]
    ) -> None:
        for file in removed:
            del self.files[file.path]
        self.files.update((file.path, file) for file in added)


@asynccontextmanager
async def open_store(path: Path, clock: ManualClock | None = None, **changes: Any) -> AsyncIterator[Store]:
    store = await Store.open(path / "store", small_config(**changes), clock or ManualClock())
    store.writer.store_host = HOST
    try:
        yield store
    finally:
        store.crash()


def fill(store: Store, *messages: tuple[Message, int]) -> None:
    """Append messages, each to a queue of its topic, and make them durable."""
    for each, queue in messages:
        store.writer.append(each, queue)
        store.committer.commit()
    store.flusher.flush_now()


def filled_store(store: Store, count: int = COUNT, first: int = 0, topics: Sequence[str] = TOPICS) -> None:
    """Append messages of several topics and kinds with bodies of different sizes."""
    for number in range(first, first + count):
        body, keys = b"%d " % number * (number % 50), f"k{number} all"
        fill(store, (message(body, topics[number % len(topics)], "tag", keys, f"U{number}"), number % 3))


def log_records(store: Store) -> Iterator[tuple[int, bytes]]:
    """Yield position and bytes of each record in the log."""
    position = store.first_position
    while position < store.durable:
        head = store.segments.read(position, 8)
        size = int.from_bytes(head[:4], "big")
        if int.from_bytes(head[4:], "big") != BLANK_MAGIC:
            yield position, bytes(store.segments.read(position, size))
        position += size


def table_of(tier: Tier, broker: str = "a") -> ColdTable:
    """Return the table of a tier, to read."""
    table = ColdTable(tier.objects(), TableLog(tier.objects(), tier.location(), tier.config()), broker)
    table.open(TABLE_SCHEMA)
    return table


def tier_records(tier: Tier, broker: str = "a") -> list[tuple[int, bytes]]:
    """Return position and bytes of each record in the files of the table, after checks of all footers."""
    objects, table = tier.objects(), table_of(tier, broker)
    found = []
    for file in table.files():
        name = f"table/{file.path}"
        metadata = read_metadata(objects, name, file.bytes)
        footer = footer_of(metadata)
        assert footer is not None
        rows: list[RecordView] = []
        for number, group in enumerate(footer.groups):
            data = objects.read_range(name, group.begin, group.end)
            records = rebuild(decode_group(metadata, number, group.begin, data))
            assert zlib.crc32(records.data) == group.crc
            whole = bytes(records.data)
            rows += [RecordView(whole, start) for start in records.starts.tolist()]
        assert len(rows) == file.rows == sum(span.count for span in footer.spans)
        for span in footer.spans:
            part = rows[span.row : span.row + span.count]
            assert {(row.topic, row.queue_id) for row in part} == {(span.topic, span.queue)}
            assert [row.queue_offset for row in part] == sorted(row.queue_offset for row in part)
        assert all(footer.begin <= row.position < footer.end for row in rows)
        found += [(row.position, bytes(row.buffer[row.start : row.start + row.size])) for row in rows]
    return sorted(found)


def check_tier(tier: Tier, store: Store, end: int | None = None) -> None:
    """Assert that the tier has each record of the log before *end* exactly once, byte for byte."""
    end = store.durable if end is None else end
    found = tier_records(tier)
    assert max(Counter(position for position, _ in found).values(), default=1) == 1
    assert [pair for pair in found if pair[0] >= store.first_position] == [
        pair for pair in log_records(store) if pair[0] < end
    ]


async def until(condition: Callable[[], bool]) -> None:
    """Wait in real time for *condition*, which threads bring about."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.002)


class Knows(CommitFollower, Facts, Protocol):
    """Learns what is in the table, and tells what is to be rewritten."""


def uploader_of(store: Store, place: Place, config: TieredConfig, followed: Knows) -> tuple[Uploader, Rewriter]:
    """Return an uploader of *store*, which does not run yet, and its upkeep."""
    run, clock = place.worker(store), ManualClock(now_ms())
    rewriter = Rewriter(followed, place.objects, lambda: store.first_position, config, clock, place.broker)
    ownership = Ownership(store.disk, store.data_directory.path, uuid4().hex)
    return Uploader(store, config, clock, place.table, run, followed, rewriter, place.broker, ownership), rewriter


class Held:
    """An uploader, and what it tells its follower."""

    def __init__(self, store: Store, place: Place, **settings: Any) -> None:
        config = place.tier.config(**{"range_bytes": RANGE_BYTES, "range_ms": 1, **settings})
        self.followed = Followed()
        self.uploader, self.rewriter = uploader_of(store, place, config, self.followed)
        self.followed.released = lambda: self.uploader.released
        self._store = store

    async def finish(self) -> None:
        """Wait until all of the log is uploaded."""
        await self.uploader.release(self._store.durable)
        await until(lambda: self.uploader.released >= self._store.durable)


@asynccontextmanager
async def begin_upload(store: Store, place: Place, **settings: Any) -> AsyncIterator[Held]:
    """Run an uploader of *store*."""
    held = Held(store, place, **settings)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(held.uploader.run)
        yield held
        nursery.cancel_scope.cancel()


async def upload_all(store: Store, place: Place, **settings: Any) -> Held:
    """Upload all of the log, and return the uploader, which has ended."""
    async with begin_upload(store, place, **settings) as held:
        await held.finish()
    return held
