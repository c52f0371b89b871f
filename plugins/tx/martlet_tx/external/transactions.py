"""External transactions as protocols use them, and the service that finishes deliveries and drops abandoned parts.

Each change is an event in the log, and only the projection of the events changes the state. Deciding events of one
producer are written one at a time, each after all earlier ones are applied. So decisions are made on the current state,
in the order of the log, and a failed write needs no undo.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final

import trio

from martlet.broker import Broker
from martlet.contracts import (
    ExternalCommit,
    ExternalProducer,
    ExternalRun,
    ExternalStage,
    ExternalTransaction,
    ExternalTransactions,
    StagedBatch,
)
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet_tx.config import TxConfig
from martlet_tx.external.deliveries import Deliveries
from martlet_tx.external.delivery import TransactionDelivery
from martlet_tx.external.expiry import TransactionExpiry
from martlet_tx.external.journal_codec import EventKind, Key, encode_event
from martlet_tx.external.journal_writer import ExternalJournalWriter
from martlet_tx.external.renewal import StagedRenewal
from martlet_tx.external.runs import NAME_CHARS_MAX, PRODUCER_CHARS_MAX, ProducerRuns, check_name
from martlet_tx.external.staging import TransactionStaging
from martlet_tx.external.state import UNKNOWN, ExternalState, ProducerState, Vote

__all__ = ["StagedTransactions"]

# Runs of a producer that are remembered, so that none of them can begin again.
RUNS_MAX: Final = 64
# Characters of the names of a producer's brokers, in total.
BROKERS_CHARS_MAX: Final = 4096
# Parts in one commit.
PARTS_MAX: Final = 10_000
# Time to check a chunk or a producer.
LOOK_US: Final = 2.0
# Limit by which a run's clock may be ahead of the broker's: for this time, later runs could not begin.
AHEAD_MS_MAX: Final = 3_600_000
# Parts that an event drops, in one turn of the event loop.
DROPPED_AT_ONCE: Final = 1000


@final
class StagedTransactions(ExternalTransactions):
    """The external transactions of one broker.

    Attributes:
      deliveries: committed transactions that have messages left to store.
      expiry: drops abandoned parts, and forgets unused producers.
    """

    def __init__(self, broker: Broker, config: TxConfig, state: ExternalState) -> None:
        self._broker = broker
        self._events = ExternalJournalWriter(broker, state)
        self.state = state
        self.deliveries = Deliveries(broker, self._events, state)
        self._runs = ProducerRuns(config, self._events, state, self.deliveries)
        self._staging = TransactionStaging(broker, config, self._events, state, self._runs)
        self.expiry = TransactionExpiry(broker, config, state, self._runs, self.deliveries)
        state.move = StagedRenewal(broker, self._events, state, self.deliveries).move_before
        self.duplicates = self.aborted = 0

    # ---- runs

    async def begin(
        self,
        identity: str,
        producer: str,
        run: str,
        began_ms: int = 0,
        brokers: Sequence[str] = (),
        *,
        only_known: bool = False,
    ) -> ExternalRun:
        check_name("producer", producer, PRODUCER_CHARS_MAX)
        check_name("run", run, NAME_CHARS_MAX)
        key = identity, producer
        async with self._runs.turn(key):
            old_state = self.state.producers.get(key, UNKNOWN)
            if old_state is UNKNOWN and only_known:
                return ExternalRun(0, -1)
            if run in old_state.runs and run != old_state.runs[-1]:
                self._runs.refuse_old(producer, f"run {run!r}")
            new_state = old_state._replace(brokers=tuple(sorted({*old_state.brokers, *brokers})))
            _check_brokers(new_state.brokers)
            if run not in old_state.runs:
                began_ms = min(began_ms, self._broker.clock.now_ms() + AHEAD_MS_MAX)
                self._check_begin(old_state, key, run, began_ms)
                runs = (*old_state.runs, run)[-RUNS_MAX:]
                began_ms = began_ms or old_state.began_ms
                new_state = new_state._replace(epoch=old_state.epoch + 1, runs=runs, began_ms=began_ms, is_ended=False)
            if new_state != old_state:
                await self._runs.note(new_state.event(key, self.state.hour))
            prepared = new_state.prepared if new_state.vote.epoch < new_state.epoch else -1
            return ExternalRun(new_state.epoch, new_state.committed, prepared, new_state.brokers, new_state.content)

    def _check_begin(self, known: ProducerState, key: Key, run: str, began_ms: int) -> None:
        """Raise `Refused` unless a new *run* may begin: one whose request was delayed may be older than the newest."""
        if began_ms and began_ms < known.began_ms:
            earlier = f"run {run!r}, which began {(known.began_ms - began_ms) / 1000:g} s before the newest run"
            self._runs.refuse_old(key[1], earlier)
        if known is UNKNOWN:
            self._runs.check_room(key[0])

    # ---- staging

    async def stage(self, transaction: ExternalTransaction, part: str, chunk: int, batch: StagedBatch) -> ExternalStage:
        check_name("part", part, NAME_CHARS_MAX)
        key = transaction.identity, transaction.producer
        for is_last in (False, True):
            producer = self._runs.check(transaction)
            if transaction.sequence <= producer.committed:
                return ExternalStage(0, 0, True)
            found = self.state.parts.get((key, (transaction.sequence, part)))
            chunks = found.chunks if found is not None else 0
            if 0 <= chunk < chunks:
                return ExternalStage(0, chunks, False)
            if chunk == chunks:
                break
            if is_last or chunk < 0:
                text = f"chunk {chunk} of part {part!r} follows {chunks} chunks; chunk {chunks} is missing"
                raise Refused(Reason.NOT_FOUND, f"{text}, stage it first")
            await self._events.wait_applied()  # the event may not be applied yet
        return ExternalStage(self._staging.append(transaction, part, chunk, batch, found), chunk + 1, False)

    # ---- the outcome

    async def prepare(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]],
        check: Callable[[str], object],
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        _check_parts(parts)
        key = transaction.identity, transaction.producer
        async with self._runs.turn(key):
            producer = self._runs.check(transaction)
            if transaction.sequence <= producer.committed:
                self.duplicates += 1
                return ExternalCommit(producer.committed, 0, True)
            named = tuple([(name, chunks) for name, chunks in parts])
            vote = Vote(transaction.epoch, transaction.sequence, named, transaction.content)
            if vote[:2] < producer.vote[:2]:
                text = f"transaction {producer.vote.sequence} of {transaction.producer!r} is prepared already"
                raise Refused(Reason.ILLEGAL, f"{text}; prepare transactions in the order of their numbers")
            if key not in self.state.producers:
                self._runs.check_room(transaction.identity)
            self._check_topics(await self._broker.turns.finish(self._check_staged(transaction, parts)), check)
            if vote != producer.vote:
                await self._runs.note(self._prepared_event(key, vote, is_last=is_last))
        return ExternalCommit(producer.committed, 0, False)

    def _prepared_event(self, key: Key, vote: Vote, *, is_last: bool = False) -> bytes:
        head = vote.sequence, vote.epoch, vote.parts
        return encode_event(EventKind.PREPARED, *key, *head, self.state.hour, is_last, vote.content)

    async def commit(
        self,
        transaction: ExternalTransaction,
        parts: Sequence[tuple[str, int]] | None,
        check: Callable[[str], object],
        *,
        is_last: bool = False,
    ) -> ExternalCommit:
        _check_parts(parts or ())
        key = transaction.identity, transaction.producer
        async with self._runs.turn(key):
            producer = self._runs.check(transaction)
            content = transaction.content
            if parts is None:
                parts, content = self._parts_of_older_run(producer, transaction), producer.vote.content
            if transaction.sequence <= producer.committed or parts is None:
                self.duplicates += 1
                return ExternalCommit(producer.committed, 0, True)
            if key not in self.state.producers:
                self._runs.check_room(transaction.identity)
            topics = await self._broker.turns.finish(self._check_staged(transaction, parts))
            if transaction.sequence == producer.prepared and tuple(parts) == producer.vote.parts:
                # topics were checked when the parts were prepared, and the outcome is decided on another broker
                topics = set()
            delivery = TransactionDelivery(
                *(self._broker, self._events, self.state, key, transaction.sequence, transaction.epoch, parts),
                is_last=is_last,
                content=content,
            )
            self.deliveries.add(delivery)
            try:
                await self._broker.turns.finish(delivery.store_first_group(partial(self._check_topics, topics, check)))
            finally:
                self.deliveries.follow_up(delivery)
            await delivery.done.wait()
            if not delivery.is_finished:
                text = f"transaction {transaction.sequence} is committed; its delivery continues after a restart"
                raise Refused(Reason.UNAVAILABLE, f"{text}, repeat the commit then")
            await self._events.wait_applied()
        return ExternalCommit(transaction.sequence, delivery.delivered, False)

    @staticmethod
    def _parts_of_older_run(
        producer: ProducerState, transaction: ExternalTransaction
    ) -> Sequence[tuple[str, int]] | None:
        """Return the parts that an older run than that of *transaction* has prepared and not committed, if any."""
        is_prepared = producer.prepared == transaction.sequence and producer.vote.epoch < transaction.epoch
        return producer.vote.parts if is_prepared else None

    def _check_staged(self, transaction: ExternalTransaction, parts: Sequence[tuple[str, int]]) -> Steps[set[str]]:
        """Return the topics of *parts*; raise `Refused` unless all parts are complete."""
        state, key = self.state, (transaction.identity, transaction.producer)
        first_offset = self._events.staged_queue.first_offset
        topics, budget = set[str](), Budget(LOOK_US)
        for name, chunks in parts:
            part = state.parts.get((key, (transaction.sequence, name)))
            staged_chunks = part.chunks if part is not None else 0
            if part is None or staged_chunks != chunks:
                text = f"part {name!r} of transaction {transaction.sequence} of {transaction.producer!r} has"
                why = "it expired (tx.staged_timeout_ms), was aborted, or was never staged completely"
                raise Refused(
                    Reason.NOT_FOUND,
                    f"{text} {staged_chunks} of {chunks} chunks: {why}; stage it again under another name",
                )
            for number in range(chunks):
                chunk = state.chunks.get((part.serial, number))
                if chunk is None or chunk.records[0].offset < first_offset:
                    text = f"chunk {number} of part {name!r} of transaction {transaction.sequence} was removed"
                    raise Refused(Reason.NOT_FOUND, f"{text} or is damaged; stage the part again under another name")
                if budget.is_over():
                    yield
            topics |= part.topics
        return topics

    def _check_topics(self, topics: set[str], check: Callable[[str], object]) -> None:
        for topic in sorted(topics):
            check(topic)
            found = self._broker.topics.get(topic)
            if found is None:
                text = f"topic[{topic}] was deleted after messages for it were staged"
                raise Refused(Reason.NO_TOPIC, f"{text}; nothing was committed, create it and repeat the commit")
            if not found.open_queues:
                text = f"topic[{topic}] is not writable; its perm is {found.perm}"
                raise Refused(Reason.NO_PERMISSION, f"{text}; nothing was committed, open it and repeat the commit")

    async def abort(self, transaction: ExternalTransaction, parts: Sequence[str] | None = None) -> int:
        key = transaction.identity, transaction.producer
        async with self._runs.turn(key):
            try:
                producer = self._runs.check(transaction)
            except Refused as refused:
                if refused.reason is Reason.PARAMETER:
                    raise
                return 0  # its parts are dropped already
            if transaction.sequence <= producer.committed:
                return 0
            prepared_names = producer.prepared_names() if transaction.sequence == producer.prepared else frozenset()
            # Prepared parts may be decided on another broker: the next run asks there.
            names = [
                name for (_, name), _ in self.state.parts_of(key, transaction.sequence) if name not in prepared_names
            ]
            names_to_drop = names if parts is None else sorted(set(names).intersection(parts))
            for first in range(0, len(names_to_drop), DROPPED_AT_ONCE):
                some_names = names_to_drop[first : first + DROPPED_AT_ONCE]
                await self._runs.note(encode_event(EventKind.DROPPED, *key, transaction.sequence, some_names))
                self.aborted += len(some_names)
                await trio.lowlevel.checkpoint()  # with asynchronous flush `_note` need not wait
            return len(names_to_drop)

    async def abort_prepared(self, transaction: ExternalTransaction) -> int:
        key = transaction.identity, transaction.producer
        async with self._runs.turn(key):
            prepared_parts = self._parts_of_older_run(self._runs.check(transaction), transaction)
            if prepared_parts is None:
                return 0
            await self._runs.note(self._prepared_event(key, Vote(transaction.epoch)))
            self.aborted += len(prepared_parts)
            return len(prepared_parts)

    # ---- the service

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Finish deliveries that a stop has interrupted, and drop expired parts, until cancelled."""
        self.ready()
        try:
            async with trio.open_nursery() as nursery:
                self.deliveries.start(nursery)
                task_status.started()
                await self.expiry.run()
        finally:
            self.deliveries.nursery = None
            self.state.stop()

    def ready(self) -> None:
        """Prepare the state left by an earlier start; all readable events are applied."""
        # An event may be lost in the middle of the log.
        self.state.next = max(self.state.next, self._events.queue.next_offset)
        self.deliveries.restore()

    # ---- statistics for operators

    def producers(self, after: tuple[str, str], count: int) -> Steps[list[ExternalProducer]]:
        state, budget = self.state, Budget(LOOK_US)
        keys: set[Key] = set(state.of_producer)
        for key, _ in state.producers.freeze():
            keys.add(key)
            if budget.is_over():
                yield
        rows: list[ExternalProducer] = []
        for key in sorted(each for each in keys if each > after)[:count]:
            producer, parts = state.producers.get(key, UNKNOWN), [part for _, part in state.parts_of(key)]
            delivery = state.deliveries.get(key)
            rows.append(
                ExternalProducer(
                    *key,
                    producer.epoch,
                    producer.runs[-1] if producer.runs else "",
                    producer.committed,
                    delivery.sequence if delivery is not None else -1,
                    len(parts),
                    sum([part.messages for part in parts]),
                    sum([part.size for part in parts]),
                    producer.prepared,
                    producer.is_ended,
                    state.hour - producer.hour,
                )
            )
        return rows

    def statistics(self) -> dict[str, object]:
        """Return the numbers of staged transactions, and of outcomes since the start."""
        state = self.state
        return {
            "producers": len(state.producers),
            "staged_parts": len(state.parts),
            "staged_chunks": len(state.chunks),
            "staged_messages": state.messages,
            "staged_bytes": state.size,
            "delivering": len(self.deliveries),
            "committed": self.deliveries.committed,
            "committed_messages": self.deliveries.delivered,
            "duplicates": self.duplicates,
            "aborted_parts": self.aborted,
            "expired_parts": self.expiry.expired,
            "fenced": self._runs.fenced,
            "forgotten_producers": self.expiry.forgotten,
            "dropped_without_topic": self.deliveries.dropped,
            "lost": self.deliveries.lost,
        }


def _check_brokers(brokers: Sequence[str]) -> None:
    size = sum(map(len, brokers))
    if size > BROKERS_CHARS_MAX or not all(brokers):
        text = f"names of {len(brokers)} brokers have {size} characters, or one is empty"
        raise Refused(Reason.PARAMETER, f"{text}; the maximum is {BROKERS_CHARS_MAX}")


def _check_parts(parts: Sequence[tuple[str, int]]) -> None:
    if len(parts) > PARTS_MAX:
        raise Refused(Reason.ILLEGAL, f"commit names {len(parts)} parts; the maximum is {PARTS_MAX}, use fewer tasks")
    names = {name for name, _ in parts}
    longest = max(map(len, names), default=0)
    if longest > NAME_CHARS_MAX:
        text = f"commit names a part with {longest} characters; the maximum is {NAME_CHARS_MAX}"
        raise Refused(Reason.ILLEGAL, f"{text}, use a name that was staged")
    if len(names) < len(parts):
        raise Refused(Reason.ILLEGAL, "commit names a part twice; name each part once")
