"""Writes the notes about sessions, and detects the notes that a failed commit lost.

The notes of a round become part of its commit. If that fails, they are lost: their sessions return to the stored state,
which is known once everything written before the failure is readable and applied.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, final

import trio

from martlet.errors import Refused, StoreError
from martlet.sessions.journal_codec import DEPENDENT, INDEPENDENT, SessionState, encode_note, next_number
from martlet.state.journal import Journal
from martlet.store import Store

__all__ = ["SessionJournalWriter"]

# After every offset of the journal.
NEVER: Final = 1 << 62


@final
class SessionJournalWriter:
    """The notes of all sessions on their way to the log.

    ``on_lost`` is called with the key of a session whose notes were lost.
    """

    def __init__(self, store: Store, journal: Journal) -> None:
        self.journal = journal
        self.on_lost: Callable[[str], None] = lambda key: None
        # Returns whether the table of sessions includes everything that is readable, and a function that waits for
        # that; set by the broker.
        self.is_current: Callable[[], bool] = lambda: True
        self.wait_current: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint
        self._store = store
        # Keys with a note in the current commit, and in the previous one.
        self._noted: dict[str, None] = {}
        self._unconfirmed: dict[str, None] = {}
        self._is_registered = False
        # The end that the journal must have reached with the previous commit; a lower end shows that this commit
        # failed.
        self._end_expected = 0
        # The store's count of undone appends before the first note of the current commit.
        self._undone = 0
        # Sessions whose last notes were lost, with the log position that the table must reach to show the remaining
        # state.
        self.restored: dict[str, int] = {}

    # notes

    def note(self, state: SessionState, kind: int, *arguments: Any) -> None:
        """Note the next change of *state*; do not make the change if this raises `Refused`."""
        marked = kind if kind in DEPENDENT else kind | INDEPENDENT
        self.write(state.key, encode_note(marked, state.key, next_number(state.number), *arguments))

    def write_all(self, key: str, notes: Sequence[tuple[Journal, bytes]]) -> None:
        """Note changes of session *key*, which were encoded before. Raises `Refused`."""
        for _, note in notes:
            self.write(key, note)

    def write(self, key: str, note: bytes) -> None:
        """Add an encoded *note* about session *key* to the current commit. Raises `Refused`."""
        store = self._store
        if store.admission.refusal or store.flusher.failed is not None:
            store.admission.check()  # refused here, a note loses nothing
        self.watch(key)
        try:
            self.journal.note(note)
        except (Refused, StoreError):
            self._end_expected = NEVER  # earlier notes may be lost
            raise

    def watch(self, key: str) -> None:
        """Record that session *key* has a note in the current commit; the client loses it if that fails."""
        self._noted[key] = None
        if not self._is_registered:
            self._is_registered = True
            self._undone = self._store.committer.undone
            self._store.committer.before_commit.append(self._commit)

    def _commit(self) -> None:
        """Write the collected notes; called by the commit."""
        self._is_registered = False
        self._unconfirmed, self._noted = self._noted, {}
        expected, self._end_expected = self._end_expected, NEVER
        self.journal.write()
        if expected < NEVER and self._undone == self._store.committer.undone:
            self._end_expected = self._journal_end()

    def _journal_end(self) -> int:
        queue = self._store.queues.find(self.journal.topic, 0)
        return queue.next_offset if queue is not None else 0

    # lost notes

    def find_lost(self) -> None:
        """After a failed commit, end the use of sessions whose notes were lost."""
        if self._is_registered or (self._end_expected < NEVER and self._undone == self._store.committer.undone):
            return
        if self._journal_end() >= self._end_expected:
            return
        self._end_expected = 0
        unsure, self._unconfirmed = self._unconfirmed, {}
        for key in unsure:
            self.on_lost(key)

    def restore(self, key: str) -> None:
        """Record that notes of session *key* were lost: its state is the table's, once the table is current."""
        if self._store.readable < self._store.written or not self.is_current():
            self.restored[key] = self._store.written
            self._store.flusher.want_durable(self._store.written)

    def is_settled(self, key: str) -> bool:
        """Return whether the state of session *key* is known; it is not for a moment after a failed commit."""
        end = self.restored.get(key)
        if end is None:
            return True
        if self._store.readable < end or not self.is_current():
            return False
        del self.restored[key]
        return True

    def settle(self) -> None:
        """Forget the losses of sessions whose state is known again."""
        for key in list(self.restored):
            self.is_settled(key)

    async def wait_settled(self, key: str) -> None:
        """Wait until the state of session *key* is known. Raises `StoreFailed`."""
        self.find_lost()
        while not self.is_settled(key):
            await self._store.flusher.wait_flushed(self._store.written)
            await self.wait_current()
            self.find_lost()
