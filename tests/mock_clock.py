"""Trio's mock clock, which waits for threads: by itself it jumps to the next deadline while one works.

How far it goes then is a matter of luck: as far as there are deadlines while the thread reads, writes or syncs a file.
Threads with a limiter of their own are not waited for, such as those in which a listener of the client sleeps.
"""

import time
from typing import Final

import trio
from trio.testing import MockClock

PAUSE_S: Final = 0.0005

_jump = MockClock._autojump


def pytest_configure() -> None:
    setattr(MockClock, "_autojump", jump_unless_a_thread_works)  # noqa: B010 - mypy knows it as a method


def jump_unless_a_thread_works(clock: MockClock) -> None:
    """What trio calls when every task waits; it calls again if nothing has changed."""
    if trio.to_thread.current_default_thread_limiter().borrowed_tokens:
        time.sleep(PAUSE_S)
    else:
        _jump(clock)
