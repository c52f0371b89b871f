"""Schedules Python's garbage collector: young objects often and briefly, old objects while the broker is idle.

A collection traverses all objects of its generations and blocks everything else: 80 ms for 100,000 objects on a busy
machine. The broker itself creates no cycles: connections, requests and errors leave no cycles behind
(test_no_garbage.py in tests/remoting and tests/mqtt). Therefore:

- Startup creates objects that stay, so it is over before the first collection (`martlet.cli.main`).
- The two young generations are small. Objects that survive both are frozen (`gc.freeze`) and not traversed again.
- A full collection finds cycles that a plugin or a library created. It waits until many objects were frozen since the
  last one and the process is idle, but no longer than `LATEST_S`.

docs/decisions/0019-old-objects-are-collected-when-idle.md has the reasons.
"""

import gc
import time
from collections.abc import Callable
from typing import Final, final

import trio

__all__ = ["OldObjects"]

# New containers before a collection; CPython's default is 700. One collection traverses up to twice as many.
YOUNG_OBJECTS: Final = 2000
FREEZES_OF_A_COLLECTION: Final = 50  # number of freezes, each of 4,000 objects at most
LOOK_S: Final = 5.0
IDLE_S: Final = 0.05  # idle means less CPU time than this between two checks
LATEST_S: Final = 3600.0


@final
class OldObjects:
    """Freezes objects that survive, and collects them all when the process is idle; one per process."""

    def __init__(self, used_s: Callable[[], float] = time.process_time) -> None:
        self._used_s = used_s
        self.freezes = 0  # number since the last full collection
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """Freeze all existing objects now, and later the objects that survive two collections."""
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(YOUNG_OBJECTS, 0, 1 << 30)
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        """Stop freezing, unfreeze all objects, and restore the thresholds."""
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] > 0:
            gc.freeze()
            self.freezes += 1

    def collect_all(self) -> int:
        """Traverse all objects, including frozen ones; return the number of garbage objects."""
        gc.unfreeze()
        found = gc.collect()  # the callback freezes the survivors
        self.freezes = 0
        return found

    async def run(self) -> None:
        """Do full collections while the process is idle, until cancelled."""
        while True:
            await self._wait_due()
            self.collect_all()

    async def _wait_due(self) -> None:
        """Return when many objects were frozen and the process is idle, or after `LATEST_S` without an idle period."""
        waited_s = 0.0
        while True:
            before = self._used_s()
            await trio.sleep(LOOK_S)
            if self.freezes < FREEZES_OF_A_COLLECTION:
                continue
            waited_s += LOOK_S
            if self._used_s() - before < IDLE_S or waited_s >= LATEST_S:
                return
