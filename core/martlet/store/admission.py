"""Whether the store takes appends, and why not."""

import logging
from typing import final

from martlet.errors import Reason, Refused, StoreFailed
from martlet.store.files import is_full
from martlet.store.flusher import Flusher

__all__ = ["Admission"]

logger = logging.getLogger("martlet.store")


@final
class Admission:
    """Refuses appends while the disk is full, and for good after it failed."""

    __slots__ = ("_directory", "_flusher", "disk_full", "refusal")

    def __init__(self, directory: str, flusher: Flusher) -> None:
        self._directory = directory
        self._flusher = flusher
        # Why appends are refused just now; empty when they are not.
        self.refusal = ""
        # A write failed for want of space; until a probe succeeds.
        self.disk_full = False

    def check(self) -> None:
        """Raise `Refused` or `StoreFailed` if no appends are taken just now."""
        if self._flusher.failed is not None:
            raise self._flusher.failed
        if self.refusal:
            raise Refused(Reason.UNAVAILABLE, self.refusal)

    def refuse(self, error: OSError) -> Refused | StoreFailed:
        """Return what to raise for *error* of a write: full disks heal, anything else does not."""
        if is_full(error):
            self.refuse_full(error)
            return Refused(Reason.UNAVAILABLE, self.refusal)
        failed = self._flusher.fail(error)
        self.refusal = str(failed)
        return failed

    def refuse_full(self, error: OSError) -> None:
        """Take no appends before there is space again."""
        self.disk_full = True
        self.close(
            f"the disk of {self._directory!r} is full ({error.strerror}); "
            "writes go on by themselves when there is space: free some, or lower store.file_reserved_hours"
        )

    def close(self, reason: str) -> None:
        """Take no appends because of *reason*, and log that once."""
        if not self.refusal:
            logger.warning("writes are refused: %s", reason)
        self.refusal = reason
