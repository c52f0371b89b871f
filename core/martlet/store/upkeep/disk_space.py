"""The space on the store's disk: how much is used, and whether appends are accepted."""

import logging
from typing import Final, final

from martlet.store.append.admission import Admission, and_kept
from martlet.store.append.flusher import Flusher
from martlet.store.config import StoreConfig
from martlet.store.disk.data_directory import DataDirectory
from martlet.store.disk.files import is_full
from martlet.store.upkeep.checkpointer import Checkpointer

__all__ = ["DiskSpace"]

logger = logging.getLogger("martlet.store")

# After a refusal, appends resume when this fraction of the disk below the limit is free again, to avoid flapping.
HYSTERESIS: Final = 0.02


@final
class DiskSpace:
    """Measures the used fraction of the disk, and refuses appends while it is above ``disk_full_ratio``."""

    def __init__(
        self,
        directory: DataDirectory,
        config: StoreConfig,
        flusher: Flusher,
        admission: Admission,
        checkpointer: Checkpointer,
    ) -> None:
        self._directory = directory
        self._config = config
        self._flusher = flusher
        self._admission = admission
        self._checkpointer = checkpointer
        self.used_ratio = 0.0

    def measure(self) -> None:
        """Set ``used_ratio``."""
        self.used_ratio = self._directory.usage().ratio

    @property
    def is_refused(self) -> bool:
        """Whether appends are refused, for whatever reason."""
        return bool(self._admission.refusal)

    @property
    def is_short(self) -> bool:
        """Whether old segments are removed at any hour."""
        return self.used_ratio > self._config.disk_used_ratio_max or self.is_very_short

    @property
    def is_very_short(self) -> bool:
        """Whether segments are removed whatever their age."""
        return self.used_ratio > self._config.disk_clean_ratio

    def admit_or_refuse(self, kept: str = "") -> None:
        """Refuse appends if too much is used, or accept them again if there is space.

        *kept* says why old records may not be removed, if something keeps them.
        """
        self._admission.kept = kept
        if self._flusher.failed is not None:
            return
        limit = self._config.disk_full_ratio
        if self.used_ratio > limit:
            self._admission.close(
                f"the disk of {self._directory.path!r} is {self.used_ratio:.0%} full, above the limit of {limit:.0%} "
                f"(store.disk_full_ratio); {and_kept(kept)}writes resume automatically once there is space"
            )
            return
        if (
            self._admission.refusal
            and (self.used_ratio <= limit - HYSTERESIS or self._admission.disk_full)
            and self._has_space()
        ):
            logger.info("there is space again in %s; accepting writes", self._directory.path)
            self._admission.disk_full = False
            self._admission.refusal = ""

    def _has_space(self) -> bool:
        """Return whether a page can be written, and the start is complete."""
        try:
            self._directory.probe()
            return self._complete_start()
        except OSError as error:
            if not is_full(error):
                raise
            return False

    def _complete_start(self) -> bool:
        """Complete a start that met a full disk; return False if part of it is still missing.

        Raises:
          OSError: the disk is still full.
        """
        if not self._directory.marked:
            self._directory.mark()
        return not self._checkpointer.owes_checkpoint
