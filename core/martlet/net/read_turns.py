"""Limits how many tasks that each read from one peer, or end one, run in one turn of the event loop.

When thousands of sockets become readable at the same moment, trio wakes all their tasks in one turn, and no other task
runs before the last of them is done. The event pump bounds this for plain sockets. Tasks of all other peers (TLS,
WebSocket, platforms without epoll) wait here before each read: first come, first served, a few a turn. So does every
peer before its end, because all clients of a machine may disconnect at once, and every socket that is closed once its
last answers were sent.
"""

from typing import Final, final

import trio

from martlet.runtime.steps import per_slice

__all__ = ["CLOSES_A_TURN", "ENDS_A_TURN", "READS_A_TURN", "ReadTurns"]

READS_A_TURN: Final = 8  # a TLS handshake takes up to a millisecond, any other read a tenth of that
CLOSES_A_TURN: Final = per_slice(us=50)  # of sockets whose last answers were sent
ENDS_A_TURN: Final = 2  # 0.1 ms each, 3 ms for a peer with 4,096 waiting pulls


@final
class ReadTurns(trio.abc.Instrument):
    """Lets *limit* callers of `wait` continue in each turn of the event loop, while `run` runs."""

    def __init__(self, limit: int = READS_A_TURN) -> None:
        self._limit = limit
        self._turns_left = limit
        self._waiting = trio.lowlevel.ParkingLot()
        self._has_waiting = trio.Event()
        # Whether this turn has already handled a slice of a read that is too large for one turn; one such slice is
        # allowed.
        self.had_large = False

    def before_io_wait(self, timeout: float) -> None:
        """Handle the end of a turn of the event loop."""
        self._turns_left = self._limit
        self.had_large = False

    async def wait(self) -> None:
        """Return when it is the caller's turn: at once unless many callers wait."""
        if self._turns_left > 0 and not self._waiting:
            self._turns_left -= 1
            return
        self._has_waiting.set()
        await self._waiting.park()

    async def run(self) -> None:
        """Let waiting callers continue, until cancelled."""
        trio.lowlevel.add_instrument(self)
        try:
            while True:
                await self._has_waiting.wait()
                self._has_waiting = trio.Event()
                while self._waiting:
                    await trio.lowlevel.checkpoint()
                    released = self._waiting.unpark(count=self._turns_left)
                    self._turns_left -= len(released)
        finally:
            trio.lowlevel.remove_instrument(self)
