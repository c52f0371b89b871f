"""Tables of the core and of plugins that are stored in files of the data directory."""

import logging
from collections.abc import Callable
from typing import Final, final

from martlet.errors import StoreError
from martlet.runtime.steps import Steps
from martlet.store import Store
from martlet.store.disk.files import FILE_MODE

__all__ = ["NO_POSITION", "POSITION_KEY", "Table", "Tables"]

log = logging.getLogger("martlet.tables")

# The key with the log position up to which a JSON table is complete. RocketMQ drops unknown keys, so if it is missing,
# RocketMQ wrote the file last.
POSITION_KEY: Final = "martletPosition"
# In each JSON table that Martlet wrote, at least one of these keys is intact after damage to a few bytes.
OWN_KEYS: Final = (b'"martletPosition"', b'"martletCrc"')
NO_POSITION: Final = -1


@final
class Table:
    """A table that is written to a file whenever it has changed.

    Args:
      path: of the file in the data directory, such as ``config/delayOffset.json``.
      freeze: returns slices that render the current table as pieces of the file. It is called on the event loop with
        the log position up to which the table is complete, and must take less than a millisecond. All slices run in a
        worker thread; the first one can copy the keys. An entry may be rendered as it is when its slice runs,
        but must be consistent: copy it in one call.
      load: loads the content of the file; raises `StoreError`, and changes nothing, if it is invalid.
      urgent: write it right after a change instead of at the interval ``broker.offsets_persist_ms``.
      mode: who may open the file, as in ``chmod``; 0o600 for secrets.
    """

    __slots__ = ("_freeze", "behind", "changed", "dirty", "load", "mode", "path", "removed", "urgent", "writes")

    def __init__(
        self,
        path: str,
        freeze: Callable[[int], Steps[list[bytes]]],
        load: Callable[[bytes], None],
        *,
        urgent: bool = False,
        mode: int = FILE_MODE,
    ) -> None:
        self.path = path
        self.mode = mode
        self._freeze = freeze
        self.load = load
        self.urgent = urgent
        # The table differs from its file.
        self.dirty = False
        # The second copy of the file must be written together with the first.
        self.removed = False
        # Only the second copy differs from the table.
        self.behind = False
        # The number of times that the file was written.
        self.writes = 0
        # Called at every change of an urgent table.
        self.changed: Callable[[], None] | None = None

    def change(self, *, removed: bool = False) -> None:
        """Note that the table has changed and must be written.

        Args:
          removed: an entry was removed and must not reappear if the file is damaged: write both copies at once.
        """
        self.dirty = True
        self.removed = self.removed or removed
        if self.urgent and self.changed is not None:
            self.changed()

    def freeze(self, position: int) -> Steps[list[bytes]]:
        """Return slices that render the current table, which is complete up to log position *position*."""
        return self._freeze(position)


@final
class Tables:
    """All tables of a broker; `martlet.app.saving` writes them.

    A plugin adds its own in a hook.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: list[Table] = []
        self._changed: Callable[[], None] | None = None

    def add(self, table: Table) -> None:
        """Load *table* and write it from now on when it changes."""
        self.register(table)
        self.load(table)

    def register(self, table: Table) -> None:
        """Write *table* from now on when it changes."""
        self._tables.append(table)
        table.changed = self._changed

    def load(self, table: Table) -> bool:
        """Load the newest valid generation of *table*; return whether it is the one written last.

        Unless both copies of the file are the same, both are then written again.
        """
        is_newest, is_ours = not self._store.data_directory.lacks_newest(table.path), False
        generations = self._store.data_directory.read_generations(table.path)
        for data in generations:
            if is_ours and not _is_ours(data):
                log.warning("%s.bak is RocketMQ's, from before Martlet used it; ignoring it", table.path)
                break
            try:
                table.load(data)
            except (StoreError, ValueError, TypeError, AttributeError) as error:
                log.warning("%s cannot be used, trying its previous generation; %s", table.path, error)
                is_newest, is_ours = False, is_ours or _is_ours(data)
                continue
            if not is_newest or next(generations, b"") != data:
                table.change(removed=True)
            return is_newest
        return False

    def notify(self, changed: Callable[[], None]) -> None:
        """Call *changed* at each change of an urgent table."""
        self._changed = changed
        for table in self._tables:
            table.changed = changed

    def open_paths(self) -> list[str]:
        """Return the paths of the tables that have no secrets."""
        return [table.path for table in self._tables if table.mode == FILE_MODE]

    def to_save(self, *, every: bool) -> list[Table]:
        """Return the tables that differ from their files: only urgent ones, or *every* one."""
        return [table for table in self._tables if (table.dirty and table.urgent) or (every and _is_unsaved(table))]


def _is_unsaved(table: Table) -> bool:
    return table.dirty or table.behind


def _is_ours(data: bytes) -> bool:
    """Return whether Martlet wrote the JSON table in *data*, which may be damaged."""
    return any(key in data for key in OWN_KEYS)
