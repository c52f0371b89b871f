"""Appends: encodes records directly into the end of the log in memory, and their entries into their queues.

`Writer._put_all` encodes all messages of a call: one message, the messages of a socket read, a batch or a group. Its
inner loop is `put_usual` (`usual.py`); `_put_odd` handles rare cases, one record at a time.
"""

from collections.abc import Sequence
from copy import copy
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet.message import PROPERTIES_BYTES_MAX, Message, Placed
from martlet.records.codec import (
    encode_record,
    record_size,
    with_room_for_record_crc,
    without_record_crc,
    write_record_crc,
)
from martlet.records.layout import (
    ENTRY,
    FILLER_BYTES,
    HEAD,
    PREPARED,
    ROLLBACK,
    SHORT,
    STORE_BITS,
    TRANSACTION_MASK,
    Buffer,
)
from martlet.runtime.native import native
from martlet.store.append.admission import Admission
from martlet.store.append.committer import Committer
from martlet.store.append.items import (
    AppendItem,
    AppendResult,
    body_of,
    properties_of,
    queue_of,
    sys_flag_of,
)
from martlet.store.append.usual import measure_usual, put_usual
from martlet.store.config import StoreConfig
from martlet.store.disk.page_cache import LogWriter
from martlet.store.format.atomic import MARK_AT, group_flags
from martlet.store.format.light import MULTI, is_light, light_topics, may_be_indexed, with_places, without_offsets
from martlet.store.format.tags import TagCodes
from martlet.store.queues.queues import Queue, Queues

__all__ = ["Writer"]

NO_HOST: Final = bytes(8)

ENTRY_PACK: Final = ENTRY.pack
HEAD_PACK: Final = HEAD.pack_into
SHORT_PACK: Final = SHORT.pack
# Client flags that are kept; the store sets the others itself.
KEPT_FLAGS: Final = ~STORE_BITS
FEW: Final = 3


def _are_odd(properties: bytes) -> bool:
    """Return whether *properties*, of one or several messages, contain a zero byte or name light queues."""
    return 0 in properties or properties.find(MULTI) >= 0


@final
class Writer:
    """Appends to the log and to the queues in memory; the committer writes the log to disk."""

    def __init__(
        self, config: StoreConfig, tail: LogWriter, queues: Queues, committer: Committer, admission: Admission
    ) -> None:
        self.config = config
        self._tail = tail
        self._queues = queues
        self._committer = committer
        self._admission = admission
        # Returns the tag code of encoded properties, for an `AppendItem`.
        self.code_of: Final = TagCodes().of
        self._record_crcs = config.record_crcs
        self._put_usual, self._measure_usual = native(put_usual), native(measure_usual)
        # The broker's address as in records: 4 or 16 address bytes and an i32 port.
        self.store_host = NO_HOST
        # Whether records are indexed in the light queues that they name.
        self.light_queues = False

    @property
    def position(self) -> int:
        """The log position of the next record."""
        return self._tail.position

    # ---- public appends

    def append(self, message: Message, queue_id: int) -> Placed:
        """Append *message* to the log and to its queue; `Committer.commit` writes it to the disk.

        Raises:
          Refused: it is too large, or the store accepts no writes at the moment (the text says why).
          StoreFailed: the disk failed.
        """
        return self.append_all((self.item(message, queue_id),)).placed(0)

    def append_all(self, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        """Append *items* in order, each to its queue, and return their locations; a refused item does not affect the
        others.

        With *atomic* all or none is stored, also after a crash; several are contiguous in one segment.

        Raises:
          Refused: with *atomic* only: one is too large, they are too many or too large together, or the store accepts
            no writes at the moment (the text says why); none was stored.
          StoreFailed: the disk failed.
        """
        result = AppendResult(items)
        if not items:
            return result
        if atomic and len(items) > 1:
            self._append_group(items, result)
            return result
        # One search in all properties is faster than a search in each, except for a few items.
        is_odd = len(items) < FEW or _are_odd(b"".join(map(properties_of, items)))
        self._put_all(items, result, is_odd)
        if atomic and result.refused:
            raise result.refused[0]
        return result

    def _append_group(self, items: Sequence[AppendItem], result: AppendResult) -> None:
        """Append *items* as an atomic group (`atomic.py`)."""
        config, count = self.config, len(items)
        if count > config.group_messages_max:
            limit = f"the maximum is {config.group_messages_max} (store.group_messages_max)"
            raise Refused(Reason.ILLEGAL, f"the group has {count} messages; {limit}")
        self._admission.check()
        size, is_odd = -1, False
        if len(self.store_host) == len(NO_HOST) and not self._record_crcs:
            size = self._measure_usual(items, config.message_bytes_max)
        if size < 0:
            items = [self._fit_item(item) for item in items]
            size, is_odd = self._measure_group(items)
        if size > config.group_room:
            why = "store.group_bytes_max, or two messages of store.message_bytes_max"
            raise Refused(Reason.ILLEGAL, f"the group has {size} bytes; the maximum is {config.group_room} ({why})")
        tail, committer = self._tail, self._committer
        if tail.position + size + FILLER_BYTES > tail.segment.end:
            self.roll_for(size, f"a group of {count} messages")
        start, pending = tail.position, len(committer.pending)
        tail.begin_group()
        try:
            self._put_all(items, result, is_odd, group_flags(count))
        except BaseException:
            committer.take_back(pending)
            tail.rewind(start)
            raise
        assert not result.refused, "a message of a group was refused after all were checked"

    def _measure_group(self, items: Sequence[AppendItem]) -> tuple[int, bool]:
        """Return the maximum size of the records of *items*, and whether `_put_all` must look for odd properties.

        Raises:
          Refused: an item cannot be stored.
        """
        body_sizes, properties = list(map(len, map(body_of, items))), list(map(properties_of, items))
        properties_size_max, all_properties = max(map(len, properties)), b"".join(properties)
        if (
            max(body_sizes) > self.config.message_bytes_max
            or properties_size_max > PROPERTIES_BYTES_MAX
            or 0 in all_properties
        ):
            for item in items:
                self._check(body_of(item), properties_of(item))  # names the message that cannot be stored
        size = sum(body_sizes) + len(all_properties)
        # An overhead includes two IPv4 hosts of 8 bytes; the hosts of these records may be longer.
        size += sum([queue.overhead + len(born_host) for queue, _, _, _, _, _, _, born_host, _, _ in items])
        size += len(items) * (len(self.store_host) - 16)
        is_odd = _are_odd(all_properties)
        if is_odd:
            size += self._places_growth_max(items)
        return size, is_odd

    def append_together(self, messages: Sequence[Message], topic: str) -> None:
        """Append internal records, which belong to no queue, in one segment, and commit them: all or none."""
        queue = Queue(topic, 0)
        messages = [copy(each) for each in messages]
        for each in messages:
            each.properties = self._fit_properties(each.properties)
        size = sum(record_size(each, queue.topic_bytes, self.store_host) for each in messages)
        if self._tail.position + size + FILLER_BYTES > self._tail.segment.end:
            self.roll_for(size, "a record of the store")
        now = self._committer.read_clock()
        for message in messages:
            position = self._tail.position
            record = bytearray(encode_record(message, 0, 0, position, now, self.store_host))
            if self._record_crcs:
                write_record_crc(record, 0, len(record))
            self._tail.put(record)
            self._committer.pending.append((queue, position, self._tail.position, now, b""))
        self._committer.commit()

    def open_queue(self, topic: str, queue_id: int) -> Queue:
        """Return the queue, created if it does not exist.

        Raises:
          Refused: there can be no such queue.
        """
        queue = self._queues.find(topic, queue_id)
        if queue is not None:
            return queue
        if not topic or "/" in topic or "\x00" in topic or topic in (".", "..") or len(topic.encode()) > 255:
            raise Refused(Reason.ILLEGAL, f"topic {topic!r} cannot be a directory of the store")
        if queue_id < 0:
            raise Refused(Reason.ILLEGAL, f"queue id {queue_id} is negative")
        if is_light(topic):
            self._check_light(0, 1)
        return self._queues.get(topic, queue_id)

    def item(self, message: Message, queue_id: int) -> AppendItem:
        """Convert *message*, which goes to queue *queue_id* of its topic, for `append_all`.

        Raises:
          Refused: there can be no such queue.
        """
        of_topic = self._queues.topics.get(message.topic)
        queue = of_topic.get(queue_id) if of_topic is not None else None
        if queue is None:
            queue = self.open_queue(message.topic, queue_id)
        properties = message.properties
        return (
            queue,
            message.body,
            properties,
            self.code_of(properties),
            message.flag,
            message.sys_flag,
            message.born_ms,
            message.born_host,
            message.reconsume_times,
            message.prepared_position,
        )

    # ---- the inner loop

    def _put_all(
        self, items: Sequence[AppendItem], result: AppendResult, is_odd: bool, marks: Sequence[int] = ()
    ) -> None:
        """Encode *items* into the log's end and their queues; *marks* are the bits of sysFlag for their atomic group.

        *is_odd* tells whether properties may contain a zero byte or name light queues.
        """
        tail, committer, admission = self._tail, self._committer, self._admission
        result.store_ms = now = committer.read_clock()
        host, body_bytes_max, record_crcs = self.store_host, self.config.message_bytes_max, self._record_crcs
        done, count = 0, len(items)
        while done < count:
            if not admission.refusal:
                pending = committer.pending
                terms = tail, self._queues, pending, result, host, now, body_bytes_max, is_odd, record_crcs, marks
                done = self._put_usual(items, done, terms)
            if done < count:
                self._put_odd(items[done], result, marks[done] if marks else 0)
                done += 1
        result.end, result.rolled = tail.position, result.positions[0] < tail.segment.start

    def _put_odd(self, item: AppendItem, result: AppendResult, mark: int) -> None:
        """Encode one message of any kind; start a new segment or page if necessary."""
        light_queues: list[Queue] = []
        try:
            if properties_of(item).find(MULTI) >= 0:
                item, light_queues = self._with_places(item)
            position, offset = self._put_record(self._fit_item(item), mark, light_queues)
        except Refused as refusal:
            result.refused[len(result.positions)] = refusal
            position = offset = -1
        result.positions.append(position)
        result.ends.append(self._tail.position if offset >= 0 else -1)
        result.offsets.append(offset)

    def _put_record(self, item: AppendItem, mark: int, light_queues: list[Queue]) -> tuple[int, int]:
        """Append the record of *item*; add entries to its queue and to *light_queues*, which it names."""
        queue, body, properties, code, flag, sys_flag, born_ms, born_host, reconsume_times, prepared_position = item
        self._check(body, properties)
        if queue.deleted:
            queue = self.open_queue(queue.topic, queue.queue_id)
        tail, committer = self._tail, self._committer
        message = Message(
            queue.topic,
            bytes(body),
            properties,
            queue.queue_id,
            flag,
            sys_flag,
            born_ms,
            born_host,
            reconsume_times,
            prepared_position,
        )
        size = record_size(message, queue.topic_bytes, self.store_host)
        if tail.position + size + FILLER_BYTES > tail.segment.end:
            self.roll_for(size, "the record")
        now = committer.read_clock()
        kind = sys_flag & TRANSACTION_MASK
        is_indexed = kind != PREPARED and kind != ROLLBACK
        offset = queue.next_offset if is_indexed else 0
        position = tail.position
        record = bytearray(encode_record(message, queue.queue_id, offset, position, now, self.store_host))
        if mark:
            record[MARK_AT] |= mark >> 24
        if self._record_crcs:
            write_record_crc(record, 0, size)
        tail.put(record)
        if is_indexed:
            dispatch = queue.dispatcher
            queue.add(position, size, code if dispatch is None else dispatch(properties, now))
            self._queues.touch(queue)
        for light_queue in light_queues:
            dispatch = light_queue.dispatcher
            light_queue.add(position, size, code if dispatch is None else dispatch(properties, now))
            self._queues.touch(light_queue)
            committer.light.append((light_queue, tail.position))
        # Keys of rollback records are not indexed.
        committer.pending.append((queue, position, tail.position, now, properties if kind != ROLLBACK else b""))
        return position, offset

    def _with_places(self, item: AppendItem) -> tuple[AppendItem, list[Queue]]:
        """Return *item* with its offsets in light queues added to the properties, and these queues.

        Raises:
          Refused: there can be no such light queues.
        """
        properties, names = self._light_topics(item)
        queues = [self._queues.find(name, 0) for name in names]
        if names:
            self._check_light(len(names), queues.count(None))
            properties = with_places(properties, names, [queue.next_offset if queue else 0 for queue in queues])
            self._check(body_of(item), properties)
        light = [self._queues.get(name, 0) for name in names]
        return (*item[:2], properties, *item[3:]), light

    def _places_growth_max(self, items: Sequence[AppendItem]) -> int:
        """Return the number of bytes that `_with_places` adds to *items* at most.

        Raises:
          Refused: `_with_places` would refuse an item.
        """
        growth, names_count, new_topics = 0, 0, set[str]()
        for item in items:
            properties, names = self._light_topics(item)
            if names:
                queues = [self._queues.find(name, 0) for name in names]
                new_topics.update(name for name, queue in zip(names, queues, strict=True) if queue is None)
                names_count += len(names)
                self._check_light(names_count, len(new_topics))
                offsets_max = [(queue.next_offset if queue else 0) + len(items) for queue in queues]
                properties = with_places(properties, names, offsets_max)
                self._check(body_of(item), properties)
                growth += max(len(properties) - len(properties_of(item)), 0)
        return growth

    def _light_topics(self, item: AppendItem) -> tuple[bytes, list[str]]:
        """Return the properties of *item* without offsets in light queues, and the light topics that will index it."""
        properties, kind = without_offsets(properties_of(item)), sys_flag_of(item) & TRANSACTION_MASK
        if not self.light_queues or kind in (PREPARED, ROLLBACK) or not may_be_indexed(queue_of(item).topic_bytes):
            return properties, []
        return properties, light_topics(properties)

    def _fit_properties(self, properties: bytes) -> bytes:
        """Make room for the CRC of a record, or remove the CRC of another record."""
        return with_room_for_record_crc(properties) if self._record_crcs else without_record_crc(properties)

    def _fit_item(self, item: AppendItem) -> AppendItem:
        return (*item[:2], self._fit_properties(properties_of(item)), *item[3:])

    # ---- refusals and room

    def _check(self, body: Buffer, properties: bytes) -> None:
        """Raise if a message cannot be stored, or appends are refused."""
        self._admission.check()
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise Refused(
                Reason.ILLEGAL, f"the properties have {len(properties)} bytes; the maximum is {PROPERTIES_BYTES_MAX}"
            )
        if 0 in properties:
            raise Refused(
                Reason.ILLEGAL, "the properties contain U+0000, by which the store recognizes torn writes; remove it"
            )
        limit = self.config.message_bytes_max
        if len(body) > limit:
            text = f"the body has {len(body)} bytes; the maximum is {limit} (store.message_bytes_max)"
            raise Refused(Reason.ILLEGAL, text)

    def _check_light(self, names_count: int, new_count: int) -> None:
        """Raise if a message or a group names too many light topics, or if *new_count* queues cannot be created."""
        limit = self.config.light_names_max
        if names_count > limit:
            text = (
                f"{names_count} or more light topics are named together; the maximum is {limit} (store.light_names_max)"
            )
            raise Refused(Reason.ILLEGAL, text)
        count, limit = self._queues.light, self.config.light_queues_max
        if new_count and count + new_count > limit:
            text = f"there are {count} light queues and {new_count} more are needed; the maximum is {limit}"
            raise Refused(Reason.BUSY, f"{text} (store.light_queues_max); delete unused ones")

    def roll_for(self, size: int, what: str) -> None:
        """Start a segment with room for *size* bytes.

        Raises:
          Refused: no segment has that much room, or the disk is full.
          StoreFailed: the disk failed.
        """
        if size + FILLER_BYTES > self.config.segment_bytes:
            raise Refused(
                Reason.ILLEGAL,
                f"{what} has {size} bytes; a segment has {self.config.segment_bytes} (store.segment_bytes)",
            )
        self._committer.roll()
