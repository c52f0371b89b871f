"""The index of the cold tier as a file: which file has which messages of a queue.

It is a cache of what the footers of the files say, in SQLite: one that is missing, damaged, of another table or of
another version is built again. A span takes about 60 bytes.

A queue has a *birth*, a log position: spans before it belong to an earlier topic of the same name. It is where the
topic was deleted, or where the offsets of the queue began again. The spans of a queue are disjoint, and ascend by
offset and by position.

A deletion is *noted* if a file of the table has the note of it. Files are marked that have messages from before the
birth of their queue or the deletion of their topic: they are to be rewritten.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, final

from msgspec import Struct

from martlet_tiered.format.footer import Span
from martlet_tiered.reading.sqlite_file import IndexDamaged, SqliteFile

__all__ = ["IndexDatabase", "IndexedFile", "Place"]

VERSION: Final = "2"
SCHEMA: Final = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE files (
    number INTEGER PRIMARY KEY, path TEXT UNIQUE, bytes INTEGER, start INTEGER, finish INTEGER, spans INTEGER,
    fault TEXT, has_deleted INTEGER DEFAULT 0
);
CREATE TABLE queues (number INTEGER PRIMARY KEY, topic TEXT, queue INTEGER, birth INTEGER, UNIQUE (topic, queue));
CREATE TABLE deleted (topic TEXT PRIMARY KEY, position INTEGER, noted INTEGER) WITHOUT ROWID;
CREATE TABLE spans (
    queue INTEGER, first INTEGER, last INTEGER, file INTEGER, row INTEGER, rows INTEGER, min_ms INTEGER,
    max_ms INTEGER, min_position INTEGER, max_position INTEGER, PRIMARY KEY (queue, first)
) WITHOUT ROWID;
"""
PLACES: Final = """
SELECT queues.topic, queues.queue, first, last, row, rows, min_ms, max_ms, min_position, max_position, path, bytes
FROM spans JOIN queues ON queues.number = spans.queue JOIN files ON files.number = spans.file
"""

MARK: Final = "UPDATE files SET has_deleted = 1 WHERE number"


class IndexedFile(Struct, frozen=True):
    """A file of the table with its spans.

    It may have the log positions from `start` on, before `end`. `fault` says why it cannot be read, and is empty if it
    can. `deleted` has topics, with the log position at which each was deleted.
    """

    path: str
    bytes: int
    start: int
    end: int
    spans: Sequence[Span] = ()
    deleted: Sequence[tuple[str, int]] = ()
    fault: str = ""


class Place(Struct, frozen=True):
    """A span, and the file that has it."""

    span: Span
    path: str
    bytes: int


@final
class IndexDatabase:
    """The index at *path*; not for several threads at once.

    Every method may raise `IndexDamaged`, or `OSError` if the disk is full or fails.

    Args:
      identity: that of the table; the index of another one is removed.
    """

    def __init__(self, path: str, identity: str) -> None:
        self._file = SqliteFile(path)
        self._identity = identity

    def open(self) -> bool:
        """Open the index, or create an empty one; whether there was one that can be used."""
        with suppress(IndexDamaged):
            if self._file.open():
                about = dict(self._file.all("SELECT name, value FROM about"))
                if about == {"version": VERSION, "table": self._identity}:
                    return True
        self.clear()
        return False

    def clear(self) -> None:
        """Remove the index and create an empty one."""
        self._file.create(SCHEMA)
        with self._file.changing():
            for each in (("version", VERSION), ("table", self._identity)):
                self._file.run("INSERT INTO about VALUES (?, ?)", *each)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def check(self) -> None:
        """Read the whole index; raise `IndexDamaged` if its parts do not fit together."""
        found = self._file.all("PRAGMA quick_check(1)")
        if found != [("ok",)]:
            raise IndexDamaged(f"the index is damaged: {found[0][0]}")

    # ---- changes

    def tangled_files(self, file: IndexedFile) -> dict[str, int]:
        """Return the path and the size of files that share a range of offsets of a queue with *file*, within one life
        of its topic.

        The time of day was set back over midnight, so the messages of that queue alternate between the files of two
        days. Both need exact spans (`spans_of_columns`).
        """
        found: dict[str, int] = {}
        for span in file.spans:
            queue, birth = self._queue(span)
            if queue and span.min_position >= birth:
                found.update(
                    self._file.all(
                        "SELECT path, bytes FROM spans JOIN files ON files.number = spans.file WHERE queue = ? AND "
                        "first <= ? AND last >= ? AND min_position <= ? AND max_position >= ? AND first >= "
                        "ifnull((SELECT max(first) FROM spans WHERE queue = ? AND first <= ?), 0)",
                        *(queue, span.last, span.first, span.max_position, span.min_position, queue, span.first),
                    )
                )
        return found

    def add(self, file: IndexedFile, exact: Iterable[tuple[str, Sequence[Span]]] = ()) -> None:
        """Add *file*; the files *exact* get other spans.

        If several files are added, those with the highest log positions come first. Files *exact* that are not in the
        index are left out.
        """
        with self._file.changing():
            self._add(file, exact)

    def replace(
        self,
        paths: Iterable[str],
        files: Iterable[IndexedFile],
        exact: Iterable[tuple[str, Sequence[Span]]] = (),
    ) -> None:
        """Remove the files *paths* and add *files*, as `remove` and `add`, at once."""
        with self._file.changing():
            self._remove(paths)
            for file in files:
                self._add(file, exact)
                exact = ()

    def _add(self, file: IndexedFile, exact: Iterable[tuple[str, Sequence[Span]]]) -> None:
        for topic, position in file.deleted:
            self._delete_topic(topic, position, position)
        spans = len(file.spans)
        self._file.run(
            "INSERT INTO files (path, bytes, start, finish, spans, fault) VALUES (?, ?, ?, ?, ?, ?)",
            *(file.path, file.bytes, file.start, file.end, spans, file.fault),
        )
        changed = [(number, others) for path, others in exact if (number := self._number_of(path))]
        for number, _ in changed:
            self._file.run("DELETE FROM spans WHERE file = ?", number)
        for number, others in [*changed, (self._number_of(file.path), file.spans)]:
            for span in others:
                self._add_span(number, span)

    def remove(self, paths: Iterable[str]) -> None:
        """Remove the files *paths* with their spans."""
        with self._file.changing():
            self._remove(paths)

    def _remove(self, paths: Iterable[str]) -> None:
        self._file.run("CREATE TEMP TABLE IF NOT EXISTS gone (path TEXT PRIMARY KEY)")
        self._file.run("DELETE FROM gone")
        for path in paths:
            self._file.run("INSERT OR IGNORE INTO gone VALUES (?)", path)
        numbers = "(SELECT number FROM files JOIN gone USING (path))"
        self._file.run(f"DELETE FROM spans WHERE file IN {numbers}")
        self._file.run(f"DELETE FROM files WHERE number IN {numbers}")

    def delete_topic(self, topic: str, position: int) -> None:
        """Remove the spans of *topic* before log position *position*, also those that are added later."""
        with self._file.changing():
            self._delete_topic(topic, position, 0)

    def _number_of(self, path: str) -> int:
        """Return the number of file *path*; 0 if it is not in the index."""
        found = self._file.one("SELECT number FROM files WHERE path = ?", path)
        return found[0] if found else 0

    def _queue(self, span: Span) -> tuple[int, int]:
        """Return the number of the queue of *span*, which is 0 if it is unknown, and its birth."""
        found = self._file.one("SELECT number, birth FROM queues WHERE topic = ? AND queue = ?", span.topic, span.queue)
        number, birth = found or (0, 0)
        deletion = self._file.one("SELECT position FROM deleted WHERE topic = ?", span.topic)
        return number, max(birth, deletion[0]) if deletion else birth

    def _add_span(self, file: int, span: Span) -> None:
        queue, birth = self._queue(span)
        if not queue:
            self._file.run("INSERT INTO queues (topic, queue, birth) VALUES (?, ?, ?)", span.topic, span.queue, birth)
            queue, _ = self._queue(span)
        if span.min_position < birth:
            self._file.run(f"{MARK} = ?", file)
            return
        # As the spans of a queue ascend, these two tell about all.
        highest = self._file.one(
            "SELECT min_position FROM spans WHERE queue = ? AND first <= ? ORDER BY first DESC LIMIT 1",
            *(queue, span.last),
        )
        if highest and highest[0] > span.min_position:  # the offsets began again after it
            self._file.run(f"{MARK} = ?", file)
            self._be_born(queue, span.min_position + 1)
            return
        lowest = self._file.one(
            "SELECT min_position FROM spans WHERE queue = ? AND last >= ? AND first >= "
            "ifnull((SELECT max(first) FROM spans WHERE queue = ? AND first <= ?), 0) ORDER BY first LIMIT 1",
            *(queue, span.first, queue, span.first),
        )
        if lowest and lowest[0] < span.min_position:
            # They began again before *span*, but perhaps not with it: spans in between may come later.
            old = "SELECT max(min_position) FROM spans WHERE queue = ? AND min_position < ?"
            self._be_born(queue, self._file.one(old, queue, span.min_position)[0] + 1)
        self._file.run(
            "INSERT OR IGNORE INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(queue, span.first, span.last, file, span.row, span.count),
            *(span.min_ms, span.max_ms, span.min_position, span.max_position),
        )

    def _be_born(self, queue: int, position: int) -> None:
        """Remove the spans of *queue* before log position *position*, and mark their files."""
        condition = "WHERE queue = ? AND min_position < ?"
        self._file.run("UPDATE queues SET birth = max(birth, ?) WHERE number = ?", position, queue)
        self._file.run(f"{MARK} IN (SELECT file FROM spans {condition})", queue, position)
        self._file.run(f"DELETE FROM spans {condition}", queue, position)

    def _delete_topic(self, topic: str, position: int, noted: int) -> None:
        self._file.run(
            "INSERT INTO deleted VALUES (?, ?, ?) ON CONFLICT (topic) DO UPDATE "
            "SET position = max(position, excluded.position), noted = max(noted, excluded.noted)",
            *(topic, position, noted),
        )
        for (queue,) in self._file.all("SELECT number FROM queues WHERE topic = ?", topic):
            self._be_born(queue, position)

    # ---- questions

    def files(self) -> list[IndexedFile]:
        """Return all files, without their spans."""
        rows = self._file.all("SELECT path, bytes, start, finish, fault FROM files")
        return [IndexedFile(path, size, start, end, fault=fault) for path, size, start, end, fault in rows]

    def has_deletions_after(self, end: int) -> bool:
        """Return whether a deletion after log position *end* is in the index, and its note is not in the table."""
        return self._file.one("SELECT 1 FROM deleted WHERE position > ? AND noted < ?", end, end) is not None

    def deleted(self) -> tuple[list[str], dict[str, int]]:
        """Return the paths of files that have messages from before the deletion of their topic, and the deletions.

        These are topics whose deletion is noted in the table, each with the log position of the newest note.
        """
        paths = self._file.all("SELECT path FROM files WHERE has_deleted ORDER BY finish")
        return [path for (path,) in paths], dict(self._file.all("SELECT topic, noted FROM deleted WHERE noted > 0"))

    def first_offsets(self) -> list[tuple[str, int, int]]:
        """Return the topic, the number and the first offset of each queue that has spans."""
        least = "(SELECT min(first) FROM spans WHERE spans.queue = queues.number)"
        return self._file.all(f"SELECT topic, queue, {least} AS least FROM queues WHERE least IS NOT NULL")

    def places(self, topic: str, queue: int, offset: int, count: int) -> list[Place]:
        """Return *count* spans of a queue at most: the last one that begins at or before *offset*, and the next ones.

        Without the former, these are its first ones.
        """
        found = self._file.one("SELECT number FROM queues WHERE topic = ? AND queue = ?", topic, queue)
        if not found:
            return []
        least = "ifnull((SELECT max(first) FROM spans WHERE queue = ? AND first <= ?), 0)"
        condition = f"WHERE spans.queue = ? AND first >= {least} ORDER BY first LIMIT ?"
        return self._places(condition, found[0], found[0], offset, count)

    def places_by_time(self, topic: str, queue: int, timestamp_ms: int, offset: int) -> list[Place]:
        """Return the first span of a queue that ends at *offset* or later and may have a message stored at or after
        *timestamp_ms*.
        """
        return self._first_place(topic, queue, "max_ms", timestamp_ms, offset)

    def places_by_position(self, topic: str, queue: int, position: int, offset: int) -> list[Place]:
        """Return the first span of a queue that ends at *offset* or later and has a message at or after *position*."""
        return self._first_place(topic, queue, "max_position", position, offset)

    def _first_place(self, topic: str, queue: int, column: str, least: int, offset: int) -> list[Place]:
        condition = f"WHERE queues.topic = ? AND queues.queue = ? AND {column} >= ? AND last >= ?"
        return self._places(f"{condition} ORDER BY first LIMIT 1", topic, queue, least, offset)

    def end_of(self, topic: str, queue: int) -> int:
        """Return the offset after the last message of a queue; 0 without spans."""
        found = self._file.one(
            "SELECT last + 1 FROM spans JOIN queues ON number = spans.queue WHERE topic = ? AND queues.queue = ? "
            "ORDER BY first DESC LIMIT 1",
            *(topic, queue),
        )
        return found[0] if found else 0

    def files_at(self, position: int) -> list[tuple[str, int]]:
        """Return the path and the size of each file that may have a message at log position *position*."""
        return self._file.all(
            "SELECT path, bytes FROM files WHERE start <= ? AND finish > ? AND spans > 0", position, position
        )

    def places_of_row(self, topic: str, queue: int, path: str, row: int) -> list[Place]:
        """Return the spans of a queue in *row* of file *path*: one, or none if the message is of an earlier topic."""
        condition = "WHERE queues.topic = ? AND queues.queue = ? AND path = ? AND row <= ? AND row + rows > ?"
        return self._places(condition, topic, queue, path, row, row)

    def places_of_topic(self, topic: str, begin_ms: int, end_ms: int, end_position: int, count: int) -> list[Place]:
        """Return the newest *count* spans of *topic* that may have messages with these times and positions."""
        condition = "WHERE queues.topic = ? AND max_ms >= ? AND min_ms <= ? AND min_position < ?"
        order = "ORDER BY max_position DESC LIMIT ?"
        return self._places(f"{condition} {order}", topic, begin_ms, end_ms, end_position, count)

    def _places(self, condition: str, *values: object) -> list[Place]:
        rows = self._file.all(f"{PLACES} {condition}", *values)
        return [Place(Span(*(*row[:10], 0)), row[10], row[11]) for row in rows]
