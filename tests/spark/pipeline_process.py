"""A pipeline in a process of its own, which tests interrupt and kill."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from tests.interop.process import eventually

__all__ = ["PipelineProcess", "kill_session", "pipeline", "wait_for_batches"]


def of_session(session: int) -> list[int]:
    """The processes that *session* has, which the process with that id began."""
    found: list[int] = []
    for each in Path("/proc").iterdir():
        try:
            state, _, _, its, *_ = (each / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):  # no process, or one that has just ended
            continue
        if int(its) == session and state != "Z":
            found.append(int(each.name))
    return found


def kill_session(session: int) -> bool | None:
    """Kill the processes of *session*; return True if there were none."""
    left = of_session(session)
    for pid in left:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)
    return None if left else True


@final
class PipelineProcess:
    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self.child = child
        self.pid = child.pid

    def kill(self) -> None:
        """Kill the command, Spark's JVM and its Python processes."""
        eventually(lambda: kill_session(self.pid))
        self.child.wait()


@contextmanager
def pipeline(words: Sequence[str], folder: Path) -> Iterator[PipelineProcess]:
    """Run ``martlet`` with *words*; its errors are in the file ``said`` of *folder*. Nothing of it is left."""
    command = [sys.executable, "-m", "martlet", *words, "--master", "local[1]", "--conf", "spark.ui.enabled=false"]
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=said, text=True) as child,
    ):
        process = PipelineProcess(child)
        try:
            yield process
        finally:
            process.kill()


def wait_for_batches(checkpoint: Path, count: int) -> None:
    """Wait until Spark has noted in *checkpoint* that so many batches ended."""
    commits = checkpoint / "commits"
    eventually(lambda: (commits.is_dir() and len([*commits.glob("[0-9]*")]) >= count) or None)
