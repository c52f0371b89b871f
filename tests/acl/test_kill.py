"""A broker is killed between a change of users or rules that it has confirmed and its next start, again and again.

``MARTLET_ACL_KILLS`` says how often (default: 20).
"""

import os
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Final

import pytest
from tests.acl.brokers import write_files
from tests.acl.killed_broker import STEPS, live

KILLS: Final = int(os.environ.get("MARTLET_ACL_KILLS", "20"))
# Changes of a life; a change takes some milliseconds.
CHANGES_MAX: Final = 6


@pytest.fixture
def processes() -> Iterator["Processes"]:
    found = Processes()
    yield found
    found.kill()


class Processes:
    """Starts one broker after the other. They are forks of a process that has loaded the program already."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["tests.acl.killed_broker"])
        self._kill: Callable[[], None] = _do_nothing

    def start(self, directory: Path) -> Connection:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=live, args=(directory, theirs), daemon=True)
        process.start()
        theirs.close()

        def kill() -> None:
            process.kill()
            process.join()
            process.close()
            self._kill = _do_nothing

        self._kill = kill
        return ours

    def kill(self) -> None:
        """End the one that runs by SIGKILL."""
        self._kill()


def _do_nothing() -> None: ...


def known_after(user: str, number: int) -> set[str]:
    """Return what is known of *user* after *number* steps."""
    steps = STEPS[user]
    return steps[(number - 1) % len(steps)][1] if number else set()


def rest_of(pipe: Connection) -> Iterator[str]:
    """Yield the users whose changes were confirmed before the end."""
    try:
        while True:
            yield pipe.recv()
    except (EOFError, OSError):
        pipe.close()


def test_each_confirmed_change_is_there_after_kill_9(tmp_path: Path, processes: Processes) -> None:
    write_files(tmp_path, {"root": {"administrator": True}}, {})
    chance, numbers = Random(5), dict.fromkeys(STEPS, 0)
    for _ in range(KILLS):
        pipe = processes.start(tmp_path)
        may_start = chance.randrange(8) > 0
        if may_start:
            for user, known in pipe.recv().items():
                # The step that was not confirmed may have happened.
                numbers[user] += known != known_after(user, numbers[user])
                assert known == known_after(user, numbers[user]), (user, numbers)
            pipe.send(numbers)
            for _ in range(chance.randrange(CHANGES_MAX)):
                numbers[pipe.recv()] += 1
        processes.kill()
        for user in rest_of(pipe) if may_start else ():
            numbers[user] += 1
    assert min(numbers.values()) >= KILLS // 2
