"""What the uploader has done since the start, and what it cannot do now."""

import logging
from typing import Final, final

import trio
from msgspec import Struct

from martlet_tiered.upload.messages import FoundRange

__all__ = ["Trouble", "UploadProgress", "size_text"]

logger = logging.getLogger("martlet.tiered")

# Pause between log lines about failures.
LOG_S: Final = 60.0


class UploadProgress(Struct):
    """Counters of the uploads since the start; bytes are those of the log and of files."""

    ranges: int = 0
    records: int = 0
    log_bytes: int = 0
    file_bytes: int = 0
    damaged: int = 0
    failures: int = 0

    def add(self, begin: int, found: FoundRange, records: int, file_bytes: int) -> None:
        """Count a range from log position *begin* on of which *records* are in files."""
        self.ranges += 1
        self.records += records
        self.log_bytes += found.end - begin
        self.file_bytes += file_bytes
        self.damaged += found.damaged


def size_text(size: int) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


@final
class Trouble:
    """What keeps the uploader from its work: `text`, empty if nothing does."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._log_at = 0.0  # time of the next log line, on trio's clock

    def note(self, error: Exception, behind: int, *, is_defect: bool) -> None:
        """Note *error*, and log it once a minute; a defect with its origin. *behind* are bytes that wait."""
        self.text = f"{type(error).__name__}: {error}" if is_defect else str(error)
        if trio.current_time() >= self._log_at:
            self._log_at = trio.current_time() + LOG_S
            origin = error if is_defect else None
            logger.error("%s; trying again", self.describe(behind), exc_info=origin)

    def describe(self, behind: int) -> str:
        """Return how far the uploads are *behind*, and why."""
        return f"cold tier is {size_text(behind)} behind: {self.text or 'it is uploading them'}"
