"""Own child processes: started in a group of their own, watched, and ended by their id."""

import itertools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

START_LIMIT_S = 180.0  # a JVM on two busy cores has taken 20 s to open its port
STOP_LIMIT_S = 120.0  # RocketMQ stops in 6 s if nothing else runs


class Process:
    """A child with its output in a file; `stop` is orderly, `kill` is not, and both wait for the end."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self.child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def running(self) -> bool:
        return self.child.poll() is None

    def stop(self) -> int:
        """Ask for an orderly end and wait; returns the exit code, -9 if it had to be killed."""
        if self.running:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.child.wait()

    def kill(self) -> None:
        """End it as a crash would."""
        self.child.kill()
        self.child.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, ready: Callable[[], T | None], what: str, limit_s: float = START_LIMIT_S) -> T:
        """Return what *ready* answers once it is not None.

        Raises:
          RuntimeError: the process ended, or *limit_s* passed and it was killed; the end of its output is in the text.
        """
        answer: list[T] = []

        def look() -> bool | None:
            if not self.running:
                return False
            found = ready()
            if found is None:
                return None
            answer.append(found)
            return True

        if not until(look, limit_s):
            state = "did not answer" if self.running else f"ended with {self.child.returncode}"
            self.kill()
            raise RuntimeError(f"{what} {state}; its last output:\n{self.output()[-3000:]}")
        return answer[0]


def until(ready: Callable[[], T | None], limit_s: float, pause_s: float = 0.02) -> T | None:
    """Ask *ready* again and again; returns its first answer that is not None, or None after *limit_s*."""
    deadline = time.monotonic() + limit_s
    while True:
        answer = ready()
        if answer is not None or time.monotonic() > deadline:
            return answer
        time.sleep(pause_s)


def eventually(look: Callable[[], T | None], limit_s: float = 180.0) -> T:
    """As `until`, for what must come: raises TimeoutError when it did not."""
    found = until(look, limit_s, pause_s=0.1)
    if found is None:
        raise TimeoutError(f"did not come true within {limit_s:g} s")
    return found


_asked = itertools.count()
_taken: list[socket.socket] = []


def free_ports(offsets: Sequence[int]) -> int:
    """Return a port P with P + each of *offsets* free now, below the range the kernel gives to clients.

    So it stays free while nobody listens on it, as before a broker's start, which may take its time, and between its
    end and its next start; and no test that runs beside this one, here or in another process, gets it too.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first, last = 12000, low - 10
    if last < first + 1000:  # the kernel gives nearly every port to clients
        last = 32000
    start = (os.getpid() * 37 + next(_asked) * 11) % (last - first)
    for step in range(0, last - first, 3):
        port = first + (start + step) % (last - first)
        if all(_bindable(port + offset) and _take(port + offset) for offset in offsets):
            return port
    raise RuntimeError("no free loopback port")


def _take(port: int) -> bool:
    """Make *port* this process's as long as it lives; False if it is another's."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0martlet-test-port-{port}")
    except OSError:
        mark.close()
        return False
    _taken.append(mark)
    return True


def free_port() -> int:
    """Return a loopback port that nobody listens on now."""
    return free_ports((0,))


def _bindable(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
