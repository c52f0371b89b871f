"""The end of a round: one commit, one flush request, the answers of all peers, and one pass over the woken ones.

The order matters: records appended in a round are committed first, and only then their answers are queued or held, so
that no answer leaves without its commit. Records that woken peers append while they collect are committed in the same
way, once for all of them. Held answers leave in the step in which the flusher advances, without waking a task for each
peer; if thousands of peers wait, the next rounds release the rest.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, final

import trio

from martlet.errors import MartletError, Refused
from martlet.net.peer import CLOSED, CLOSING, ServerPeer
from martlet.net.pending import IDLE, PendingWork, set_delivery
from martlet.settings import ServerConfig
from martlet.state.journal import NEXT_COMMIT
from martlet.store import Store
from martlet.store.append.current_sync import SyncWatcher

__all__ = ["Rounds", "TurnNumber"]

log = logging.getLogger("martlet.server")

COLLECTS_A_ROUND: Final = 64
# Time in which all rounds of one turn of the event loop may collect together; the last peer may exceed it by a few ms.
# A turn has up to four rounds: those of the pump, a task that reads, the flusher and `Rounds.run`.
COLLECT_S: Final = 0.003
COLLECT_LAST_S: Final = 0.0  # the same for peers woken by `wake_last`: 0, so one of them per turn
RELEASES_A_ROUND: Final = 128  # peers whose held answers leave in one round; a send takes 10 to 20 us
# Divisor of each peer's collection budget while the total of unsent output is over its limit.
COLLECT_LESS: Final = 16
# A peer is closed once requests of other clients have queued this many times `unsent_bytes_max` for it.
PUSHED_MOST: Final = 32


@final
class TurnNumber(trio.abc.Instrument):
    """Counts turns of the event loop while installed as an instrument, for limits per turn instead of per call."""

    def __init__(self) -> None:
        self.number = 0

    def before_io_wait(self, timeout: float) -> None:
        """Handle the end of a turn."""
        self.number += 1


@final
class Rounds:
    """Ends rounds; `run` ends the rounds that no other code ends."""

    def __init__(
        self,
        config: ServerConfig,
        store: Store | None,
        pending: PendingWork[ServerPeer],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._config = config
        self._store = store
        self._pending = pending
        self._turn = TurnNumber()
        self.now = 0.0  # the time of this round, as of `trio.current_time`
        self._spent_s = 0.0  # time that rounds have spent on collecting ...
        self._spent_turn = 0  # ... in the turn with this number
        if store is not None:
            store.readable_end.on_moved.append(self._release_flushed)
            store.committer.on_commit_wanted = pending.want_commit
            pending.want_durable = store.flusher.want_durable

    @property
    def readable(self) -> int:
        """The log position up to which answers may be sent."""
        return self._store.readable if self._store is not None else 0

    @property
    def committed(self) -> int:
        """The end of the log if all appended records are committed, otherwise a value greater than every position."""
        return NEXT_COMMIT if self._store is None or self._pending.commit_wanted else self._store.written

    @contextmanager
    def flushes_watched(self, pump: SyncWatcher) -> Generator[None]:
        """Let *pump* handle the end of each flush in a round."""
        flusher = self._store.flusher if self._store is not None else None
        if flusher is not None:
            flusher.sync.watch(pump)
        try:
            yield
        finally:
            if flusher is not None:
                flusher.sync.unwatch()

    def begin(self) -> None:
        """Begin a round. The caller must end it before it waits for anything, also after an error."""
        self._pending.in_round = True
        self.now = trio.current_time()

    def end(self) -> None:
        """Commit, send answers, and call `Handler.collect` of woken peers, a limited number of them."""
        pending = self._pending
        pending.in_round = True
        try:
            self._commit()
            self._queue_output()
            if pending.woken:
                self._collect_in_turn()
            if pending.woken_last:
                self._collect_woken(pending.woken_last, COLLECT_LAST_S)
            if pending.releasing:
                self._release_held()
        finally:
            pending.in_round = False
        if pending.woken or pending.woken_last or pending.touched or pending.commit_wanted or pending.releasing:
            pending.due.set()

    def _commit(self) -> None:
        """Commit the records appended since the last commit, if there are any; what must come before comes first."""
        if self._pending.before_commit:
            self.call_before_commit()
        if self._store is None or not self._pending.commit_wanted:
            return
        self._pending.commit_wanted = False
        try:
            self._store.committer.commit()
        except MartletError as error:
            self._drop_answers(self._store.written, error)

    def call_before_commit(self) -> None:
        """Do what handlers have put off until the commit; an error closes the connection of the handler."""
        pending = self._pending
        while pending.before_commit:
            calls, pending.before_commit = pending.before_commit, []
            for peer, call in calls:
                try:
                    call()
                except Exception as error:
                    peer.fail(error)

    def _drop_answers(self, written: int, error: MartletError) -> None:
        """Replace the answers of this round that acknowledge records beyond *written* by refusals, or close their
        peers.
        """
        touched = ((peer, peer.answers) for peer in self._pending.touched)
        not_stored = [
            (peer, answers) for peer, answers in touched if answers is not None and answers.hold_position > written
        ]
        for peer, answers in not_stored:
            if isinstance(error, Refused) and answers.refuse(written, error, peer.handler.refuse):
                continue
            log.error("%s closed and its answers dropped; %s", peer.shown, error)
            answers.cut(written)
            peer.output.note_progress()
            if isinstance(error, Refused):
                peer.send(peer.connection.farewell(error))
            peer.close(str(error))
        if not not_stored:
            log.error("messages without a waiting client were not stored; %s", error)

    def _queue_output(self) -> None:
        """Send the answers of this round, or hold them."""
        pending = self._pending
        while pending.touched:
            peers, pending.touched = pending.touched, []
            readable = self.readable
            for peer in peers:
                self._send_or_hold(peer, readable)

    def queue_output(self, peer: ServerPeer) -> None:
        """Send the answers of *peer* in this round, or hold them."""
        self._send_or_hold(peer, self.readable)

    def _send_or_hold(self, peer: ServerPeer, readable: int) -> None:
        """Send the answers of *peer* in this round, or hold those that depend on the log beyond *readable*."""
        answers, peer.answers = peer.answers, None
        if peer.state is CLOSED:
            return
        output = peer.output
        if answers is not None and answers.pieces:
            position, unsent = answers.hold_position, output.unsent_bytes
            if position == NEXT_COMMIT:
                position = self.committed
            if not unsent and position <= readable and output.blocked is None and output.tls_border is None:
                peer.send_now(answers)
                return
            if position > readable:
                output.hold(answers, position)
                self._pending.held[peer] = None
                self._pending.want_durable(position)
            else:
                output.add(answers)
            if unsent > self._config.unsent_bytes_max:
                self._check_pushed(peer)
        if output.ready and not output.draining:
            peer.push()
        elif output.blocked:
            peer.shared.blocked(peer)

    def _check_pushed(self, peer: ServerPeer) -> None:
        """Close *peer* if other clients have queued far too much output for it while it had no room."""
        waiting = peer.output.unsent_bytes
        if waiting > PUSHED_MOST * self._config.unsent_bytes_max:
            peer.lose(TimeoutError(f"{waiting} bytes are queued for it and it does not read them"))

    # delivery to peers that were woken

    def _collect_in_turn(self) -> None:
        """Collect until the time for collecting in this turn of the event loop is used up."""
        if self._spent_turn != self._turn.number:
            self._spent_turn, self._spent_s = self._turn.number, 0.0
        if self._spent_s < COLLECT_S:
            began_s = self._clock()
            self._collect_woken(self._pending.woken, COLLECT_S - self._spent_s)
            self._spent_s += self._clock() - began_s

    def _collect_woken(self, woken: deque[ServerPeer], limit_s: float) -> None:
        """Call `Handler.collect` of *woken* peers, a limited number at a time; slowed peers and those without room
        wait.
        """
        count, collected = min(COLLECTS_A_ROUND, len(woken)), 0
        end_s = self._clock() + limit_s if count > 1 else 0.0
        for left in reversed(range(count)):
            peer = woken.popleft()
            if peer.state >= CLOSING:
                set_delivery(peer, IDLE)
            elif peer.output.draining or peer.over or (peer.own_pace is not None and peer.own_pace.holds):
                self._pending.defer(peer)
            else:
                size_before = peer.answers.size if peer.answers is not None else 0
                self._collect(peer, collected)
                collected += (peer.answers.size if peer.answers is not None else 0) - size_before
                if left and self._clock() >= end_s:
                    break
        self._commit()
        self._queue_output()

    def _collect(self, peer: ServerPeer, collected: int) -> None:
        """Call `Handler.collect` of *peer*; *collected* is the number of bytes that others have collected in this
        round.
        """
        set_delivery(peer, IDLE)
        config = self._config
        is_over_limit = self._pending.unsent_bytes + collected > config.unsent_total_bytes_max
        try:
            peer.handler.collect(config.collect_bytes // COLLECT_LESS if is_over_limit else config.collect_bytes)
        except MartletError as error:
            peer.close(str(error))
        except Exception as error:
            peer.fail(error)

    # held answers

    def _release_flushed(self) -> None:
        """Send the answers that waited for the completed flush."""
        pending = self._pending
        if pending.held:
            self._release_held()
        if pending.in_round:
            return
        if pending.woken:
            self.end()
        elif pending.releasing:
            pending.due.set()

    def _release_held(self) -> None:
        """Release held answers that need no longer wait for the log, of a bounded number of peers."""
        pending, readable = self._pending, self.readable
        pending.releasing = False
        releases_left = RELEASES_A_ROUND
        for peer in list(pending.held):
            if peer.output.held_position > readable:
                continue
            if not releases_left:
                pending.releasing = True
                return
            releases_left -= 1
            if peer.output.release(readable):
                pending.held.pop(peer, None)
            if peer.output.ready and not peer.output.draining:
                peer.push()
            elif peer.output.blocked:
                peer.shared.blocked(peer)
            if peer.delivery is not IDLE and not peer.output.draining:
                pending.resume(peer)

    async def run(self) -> None:
        """End rounds of work outside of socket reads, and continue rounds with too many woken peers."""
        pending = self._pending
        trio.lowlevel.add_instrument(self._turn)
        try:
            while True:
                await pending.due.wait()
                pending.due = trio.Event()
                self.end()
                await trio.lowlevel.checkpoint()
        finally:
            trio.lowlevel.remove_instrument(self._turn)
