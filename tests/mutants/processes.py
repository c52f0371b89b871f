"""Runs pytest in a process of its own on a copy of the packages, with a limit on its time, memory and files."""

import contextlib
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

__all__ = ["OUTPUT", "PACKAGES", "ROOT", "package_folder", "run_pytest", "source_of"]

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("martlet", "martlet_client", "martlet_remoting", "martlet_stomp", "martlet_timer")
OUTPUT: Final = "output.txt"
MEMORY_MAX: Final = 8 << 30  # of address space: a mutated loop may never end
FILE_MAX: Final = 4 << 30


def package_folder(package: str) -> Path:
    """Return the folder of an installed package, which is not imported for this."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def source_of(module: str) -> str:
    """Return the source of *module*, given as "martlet/store/append/writer.py"."""
    package, _, rest = module.partition("/")
    return (package_folder(package) / rest).read_text()


def run_pytest(packages: Path, arguments: Sequence[str], plugins: Sequence[object], limit_s: float) -> int | None:
    """Run pytest on the *packages* of a tree; return its exit code, None if the time was over.

    The process is a fork: pytest and the libraries are imported once for all runs, the packages only in the fork.
    """
    (packages / OUTPUT).unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        _be_the_child(packages / OUTPUT, lambda: _pytest(packages, arguments, plugins))
    try:
        return _exit_code(pid, limit_s)
    finally:
        _end_group(pid)


def _pytest(packages: Path, arguments: Sequence[str], plugins: Sequence[object]) -> int:
    imported = [name for name in sys.modules if name.partition(".")[0] in PACKAGES]
    assert not imported, f"{imported} were imported before the mutant"
    os.chdir(ROOT)
    sys.path[:0] = [str(packages), str(ROOT)]
    os.environ["PYTHONPATH"] = str(packages)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(dir=packages) as temporary:
        words = ["-q", "-p", "no:cacheprovider", "-m", "not interop", f"--basetemp={temporary}/base"]
        return int(pytest.main([*words, *arguments], plugins=list(plugins)))


def _be_the_child(output: Path, work: Callable[[], int]) -> None:
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream in (1, 2):
            os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_MAX, FILE_MAX))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = work()
    except BaseException:  # the parent sees it in the output, and by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(pid: int, limit_s: float) -> int | None:
    handle = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([handle], [], [], limit_s)
    finally:
        os.close(handle)
    if not ended:
        _end_group(pid)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _end_group(pid: int) -> None:
    """End whatever the tests left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
