"""Slower service of peers whose clients have used up a quota: the server pauses reading from them, or delivering.

Neither costs a usual connection anything. While a peer is not read, the transport's flow control stops the client, its
deadline does not come closer, and what it gets is still sent. Deliveries wait where they are, as for a client that
reads slowly, and continue when an alarm rings.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, Protocol, final

import trio

from martlet.net.pending import DeliveryState, PendingWork
from martlet.runtime.alarms import Alarms
from martlet.runtime.steps import per_slice

__all__ = ["RECEIVE_BYTES", "Paces", "PeerPace"]

RECEIVE_BYTES: Final = 262144
LONG_AGO: Final = 1e-9  # the end of a pause that is over, and not noticed yet; 0 is no pause
RESUMED_A_TURN: Final = per_slice(us=4)  # deliveries that continue in one turn of the event loop


class Paced(Protocol):
    """A peer, as its pace sees it; ``stops`` makes the reader look whether to go on."""

    stops: bool
    delivery: DeliveryState


@final
class PeerPace:
    """When one peer is served again; implements `martlet.contracts.Pace`."""

    __slots__ = (
        "_changed",
        "_deadline",
        "_excused",
        "_on_end",
        "_paces",
        "deliver_at",
        "has_ended",
        "holds",
        "peer",
        "read_at",
        "receive_bytes",
    )

    def __init__(self, peer: Paced, paces: "Paces", *, has_ended: bool) -> None:
        self.peer = peer
        self._paces = paces
        self.has_ended = has_ended
        self.receive_bytes = RECEIVE_BYTES
        self.read_at = 0.0  # the end of the pause of reading; 0 if there is none
        self.deliver_at = 0.0
        self.holds = False  # whether deliveries wait for `deliver_at`
        self._on_end: list[Callable[[], None]] = []
        self._changed: trio.Event | None = None  # while the end of the pause of reading is awaited
        # The deadline of the connection at the end of the last pause, and when it is due in spite of the pause.
        self._deadline = self._excused = 0.0

    def slow_reading(self, until: float) -> None:
        if until > self.read_at and not self.has_ended:
            self.read_at = until
            self.peer.stops = True

    def slow_delivery(self, until: float) -> None:
        if until > self.deliver_at and not self.has_ended:
            self.deliver_at = until
            self.holds = True
            self._paces.ring_at(self, until)

    def shorten(self, reading_until: float, delivery_until: float) -> None:
        if reading_until < self.read_at:
            self.read_at = max(reading_until, LONG_AGO)
            self._wake_reader()
        if delivery_until < self.deliver_at:
            self.deliver_at = delivery_until
            if self.holds:
                self._paces.ring_at(self, delivery_until)

    def _wake_reader(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def on_end(self, tell: Callable[[], None]) -> None:
        if self.has_ended:
            tell()
        else:
            self._on_end.append(tell)

    def end(self) -> None:
        """End the pauses, because the peer closes, and call what waits for that."""
        if self.has_ended:
            return
        self.has_ended = True
        self.holds = False
        self._paces.forget(self)
        self._wake_reader()
        tell_all, self._on_end = self._on_end, []
        for tell in tell_all:
            tell()

    def excuse(self, deadline: float) -> float:
        """Return when *deadline*, that of the connection, is due: pauses since the client was heard do not count."""
        return self._excused if deadline == self._deadline else deadline

    async def wait_reading(self, deadline: Callable[[], float]) -> None:
        """Return at the end of the pause of reading; *deadline* returns the connection's deadline."""
        began = trio.current_time()
        while trio.current_time() < self.read_at and not self.has_ended:
            self._changed = trio.Event()
            with trio.move_on_at(self.read_at):
                await self._changed.wait()
        self._changed = None
        self.read_at = 0.0
        before = deadline()
        self._excused = self.excuse(before) + trio.current_time() - began
        self._deadline = before


@final
class Paces:
    """Continues the deliveries of slowed peers on time, while `run` runs."""

    def __init__(self, pending: PendingWork[Any]) -> None:
        self._pending = pending
        self._alarms: Alarms[PeerPace] = Alarms()
        self._rung = trio.Event()

    def __len__(self) -> int:
        """The number of peers whose deliveries wait."""
        return len(self._alarms)

    def ring_at(self, pace: PeerPace, at: float) -> None:
        """Continue the deliveries of *pace* at *at*, or at its later `PeerPace.deliver_at`."""
        if self._alarms.ring_by(pace, at):
            self._rung.set()

    def forget(self, pace: PeerPace) -> None:
        """Do not ring for *pace*."""
        self._alarms.cancel(pace)

    async def run(self) -> None:
        """Continue deliveries until cancelled."""
        while True:
            with trio.move_on_at(self._alarms.next_at):
                await self._rung.wait()
            self._rung = trio.Event()
            now = trio.current_time()
            for _, pace in islice(self._alarms.take(now), RESUMED_A_TURN):
                if pace.deliver_at > now:  # it was slowed further
                    self._alarms.ring_by(pace, pace.deliver_at)
                else:
                    pace.holds = False
                    self._pending.resume(pace.peer)
            await trio.lowlevel.checkpoint()
