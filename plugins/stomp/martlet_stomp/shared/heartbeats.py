"""Heart-beats to all clients that want them: a line end whenever nothing else was sent for long enough."""

import heapq
import math
from itertools import count
from typing import Final, final

import trio

from martlet.contracts import Peer

__all__ = ["Beat", "Heartbeats"]

# A heart-beat leaves a little before it is due, so that it is not late on a busy machine.
EARLY: Final = 0.95
BEATS_A_TURN: Final = 256  # 15 to 20 us each, most of it for the socket
STALE_MIN: Final = 64
BEAT: Final = b"\n"


@final
class Beat:
    """The heart-beats to one client; set ``sent_at`` when something is sent."""

    __slots__ = ("interval_s", "is_over", "peer", "sent_at")

    def __init__(self, peer: Peer, interval_s: float) -> None:
        self.peer = peer
        self.interval_s = interval_s * EARLY
        self.sent_at = trio.current_time()
        self.is_over = False

    @property
    def due(self) -> float:
        """When to send the next one."""
        return self.sent_at + self.interval_s


@final
class Heartbeats:
    """Those to all clients."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Beat]] = []  # the first number is not later than the heart-beat is due
        self._numbers = count()
        self._over = 0  # in the heap
        self._rung = trio.Event()
        self.sent = 0

    def __len__(self) -> int:
        """The number of clients that get heart-beats."""
        return len(self._heap) - self._over

    def begin(self, peer: Peer, interval_ms: int) -> Beat:
        """Send heart-beats to *peer* until `end`, not more than *interval_ms* apart."""
        beat = Beat(peer, interval_ms / 1000)
        self._push(beat.due, beat)
        if self._heap[0][2] is beat:
            self._rung.set()
        return beat

    def end(self, beat: Beat) -> None:
        """Send no more."""
        if not beat.is_over:
            beat.is_over = True
            self._over += 1
            if self._over > STALE_MIN + len(self):
                self._heap = [each for each in self._heap if not each[2].is_over]
                heapq.heapify(self._heap)
                self._over = 0

    def _push(self, due: float, beat: Beat) -> None:
        heapq.heappush(self._heap, (due, next(self._numbers), beat))

    async def run(self) -> None:
        """Send them on time, until cancelled."""
        while True:
            with trio.move_on_at(self._heap[0][0] if self._heap else math.inf):
                await self._rung.wait()
            self._rung = trio.Event()
            self._beat_some(trio.current_time())
            await trio.lowlevel.checkpoint()

    def _beat_some(self, now: float) -> None:
        left = BEATS_A_TURN
        while self._heap and self._heap[0][0] <= now and left:
            looked_at, _, beat = heapq.heappop(self._heap)
            if beat.is_over:
                self._over -= 1
                continue
            if beat.due <= now:
                left -= 1
                self.sent += 1
                beat.peer.send(BEAT)
                # Not from now on: what is a little late must not make all later ones late.
                beat.sent_at = max(looked_at, now - beat.interval_s / 2)
            self._push(beat.due, beat)
