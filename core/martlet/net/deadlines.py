"""The deadlines of all connections, watched by one task."""

import math
from collections.abc import Callable
from itertools import islice
from typing import Final, final

import trio

from martlet.net.peer import CLOSING, ServerPeer
from martlet.runtime.alarms import Alarms
from martlet.runtime.steps import per_slice

__all__ = ["Deadlines"]

# Deadlines handled in one turn of the event loop: connections made together fall silent together. Each takes 0.1 to 0.2
# ms, and up to 0.5 ms if its peer is read first.
PASSED_A_TURN: Final = per_slice(us=120)


@final
class Deadlines:
    """Calls *passed* with a peer and the current time once `Connection.deadline` or ``expires_at`` may have passed."""

    def __init__(self, passed: Callable[[ServerPeer, float], None]) -> None:
        self._passed = passed
        self._alarms: Alarms[ServerPeer] = Alarms()
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._alarms)

    def watch(self, peer: ServerPeer) -> None:
        """Watch the deadline of *peer*, or the end of its login, if it is earlier than the one already watched."""
        at = peer.connection.deadline() if peer.own_pace is None else peer.deadline
        if peer.expires_at < at:
            at = peer.expires_at
        if at < peer.watched_at and peer.state < CLOSING:
            self._watch(peer, at)

    def _watch(self, peer: ServerPeer, at: float) -> None:
        peer.watched_at = at
        if self._alarms.ring_by(peer, at):
            self._changed.set()

    def watch_expiry(self, peer: ServerPeer) -> None:
        """As `watch`, for the end of the login alone."""
        if peer.expires_at < peer.watched_at and peer.state < CLOSING:
            self._watch(peer, peer.expires_at)

    def forget(self, peer: ServerPeer) -> None:
        """Stop watching *peer*."""
        peer.watched_at = math.inf
        self._alarms.cancel(peer)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            with trio.move_on_at(self._alarms.next_at):
                await self._changed.wait()
            self._changed = trio.Event()
            await trio.lowlevel.checkpoint()  # lets tasks with readable peers note that first
            now = trio.current_time()
            for _, peer in islice(self._alarms.take(now), PASSED_A_TURN):
                peer.watched_at = math.inf
                self._passed(peer, now)
