"""The audit trail: a line of JSON for each login, refusal and change, in a file that is rotated.

Nothing waits for the file. Events wait in a queue, and one worker thread at a time writes them. If they come faster
than the disk takes them, or the file cannot be written, they are dropped and counted.
"""

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, TypeAlias, final

import trio
from msgspec import Struct

from martlet.contracts import AccessEvent, LoginEvent, Question
from martlet.runtime.clock import Clock

__all__ = ["AuditFile", "AuditTrail", "resource_of"]

log = logging.getLogger("martlet.acl")

WAITING_MAX: Final = 10_000
# A thread per write costs 0.1 ms; events of this time are written together.
INTERVAL_S: Final = 0.2
TEXT_MAX: Final = 256  # characters of a name or reason that a client chose
COMPLAINT_S: Final = 60.0
FILE_MODE: Final = 0o600

Fields: TypeAlias = dict[str, str | bool]


def resource_of(question: Question) -> str:
    """Return the resource of *question* as rules name it, such as ``topic:orders`` or ``cluster``."""
    return f"{question.kind}:{question.name}" if question.kind != "cluster" else "cluster"


@final
class AuditFile(Struct):
    """The file at *path*, and *older_max* older ones, ``path.1`` the newest; each has about *bytes_max* bytes."""

    path: str
    bytes_max: int
    older_max: int

    def append(self, data: bytes) -> None:
        """Append whole lines, in a new file if this one is full. Raises `OSError`."""
        try:
            if os.stat(self.path).st_size + len(data) > self.bytes_max:
                self._rotate()
        except FileNotFoundError:
            pass
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)

    def _rotate(self) -> None:
        names = [self.path, *(f"{self.path}.{number}" for number in range(1, self.older_max + 1))]
        for newer, older in reversed([*pairwise(names)]):
            try:
                os.replace(newer, older)
            except FileNotFoundError:
                continue
        if not self.older_max:
            os.unlink(self.path)


@final
class AuditTrail:
    """Collects events, and writes them to *file*; *publish* gets the same lines for a topic, each with its kind."""

    def __init__(
        self,
        file: AuditFile,
        clock: Clock,
        publish: Callable[[Sequence[tuple[str, bytes]]], None] | None = None,
    ) -> None:
        self._file = file
        self._clock = clock
        self._publish = publish
        self._waiting: deque[tuple[int, str, Fields]] = deque()
        self._begun = trio.Event()
        self._complained = -COMPLAINT_S
        self.written = 0
        self.dropped = 0

    def note_login(self, event: LoginEvent) -> None:
        """Note a login, or a refused one."""
        identity, origin = event.identity, event.origin
        self._note(
            "login",
            {
                "allowed": identity is not None,
                "identity": identity.name if identity is not None else "",
                "user": event.user,
                "method": event.method,
                "address": origin.address,
                "protocol": origin.protocol,
                "client_id": origin.client_id,
                "reason": event.reason,
            },
        )

    def note_access(self, event: AccessEvent) -> None:
        """Note a refusal, one that is only observed, or a permitted change."""
        question, verdict = event.question, event.verdict
        self._note(
            "access",
            {
                "allowed": verdict.allowed,
                "observed": verdict.observed,
                "identity": question.identity.name,
                "address": question.address,
                "protocol": event.protocol,
                "action": question.action,
                "resource": resource_of(question),
                "rule": verdict.rule,
                "reason": verdict.reason,
            },
        )

    def note_change(self, by: str, what: str) -> None:
        """Note a change of users or rules; *what* names it without secrets."""
        self._note("change", {"identity": by, "change": what})

    def _note(self, kind: str, fields: Fields) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.dropped += 1
            return
        self._waiting.append((self._clock.now_ms(), kind, fields))
        self._begun.set()

    async def run(self) -> None:
        """Write events until cancelled; then write what still waits."""
        try:
            while True:
                await self._begun.wait()
                with trio.CancelScope(shield=True):  # events that were taken from the queue are written
                    await self._write()
                await trio.sleep(INTERVAL_S)
        finally:
            with trio.CancelScope(shield=True):
                await self._write()

    async def _write(self) -> None:
        if not self._waiting:
            return
        events, self._waiting = self._waiting, deque()
        self._begun = trio.Event()
        lines = await trio.to_thread.run_sync(_encode, events)
        try:
            await trio.to_thread.run_sync(self._file.append, b"".join(line for _, line in lines))
            self.written += len(lines)
        except OSError as error:
            self.dropped += len(lines)
            self._complain(error)
        if self._publish is not None:
            self._publish(lines)

    def _complain(self, error: OSError) -> None:
        now = trio.current_time()
        if now - self._complained >= COMPLAINT_S:
            self._complained = now
            log.error("the audit trail cannot be written, %d events are lost so far; %s", self.dropped, error)

    def statistics(self) -> dict[str, object]:
        """Return the events written, waiting and dropped."""
        return {"written": self.written, "waiting": len(self._waiting), "dropped": self.dropped}


def _encode(events: Sequence[tuple[int, str, Fields]]) -> list[tuple[str, bytes]]:
    """Return the kind and the line of each event."""
    lines = []
    for now_ms, kind, fields in events:
        time = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds")
        short = {name: value[:TEXT_MAX] if isinstance(value, str) else value for name, value in fields.items()}
        text = json.dumps({"time": time, "event": kind, **short}, separators=(",", ":"))
        lines.append((kind, text.encode("ascii") + b"\n"))
    return lines
