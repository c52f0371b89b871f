"""Calls in threads that nobody can stop, and the end of a process in which some of them are still under way.

An interpreter that ends while a library is at work in a thread crashes: the thread comes back from its call, finds no
interpreter, and is unwound through the frames of the library (bpo-42969). So the process ends without the clean-up of
the interpreter then; everything that matters is on the disk before.
"""

import os
import sys
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["end_process", "noted"]

T = TypeVar("T")

# The calls of this process, also those that were abandoned.
_live: Final[set[object]] = set()


def noted(work: Callable[[], T]) -> T:
    """Return the result of *work*, or raise its error; `end_process` knows of it meanwhile."""
    call = object()
    _live.add(call)
    try:
        return work()
    finally:
        _live.discard(call)


def end_process(code: int) -> None:
    """End the process with exit *code* at once if a call is under way; otherwise return."""
    if not _live:
        return
    import logging

    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
