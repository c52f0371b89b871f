"""Lets signals end a command as Ctrl-C does, so that it undoes its changes."""

import signal
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["ended_by"]


@contextmanager
def ended_by(*numbers: signal.Signals) -> Generator[None]:
    """Let the signals *numbers* raise `KeyboardInterrupt` in the block, and end the process after it.

    Only the first signal interrupts: systemd and terminals send several. Ignored signals stay ignored, as in the
    background jobs of a script and below ``nohup``.
    """
    came: list[signal.Signals] = []

    def interrupt(number: int, frame: object) -> None:
        if not came:
            came.append(signal.Signals(number))
            handler = signal.getsignal(signal.SIGINT)  # trio's own during `trio.run`
            assert callable(handler)
            handler(signal.SIGINT, None)

    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    with _raising_interrupts():
        for number in before:
            signal.signal(number, interrupt)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if came:
                signal.raise_signal(came[0])


@contextmanager
def _raising_interrupts() -> Generator[None]:
    """Give SIGINT a handler that raises, also where SIGINT is ignored; there it is blocked meanwhile."""
    ignored = signal.getsignal(signal.SIGINT)
    if callable(ignored):
        yield
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
