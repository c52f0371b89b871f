"""A test that reaches its time limit (the ini option `timeout`) prints where it waits, and fails; the others go on.

pytest-timeout raises wherever the main thread is. In an idle trio run that is trio's own event loop, which breaks: its
tasks are abandoned, and what is left of them fails later tests. So a test in trio is cancelled first. If it goes on all
the same, pytest-timeout raises in the task that runs; if none runs, the process ends, which xdist reports as a failed
test before it starts another worker.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from types import FrameType

import pytest
import trio

GRACE_S = 30.0  # for a cancelled test to clean up

cancelled = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    fail_here = signal.getsignal(signal.SIGALRM)
    assert callable(fail_here), "pytest-timeout set no signal; set timeout_method to 'signal'"
    signal.signal(signal.SIGALRM, _alarm(item, fail_here))
    return result


def _alarm(
    item: pytest.Item, fail_here: Callable[[int, FrameType | None], object]
) -> Callable[[int, FrameType | None], None]:
    def alarm(number: int, frame: FrameType | None) -> None:
        if not trio.lowlevel.in_trio_run():
            fail_here(number, frame)
        elif cancelled not in item.stash:
            item.stash[cancelled] = True
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            _print_stacks(f"{item.nodeid} reached its time limit and is cancelled")
            trio.lowlevel.current_trio_token().run_sync_soon(_cancel_main_task)
        elif trio.lowlevel.in_trio_task():
            fail_here(number, frame)
        else:
            _end_process(item)

    return alarm


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that was cancelled, whatever it made of that."""
    try:
        return (yield)
    finally:
        if item.stash.get(cancelled, False):
            pytest.fail("the test reached its time limit and was cancelled; its stacks are on stderr", pytrace=False)


def _cancel_main_task() -> None:
    """Cancel the innermost nursery of trio's root task: it holds the task that `trio.run` was given."""
    _root().child_nurseries[-1].cancel_scope.cancel()


def _end_process(item: pytest.Item) -> None:
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    _print_stacks(f"{item.nodeid} reached its time limit and cannot be cancelled; ending its process")
    sys.stderr.flush()
    os._exit(1)


def _print_stacks(why: str) -> None:
    print(f"{why}\n", *_thread_stacks(), *_task_stacks(_root()), sep="", file=sys.stderr)


def _root() -> trio.lowlevel.Task:
    root = trio.lowlevel.current_root_task()
    assert root is not None
    return root


def _thread_stacks() -> Iterator[str]:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        yield f"thread {thread.name}\n"
        yield from traceback.format_stack(frames.get(thread.ident or 0), limit=20)


def _task_stacks(task: trio.lowlevel.Task, depth: int = 0) -> Iterator[str]:
    """Yield where each task waits, the children of a task below it and indented."""
    indent = "    " * depth
    yield f"{indent}task {task.name}\n"
    for line in traceback.StackSummary.extract(task.iter_await_frames()):
        yield f"{indent}  {line.filename}:{line.lineno} {line.name}: {line.line}\n"
    for nursery in task.child_nurseries:
        for child in nursery.child_tasks:
            yield from _task_stacks(child, depth + 1)
