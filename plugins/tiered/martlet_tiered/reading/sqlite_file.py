"""A file of SQLite whose content can be lost: errors tell whether it is damaged, or the disk is full or fails."""

import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, final

__all__ = ["IndexDamaged", "SqliteFile"]

# Memory for pages of the file.
CACHE_KIB: Final = 4096
# What is no damage of the file: the disk is full or fails, or the file may not be used.
NO_DAMAGE: Final = frozenset(
    (
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM),
    )
)


class IndexDamaged(Exception):
    """The index must be built again."""


@final
class SqliteFile:
    """The file at *path*; not for several threads at once.

    Every method may raise `IndexDamaged`, or `OSError` if the disk is full or fails.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> bool:
        """Open the file; whether it exists."""
        if not os.path.exists(self._path):
            return False
        with self._named_errors():
            self._connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
            weakref.finalize(self, self._connection.close)
            self._connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        return True

    def create(self, schema: str) -> None:
        """Remove the file, and open a new one with *schema*."""
        self.close()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        for path in (self._path, f"{self._path}-journal"):
            with suppress(FileNotFoundError):
                os.unlink(path)
        with open(self._path, "wb"):
            self.open()
        with self._named_errors():
            self._open.executescript(schema)

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Make all changes, or none if one fails."""
        self.run("BEGIN IMMEDIATE")
        with self._named_errors(), self._open:  # commits, or rolls back
            yield

    def run(self, text: str, *values: object) -> None:
        """Execute *text*."""
        with self._named_errors():
            self._open.execute(text, values)

    def all(self, text: str, *values: object) -> list[Any]:
        """Return all rows that *text* selects."""
        with self._named_errors():
            return self._open.execute(text, values).fetchall()

    def one(self, text: str, *values: object) -> Any:
        """Return the first row that *text* selects; None without one."""
        with self._named_errors():
            return self._open.execute(text, values).fetchone()

    @property
    def _open(self) -> sqlite3.Connection:
        assert self._connection is not None, "open the file first"
        return self._connection

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            text = f"index {self._path!r} cannot be used: {error}"
            if error.sqlite_errorcode & 0xFF in NO_DAMAGE:
                raise OSError(text) from error
            raise IndexDamaged(text) from error
