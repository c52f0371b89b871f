"""A plugin's own notes, in the log beside the messages they belong to.

A note is a few bytes that mean something to the plugin alone: a session began, a message was handed out, a packet id
is free again. Notes are collected and become a record of each commit, after the messages of that commit; a long one is
split. The records go to an internal topic, one for each journal. Whoever follows that topic and those of the messages
sees both in the order of the log, live and in a replay; a plugin changes its state only then, not when it writes the
note.

Body of a record: a msgpack array of byte strings.
"""

import re
from collections.abc import Iterable
from typing import Final, final

import msgpack  # type: ignore[import-untyped]

from martlet.errors import Reason, Refused, StoreFailed
from martlet.message import Message
from martlet.store import Store
from martlet.store.notes import OWN_PREFIX

__all__ = ["NEXT_COMMIT", "Journal", "read_notes"]

PREFIX: Final = OWN_PREFIX + "journal."
_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}")
NOTE_BYTES_MAX: Final = 65_536
# Notes that are collected before they become a record, commit or not. A projection applies a record in one piece:
# 300 to 400 notes, which take it 1 to 2 ms.
RECORD_BYTES: Final = 8_192
# The length of a byte string in msgpack.
LENGTH_BYTES: Final = 5
# After every position: an answer that is held until it leaves once all of this round is durable.
NEXT_COMMIT: Final = 2**62


@final
class Journal:
    """The notes of one plugin; made by `Broker.journal`.

    Its ``topic`` is what a projection follows. No client can read or write it. Its records go with their
    segments, like all others: what is still needed has to be noted again before.
    """

    __slots__ = ("_bytes", "_notes", "_record_bytes", "_store", "note_bytes_max", "topic")

    def __init__(self, store: Store, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"journal {name!r} is no name; it has 1 to 64 of a-z, 0-9, _ and -")
        self.topic = PREFIX + name
        self._store = store
        self._notes: list[bytes] = []
        self._bytes = 0
        # A record must fit into a segment, however small tests make that.
        self._record_bytes = min(RECORD_BYTES, store.config.segment_bytes // 4)
        self.note_bytes_max = min(NOTE_BYTES_MAX, store.config.segment_bytes // 4)

    def note(self, data: bytes) -> int:
        """Add *data* to the commit under way, after all notes before; return what to pass to `Peer.hold_until`.

        Nothing is stored when that commit fails; the server then closes the peers whose answers were held.

        Raises:
          Refused: the note is too large (Reason.ILLEGAL), or the store takes no writes just now.
          StoreFailed: the disk failed.
        """
        size = len(data) + LENGTH_BYTES
        if not self._notes or self._bytes + size > self._record_bytes or size > self.note_bytes_max:
            self._check(data)
            self.write()
            self._store.before_commit.append(self.write)
            self._store.commit_soon()
        self._notes.append(data)
        self._bytes += size
        return NEXT_COMMIT

    def write(self) -> None:
        """Append what was noted since the last record; every commit does this by itself.

        Raises:
          Refused: the store takes no writes just now; the notes are dropped, and the commit under way fails.
          StoreFailed: the disk failed.
        """
        if not self._notes:
            return
        notes, self._notes, self._bytes = self._notes, [], 0
        try:
            self._store.append(self._record(notes), 0)
        except (Refused, StoreFailed) as error:
            self._store.committer.fail_next(error)
            raise

    def records_of(self, notes: Iterable[bytes]) -> list[Message]:
        """Return the messages that hold *notes*, to be appended with others in an atomic group.

        Raises:
          Refused: a note is too large (Reason.ILLEGAL), or the store takes no writes just now.
        """
        records: list[list[bytes]] = []
        room = 0
        for note in notes:
            self._check(note)
            size = len(note) + LENGTH_BYTES
            if size > room:
                records.append([])
                room = self._record_bytes
            records[-1].append(note)
            room -= size
        return list(map(self._record, records))

    def _record(self, notes: list[bytes]) -> Message:
        return Message(self.topic, msgpack.packb(notes), born_host=self._store.store_host)

    def _check(self, note: bytes) -> None:
        if len(note) > self.note_bytes_max:
            raise Refused(Reason.ILLEGAL, f"the note has {len(note)} bytes; the most is {self.note_bytes_max}")
        self._store.admission.check()


def read_notes(body: bytes) -> list[bytes]:
    """Return the notes in the *body* of a journal's record."""
    notes: list[bytes] = msgpack.unpackb(body)
    return notes
