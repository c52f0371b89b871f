"""Writes snapshots of projections while a broker runs, and when it stops."""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final, final

import trio

from martlet.errors import MartletError
from martlet.runtime.steps import finish_now, finish_off_loop
from martlet.state.driven import Driven
from martlet.store import Store

__all__ = ["SNAPSHOT_BYTES", "SnapshotWriter", "reason_of"]

log = logging.getLogger("martlet.state")

# A snapshot is due after this many bytes of followed records, and no earlier than after this multiple of its own size.
SNAPSHOT_BYTES: Final = 64 * 1024 * 1024
SNAPSHOT_TIMES: Final = 4
# Pause after a failed write of a snapshot.
RETRY_S: Final = 60.0


@final
class SnapshotWriter:
    """Writes the snapshot of a projection once *snapshot_bytes* of its records have been applied."""

    def __init__(self, store: Store, snapshot_bytes: int) -> None:
        self._store = store
        self._snapshot_bytes = snapshot_bytes
        self._due = trio.Event()

    def note_applied(self, driven: Driven) -> None:
        """Handle that *driven* has applied more records."""
        if self._is_due(driven):
            self._due.set()

    def _is_due(self, driven: Driven) -> bool:
        due_bytes = max(self._snapshot_bytes, SNAPSHOT_TIMES * driven.saved_bytes)
        return not driven.failed and driven.followed_bytes >= due_bytes and trio.current_time() >= driven.retry_at

    async def run(self, all_driven: Iterable[Driven]) -> None:
        """Write the snapshots of *all_driven* that are due, until cancelled."""
        while True:
            await self._due.wait()
            self._due = trio.Event()
            for driven in all_driven:
                if self._is_due(driven):
                    await self.write(driven)

    async def write(self, driven: Driven) -> None:
        """Write a snapshot of the current state; retry later if that fails."""
        store = self._store
        followed_bytes = driven.followed_bytes  # records applied during the write belong to the next snapshot
        try:
            position, content = driven.snapshot()
            pieces = await store.disk.off_loop(partial(finish_off_loop, content))
            # Records that are not durable could be lost and replaced by others.
            await store.flusher.wait_durable(position)
            await store.disk.off_loop(partial(store.data_directory.write_file, driven.path, *pieces))
        except Exception as error:
            log.error("%s cannot be written, retrying later; %s", driven.path, reason_of(driven, error))
            driven.retry_at = trio.current_time() + RETRY_S
            return
        driven.saved_bytes, driven.saved_held = sum(map(len, pieces)), -1  # the saved number is outdated
        driven.followed_bytes -= followed_bytes

    def write_blocking(self, driven: Driven) -> None:
        """Write a snapshot of *driven*, which has applied all records, if it is outdated."""
        is_saved = driven.saved_bytes >= 0 and not driven.followed_bytes
        if driven.failed or (is_saved and driven.saved_held == driven.held()):
            return
        pieces = finish_now(driven.snapshot()[1])
        self._store.data_directory.write_file(driven.path, *pieces)
        driven.saved_bytes, driven.followed_bytes, driven.saved_held = sum(map(len, pieces)), 0, driven.held()


def reason_of(driven: Driven, error: Exception) -> str:
    """Return why there is no snapshot; names the plugin if its projection raised."""
    if isinstance(error, MartletError | OSError):
        return str(error)
    return f"plugin {driven.plugin!r} failed to render it; {type(error).__name__}: {error}"
