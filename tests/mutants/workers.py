"""Processes that work on mutants side by side, each with its own copy of the packages."""

import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import trio
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from .processes import PACKAGES, package_folder

__all__ = ["Workers", "tree"]

IMPORTED_ONCE: Final = (trio,)  # before the fork, for all tests
Key = TypeVar("Key")
Result = TypeVar("Result")

_own_tree: Path


@contextmanager
def tree() -> Iterator[Path]:
    """Make a copy of the packages that can be mutated; the checkout is never touched."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    try:
        for package in PACKAGES:
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(package_folder(package), folder / package, ignore=ignored)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Workers:
    """So many processes; a task is called with the folder that has its process's copy of the packages."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._open = ExitStack()

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("fork")
        trees = context.SimpleQueue()
        for _ in range(self._jobs):
            trees.put(self._open.enter_context(tree()))
        pool = ProcessPoolExecutor(self._jobs, context, _take_tree, (trees,))
        self._pool = self._open.enter_context(pool)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open.close()

    def run(self, title: str, tasks: Sequence[tuple[Key, Callable[[Path], Result]]]) -> Iterator[tuple[Key, Result]]:
        """Yield each task's key and result as they come, and show the progress on stderr."""
        futures = {self._pool.submit(_call, task): key for key, task in tasks}
        columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not tasks) as progress:
            bar = progress.add_task(title, total=len(tasks))
            for future in as_completed(futures):
                progress.advance(bar)
                yield futures[future], future.result()


def _take_tree(trees: "SimpleQueue[Path]") -> None:
    global _own_tree
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _own_tree = trees.get()


def _call(task: Callable[[Path], Result]) -> Result:
    return task(_own_tree)
