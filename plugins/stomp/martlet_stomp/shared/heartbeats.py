"""Heart-beats to all clients that want them: a line end whenever nothing else was sent for long enough."""

from itertools import islice
from typing import Final, final

import trio

from martlet.contracts import Peer
from martlet.runtime.alarms import Alarms
from martlet.runtime.steps import per_slice

__all__ = ["Beat", "Heartbeats"]

# A heart-beat leaves a little before it is due, so that it is not late on a busy machine.
EARLY: Final = 0.95
BEATS_A_TURN: Final = per_slice(us=16)  # most of it for the socket
BEAT: Final = b"\n"


@final
class Beat:
    """The heart-beats to one client; set ``sent_at`` when something is sent."""

    __slots__ = ("interval_s", "peer", "sent_at")

    def __init__(self, peer: Peer, interval_s: float) -> None:
        self.peer = peer
        self.interval_s = interval_s * EARLY
        self.sent_at = trio.current_time()

    @property
    def due(self) -> float:
        """When to send the next one."""
        return self.sent_at + self.interval_s


@final
class Heartbeats:
    """Those to all clients."""

    def __init__(self) -> None:
        self._alarms: Alarms[Beat] = Alarms()  # none is later than the heart-beat is due
        self._rung = trio.Event()
        self.sent = 0

    def __len__(self) -> int:
        """The number of clients that get heart-beats."""
        return len(self._alarms)

    def begin(self, peer: Peer, interval_ms: int) -> Beat:
        """Send heart-beats to *peer* until `end`, not more than *interval_ms* apart."""
        beat = Beat(peer, interval_ms / 1000)
        if self._alarms.ring_by(beat, beat.due):
            self._rung.set()
        return beat

    def end(self, beat: Beat) -> None:
        """Send no more."""
        self._alarms.cancel(beat)

    async def run(self) -> None:
        """Send them on time, until cancelled."""
        while True:
            with trio.move_on_at(self._alarms.next_at):
                await self._rung.wait()
            self._rung = trio.Event()
            self._beat_some(trio.current_time())
            await trio.lowlevel.checkpoint()

    def _beat_some(self, now: float) -> None:
        for due, beat in islice(self._alarms.take(now), BEATS_A_TURN):
            if beat.due <= now:
                self.sent += 1
                beat.peer.send(BEAT)
                # Not from now on: what is a little late must not make all later ones late.
                beat.sent_at = max(due, now - beat.interval_s / 2)
            self._alarms.ring_by(beat, beat.due)
