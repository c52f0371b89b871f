"""Drives projections: replays them at a start, applies new records, and saves snapshots at the end.

A snapshot is only an optimization: without one, or with one that does not match the log, a projection is computed
from the whole log. So a lost or damaged file only makes the start slower.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final, final

import trio

from martlet.errors import PluginError, Refused, StoreError
from martlet.records.codec import tags_code
from martlet.records.layout import ENTRY
from martlet.runtime.turns import Turns
from martlet.state.driven import Driven
from martlet.state.keeper import RecordKeeper
from martlet.state.log_order import LogOrder, QueueCursor, Run
from martlet.state.projection import Projection
from martlet.state.restoration import Restoration, held_in_snapshots
from martlet.state.snapshots import SNAPSHOT_BYTES, SnapshotWriter, reason_of
from martlet.store import Queue, Store

__all__ = ["Projections"]

log = logging.getLogger("martlet.state")

# Pause after a failed read of the log.
READ_AGAIN_S: Final = 5.0
# Time between log lines during a replay.
PROGRESS_S: Final = 5.0
# Runs of up to 2 ms applied as soon as they are readable: of all projections together, at least one of each.
RUNS_AT_ONCE: Final = 2
# Entries of a queue that `may_have_newer` checks; if there are more, they are applied first.
LOOKED_AT: Final = 512


@final
class Projections:
    """All projections of a broker.

    Call `add` for each, `replay` before ports open, `run` while the broker runs, and `save` at the end. If a projection
    raises in `apply`, `forget` or `restore`, no projection of its plugin is called again; `on_failed` is called with
    the plugin and the error.
    """

    def __init__(self, store: Store, turns: Turns, *, snapshot_bytes: int = SNAPSHOT_BYTES) -> None:
        self._store = store
        self._turns = turns
        self.on_failed: Callable[[str, Exception], None] | None = None
        self._driven: list[Driven] = []
        self._work = trio.Event()
        self.snapshots = SnapshotWriter(store, snapshot_bytes)
        self.keeper = RecordKeeper(store, turns, self._driven)
        self._applied: trio.Event | None = None  # set once more records are applied
        # Set early: the store applies retention while the projections are replayed.
        store.upkeep.retention.add_keeper(self.keeper)

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
        self._driven.append(Driven(plugin, projection, LogOrder(self._store), self._fail))

    # ---- the start

    async def replay(self) -> None:
        """Restore every projection from its snapshot and apply the readable records after it.

        Raises:
          StoreError: the log cannot be read; the text names the file.
        """
        store, restoration = self._store, Restoration(self._store, self._turns)
        for driven in self._driven:
            if not driven.failed:
                await restoration.restore(driven)
        store.queues.on_new.append(self._follow_new)
        store.deletions.on_deleted.append(self._forget)
        for driven in self._driven:
            await self._catch_up(driven)
        store.readable_end.on_watched.append(self._apply_readable)
        self.keeper.is_ready = True
        await self._log_held()

    async def _log_held(self) -> None:
        """Log the number of messages that wait for plugins that are not enabled, from their last snapshots."""
        names = {driven.name for driven in self._driven}
        for plugin, name, held in await self._store.disk.off_loop(partial(held_in_snapshots, self._store, names)):
            text = "%d messages of %r wait for plugin %r, which is not enabled; enable it to have them delivered"
            log.warning(text, held, name, plugin)

    async def _catch_up(self, driven: Driven) -> None:
        """Apply every readable record; log the progress from time to time.

        Raises:
          StoreError: the log cannot be read.
        """
        order, store = driven.order, self._store
        begin, count = max(order.position + order.size, store.first_position), 0
        logged_at = trio.current_time()
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
            if trio.current_time() - logged_at >= PROGRESS_S:
                logged_at = trio.current_time()
                applied_mib, total_mib = (order.position - begin) >> 20, (store.readable - begin) >> 20
                log.info("projection %r: replayed %d of %d MiB of the log", driven.name, applied_mib, total_mib)
        if count:
            log.info("projection %r: replayed %d records from position %d on", driven.name, count, begin)

    # ---- readable records

    def _apply_readable(self) -> None:
        behind = [driven for driven in self._driven if driven.order.behind and not driven.failed]
        for driven in behind:
            self._apply_runs(driven, max(RUNS_AT_ONCE // len(behind), 1))

    def _apply_runs(self, driven: Driven, runs: int) -> None:
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
        """Continue without *driven* and all other projections of its plugin."""
        text = "projection %r of plugin %r failed %s; the plugin is stopped"
        log.error(text, driven.name, driven.plugin, where, exc_info=error)
        for each in self._driven:
            if each.plugin == driven.plugin:
                each.failed = True
                each.order.close()
        self._note_applied()
        if self.on_failed is not None:
            self.on_failed(driven.plugin, error)

    def _apply(self, driven: Driven, run: Run) -> None:
        if not run or driven.failed:
            return
        driven.apply(run)
        self.snapshots.note_applied(driven)
        self._note_applied()

    def _note_applied(self) -> None:
        """Let the callers of `wait_applied` look again."""
        if self._applied is not None:
            self._applied.set()
            self._applied = None

    def has_applied(self, projection: Projection) -> bool:
        """Return whether *projection* has applied every readable record; usually True, unless many are new."""
        return self._has_applied(projection, self._store.readable)

    async def wait_applied(self, projection: Projection, end: int = 0) -> None:
        """Wait until *projection* has applied every record readable now, or appended before position *end*."""
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

        def note_moved() -> None:
            moved.set()

        self._store.readable_end.on_moved.append(note_moved)
        self._store.flusher.want_durable(end)
        try:
            while self._store.readable < min(end, self._store.appended):
                await moved.wait()
                moved = trio.Event()
        finally:
            self._store.readable_end.on_moved.remove(note_moved)

    def floor(self) -> int:
        """Return a log position from which on the log has every record that the state of the projections needs."""
        store, floor = self._store, self._store.readable
        for driven in self._driven:
            if driven.failed or not self.keeper.is_ready:
                return store.first_position
            floor = min(floor, driven.projection.floor())
            if not driven.order.at_end:
                floor = min(floor, driven.order.position + driven.order.size)
        return max(floor, store.first_position)

    def may_have_newer(self, projection: Projection, topic: str, tag: str) -> bool:
        """Return whether the log may have a message of *topic* with *tag* that *projection* has not applied yet.

        For `Projection.roll`: if the result is False, and nothing is awaited in between, a message that it appends is
        the newest one with that tag. The topic must have no dispatcher.
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
                driven.forget(topic)

    async def run(self) -> None:
        """Apply records that must be read from disk, and save snapshots; until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._apply_from_disk)
            nursery.start_soon(self.snapshots.run, self._driven)

    async def _apply_from_disk(self) -> None:
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

    def save(self) -> None:
        """Apply the remaining records and write every outdated snapshot, blocking; for shutdown."""
        store = self._store
        if store.flusher.failed is not None or not self.keeper.is_ready:
            return
        try:
            store.committer.commit()
            store.flusher.flush_now()
        except (Refused, OSError) as error:
            log.warning("snapshots cannot be written, so the next start takes longer; %s", error)
            return
        for driven in self._driven:
            try:
                while not driven.failed and not driven.order.at_end:
                    self._apply(driven, driven.order.next_run_blocking())
                self.snapshots.write_blocking(driven)
            except Exception as error:
                text = "%s cannot be written, so the next start takes longer; %s"
                log.error(text, driven.path, reason_of(driven, error))

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
