"""The broker's side of the upload process: starts it, asks it, and ends it.

The process has no state that matters: whatever it is doing, it is killed when it is not needed any more, when it says
nothing for too long, or when the broker stops. The range is tried again with a new one.
"""

import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Never, Protocol, TypeVar, final

import trio
from msgspec import structs

from martlet_tiered.errors import UploadProcessFailed
from martlet_tiered.files import DataFile
from martlet_tiered.format.footer import FileFooter, Span
from martlet_tiered.upload.messages import (
    FRAME_BYTES_MAX,
    LENGTH,
    AtWork,
    Failed,
    FindRange,
    FoundRange,
    LogLine,
    Opened,
    QueueRun,
    Reply,
    Request,
    RunsPart,
    Setup,
    SpansPart,
    StoredFile,
    StoredRange,
    StoreRange,
    decode_reply,
    encode_message,
)
from martlet_tiered.upload.passing_errors import raised_by

__all__ = ["UploadTransport", "UploadWorker", "run_worker"]

Answer = TypeVar("Answer", Opened, FoundRange, StoredRange)

# -P: the working directory of the broker has no modules.
COMMAND: Final = ("-P", "-m", "martlet_tiered.upload.worker")
CHUNK_BYTES: Final = 64 << 10
# A killed process ends at once, unless the kernel waits for a disk that hangs.
KILL_S: Final = 2.0


class UploadTransport(Protocol):
    """Takes requests and gives replies, both as bytes."""

    async def send(self, data: bytes) -> None:
        """Send a request with its length. Raises `UploadProcessFailed`."""
        ...

    async def receive(self) -> bytes | bytearray:
        """Return the next reply, without its length. Raises `UploadProcessFailed`."""
        ...


@final
class UploadWorker:
    """Does the work of ranges elsewhere, one range at a time."""

    def __init__(self, transport: UploadTransport) -> None:
        self._transport = transport

    async def open(self, setup: Setup) -> None:
        """Open the store. Raises what `open_objects` does."""
        await self._ask(setup, Opened, _refuse)

    async def find(self, wanted: FindRange) -> tuple[FoundRange, list[QueueRun]]:
        """Return a range of the log and the runs in it.

        Raises:
          LogUnreadable: the log has no data there.
          OSError: the disk fails.
        """
        runs: list[QueueRun] = []

        def take(reply: Reply) -> None:
            if not isinstance(reply, RunsPart):
                _refuse(reply)
            runs.extend(reply.runs)

        return await self._ask(wanted, FoundRange, take), runs

    async def store(self, wanted: StoreRange) -> tuple[StoredRange, list[DataFile], list[FileFooter]]:
        """Store the files of the range that was found last, and return them.

        Raises:
          FileTooLarge: a file would have too many bytes.
          TierError: the store fails.
        """
        files: list[DataFile] = []
        footers: list[FileFooter] = []
        spans: list[Span] = []

        def take(reply: Reply) -> None:
            if isinstance(reply, SpansPart):
                spans.extend(reply.spans)
            elif isinstance(reply, StoredFile):
                files.append(reply.file)
                footers.append(structs.replace(reply.footer, spans=spans.copy()))
                spans.clear()
            else:
                _refuse(reply)

        return await self._ask(wanted, StoredRange, take), files, footers

    async def _ask(self, request: Request, kind: type[Answer], take: Callable[[Reply], None]) -> Answer:
        """Return the answer to *request*; other replies go to *take*."""
        await self._transport.send(encode_message(request))
        while True:
            reply = decode_reply(await self._transport.receive())
            if isinstance(reply, kind):
                return reply
            if isinstance(reply, Failed):
                raise raised_by(reply)
            if isinstance(reply, LogLine):
                logging.getLogger(reply.name).log(reply.level, "%s", reply.text)
            elif not isinstance(reply, AtWork):
                take(reply)


def _refuse(reply: Reply) -> Never:
    raise UploadProcessFailed(f"the upload process answers {type(reply).__name__}, which is no answer to its request")


@asynccontextmanager
async def run_worker(setup: Setup, deadline_s: float) -> AsyncIterator[UploadWorker]:
    """Run an upload process, which may be silent for *deadline_s* seconds while it works; it is killed at the end.

    Raises:
      UploadProcessFailed: it cannot be started. The methods of the worker raise it too, when the process has ended.
    """
    command = [sys.executable, *COMMAND]
    try:
        process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise UploadProcessFailed(f"the upload process {command[0]!r} cannot be started: {error.strerror}") from error
    try:
        worker = UploadWorker(_Pipes(process, deadline_s))
        await worker.open(setup)
        yield worker
    finally:
        await _kill(process)


async def _kill(process: trio.Process) -> None:
    process.kill()
    with trio.move_on_after(KILL_S, shield=True):
        await process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(pipe)


@final
class _Pipes:
    """The pipes to a process."""

    def __init__(self, process: trio.Process, deadline_s: float) -> None:
        self._process = process
        self._deadline_s = deadline_s
        self._data = bytearray()

    async def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with trio.move_on_after(self._deadline_s):
            try:
                await self._process.stdin.send_all(data)
            except trio.BrokenResourceError:
                raise await self._end() from None
            return
        raise self._silence()

    async def receive(self) -> bytes | bytearray:
        with trio.move_on_after(self._deadline_s):
            size = LENGTH.unpack(await self._take(LENGTH.size))[0]
            if size > FRAME_BYTES_MAX:
                raise UploadProcessFailed(f"the upload process sends {size} bytes; {FRAME_BYTES_MAX} is the most")
            return await self._take(size)
        raise self._silence()

    async def _take(self, size: int) -> bytearray:
        assert self._process.stdout is not None
        while len(self._data) < size:
            more = await self._process.stdout.receive_some(CHUNK_BYTES)
            if not more:
                raise await self._end()
            self._data += more
        taken = self._data[:size]
        del self._data[:size]
        return taken

    def _silence(self) -> UploadProcessFailed:
        return UploadProcessFailed(
            f"the upload process {self._process.pid} has said nothing for {self._deadline_s:g} s; it is killed"
        )

    async def _end(self) -> UploadProcessFailed:
        """Return how the process has ended."""
        with trio.move_on_after(KILL_S):
            await self._process.wait()
        code = self._process.returncode
        if code is None:
            how = "has closed its output"
        elif code < 0:
            how = f"was killed by signal {-code} ({_signal_name(-code)})"
        else:
            how = f"ended with exit code {code}; what it wrote on the standard error says why"
        return UploadProcessFailed(f"the upload process {self._process.pid} {how}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
