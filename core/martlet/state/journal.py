"""Journals: a plugin's own notes, stored in the log together with the messages that they belong to.

A note is a few bytes with a meaning for the plugin only: a session began, a message was delivered, a packet id is free
again. The notes of a commit become one record after the messages of that commit, in an internal topic of the journal. A
projection that follows this topic and the topics of the messages sees both in log order, live and in a replay. The
plugin changes its state only when the projection applies the note, not when it writes the note.

Body of a record: a msgpack array of byte strings.
"""

import re
from collections.abc import Iterable
from typing import Final, final

import msgpack  # type: ignore[import-untyped]

from martlet.errors import Reason, Refused, StoreFailed
from martlet.message import Message
from martlet.records.layout import Buffer
from martlet.store import Store
from martlet.store.format.notes import OWN_PREFIX

__all__ = ["NEXT_COMMIT", "Journal", "read_notes"]

PREFIX: Final = OWN_PREFIX + "journal."
_NAME: Final = re.compile(r"[a-z0-9_-]{1,64}")
NOTE_BYTES_MAX: Final = 262_144
# Notes are collected up to this size before they become a record, with or without a commit. A projection applies a
# record in one piece: 300 to 400 notes take 1 to 2 ms.
RECORD_BYTES: Final = 8_192
# Bytes for the length of a byte string in msgpack.
LENGTH_BYTES: Final = 5
# Greater than every position: an answer held until this position is sent once everything of this round is durable.
NEXT_COMMIT: Final = 2**62


@final
class Journal:
    """The notes of one plugin; created by `Broker.journal`.

    A projection follows its ``topic``, which clients can neither read nor write. Retention removes its records with
    their segments; the plugin must note again everything that it still needs.
    """

    __slots__ = ("_bytes", "_notes", "_record_bytes", "_store", "note_bytes_max", "topic")

    def __init__(self, store: Store, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"journal name {name!r} is invalid; use 1 to 64 of a-z, 0-9, _ and -")
        self.topic = PREFIX + name
        self._store = store
        self._notes: list[bytes] = []
        self._bytes = 0
        # A record must fit into a segment, which can be very small in tests.
        self._record_bytes = min(RECORD_BYTES, store.config.segment_bytes // 4)
        self.note_bytes_max = min(NOTE_BYTES_MAX, store.config.segment_bytes // 4)

    def note(self, data: bytes) -> int:
        """Add *data* to the current commit, after all earlier notes; return a position for `Peer.hold_until`.

        If that commit fails, nothing is stored, and the server closes the connections whose answers were held.

        Raises:
          Refused: the note is too large (Reason.ILLEGAL), or the store accepts no writes at the moment.
          StoreFailed: the disk failed.
        """
        size = len(data) + LENGTH_BYTES
        if not self._notes or self._bytes + size > self._record_bytes or size > self.note_bytes_max:
            self._check(data)
            self.write()
            self._store.committer.before_commit.append(self.write)
            self._store.committer.commit_soon()
        self._notes.append(data)
        self._bytes += size
        return NEXT_COMMIT

    def write(self) -> None:
        """Append the notes since the last record; every commit does this automatically.

        Raises:
          Refused: the store accepts no writes at the moment; the notes are dropped and the current commit fails.
          StoreFailed: the disk failed.
        """
        if not self._notes:
            return
        notes, self._notes, self._bytes = self._notes, [], 0
        try:
            self._store.writer.append(self._record(notes), 0)
        except (Refused, StoreFailed) as error:
            self._store.committer.fail_next(error)
            raise

    def records_of(self, notes: Iterable[bytes]) -> list[Message]:
        """Return messages with *notes*, for an atomic group with other messages.

        Raises:
          Refused: a note is too large (Reason.ILLEGAL), or the store accepts no writes at the moment.
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
        return Message(self.topic, msgpack.packb(notes), born_host=self._store.writer.store_host)

    def _check(self, note: bytes) -> None:
        if len(note) > self.note_bytes_max:
            raise Refused(Reason.ILLEGAL, f"note has {len(note)} bytes; the maximum is {self.note_bytes_max}")
        self._store.admission.check()


def read_notes(body: Buffer) -> list[bytes]:
    """Return the notes in the *body* of a journal's record."""
    notes: list[bytes] = msgpack.unpackb(body)
    return notes
