"""The durable state of shared groups: a projection over notes in a journal.

`GroupState` applies the notes (`journal_writer.py`) when they are readable, and is the only state that remains after a
restart: for each queue the unsettled messages, with start and length of each lease, and the number of deliveries.
Holders are not stored: after a restart a message is acknowledged by its handle (offset and generation), or it returns
when its lease expires.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeAlias, final

from martlet.errors import Reason, Refused
from martlet.groups.journal.journal_codec import (
    ACK,
    AGAIN,
    BEGIN,
    DROP,
    KEEP,
    MARK,
    NEW,
    REACH,
    SETTLE,
    Change,
    Key,
    LeaseState,
    decode_note,
    encode_changes,
    head,
)
from martlet.records.layout import RecordView
from martlet.runtime.steps import Budget, Steps
from martlet.state.journal import read_notes
from martlet.state.projection import NOTHING
from martlet.state.rows import pack_rows, unpack_rows

__all__ = ["GroupQueueState", "GroupState", "KnownQueues", "whole"]

FORMAT: Final = 1
NOTE_BYTES_OF_A_STEP: Final = 8
SNAPSHOT_NOTE_BYTES: Final = 1 << 30
# The state of a message whose notes were lost; it is redelivered.
UNKNOWN: Final = LeaseState(0, 0, 0)
# A longer series of such messages is treated as damage.
UNKNOWN_MAX: Final = 1_000_000
# Turns of the event loop for which `roll` waits for pending changes in a group.
ROLL_TURNS: Final = 1000
Name: TypeAlias = tuple[str, str]  # (scope, name) of a group


@final
class KnownQueues:
    """The queues that have a state, found by group and by topic.

    The queues of a group on a topic are the bits of one number.
    """

    def __init__(self) -> None:
        self._bits_by_topic: dict[str, dict[Name, int]] = {}
        self._topics_by_group: dict[Name, dict[str, None]] = {}  # the topics of each group
        self._counts_by_topic: dict[str, int] = {}  # number of queues by topic
        self._count = 0
        # The number of queues of each topic, as far as it was given, and the number that groups may still open on these
        # topics.
        self._queues: dict[str, int] = {}
        self._missing = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: Key) -> bool:
        scope, group, topic, queue_id = key
        return bool(self._bits_by_topic.get(topic, {}).get((scope, group), 0) >> queue_id & 1)

    def add(self, key: Key) -> None:
        if key in self:
            return
        scope, group, topic, queue_id = key
        missing_before = self._missing_on(topic)
        groups = self._bits_by_topic.setdefault(topic, {})
        groups[scope, group] = groups.get((scope, group), 0) | 1 << queue_id
        self._topics_by_group.setdefault((scope, group), {})[topic] = None
        self._counts_by_topic[topic] = self._counts_by_topic.get(topic, 0) + 1
        self._count += 1
        self._missing += self._missing_on(topic) - missing_before

    def discard(self, key: Key) -> None:
        if key not in self:
            return
        scope, group, topic, queue_id = key
        missing_before = self._missing_on(topic)
        groups = self._bits_by_topic[topic]
        bits_left = groups[scope, group] & ~(1 << queue_id)
        self._counts_by_topic[topic] -= 1
        self._count -= 1
        if bits_left:
            groups[scope, group] = bits_left
        else:
            del groups[scope, group]
            self._remove_topic(topic, (scope, group))
        if not groups:
            del self._bits_by_topic[topic], self._counts_by_topic[topic]
        self._missing += self._missing_on(topic) - missing_before
        if not groups:
            self._queues.pop(topic, None)

    def _remove_topic(self, topic: str, name: Name) -> None:
        """Note that a group has no queues on *topic* any more."""
        topics = self._topics_by_group[name]
        del topics[topic]
        if not topics:
            del self._topics_by_group[name]

    def clear(self) -> None:
        self._bits_by_topic.clear()
        self._topics_by_group.clear()
        self._counts_by_topic.clear()
        self._queues.clear()
        self._count = self._missing = 0

    def topics(self) -> list[str]:
        """Return the topics of the queues."""
        return list(self._bits_by_topic)

    def groups(self, topic: str) -> list[Name]:
        """Return the groups with queues on *topic*."""
        return list(self._bits_by_topic.get(topic, ()))

    def topics_of(self, scope: str, group: str) -> list[str]:
        """Return the topics on which a group has queues."""
        return list(self._topics_by_group.get((scope, group), ()))

    def names(self) -> list[Name]:
        """Return the groups with queues."""
        return list(self._topics_by_group)

    def count_with(self, topic: str, queues: int) -> int:
        """Return the number of queues if each group has all: *queues* on *topic*, and the numbers given before."""
        if topic in self._bits_by_topic:
            missing_before = self._missing_on(topic)
            self._queues[topic] = queues
            self._missing += self._missing_on(topic) - missing_before
        return self._count + self._missing

    def _missing_on(self, topic: str) -> int:
        """Return the number of queues that the groups on *topic* do not have yet; 0 if its number was never given."""
        count_if_all = len(self._bits_by_topic.get(topic, ())) * self._queues.get(topic, 0)
        return max(count_if_all - self._counts_by_topic.get(topic, 0), 0)

    def count_of(self, scope: str, group: str, topic: str) -> int:
        """Return the number of queues that a group has on *topic*."""
        return self._bits_by_topic.get(topic, {}).get((scope, group), 0).bit_count()

    def of(self, scope: str, group: str, topic: str) -> list[Key]:
        """Return the queues of a group on *topic*."""
        return list(_keys((scope, group), topic, self._bits_by_topic.get(topic, {}).get((scope, group), 0)))

    def on(self, topic: str) -> list[Key]:
        """Return all queues on *topic*."""
        return [key for name, bits in self._bits_by_topic.get(topic, {}).items() for key in _keys(name, topic, bits)]


def _keys(name: Name, topic: str, bits: int) -> Iterator[Key]:
    scope, group = name
    for queue_id, bit in enumerate(reversed(f"{bits:b}")):
        if bit == "1":
            yield Key(scope, group, topic, queue_id)


@final
class GroupQueueState:
    """One queue as shared by one group, according to the log.

    Messages below ``next`` that are not in ``leases`` are settled. ``since`` is the position of the oldest record that
    contributes to the present state. ``reached`` is the log position from which on the group looks for messages, if it
    finds them by their names; it is kept with the first queue, others have -1. The first queue also has the group's
    ``marks``.
    """

    __slots__ = ("edition", "key", "leases", "marks", "next", "number", "reached", "since")

    def __init__(self, number: int, key: Key, since: int, edition: int) -> None:
        self.number = number
        self.key = key
        self.since = since
        self.edition = edition
        self.next = -1  # unknown
        self.reached = -1
        self.marks = 0
        self.leases: dict[int, LeaseState] = {}

    @property
    def low(self) -> int:
        """The offset below which everything is settled."""
        return min(self.leases, default=self.next)

    def copy(self, edition: int) -> "GroupQueueState":
        queue = GroupQueueState(self.number, self.key, self.since, edition)
        queue.next, queue.reached, queue.marks, queue.leases = self.next, self.reached, self.marks, self.leases.copy()
        return queue

    def apply(self, change: Change) -> None:
        kind, leases, offsets = change.kind, self.leases, change.offsets
        if kind in (ACK, SETTLE):
            if kind == SETTLE and self.next < 0:
                self.next = change.number
            for offset in offsets:
                if offset >= self.next:
                    self._skip_lost(offset)
                    self.next = offset + 1
                leases.pop(offset, None)
        elif kind in (NEW, KEEP):
            if kind == NEW:
                self._skip_lost(change.first)
            state = LeaseState(change.generation, change.duration_ms, 1 if kind == NEW else change.number)
            leases.update(dict.fromkeys(offsets, state))
            if kind == NEW:
                self.next = max(self.next, change.number)
        elif kind == BEGIN:
            leases.clear()
            self.next, self.reached, self.marks = change.number, -1, 0
        elif kind == REACH:
            self.reached = max(self.reached, change.number)
        elif kind == MARK:
            self.marks = change.number
        else:
            self._apply_redelivery(change, 1 if kind == AGAIN else 0)

    def _skip_lost(self, offset: int) -> None:
        """Deliver messages before *offset* again if nothing is known of them.

        A later note can survive a power failure although earlier ones, not yet durable, do not.
        """
        if 0 <= self.next < offset <= self.next + UNKNOWN_MAX:
            self.leases.update(dict.fromkeys(range(self.next, offset), UNKNOWN))

    def _apply_redelivery(self, change: Change, deliveries_added: int) -> None:
        states: dict[int, LeaseState] = {}
        for offset in change.offsets:
            lease = self.leases.get(offset)
            if lease is not None:
                deliveries = lease.deliveries + deliveries_added
                state = states.get(deliveries)
                if state is None:
                    state = states[deliveries] = LeaseState(change.generation, change.duration_ms, deliveries)
                self.leases[offset] = state


def whole(
    next_offset: int, leases: Iterable[tuple[int, LeaseState]], reached: int = -1, marks: int = 0
) -> list[Change]:
    """Return the changes that recreate *leases* from nothing; messages with equal leases are combined."""
    offsets_by_state: dict[LeaseState, list[int]] = {}
    for offset, state in leases:
        offsets_by_state.setdefault(state, []).append(offset)
    keeps = [
        Change(KEEP, state.generation, state.duration_ms, state.deliveries, offsets)
        for state, offsets in offsets_by_state.items()
    ]
    reaches = [Change(REACH, number=reached)] if reached >= 0 else []
    marks_change = [Change(MARK, number=marks)] if marks else []
    return [Change(BEGIN, number=next_offset), *reaches, *marks_change, *keeps]


@final
class GroupState:
    """The projection of group notes (martlet.state.Projection).

    ``settled`` is called with the messages that an atomic group acknowledges, once that group is readable.
    """

    def __init__(self, topic: str) -> None:
        self.name = "shared-groups"
        self.topics = frozenset((topic,))
        self.settled: Callable[[Key, Sequence[int]], None] | None = None
        # Notes the complete state of a queue; returns False while that is unknown.
        self.note_again: Callable[[GroupQueueState], bool] | None = None
        # Called with each queue that a note has dropped.
        self.was_dropped: Callable[[Key], None] | None = None
        # The queues with a state; `GroupJournalWriter` adds and removes queues whose notes are not applied yet.
        self.known = KnownQueues()
        self._queues: dict[int, GroupQueueState] = {}
        self._numbers: dict[Key, int] = {}
        self._edition = 0
        self.leases = 0
        self.number_max = 0
        self.applied = 0  # the end of the newest record that was applied

    def __len__(self) -> int:
        return len(self._queues)

    def get(self, key: Key) -> GroupQueueState | None:
        """Return the state of *key*; do not change or keep it."""
        return self._queues.get(self._numbers.get(key, -1))

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            self.applied = record.position + record.size
            for note in read_notes(record.body):
                self._apply_note(note, record.position)

    def _apply_note(self, note: bytes, position: int) -> None:
        number, key, changes = decode_note(note)
        if key is not None:
            self._define(number, key, position)
        queue = self._queues.get(number)
        if queue is None:
            return  # the note that defined the queue was removed, or the queue was dropped
        if queue.edition != self._edition:
            queue = self._queues[number] = queue.copy(self._edition)
        leases_before = len(queue.leases)
        for change in changes:
            if change.kind == DROP:
                self._drop(queue)
                self.leases -= leases_before
                return
            if change.kind == BEGIN:
                queue.since = position
            queue.apply(change)
            if change.kind == SETTLE and self.settled is not None:
                self.settled(queue.key, change.offsets)
        self.leases += len(queue.leases) - leases_before

    def _define(self, number: int, key: Key, position: int) -> None:
        queue = self._queues.get(number)
        if queue is not None and queue.key == key:
            return
        for replaced in (queue, self.get(key)):
            if replaced is not None:
                self.leases -= len(replaced.leases)
                self._drop(replaced)
        self._queues[number] = GroupQueueState(number, key, position, self._edition)
        self._numbers[key] = number
        self.number_max = max(self.number_max, number)
        self.known.add(key)

    def _drop(self, queue: GroupQueueState) -> None:
        self._queues.pop(queue.number, None)
        self._numbers.pop(queue.key, None)
        if self.was_dropped is not None:
            self.was_dropped(queue.key)
        else:
            self.known.discard(queue.key)

    def freeze(self) -> Steps[Sequence[bytes]]:
        queues, number_max = self._queues.copy(), self.number_max
        self._edition += 1
        return pack_rows(FORMAT, _rows(queues, number_max))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        rows = unpack_rows(FORMAT, data)
        self._queues, self._numbers, self.leases, self.number_max = {}, {}, 0, next(rows, 0)
        self.known.clear()
        budget = Budget()
        for since, note in rows:
            if since >= first_position:
                self._apply_note(note, since)
            if budget.is_over(1 + len(note) // NOTE_BYTES_OF_A_STEP):
                yield

    def forget(self, topic: str) -> None:
        """Do nothing: journals are never deleted, and a note drops the state of a deleted topic."""

    def floor(self) -> int:
        return min((queue.since for queue in self._queues.values()), default=NOTHING)

    def roll(self, start: int, end: int) -> Steps[None]:
        for number in [queue.number for queue in self._queues.values() if queue.since < end]:
            for _ in range(ROLL_TURNS):
                queue = self._queues.get(number)
                if queue is None or self.note_again is None or self.note_again(queue):
                    break
                yield
            else:
                raise Refused(Reason.BUSY, f"queue {number} of the shared groups has acknowledgements in progress")
            yield


def _rows(queues: dict[int, GroupQueueState], number_max: int) -> Iterator[object]:
    yield number_max
    for queue in queues.values():
        changes = whole(queue.next, queue.leases.items(), queue.reached, queue.marks)
        yield queue.since, encode_changes(head(queue.number, queue.key), changes, SNAPSHOT_NOTE_BYTES, b"")[0]
