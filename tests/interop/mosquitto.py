"""Mosquitto from Debian: its command-line clients, and its broker as a child process."""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .fetch import tool
from .mqtt_clients import Link
from .process import Process, eventually, free_port
from .steered import LIMIT_S

VERSIONS = {3: "mqttv31", 4: "mqttv311", 5: "mqttv5"}


def place(link: Link) -> list[str]:
    """Return the arguments that say where to connect."""
    host, port = link.url.rpartition("/")[2].split(":")
    words = ["-h", host, "-p", port, "-V", VERSIONS[link.version], "-k", "600"]
    return [*words, *(["--cafile", link.ca] if link.ca is not None else [])]


def publish(link: Link, *words: str) -> None:
    """Run mosquitto_pub to its end."""
    _run([tool("mosquitto_pub"), *place(link), *words])


def request(link: Link, *words: str) -> str:
    """Run mosquitto_rr to its end; return the answer."""
    return _run([tool("mosquitto_rr"), *place(link), *words])


def subscribe(link: Link, *words: str) -> list[dict[str, Any]]:
    """Run mosquitto_sub to its end; return the messages."""
    return _messages(_run([tool("mosquitto_sub"), *place(link), "-F", "%j", *words]))


def _run(words: Sequence[str]) -> str:
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, f"{words} ended with {ended.returncode}: {ended.stdout}{ended.stderr}"
    return ended.stdout


def _messages(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


class Subscriber:
    """A mosquitto_sub that runs; it has subscribed."""

    def __init__(self, link: Link, log: Path, *words: str) -> None:
        # Line by line, as in a terminal.
        command = ["stdbuf", "-oL", tool("mosquitto_sub"), *place(link), "-d", "-F", "%j", *words]
        self._process = Process(command, log)
        self._process.wait_until(lambda: "Subscribed (mid:" in self._process.output() or None, "mosquitto_sub")

    def finish(self) -> list[dict[str, Any]]:
        """Wait for its end; return the messages."""
        eventually(lambda: None if self._process.running else True)
        assert self._process.child.returncode == 0, self._process.output()
        return _messages(self._process.output())

    def now(self) -> list[dict[str, Any]]:
        """Return the messages that it has printed."""
        return _messages(self._process.output().rpartition("\n")[0])

    def close(self) -> None:
        """End it as a crash would, if it still runs."""
        self._process.kill()


class MosquittoBroker:
    """Mosquitto's broker, with nothing on the disk; *more* are further lines of its configuration, such as bridges.

    `close`, then `start` brings it back on the same port.
    """

    def __init__(self, folder: Path, *more: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.port = free_port()
        lines = [f"listener {self.port} 127.0.0.1", "allow_anonymous true", "persistence false", "log_type error"]
        if os.getuid() == 0:
            lines.append("user root")  # otherwise it becomes another user, who may not read this folder
        self._config = folder / "mosquitto.conf"
        self._config.write_text("\n".join([*lines, *more]) + "\n")
        self.start()

    def start(self) -> None:
        self._process = Process([tool("mosquitto"), "-c", str(self._config)], self._folder / "mosquitto.log")
        with ExitStack() as undo:
            undo.callback(self._process.kill)
            self._process.wait_until(lambda: self._answers(self.link()), "mosquitto")
            undo.pop_all()

    def link(self, version: int = 5) -> Link:
        """Return how to connect."""
        return Link(f"mqtt://127.0.0.1:{self.port}", version)

    @staticmethod
    def _answers(link: Link) -> bool | None:
        words = [tool("mosquitto_pub"), *place(link), "-t", "ready", "-n"]
        return subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=False).returncode == 0 or None

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.kill()


def version() -> str:
    """Return the version of Mosquitto, as 2.0.11."""
    said = subprocess.run([tool("mosquitto"), "-h"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"mosquitto version (\S+)", said)
    assert found is not None, said
    return found.group(1)
