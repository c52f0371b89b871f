"""Dead letters: copies of messages that a shared group has given up on.

The message is settled once its dead letter is flushed, so that a crash loses neither.
"""

import logging
import math
from collections.abc import Iterable
from typing import Final, final

from martlet.errors import CorruptRecord, Reason, Refused, StoreError
from martlet.groups.queues.share_context import Owner
from martlet.groups.queues.share_lane import ShareLane
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

    ``unflushed`` has the lanes with dead letters that are not flushed yet, ``far`` the dead messages, by lane and
    offset, that may have to be read from disk in a thread.
    """

    __slots__ = ("_owner", "far", "stored", "unflushed", "without_letter")

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.stored = 0
        self.without_letter = 0  # dead messages that cannot be stored as dead letters
        self.unflushed: dict[ShareLane, None] = {}
        self.far: dict[tuple[ShareLane, int], None] = {}

    def forget(self, lanes: Iterable[ShareLane]) -> None:
        """Settle no more dead messages of *lanes*, whose share has ended."""
        if self.unflushed:
            for lane in lanes:
                self.unflushed.pop(lane, None)

    def store(self, lane: ShareLane, most: int) -> int:
        """Store dead letters for dead messages of *lane*, at most *most*; return how many there were."""
        count = 0
        for offset in lane.leases.dead():
            if offset in lane.unflushed or (lane, offset) in self.far:
                continue
            if count == most:
                self._owner.alarm(lane.context, -math.inf)
                break
            count += 1
            if not self._store_one(lane, offset):
                break
        return count

    def _store_one(self, lane: ShareLane, offset: int) -> bool:
        """Copy a dead message to the dead letter topic; settle it once the copy is readable.

        Returns False if the store refuses it now.
        """
        owner = self._owner
        result = owner.store.read_near(lane.queue, offset, 1, 1)
        if result is None:
            self.far[lane, offset] = None
            return True
        self._store_read(lane, offset, result)
        return offset in lane.unflushed or not lane.leases.is_dead(offset)

    async def store_far(self) -> None:
        """Store dead letters for messages far behind the tail, which may have to be read from disk in a thread."""
        for _ in range(min(FAR_A_TURN, len(self.far))):
            lane, offset = next(iter(self.far))
            del self.far[lane, offset]
            try:
                await self._store_one_far(lane, offset)
            except (OSError, StoreError) as error:
                log.error(
                    "a dead message of group %r cannot be read, retrying in %g s; %s",
                    lane.context.group,
                    RETRY_S,
                    error,
                )
                self._owner.alarm(lane.context, self._owner.now() + RETRY_S)

    async def _store_one_far(self, lane: ShareLane, offset: int) -> None:
        """As `_store_one`, for a message that is read in a thread."""
        leases = lane.leases
        result = await self._owner.store.read_far(lane.queue, offset, 1, 1)
        alive = not lane.is_closed and lane.leases is leases
        if alive and leases.is_dead(offset) and offset not in lane.unflushed:
            self._store_read(lane, offset, result)

    def _store_read(self, lane: ShareLane, offset: int, result: ReadResult) -> None:
        owner = self._owner
        if not result.count or result.next_offset != offset + 1:
            self._settle(lane, offset)  # retention removed it
            return
        topic = lane.context.dead_letters
        if not topic:
            self._settle(lane, offset)
            return
        try:
            end = put_dead_letter(owner.store, owner.topics, topic, decode_record(b"".join(result.pieces)))
        except (Refused, StoreError) as error:
            self._failed(lane, offset, error)
            return
        lane.unflushed[offset] = end
        self.unflushed[lane] = None
        self.settle_flushed(lane)

    def settle_flushed(self, lane: ShareLane) -> None:
        """Settle dead messages of *lane* whose dead letters are flushed; `Shares.run` calls this after each flush."""
        owner, unflushed = self._owner, lane.unflushed
        while unflushed:
            offset, end = next(iter(unflushed.items()))
            if end > owner.store.readable:
                return
            del unflushed[offset]
            self.stored += 1
            self._settle(lane, offset)
        self.unflushed.pop(lane, None)

    def _failed(self, lane: ShareLane, offset: int, error: Refused | StoreError) -> None:
        """Retry later; if the error is permanent, log it and settle the message without a dead letter."""
        owner = self._owner
        if not (isinstance(error, CorruptRecord) or (isinstance(error, Refused) and error.reason in NEVER_STORED)):
            owner.alarm(lane.context, owner.now() + RETRY_S)
            return
        self.without_letter += 1
        log.error(
            "message %d of queue %d of topic[%s] has no dead letter although group %r gave it up, read it there; %s",
            offset,
            lane.queue.queue_id,
            lane.context.topic.name,
            lane.context.group,
            error,
        )
        self._settle(lane, offset)

    def _settle(self, lane: ShareLane, offset: int) -> None:
        lane.leases.settle_dead(offset)
        self._owner.notes.ack(lane.key, (offset,))
        lane.account()
        lane.competitors.wake()


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
    end = store.append(message, 0).end
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
