"""The deadlines of all connections in one heap, watched by one task."""

import heapq
import math
from collections.abc import Callable
from typing import Final, final

import trio

from martlet.net.peer import CLOSED, CLOSING, ServerPeer

__all__ = ["Deadlines"]

SLACK: Final = 64  # entries of closed connections that are tolerated before a cleanup
# Thousands that connected together are silent together; each takes up to 0.1 ms, and up to 0.5 ms if it is read first.
PASSED_A_TURN: Final = 16


@final
class Deadlines:
    """Calls *passed* with a peer and the current time once `Connection.deadline` may have passed."""

    def __init__(self, passed: Callable[[ServerPeer, float], None]) -> None:
        self._passed = passed
        self._heap: list[tuple[float, int, ServerPeer]] = []
        self._number = 0
        self._forget_at = SLACK
        self._changed = trio.Event()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, peer: ServerPeer) -> None:
        """Watch the deadline of *peer*, if it is earlier than the one already watched."""
        deadline = peer.connection.deadline()
        if deadline < peer.alarm and peer.state < CLOSING:
            peer.alarm = deadline
            self._number += 1
            if len(self._heap) > self._forget_at:
                self._forget_closed()
            heapq.heappush(self._heap, (deadline, self._number, peer))
            if self._heap[0][2] is peer:
                self._changed.set()

    def _forget_closed(self) -> None:
        """Drop the entries of closed peers, which would keep their memory alive."""
        self._heap = [entry for entry in self._heap if entry[2].state is not CLOSED]
        heapq.heapify(self._heap)
        self._forget_at = SLACK + 2 * len(self._heap)

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            deadline = self._heap[0][0] if self._heap else math.inf
            with trio.move_on_at(deadline):
                await self._changed.wait()
            self._changed = trio.Event()
            await trio.lowlevel.checkpoint()  # tasks that can read from their peers note that first
            now = trio.current_time()
            due: list[ServerPeer] = []
            while self._heap and self._heap[0][0] <= now:
                due.append(heapq.heappop(self._heap)[2])
            for number, peer in enumerate(due, 1):
                peer.alarm = math.inf
                self._passed(peer, now)
                if number % PASSED_A_TURN == 0:
                    await trio.lowlevel.checkpoint()
