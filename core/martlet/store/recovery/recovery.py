"""Recovery at startup: finds the end of the log, and makes the indexes match it.

Everything below the checkpoint's position is durable, and the journal has the exact state of each queue there. So the
log is read from there on, and each record is added to its queue. Queues with missing or truncated files, unless the log
says that their topic was deleted, are rebuilt from the log below that position. Without a valid journal, all queues are
rebuilt from the whole log. A crash during a start destroys nothing that the next start needs: checkpoint and journal
are written at its end.

If bytes are no record, the next intact record decides: if there is one, the bytes are damage, which is skipped and
reported; otherwise the log ends there. After a crash an incomplete group of records (`atomic`) counts as no record.
"""

import logging
from collections.abc import Callable
from typing import Final, final

import trio

from martlet.records.layout import ENTRY_BYTES
from martlet.store.disk.checkpoint import Checkpoint
from martlet.store.disk.segments import Segment, Segments
from martlet.store.format.atomic import NOWHERE
from martlet.store.format.notes import Note
from martlet.store.handover.foreign import ForeignQueues
from martlet.store.queues.queue_journal import QueueJournal, QueueState
from martlet.store.queues.queues import BlockDamaged, Queue, Queues, queue_ids
from martlet.store.recovery.repair import Repair
from martlet.store.recovery.scan import BLOCK_BYTES, Scan

__all__ = ["Progress", "Recovery"]

logger = logging.getLogger("martlet.store")

Progress = Callable[[int, int, int], None]

REPORT_SECONDS: Final = 0.25
# Queues to check per turn of the event loop.
LOAD_BATCH: Final = 256
# Replaces the log position of a note that an earlier start has read.
NOTED_BEFORE: Final = 0


@final
class Recovery:
    """One recovery; afterwards its fields contain the results."""

    def __init__(self, segments: Segments, queues: Queues, report: Progress | None) -> None:
        self.segments = segments
        self.queues = queues
        self._report = report
        self._reported = -REPORT_SECONDS
        self._broken: dict[Queue, None] = {}
        self._rebuilding = False
        self._torn = False
        self._base = 0
        # Below this, no write was in progress when the last process ended.
        self._durable = 0
        self._scan = Scan(segments, queues, queues.get, self._apply_note)
        # The position from which the log was read.
        self.start = 0
        self.end = 0
        self.records = 0
        self.damaged = 0
        self.cut_bytes = 0
        self.last_store_ms = 0
        # Files that were repaired, and topics with a deletion record.
        self.paths: set[str] = set()
        self.deleted: list[str] = []
        # Topics with records but without a directory for their queues, if the record of a deletion may be missing.
        self.unlisted: set[str] = set()

    async def run(
        self, checkpoint: Checkpoint | None, journal: QueueJournal, *, clean: bool, distrust: Callable[[], None]
    ) -> None:
        """Find the end of the log and complete the queues.

        Args:
          clean: the last shutdown was orderly.
          distrust: called before changing anything that only the files tell; if this start does not complete, the
            next one rebuilds every queue.
        """
        self._torn = not clean
        names: list[str] = []
        states = self._load_states(checkpoint, journal)
        self.segments.complete()
        if states is not None and checkpoint is not None and await self._create_queues(states, clean=clean):
            self.start = checkpoint.position
        elif not self._adopt(checkpoint, journal, clean=clean):
            names = self._start_over(checkpoint, distrust)
        self._scan.torn_from = NOWHERE if clean else max(self.start, self._durable)
        self._scan.order.guess = (self._rebuilding or states is None) and self.segments.start > 0
        self._scan.order.foreign = checkpoint is not None and (
            checkpoint.shared or self._is_foreign(checkpoint, journal)
        )
        # RocketMQ does not know groups, and copies sysFlag into other messages.
        self._scan.groups_from = NOWHERE if self._scan.order.foreign else self._scan.torn_from
        await self._read_log(self.start)
        self._scan.order.settle()
        # Damage may have lost the newest messages of a queue, all of them expired: never use their offsets again.
        for queue in self.queues.all():
            self._continue_at(queue, queue.expired_to)
        await self._rebuild_broken()
        if self._scan.order.foreign and self._torn:
            self._cut_queues()
        self._remove_strays()
        # RocketMQ leaves no record of a deletion, and lost bytes of the log may have been one.
        may_lack_deletion = self._scan.damaged_bytes or (
            checkpoint is not None and self._is_foreign(checkpoint, journal)
        )
        if self._rebuilding and may_lack_deletion:
            self.unlisted = set(self.queues.topics) - set(names)
        self._add_counts()
        self.last_store_ms = self._scan.last_store_ms
        if self._rebuilding or self._base < self.segments.start:
            journal.abandon()

    def _add_counts(self) -> None:
        self.records += self._scan.records
        self.damaged += self._scan.damaged

    # ---- state of the queues

    def _load_states(
        self, checkpoint: Checkpoint | None, journal: QueueJournal
    ) -> dict[str, dict[int, QueueState]] | None:
        """Return the state at the checkpoint; None if there is no reliable one."""
        if checkpoint is None or checkpoint.position < 0:
            return None
        self._durable = checkpoint.position
        if not self._log_covers(checkpoint.position):
            return None
        return journal.load(checkpoint)

    def _log_covers(self, position: int) -> bool:
        """Return whether the log covers *position*."""
        segments = self.segments
        if not segments.items:
            return position == 0
        segment = segments.items[-1]
        if position > segment.end or position > segment.start + segments.files.size(segment.path):
            logger.error("the log ends before position %d, up to which it was durable; files are missing", position)
            self._durable = segment.start
            return False
        return position >= segments.start

    async def _create_queues(self, states: dict[str, dict[int, QueueState]], *, clean: bool) -> bool:
        """Create the queues as at the checkpoint, and check that their files exist.

        Returns False if the first offset of a queue cannot be found.
        """
        start = self.segments.start
        self._base = start
        number = 0
        for topic, of_topic in states.items():
            for queue_id, state in of_topic.items():
                queue = self.queues.get(topic, queue_id)
                queue.begin_at(state.next_offset)
                queue.store_from(min(state.first_offset, state.next_offset))
                queue.expire_to(state.expired_to)
                queue.last_end = queue.saved_end = state.last_end
                queue.blocks = (state.base, state.crcs)
                queue.mark = (state.next_offset, state.running)
                queue.journaled = state.base + len(state.crcs)
                queue.unsure_names = not clean
                queue.begins = False
                if not state.next_offset:
                    queue.noted = NOTED_BEFORE
                if state.first_start != start:
                    self._base = min(self._base, state.first_start)
                    if not self._find_first(queue, start):
                        logger.warning("consume queue %s/%d is missing or damaged at its beginning", topic, queue_id)
                        return False
                if queue.stored_from == queue.saved:
                    self._check_next_file(queue)
                elif not self.queues.files.whole(queue):
                    self._broken[queue] = None
                number += 1
                if not number % LOAD_BATCH:
                    await trio.lowlevel.checkpoint()
        return True

    def _check_next_file(self, queue: Queue) -> None:
        """Note whether an empty *queue* has the file of its next entry; otherwise the next write creates it."""
        files = self.queues.files
        at = queue.saved * ENTRY_BYTES
        queue.begins = files.files.disk.path_size(files.path_of(queue, at - at % files.file_bytes)) != files.file_bytes

    def _find_first(self, queue: Queue, start: int) -> bool:
        """Find the first offset of *queue* in the log from *start* on: retention removed segments after the checkpoint.

        Returns False if the remaining files do not show it.
        """
        if queue.saved_end <= start:
            queue.store_from(queue.saved)
            return True
        starts = self.queues.files.starts(queue)
        first_known = queue.stored_from
        low = min(max(first_known, starts[0] // ENTRY_BYTES if starts else 0), queue.saved)
        try:
            queue.store_from(self.queues.first_behind(queue, low, queue.saved, start))
            # Retention keeps the file in which the queue begins; if only newer ones are left, others are missing.
            return low == first_known or 0 <= self.queues.checked_position(queue, low) < start
        except BlockDamaged:
            return False

    def _is_foreign(self, checkpoint: Checkpoint, journal: QueueJournal) -> bool:
        """Return whether only RocketMQ has used this directory: no file shows a trace of Martlet."""
        return not checkpoint.known and not journal.exists()

    def _adopt(self, checkpoint: Checkpoint | None, journal: QueueJournal, *, clean: bool) -> bool:
        """Adopt the queues' files in a store that only RocketMQ has written; return False if that is not possible."""
        if checkpoint is None or not self._is_foreign(checkpoint, journal) or not checkpoint.log_ms:
            return False
        segments = self.segments
        limit = NOWHERE
        if not clean:
            limit = segments.start
            limit_ms = min(checkpoint.log_ms, checkpoint.queues_ms) - 3000
            for segment in reversed(segments.items):
                if 0 < segments.head_store_ms(segment) <= limit_ms:
                    limit = segment.start
                    break
        foreign = ForeignQueues(segments, self.queues, limit)
        if not foreign.load():
            return False
        self.start = foreign.highest if clean else limit
        return True

    def _start_over(self, checkpoint: Checkpoint | None, distrust: Callable[[], None]) -> list[str]:
        """Forget every queue, to rebuild them from the log. Return the topics that had a directory."""
        self._rebuilding = True
        self._broken.clear()
        self.start = self.segments.start
        files = self.queues.files
        names = files.files.disk.names(files.directory)
        self.queues.forget_all()
        if self.segments.items and (checkpoint is not None or names):
            logger.warning("the state of the consume queues is unknown; rebuilding all of them from the log")
        distrust()
        for topic in names:
            files.remove_topic(topic)
        return names

    def _apply_note(self, note: Note, position: int) -> None:
        """Apply an internal record."""
        topic_deleted = note.deleted
        if topic_deleted:
            queues = self.queues.forget_topic(topic_deleted)
            for queue in queues:
                self._broken.pop(queue, None)
            self.queues.let_go(queues)
            self._scan.order.forget(topic_deleted, queues)
            self._scan.forget_topic(topic_deleted)
            self.queues.files.remove_topic(topic_deleted)
            self.deleted.append(topic_deleted)
        for topic, queue_id, offset in note.expired:
            queue = self.queues.get(topic, queue_id)
            queue.expire_to(offset)
            self.queues.note_change(queue)
        for topic, queue_id, offset in note.ends:
            queue = self.queues.get(topic, queue_id)
            self._scan.order.settle_queue(queue, offset)
            queue.noted = position
            self.queues.note_change(queue)
            self._continue_at(queue, offset)

    def _continue_at(self, queue: Queue, offset: int) -> None:
        """Ensure that the next message of *queue* gets *offset* or a later one."""
        if queue.next_offset >= offset:
            return
        if queue.next_offset == queue.stored_from and not queue.tail:
            queue.begin_at(offset)
        else:
            self.queues.touch(queue)
            queue.add_holes(offset - queue.next_offset, queue.last_end)

    # ---- the log

    async def _read_log(self, position: int) -> None:
        """Read the log from *position* to its end."""
        scan = self._scan
        begin = position
        total = max(self.segments.end - begin, 1)
        want = BLOCK_BYTES
        while True:
            following, want = scan.step(position, want)
            if following < 0:
                position = want or position
                break
            position = following
            scan.save_some(position)
            self._report_progress(position - begin, total, scan.records)
            await trio.lowlevel.checkpoint()
        self._cut(position)
        self._report_progress(position - begin, position - begin, scan.records, is_last=True)

    async def _rebuild_broken(self) -> None:
        """Rebuild missing parts of queues below the checkpoint."""
        if not self._broken:
            return
        # Not only up to the checkpoint: the files may already have entries of later records.
        repair = Repair(self.segments, self.queues, list(self._broken), self.end)
        repair.prepare()
        begin, end = repair.done
        while repair.step():
            at, _ = repair.done
            self._report_progress(at - begin, end - begin, self._scan.records + repair.scan.records)
            await trio.lowlevel.checkpoint()
        repair.complete()
        repair.finish()
        self.paths |= repair.paths
        for queue in self._broken:
            self.paths |= self.queues.files.complete(queue)
        self.records += repair.scan.records
        self.damaged += repair.scan.damaged
        self._report_progress(end - begin, end - begin, self._scan.records + repair.scan.records, is_last=True)

    def _remove_strays(self) -> None:
        """Remove files of topics without a queue: left by a crash, or copied back by a person."""
        files = self.queues.files
        for topic in files.files.disk.names(files.directory):
            if topic in self.queues.topics:
                continue
            if queue_ids(files.files.disk.names(f"{files.directory}/{topic}")):
                logger.warning("topic %s has consume queues but no records; removing them", topic)
            files.remove_topic(topic)

    def _cut_queues(self) -> None:
        """RocketMQ writes entries before their records are durable: remove those whose records a crash lost."""
        for queue in self.queues.all():
            self.paths |= self.queues.save(queue, NOWHERE)
            self.queues.files.cut(queue, queue.next_offset)

    # ---- the end of the log

    def _cut(self, position: int) -> None:
        """Make *position* the end of the log; nothing after it is valid."""
        segments = self.segments
        for removed in segments.remove_after(position):
            logger.warning("segment %s holds no record; removing it", removed.path)
        self.end = position
        if not segments.items:
            return
        segment = segments.items[-1]
        at = position - segment.start
        size = segments.files.size(segment.path)
        if at >= size or segments.files.next_data(segment.path, at) >= size:
            return
        garbage_bytes = self._count_garbage(segment, position)
        if garbage_bytes and not self._torn:
            # No write was in progress at an orderly shutdown, so these bytes were a record.
            self.end = position + garbage_bytes
            self._scan.damage(position, self.end)
        elif garbage_bytes:
            self.cut_bytes = garbage_bytes
            logger.warning(
                "the log ends at position %d with %d bytes of no record; removing them", position, garbage_bytes
            )
            segments.files.clear(segment.path, at)

    def _count_garbage(self, segment: Segment, position: int) -> int:
        """Return the number of bytes from *position* to the last nonzero one."""
        files = self.segments.files
        size = files.size(segment.path)
        at = position - segment.start
        nonzero_end = 0
        while (at := files.next_data(segment.path, at)) < size:
            data = files.read(segment.path, BLOCK_BYTES, at)
            used_bytes = len(data.rstrip(b"\x00"))
            nonzero_end = max(nonzero_end, at + used_bytes - (position - segment.start)) if used_bytes else nonzero_end
            at += len(data)
        return nonzero_end

    def _report_progress(self, bytes_done: int, total: int, records: int, *, is_last: bool = False) -> None:
        if self._report is None:
            return
        now = trio.current_time()
        if is_last or now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self._report(bytes_done, max(total, bytes_done), records)
