"""Tables that are kept in files of the data directory: the one door by which core and plugins own them."""

import logging
from collections.abc import Callable
from typing import Final, final

from martlet.errors import StoreError
from martlet.store import Store
from martlet.turns import Steps

__all__ = ["NO_POSITION", "POSITION_KEY", "Table", "Tables"]

log = logging.getLogger("martlet.tables")

# The key of a JSON table that says up to which log position it is complete. RocketMQ drops keys that it does not know,
# so where it is missing RocketMQ wrote last.
POSITION_KEY: Final = "martletPosition"
NO_POSITION: Final = -1


@final
class Table:
    """A table that is written to a file whenever it has changed.

    Args:
      path: of the file in the data directory, such as ``config/delayOffset.json``.
      freeze: returns the rendering of the present table, in slices, as pieces of the file. It is called on the event
        loop with the log position up to which the table is complete, and takes less than a millisecond; the slices
        run in a worker thread, the first one included, so that it can copy the keys. An entry may be rendered as it
        is then, but each as a whole: copy it in one call.
      load: takes the content of the file; raises `StoreError`, and takes nothing, when it cannot be used.
      urgent: write it right after a change, and not at the interval of ``broker.offsets_persist_ms``.
    """

    __slots__ = ("_freeze", "changed", "dirty", "load", "path", "removed", "urgent")

    def __init__(
        self,
        path: str,
        freeze: Callable[[int], Steps[list[bytes]]],
        load: Callable[[bytes], None],
        *,
        urgent: bool = False,
    ) -> None:
        self.path = path
        self._freeze = freeze
        self.load = load
        self.urgent = urgent
        # It differs from its file.
        self.dirty = False
        # An entry was removed, which the previous generation of the file still has.
        self.removed = False
        # Called at every change of an urgent table.
        self.changed: Callable[[], None] | None = None

    def change(self, *, removed: bool = False) -> None:
        """Have the table written: it has changed.

        Args:
          removed: an entry is gone, and must not come back if the file is damaged: no generation keeps it.
        """
        self.dirty = True
        self.removed = self.removed or removed
        if self.urgent and self.changed is not None:
            self.changed()

    def freeze(self, position: int) -> Steps[list[bytes]]:
        """Return what renders the present table, which is complete up to log position *position*."""
        return self._freeze(position)


@final
class Tables:
    """All tables of a broker; `martlet.persistence` writes them.

    A plugin adds its own in a hook.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: list[Table] = []
        self._changed: Callable[[], None] | None = None

    def add(self, table: Table) -> None:
        """Load *table*, and write it from now on when it changes."""
        self.register(table)
        self.load(table)

    def register(self, table: Table) -> None:
        """Write *table* from now on when it changes."""
        self._tables.append(table)
        table.changed = self._changed

    def load(self, table: Table) -> bool:
        """Load the newest generation of *table* that can be used; return whether that was the one written last."""
        newest = True
        for data in self._store.read_generations(table.path):
            try:
                table.load(data)
                return newest
            except (StoreError, ValueError, TypeError, AttributeError) as error:
                log.warning("%s cannot be used, its previous generation is tried; %s", table.path, error)
                newest = False
        return False

    def notify(self, changed: Callable[[], None]) -> None:
        """Call *changed* at every change of an urgent table."""
        self._changed = changed
        for table in self._tables:
            table.changed = changed

    def to_save(self, *, every: bool) -> list[Table]:
        """The tables that differ from their files: those that are urgent, or *every* one."""
        return [table for table in self._tables if table.dirty and (every or table.urgent)]
