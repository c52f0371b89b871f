"""Heart-beats to clients that ask for them: a line end after each interval without another frame."""

from itertools import islice
from typing import Final, final

import trio

from martlet.contracts import Peer
from martlet.runtime.alarms import Alarms
from martlet.runtime.steps import per_slice

__all__ = ["Beat", "Heartbeats"]

# Part of the interval after which a heart-beat is sent: early, so that it is not late on a busy machine.
EARLY: Final = 0.95
BEATS_A_TURN: Final = per_slice(us=16)  # time for one heart-beat, most of it for the socket
BEAT: Final = b"\n"


@final
class Beat:
    """The heart-beats to one client; the caller sets ``sent_at`` whenever it sends a frame."""

    __slots__ = ("interval_s", "peer", "sent_at")

    def __init__(self, peer: Peer, interval_s: float) -> None:
        self.peer = peer
        self.interval_s = interval_s * EARLY
        self.sent_at = trio.current_time()

    @property
    def due(self) -> float:
        """The time of the next heart-beat, on trio's clock."""
        return self.sent_at + self.interval_s


@final
class Heartbeats:
    """The heart-beats to all clients."""

    def __init__(self) -> None:
        self._alarms: Alarms[Beat] = Alarms()  # each at or before the time of its heart-beat
        self._rung = trio.Event()
        self.sent = 0

    def __len__(self) -> int:
        """The number of clients that get heart-beats."""
        return len(self._alarms)

    def begin(self, peer: Peer, interval_ms: int) -> Beat:
        """Send heart-beats to *peer*, at most *interval_ms* apart, until `end`."""
        beat = Beat(peer, interval_ms / 1000)
        if self._alarms.ring_by(beat, beat.due):
            self._rung.set()
        return beat

    def end(self, beat: Beat) -> None:
        """Stop the heart-beats of *beat*."""
        self._alarms.cancel(beat)

    async def run(self) -> None:
        """Send heart-beats on time, until cancelled."""
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
                # `due`, not `now`: a late heart-beat must not delay all later ones.
                beat.sent_at = max(due, now - beat.interval_s / 2)
            self._alarms.ring_by(beat, beat.due)
