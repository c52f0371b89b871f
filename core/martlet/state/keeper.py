"""Keeps what projections need of the records that retention removes."""

import logging
from collections.abc import Sequence
from typing import Final, final

from martlet.errors import Reason, Refused
from martlet.runtime.turns import Turns
from martlet.state.driven import Driven
from martlet.store import Store

__all__ = ["RecordKeeper"]

log = logging.getLogger("martlet.state")

# Number of times that a refused `roll` is retried before the records are removed anyway.
ROLL_TRIES: Final = 10


@final
class RecordKeeper:
    """Has projections append again what they need, before retention removes it (`martlet.store` asks for that)."""

    def __init__(self, store: Store, turns: Turns, all_driven: Sequence[Driven]) -> None:
        self._store = store
        self._turns = turns
        self._driven = all_driven
        # Retention may remove records before this position; 0 until the replay is over.
        self.released = 0
        self.is_ready = False  # whether the replay is over
        self._roll_tries = 0

    @property
    def reason(self) -> str:
        """Why records from ``released`` on may not be removed yet."""
        if not self.is_ready:
            return "the state of sessions, groups and timers is still being computed from the log"
        return "the state of sessions, groups and timers needs them, and could not be appended again yet"

    async def release(self, end: int) -> None:
        """Have projections append again the state that they need of the records before *end*.

        If `roll` is refused because the disk is full, it is retried at the next `ROLL_TRIES` removals. Then one segment
        is given up: its space suffices to append again the state that is needed of the others. The tries are counted
        from 0 again once nothing has to be removed, with an *end* of 0.
        """
        if end <= 0:
            self._roll_tries = 0
        live = [driven for driven in self._driven if not driven.failed]
        if not self.is_ready or end <= self.released or not all(driven.order.passed(end) for driven in live):
            return
        start = max(self.released, self._store.first_position)
        try:
            await self._roll(live, start, end)
        except Exception as error:
            self._roll_tries += 1
            if self._roll_tries <= ROLL_TRIES:
                log.warning(
                    "records from position %d to %d are not removed yet, because a projection needs them; %s",
                    start,
                    end,
                    error,
                )
                return
            end = min(end, self._store.segments.items[0].end)
            text = "removing records from position %d to %d although a projection needs them; %s"
            log.error(text, start, end, error)
        self._roll_tries = 0
        self.released = end

    async def _roll(self, live: Sequence[Driven], start: int, end: int) -> None:
        """Call `roll` of the projections that need it, and wait until the appended records are durable.

        Raises:
          Refused: the disk is full, also if a commit of another caller failed and undid the appends.
          StoreFailed: the disk failed.
        """
        committer = self._store.committer
        undone = committer.undone
        for driven in live:
            if driven.projection.floor() < end:
                await self._turns.finish(driven.projection.roll(start, end))
        committer.commit_early()
        if committer.undone != undone:
            raise Refused(Reason.UNAVAILABLE, "a commit failed in the meantime")
        await self._store.flusher.wait_durable(self._store.written)
