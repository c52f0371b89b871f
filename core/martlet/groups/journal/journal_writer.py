"""Writes the notes of shared groups into their journal.

`shared_groups.py` changes its leases immediately and has each change noted; the notes of a commit are combined into one
note for each queue of each group.

A failed commit loses its notes. After a failure, and after times when the store accepted no writes, the complete state
of the affected queues is noted before anything else.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol, final

from martlet.errors import Reason, Refused, StoreFailed
from martlet.groups.journal.journal_codec import (
    ACK,
    BEGIN,
    DROP,
    MARK,
    NEW,
    REACH,
    SETTLE,
    Change,
    Key,
    LeaseState,
    encode_changes,
    head,
)
from martlet.groups.journal.state import GroupQueueState, GroupState, whole
from martlet.runtime.steps import per_slice
from martlet.state.journal import Journal
from martlet.store import Store

__all__ = ["GroupJournalWriter", "LiveQueue"]

# Greater than every position and offset.
NEVER: Final = 1 << 62
# Queues dropped in one turn of the event loop.
DROPS_A_TURN: Final = per_slice(us=5)


class LiveQueue(Protocol):
    """The live state of a queue; ``reached`` is the position noted last (`GroupJournalWriter.reach`), or -1."""

    reached: int

    @property
    def is_settling(self) -> bool:
        """Whether an acknowledgement in an atomic group has no result yet."""
        ...

    def state(self) -> tuple[int, list[tuple[int, LeaseState]], int, int]:
        """Return the next offset, every unsettled message, ``reached``, and the group's marks."""
        ...

    def account(self) -> None:
        """Count the settled messages; called before the notes are written, also while the store accepts no writes."""
        ...


@final
class _Pending:
    """Changes of one queue to note with the next commit."""

    __slots__ = ("acked", "changes", "is_whole", "key", "number")

    def __init__(self, number: int, key: Key) -> None:
        self.number = number
        self.key = key
        self.changes: list[Change] = []
        # The offsets of the last change if that is an ACK: nearly all changes are of this kind.
        self.acked: list[int] | None = None
        self.is_whole = False  # whether to note the complete state

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
        self.changes, self.is_whole, self.acked = changes, again, None

    def begin_acks(self) -> list[int]:
        """Add an ACK; return the list for its offsets."""
        self.acked = []
        self.changes.append(Change(ACK, 0, 0, 0, self.acked))
        return self.acked


@final
class GroupJournalWriter:
    """Writes the notes of shared groups into their journal.

    It is large, because every change of a queue (noted, dropped, reached) is kept until it is written, and noted again
    if a commit fails: one state machine, whose tables change together.
    """

    def __init__(self, store: Store, journal: Journal, state: GroupState, queues_max: int) -> None:
        self._store = store
        self._state = state
        self._queues_max = queues_max
        self.journal = journal
        self._numbers: dict[Key, int] = {}
        self._live_queues: dict[Key, LiveQueue] = {}
        self._pending: dict[Key, _Pending] = {}
        # Queues whose newest notes are not applied yet and may still be lost, with the log position after these notes.
        self._unconfirmed: dict[Key, int] = {}
        # Queues that were dropped, until the projection has dropped them too; and the dropped queues that are not noted
        # yet.
        self._dropped: dict[Key, None] = {}
        self._undropped: dict[Key, None] = {}
        # Positions that groups have reached, by queue: first those whose earlier notes are not written yet, then those
        # whose earlier notes, up to a position of the log, are not durable yet.
        self._positions_to_note: dict[Key, int] = {}
        self._positions_waiting: deque[tuple[int, dict[Key, int]]] = deque()
        # The offset that the journal must have reached, unless a commit failed.
        self._end_expected = 0
        # Queues whose complete state was noted while an acknowledgement in an atomic group was in progress.
        self._noted_settling: dict[Key, None] = {}
        self._number_max = 0
        self._is_registered = False
        state.note_again = self._note_again
        state.was_dropped = self._was_dropped

    def has_room(self, key: Key, queues: int) -> bool:
        """Return whether there is room for the *queues* of the group of *key* on its topic.

        Each group counts with all queues: a group that finds messages by their names opens a queue when it needs it.
        """
        known_queues = self._state.known
        count = known_queues.count_with(key.topic, queues)
        return known_queues.count_of(key.scope, key.group, key.topic) > 0 or count + queues <= self._queues_max

    def check_room(self, key: Key, queues: int) -> None:
        """Raise `Refused` (BUSY) unless `has_room`."""
        if not self.has_room(key, queues):
            used = self._state.known.count_with(key.topic, queues)
            text = f"{used} queues of shared groups are in use; delivery.share_queues_max is {self._queues_max}"
            raise Refused(Reason.BUSY, f"{text}, delete unused groups or topics")

    def stored(self, key: Key) -> GroupQueueState | None:
        """Return the stored state of *key*; None if it was dropped. Do not change or keep it."""
        return self._state.get(key) if key not in self._dropped else None

    def is_applied(self, key: Key) -> bool:
        """Return whether the stored state of *key* includes everything that was noted."""
        return key not in self._pending and self._unconfirmed.get(key, 0) <= self._state.applied

    @property
    def is_dropping(self) -> bool:
        """Whether the stored state still has queues that were dropped."""
        return bool(self._dropped)

    def open(self, key: Key, source: LiveQueue) -> None:
        """Use *source* as the live state of *key*."""
        self._live_queues[key] = source

    def close(self, key: Key) -> None:
        """End the live state of *key*; its stored state remains."""
        self._compute_pending(key)
        self._live_queues.pop(key, None)

    def note(self, key: Key, change: Change) -> None:
        """Note *change* of *key* with the current commit."""
        self._get_pending(key).add(change)

    def ack(self, key: Key, offsets: Iterable[int]) -> None:
        """Note that messages are settled."""
        pending = self._pending.get(key) or self._get_pending(key)
        acked = pending.acked
        if acked is None:
            acked = pending.begin_acks()
            self._store.committer.commit_soon()
        acked.extend(offsets)

    def begin(self, key: Key, offset: int, reached: int = -1, marks: int = 0) -> None:
        """Note that the queue begins at *offset*, and has no other state.

        *reached* is the position that its group has reached, *marks* are the group's marks.
        """
        self._get_pending(key).replace(whole(offset, (), reached, marks))
        self._note_known(key)

    def begin_with(self, key: Key, next_offset: int, leases: Mapping[int, LeaseState]) -> None:
        """Note that the queue continues at *next_offset*, and has *leases*."""
        self._get_pending(key).replace(whole(next_offset, leases.items()))
        self._note_known(key)

    def _note_known(self, key: Key) -> None:
        self._state.known.add(key)
        self._dropped.pop(key, None)
        self._undropped.pop(key, None)

    def mark(self, key: Key, marks: int) -> None:
        """Note that the group with the stored queue *key*, its first one, has *marks* from now on."""
        if key in self._state.known:
            self.note(key, Change(MARK, number=marks))

    def reach(self, key: Key, position: int) -> None:
        """Note later that a group has found all its messages before log position *position*.

        The notes about these messages must be durable first: if a power failure lost one of them and kept the position,
        the message would be lost. So `note_reached` writes the position once they are durable.
        """
        self._positions_to_note[key] = position
        self._commit_soon()

    def note_reached(self) -> None:
        """Note the positions passed to `reach` whose earlier notes are durable."""
        self._find_lost()
        while self._positions_waiting and self._positions_waiting[0][0] <= self._store.flusher.durable:
            for key, position in self._positions_waiting.popleft()[1].items():
                live, stored = self._live_queues.get(key), self.stored(key)
                if live is not None and live.reached < position:
                    live.reached = position
                    self.note(key, Change(REACH, number=position))
                elif live is None and stored is not None and 0 <= stored.reached < position:
                    self.note(key, Change(REACH, number=position))

    @property
    def has_reached(self) -> bool:
        """Whether `note_reached` has work, now or later."""
        return bool(self._positions_to_note or self._positions_waiting)

    def is_durable(self, key: Key) -> bool:
        """Return whether everything that was noted of *key* is applied and durable."""
        return self.is_applied(key) and self._state.applied <= self._store.flusher.durable

    def drop(self, keys: Collection[Key]) -> None:
        """Drop the state of *keys*. A queue that begins again before the drop is applied has none of that state.

        Many are noted in several turns, with `drop_some`; a restart before that restores them.
        """
        for key in keys:
            self._state.known.discard(key)
            self._live_queues.pop(key, None)
        recorded = dict.fromkeys(key for key in keys if key in self._numbers or self._state.get(key) is not None)
        self._dropped.update(recorded)
        self._undropped.update(recorded)
        self.drop_some()

    @property
    def has_undropped(self) -> bool:
        """Whether there are dropped queues that are not noted yet."""
        return bool(self._undropped)

    def drop_some(self) -> None:
        """Note some of the dropped queues."""
        for key in list(islice(self._undropped, DROPS_A_TURN)):
            del self._undropped[key]
            self._noted_settling.pop(key, None)
            self._get_pending(key).replace([Change(DROP)])

    def _was_dropped(self, key: Key) -> None:
        """Handle that the projection has dropped a queue, which may have begun again since."""
        if key not in self._numbers:
            self._state.known.discard(key)
        if key not in self._undropped and self.is_applied(key):
            self._dropped.pop(key, None)

    def settle(self, key: Key, offsets: Sequence[int], began: int) -> list[tuple[Journal, bytes]]:
        """Return the notes for `Broker.publish_all` that acknowledge the messages at *offsets*.

        All earlier notes are written to the log first. If a power failure loses them but not these notes, the queue is
        restored as it *began*: every message from there on is delivered again, except the acknowledged ones.
        """
        first = head(self._get_pending(key).number, key)
        self._write_notes()
        change = Change(SETTLE, 0, 0, began, offsets)
        return [(self.journal, note) for note in encode_changes(first, [change], self.journal.note_bytes_max, first)]

    def _get_pending(self, key: Key) -> _Pending:
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(self._number_of(key), key)
            self._commit_soon()
        return pending

    def _number_of(self, key: Key) -> int:
        number = self._numbers.get(key)
        if number is None:
            stored = self._state.get(key)
            self._number_max = max(self._number_max, self._state.number_max)
            if stored is None:
                self._number_max += 1
            number = self._numbers[key] = stored.number if stored is not None else self._number_max
        return number

    def _commit_soon(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            self._store.committer.before_commit.append(self._write)
            self._store.committer.commit_soon()

    def _write(self) -> None:
        """Write the collected notes; called by the commit."""
        self._is_registered = False
        self._write_notes()

    def _write_notes(self) -> None:
        for key in self._pending:
            live = self._live_queues.get(key)
            if live is not None:
                live.account()
        try:
            self._store.admission.check()
        except (Refused, StoreFailed):
            self._keep_for_later()
            return
        self._find_lost()
        pending, self._pending = self._pending, {}
        if pending:
            self._end_expected = NEVER  # until all notes below are appended
            self._unconfirmed.update(dict.fromkeys(pending, NEVER))
            for changes in pending.values():
                for note in self._encode(changes):
                    self.journal.note(note)
            self.journal.write()
            queue = self._store.queue(self.journal.topic, 0)
            self._end_expected = queue.next_offset
            self._unconfirmed.update(dict.fromkeys(pending, queue.last_end))
        if self._positions_to_note:
            notes_end = max(self._unconfirmed.values(), default=self._state.applied)
            self._positions_waiting.append((notes_end, self._positions_to_note))
            self._positions_to_note = {}

    def _encode(self, pending: _Pending) -> list[bytes]:
        number, key = pending.number, pending.key
        changes, live = pending.changes, self._live_queues.get(key)
        if pending.is_whole and live is not None:
            if live.is_settling:
                self._noted_settling[key] = None
            changes = whole(*live.state())
        if changes and changes[-1].kind == DROP:
            self._numbers.pop(key, None)
        short_head = head(number)
        first_head = head(number, key) if changes and changes[0].kind == BEGIN else short_head
        return encode_changes(first_head, changes, self.journal.note_bytes_max, short_head)

    def _find_lost(self) -> None:
        """After a failed commit, note the complete state of queues whose last notes were not stored."""
        if not self._unconfirmed:
            return
        applied = self._state.applied
        self._unconfirmed = {key: end for key, end in self._unconfirmed.items() if end > applied}
        queue = self._store.queues.find(self.journal.topic, 0)
        if queue is None or queue.next_offset < self._end_expected:
            self._positions_to_note.clear()
            self._positions_waiting.clear()
            for key in self._unconfirmed:
                self._note_whole_later(key)

    def try_again(self) -> None:
        """Write the notes that could not be written before, if the store accepts them now."""
        self._find_lost()
        for key in list(islice(self._dropped, DROPS_A_TURN)):
            del self._dropped[key]
            if key in self._undropped or not self.is_applied(key):
                self._dropped[key] = None  # after the queues that were not looked at yet
        if self._pending:
            self._store.committer.commit_soon()

    def _note_whole_later(self, key: Key) -> None:
        if key in self._live_queues:
            self._get_pending(key).is_whole = True
        elif key in self._dropped:
            self._get_pending(key).replace([Change(DROP)])

    def _keep_for_later(self) -> None:
        """Note the complete state of the queues later, because the store accepts no writes now."""
        for pending in self._pending.values():
            if pending.key in self._live_queues:
                pending.replace([], again=True)
        if self._pending and not self._is_registered:
            self._is_registered = True
            self._store.committer.before_commit.append(self._write)

    def _compute_pending(self, key: Key) -> None:
        """Compute the pending changes of *key* while its source still exists."""
        pending, live = self._pending.get(key), self._live_queues.get(key)
        if pending is not None and pending.is_whole and live is not None:
            pending.replace(whole(*live.state()))

    def must_note_settled(self, key: Key) -> bool:
        """Return whether messages settled by an atomic group must be noted again: a later note calls them unsettled."""
        return key in self._noted_settling

    def _note_again(self, queue: GroupQueueState) -> bool:
        self._store.admission.check()
        if queue.key in self._dropped:
            return True
        live = self._live_queues.get(queue.key)
        if live is not None and live.is_settling:
            return False  # the note would undo the acknowledgement, which precedes it in the log
        if live is not None:
            self._get_pending(queue.key).is_whole = True
        elif not self.is_applied(queue.key):
            return False
        else:
            self._get_pending(queue.key).replace(whole(queue.next, queue.leases.items(), queue.reached, queue.marks))
        return True
