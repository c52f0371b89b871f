"""Appends: encodes records directly into the end of the log in memory, and their entries into their queues.

One loop, `Writer._put_usual`, handles the messages of a socket read (`append_run`), a batch or a group; `append_item`
does the same for one usual message without the setup of a run. `_put_odd` handles rare cases, one record at a time.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Final, TypeAlias, final

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
    HEAD_BYTES,
    MAGIC_V1,
    PREPARED,
    ROLLBACK,
    SHORT,
    STORE_BITS,
    TRANSACTION_MASK,
    Buffer,
)
from martlet.runtime.checksum import crc32
from martlet.store.append.admission import Admission
from martlet.store.append.committer import Committer
from martlet.store.config import StoreConfig
from martlet.store.disk.page_cache import LogWriter
from martlet.store.format.atomic import MARK_AT, group_flags
from martlet.store.format.light import MULTI, is_light, light_topics, may_be_indexed, with_places, without_offsets
from martlet.store.format.tags import TagCodes
from martlet.store.queues.queues import Queue, Queues

__all__ = ["RunItem", "RunResult", "Writer"]

NO_HOST: Final = bytes(8)
# A message: its queue, body, properties and tag code (`Writer.code_of`), flag, sysFlag, born ms and born host,
# reconsume times, and the position of its prepared message.
RunItem: TypeAlias = tuple[Queue, Buffer, bytes, int, int, int, int, bytes, int, int]

ENTRY_PACK: Final = ENTRY.pack
HEAD_PACK: Final = HEAD.pack_into
SHORT_PACK: Final = SHORT.pack
# Client flags that are kept; the store sets the others itself.
KEPT_FLAGS: Final = ~STORE_BITS
FEW: Final = 3


def _are_odd(properties: bytes) -> bool:
    """Return whether *properties*, of any number of messages, contain a zero byte or name light queues."""
    return 0 in properties or properties.find(MULTI) >= 0


@final
class RunResult:
    """Locations of the messages of a run: log positions, the ends of their records, and queue offsets, in order.

    A refused message has -1 for all three, and its reason in ``refused`` by its index in the run. ``end`` is the log
    position after the last record. ``rolled`` says that a segment ended in between: the records in it are committed.
    """

    __slots__ = ("end", "ends", "offsets", "positions", "refused", "rolled", "store_ms")

    def __init__(self) -> None:
        self.positions: list[int] = []
        self.ends: list[int] = []
        self.offsets: list[int] = []
        self.refused: dict[int, Refused] = {}
        self.end = 0
        self.store_ms = 0
        self.rolled = False

    def forget_last(self, count: int) -> None:
        """Remove the last *count* messages, which the caller added to the run."""
        for places in self.positions, self.ends, self.offsets:
            del places[-count:]

    def add_refused(self, refused: Mapping[int, Refused]) -> None:
        """Add messages that were refused before they reached the store, by their index in the whole run."""
        for place in sorted(refused):
            for places in self.positions, self.ends, self.offsets:
                places.insert(place, -1)
        stored = [place for place in range(len(self.positions)) if place not in refused]
        self.refused = {**{stored[place]: error for place, error in self.refused.items()}, **refused}

    def outcome(self, place: int, queue_id: int) -> Placed | Refused:
        """Return where message *place* of the run, for queue *queue_id*, was stored, or why it was refused."""
        refused = self.refused.get(place)
        return self.placed(place, queue_id) if refused is None else refused

    def placed(self, place: int, queue_id: int) -> Placed:
        """Return where message *place* of the run, for queue *queue_id*, was stored; it was not refused."""
        return Placed(queue_id, self.offsets[place], self.positions[place], self.ends[place], self.store_ms)


@final
class Writer:
    """Appends to the log and to the queues in memory; the committer writes the log to disk."""

    __slots__ = (
        "_admission",
        "_committer",
        "_queues",
        "_record_crcs",
        "_tail",
        "code_of",
        "config",
        "light_queues",
        "store_host",
    )

    def __init__(
        self, config: StoreConfig, tail: LogWriter, queues: Queues, committer: Committer, admission: Admission
    ) -> None:
        self.config = config
        self._tail = tail
        self._queues = queues
        self._committer = committer
        self._admission = admission
        # Returns the tag code of encoded properties, for a `RunItem`.
        self.code_of: Final = TagCodes().of
        self._record_crcs = config.record_crcs
        self.store_host = NO_HOST
        # Whether records are indexed in the light queues that they name.
        self.light_queues = False

    @property
    def position(self) -> int:
        """The log position of the next record."""
        return self._tail.position

    # ---- public appends

    def append(self, message: Message, queue_id: int) -> Placed:
        """Append *message* to the log and to its queue.

        Raises:
          Refused: it is too large, or the store accepts no writes at the moment (the text says why).
          StoreFailed: the disk failed.
        """
        of_topic = self._queues.topics.get(message.topic)
        queue = of_topic.get(queue_id) if of_topic is not None else None
        if queue is None:
            queue = self.open_queue(message.topic, queue_id)
        return self.append_item(self.item(message, queue))

    def append_item(self, item: RunItem) -> Placed:
        """Append one message; raises like `append`."""
        queue, body, properties, code, flag, sys_flag, born_ms, born_host, times, prepared_position = item
        tail, host = self._tail, self.store_host
        body_bytes, properties_bytes, position = len(body), len(properties), tail.position
        size = queue.overhead + body_bytes + properties_bytes
        end = position + size
        if (
            end > tail.room
            or not queue.plain
            or self._record_crcs
            or self._admission.refusal
            or sys_flag & PREPARED  # a rollback has this bit too
            or len(born_host) != 8
            or len(host) != 8
            or body_bytes > self.config.message_bytes_max
            or properties_bytes > PROPERTIES_BYTES_MAX
            or 0 in properties
            or properties.find(MULTI) >= 0
            or (properties_bytes >= 20 and (properties[-12] == 1 or properties[-20] == 95))
        ):
            return self._append_odd(item)
        committer, offset = self._committer, queue.next_offset
        now = committer.now_ms or committer.read_clock()
        at = position - tail.page_base
        HEAD_PACK(
            tail.data,
            at,
            size,
            MAGIC_V1,
            crc32(body) & 0x7FFFFFFF,
            queue.queue_id,
            flag,
            offset,
            position,
            sys_flag & KEPT_FLAGS,
            born_ms,
            born_host,
            now,
            host,
            times,
            prepared_position,
            body_bytes,
        )
        at += HEAD_BYTES
        tail.data[at : at + body_bytes] = body
        rest = b"%b%b%b" % (queue.topic_part, SHORT_PACK(properties_bytes), properties)
        tail.data[at + body_bytes : end - tail.page_base] = rest
        queue.tail += ENTRY_PACK(position, size, code)
        queue.next_offset = offset + 1
        queue.put_bytes += size
        queue.last_end = tail.position = end
        if not queue.dirty:
            self._queues.touch(queue)
        committer.pending.append((queue, position, end, now, properties))
        return Placed(queue.queue_id, offset, position, end, now)

    def _append_odd(self, item: RunItem) -> Placed:
        """Like `append_item`, for messages of any kind."""
        result = RunResult()
        self._put_run((item,), result, True)
        if result.refused:
            raise result.refused[0]
        return result.placed(0, item[0].queue_id)

    def append_run(self, run: Sequence[RunItem], *, atomic: bool = False) -> RunResult:
        """Append the messages of *run* in order, each to its queue; a refused one does not affect the others.

        With *atomic* all or none is stored, as by `append_group`.

        Raises:
          Refused: as `append_group`, with *atomic* only; none was stored.
          StoreFailed: the disk failed.
        """
        if atomic and run:
            return self._append_all(run, f"a batch of {len(run)} messages")
        result = RunResult()
        # One search in all properties is faster than one in each, except for a few.
        self._put_run(run, result, len(run) < FEW or _are_odd(b"".join([item[2] for item in run])))
        return result

    def append_batch(self, messages: Sequence[Message], queue_id: int) -> list[Placed]:
        """Append *messages*, all of one topic, with consecutive offsets: all or none, like `append_group`.

        Raises:
          Refused: as for `append`; none was stored.
        """
        if not messages:
            return []
        queue = self.open_queue(messages[0].topic, queue_id)
        result = self.append_run([self.item(message, queue) for message in messages], atomic=True)
        return [result.placed(place, queue_id) for place in range(len(messages))]

    def append_group(
        self, messages: Sequence[Message], queue_ids: Sequence[int], *, is_bounded: bool = True
    ) -> list[Placed]:
        """Append *messages* of any topics, each to the queue of its topic with the corresponding id: all or none.

        They are contiguous in one segment. After a crash, either all of them are stored or none.

        Args:
          is_bounded: whether ``group_bytes_max`` bounds them.

        Raises:
          Refused: as for `append`, or the group has too many messages or bytes; none was stored.
        """
        if not messages:
            return []
        items = [
            self.item(message, self.open_queue(message.topic, queue_id))
            for message, queue_id in zip(messages, queue_ids, strict=True)
        ]
        config = self.config
        if len(items) > config.group_messages_max:
            limit = f"the maximum is {config.group_messages_max} (store.group_messages_max)"
            raise Refused(Reason.ILLEGAL, f"the group has {len(items)} messages; {limit}")
        bytes_max = config.group_bytes_max if is_bounded else 0
        result = self._append_all(items, f"a group of {len(items)} messages", bytes_max)
        return [result.placed(place, item[0].queue_id) for place, item in enumerate(items)]

    def _append_all(self, items: Sequence[RunItem], what: str, bytes_max: int = 0) -> RunResult:
        """Append *items* as an atomic group (`atomic.py`); a single item needs no marks."""
        properties = [item[2] for item in items]
        lengths = [len(each) for each in properties]
        if self._record_crcs or True in [
            len(each) >= 20 and (each[-12] == 1 or each[-20] == 95) for each in properties
        ]:
            items = [self._fitted_item(item) for item in items]
            properties = [item[2] for item in items]
            lengths = [len(each) for each in properties]
        self._admission.check()
        bodies, together = [len(item[1]) for item in items], b"".join(properties)
        names_queues = together.find(MULTI) >= 0
        odd = 0 in together
        if max(bodies) > self.config.message_bytes_max or max(lengths) > PROPERTIES_BYTES_MAX or odd:
            for item in items:
                self._check(item[1], item[2])  # names the message that cannot be stored
        hosts = sum([item[0].overhead + len(item[7]) for item in items]) + len(items) * (len(self.store_host) - 16)
        total = sum(bodies) + sum(lengths) + hosts
        if names_queues:
            total += self._room_for_places(items)
        if bytes_max and total > bytes_max:
            limit = f"the maximum is {bytes_max} (store.group_bytes_max)"
            raise Refused(Reason.ILLEGAL, f"the group has {total} bytes; {limit}")
        tail, committer = self._tail, self._committer
        if tail.position + total + FILLER_BYTES > tail.segment.end:
            self.roll_for(total, what)
        start, count, result = tail.position, len(committer.pending), RunResult()
        if len(items) > 1:
            tail.begin_group()
        try:
            self._put_run(items, result, odd or names_queues, group_flags(len(items)))
        except BaseException:
            committer.take_back(count)
            tail.rewind(start)
            raise
        assert not result.refused, "a message of a group was refused after all were checked"
        return result

    def append_together(self, messages: Sequence[Message], topic: str) -> None:
        """Append internal records, which belong to no queue, in one segment, and commit them: all or none."""
        queue = Queue(topic, 0)
        messages = [copy(each) for each in messages]
        for each in messages:
            each.properties = self._fitted(each.properties)
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

    def item(self, message: Message, queue: Queue) -> RunItem:
        """Convert *message*, which goes to *queue*, for a run."""
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

    def _put_run(self, run: Sequence[RunItem], result: RunResult, odd: bool, marks: Sequence[int] = ()) -> None:
        """Encode *run* into the log's end and its queues; *marks* are the bits of sysFlag for its atomic group.

        *odd* says whether properties may contain a zero byte or name light queues.
        """
        tail = self._tail
        segment = tail.segment
        result.store_ms = self._committer.read_clock()
        while (count := self._put_usual(run, result, odd, marks)) < len(run):
            self._put_odd(run[count], result, marks[count] if marks else 0)
        result.end = tail.position
        result.rolled = tail.segment is not segment

    def _put_usual(self, run: Sequence[RunItem], result: RunResult, odd: bool, marks: Sequence[int]) -> int:
        """Encode the next items of *run* up to the first that is unusual or has no room; return how many are done."""
        tail, queues, pending = self._tail, self._queues, self._committer.pending
        host, record_crcs, body_bytes_max = self.store_host, self._record_crcs, self.config.message_bytes_max
        room = tail.room if not self._admission.refusal and len(host) == 8 else -1
        data, base, position, now = tail.data, tail.page_base, tail.position, result.store_ms
        positions, ends, offsets = result.positions, result.ends, result.offsets
        try:
            for item in run[len(positions) :] if positions else run:
                queue, body, properties, code, flag, sys_flag, born_ms, born_host, times, prepared_position = item
                if record_crcs or (len(properties) >= 20 and (properties[-12] == 1 or properties[-20] == 95)):
                    properties = self._fitted(properties)
                body_bytes, properties_bytes = len(body), len(properties)
                size = queue.overhead + body_bytes + properties_bytes
                end = position + size
                if (
                    end > room
                    or not queue.plain
                    or len(born_host) != 8
                    or sys_flag & PREPARED
                    or body_bytes > body_bytes_max
                    or properties_bytes > PROPERTIES_BYTES_MAX
                    or (odd and (0 in properties or properties.find(MULTI) >= 0))
                ):
                    break
                at, offset = position - base, queue.next_offset
                HEAD_PACK(
                    data,
                    at,
                    size,
                    MAGIC_V1,
                    crc32(body) & 0x7FFFFFFF,
                    queue.queue_id,
                    flag,
                    offset,
                    position,
                    sys_flag & KEPT_FLAGS | (marks[len(positions)] if marks else 0),
                    born_ms,
                    born_host,
                    now,
                    host,
                    times,
                    prepared_position,
                    body_bytes,
                )
                at += HEAD_BYTES
                data[at : at + body_bytes] = body
                rest = b"%b%b%b" % (queue.topic_part, SHORT_PACK(properties_bytes), properties)
                data[at + body_bytes : end - base] = rest
                if record_crcs:
                    write_record_crc(data, position - base, end - base)
                queue.tail += ENTRY_PACK(position, size, code)
                queue.next_offset, queue.last_end = offset + 1, end
                queue.put_bytes += size
                if not queue.dirty:
                    queues.touch(queue)
                pending.append((queue, position, end, now, properties))
                positions.append(position)
                ends.append(end)
                offsets.append(offset)
                position = end
        finally:
            tail.position = position
        return len(positions)

    def _put_odd(self, item: RunItem, result: RunResult, mark: int) -> None:
        """Like `_put_usual`, for one message of any kind; starts a new segment or page if necessary."""
        light: list[Queue] = []
        try:
            if item[2].find(MULTI) >= 0:
                item, light = self._with_places(item)
            position, offset = self._put_any(self._fitted_item(item), mark, light)
        except Refused as refused:
            result.refused[len(result.positions)] = refused
            position = offset = -1
        result.positions.append(position)
        result.ends.append(self._tail.position if offset >= 0 else -1)
        result.offsets.append(offset)

    def _put_any(self, item: RunItem, mark: int, light: list[Queue]) -> tuple[int, int]:
        """Append the record of *item*, and add entries to its queue and to the *light* ones that it names."""
        queue, body, properties, code, flag, sys_flag, born_ms, born_host, times, prepared_position = item
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
            times,
            prepared_position,
        )
        size = record_size(message, queue.topic_bytes, self.store_host)
        if tail.position + size + FILLER_BYTES > tail.segment.end:
            self.roll_for(size, "the record")
        now = committer.read_clock()
        kind = sys_flag & TRANSACTION_MASK
        indexed = kind != PREPARED and kind != ROLLBACK
        offset = queue.next_offset if indexed else 0
        position = tail.position
        record = bytearray(encode_record(message, queue.queue_id, offset, position, now, self.store_host))
        if mark:
            record[MARK_AT] |= mark >> 24
        if self._record_crcs:
            write_record_crc(record, 0, size)
        tail.put(record)
        if indexed:
            dispatch = queue.dispatcher
            queue.add(position, size, code if dispatch is None else dispatch(properties, now))
            self._queues.touch(queue)
        for each in light:
            dispatch = each.dispatcher
            each.add(position, size, code if dispatch is None else dispatch(properties, now))
            self._queues.touch(each)
            committer.light.append((each, tail.position))
        # Keys of rollback records are not indexed.
        committer.pending.append((queue, position, tail.position, now, properties if kind != ROLLBACK else b""))
        return position, offset

    def _with_places(self, item: RunItem) -> tuple[RunItem, list[Queue]]:
        """Return *item* with its offsets in light queues added to the properties, and these offsets.

        Raises:
          Refused: there can be no such light queues.
        """
        properties, names = self._light_topics(item)
        found = [self._queues.find(name, 0) for name in names]
        if names:
            self._check_light(len(names), found.count(None))
            properties = with_places(properties, names, [queue.next_offset if queue else 0 for queue in found])
            self._check(item[1], properties)
        light = [self._queues.get(name, 0) for name in names]
        return (*item[:2], properties, *item[3:]), light

    def _room_for_places(self, items: Sequence[RunItem]) -> int:
        """Return the maximum growth of *items* by `_with_places` in bytes; raise `Refused` if that would refuse one."""
        room, named, new = 0, 0, set[str]()
        for item in items:
            properties, names = self._light_topics(item)
            if names:
                found = [self._queues.find(name, 0) for name in names]
                new.update(name for name, queue in zip(names, found, strict=True) if queue is None)
                named += len(names)
                self._check_light(named, len(new))
                last = [(queue.next_offset if queue else 0) + len(items) for queue in found]
                properties = with_places(properties, names, last)
                self._check(item[1], properties)
                room += max(len(properties) - len(item[2]), 0)
        return room

    def _light_topics(self, item: RunItem) -> tuple[bytes, list[str]]:
        """Return the properties of *item* without offsets in light queues, and the light topics that will index it."""
        properties, kind = without_offsets(item[2]), item[5] & TRANSACTION_MASK
        if not self.light_queues or kind in (PREPARED, ROLLBACK) or not may_be_indexed(item[0].topic_bytes):
            return properties, []
        return properties, light_topics(properties)

    def _fitted(self, properties: bytes) -> bytes:
        """Make room for the CRC of a record, or remove the CRC of another record."""
        return with_room_for_record_crc(properties) if self._record_crcs else without_record_crc(properties)

    def _fitted_item(self, item: RunItem) -> RunItem:
        return (*item[:2], self._fitted(item[2]), *item[3:])

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

    def _check_light(self, named: int, new: int) -> None:
        """Raise if a message or a group names too many light topics, or if *new* ones cannot be created."""
        limit = self.config.light_names_max
        if named > limit:
            text = f"{named} or more light topics are named together; the maximum is {limit} (store.light_names_max)"
            raise Refused(Reason.ILLEGAL, text)
        count, limit = self._queues.light, self.config.light_queues_max
        if new and count + new > limit:
            text = f"there are {count} light queues and {new} more are needed; the maximum is {limit}"
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
