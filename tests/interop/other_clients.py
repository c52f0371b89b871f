"""Programs over the C++, the Go and the Node client, a process each, and what they say."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .process import eventually

Line = dict[str, Any]
LIMIT_S = 300


class Run:
    """One run of a program; what it says goes to a file, so that nothing of it is lost between two looks."""

    def __init__(self, words: Sequence[str], home: Path, number: int) -> None:
        self.said = home / f"said-{number}"
        self.complaints = home / f"complaints-{number}"
        with self.said.open("wb") as output, self.complaints.open("wb") as errors:
            self.child = subprocess.Popen(
                words,
                env={**os.environ, "HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
            )

    def lines(self) -> list[Line]:
        """Return the whole lines up to now."""
        whole = self.said.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def wait_lines(self, count: int) -> None:
        eventually(lambda: True if len(self.lines()) >= count or self.child.poll() is not None else None)

    def finish(self) -> list[Line]:
        """Return what the program said once it ended."""
        try:
            self.child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.close()
        lines = self.lines()
        failure = f"ended with {self.child.returncode} after {lines}: {self.complaints.read_text()[-2000:]}"
        assert self.child.returncode == 0, failure
        return lines

    def close(self) -> None:
        self.child.kill()
        self.child.wait()


class Program:
    """A client in another language: its command, and where it may leave its logs."""

    def __init__(self, words: Sequence[str], home: Path) -> None:
        self.words = list(words)
        self.home = home
        home.mkdir(exist_ok=True)
        self.runs: list[Run] = []

    def start(self, *words: str) -> Run:
        number = len(list(self.home.glob("said-*")))  # programs of several languages may have the same home
        self.runs.append(Run([*self.words, *words], self.home, number))
        return self.runs[-1]

    def run(self, *words: str) -> list[Line]:
        return self.start(*words).finish()

    def close(self) -> None:
        """End what a failed test left running."""
        for run in self.runs:
            run.close()


def deliveries(lines: list[Line]) -> list[Line]:
    return [line for line in lines if "event" not in line]


def send_words(language: str, name_server: str, how: str, *messages: Mapping[str, Any]) -> list[str]:
    """Return the arguments with which a program sends what `java.message` describes."""
    ways = [] if language == "node" else [how]
    return ["send", name_server, *ways, json.dumps(messages)]


def consume_words(
    language: str, name_server: str, group: str, topic: str, count: str, how: str = "", failures: int = 0
) -> list[str]:
    """Return the arguments with which a program consumes until it accepted *count* messages.

    *how*: orderly (not Node), broadcasting; Go alone: replying, traced.
    """
    place = [name_server, group, topic, count]
    if language == "go":
        return ["consume", *place, "*", how or "concurrent", f"{failures}"]
    if language == "node":
        return [*place, f"{failures}", "*", how]
    return ["consume", *place, "*", how or f"{failures}"]
