"""Drives projections: restores and replays them at startup, applies new records, saves snapshots.

A snapshot is only an optimization: without one, or with one that does not match the log, a projection is computed
from the whole log. So a lost or damaged file only makes the start slower.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, final

import trio
from msgspec.structs import replace

from martlet.errors import MartletError, PluginError, Reason, Refused, StoreError
from martlet.records.codec import tags_code
from martlet.records.layout import ENTRY, HEAD_BYTES
from martlet.runtime.checksum import crc32
from martlet.runtime.steps import Steps, begin, finish_now, finish_off_loop
from martlet.runtime.turns import Turns
from martlet.state.log_order import LogOrder, QueueCursor, Run
from martlet.state.projection import HoldsMessages, Projection
from martlet.state.snapshot import Mark, Snapshot, decode_snapshot, encode_snapshot
from martlet.store import Queue, Store
from martlet.store.queues.queues import BlockDamaged

__all__ = ["Projections"]

log = logging.getLogger("martlet.state")

FOLDER: Final = "config"
SUFFIX: Final = ".snapshot"
# A snapshot is due after this many bytes of followed records, but at least this many times its own size.
SNAPSHOT_BYTES: Final = 64 * 1024 * 1024
SNAPSHOT_TIMES: Final = 4
# Pause after a failed write of a snapshot.
RETRY_S: Final = 60.0
# After the log could not be read.
READ_AGAIN_S: Final = 5.0
# Time between log lines during a replay.
PROGRESS_S: Final = 5.0
# Runs of up to 2 ms that are applied as soon as they are readable: of all projections together, at least one of each.
RUNS_AT_ONCE: Final = 2
# A start gives up after rebuilding a damaged block this often.
REPAIRS: Final = 3
# A refused `roll` is retried this often before the records are removed anyway.
ROLL_TRIES: Final = 10
# Entries of a queue that `may_have_newer` looks at; more of them are applied first.
LOOKED_AT: Final = 512


@final
class Driven:
    """One projection and its progress."""

    __slots__ = (
        "failed",
        "followed_bytes",
        "order",
        "plugin",
        "projection",
        "retry_at",
        "saved_bytes",
        "saved_held",
        "topics",
    )

    def __init__(self, plugin: str, projection: Projection, order: LogOrder) -> None:
        self.plugin = plugin
        self.projection = projection
        self.topics = sorted(projection.topics)
        self.order = order
        # Bytes of records applied since the newest snapshot, and the size of that snapshot; -1 if there is none.
        self.followed_bytes = 0
        self.saved_bytes = -1
        self.saved_held = 0
        self.retry_at = 0.0
        self.failed = False

    @property
    def name(self) -> str:
        return self.projection.name

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.name}{SUFFIX}"

    def held(self) -> int:
        """Return how many messages wait for the plugin."""
        return self.projection.held() if isinstance(self.projection, HoldsMessages) else 0

    def snapshot(self) -> tuple[int, Steps[list[bytes]]]:
        """Freeze the projection; return the position up to which it is complete, and slices that render its file."""
        order = self.order
        rows = begin(self.projection.freeze())
        reached = [(each.queue, each.offset, each.position) for each in order.cursors.values()]
        begun = Snapshot(self.topics, order.position, order.size, order.crc, [], b"", self.plugin, self.held())
        return order.position + order.size, self._content(rows, reached, begun)

    def _content(
        self, rows: Steps[Sequence[bytes]], reached: list[tuple[Queue, int, int]], begun: Snapshot
    ) -> Steps[list[bytes]]:
        pieces = yield from rows
        marks = [Mark(queue.topic, queue.queue_id, offset, at) for queue, offset, at in reached]
        return (yield from encode_snapshot(self.name, replace(begun, marks=marks), pieces))


@final
class Projections:
    """All projections of a broker.

    Call `add` for each, `replay` before ports open, `run` while the broker runs, and `save` at the end. Where a
    projection raises in `apply`, `forget` or `restore`, no projection of its plugin is called again; `on_failed` is
    called with the plugin and the error.
    """

    def __init__(self, store: Store, turns: Turns, *, snapshot_bytes: int = SNAPSHOT_BYTES) -> None:
        self._store = store
        self._turns = turns
        self._snapshot_bytes = snapshot_bytes
        self.on_failed: Callable[[str, Exception], None] | None = None
        self._driven: list[Driven] = []
        self._work = trio.Event()
        self._due = trio.Event()
        # Retention may remove records before this position; 0 until the replay is over.
        self.released = 0
        self._roll_tries = 0
        self._replayed = False
        self._applied: trio.Event | None = None  # of those that wait until records were applied
        # Already now: the store applies retention while the projections are replayed.
        store.upkeep.retention.keeper = self

    def __len__(self) -> int:
        return len(self._driven)

    def add(self, plugin: str, projection: Projection) -> None:
        """Drive *projection* of *plugin*, beginning with `replay`.

        Raises:
          PluginError: another projection has the same name.
        """
        for driven in self._driven:
            if driven.name == projection.name:
                text = f"plugin {driven.plugin!r} has one with this name"
                raise PluginError(f"projection {projection.name!r} of plugin {plugin!r} cannot be added; {text}")
        self._driven.append(Driven(plugin, projection, LogOrder(self._store)))

    # ---- the start

    async def replay(self) -> None:
        """Restore every projection from its snapshot and apply the readable records after it.

        Raises:
          StoreError: the log cannot be read; the text names the file.
        """
        store = self._store
        for driven in self._driven:
            if not driven.failed:
                await self._restore(driven)
        store.queues.on_new.append(self._follow_new)
        store.deletions.on_deleted.append(self._forget)
        for driven in self._driven:
            await self._catch_up(driven)
        store.readable_end.on_watched.append(self._apply_readable)
        self._replayed = True
        await self._tell_of_held()

    async def _tell_of_held(self) -> None:
        """Log how many messages wait for plugins that are not enabled, by their last snapshots."""
        names = {driven.name for driven in self._driven}
        for plugin, name, held in await self._store.disk.off_loop(partial(_held_in_snapshots, self._store, names)):
            text = "%d messages of %r wait for plugin %r, which is not enabled; enable it to have them delivered"
            log.warning(text, held, name, plugin)

    async def _restore(self, driven: Driven) -> None:
        off_loop, first = self._store.disk.off_loop, self._store.first_position
        try:
            generations = await off_loop(lambda: list(self._store.data_directory.read_generations(driven.path)))
        except OSError as error:
            log.warning("%s cannot be read; %s", driven.path, error)
            generations = []
        for number, content in enumerate(generations):
            try:
                snapshot = await off_loop(partial(decode_snapshot, driven.name, content))
                self._check_fits(driven, snapshot)
                deleted = await self._deleted_topics(snapshot)
                await self._turns.finish(driven.projection.restore(snapshot.data, first))
            except Exception as error:
                log.warning("%s cannot be used; %s", driven.path, error)
                continue
            driven.saved_bytes, driven.saved_held = -1 if number else len(content), snapshot.held
            self._continue_from(driven, snapshot, deleted)
            return
        try:
            await self._turns.finish(driven.projection.restore(b"", first))
        except Exception as error:
            self._fail(driven, "to start without a snapshot", error)
            return
        for queue in self._queues(driven):
            driven.order.add(queue)

    def _queues(self, driven: Driven) -> Iterator[Queue]:
        for topic in driven.topics:
            yield from list(self._store.queues.topics.get(topic, {}).values())

    def _check_fits(self, driven: Driven, snapshot: Snapshot) -> None:
        """Raise `StoreError` unless *snapshot* was made from this log and its newest record still exists."""
        store = self._store
        if snapshot.topics != driven.topics:
            raise StoreError(f"it follows topics {snapshot.topics}; the projection follows {driven.topics}")
        if not snapshot.size:
            return
        if snapshot.position < store.first_position or snapshot.end > store.readable:
            raise StoreError(
                f"it ends at position {snapshot.end}; the log goes from {store.first_position} to {store.readable}"
            )
        if crc32(store.segments.read(snapshot.position, HEAD_BYTES)) != snapshot.crc:
            raise StoreError(f"it was made from another log; the record at position {snapshot.position} differs")

    async def _deleted_topics(self, snapshot: Snapshot) -> set[str]:
        """Return the topics that were deleted after *snapshot*: their queues are not those that it was made from.

        Raises:
          StoreError: a queue has older records than a recreated topic can have; its files were replaced.
        """
        deleted: set[str] = set()
        for mark in snapshot.marks:
            queue = self._store.queues.find(mark.topic, mark.queue_id)
            if not mark.offset or (queue is not None and await self._fits(queue, mark)):
                continue  # a queue without records may be missing: it is created when somebody asks for it
            if queue is not None and -1 < await self._position_at(queue, queue.stored_from) < snapshot.end:
                raise StoreError(f"consume queue {mark.topic}/{mark.queue_id} is not the one it was made from")
            deleted.add(mark.topic)
        return deleted

    async def _fits(self, queue: Queue, mark: Mark) -> bool:
        """Return whether *queue* is the one that *mark* describes."""
        if queue.next_offset < mark.offset:
            return False
        removed = mark.offset <= queue.stored_from  # by retention, or the queue is empty
        return removed or await self._position_at(queue, mark.offset - 1) == mark.position

    async def _position_at(self, queue: Queue, offset: int) -> int:
        """Return the log position in the entry at *offset*; -1 if there is none."""
        if offset >= queue.next_offset:
            return -1
        for _ in range(REPAIRS):
            try:
                entry = await self._turns.finish(self._store.queues.entries_in_steps(queue, offset, 1))
            except BlockDamaged:
                await self._store.upkeep.repairs.repair(queue)
                continue
            return int(ENTRY.unpack(entry)[0]) if entry else -1
        raise StoreError(f"consume queue {queue.topic}/{queue.queue_id} is damaged again after each rebuild")

    def _continue_from(self, driven: Driven, snapshot: Snapshot, deleted: set[str]) -> None:
        """Set the cursors to the end of *snapshot*, and forget the topics *deleted* since."""
        for topic in sorted(deleted):
            self._forget_in(driven, topic)
        if driven.failed:
            return
        order = driven.order
        order.position, order.size, order.crc = snapshot.position, snapshot.size, snapshot.crc
        marks = {(mark.topic, mark.queue_id): mark for mark in snapshot.marks if mark.topic not in deleted}
        for queue in self._queues(driven):
            cursor = order.add(queue)
            mark = marks.get((queue.topic, queue.queue_id))
            if mark is not None:
                cursor.offset, cursor.position = max(mark.offset, queue.stored_from), mark.position

    async def _catch_up(self, driven: Driven) -> None:
        """Apply every readable record; log the progress from time to time.

        Raises:
          StoreError: the log cannot be read.
        """
        order, store = driven.order, self._store
        begin, count = max(order.position + order.size, store.first_position), 0
        said_at = trio.current_time()
        while not driven.failed and not order.at_end:
            try:
                run = await order.next_run()
            except OSError as error:
                file = f"file {error.filename!r}" if error.filename else "the log"
                text = f"{file} cannot be read for projection {driven.name!r}; {error.strerror}, check the disk"
                raise StoreError(text) from error
            self._apply(driven, run)
            count += len(run)
            await trio.lowlevel.checkpoint()
            if trio.current_time() - said_at >= PROGRESS_S:
                said_at = trio.current_time()
                done, total = order.position - begin, store.readable - begin
                log.info("projection %r: replayed %d of %d MiB of the log", driven.name, done >> 20, total >> 20)
        if count:
            log.info("projection %r: replayed %d records from position %d on", driven.name, count, begin)

    # ---- what becomes readable

    def _apply_readable(self) -> None:
        behind = [driven for driven in self._driven if driven.order.behind and not driven.failed]
        for driven in behind:
            self._apply_some(driven, max(RUNS_AT_ONCE // len(behind), 1))

    def _apply_some(self, driven: Driven, runs: int) -> None:
        """Apply up to *runs* runs of records that are in memory; `run` does the rest."""
        for _ in range(runs):
            run = driven.order.next_run_nowait()
            if run is None:
                break
            self._apply(driven, run)
            if driven.failed or driven.order.at_end:
                return
        self._work.set()

    def _fail(self, driven: Driven, where: str, error: Exception) -> None:
        """Go on without *driven* and all other projections of its plugin."""
        text = "projection %r of plugin %r failed %s; the plugin is stopped"
        log.error(text, driven.name, driven.plugin, where, exc_info=error)
        for each in self._driven:
            if each.plugin == driven.plugin:
                each.failed = True
                each.order.close()
        if self._applied is not None:
            self._applied.set()
            self._applied = None
        if self.on_failed is not None:
            self.on_failed(driven.plugin, error)

    def _apply(self, driven: Driven, run: Run) -> None:
        if not run or driven.failed:
            return
        first, last = run[0].position, run[-1]
        driven.followed_bytes += sum(record.size for record in run)
        try:
            driven.projection.apply(run)
        except Exception as error:
            self._fail(driven, f"to apply the records from position {first} to {last.position}", error)
            return
        if self._snapshot_is_due(driven):
            self._due.set()
        if self._applied is not None:
            self._applied.set()
            self._applied = None

    def has_applied(self, projection: Projection) -> bool:
        """Return whether *projection* has every record that is readable; it usually has, unless there came many."""
        return self._has_applied(projection, self._store.readable)

    async def wait_applied(self, projection: Projection, end: int = 0) -> None:
        """Wait until *projection* has every record that is readable now, or that was appended before position *end*."""
        end = max(end, self._store.readable)
        if end > self._store.readable:
            await self._wait_readable(end)
        while not self._has_applied(projection, end):
            if self._applied is None:
                self._applied = trio.Event()
            await self._applied.wait()

    async def _wait_readable(self, end: int) -> None:
        """Wait until the log is readable up to *end*, or ends before."""
        moved = trio.Event()

        def note() -> None:
            moved.set()

        self._store.readable_end.on_moved.append(note)
        self._store.flusher.want_durable(end)
        try:
            while self._store.readable < min(end, self._store.appended):
                await moved.wait()
                moved = trio.Event()
        finally:
            self._store.readable_end.on_moved.remove(note)

    def may_have_newer(self, projection: Projection, topic: str, tag: str) -> bool:
        """Return whether the log may have a message of *topic* with *tag* that *projection* has not applied yet.

        For `Projection.roll`: if not, and nothing is awaited in between, what it appends is the newest message with
        that tag. The topic must have no dispatcher.
        """
        code = tags_code(tag)
        for driven in self._driven:
            if driven.projection is projection and not driven.failed:
                for cursor in driven.order.cursors.values():
                    if cursor.queue.topic == topic and self._may_have_code(cursor, code):
                        return True
        return False

    def _may_have_code(self, cursor: QueueCursor, code: int) -> bool:
        """Return whether an entry after *cursor* has *code*; True if there are very many, or they are not in memory."""
        start, count = cursor.offset, cursor.queue.next_offset - cursor.offset
        if count <= 0:
            return False
        if count > LOOKED_AT or start < cursor.queue.tail_offset:
            return True
        return any(
            entry[2] == code for entry in ENTRY.iter_unpack(self._store.queues.entries(cursor.queue, start, count))
        )

    def _has_applied(self, projection: Projection, end: int) -> bool:
        return all(
            driven.failed or driven.order.passed(end) for driven in self._driven if driven.projection is projection
        )

    def _follow_new(self, queue: Queue) -> None:
        for driven in self._driven:
            if queue.topic in driven.projection.topics and not driven.failed:
                driven.order.add(queue)

    def _forget(self, topic: str) -> None:
        for driven in self._driven:
            if topic in driven.projection.topics and not driven.failed:
                driven.order.remove_topic(topic)
                self._forget_in(driven, topic)

    def _forget_in(self, driven: Driven, topic: str) -> None:
        try:
            driven.projection.forget(topic)
        except Exception as error:
            self._fail(driven, f"to forget topic {topic!r}", error)

    def _snapshot_is_due(self, driven: Driven) -> bool:
        due_bytes = max(self._snapshot_bytes, SNAPSHOT_TIMES * driven.saved_bytes)
        return not driven.failed and driven.followed_bytes >= due_bytes and trio.current_time() >= driven.retry_at

    async def run(self) -> None:
        """Apply records that must be read from disk, and save snapshots; until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._apply_rest)
            nursery.start_soon(self._save_due)

    async def _apply_rest(self) -> None:
        while True:
            await self._work.wait()
            self._work = trio.Event()
            while behind := [driven for driven in self._driven if not driven.failed and not driven.order.at_end]:
                for driven in behind:
                    try:
                        if not driven.failed:
                            self._apply(driven, await driven.order.next_run())
                    except (StoreError, OSError) as error:
                        log.error("projection %r cannot read the log, retrying in 5 s; %s", driven.name, error)
                        await trio.sleep(READ_AGAIN_S)
                    await trio.lowlevel.checkpoint()

    # ---- snapshots

    async def _save_due(self) -> None:
        while True:
            await self._due.wait()
            self._due = trio.Event()
            for driven in self._driven:
                if self._snapshot_is_due(driven):
                    await self._save(driven)

    async def _save(self, driven: Driven) -> None:
        """Write a snapshot of the current state; retry later if that fails."""
        store = self._store
        followed_bytes = driven.followed_bytes  # records applied during the write belong to the next snapshot
        try:
            position, content = driven.snapshot()
            pieces = await store.disk.off_loop(partial(finish_off_loop, content))
            # Records that are not durable could be lost and replaced by others.
            await store.flusher.wait_durable(position)
            await store.disk.off_loop(partial(store.data_directory.write_file, driven.path, *pieces))
        except Exception as error:
            log.error("%s cannot be written, retrying later; %s", driven.path, _reason(driven, error))
            driven.retry_at = trio.current_time() + RETRY_S
            return
        driven.saved_bytes, driven.saved_held = sum(map(len, pieces)), -1  # the number of an earlier moment
        driven.followed_bytes -= followed_bytes

    def save(self) -> None:
        """Apply the remaining records and write every outdated snapshot, blocking; for shutdown."""
        store = self._store
        if store.flusher.failed is not None or not self._replayed:
            return
        try:
            store.committer.commit()
            store.flusher.flush_now()
        except (Refused, OSError) as error:
            log.warning("snapshots cannot be written, so the next start takes longer; %s", error)
            return
        for driven in self._driven:
            try:
                self._save_blocking(driven)
            except Exception as error:
                text = "%s cannot be written, so the next start takes longer; %s"
                log.error(text, driven.path, _reason(driven, error))

    def _save_blocking(self, driven: Driven) -> None:
        while not driven.failed and not driven.order.at_end:
            self._apply(driven, driven.order.next_run_blocking())
        is_saved = driven.saved_bytes >= 0 and not driven.followed_bytes
        if driven.failed or (is_saved and driven.saved_held == driven.held()):
            return
        pieces = finish_now(driven.snapshot()[1])
        self._store.data_directory.write_file(driven.path, *pieces)
        driven.saved_bytes, driven.followed_bytes, driven.saved_held = sum(map(len, pieces)), 0, driven.held()

    # ---- retention

    async def release(self, end: int) -> None:
        """Have projections append again what they need of the records before *end*, so that these can be removed.

        If `roll` is refused because the disk is full, it is retried at the next `ROLL_TRIES` removals. Then one segment
        is given up: the space that it leaves is enough to append again what is needed of the others. The tries are
        counted from 0 again once nothing has to be removed, with an *end* of 0.
        """
        if end <= 0:
            self._roll_tries = 0
        live = [driven for driven in self._driven if not driven.failed]
        if not self._replayed or end <= self.released or not all(driven.order.passed(end) for driven in live):
            return
        start = max(self.released, self._store.first_position)
        try:
            await self._roll(live, start, end)
        except Exception as error:
            self._roll_tries += 1
            if self._roll_tries <= ROLL_TRIES:
                log.warning(
                    "records from position %d to %d are not removed yet, because a projection needs them; %s",
                    start,
                    end,
                    error,
                )
                return
            end = min(end, self._store.segments.items[0].end)
            text = "removing records from position %d to %d although a projection needs them; %s"
            log.error(text, start, end, error)
        self._roll_tries = 0
        self.released = end

    async def _roll(self, live: Sequence[Driven], start: int, end: int) -> None:
        """Call `roll` of the projections that need it, and wait until what they appended is durable.

        Raises:
          Refused: the disk is full, also if a commit of somebody else failed, which undid what they had appended.
          StoreFailed: the disk failed.
        """
        committer = self._store.committer
        undone = committer.undone
        for driven in live:
            if driven.projection.floor() < end:
                await self._turns.finish(driven.projection.roll(start, end))
        committer.commit_early()
        if committer.undone != undone:
            raise Refused(Reason.UNAVAILABLE, "a commit failed in the meantime")
        await self._store.flusher.wait_durable(self._store.written)

    def statistics(self) -> dict[str, object]:
        """Return per projection: position, size of its snapshot, bytes applied since, and whether it failed."""
        return {
            driven.name: {
                "position": driven.order.position + driven.order.size,
                "snapshot_bytes": max(driven.saved_bytes, 0),
                "since_snapshot_bytes": driven.followed_bytes,
                "failed": driven.failed,
            }
            for driven in self._driven
        }


def _reason(driven: Driven, error: Exception) -> str:
    """Return why there is no snapshot; names the plugin if its projection raised."""
    if isinstance(error, MartletError | OSError):
        return str(error)
    return f"plugin {driven.plugin!r} failed to render it; {type(error).__name__}: {error}"


def _held_in_snapshots(store: Store, present: set[str]) -> list[tuple[str, str, int]]:
    """Return plugin, name and number of held messages of the snapshots of all projections that are not *present*."""
    found: list[tuple[str, str, int]] = []
    for file in store.data_directory.names(FOLDER):
        name = file.removesuffix(SUFFIX)
        if name == file or name in present:
            continue
        try:
            snapshot = decode_snapshot(name, next(iter(store.data_directory.read_generations(f"{FOLDER}/{file}")), b""))
        except (OSError, StoreError) as error:
            log.debug("%s/%s cannot be read; %s", FOLDER, file, error)
            continue
        if snapshot.held:
            found.append((snapshot.plugin, name, snapshot.held))
    return found
