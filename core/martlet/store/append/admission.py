"""Decides whether the store accepts appends."""

import logging
from typing import final

from martlet.errors import Reason, Refused, StoreFailed
from martlet.store.append.flusher import Flusher
from martlet.store.disk.files import is_full

__all__ = ["Admission", "and_kept"]

logger = logging.getLogger("martlet.store")


@final
class Admission:
    """Refuses appends while the disk is full, and permanently after a disk failure."""

    def __init__(self, directory: str, flusher: Flusher) -> None:
        self._directory = directory
        self._flusher = flusher
        # Why appends are refused; empty if they are accepted.
        self.refusal = ""
        # Set when a write fails for lack of space; cleared when a probe succeeds.
        self.disk_full = False
        # Why old records may not be removed to make space; empty if they may, or if nothing has to be removed.
        self.kept = ""

    def check(self) -> None:
        """Raise `Refused` or `StoreFailed` if the store accepts no appends at the moment."""
        if self._flusher.failed is not None:
            raise self._flusher.failed
        if self.refusal:
            raise Refused(Reason.UNAVAILABLE, self.refusal)

    def refuse(self, error: OSError) -> Refused | StoreFailed:
        """Return the exception for *error* of a write. A full disk is temporary; every other error is final."""
        if is_full(error):
            self.refuse_full(error)
            return Refused(Reason.UNAVAILABLE, self.refusal)
        failed = self._flusher.fail(error)
        self.refusal = str(failed)
        return failed

    def refuse_full(self, error: OSError) -> None:
        """Refuse appends until there is space again."""
        self.disk_full = True
        self.close(
            f"the disk of {self._directory!r} is full ({error.strerror}); "
            f"{and_kept(self.kept)}writes resume automatically once "
            "there is space: free some, or lower store.file_reserved_hours"
        )

    def close(self, reason: str) -> None:
        """Refuse all further appends because of *reason*, and log the reason once."""
        if not self.refusal:
            logger.warning("writes are refused: %s", reason)
        self.refusal = reason


def and_kept(kept: str) -> str:
    """Return the clause of a refusal that says why old records are kept; empty if they are not."""
    return f"{kept}; " if kept else ""
