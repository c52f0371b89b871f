"""Dead letters: copies of messages whose deliveries to a shared group are used up.

The message is settled once its dead letter is flushed, so that a crash loses neither.
"""

import logging
import math
from collections.abc import Iterable
from typing import Final, final

from martlet.errors import CorruptRecord, Reason, Refused, StoreError
from martlet.groups.queues.group_context import Owner
from martlet.groups.queues.group_queue import GroupQueue
from martlet.message import PROPERTIES_BYTES_MAX, Message, Record, find_property, put_property
from martlet.records.codec import decode_record
from martlet.store import ReadResult, Store
from martlet.tables.topics import Topics

__all__ = ["DeadLetters", "put_dead_letter"]

log = logging.getLogger("martlet.shares")

RETRY_S: Final = 5.0  # pause before a failed dead letter is tried again
# Dead messages that one turn reads with `DeadLetters.store_far` before it checks the clock again.
FAR_A_TURN: Final = 64
RECONSUME_TIMES_MAX: Final = (1 << 31) - 1  # the field's maximum; a sender may set any value
# Permanent reasons to refuse a dead letter: the record itself, or a group name too long for a dead letter topic
# (a table written by RocketMQ may have one).
NEVER_STORED: Final = frozenset((Reason.ILLEGAL, Reason.PARAMETER))


@final
class DeadLetters:
    """Stores the dead letters of all groups of a broker.

    ``unflushed`` has the queues with dead letters that are not flushed yet, ``far`` the dead messages, by queue and
    offset, that may have to be read from disk in a thread.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.stored = 0
        self.without_letter = 0  # dead messages that cannot be stored as dead letters
        self.unflushed: dict[GroupQueue, None] = {}
        self.far: dict[tuple[GroupQueue, int], None] = {}

    def forget(self, queues: Iterable[GroupQueue]) -> None:
        """Stop settling dead messages of *queues*, whose group has ended."""
        if self.unflushed:
            for queue in queues:
                self.unflushed.pop(queue, None)

    def store(self, queue: GroupQueue, count_max: int) -> int:
        """Store dead letters for at most *count_max* dead messages of *queue*; return their number."""
        count = 0
        for offset in queue.leases.dead():
            if offset in queue.unflushed or (queue, offset) in self.far:
                continue
            if count == count_max:
                self._owner.alarm(queue.context, -math.inf)
                break
            count += 1
            if not self._store_one(queue, offset):
                break
        return count

    def _store_one(self, queue: GroupQueue, offset: int) -> bool:
        """Copy a dead message to the dead letter topic; settle it once the copy is readable.

        Returns False if the store refuses the copy now.
        """
        owner = self._owner
        result = owner.store.readers.read_near(queue.store_queue, offset, 1, 1)
        if result is None:
            self.far[queue, offset] = None
            return True
        self._store_copy(queue, offset, result)
        return offset in queue.unflushed or not queue.leases.is_dead(offset)

    async def store_far(self) -> None:
        """Store dead letters for messages far behind the tail, which may have to be read from disk in a thread."""
        for _ in range(min(FAR_A_TURN, len(self.far))):
            queue, offset = next(iter(self.far))
            del self.far[queue, offset]
            try:
                await self._store_one_far(queue, offset)
            except (OSError, StoreError, Refused) as error:
                log.error(
                    "a dead message of group %r cannot be read, retrying in %g s; %s",
                    queue.context.group,
                    RETRY_S,
                    error,
                )
                self._owner.alarm(queue.context, self._owner.now() + RETRY_S)

    async def _store_one_far(self, queue: GroupQueue, offset: int) -> None:
        """As `_store_one`, for a message that is read in a thread."""
        leases = queue.leases
        result = await self._owner.store.readers.read_far(queue.store_queue, offset, 1, 1)
        is_current = not queue.is_closed and queue.leases is leases
        if is_current and leases.is_dead(offset) and offset not in queue.unflushed:
            self._store_copy(queue, offset, result)

    def _store_copy(self, queue: GroupQueue, offset: int, result: ReadResult) -> None:
        owner = self._owner
        if not result.count or result.next_offset != offset + 1:
            self._settle(queue, offset)  # retention removed it
            return
        topic = queue.context.dead_letters
        if not topic:
            self._settle(queue, offset)
            return
        try:
            end = put_dead_letter(owner.store, owner.topics, topic, decode_record(b"".join(result.pieces)))
        except (Refused, StoreError) as error:
            self._handle_refusal(queue, offset, error)
            return
        queue.unflushed[offset] = end
        self.unflushed[queue] = None
        self.settle_flushed(queue)

    def settle_flushed(self, queue: GroupQueue) -> None:
        """Settle dead messages of *queue* whose dead letters are flushed; called after each flush."""
        owner, unflushed = self._owner, queue.unflushed
        while unflushed:
            offset, end = next(iter(unflushed.items()))
            if end > owner.store.readable:
                return
            del unflushed[offset]
            self.stored += 1
            self._settle(queue, offset)
        self.unflushed.pop(queue, None)

    def _handle_refusal(self, queue: GroupQueue, offset: int, error: Refused | StoreError) -> None:
        """Retry later; if the error is permanent, log it and settle the message without a dead letter."""
        owner = self._owner
        if not (isinstance(error, CorruptRecord) or (isinstance(error, Refused) and error.reason in NEVER_STORED)):
            owner.alarm(queue.context, owner.now() + RETRY_S)
            return
        self.without_letter += 1
        log.error(
            "message %d of queue %d of topic[%s] has no dead letter although group %r gave it up, read it there; %s",
            offset,
            queue.store_queue.queue_id,
            queue.context.topic.name,
            queue.context.group,
            error,
        )
        self._settle(queue, offset)

    def _settle(self, queue: GroupQueue, offset: int) -> None:
        queue.leases.settle_dead(offset)
        self._owner.notes.ack(queue.key, (offset,))
        queue.account()
        queue.members.wake()


def put_dead_letter(store: Store, topics: Topics, name: str, record: Record) -> int:
    """Store a copy of *record* in the dead letter topic *name*; return its end in the log.

    The property names are those of RocketMQ's SendMessageBackHook.

    Raises:
      Refused: it cannot be stored now, or never (`NEVER_STORED`).
      StoreError: the store has failed.
    """
    topic = topics.ensure(name, 1)
    message = Message(
        topic.name,
        record.body,
        _letter_properties(record),
        0,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        min(record.reconsume_times + 1, RECONSUME_TIMES_MAX),
    )
    end = store.writer.append(message, 0).end
    store.committer.commit_early()
    return end


def _letter_properties(record: Record) -> bytes:
    """Return the properties of *record*, plus its origin topic and message id if they fit."""
    # The store refuses U+0000, which a log written by RocketMQ may contain.
    properties = record.properties.replace(b"\x00", b"")
    origin_id = (record.store_host + record.position.to_bytes(8, "big")).hex().upper()
    for name, value in ((b"DLQ_ORIGIN_TOPIC", record.topic), (b"DLQ_ORIGIN_MESSAGE_ID", origin_id)):
        longer = properties if find_property(properties, name) else put_property(properties, name, value.encode())
        if len(longer) <= PROPERTIES_BYTES_MAX:
            properties = longer
    return properties
