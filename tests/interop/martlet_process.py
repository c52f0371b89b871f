"""Martlet as a child process, as a user starts it: `martlet run`, ready once it has printed its ready line."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from .process import Process, free_port
from .rocketmq import DELAY_LEVELS

READY = re.compile(r"^martlet ready: .*$", re.MULTILINE)


class Martlet:
    """A broker with its name server; `stop` or `kill`, then `start` brings it back on the same data and ports."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, str] | None = None,
        data: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.data = data or folder / "data"
        self.settings = {
            "remoting.listen": f"127.0.0.1:{free_port()}",
            "remoting.vip": "false",
            "nameserver.listen": f"127.0.0.1:{free_port()}",
            "mqtt.listen": "127.0.0.1:0",
            "stomp.listen": "127.0.0.1:0",
            "store.flush": "async",
            # The first retry has level 3.
            "timer.levels": DELAY_LEVELS,
            **(settings or {}),
        }
        self.address = ""
        self.name_server = ""
        self.mqtt = ""
        self.stomp = ""
        self.environment = environment
        self.starts = 0
        self.start()

    def start(self) -> None:
        """Start it, each time on the same ports, and learn its addresses."""
        self.starts += 1
        words = [sys.executable, "-m", "martlet", "run", "--data", str(self.data)]
        for key, value in self.settings.items():
            words += ["--set", f"{key}={value}"]
        self.process = Process(words, self.folder / f"martlet-{self.starts}.log", self.environment)
        line = self.process.wait_until(self._ready_line, "martlet")
        said = dict(word.split("=", 1) for word in line.split() if "=" in word)
        self.address = said["remoting"]
        self.name_server = said.get("nameserver", "")
        self.mqtt = said.get("mqtt", "")
        self.stomp = said.get("stomp", "")

    def _ready_line(self) -> str | None:
        found = READY.search(self.process.output())
        return found.group() if found else None

    def stop(self) -> int:
        return self.process.stop()

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """End it, whatever state it is in."""
        self.kill()
