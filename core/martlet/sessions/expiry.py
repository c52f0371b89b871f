"""Ends sessions: at once, when their clients leave, or when they have been away for too long.

A sweep checks every session each minute. It also notes departures that could not be noted when a client left, and the
progress of connected clients.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, final

import trio

from martlet.errors import Refused, StoreError
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Budget, Steps
from martlet.runtime.turns import Turns
from martlet.sessions.journal_codec import NEVER_MS, SessionState
from martlet.sessions.session import JointChanges, LiveSessions, Session
from martlet.sessions.state import SessionTable
from martlet.store import Store

__all__ = ["SessionExpiry"]

log = logging.getLogger("martlet.sessions")

# Seconds between two sweeps over all sessions.
LOOK_S: Final = 60.0
OVERDUE_MS: Final = 3_600_000
# Overdue sessions end one by one, all of them within this time.
OVERDUE_S: Final = 86_400.0
# If a client's filters match little, its position is noted each time it has advanced by this distance; otherwise the
# client would have to read much of the log again after a crash.
DISTANCE_BYTES: Final = 64 << 20
# Cost of checking a session in a sweep; noting a session costs as much as checking LOOKS_A_NOTE of them.
LOOK_US: Final = 0.5
LOOKS_A_NOTE: Final = 40
# Protocol data that is handled at a session's end, per check: a will may have thousands of properties.
DATA_BYTES_A_LOOK: Final = 2


@final
class SessionExpiry:
    """Ends sessions: when asked, or, by `run`, when they have expired.

    ``ending`` has, by protocol, a function that is called when a session ends because its client is gone: with the note
    of its end, which it must store, alone or together with messages. If it raises `Refused`, it is called again later.
    """

    def __init__(self, live: LiveSessions, table: SessionTable, store: Store, turns: Turns, clock: Clock) -> None:
        live.leave = self.leave
        self.ending: dict[str, Callable[[JointChanges], None]] = {}
        self._live = live
        self._writer = live.writer
        self._table = table
        self._store = store
        self._turns = turns
        self._clock = clock
        self._overdue = 0
        # The time when the last overdue session ended (or the first was noticed), and the pause between two.
        self._overdue_from = 0.0
        self._overdue_pause_s = 0.0

    def is_over(self, state: SessionState, holder: Session | None) -> bool:
        """Return whether a session has expired; False if it is so overdue that the clock may have jumped."""
        if not state.expiry_s and (holder is None or holder.lost is None):
            return True  # it should have ended with its connection
        late_ms = self._clock.now_ms() - state.ends_ms
        return state.ends_ms > 0 and 0 <= late_ms < OVERDUE_MS

    def leave(self, session: Session) -> None:
        """Detach the client of *session*."""
        if not self._live.has(session):
            return
        session.lost = None
        try:
            self._note_left(session)
        except (Refused, StoreError) as error:
            position = session.reached()
            session.where = lambda: position  # the client and its cursor are gone
            log.debug("a sweep will note that the client of session %r left; %s", session.name, error)

    def _note_left(self, session: Session) -> None:
        """Note that the client of *session* left, or end it if it expires at once. Raises `Refused`."""
        state = session.state
        if not state.expiry_s:
            self.end(state)
            return
        ends_ms = self._clock.now_ms() + state.expiry_s * 1000 if state.expiry_s > 0 else NEVER_MS
        changes = JointChanges(state, self._live)
        changes.leave(session.reached(), ends_ms)
        changes.store()

    def end(self, state: SessionState) -> None:
        """End a session whose client is gone; its protocol stores the note of the end. Raises `Refused`."""
        changes = JointChanges(state, self._live)
        changes.end()
        self.ending.get(state.key.partition(" ")[0], JointChanges.store)(changes)

    # the sweep

    async def run(self) -> None:
        """End expired sessions, until cancelled."""
        while True:
            try:
                await self._turns.finish(self.sweep())
            except (Refused, StoreError) as error:
                log.warning("expired sessions cannot be ended, retrying in %g s; %s", LOOK_S, error)
            await trio.sleep(LOOK_S)

    def sweep(self) -> Steps[None]:
        """End expired sessions and note the positions of connected clients, in slices.

        A client that was connected when the broker was killed counts as leaving now.
        """
        self._writer.find_lost()
        self._writer.settle()
        refused: Counter[str] = Counter()
        budget = Budget(LOOK_US)
        now_ms = self._clock.now_ms()
        allowed, overdue = self._count_overdue_allowed(), 0
        for key in self._table:
            ends_ms = self._table.ends_ms(key)
            if key not in self._live.by_key and 0 <= ends_ms <= now_ms:
                is_overdue = 0 < ends_ms <= now_ms - OVERDUE_MS
                overdue += is_overdue
                if not is_overdue or overdue <= allowed:
                    budget.spend(LOOKS_A_NOTE + self._end_stored(key, refused) // DATA_BYTES_A_LOOK)
            if budget.is_over():
                yield
        self._note_overdue(overdue - min(allowed, overdue))
        for key, session in list(self._live.by_key.items()):
            self._note_progress(key, session, refused)
            if budget.is_over():
                yield
        for reason, count in refused.items():
            log.warning("%d sessions cannot be ended or moved on, retrying in %g s; %s", count, LOOK_S, reason)

    def _end_stored(self, key: str, refused: Counter[str]) -> int:
        """End a session that no client uses, or note that its client left if that is not stored.

        Returns the size of the protocol's data that was kept with the session.
        """
        self._writer.find_lost()
        state = self._table.get(key) if self._writer.is_settled(key) else None
        if state is None or key in self._live.by_key:
            return 0
        try:
            if state.ends_ms:
                self.end(state)
            else:
                self._note_left(Session(state, self._live))
        except Refused as error:
            refused[str(error)] += 1
        return len(state.data)

    def _note_progress(self, key: str, session: Session, refused: Counter[str]) -> None:
        """Note the progress of a client, or that it left; drop a detached session whose last note was lost."""
        self._writer.find_lost()
        if self._live.by_key.get(key) is not session:
            return  # noted in an earlier turn
        try:
            if session.lost is not None:
                position = session.reached()
                if position - session.position > DISTANCE_BYTES:
                    session.move(position)
            elif not (session.is_ended or session.state.ends_ms):
                self._note_left(session)  # it was refused when the client left
            elif session.doubted_at < 0:
                session.doubted_at = self._store.appended
            elif session.doubted_at <= self._store.readable and self._writer.is_current():
                del self._live.by_key[key]
        except Refused as error:
            refused[str(error)] += 1

    def _count_overdue_allowed(self) -> int:
        """Return the number of overdue sessions that may end now."""
        if not self._overdue:
            return 0
        count = int((trio.current_time() - self._overdue_from) / self._overdue_pause_s)
        self._overdue_from += count * self._overdue_pause_s
        return count

    def _note_overdue(self, count: int) -> None:
        """Note that *count* sessions are overdue although every session is checked each minute.

        Either the wall clock jumped or the broker was stopped for a long time; the two cannot be told apart. So the
        sessions end one by one, as `Retention` removes segments.
        """
        if count and not self._overdue:
            log.warning(
                "%d sessions are overdue by more than an hour: the clock jumped ahead or the broker was stopped for "
                "long; ending them one by one; if the clock is wrong, set it right",
                count,
            )
            self._overdue_from = trio.current_time()
            self._overdue_pause_s = OVERDUE_S / count
        self._overdue = count
