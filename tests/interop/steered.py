"""Clients of other languages in a process that is steered by lines of JSON."""

import itertools
import json
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 180.0


class SteeredProcess(ABC):
    """A process that obeys commands, a line each, and ends with its input; it answers each, and tells of events."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._errors = (folder / "errors.log").open("ab")
        self._child = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @abstractmethod
    def hear(self, event: dict[str, Any]) -> None:
        """Record an event; called in another thread."""

    def new_name(self, stem: str) -> str:
        """Return a name for a client that no other one has."""
        return f"{stem} {next(self._numbers)}"

    def call(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Run a command to its end; a failure of the client is a RuntimeError."""
        number = next(self._numbers)
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"id": number, "do": command, **arguments}) + "\n")
        self._child.stdin.flush()
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while number not in self._answers:
                if self._ended or time.monotonic() > deadline:
                    raise RuntimeError(f"no answer to {command} {arguments}; ended: {self._ended}")
                self._changed.wait(deadline - time.monotonic())
            answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{command} {arguments}: {answer['error']}")
        return dict(answer["result"])

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            said = json.loads(line)
            if "id" not in said:
                self.hear(said)
                continue
            with self._changed:
                self._answers[said["id"]] = said
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(60)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._child.wait()
        self._reader.join()
        assert self._child.stdout is not None
        self._child.stdout.close()
        self._errors.close()
