"""A broker as its user starts it: a process of its own, ready once it has printed its ready line."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

READY = re.compile(r"martlet ready: ((?:[\w-]+=\S+ )*)kernel=\w+ data=(.+) in (\d+\.\d\d) s\n")


class Process:
    """``martlet WORDS`` on free ports; stderr goes to a file."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        environment: Mapping[str, str] | None = None,
        remoting: str = "127.0.0.1:0",
    ) -> None:
        self.data = folder / "data"
        self.log = folder / "log"
        command = [sys.executable, "-m", "martlet", *words, "--data", str(self.data)]
        command += ["--set", f"remoting.listen={remoting}", "--set", "nameserver.listen=127.0.0.1:0"]
        command += ["--set", "mqtt.listen=127.0.0.1:0", "--set", "stomp.listen=127.0.0.1:0"]
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def wait_ready(self) -> str:
        """Return the ready line; what came instead when it ended without one."""
        assert self.child.stdout is not None
        return self.child.stdout.readline()

    def addresses(self) -> dict[str, str]:
        found = READY.fullmatch(self.wait_ready())
        assert found is not None, self.log.read_text()
        return dict(pair.split("=", 1) for pair in found[1].split())

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds, and fail if the process ends first."""
        while not condition():
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(0.05)
                raise AssertionError(self.log.read_text())

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        self.child.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        code = self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()
        return code

    def end(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Start processes that do not outlive the test."""
    processes: list[Process] = []

    def begin(*words: str, folder: Path = tmp_path, **options: Any) -> Process:
        folder.mkdir(exist_ok=True)
        processes.append(Process(folder, *words, **options))
        return processes[-1]

    yield begin
    for process in processes:
        process.end()


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C means what it does in a terminal, for child processes too, even where a script's background job tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses, by port, of a broker that the tests of a module share."""
    process = Process(tmp_path_factory.mktemp("broker"), "run", "--set", "store.flush=async")
    try:
        yield process.addresses()
    finally:
        process.end()


@pytest.fixture(scope="module")
def broker(addresses: dict[str, str]) -> str:
    """The address of its name server."""
    return addresses["nameserver"]


@pytest.fixture
def martlet(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``martlet WORDS`` in this process; returns exit code, stdout and stderr."""
    from martlet.cli.main import main

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
