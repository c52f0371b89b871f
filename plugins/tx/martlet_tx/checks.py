"""The service that asks producers about pending transactions, in rounds (RocketMQ TransactionalMessageCheckService).

A round checks the pending half messages in the order in which they were stored, up to the first that is too young. The
bytes that a round sends to the producers of one group are limited; the next round continues where the group reached the
limit, so every transaction is checked in turn. A round notes the checks of a portion in the journal, waits until the
note is durable, and only then asks. So a crash never leads to more checks than configured. Half messages are copied
only when retention removes them.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.contracts import HalfMessage, Producers
from martlet.errors import MartletError, Refused, StoreFailed
from martlet_tx.config import TxConfig
from martlet_tx.formats import CID, HALF_TOPIC, NAME, OP_TOPIC, immunity_ms
from martlet_tx.journal_codec import adopted_note, checked_note
from martlet_tx.transactions import HeldTransactions

__all__ = ["Checks"]

log = logging.getLogger("martlet.tx")

# Interval of committing the offsets at which RocketMQ would continue.
RETRY_S: Final = 5.0
OFFSETS_S: Final = 5.0
NOTED: Final = 64  # checks in one note


@final
class Checks:
    """Asks producers about pending transactions, parks ones that were checked too often, and commits offsets."""

    def __init__(self, broker: Broker, config: TxConfig, held: HeldTransactions) -> None:
        self._broker = broker
        self._store = broker.store
        self._config = config
        self._held = held
        self._journal = broker.journal(NAME)
        self._sent_bytes: Counter[str] = Counter()  # bytes sent in this round, by group
        # Group -> the half message at which its checks begin, in this round and in the next one.
        self._start_offsets: dict[str, int] = {}
        self._next_start_offsets: dict[str, int] = {}
        self.sent = self.unanswerable = self.lost = 0

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run rounds until cancelled; ready once the half messages that RocketMQ has handled are known."""
        self.find_handled()
        task_status.started()
        await self._adopt_in_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit_offsets)
            due, is_failing = trio.current_time(), False
            while True:
                due = max(due + self._config.check_interval_ms / 1000, trio.current_time())
                await trio.sleep_until(due)
                try:
                    await self.round()
                    if is_failing:
                        is_failing = False
                        log.info("transactions are checked again")
                except MartletError as error:
                    if not is_failing:
                        is_failing = True
                        log.warning("transactions are not checked, and are tried again every round; %s", error)

    # ---- rounds

    async def round(self) -> None:
        """Check every due transaction once; for a group with too many, only the ones whose turn it is.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self._sent_bytes.clear()
        self._next_start_offsets = {}
        await self._check_all()
        self._start_offsets = self._next_start_offsets

    async def _check_all(self) -> None:
        halves = self._held.state.halves
        end = halves.next
        for number in halves.pages():
            offsets = [each for each in halves.pending_in(number) if each < end]
            while offsets:
                portion = await self._held.read(offsets)
                offsets = offsets[portion.taken :]
                self._drop(portion.lost)
                if not await self._check(portion.halves):
                    return
                await trio.lowlevel.checkpoint()

    def _drop(self, lost_offsets: Sequence[int]) -> None:
        for offset in lost_offsets:
            if self._held.is_pending(offset):
                log.error("half message %d is damaged or was removed; its transaction cannot be committed", offset)
                self._held.drop(offset)
                self.lost += 1

    async def _check(self, halves: Sequence[HalfMessage]) -> bool:
        """Check the due transactions of *halves*; return False after the first that is too young."""
        now, config = self._broker.clock.now_ms(), self._config
        due_halves: list[HalfMessage] = []
        are_all_old_enough = True
        for half in halves:
            record = half.record
            if 0 <= now - record.store_ms < config.immunity_ms:
                are_all_old_enough = False
                break
            if self._held.is_pending(record.queue_offset) and self._is_due(half, now):
                due_halves.append(half)
        if due_halves:
            await self._ask_all(due_halves)
        return are_all_old_enough

    def _is_due(self, half: HalfMessage, now: int) -> bool:
        """Return whether to check *half* now; park *half* if checks are of no more use."""
        record = half.record
        checks = self._held.state.halves.checks(record.queue_offset)
        # A producer's clock may be wrong.
        age_ms = now - min(record.born_ms, record.store_ms)
        if checks >= self._config.checks_max:
            self._held.park(half, checks)
            return False
        if 0 <= age_ms <= immunity_ms(record.properties, self._config.immunity_ms):
            return False
        group = half.group
        if group in self._next_start_offsets or record.queue_offset < self._start_offsets.get(group, 0):
            return False
        sent_bytes = self._sent_bytes[group]
        if sent_bytes and sent_bytes + record.size > self._config.check_bytes_max:
            self._next_start_offsets[group] = record.queue_offset
            return False
        self._sent_bytes[group] += record.size
        return True

    async def _ask_all(self, due_halves: Sequence[HalfMessage]) -> None:
        offsets = [half.record.queue_offset for half in due_halves]
        for start in range(0, len(offsets), NOTED):
            self._journal.note(checked_note(offsets[start : start + NOTED]))
        self._store.committer.commit_early()
        await self._store.flusher.wait_flushed(self._store.written)
        for half in due_halves:
            if self._held.is_pending(half.record.queue_offset):
                self._ask(half)

    def _ask(self, half: HalfMessage) -> None:
        producers = self._broker.capability(Producers)
        try:
            is_asked = producers is not None and producers.check_transaction(
                half.group, half.record, half.topic, half.queue_id
            )
        except Exception:  # a bug of another plugin must not stop the checks of other transactions
            log.exception("transaction %s cannot be checked", half.record.property("UNIQ_KEY"))
            is_asked = False
        if is_asked:
            self.sent += 1
        else:
            self.unanswerable += 1

    # ---- RocketMQ's offsets

    def find_handled(self) -> None:
        """Find the half messages that RocketMQ has handled, if it opened this store after Martlet.

        Martlet's own offsets are never ahead of the durable log, so a greater offset is RocketMQ's.
        """
        offset = self._broker.groups.offsets.get(CID, HALF_TOPIC, 0)
        if self._held.state.halves.first() < offset <= self._held.half_queue.next_offset:
            self._held.handled_before = offset
            log.info("RocketMQ has handled the half messages before offset %d", offset)

    async def _adopt_in_time(self) -> None:
        """Call `adopt` until it succeeds: a full disk accepts no notes."""
        while True:
            try:
                return await self.adopt()
            except Refused as refused:
                log.warning(
                    "transactions that RocketMQ has handled cannot be noted, so none is checked yet; %s", refused
                )
                await trio.sleep(RETRY_S)

    async def adopt(self) -> None:
        """Append a note of the half messages that RocketMQ has handled.

        Raises:
          Refused: the disk is full.
        """
        if self._held.handled_before:
            self._journal.note(adopted_note(self._held.handled_before))
            self._store.committer.commit_early()
            await self._store.flusher.wait_flushed(self._store.written)

    async def _commit_offsets(self) -> None:
        try:
            while True:
                await self.commit_offsets()
                await trio.sleep(OFFSETS_S)
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(OFFSETS_S):
                await self._store.flusher.flush()  # the store's own task for flushes may have ended
                await self.commit_offsets()

    async def commit_offsets(self) -> None:
        """Commit the offsets in both topics from which RocketMQ finds the same pending transactions."""
        state = self._held.state
        half = state.halves.first()
        op = state.ops.first_with(half)
        try:
            await self._store.flusher.wait_durable(self._store.readable)
        except StoreFailed:
            return
        groups = self._broker.groups
        groups.offsets.commit(CID, HALF_TOPIC, 0, half)
        groups.offsets.commit(CID, OP_TOPIC, 0, op)

    def statistics(self) -> dict[str, object]:
        return {
            **self._held.statistics(),
            "checks_sent": self.sent,
            "checks_without_producer": self.unanswerable,
            "lost": self.lost,
        }
