"""Reading from one connection by the pump, without a task of its own while it only waits."""

from collections.abc import Callable, Iterator
from typing import Any, final

from martlet.net.event_pump import EventPump
from martlet.net.peer import ServerPeer

__all__ = ["Reading"]


@final
class Reading:
    """The state of reading from one peer by the pump.

    ``attend`` is called when the pump cannot go on: the first bytes are not the protocol's own, a request must wait,
    the output has no room, or the connection ends. It may call `watch` when the pump can.
    """

    __slots__ = (
        "_attend",
        "_fd",
        "_pump",
        "attended",
        "closed",
        "ended",
        "events",
        "first",
        "in_round",
        "now",
        "peer",
        "plain",
        "received",
    )

    def __init__(
        self, peer: ServerPeer, pump: "EventPump[Reading]", fd: int, attend: Callable[["Reading"], None]
    ) -> None:
        self.peer = peer
        self._pump = pump
        self._fd = fd
        self._attend = attend
        self.attended = False  # whether `attend` was called since `watch`
        self.in_round = False  # whether the pump reads right now, and looks afterwards whether it can go on
        self.plain = False  # whether the first bytes were the protocol's own
        self.first: bytes | None = None  # the first bytes, if they were not
        self.events: Iterator[Any] | None = None  # the remaining events of a read that must wait
        self.received = 0  # size of that read
        self.now = 0.0  # time of that read
        self.ended = False  # the pump has read the end, or the last request
        self.closed = False  # the socket was closed on our side

    def watch(self) -> None:
        """Let the pump read from now on."""
        self.attended = False
        self._pump.watch(self._fd, self)

    def stop(self) -> None:
        """Read no more, and have somebody attend to the peer."""
        self._pump.unwatch(self._fd, self)
        if not self.attended and not self.in_round:
            self.attended = True
            self._attend(self)

    def close(self) -> None:
        """Prepare for the closing of the socket."""
        self.closed = True
        self.stop()
