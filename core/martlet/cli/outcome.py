"""Exit codes that mean something, and errors as one sentence."""

import sys
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, unique
from typing import Any

from martlet.errors import ConfigError, MartletError, PluginError, StoreError

__all__ = ["Exit", "Unreachable", "UsageError", "complain", "flush_output", "guarded"]


@unique
class Exit(IntEnum):
    """What ``$?`` says after a command."""

    OK = 0
    FAILED = 1  # the answer is no: refused, not found, not healthy
    USAGE = 2  # the command line or the configuration is wrong; argparse uses the same
    UNUSABLE = 3  # nobody answers at the address; or the data directory is in use, has failed, or is damaged
    INTERRUPTED = 130  # Ctrl-C, as shells say it


class Unreachable(MartletError):
    """Nobody answers at the address; the text names it and what would help."""


class UsageError(MartletError):
    """The command line cannot be used; the text names the argument and what to give instead."""


def complain(text: object) -> None:
    """Say on stderr, in one line, what went wrong."""
    if sys.stderr is not None:
        print(f"martlet: {text}", file=sys.stderr)


def flush_output() -> None:
    """Let everything printed so far leave this process. Raises OSError."""
    if sys.stdout is not None:  # else closed by whoever started us: nobody wants it
        sys.stdout.flush()


def guarded(work: Callable[[Any], int], arguments: Any) -> int:
    """Run *work* and return its exit code; what it raises on purpose becomes one sentence and a code.

    A defect keeps its traceback: it is for whoever mends it.
    """
    try:
        code = work(arguments)
        flush_output()  # here, where a reader that has gone is no error
        return code
    except (KeyboardInterrupt, MartletError, OSError, BaseExceptionGroup) as error:
        outcome = _outcome(list(_leaves(error)))
        if outcome is None:
            raise
        return outcome


def _outcome(causes: list[BaseException]) -> Exit | None:
    """The exit code for *causes*; None when one of them is a defect."""
    expected = all(isinstance(cause, KeyboardInterrupt | MartletError | OSError) for cause in causes)
    if expected and any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        # What else went wrong, such as a connection that closed, went wrong because of it.
        return Exit.INTERRUPTED
    if all(isinstance(cause, BrokenPipeError) for cause in causes):
        # The reader of our output has enough (``martlet tail | head``); nothing more may be written, also not at exit.
        sys.stdout = None
        return Exit.OK
    if all(isinstance(cause, MartletError | OSError) for cause in causes):
        return _told(causes)
    return None


def _told(causes: Sequence[BaseException]) -> Exit:
    for text in dict.fromkeys(_sentence(cause) for cause in causes):
        complain(text)
    return _code(causes[0])


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        if error.filename is None:
            return f"input or output failed; {error.strerror}"
        return f"{error.filename!r} cannot be used; {error.strerror}"
    return str(error)


def _code(error: BaseException) -> Exit:
    for kind, code in (
        (ConfigError, Exit.USAGE),
        (PluginError, Exit.USAGE),
        (UsageError, Exit.USAGE),
        (StoreError, Exit.UNUSABLE),
        (Unreachable, Exit.UNUSABLE),
    ):
        if isinstance(error, kind):
            return code
    return Exit.FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    for inner in error.exceptions:
        yield from _leaves(inner)
