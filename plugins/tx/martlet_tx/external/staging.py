"""Staging: messages are checked, changed by the stages of plugins, and cut into records."""

from collections.abc import Sequence
from typing import final

from msgspec.structs import replace

from martlet.broker import Broker
from martlet.contracts import ExternalTransaction, StagedBatch
from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX, Message, find_property
from martlet_tx.config import TxConfig
from martlet_tx.external.journal_codec import EventKind, encode_event
from martlet_tx.external.journal_writer import ExternalJournalWriter
from martlet_tx.external.runs import ProducerRuns
from martlet_tx.external.staged_records import cut, encode_batch, staged_bytes
from martlet_tx.external.state import ExternalState, StagedPart

__all__ = ["TransactionStaging"]


@final
class TransactionStaging:
    """Appends chunks, within the limits of *config*."""

    def __init__(
        self,
        broker: Broker,
        config: TxConfig,
        events: ExternalJournalWriter,
        state: ExternalState,
        runs: ProducerRuns,
    ) -> None:
        self._broker = broker
        self._store = broker.store
        self._config = config
        self._events = events
        self._state = state
        self._runs = runs

    def append(
        self,
        transaction: ExternalTransaction,
        part: str,
        chunk: int,
        batch: StagedBatch,
        staged_part: StagedPart | None,
    ) -> int:
        """Stage *batch* as number *chunk* of *part*, whose staged chunks are *staged_part*; return the end in the log.

        Raises:
          Refused: a limit is reached, or a message cannot be stored in its topic.
        """
        batches = self._batches_to_store(batch)
        messages, size = len(batch.members), sum([staged_bytes(each) for each in batches])
        self._check_sizes(batches)
        self._check_room(transaction, staged_part, messages, size)
        bodies, counts = list[bytes](), list[int]()
        for each in batches:
            pieces, numbers = cut(encode_batch(each), len(each.members), self._store.config.message_bytes_max)
            bodies += pieces
            counts += numbers
        items, records = self._events.staged_items(bodies, counts)
        name = transaction.identity, transaction.producer, transaction.sequence, part, transaction.epoch
        event = encode_event(EventKind.STAGED, *name, chunk, records, [batch.topic], False)
        return self._events.append(event, items)

    def _batches_to_store(self, batch: StagedBatch) -> list[StagedBatch]:
        """Return the batches to store: *batch* with its queue, or several if stages of plugins change its messages."""
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
        return self._apply_stages(batch)

    def _apply_stages(self, batch: StagedBatch) -> list[StagedBatch]:
        """Return the messages of *batch* after the stages, grouped by queue, in their order."""
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
        """Raise `Refused` unless the records of *batches* fit into a segment, and so does each message, in a group."""
        limit = self._store.config.segment_bytes - 1024
        for batch in batches:
            size = staged_bytes(batch)
            if size > limit:
                text = f"staged batch needs {size} bytes; a segment has room for {limit} (store.segment_bytes)"
                raise Refused(Reason.ILLEGAL, f"{text}; stage smaller batches")

    def _check_room(self, transaction: ExternalTransaction, part: StagedPart | None, messages: int, size: int) -> None:
        """Raise `Refused` if a batch of *size* bytes for *part*, None for a new one, would exceed a limit."""
        config, state = self._config, self._state
        key = transaction.identity, transaction.producer
        part_messages, part_bytes = (part.messages, part.size) if part is not None else (0, 0)
        _check_limit("part", "part", "bytes", part_bytes + size, config.staged_part_bytes_max)
        _check_limit("part", "part", "messages", part_messages + messages, config.staged_part_messages_max)
        named = f"transaction {transaction.sequence}"
        held_messages, held_bytes = state.totals.get((key, transaction.sequence), (0, 0))
        _check_limit("transaction", named, "bytes", held_bytes + size, config.staged_transaction_bytes_max)
        _check_limit("transaction", named, "messages", held_messages + messages, config.staged_transaction_messages_max)
        self._check_room_of_all(size, is_new=part is None)
        if key not in state.producers and key not in state.of_producer:
            self._runs.check_room(transaction.identity)

    def _check_room_of_all(self, size: int, *, is_new: bool) -> None:
        """Raise `Refused` if the broker would hold too much for all transactions together."""
        config, state = self._config, self._state
        for count, limit, unit in (
            (state.size + size, config.staged_bytes_max, "bytes"),
            (len(state.chunks) + 1, config.staged_chunks_max, "chunks"),
            (len(state.parts) + is_new, config.staged_parts_max, "parts"),
        ):
            if count > limit:
                busy = f"[OVERLOAD]system busy, {count} {unit} would be staged; tx.staged_{unit}_max is {limit}"
                raise Refused(Reason.BUSY, busy)


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


def _check_limit(kind: str, named: str, unit: str, count: int, limit: int) -> None:
    """Raise `Refused` if *count* of *unit* are more than a part or a transaction, the *kind*, may have."""
    if count > limit:
        text = f"{named} would have {count} {unit}; tx.staged_{kind}_{unit}_max is {limit}"
        raise Refused(Reason.ILLEGAL, f"{text}; make transactions smaller")
