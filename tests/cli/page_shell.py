"""Runs the commands of a page in a shell. Its ``martlet`` is `main` in this process: a page has thirty commands, and a
process of Python takes a second to start.
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Final

from martlet.cli.main import main

__all__ = ["PageShell"]

POLL_S: Final = 0.02
# Sends its folder and arguments, each ended by NUL, and prints the answer after its first line, the exit code.
SCRIPT: Final = """\
#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\0' $# "$PWD" "$@" >&3
read -r code <&3
cat <&3
exit "$code"
"""


class PageShell:
    """A shell in *folder*."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(POLL_S)
        script = folder / "bin" / "martlet"
        script.parent.mkdir()
        script.write_text(SCRIPT.format(port=self._server.getsockname()[1]))
        script.chmod(0o755)
        self._environment = {"PATH": f"{script.parent}:{os.environ['PATH']}"}

    def run(self, commands: str, environment: Mapping[str, str]) -> str:
        """Run *commands*, each of which must succeed, and return what they print."""
        found = {**os.environ, **environment, **self._environment}
        words = ["bash", "-euo", "pipefail", "-c", commands]
        with (self._folder / "said").open("wb") as said:
            child = subprocess.Popen(
                words, cwd=self._folder, env=found, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )
        while child.poll() is None:
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            with connection:
                self._answer(connection, found)
        text = (self._folder / "said").read_text()
        assert child.returncode == 0, text
        return text

    def _answer(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        connection.settimeout(None)
        data = b""
        while data.count(b"\0") < 2 or data.count(b"\0") < 2 + int(data.partition(b"\0")[0]):
            data += connection.recv(65536)
        _, folder, *words, _ = data.decode().split("\0")
        code, said = _run_here(folder, words, environment)
        connection.sendall(f"{code}\n{said}".encode())

    def close(self) -> None:
        self._server.close()


def _run_here(folder: str, words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    said, before, place, mask = StringIO(), dict(os.environ), os.getcwd(), os.umask(0o077)
    os.environ.update(environment)
    os.chdir(folder)
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os.chdir(place)
        os.umask(mask)
        os.environ.clear()
        os.environ.update(before)
    return code, said.getvalue()
