"""One client as a state machine: bytes to commands, in the states of the table below."""

import math
from collections.abc import Iterator
from enum import Enum, unique
from typing import Final, final

from martlet.errors import Refused, RemoteProtocolError
from martlet_topics.codec import Limits, announced, decode, encode_error
from martlet_topics.packets import (
    Acknowledge,
    Command,
    Forget,
    Hello,
    Ping,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

__all__ = ["TRANSITIONS", "State", "TopicsConnection"]


@unique
class State(Enum):
    NEW = "new"  # HELLO has to come
    OPEN = "open"
    ENDED = "ended"


# What is not here breaks the protocol, and after the end nothing is read.
TRANSITIONS: Final[dict[tuple[State, type], State]] = {
    (State.NEW, Hello): State.OPEN,
    (State.NEW, Quit): State.ENDED,
    (State.OPEN, Quit): State.ENDED,
    (State.OPEN, Forget): State.ENDED,
    **{(State.OPEN, kind): State.OPEN for kind in (Subscribe, Unsubscribe, Publish, Acknowledge, Ping)},
}


@final
class TopicsConnection:
    """The protocol of one client (martlet.contracts.Connection)."""

    __slots__ = ("_buffer", "_heard", "_idle_s", "_limits", "_need", "state")

    def __init__(self, limits: Limits, idle_s: float, now: float) -> None:
        self._limits = limits
        self._idle_s = idle_s or math.inf
        self._heard = now
        self._buffer = bytearray()
        self._need = 1  # bytes without which no command is complete
        self.state = State.NEW

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def receive_data(self, data: bytes, now: float) -> None:
        self._heard = now
        if self.state is not State.ENDED:
            self._buffer += data

    def events(self) -> Iterator[Command]:
        if len(self._buffer) < self._need:
            return
        data, at, size = bytes(self._buffer), 0, len(self._buffer)
        try:
            while self.state is not State.ENDED:
                newline = data.find(b"\n", at)
                if newline < 0:
                    self._need = 1
                    break
                line = data[at:newline]
                self._check(len(line))
                end = newline + 1 + announced(line, self._limits)
                if end > size:
                    self._need = end - at
                    break
                at = end
                yield self._advance(decode(line, data[newline + 1 : end], self._limits))
        finally:
            del self._buffer[:at]
        if self._need == 1:
            self._check(len(self._buffer))

    def _check(self, line_bytes: int) -> None:
        if line_bytes > self._limits.line_bytes:
            raise RemoteProtocolError(f"a line is longer than {self._limits.line_bytes} bytes; shorten it")

    def _advance(self, command: Command) -> Command:
        state = TRANSITIONS.get((self.state, type(command)))
        if state is None:
            name = type(command).__name__
            raise RemoteProtocolError(f"{name!r} is not expected in state {self.state.value!r}; send HELLO first, once")
        self.state = state
        return command

    def farewell(self, error: Exception) -> bytes:
        return encode_error(error.reason.name if isinstance(error, Refused) else "PROTOCOL", str(error))

    def deadline(self) -> float:
        return self._heard + self._idle_s

    def handle_timeout(self, now: float) -> None:
        raise RemoteProtocolError(f"nothing was heard for {self._idle_s:g} s; send PING")
