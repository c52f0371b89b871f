"""External transactions as protocols use them, and the service that finishes deliveries and drops what is forgotten.

What happens is an event in the log, and only the projection of the events changes the state. Events of one producer
that decide something are written one at a time, each after all earlier ones are applied: so decisions are made on the
state as it is, in the order of the log, and a failed write leaves nothing to undo.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NoReturn, final

import trio
from msgspec.structs import replace

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
from martlet.errors import MartletError, Reason, Refused, StoreFailed
from martlet.message import PROPERTIES_BYTES_MAX, Message, find_property
from martlet.runtime.steps import Pace, Steps, WaitingSteps
from martlet_tx.config import TxConfig
from martlet_tx.external.delivery import TransactionDelivery, read_staged
from martlet_tx.external.journal_codec import EventKind, Key, StagedChunk, encode_event
from martlet_tx.external.journal_writer import ExternalJournalWriter
from martlet_tx.external.staged_records import cut, encode_batch, staged_bytes
from martlet_tx.external.state import ExternalState, PartKey, ProducerState, StagedPart, Vote

__all__ = ["StagedTransactions"]

log = logging.getLogger("martlet.tx")

PRODUCER_CHARS_MAX: Final = 255
NAME_CHARS_MAX: Final = 64
SEQUENCE_MAX: Final = (1 << 63) - 1
# Runs of a producer that are remembered, so that none of them comes back.
RUNS_MAX: Final = 64
# The names of a producer's brokers, together.
BROKERS_CHARS_MAX: Final = 4096
# Hours of operation for which a producer is remembered after its last commit, in case that the commit is repeated.
ENDED_HOURS: Final = 2
# The same for a producer that has only begun runs, and so has nothing that could be repeated.
BEGUN_HOURS: Final = 24
# Parts in one commit.
PARTS_MAX: Final = 10_000
# Transactions that are delivered at the same time; each keeps a chunk in memory.
DELIVERIES_MAX: Final = 16
# After the store refused a delivery because the disk is full.
RETRY_S: Final = 1.0
HOUR_S: Final = 3600.0
# How often to look for parts that nobody continues, at least and at most.
LOOK_S: Final = (1.0, 60.0)
# Parts and producers to look at in one slice.
LOOKED_AT: Final = 500
# How far the clock of a run may be ahead of ours: for so long, later runs could not begin.
AHEAD_MS_MAX: Final = 3_600_000
# Parts that an event drops, in one turn of the event loop.
DROPPED_AT_ONCE: Final = 1000
UNKNOWN: Final = ProducerState()


@final
class StagedTransactions(ExternalTransactions):
    """The external transactions of one broker."""

    def __init__(self, broker: Broker, config: TxConfig, state: ExternalState) -> None:
        self._broker = broker
        self._store = broker.store
        self._config = config
        self._events = ExternalJournalWriter(broker, state)
        self.state = state
        state.move = self.move_before
        self._locks: dict[Key, trio.Lock] = {}
        # Deliveries that are not finished, and those that this process began or continued.
        self._deliveries: dict[Key, TransactionDelivery] = {}
        self._slots = trio.Semaphore(DELIVERIES_MAX)
        self._nursery: trio.Nursery | None = None
        # When each part was seen first with so many chunks, on trio's clock: no clock that can be set.
        self._seen: dict[tuple[Key, PartKey], tuple[int, float]] = {}
        self.committed = self.committed_messages = self.duplicates = self.aborted = self.expired = 0
        self.fenced = self.lost = self.dropped = self.forgotten = 0

    # ---- the order of decisions

    @asynccontextmanager
    async def _turn(self, key: Key) -> AsyncIterator[None]:
        """Let one caller at a time decide something about a producer, on a state that is complete.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        lock = self._locks.setdefault(key, trio.Lock())
        try:
            async with lock:
                while (delivery := self._deliveries.get(key)) is not None:
                    await delivery.done.wait()
                await self._events.wait_applied()
                if key in self.state.deliveries:
                    text = f"a transaction of {key[1]!r} is committed; its delivery continues after a restart"
                    raise Refused(Reason.UNAVAILABLE, f"{text}, try again then")
                yield
        finally:
            if not lock.locked() and self._locks.get(key) is lock:
                del self._locks[key]

    def _check_run(self, transaction: ExternalTransaction) -> ProducerState:
        """Return the producer of *transaction*; raise `Refused` unless its run is the newest."""
        _check_name("producer", transaction.producer, PRODUCER_CHARS_MAX)
        if not 0 <= transaction.sequence <= SEQUENCE_MAX:
            text = f"sequence {transaction.sequence} is not a number from 0 to {SEQUENCE_MAX}"
            raise Refused(Reason.PARAMETER, f"{text}; number the transactions of a producer upwards")
        if transaction.content:
            _check_name("content", transaction.content, NAME_CHARS_MAX)
        producer = self.state.producers.get((transaction.identity, transaction.producer), UNKNOWN)
        if transaction.epoch < producer.epoch:
            self._refuse_old(transaction.producer, f"run with epoch {transaction.epoch}")
        if transaction.epoch > producer.epoch:
            text = (
                f"epoch {transaction.epoch} of producer {transaction.producer!r} is unknown; it expired, or was never"
            )
            raise Refused(Reason.NOT_FOUND, f"{text} given; begin a run")
        return producer

    def _refuse_old(self, producer: str, what: str) -> NoReturn:
        self.fenced += 1
        raise Refused(
            Reason.FENCED, f"{what} of producer {producer!r} was replaced by a newer run; stop, the newer one goes on"
        )

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
        _check_name("producer", producer, PRODUCER_CHARS_MAX)
        _check_name("run", run, NAME_CHARS_MAX)
        key = identity, producer
        async with self._turn(key):
            known = self.state.producers.get(key, UNKNOWN)
            if known is UNKNOWN and only_known:
                return ExternalRun(0, -1)
            if run in known.runs and run != known.runs[-1]:
                self._refuse_old(producer, f"run {run!r}")
            wanted = known._replace(brokers=tuple(sorted({*known.brokers, *brokers})))
            _check_brokers(wanted.brokers)
            if run not in known.runs:
                began_ms = min(began_ms, self._broker.clock.now_ms() + AHEAD_MS_MAX)
                self._check_begin(known, key, run, began_ms)
                runs = (*known.runs, run)[-RUNS_MAX:]
                began_ms = began_ms or known.began_ms
                wanted = wanted._replace(epoch=known.epoch + 1, runs=runs, began_ms=began_ms, is_ended=False)
            if wanted != known:
                await self._note(self._state_event(key, wanted))
            prepared = wanted.prepared if wanted.vote.epoch < wanted.epoch else -1
            return ExternalRun(wanted.epoch, wanted.committed, prepared, wanted.brokers, wanted.content)

    def _check_begin(self, known: ProducerState, key: Key, run: str, began_ms: int) -> None:
        """Raise `Refused` unless a new *run* may begin: one that waited somewhere may be older than the newest."""
        if began_ms and began_ms < known.began_ms:
            earlier = f"run {run!r}, which began {(known.began_ms - began_ms) / 1000:g} s before the newest run"
            self._refuse_old(key[1], earlier)
        if known is UNKNOWN:
            self._check_producers(key[0])

    def _check_producers(self, identity: str) -> None:
        """Raise `Refused` (BUSY) if no further producer of *identity* may be known; an empty one is no client's own."""
        count, limit, who, name = len(self.state.producers), self._config.producers_max, "", "producers_max"
        if count < limit and identity:
            count, limit = self.state.of_identity.get(identity, 0), self._config.producers_identity_max
            who, name = f" of identity {identity!r}", "producers_identity_max"
        if count >= limit:
            text = f"{count} producers{who} of external transactions are known; tx.{name} is {limit}"
            when = f"{ENDED_HOURS} h after a commit that says it is the last one, else after tx.producer_hours"
            advice = "set it higher, or wait until some are forgotten"
            raise Refused(Reason.BUSY, f"{text}; {advice}: {when}; `martlet tx producers` lists them")

    def _state_event(self, key: Key, producer: ProducerState, hour: int | None = None) -> bytes:
        hour = self.state.hour if hour is None else hour
        head = producer.epoch, producer.runs, producer.committed, hour
        rest = producer.began_ms, producer.brokers, producer.vote, producer.is_ended, producer.content
        return encode_event(EventKind.STATE, *key, *head, *rest)

    async def _note(self, event: bytes) -> None:
        """Append *event*, and wait until it is durable and applied."""
        self._events.append(event)
        await self._events.wait_applied()

    # ---- staging

    async def stage(self, transaction: ExternalTransaction, part: str, chunk: int, batch: StagedBatch) -> ExternalStage:
        _check_name("part", part, NAME_CHARS_MAX)
        key = transaction.identity, transaction.producer
        for is_last in (False, True):
            producer = self._check_run(transaction)
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
            await self._events.wait_applied()  # it may be on its way
        return ExternalStage(self._append(transaction, part, chunk, batch, found), chunk + 1, False)

    def _append(
        self, transaction: ExternalTransaction, part: str, chunk: int, batch: StagedBatch, found: StagedPart | None
    ) -> int:
        batches = self._prepared(batch)
        messages, size = len(batch.members), sum([staged_bytes(each) for each in batches])
        self._check_sizes(batches)
        self._check_room(transaction, found, messages, size)
        bodies, counts = list[bytes](), list[int]()
        for each in batches:
            pieces, numbers = cut(encode_batch(each), len(each.members), self._store.config.message_bytes_max)
            bodies += pieces
            counts += numbers
        items, records = self._events.staged(bodies, counts)
        name = transaction.identity, transaction.producer, transaction.sequence, part, transaction.epoch
        event = encode_event(EventKind.STAGED, *name, chunk, records, [batch.topic], False)
        return self._events.append(event, items)

    def _prepared(self, batch: StagedBatch) -> list[StagedBatch]:
        """Return what to store: *batch* with its queue, or several if stages of plugins change its messages."""
        members, stages = batch.members, self._broker.stages
        if not members:
            raise Refused(Reason.ILLEGAL, "staged batch is empty; stage at least one message")
        together = b"".join([properties for _, properties, _ in members])
        if 0 in together:
            raise Refused(Reason.ILLEGAL, "properties of a staged message contain U+0000; remove it")
        limit = self._broker.config.message_bytes_max
        longest = max([len(body) for body, _, _ in members])
        if longest > limit:
            raise Refused(Reason.ILLEGAL, f"message body is {longest} bytes; broker.message_bytes_max is {limit}")
        if max([len(properties) for _, properties, _ in members]) > PROPERTIES_BYTES_MAX:
            raise Refused(Reason.ILLEGAL, f"message properties are over {PROPERTIES_BYTES_MAX} bytes; shorten them")
        if not (stages.every_message or batch.sys_flag & stages.sys_flag or stages.may_want_properties(together)):
            return [replace(batch, queue_id=self._broker.queue_for_later(_message(batch, batch.members[0])))]
        return self._staged(batch)

    def _staged(self, batch: StagedBatch) -> list[StagedBatch]:
        """Return the messages of *batch* after the stages, those for each queue together, in their order."""
        batch = replace(batch, queue_id=self._broker.queue_for_later(_message(batch, batch.members[0])))
        by_head: dict[tuple[object, ...], StagedBatch] = {}
        members: dict[tuple[object, ...], list[tuple[bytes, bytes, int]]] = {}
        for member in batch.members:
            message = _message(batch, member)
            if find_property(message.properties, b"TRAN_MSG").lower() == b"true":
                text = "message of an external transaction has the property TRAN_MSG of another transaction; remove it"
                raise Refused(Reason.ILLEGAL, text)
            message = self._broker.reserve(message)
            head = (
                *(message.topic, message.queue_id, message.sys_flag),
                *(message.born_ms, message.born_host, message.reconsume_times),
            )
            if head not in by_head:
                by_head[head] = StagedBatch(
                    message.topic,
                    message.queue_id,
                    members.setdefault(head, []),
                    message.sys_flag,
                    message.born_ms,
                    message.born_host,
                    message.reconsume_times,
                )
            members[head].append((message.body, message.properties, message.flag))
        return list(by_head.values())

    def _check_sizes(self, batches: Sequence[StagedBatch]) -> None:
        """Raise `Refused` unless the records of *batches* fit a segment: also one of their messages, in a group."""
        limit = self._store.config.segment_bytes - 1024
        for batch in batches:
            size = staged_bytes(batch)
            if size > limit:
                text = f"staged batch needs {size} bytes; a segment has room for {limit} (store.segment_bytes)"
                raise Refused(Reason.ILLEGAL, f"{text}; stage smaller batches")

    def _check_room(self, transaction: ExternalTransaction, found: StagedPart | None, messages: int, size: int) -> None:
        """Raise `Refused` if a limit does not allow so much more."""
        config, state = self._config, self.state
        key, text = (transaction.identity, transaction.producer), f"transaction {transaction.sequence}"
        _check_limit("part", found.size if found else 0, size, "bytes", config.staged_part_bytes_max, "part")
        _check_limit(
            "part", found.messages if found else 0, messages, "messages", config.staged_part_messages_max, "part"
        )
        held_messages, held_bytes = state.totals.get((key, transaction.sequence), (0, 0))
        _check_limit(text, held_bytes, size, "bytes", config.staged_transaction_bytes_max, "transaction")
        _check_limit(text, held_messages, messages, "messages", config.staged_transaction_messages_max, "transaction")
        for count, limit, name, what in (
            (state.size + size, config.staged_bytes_max, "bytes", "bytes"),
            (len(state.chunks) + 1, config.staged_chunks_max, "chunks", "chunks"),
            (len(state.parts) + (found is None), config.staged_parts_max, "parts", "parts"),
        ):
            if count > limit:
                busy = f"[OVERLOAD]system busy, {count} {what} would be staged; tx.staged_{name}_max is {limit}"
                raise Refused(Reason.BUSY, busy)
        if key not in state.producers and key not in state.of_producer:
            self._check_producers(transaction.identity)

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
        async with self._turn(key):
            producer = self._check_run(transaction)
            if transaction.sequence <= producer.committed:
                self.duplicates += 1
                return ExternalCommit(producer.committed, 0, True)
            named = tuple([(name, chunks) for name, chunks in parts])
            vote = Vote(transaction.epoch, transaction.sequence, named, transaction.content)
            if vote[:2] < producer.vote[:2]:
                text = f"transaction {producer.vote.sequence} of {transaction.producer!r} is prepared already"
                raise Refused(Reason.ILLEGAL, f"{text}; prepare transactions in the order of their numbers")
            if key not in self.state.producers:
                self._check_producers(transaction.identity)
            self._check_topics(await self._broker.turns.finish(self._check_staged(transaction, parts)), check)
            if vote != producer.vote:
                await self._note(self._prepared_event(key, vote, is_last=is_last))
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
        async with self._turn(key):
            producer = self._check_run(transaction)
            content = transaction.content
            if parts is None:
                parts, content = self._left(producer, transaction), producer.vote.content
            if transaction.sequence <= producer.committed or parts is None:
                self.duplicates += 1
                return ExternalCommit(producer.committed, 0, True)
            if key not in self.state.producers:
                self._check_producers(transaction.identity)
            topics = await self._broker.turns.finish(self._check_staged(transaction, parts))
            if transaction.sequence == producer.prepared and tuple(parts) == producer.vote.parts:
                topics = set()  # they were checked then, and the outcome is decided elsewhere
            delivery = TransactionDelivery(
                *(self._broker, self._events, self.state, key, transaction.sequence, transaction.epoch, parts),
                is_last=is_last,
                content=content,
            )
            self._deliveries[key] = delivery
            try:
                await self._broker.turns.finish(delivery.first(partial(self._check_topics, topics, check)))
            finally:
                self._follow_up(delivery)
            await delivery.done.wait()
            if not delivery.is_finished:
                text = f"transaction {transaction.sequence} is committed; its delivery continues after a restart"
                raise Refused(Reason.UNAVAILABLE, f"{text}, repeat the commit then")
            await self._events.wait_applied()
        return ExternalCommit(transaction.sequence, delivery.delivered, False)

    @staticmethod
    def _left(producer: ProducerState, transaction: ExternalTransaction) -> Sequence[tuple[str, int]] | None:
        """Return the parts that an older run than that of *transaction* has prepared and not committed, if it has."""
        is_left = producer.prepared == transaction.sequence and producer.vote.epoch < transaction.epoch
        return producer.vote.parts if is_left else None

    def _check_staged(self, transaction: ExternalTransaction, parts: Sequence[tuple[str, int]]) -> Steps[set[str]]:
        """Return the topics of *parts*; raise `Refused` unless all of them are complete."""
        state, key = self.state, (transaction.identity, transaction.producer)
        first = self._events.staged_queue.first_offset
        topics, pace = set[str](), Pace(LOOKED_AT)
        for name, chunks in parts:
            part = state.parts.get((key, (transaction.sequence, name)))
            there = part.chunks if part is not None else 0
            if part is None or there != chunks:
                text = f"part {name!r} of transaction {transaction.sequence} of {transaction.producer!r} has {there}"
                why = "it expired (tx.staged_timeout_ms), was aborted, or was never staged completely"
                raise Refused(Reason.NOT_FOUND, f"{text} of {chunks} chunks: {why}; stage it again under another name")
            for number in range(chunks):
                found = state.chunks.get((part.serial, number))
                if found is None or found.records[0].offset < first:
                    text = f"chunk {number} of part {name!r} of transaction {transaction.sequence} was removed"
                    raise Refused(Reason.NOT_FOUND, f"{text} or is damaged; stage the part again under another name")
                if pace.is_over():
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

    def _follow_up(self, delivery: TransactionDelivery) -> None:
        """Continue *delivery* if it is decided, whether or not somebody still waits for it."""
        if delivery.is_decided:
            self.committed += 1
        if delivery.is_decided and not delivery.is_finished and self._nursery is not None:
            self._nursery.start_soon(self._deliver, delivery)
        else:
            self._end_delivery(delivery)

    def _end_delivery(self, delivery: TransactionDelivery) -> None:
        if self._deliveries.get(delivery.key) is delivery:
            del self._deliveries[delivery.key]
        self.committed_messages += delivery.delivered
        self.dropped += delivery.dropped
        self.lost += delivery.lost
        delivery.done.set()

    async def _deliver(self, delivery: TransactionDelivery) -> None:
        """Store all of *delivery*; while the disk is full, try again and again."""
        is_refused = False
        try:
            async with self._slots:
                while not delivery.is_finished:
                    try:
                        await self._broker.turns.finish(delivery.rest())
                    except Refused as refused:
                        if not is_refused:
                            is_refused = True
                            text = "transaction %d of %r is committed, and its delivery waits; %s"
                            log.warning(text, delivery.sequence, delivery.key[1], refused)
                        await trio.sleep(RETRY_S)
                if is_refused:
                    log.info("transaction %d of %r is delivered", delivery.sequence, delivery.key[1])
        except StoreFailed as failed:
            log.error(
                "transaction %d of %r is delivered after a restart; %s", *(delivery.sequence, delivery.key[1], failed)
            )
        finally:
            self._end_delivery(delivery)

    async def abort(self, transaction: ExternalTransaction, parts: Sequence[str] | None = None) -> int:
        key = transaction.identity, transaction.producer
        async with self._turn(key):
            try:
                producer = self._check_run(transaction)
            except Refused as refused:
                if refused.reason is Reason.PARAMETER:
                    raise
                return 0  # its parts are dropped already
            if transaction.sequence <= producer.committed:
                return 0
            held = producer.held() if transaction.sequence == producer.prepared else frozenset()
            # What is prepared may be decided on another broker: the next run asks there.
            found = [name for (_, name), _ in self.state.parts_of(key, transaction.sequence) if name not in held]
            dropped = found if parts is None else sorted(set(found).intersection(parts))
            for first in range(0, len(dropped), DROPPED_AT_ONCE):
                some = dropped[first : first + DROPPED_AT_ONCE]
                await self._note(encode_event(EventKind.DROPPED, *key, transaction.sequence, some))
                self.aborted += len(some)
                await trio.lowlevel.checkpoint()  # with asynchronous flush `_note` need not wait
            return len(dropped)

    async def abort_prepared(self, transaction: ExternalTransaction) -> int:
        key = transaction.identity, transaction.producer
        async with self._turn(key):
            left = self._left(self._check_run(transaction), transaction)
            if left is None:
                return 0
            await self._note(self._prepared_event(key, Vote(transaction.epoch)))
            self.aborted += len(left)
            return len(left)

    # ---- the service

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Finish deliveries that a stop cut off, and drop what expired, until cancelled."""
        self.ready()
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for delivery in self._deliveries.values():
                    nursery.start_soon(self._deliver, delivery)
                task_status.started()
                nursery.start_soon(self._count_hours)
                await self._expire()
        finally:
            self._nursery = None
            self.state.stop()

    def ready(self) -> None:
        """Prepare what is left of an earlier run; all of its events that are readable are applied."""
        # An event may be lost in the middle of the log.
        self.state.next = max(self.state.next, self._events.queue.next_offset)
        for key, left in self.state.deliveries.items():
            producer = self.state.producers.get(key, UNKNOWN)
            self._deliveries[key] = TransactionDelivery(
                self._broker,
                self._events,
                self.state,
                key,
                left.sequence,
                left.epoch,
                left.parts,
                left.place,
                is_decided=True,
                is_last=producer.is_ended,
                content=producer.content,
            )
            log.info("transaction %d of %r was committed; delivering the rest of it", left.sequence, key[1])

    async def _expire(self) -> None:
        low, high = LOOK_S
        while True:
            await trio.sleep(min(max(self._config.staged_timeout_ms / 4000, low), high))
            try:
                await self.expire()
            except MartletError as error:
                log.warning("staged parts that nobody commits are not dropped yet; %s", error)

    async def expire(self) -> None:
        """Drop the parts to which nothing was added for ``tx.staged_timeout_ms``."""
        late = await self._broker.turns.finish(self._find_late())
        for key, part_key in late:
            async with self._turn(key):
                part = self.state.parts.get((key, part_key))
                seen = self._seen.get((key, part_key))
                if part is None or seen is None or part.chunks != seen[0]:
                    continue
                await self._note(encode_event(EventKind.DROPPED, *key, part_key[0], [part_key[1]]))
            self.expired += 1
            text = "part %r of transaction %d of %r expired: %d messages were staged, and not committed in %d s"
            log.warning(text, part_key[1], part_key[0], key[1], part.messages, self._config.staged_timeout_ms // 1000)

    def _find_late(self) -> Steps[list[tuple[Key, PartKey]]]:
        now, timeout_s, pace = trio.current_time(), self._config.staged_timeout_ms / 1000, Pace(LOOKED_AT)
        late: list[tuple[Key, PartKey]] = []
        seen, self._seen = self._seen, {}
        for name, part in self.state.parts.freeze():
            chunks, since = seen.get(name, (-1, now))
            self._seen[name] = (part.chunks, since if chunks == part.chunks else now)
            is_late = chunks == part.chunks and now - since >= timeout_s and name[0] not in self._deliveries
            if is_late and not self._is_held(*name):
                late.append(name)
            if pace.is_over():
                yield
        return late

    def _is_held(self, key: Key, part_key: PartKey) -> bool:
        """Return whether a part is prepared by a producer that may come back."""
        producer = self.state.producers.get(key, UNKNOWN)
        if part_key[0] != producer.prepared or part_key[1] not in producer.held():
            return False
        return self.state.hour - producer.hour < self._remembered_hours(producer)

    def _remembered_hours(self, producer: ProducerState) -> int:
        limit = self._config.producer_hours
        if producer.is_ended:
            return min(ENDED_HOURS, limit)
        return min(BEGUN_HOURS, limit) if producer.committed < 0 and producer.prepared < 0 else limit

    async def _count_hours(self) -> None:
        while True:
            await trio.sleep(HOUR_S)
            try:
                await self.count_hour()
            except MartletError as error:
                log.warning("the hour that producers of external transactions were unused is not counted; %s", error)

    async def count_hour(self) -> None:
        """Note that the broker has run for another hour, and forget producers that were not used for long."""
        if not len(self.state.producers):
            return
        await self._note(encode_event(EventKind.HOUR, self.state.hour + 1))
        for key in await self._broker.turns.finish(self._find_unused()):
            async with self._turn(key):
                producer = self.state.producers.get(key)
                if producer is not None and self._is_unused(key, producer):
                    await self._note(encode_event(EventKind.FORGOTTEN, *key))
                    self.forgotten += 1
                    log.info("producer %r of external transactions was not used for long and is forgotten", key[1])

    def _is_unused(self, key: Key, producer: ProducerState) -> bool:
        unused = self.state.hour - producer.hour >= self._remembered_hours(producer)
        return unused and key not in self.state.of_producer and key not in self.state.deliveries

    def _find_unused(self) -> Steps[list[Key]]:
        pace, found = Pace(LOOKED_AT), list[Key]()
        for key, producer in self.state.producers.freeze():
            if self._is_unused(key, producer):
                found.append(key)
            if pace.is_over():
                yield
        return found

    # ---- retention

    def move_before(self, end: int) -> WaitingSteps[None]:
        """Append again what is needed of the records before log position *end*.

        A commit comes first, then its producer, then what was staged: so each of them means the same as before in a log
        that begins with the copies.

        Raises:
          Refused: the disk is full.
          StoreFailed: the disk failed.
        """
        self._store.committer.commit_early()
        for key, left in list(self.state.deliveries.items()):
            delivery = self._deliveries.get(key)
            if left.noted_at < end and delivery is not None and not delivery.is_finished:
                self._events.append(delivery.commit_event(delivery.place, is_copy=True))
        if self.state.hour_noted_at < end:
            self._events.append(encode_event(EventKind.HOUR, self.state.hour))
        pace = Pace()
        for key, producer in self.state.producers.freeze():
            if producer.noted_at >= end:
                break  # they are in log order
            if self.state.producers.get(key) == producer:
                self._events.append(self._state_event(key, producer, producer.hour))
            if pace.is_over(8):
                yield None
        for name, part in list(self.state.parts.freeze()):
            for number in range(part.chunks):
                chunk = self.state.chunks.get((part.serial, number))
                if chunk is not None and chunk.position < end and name in self.state.parts:
                    yield from self._move(name, part, number, chunk)
                elif pace.is_over():
                    yield None

    def _move(self, name: tuple[Key, PartKey], part: StagedPart, number: int, chunk: StagedChunk) -> WaitingSteps[None]:
        key, (sequence, part_name) = name
        bodies: list[bytes] = []
        for stored in chunk.records:
            body = yield from read_staged(self._broker, self._events, stored)
            if body is None:
                text = "chunk %d of part %r of transaction %d of %r is lost: its record is damaged"
                log.error(text, number, part_name, sequence, key[1])
                return
            bodies.append(bytes(body))
        items, moved = self._events.staged(bodies, [stored.messages for stored in chunk.records])
        head = (*key, sequence, part_name, part.epoch, number)
        self._events.append(encode_event(EventKind.STAGED, *head, moved, sorted(part.topics), True), items)
        yield None

    # ---- what operators see

    def producers(self, after: tuple[str, str], count: int) -> Steps[list[ExternalProducer]]:
        state, pace = self.state, Pace(LOOKED_AT)
        keys: set[Key] = set(state.of_producer)
        for key, _ in state.producers.freeze():
            keys.add(key)
            if pace.is_over():
                yield
        found: list[ExternalProducer] = []
        for key in sorted(each for each in keys if each > after)[:count]:
            producer, parts = state.producers.get(key, UNKNOWN), [part for _, part in state.parts_of(key)]
            delivery = state.deliveries.get(key)
            found.append(
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
        return found

    def statistics(self) -> dict[str, object]:
        """Return what is staged now, and what became of the rest since the start."""
        state = self.state
        return {
            "producers": len(state.producers),
            "staged_parts": len(state.parts),
            "staged_chunks": len(state.chunks),
            "staged_messages": state.messages,
            "staged_bytes": state.size,
            "delivering": len(self._deliveries),
            "committed": self.committed,
            "committed_messages": self.committed_messages,
            "duplicates": self.duplicates,
            "aborted_parts": self.aborted,
            "expired_parts": self.expired,
            "fenced": self.fenced,
            "forgotten_producers": self.forgotten,
            "dropped_without_topic": self.dropped,
            "lost": self.lost,
        }


def _message(batch: StagedBatch, member: tuple[object, bytes, int]) -> Message:
    body, properties, flag = member
    assert isinstance(body, bytes | bytearray | memoryview)
    return Message(
        batch.topic,
        bytes(body),
        properties,
        batch.queue_id,
        flag,
        batch.sys_flag,
        batch.born_ms,
        batch.born_host,
        batch.reconsume_times,
    )


def _check_name(what: str, name: str, chars_max: int) -> None:
    if not 1 <= len(name) <= chars_max or not name.isprintable():
        text = f"{what} {name!r:.80} has {len(name)} characters or unprintable ones"
        raise Refused(Reason.PARAMETER, f"{text}; use 1 to {chars_max} printable characters")


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


def _check_limit(what: str, held: int, more: int, unit: str, limit: int, name: str) -> None:
    if held + more > limit:
        text = f"{what} would have {held + more} {unit}; tx.staged_{name}_{unit}_max is {limit}"
        raise Refused(Reason.ILLEGAL, f"{text}, make transactions smaller")
