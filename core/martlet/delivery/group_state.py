"""The durable state of shared groups: a projection over notes in a journal, and the writer of these notes.

`shared_groups.py` changes its leases immediately and has each change noted; the notes of a commit are combined into one
note for each queue of each group. `GroupState` applies them when they are readable and is all that remains after a
restart: for each queue, which messages are unsettled, since when and for how long each is leased, and how often it was
delivered. Holders are not stored: after a restart a message is acknowledged by its handle (offset and generation), or
it returns when its lease expires.

A failed commit loses its notes. After that, and after times when the store accepted no writes, the complete state of
the affected queues is noted before anything else.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, Protocol, final

from martlet.delivery.lease_notes import (
    ACK,
    AGAIN,
    BEGIN,
    DROP,
    KEEP,
    NEW,
    SETTLE,
    Change,
    Key,
    LeaseState,
    decode_note,
    encode_changes,
    head,
)
from martlet.errors import Reason, Refused, StoreFailed
from martlet.records.layout import RecordView
from martlet.state.journal import Journal, read_notes
from martlet.state.projection import NOTHING
from martlet.state.rows import pack_rows, unpack_rows
from martlet.steps import Pace, Steps
from martlet.store import Store

__all__ = ["GroupNotes", "GroupState", "Lane", "Source"]

log = logging.getLogger("martlet.shares")

FORMAT: Final = 1
NOTE_BYTES_OF_A_STEP: Final = 8
SNAPSHOT_NOTE_BYTES: Final = 1 << 30
# Greater than every position and offset.
NEVER: Final = 1 << 62
# The state of a message whose notes were lost; it is redelivered.
UNKNOWN: Final = LeaseState(0, 0, 0)
# A longer series of such messages is treated as damage.
UNKNOWN_MAX: Final = 1_000_000
# Turns of the event loop for which `roll` waits for pending changes in a group.
ROLL_TURNS: Final = 1000


@final
class Lane:
    """One queue as shared by one group, according to the log.

    Messages below ``next`` that are not in ``leases`` are settled. ``since`` is the position of the oldest record that
    contributes to the present state.
    """

    __slots__ = ("edition", "key", "leases", "next", "number", "since")

    def __init__(self, number: int, key: Key, since: int, edition: int) -> None:
        self.number = number
        self.key = key
        self.since = since
        self.edition = edition
        self.next = -1  # unknown
        self.leases: dict[int, LeaseState] = {}

    @property
    def low(self) -> int:
        """The offset below which everything is settled."""
        return min(self.leases, default=self.next)

    def copy(self, edition: int) -> "Lane":
        lane = Lane(self.number, self.key, self.since, edition)
        lane.next, lane.leases = self.next, self.leases.copy()
        return lane

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
            self.next = change.number
        else:
            self._hand_again(change, 1 if kind == AGAIN else 0)

    def _skip_lost(self, offset: int) -> None:
        """Deliver messages before *offset* again if nothing is known of them.

        A later note can survive a power failure although earlier ones, not yet durable, do not.
        """
        if 0 <= self.next < offset <= self.next + UNKNOWN_MAX:
            self.leases.update(dict.fromkeys(range(self.next, offset), UNKNOWN))

    def _hand_again(self, change: Change, more: int) -> None:
        made: dict[int, LeaseState] = {}
        for offset in change.offsets:
            held = self.leases.get(offset)
            if held is not None:
                deliveries = held.deliveries + more
                state = made.get(deliveries)
                if state is None:
                    state = made[deliveries] = LeaseState(change.generation, change.duration_ms, deliveries)
                self.leases[offset] = state


def whole(next_offset: int, leases: Iterable[tuple[int, LeaseState]]) -> list[Change]:
    """Return the changes that recreate *leases* from nothing; messages with equal leases are combined."""
    alike: dict[LeaseState, list[int]] = {}
    for offset, state in leases:
        alike.setdefault(state, []).append(offset)
    keep = [Change(KEEP, state.generation, state.duration_ms, state.deliveries, o) for state, o in alike.items()]
    return [Change(BEGIN, number=next_offset), *keep]


@final
class GroupState:
    """The projection (martlet.state.Projection).

    ``settled`` is called with the messages that an atomic group acknowledges, once it is readable.
    """

    def __init__(self, topic: str) -> None:
        self.name = "shared-groups"
        self.topics = frozenset((topic,))
        self.settled: Callable[[Key, Sequence[int]], None] | None = None
        # Notes the complete state of a lane; returns False while that is unknown.
        self.note_again: Callable[[Lane], bool] | None = None
        self._lanes: dict[int, Lane] = {}
        self._numbers: dict[Key, int] = {}
        self._edition = 0
        self.leases = 0
        self.number_max = 0
        self.applied = 0  # the end of the newest record that was applied

    def __len__(self) -> int:
        return len(self._lanes)

    def get(self, key: Key) -> Lane | None:
        """Return the state of *key*; do not change or keep it."""
        return self._lanes.get(self._numbers.get(key, -1))

    def known(self) -> AbstractSet[Key]:
        """The groups and queues with a state."""
        return self._numbers.keys()

    def apply(self, records: Sequence[RecordView]) -> None:
        for record in records:
            for note in read_notes(record.body):
                self._apply_note(note, record.position)
            self.applied = record.position + record.size

    def _apply_note(self, note: bytes, position: int) -> None:
        number, key, changes = decode_note(note)
        if key is not None:
            self._define(number, key, position)
        lane = self._lanes.get(number)
        if lane is None:
            return  # the note that defined the lane was removed, or the lane was dropped
        if lane.edition != self._edition:
            lane = self._lanes[number] = lane.copy(self._edition)
        before = len(lane.leases)
        for change in changes:
            if change.kind == DROP:
                self._drop(lane)
                self.leases -= before
                return
            if change.kind == BEGIN:
                lane.since = position
            lane.apply(change)
            if change.kind == SETTLE and self.settled is not None:
                self.settled(lane.key, change.offsets)
        self.leases += len(lane.leases) - before

    def _define(self, number: int, key: Key, position: int) -> None:
        lane = self._lanes.get(number)
        if lane is not None and lane.key == key:
            return
        for old in (lane, self.get(key)):
            if old is not None:
                self.leases -= len(old.leases)
                self._drop(old)
        self._lanes[number] = Lane(number, key, position, self._edition)
        self._numbers[key] = number
        self.number_max = max(self.number_max, number)

    def _drop(self, lane: Lane) -> None:
        self._lanes.pop(lane.number, None)
        self._numbers.pop(lane.key, None)

    def freeze(self) -> Steps[Sequence[bytes]]:
        lanes, number_max = self._lanes.copy(), self.number_max
        self._edition += 1
        return pack_rows(FORMAT, _rows(lanes, number_max))

    def restore(self, data: bytes, first_position: int) -> Steps[None]:
        rows = unpack_rows(FORMAT, data)
        self._lanes, self._numbers, self.leases, self.number_max = {}, {}, 0, next(rows, 0)
        pace = Pace()
        for since, note in rows:
            if since >= first_position:
                self._apply_note(note, since)
            if pace.is_over(1 + len(note) // NOTE_BYTES_OF_A_STEP):
                yield

    def forget(self, topic: str) -> None:
        """Do nothing: journals are never deleted, and a note drops the state of a deleted topic."""

    def floor(self) -> int:
        return min((lane.since for lane in self._lanes.values()), default=NOTHING)

    def roll(self, start: int, end: int) -> Steps[None]:
        for number in [lane.number for lane in self._lanes.values() if lane.since < end]:
            for _ in range(ROLL_TURNS):
                lane = self._lanes.get(number)
                if lane is None or self.note_again is None or self.note_again(lane):
                    break
                yield
            else:
                raise Refused(Reason.BUSY, f"lane {number} of the shared groups has acknowledgements in progress")
            yield


def _rows(lanes: dict[int, Lane], number_max: int) -> Iterator[object]:
    yield number_max
    for lane in lanes.values():
        changes = whole(lane.next, lane.leases.items())
        yield lane.since, encode_changes(head(lane.number, lane.key), changes, SNAPSHOT_NOTE_BYTES, b"")[0]


class Source(Protocol):
    """The live state of a lane."""

    @property
    def is_settling(self) -> bool:
        """Return whether an acknowledgement in an atomic group has no result yet."""
        ...

    def state(self) -> tuple[int, list[tuple[int, LeaseState]]]:
        """Return the next offset, and every unsettled message."""
        ...

    def account(self) -> None:
        """Count what was settled; called before its notes are written, also where the store accepts no writes."""
        ...


@final
class _Pending:
    """Changes of one lane to note with the next commit."""

    __slots__ = ("acked", "again", "changes", "key", "number")

    def __init__(self, number: int, key: Key) -> None:
        self.number = number
        self.key = key
        self.changes: list[Change] = []
        # The offsets of the last change if that is an ACK: nearly all changes are of this kind.
        self.acked: list[int] | None = None
        self.again = False  # note the complete state

    def add(self, change: Change) -> None:
        """Add *change*; merge it into the previous one if they differ only in their offsets."""
        last = self.changes[-1] if self.changes else None
        if change.kind == NEW:
            self.changes.append(change)
        elif last is not None and last[:4] == change[:4] and isinstance(last.offsets, list):
            last.offsets.extend(change.offsets)
            return
        else:
            self.changes.append(change._replace(offsets=list(change.offsets)))
        self.acked = None

    def replace(self, changes: list[Change], *, again: bool = False) -> None:
        """Note only *changes*, and the complete state if *again*."""
        self.changes, self.again, self.acked = changes, again, None

    def begin_acks(self) -> list[int]:
        """Add an ACK; return the list for its offsets."""
        self.acked = []
        self.changes.append(Change(ACK, 0, 0, 0, self.acked))
        return self.acked


@final
class GroupNotes:
    """Writes the notes of shared groups into their journal."""

    def __init__(self, store: Store, journal: Journal, state: GroupState, lanes_max: int) -> None:
        self._store = store
        self._state = state
        self._lanes_max = lanes_max
        self.journal = journal
        self._numbers: dict[Key, int] = {}
        self._sources: dict[Key, Source] = {}
        self._pending: dict[Key, _Pending] = {}
        # Lanes whose newest notes are not applied yet and may still be lost, with the log position after these.
        self._unsure: dict[Key, int] = {}
        # Lanes that were dropped, until the projection has dropped them too.
        self._dropped: dict[Key, None] = {}
        # The minimum offset that the journal should have, unless a commit failed.
        self._expected = 0
        # Lanes whose complete state was noted while an acknowledgement in an atomic group was in progress.
        self._noted_settling: dict[Key, None] = {}
        self._number_max = 0
        self._waits = False
        state.note_again = self._note_again

    def check_room(self, keys: Sequence[Key]) -> None:
        """Raise `Refused` (BUSY) unless there is room for *keys*."""
        known = len(self.known())
        new = sum(key not in self._numbers and self.stored(key) is None for key in keys)
        if new and known + new > self._lanes_max:
            text = f"{known} queues of shared groups are in use; delivery.share_queues_max is {self._lanes_max}"
            raise Refused(Reason.BUSY, f"{text}, delete unused groups or topics")

    def known(self) -> set[Key]:
        """Return the groups and queues that have state now, or will have with the next commit."""
        return (self._numbers.keys() | self._state.known()) - self._dropped.keys()

    def stored(self, key: Key) -> Lane | None:
        """Return the stored state of *key*, None if it was dropped; do not change or keep it."""
        return self._state.get(key) if key not in self._dropped else None

    def is_applied(self, key: Key) -> bool:
        """Return whether the stored state of *key* has all that was noted."""
        return key not in self._pending and self._unsure.get(key, 0) <= self._state.applied

    @property
    def is_dropping(self) -> bool:
        """Whether the stored state still has lanes that were dropped."""
        return bool(self._dropped)

    def open(self, key: Key, source: Source) -> None:
        """Use *source* as the live state of *key*."""
        self._sources[key] = source

    def close(self, key: Key) -> None:
        """End the live state of *key*; its stored state remains."""
        self._flush_of(key)
        self._sources.pop(key, None)

    def note(self, key: Key, change: Change) -> None:
        """Note *change* of *key* with the current commit."""
        self._get(key).add(change)

    def ack(self, key: Key, offsets: Iterable[int]) -> None:
        """Note that messages are settled."""
        pending = self._pending.get(key) or self._get(key)
        acked = pending.acked
        if acked is None:
            acked = pending.begin_acks()
            self._store.commit_soon()
        acked.extend(offsets)

    def begin(self, key: Key, offset: int) -> None:
        """Note that the lane begins at *offset*, and has no other state."""
        self._get(key).replace([Change(BEGIN, number=offset)])
        self._dropped.pop(key, None)

    def begin_with(self, key: Key, next_offset: int, leases: Mapping[int, LeaseState]) -> None:
        """Note that the lane continues at *next_offset*, and has *leases*."""
        self._get(key).replace(whole(next_offset, leases.items()))
        self._dropped.pop(key, None)

    def drop(self, key: Key) -> None:
        """Drop the state of *key*; what begins again before that is applied has none of it."""
        if key in self._numbers or self._state.get(key) is not None:
            self._sources.pop(key, None)
            self._noted_settling.pop(key, None)
            self._get(key).replace([Change(DROP)])
            self._dropped[key] = None

    def settle(self, key: Key, offset: int, began: int) -> tuple[Journal, bytes]:
        """Return the argument of `Broker.publish_atomic` that acknowledges the message at *offset*.

        All earlier notes are written to the log first. If a power failure loses those but not this one, the lane is
        restored as it *began*: every message from there on is delivered again, except this one.
        """
        first = head(self._get(key).number, key)
        self._write_notes()
        return self.journal, encode_changes(first, [Change(SETTLE, 0, 0, began, (offset,))], 1 << 16, b"")[0]

    def _get(self, key: Key) -> _Pending:
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(self._number(key), key)
            self._commit_soon()
        return pending

    def _number(self, key: Key) -> int:
        number = self._numbers.get(key)
        if number is None:
            known = self._state.get(key)
            self._number_max = max(self._number_max, self._state.number_max)
            if known is None:
                self._number_max += 1
            number = self._numbers[key] = known.number if known is not None else self._number_max
        return number

    def _commit_soon(self) -> None:
        if not self._waits:
            self._waits = True
            self._store.before_commit.append(self._write)
            self._store.commit_soon()

    def _write(self) -> None:
        """Write the collected notes; called by the commit."""
        self._waits = False
        self._write_notes()

    def _write_notes(self) -> None:
        for key in self._pending:
            source = self._sources.get(key)
            if source is not None:
                source.account()
        try:
            self._store.admission.check()
        except (Refused, StoreFailed):
            self._keep_for_later()
            return
        self._find_lost()
        pending, self._pending = self._pending, {}
        if not pending:
            return
        self._expected = NEVER  # until everything below is appended
        self._unsure.update(dict.fromkeys(pending, NEVER))
        for each in pending.values():
            for note in self._encode(each):
                self.journal.note(note)
        self.journal.write()
        queue = self._store.queue(self.journal.topic, 0)
        self._expected = queue.next_offset
        self._unsure.update(dict.fromkeys(pending, queue.last_end))

    def _encode(self, pending: _Pending) -> list[bytes]:
        number, key = pending.number, pending.key
        changes, source = pending.changes, self._sources.get(key)
        if pending.again and source is not None:
            if source.is_settling:
                self._noted_settling[key] = None
            changes = whole(*source.state())
        if changes and changes[-1].kind == DROP:
            self._numbers.pop(key, None)
        more = head(number)
        first = head(number, key) if changes and changes[0].kind == BEGIN else more
        return encode_changes(first, changes, self.journal.note_bytes_max, more)

    def _find_lost(self) -> None:
        """After a failed commit, note the complete state of lanes whose last notes were not stored."""
        if not self._unsure:
            return
        applied = self._state.applied
        self._unsure = {key: end for key, end in self._unsure.items() if end > applied}
        queue = self._store.find_queue(self.journal.topic, 0)
        if queue is None or queue.next_offset < self._expected:
            for key in self._unsure:
                self._again(key)

    def try_again(self) -> None:
        """Write what could not be written, if the store accepts it now."""
        self._find_lost()
        self._dropped = {key: None for key in self._dropped if not self.is_applied(key)}
        if self._pending:
            self._store.commit_soon()

    def _again(self, key: Key) -> None:
        if key in self._sources:
            self._get(key).again = True
        elif key in self._dropped:
            self._get(key).replace([Change(DROP)])

    def _keep_for_later(self) -> None:
        """Note the complete state of the lanes later, because the store accepts no writes now."""
        for pending in self._pending.values():
            if pending.key in self._sources:
                pending.replace([], again=True)
        if self._pending and not self._waits:
            self._waits = True
            self._store.before_commit.append(self._write)

    def _flush_of(self, key: Key) -> None:
        """Compute the pending changes of *key* while its source still exists."""
        pending, source = self._pending.get(key), self._sources.get(key)
        if pending is not None and pending.again and source is not None:
            pending.replace(whole(*source.state()))

    def must_note_settled(self, key: Key) -> bool:
        """Return whether messages settled by an atomic group must be noted again: a later note says unsettled."""
        return key in self._noted_settling

    def _note_again(self, lane: Lane) -> bool:
        self._store.admission.check()
        if lane.key in self._dropped:
            return True
        source = self._sources.get(lane.key)
        if source is not None and source.is_settling:
            return False  # the note would undo the acknowledgement, which precedes it in the log
        if source is not None:
            self._get(lane.key).again = True
        elif not self.is_applied(lane.key):
            return False
        else:
            self._get(lane.key).replace(whole(lane.next, lane.leases.items()))
        return True
