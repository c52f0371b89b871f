"""The protocol of one client as a state machine: bytes to events, their legal order (`TRANSITIONS`), and heart-beats.

CONNECT decides the version. Before it no other frame is allowed, and none longer than ``connect_bytes_max``. While a
frame is incomplete, each byte is examined only once, even if the bytes arrive in small pieces.
"""

import math
import re
from collections.abc import Iterator, Sequence
from enum import Enum, unique
from typing import Final, final

from martlet.runtime.native import native
from martlet_stomp.wire.codec import (
    CARRIAGE_RETURN,
    Head,
    check_unfinished,
    content_length,
    decode_head,
    encode_error,
    find_receipt,
    head_end,
)
from martlet_stomp.wire.errors import StompError, UnknownVersion, shown
from martlet_stomp.wire.events import connect_of, event_of, supported_versions
from martlet_stomp.wire.packets import Connect, Event, Version
from martlet_stomp.wire.scanner import ACK, SEND, KnownHeads, scan_ack_frames, scan_send_frames

__all__ = ["TRANSITIONS", "State", "StompConnection", "agreed_beats"]

# A client may be silent for twice the interval of its heart-beats: ActiveMQ closes after three times the interval, and
# RabbitMQ after six times.
GRACE: Final = 2.0

_LINE_ENDS: Final = re.compile(rb"(?:\r?\n)*")


@unique
class State(Enum):
    NEW = "new"  # waits for CONNECT
    ACCEPTING = "accepting"  # CONNECT came, and the broker decides
    OPEN = "open"
    ENDED = "ended"  # reads no more frames


_OPEN: Final = ("SEND", "SUBSCRIBE", "UNSUBSCRIBE", "ACK", "NACK", "BEGIN", "COMMIT", "ABORT")
_CONNECT: Final = ("CONNECT", "STOMP")
# The commands that a client may send in each state, and the next state. Any other frame breaks the protocol.
TRANSITIONS: Final[dict[tuple[State, str], State]] = {
    **{(State.NEW, command): State.ACCEPTING for command in _CONNECT},
    (State.ACCEPTING, "DISCONNECT"): State.ENDED,
    **{(State.OPEN, command): State.OPEN for command in _OPEN},
    (State.OPEN, "DISCONNECT"): State.ENDED,
}
_COMMANDS: Final = frozenset((*_CONNECT, *_OPEN, "DISCONNECT"))


def agreed_beats(connect: Connect, interval_min_ms: int) -> tuple[int, int]:
    """Return the intervals in ms of the broker's heart-beats, and of the client's; 0 for none.

    Neither is shorter than *interval_min_ms*. `codec.encode_connected` sends both to the client.
    """
    wants, can = connect.wants_beat_ms, connect.can_beat_ms
    return max(wants, interval_min_ms) if wants else 0, max(can, interval_min_ms) if can else 0


@unique
class _Lack(Enum):
    """The missing part of the frame at the beginning of the buffer."""

    NOTHING = 0  # or unknown
    HEAD = 1  # the blank line after the headers
    NUL = 2  # the end of a body without a content length


@final
class StompConnection:
    """The protocol of one client (martlet.contracts.Connection)."""

    __slots__ = (
        "_buffer",
        "_heads",
        "_heard",
        "_lack",
        "_limits",
        "_need",
        "_scan_ack_frames",
        "_scan_send_frames",
        "_seen",
        "_silence_s",
        "_told",
        "state",
        "version",
    )

    def __init__(self, heads: Sequence[KnownHeads], now: float) -> None:
        """Begin at *now*; *heads* are the header lines shared by all clients of the port (`known_heads`)."""
        self._limits = heads[0].limits
        self._heads = heads
        self._scan_send_frames = native(scan_send_frames)
        self._scan_ack_frames = native(scan_ack_frames)
        self._buffer = bytearray()
        self._need = 1  # buffered bytes needed to continue
        self._lack = _Lack.NOTHING
        self._seen = 0  # bytes searched for the missing part
        self._heard = now
        self._silence_s = self._limits.connect_s
        self._told = False  # the client got its last frame
        self.state = State.NEW
        self.version = Version.V1_0

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def receive_data(self, data: bytes, now: float) -> None:
        if self.state is State.OPEN:
            self._heard = now  # not before OPEN, when each byte of a slow client would extend its time to connect
        if self.state is not State.ENDED:
            self._buffer += data

    def open(self, beat_ms: int, now: float) -> None:
        """Note that the broker accepted the client. *beat_ms* is the interval of its heart-beats, 0 for none."""
        self.state = State.OPEN
        self._heard = now
        self._silence_s = beat_ms * GRACE / 1000 or math.inf

    def end(self) -> None:
        """Read no more frames, and send no ERROR."""
        self.state = State.ENDED
        self._told = True

    def events(self) -> Iterator[Event]:
        if not self._may_be_complete():
            return
        data, at, size = bytes(self._buffer), 0, len(self._buffer)
        self._need, self._lack, self._seen = 1, _Lack.NOTHING, 0
        try:
            while self.state is not State.ENDED:
                match = _LINE_ENDS.match(data, at)
                at = match.end() if match is not None else at
                if at == size:
                    break
                parsed = (self._run_at(data, at) if self.state is State.OPEN else None) or self._frame_at(data, at)
                if parsed is None:
                    break
                event, at = parsed
                yield event
        finally:
            self._forget(at)

    def _forget(self, size: int) -> None:
        """Drop the first *size* bytes of the buffer; all of it after the end."""
        del self._buffer[: size if self.state is not State.ENDED else None]

    def _may_be_complete(self) -> bool:
        """Return whether the first frame may be complete, without searching the first ``_seen`` bytes again."""
        buffer, seen = self._buffer, self._seen
        size = len(buffer)
        if size < self._need:
            return False
        if self._lack is _Lack.HEAD:
            if head_end(buffer, 0, self._known_version, seen) is not None:
                return True
            self._check_unfinished(buffer, seen)
        elif self._lack is _Lack.NUL:
            if buffer.find(0, seen) >= 0:
                return True
            self._check_body(size + 1)
        else:
            return True
        self._seen = size
        return False

    @property
    def _known_version(self) -> Version | None:
        return None if self.state is State.NEW else self.version

    def _run_at(self, data: bytes, at: int) -> tuple[Event, int] | None:
        """Return the run of frames at *at* and its end; None if the codec must decode the frame there."""
        if data.startswith(SEND, at):
            return self._scan_send_frames(data, at, self._heads[self.version])
        if data.startswith(ACK, at):
            return self._scan_ack_frames(data, at, self.version)
        return None

    def _frame_at(self, data: bytes, at: int) -> tuple[Event, int] | None:
        """Return the event of the frame at *at*, and the frame's end; None if the frame is incomplete.

        Raises:
          StompError: the frame breaks the protocol, or exceeds a limit.
        """
        size = len(data)
        ends = head_end(data, at, self._known_version)
        if ends is None:
            if data[at] == CARRIAGE_RETURN and at + 1 == size:
                self._need = 2  # the CR may be half a line end
                return None
            self._lack, self._seen = _Lack.HEAD, size - at
            self._check_unfinished(data[at : at + self._limits.head_bytes_max + 1], 0)
            return None
        stop, begin, is_over = ends
        try:
            state = self._state_after(data[at:stop].partition(b"\n")[0].removesuffix(b"\r"))
            head = decode_head(data[at:stop], self._known_version, self._limits)
            end = self._body_end(data, at, begin, content_length(head.headers), is_over)
            if end < 0:
                return None
            event = self._event(head, stop - at, data[begin:end])
        except StompError as error:
            if error.receipt is None:
                error.receipt = find_receipt(data[at : stop + 1], self.version)
            raise
        self.state = state
        return event, end if is_over else end + 1

    def _state_after(self, command: bytes) -> State:
        """Return the state after *command*. Raises `StompError`."""
        text = command.decode(errors="replace")
        state = TRANSITIONS.get((self.state, text))
        if state is not None:
            return state
        if text not in _COMMANDS:
            known = ", ".join(sorted(_COMMANDS))
            raise StompError(f"command {shown(text)} is not known; commands of clients are {known}")
        if text in _CONNECT:
            raise StompError(f"{text} came on a connection that is connected; open another one")
        raise StompError(f"{text} came before the client was connected; send CONNECT and wait for CONNECTED")

    def _body_end(self, data: bytes, at: int, begin: int, length: int, is_over: bool) -> int:
        """Return the end of the body that begins at *begin* in the frame at *at*; -1 if it is incomplete."""
        size = len(data)
        if is_over:
            if length > 0:
                raise StompError("the headers contain NUL; a blank line must follow them")
            return begin
        if length < 0:
            end = data.find(0, begin)
            self._check_size((end if end >= 0 else size) + 1 - at)
            if end < 0:
                self._lack, self._seen = _Lack.NUL, size - at
            return end
        end = begin + length
        self._check_size(end + 1 - at)
        if end >= size:
            self._need = end + 1 - at
            return -1
        if data[end]:
            raise StompError(f"content-length {length} is wrong, or NUL is missing; it must follow the body")
        return end

    def _event(self, head: Head, head_bytes: int, body: bytes) -> Event:
        command, headers = head
        if command == "SEND":
            return self._heads[self.version].run_of(headers, head_bytes, body)
        event = connect_of(headers) if self.state is State.NEW else event_of(head, self.version)
        if isinstance(event, Connect):
            self.version = event.version
        if self.version is not Version.V1_0 and body.strip(b"\r\n"):
            raise StompError(f"{command} has a body of {len(body)} bytes; only SEND has one")
        return event

    def _check_unfinished(self, head: bytes | bytearray, seen: int) -> None:
        try:
            check_unfinished(head, seen, self._limits)
            self._check_size(len(head) + 1)
        except StompError as error:
            error.receipt = find_receipt(bytes(head), self.version)
            raise

    def _check_body(self, size: int) -> None:
        """Like `_check_size`, for the first frame in the buffer, whose body is incomplete."""
        try:
            self._check_size(size)
        except StompError as error:
            ends = head_end(self._buffer, 0, self._known_version)
            assert ends is not None
            error.receipt = find_receipt(bytes(self._buffer[: ends[1]]), self.version)
            raise

    def _check_size(self, size: int) -> None:
        """Raise `StompError` if a frame of *size* bytes is too large."""
        limits = self._limits
        limit, keys = limits.frame_bytes_max, "broker.message_bytes_max and stomp.frame_bytes_max"
        if self.state is State.NEW:
            limit, keys = limits.connect_bytes_max, "stomp.connect_bytes_max"
        if size > limit:
            raise StompError(f"a frame has more than {limit} bytes, which is the limit ({keys})")

    def farewell(self, error: Exception) -> bytes:
        """Return ERROR; empty if the client got its last frame already."""
        if self._told:
            return b""
        self.end()
        receipt = error.receipt if isinstance(error, StompError) else None
        more = [("version", supported_versions())] if isinstance(error, UnknownVersion) else []
        return encode_error(str(error), self.version, receipt, more)

    def deadline(self) -> float:
        return self._heard + self._silence_s

    def handle_timeout(self, now: float) -> None:
        if now < self.deadline():
            return
        if self.state is State.OPEN:
            text = f"nothing was heard for {self._silence_s:g} s; send heart-beats as agreed"
        else:
            text = f"the client did not connect within {self._silence_s:g} s; send CONNECT"
        raise StompError(text)
