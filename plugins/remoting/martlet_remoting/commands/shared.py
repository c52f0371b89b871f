"""What the commands have in common: where the name server is, how times are said, and what errors become."""

import argparse
import os
import signal
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

import trio

from martlet.clock import SystemClock
from martlet.commands.outcome import Unreachable
from martlet_remoting.client import ClientError, ConnectionLost, NameServerUnreachable, RequestTimeout, Settings

__all__ = ["ANSWER_S", "NAME_SERVER", "add_json", "add_name_server", "day_time", "moment_ms", "subcommands", "talking"]

NAME_SERVER: Final = "127.0.0.1:9876"
# The variable that RocketMQ's own clients and tools read.
VARIABLE: Final = "NAMESRV_ADDR"
# Who waits for a command can end it. A machine that stands still for a moment must not fail it, nor let it send twice.
ANSWER_S: Final = 30.0
UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

Work: TypeAlias = Callable[[Any], Awaitable[int]]


def add_name_server(parser: argparse.ArgumentParser) -> None:
    """Every command that talks to a broker asks a name server where it is."""
    parser.add_argument(
        "-n",
        "--name-server",
        metavar="HOST:PORT",
        help=f"the name server to ask, several separated by ;. Default: ${VARIABLE}, else {NAME_SERVER}",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON for programs")


def subcommands(parser: argparse.ArgumentParser) -> Callable[[str, str, Work], argparse.ArgumentParser]:
    """Return what adds a subcommand (name, help, work) to *parser*; each knows its name server and ``--json``."""
    choices = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, text: str, work: Work) -> argparse.ArgumentParser:
        inner = choices.add_parser(
            name,
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_name_server(inner)
        add_json(inner)
        inner.set_defaults(work=work)
        return inner

    return add


def talking(work: Work | None = None) -> Callable[[Any], int]:
    """Return what a `Command` runs: *work*, or the work of the chosen subcommand, in trio."""

    def run(arguments: Any) -> int:
        name_server = arguments.name_server or os.environ.get(VARIABLE) or NAME_SERVER
        arguments.name_server = Settings(name_server, request_timeout_s=ANSWER_S, connect_timeout_s=ANSWER_S)
        chosen: Work = work or arguments.work
        try:
            return trio.run(_until_interrupted, chosen, arguments)
        except (NameServerUnreachable, ConnectionLost, RequestTimeout) as error:
            raise Unreachable(f"{error}; `martlet run` starts a broker, --name-server says where one is") from error
        except ValueError as error:
            raise ClientError(str(error)) from error

    return run


async def _until_interrupted(work: Work, arguments: Any) -> int:
    """Do *work*; the first Ctrl-C cancels it, so that it ends between two steps, the second ends it at once.

    Raises:
      KeyboardInterrupt: it was interrupted, in a group with whatever failed because of it.
    """
    at_once = signal.getsignal(signal.SIGINT)
    if at_once == signal.SIG_IGN:
        return await work(arguments)  # a script's background job, which the Ctrl-C of the script is not for
    token = trio.lowlevel.current_trio_token()
    scope = trio.CancelScope()

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, at_once)
        token.run_sync_soon(scope.cancel)

    signal.signal(signal.SIGINT, interrupt)
    try:
        with scope:
            return await work(arguments)
    except Exception as error:  # outside the scope, which takes its own cancellation out of a group
        if scope.cancel_called:
            raise BaseExceptionGroup("interrupted", [KeyboardInterrupt(), error]) from None
        raise
    finally:
        signal.signal(signal.SIGINT, at_once)
    raise KeyboardInterrupt


def moment_ms(text: str) -> int:
    """Return the time that *text* means: ``2026-03-01T12:00``, or ``15m`` for a quarter of an hour ago.

    Raises:
      ValueError: it is neither.
    """
    number, unit = text[:-1], text[-1:]
    if number.isdecimal() and unit in UNITS_S:
        return SystemClock().now_ms() - int(number) * UNITS_S[unit] * 1000
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        raise ValueError(f"time {text!r} is unknown; for example 2026-03-01T12:00, or 15m for 15 minutes ago") from None


def day_time(ms: int) -> str | None:
    """Return *ms* as local date and time; None for never."""
    if ms <= 0:
        return None
    try:
        return (datetime.fromtimestamp(0) + timedelta(milliseconds=ms)).isoformat(" ", "milliseconds")
    except OverflowError:
        return str(ms)
