"""The state of the queues at the newest checkpoint: ``queues.<generation>``, an append-only file.

Each checkpoint appends the queues that changed since the previous one, then stores the file's length and CRC in the
checkpoint page. So the state that a start uses is exactly as old as the checkpoint: bytes after the stored length are
from a checkpoint that was not completed. A file that has grown to twice its content is replaced by a new generation;
the page names the valid one.
"""

import logging
import sys
from array import array
from contextlib import suppress
from struct import Struct, error
from typing import Final, final
from zlib import crc32

from martlet.store.disk.checkpoint import NO_JOURNAL, Checkpoint
from martlet.store.disk.files import Files, read_file
from martlet.store.queues.queues import Queue

__all__ = ["QueueJournal", "QueueState", "encode_deletion", "encode_queue", "replay"]

logger = logging.getLogger("martlet.store")

PREFIX: Final = "queues."
KIND_QUEUE: Final = 1
KIND_DELETION: Final = 2
KIND_EXPIRY: Final = 3
# A file is kept while it has less than twice its content, or at most this much more.
SLACK_BYTES: Final = 1024 * 1024

HEAD: Final = Struct(">BH")  # kind, size of the topic's name, which follows
# Queue id; first offset and the log start for which it is valid; next offset; log position after its last record; CRC
# of the last, incomplete block; number of the first block whose CRC follows, and the count of these CRCs.
STATE: Final = Struct(">iqqqqIqI")
# Queue id; the offset before which consumers get no message.
EXPIRY: Final = Struct(">iq")


@final
class QueueState:
    """One queue at a checkpoint; ``crcs`` belong to its blocks from number ``base`` on."""

    __slots__ = ("base", "crcs", "expired_to", "first_offset", "first_start", "last_end", "next_offset", "running")

    def __init__(self) -> None:
        self.expired_to = 0
        self.first_offset = 0
        self.first_start = 0
        self.next_offset = 0
        self.last_end = 0
        self.running = 0
        self.base = 0
        self.crcs = array("I")

    def set_crcs(self, base: int, crcs: "array[int]") -> None:
        """Set *crcs* for the blocks from number *base* on."""
        kept_count = base - self.base
        if not 0 <= kept_count <= len(self.crcs):
            self.base, self.crcs = base, crcs
            return
        del self.crcs[kept_count:]
        self.crcs.extend(crcs)


def encode_queue(queue: Queue, log_start: int, *, whole: bool) -> bytes:
    """Return the changes of *queue* since it was last encoded, or with *whole* its complete state.

    Its first offset is valid while the log begins at *log_start*; -1 if it was not updated after the log's start moved.
    """
    base, crcs = queue.blocks
    first_block = base if whole else max(base, min(queue.journaled, base + len(crcs)))
    new_crcs = crcs[first_block - base :]
    queue.journaled = base + len(crcs)
    state = STATE.pack(
        queue.queue_id,
        queue.stored_from,
        log_start,
        queue.saved,
        queue.saved_end,
        queue.mark[1],
        first_block,
        len(new_crcs),
    )
    name = queue.topic_bytes
    pieces = [HEAD.pack(KIND_QUEUE, len(name)), name, state, _swap_bytes(new_crcs).tobytes()]
    if queue.expired_to:
        pieces += HEAD.pack(KIND_EXPIRY, len(name)), name, EXPIRY.pack(queue.queue_id, queue.expired_to)
    return b"".join(pieces)


def _swap_bytes(crcs: "array[int]") -> "array[int]":
    """Return *crcs* converted to little-endian order, or back."""
    if sys.byteorder == "big":
        crcs.byteswap()
    return crcs


def encode_deletion(topic: str) -> bytes:
    """Return the entry that removes every queue of *topic*."""
    name = topic.encode()
    return HEAD.pack(KIND_DELETION, len(name)) + name


def replay(data: bytes) -> dict[str, dict[int, QueueState]]:
    """Return the queues by topic and id after applying all entries of *data*.

    Raises:
      ValueError: *data* is no journal.
    """
    topics: dict[str, dict[int, QueueState]] = {}
    at = 0
    try:
        while at < len(data):
            kind, name_bytes = HEAD.unpack_from(data, at)
            at += HEAD.size + name_bytes
            name = data[at - name_bytes : at].decode()
            if kind == KIND_DELETION:
                topics.pop(name, None)
                continue
            if kind == KIND_EXPIRY:
                queue_id, expired_to = EXPIRY.unpack_from(data, at)
                at += EXPIRY.size
                topics[name][queue_id].expired_to = expired_to
                continue
            if kind != KIND_QUEUE:
                raise ValueError(f"the journal of queues has an entry of unknown kind {kind}")
            at += _apply_state(topics.setdefault(name, {}), data, at)
    except error as reason:
        raise ValueError("the journal of queues is truncated") from reason
    except KeyError as reason:
        raise ValueError("the journal of queues names an unknown queue") from reason
    return topics


def _apply_state(queues: dict[int, QueueState], data: bytes, at: int) -> int:
    """Set the state of a queue from the entry at *at*, and return the entry's size; *queues* are a topic's, by id."""
    queue_id, first_offset, first_start, next_offset, last_end, running, base, count = STATE.unpack_from(data, at)
    state = queues.get(queue_id)
    if state is None:
        state = queues[queue_id] = QueueState()
    state.first_offset, state.first_start, state.expired_to = first_offset, first_start, 0
    state.next_offset, state.last_end, state.running = next_offset, last_end, running
    crcs_at = at + STATE.size
    crcs = _swap_bytes(array("I", data[crcs_at : crcs_at + 4 * count]))
    state.set_crcs(base, crcs)
    return STATE.size + 4 * len(crcs)


@final
class QueueJournal:
    """The files of one store; blocking, for use by one thread at a time."""

    def __init__(self, files: Files, directory: str) -> None:
        self.files = files
        self.directory = directory
        self.generation = NO_JOURNAL
        self.length = 0
        self.crc = 0
        # The size of the newest generation's content when it was created.
        self.content = 0

    def _path(self, generation: int) -> str:
        return f"{self.directory}/{PREFIX}{generation:010d}"

    @property
    def outgrown(self) -> bool:
        """Whether the next checkpoint writes all queues into a new generation."""
        return self.generation < 0 or self.length > 2 * self.content + SLACK_BYTES

    def load(self, checkpoint: Checkpoint) -> dict[str, dict[int, QueueState]] | None:
        """Return the queues at *checkpoint*; None if the file is missing or damaged."""
        if checkpoint.journal_generation < 0:
            return None
        length = checkpoint.journal_length
        data = read_file(self.files.disk, self._path(checkpoint.journal_generation))
        if data is None or len(data) < length or crc32(data[:length]) != checkpoint.journal_crc:
            return None
        try:
            topics = replay(data[:length])
        except ValueError:
            return None
        self.generation, self.length, self.crc = checkpoint.journal_generation, length, checkpoint.journal_crc
        self.content = length // 2
        return topics

    def abandon(self) -> None:
        """Make the next checkpoint start a new generation."""
        self.generation = NO_JOURNAL

    def exists(self) -> bool:
        """Return whether there is a file of any generation."""
        return bool(self._generations())

    def _generations(self) -> list[int]:
        names = (name.removeprefix(PREFIX) for name in self.files.disk.names(self.directory) if name.startswith(PREFIX))
        return sorted(int(name) for name in names if name.isascii() and name.isdecimal() and len(name) == 10)

    def write(self, parts: list[bytes], *, whole: bool, into: Checkpoint) -> None:
        """Write *parts* durably, appended or as a new generation, and store their location in *into*."""
        if whole:
            self._write_generation(parts)
        elif parts:
            path = self._path(self.generation)
            self.length, self.crc = self._write_parts(path, parts, self.length, self.crc)
            self.files.sync(path)
        into.journal_generation, into.journal_length, into.journal_crc = self.generation, self.length, self.crc

    def _write_parts(self, path: str, parts: list[bytes], length: int, crc: int) -> tuple[int, int]:
        """Write *parts* one by one: joining megabytes would hold the interpreter's lock and so block the event loop."""
        for part in parts:
            self.files.write(path, part, length)
            length += len(part)
            crc = crc32(part, crc)
        return length, crc

    def _write_generation(self, parts: list[bytes]) -> None:
        generation = max([*self._generations(), -1]) + 1
        path = self._path(generation)
        try:
            self.files.create(path, 0)
            length, crc = self._write_parts(path, parts, 0, crc32(b""))
            self.files.sync(path)
        except OSError:
            # On a full disk each attempt would leave another file.
            with suppress(OSError):
                self.files.unlink(path)
            raise
        self.files.disk.sync_directory(self.directory)
        self.generation, self.length, self.crc, self.content = generation, length, crc, length

    def remove_others(self) -> None:
        """Remove the generations that the checkpoint does not name."""
        for generation in self._generations():
            if generation != self.generation:
                path = self._path(generation)
                try:
                    self.files.unlink(path)
                except OSError as error:
                    logger.warning("%s is no longer used and cannot be removed: %s", path, error)
