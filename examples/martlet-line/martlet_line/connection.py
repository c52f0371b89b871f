"""One connection as a state machine: bytes to commands, in the states of the table below.

After a long silence the broker sends PING, and any command answers it. Nothing is read
after QUIT.
"""

import math
from collections.abc import Iterable
from enum import Enum, unique
from typing import Final, TypeAlias, final

from martlet.errors import RemoteProtocolError
from martlet_line.codec import Limits, announced, check_line_bytes, decode, encode_error
from martlet_line.packets import (
    Ack,
    Command,
    Credit,
    Extend,
    Help,
    Idle,
    Login,
    Malformed,
    Nack,
    Ping,
    Pong,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

__all__ = ["TRANSITIONS", "Event", "LineConnection", "State"]

Event: TypeAlias = Command | Idle


@unique
class State(Enum):
    OPEN = "open"
    ASKED = "asked"  # it was silent, and we sent PING
    ENDED = "ended"


_ANYTIME: Final = (Publish, Subscribe, Unsubscribe, Credit, Ack, Nack, Extend, Login, Ping, Help, Malformed)

# All other combinations are illegal: answered with an error in OPEN and ASKED, not read in ENDED.
TRANSITIONS: Final[dict[tuple[State, type], State]] = {
    **{(State.OPEN, kind): State.OPEN for kind in _ANYTIME},
    **{(State.ASKED, kind): State.OPEN for kind in (*_ANYTIME, Pong)},
    (State.OPEN, Quit): State.ENDED,
    (State.ASKED, Quit): State.ENDED,
    (State.OPEN, Idle): State.ASKED,
    (State.ASKED, Idle): State.ENDED,
}


@final
class LineConnection:
    """The protocol of one connection (martlet.contracts.Connection)."""

    __slots__ = ("_buffer", "_events", "_heard", "_idle_s", "_limits", "_need", "state")

    def __init__(self, limits: Limits, idle_s: float) -> None:
        self._limits = limits
        self._idle_s = idle_s or math.inf
        self._buffer = bytearray()  # an incomplete command
        self._need = 0  # length of the complete command; 0 while its line is incomplete
        self._events: list[Event] = []
        self._heard = -math.inf
        self.state = State.OPEN

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def receive_data(self, data: bytes, now: float) -> None:
        self._heard = now
        if self.state is State.ENDED:
            return
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._need or (not self._need and b"\n" not in data):
                if not self._need:
                    check_line_bytes(len(self._buffer), self._limits)
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        commands, used = decode(data, self._limits)
        if used < len(data):
            self._keep(data[used:])
        for command in commands:
            self._advance(command)

    def _keep(self, rest: bytes) -> None:
        """Keep an incomplete command, and the length at which to parse it again."""
        self._buffer += rest
        end = rest.find(b"\n")
        self._need = 0 if end < 0 else end + 2 + announced(rest[:end], self._limits)

    def _advance(self, event: Event) -> None:
        state = TRANSITIONS.get((self.state, type(event)))
        if state is not None:
            self.state = state
            self._events.append(event)
        elif self.state is not State.ENDED:
            self._events.append(Malformed(f"{type(event).__name__.upper()}: nobody asked"))

    def events(self) -> Iterable[Event]:
        events, self._events = self._events, []
        return events

    def farewell(self, error: Exception) -> bytes:
        return encode_error("PROTOCOL", str(error))

    def deadline(self) -> float:
        if self.state is State.ENDED or self._idle_s == math.inf:
            return math.inf
        return self._heard + self._idle_s

    def handle_timeout(self, now: float) -> None:
        if self._heard == -math.inf:
            self._heard = now  # nothing received yet: count from the start of the connection
            return
        self._advance(Idle())
        if self.state is State.ENDED:
            self._events.clear()
            raise RemoteProtocolError(f"nothing was received for {2 * self._idle_s:g} s")
        self._heard = now
