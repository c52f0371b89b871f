"""Exit codes, and errors reported as one sentence."""

import sys
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum, unique
from typing import Any

from martlet.errors import AddressUnavailable, ConfigError, MartletError, PluginError, StoreError

__all__ = ["Exit", "Unreachable", "UsageError", "complain", "flush_output", "guarded"]


@unique
class Exit(IntEnum):
    """Exit codes of all commands."""

    OK = 0
    FAILED = 1  # refused, not found, not healthy
    USAGE = 2  # invalid command line or configuration; the same as argparse's
    UNUSABLE = 3  # the server is unreachable; or the data directory is in use, has failed, or is damaged
    ADDRESS = 4  # a port to listen on is in use, or the machine does not have its address
    INTERRUPTED = 130  # Ctrl-C; shells use 128 + SIGINT


class Unreachable(MartletError):
    """The server at the address does not answer; the text names the address and suggests what to do."""


class UsageError(MartletError):
    """The command line is invalid; the text names the argument and what to give instead."""


def complain(text: object) -> None:
    """Print *text* as an error on stderr."""
    if sys.stderr is not None:
        print(f"martlet: {text}", file=sys.stderr)


def flush_output() -> None:
    """Flush stdout. Raises OSError."""
    if sys.stdout is not None:  # None when the parent process closed it
        sys.stdout.flush()


def guarded(work: Callable[[Any], int], arguments: Any) -> int:
    """Run *work* and return its exit code; turn an expected error into one sentence and a code.

    An unexpected error keeps its traceback.
    """
    try:
        code = work(arguments)
        flush_output()  # inside the try block: a closed pipe is not an error
        return code
    except (KeyboardInterrupt, MartletError, OSError, BaseExceptionGroup) as error:
        outcome = _report_causes(list(_leaves(error)))
        if outcome is None:
            raise
        return outcome


def _report_causes(causes: list[BaseException]) -> Exit | None:
    """Report *causes* and return the exit code; None if one of them is unexpected."""
    expected = all(isinstance(cause, KeyboardInterrupt | MartletError | OSError) for cause in causes)
    if expected and any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        # Other errors, such as a closed connection, are consequences of the interrupt.
        return Exit.INTERRUPTED
    if all(isinstance(cause, BrokenPipeError) for cause in causes):
        # The reader closed the pipe (``martlet tail | head``); write nothing more, not even at exit.
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
        (AddressUnavailable, Exit.ADDRESS),
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
