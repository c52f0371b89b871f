"""When Python looks for reference cycles: young objects often and briefly, old ones while the broker is idle.

A collection walks all objects of its generations and nothing else runs meanwhile: 80 ms for 100,000 objects on a busy
machine. But cycles are not how the broker frees memory: connections, requests and errors leave none behind
(tests/remoting/test_no_garbage.py). So

- the two young generations are small, and what survives both is frozen (`gc.freeze`): nobody walks it again;
- a full collection, for cycles that a plugin or a library made after all, waits until much was frozen since the last
  one and the process is idle; after `LATEST_S` it waits no longer.

docs/decisions/0019-old-objects-are-collected-when-idle.md has the reasons.
"""

import gc
import time
from collections.abc import Callable
from typing import Final, final

import trio

__all__ = ["OldObjects"]

# New containers before a look for cycles; CPython begins with 700. Up to twice as many are walked at once.
YOUNG_OBJECTS: Final = 4000
FREEZES_OF_A_COLLECTION: Final = 25  # each of 8,000 objects at most
LOOK_S: Final = 5.0
IDLE_S: Final = 0.05  # of processor time between two looks
LATEST_S: Final = 3600.0


@final
class OldObjects:
    """Keeps objects that survived out of the collector's way; a process has one of it."""

    def __init__(self, used_s: Callable[[], float] = time.process_time) -> None:
        self._used_s = used_s
        self.freezes = 0  # since the last full collection
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """Freeze everything there is, and from now on what survives two collections."""
        gc.freeze()
        self._thresholds = gc.get_threshold()
        gc.set_threshold(YOUNG_OBJECTS, 0, 1 << 30)
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        """Freeze nothing any more, and give back the thresholds that there were."""
        gc.callbacks.remove(self._collected)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] > 0:
            gc.freeze()
            self.freezes += 1

    def collect_all(self) -> int:
        """Walk all objects, also the frozen ones; return how many were garbage."""
        gc.unfreeze()
        found = gc.collect()  # which freezes the rest
        self.freezes = 0
        return found

    async def run(self) -> None:
        """Do a full collection now and then while the process is idle, until cancelled."""
        while True:
            await self._wait_due()
            self.collect_all()

    async def _wait_due(self) -> None:
        """Return when much was frozen and the process is idle, or when it has not been idle for `LATEST_S`."""
        waited_s = 0.0
        while True:
            before = self._used_s()
            await trio.sleep(LOOK_S)
            if self.freezes < FREEZES_OF_A_COLLECTION:
                continue
            waited_s += LOOK_S
            if self._used_s() - before < IDLE_S or waited_s >= LATEST_S:
                return
