"""The unsent output of one connection; no input or output, and no tasks.

The answers of a round collect in `Answers`. At the end of the round they move to the `Output`: to what is held, if the
log must be flushed first, or to what is ready to be sent.

Until the first bytes show whether the client speaks TLS, WebSocket or the protocol itself, output is blocked: a server
that speaks first must not send its greeting in plain text to a TLS client. Output queued after `ServerPeer.start_tls`
is blocked in the same way, until the client has begun TLS.
"""

from collections.abc import Callable
from typing import Any, Final, final

import trio
from msgspec import Struct

from martlet.contracts import Buffer
from martlet.errors import Refused
from martlet.net.pending import PendingWork

__all__ = ["Answers", "Output"]

REST_BYTES: Final = 65536  # largest piece of copied output


class Answers(Struct, eq=False):
    """The answers of one connection in this round.

    Args:
      size: of all *pieces*, in bytes.
      hold_position: the log position that must be flushed before they may be sent.
      holds: pairs of an index in *pieces* and the log position that the answers from this index on depend on.
    """

    pieces: list[Buffer] = []
    size: int = 0
    hold_position: int = 0
    holds: list[tuple[int, int]] = []

    def cut(self, written: int) -> None:
        """Drop the answers, beginning with the first that acknowledges records beyond *written*."""
        first_index = min(index for index, position in self.holds if position > written)
        del self.pieces[first_index:]
        self.size = sum(map(len, self.pieces))
        self.holds = [each for each in self.holds if each[0] < first_index]
        self.hold_position = max((position for _, position in self.holds), default=0)

    def refuse(self, written: int, refused: Refused, refusal: Callable[[Buffer, Refused], Buffer | None]) -> bool:
        """Replace each answer that acknowledges records beyond *written* by the result of *refusal*.

        Return False if the result is None, because the handler cannot refuse.
        """
        pieces = self.pieces
        for index in dict.fromkeys([index for index, position in self.holds if position > written]):
            if index < len(pieces):
                replacement = refusal(pieces[index], refused)
                if replacement is None:
                    return False
                pieces[index] = replacement
        self.size = sum(map(len, pieces))
        self.hold_position = min(self.hold_position, written)
        return True

    def clear(self) -> None:
        """Drop all answers."""
        self.pieces = []
        self.size = self.hold_position = 0
        self.holds.clear()


@final
class Output:
    """What waits for the log, what is ready, and what is blocked, in this order of sending."""

    __slots__ = (
        "_drops_rest",
        "_held",
        "_pending",
        "blocked",
        "draining",
        "held_bytes",
        "progress",
        "ready",
        "skipped",
        "tls_border",
        "unsent_bytes",
    )

    def __init__(self, pending: PendingWork[Any], *, blocked: bool) -> None:
        self._pending = pending  # counts the unsent bytes of all connections
        self._held: list[tuple[int, list[Buffer], int]] = []  # (log position, pieces, bytes)
        self.held_bytes = 0
        self.unsent_bytes = 0  # held, ready or blocked; a piece counts in full until its last byte is sent
        self.ready: list[Buffer] = []
        self.skipped = 0  # bytes of the first ready piece already sent
        self.draining = False  # whether a task waits until the transport accepts more of `ready`
        self.blocked: list[Buffer] | None = [] if blocked else None  # may not be sent yet
        self.tls_border: bytearray | None = None  # the last piece in plain text
        self._drops_rest = False  # after the border
        self.progress: trio.Event | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no unsent output."""
        return not (self.ready or self._held or self.blocked)

    @property
    def held_position(self) -> int:
        """The log position whose flush releases the first held answers; -1 if no answers are held."""
        return self._held[0][0] if self._held else -1

    # in

    def add(self, answers: Answers) -> None:
        """Add *answers*, which depend on no more of the log than those before them."""
        if self._held:
            position, pieces, size = self._held.pop()
            pieces.extend(answers.pieces)
            self._held.append((position, pieces, size + answers.size))
            self.held_bytes += answers.size
        else:
            self._queue_pieces(answers.pieces)
        self._count_unsent(answers.size)

    def hold(self, answers: Answers, position: int) -> None:
        """Hold *answers* until the log is flushed up to *position*."""
        self._held.append((position, answers.pieces, answers.size))
        self.held_bytes += answers.size
        self._count_unsent(answers.size)

    def release(self, readable: int) -> bool:
        """Let out what waited for log positions up to *readable*; return True if nothing is held anymore."""
        released = 0
        for position, pieces, size in self._held:
            if position > readable:
                break
            self._queue_pieces(pieces)
            self.held_bytes -= size
            released += 1
        del self._held[:released]
        return not self._held

    def _queue_pieces(self, pieces: list[Buffer]) -> None:
        """Append *pieces*, a list of its own, to the output; if a task is draining the output, they wait for it."""
        if self.blocked is not None:
            self.blocked += pieces
            return
        if self.tls_border is not None:
            pieces = self._stop_at_border(pieces)
        if not self.draining:
            if self.ready:
                self.ready.extend(pieces)
            else:
                self.ready = pieces
            return
        for piece in pieces:
            if may_wait(piece):
                self.ready.append(piece)
            else:
                self.ready += copied(piece, 0)

    def _count_unsent(self, size: int) -> None:
        self.unsent_bytes += size
        self._pending.unsent_bytes += size

    # out

    def unsent(self) -> list[Buffer]:
        """Return what is ready, without what was sent of the first piece."""
        return [memoryview(self.ready[0])[self.skipped :], *self.ready[1:]]

    def drop_sent(self, sent_bytes: int) -> None:
        """Drop the first *sent_bytes* bytes of what is ready and was not sent."""
        unheld_bytes = self.unsent_bytes - self.held_bytes
        if self.skipped + sent_bytes == unheld_bytes:
            self.ready, self.skipped = [], 0
            self._count_unsent(-unheld_bytes)
        else:
            self._drop_part(self.skipped + sent_bytes)
        if sent_bytes and self.progress is not None:
            self.note_progress()

    def _drop_part(self, sent_bytes: int) -> None:
        """Drop pieces of the output that lie fully within the first *sent_bytes* bytes, and prepare the others to wait.

        A piece stays as it is, and counts in full until its last byte is sent: other connections may wait with the same
        object. Only a view that would pin a whole page of the log is copied.
        """
        unsent: list[Buffer] = []
        dropped_bytes = self.skipped = 0
        for piece in self.ready:
            size = len(piece)
            if sent_bytes >= size:
                sent_bytes -= size
                dropped_bytes += size
                continue
            if may_wait(piece):
                unsent.append(piece)
                self.skipped += sent_bytes
            else:
                unsent += copied(piece, sent_bytes)
                dropped_bytes += sent_bytes
            sent_bytes = 0
        self.ready = unsent
        self._count_unsent(-dropped_bytes)

    def drop(self) -> None:
        """Drop all output, and block no more of it."""
        self.blocked = self.tls_border = None
        self._held.clear()
        self.ready, self.skipped = [], 0
        self.held_bytes = 0
        self._count_unsent(-self.unsent_bytes)
        self.note_progress()

    # blocked output

    def begin_border(self, *, drops_rest: bool) -> Buffer:
        """Return an empty piece; what is sent after it must not leave in plain text, and is blocked or dropped."""
        self.tls_border = bytearray()
        self._drops_rest = drops_rest
        return self.tls_border

    def _stop_at_border(self, pieces: list[Buffer]) -> list[Buffer]:
        """Return the leading *pieces* that are still sent in plain text; block the others."""
        for index, piece in enumerate(pieces):
            if piece is self.tls_border:
                self.blocked = pieces[index + 1 :]
                if self._drops_rest:
                    self.drop_blocked()
                self.note_progress()
                return pieces[:index]
        return pieces

    @property
    def is_at_border(self) -> bool:
        """Whether all plain text was sent."""
        return self.blocked is not None and not self.ready

    def unblock(self) -> None:
        """Let out what is blocked, and what comes later."""
        self.tls_border = None
        blocked, self.blocked = self.blocked, None
        if blocked:
            self._queue_pieces(blocked)

    def drop_blocked(self) -> None:
        """Drop what is blocked, or will be at the border, because the client will not begin TLS."""
        self._drops_rest = True
        blocked, self.blocked = self.blocked, None
        self._count_unsent(-sum(map(len, blocked or ())))

    # waiting

    async def wait_progress(self) -> None:
        """Return when some of the output was sent or dropped, or the connection has come closer to its end."""
        if self.progress is None:
            self.progress = trio.Event()
        await self.progress.wait()

    def note_progress(self) -> None:
        """Let the callers of `wait_progress` continue."""
        if self.progress is not None:
            self.progress.set()
            self.progress = None


def may_wait(piece: Buffer) -> bool:
    """Return whether *piece* pins at most twice its size in memory, so that it can wait without a copy."""
    if isinstance(piece, memoryview):
        base = piece.obj
        return isinstance(base, bytes | bytearray) and len(base) <= 2 * len(piece)
    return True


def copied(piece: Buffer, taken: int) -> list[Buffer]:
    """Return a copy of *piece* without its first *taken* bytes, in pieces that are freed one by one."""
    return [bytes(piece[at : at + REST_BYTES]) for at in range(taken, len(piece), REST_BYTES)]
