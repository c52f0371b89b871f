"""Restores projections at a start, each from its newest snapshot that fits the log."""

import logging
from collections.abc import Iterator
from functools import partial
from typing import Final, final

from martlet.errors import StoreError
from martlet.records.layout import ENTRY, HEAD_BYTES
from martlet.runtime.checksum import crc32
from martlet.runtime.turns import Turns
from martlet.state.driven import FOLDER, SUFFIX, Driven
from martlet.state.snapshot import Mark, Snapshot, decode_snapshot
from martlet.store import Queue, Store
from martlet.store.queues.queues import BlockDamaged

__all__ = ["Restoration", "held_in_snapshots"]

log = logging.getLogger("martlet.state")

# Number of times that a start rebuilds a damaged block before it gives up.
REPAIRS: Final = 3


@final
class Restoration:
    """Restores one projection after the other from the files of a data directory."""

    def __init__(self, store: Store, turns: Turns) -> None:
        self._store = store
        self._turns = turns

    async def restore(self, driven: Driven) -> None:
        """Restore *driven* from its newest snapshot that fits the log, or let it begin without one."""
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
            driven.fail("to start without a snapshot", error)
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
        """Return the topics that were deleted after *snapshot*: their queues are not those of the snapshot.

        Raises:
          StoreError: a queue has older records than a recreated topic can have; its files were replaced.
        """
        deleted: set[str] = set()
        for mark in snapshot.marks:
            queue = self._store.queues.find(mark.topic, mark.queue_id)
            if not mark.offset or (queue is not None and await self._fits(queue, mark)):
                continue  # a queue without records may be missing: its first use creates it
            if queue is not None and -1 < await self._position_at(queue, queue.stored_from) < snapshot.end:
                raise StoreError(f"consume queue {mark.topic}/{mark.queue_id} is not the one it was made from")
            deleted.add(mark.topic)
        return deleted

    async def _fits(self, queue: Queue, mark: Mark) -> bool:
        """Return whether *mark* was made of *queue*."""
        if queue.next_offset < mark.offset:
            return False
        is_removed = mark.offset <= queue.stored_from  # retention removed the entry, or the queue is empty
        return is_removed or await self._position_at(queue, mark.offset - 1) == mark.position

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
            driven.forget(topic)
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


def held_in_snapshots(store: Store, present: set[str]) -> list[tuple[str, str, int]]:
    """Return plugin, name and number of held messages of the snapshots of all projections that are not *present*."""
    held_messages: list[tuple[str, str, int]] = []
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
            held_messages.append((snapshot.plugin, name, snapshot.held))
    return held_messages
