"""Processes that a test kills while they work. ``MARTLET_KILL_ROUNDS`` says how often (default: 3)."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Final, Self, TypeVar

ROUNDS: Final = int(os.environ.get("MARTLET_KILL_ROUNDS", "3"))


class Victim:
    """A process of a Python module, and the lines that it prints; it is killed at the end of ``with`` at the latest."""

    def __init__(self, module: str, *words: object, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", module, *map(str, words)]
        given = {**os.environ, **(environment or {})}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given)
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        self.pid = self._process.pid

    def line(self) -> str:
        """Wait for the next line; empty if the process has ended."""
        return self._lines.readline().strip()

    def kill(self) -> list[str]:
        """Kill it, and return the further lines that it has printed to their ends."""
        self._process.kill()
        rest, _ = self._process.communicate()
        return rest.splitlines()[: rest.count("\n")]

    def stop(self) -> int:
        """Ask for an orderly end, wait for it, and return the exit code."""
        self._process.terminate()
        self._process.communicate()
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._lines.closed:
            self.kill()


V = TypeVar("V", bound=Victim)


def survive_kills(start: Callable[[], V], work: Callable[[V], object], finish: Callable[[V], object]) -> None:
    """Start a process that *work* kills, again and again; then start it once more, to *finish*."""
    for _ in range(ROUNDS):
        with start() as victim:
            work(victim)
    with start() as victim:
        finish(victim)
