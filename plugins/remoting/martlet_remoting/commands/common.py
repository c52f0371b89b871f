"""Shared code of the commands: subcommands, and the output of rows, times and bodies."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import trio

from martlet.cli.terminal import print_json, table
from martlet_remoting.commands.connecting import add_connection

__all__ = ["add_json", "confirmed", "day_time", "one_line", "plural", "print_rows", "subcommands"]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def subcommands(
    parser: argparse.ArgumentParser, examples: str
) -> Callable[[str, str, Callable[[Any], object]], argparse.ArgumentParser]:
    """Return a function that adds a subcommand (name, help, work) to *parser*, with its lines of *examples*."""
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    parser.epilog = examples

    def add(name: str, text: str, work: Callable[[Any], object]) -> argparse.ArgumentParser:
        own = [line for line in examples.splitlines() if f"{line} ".startswith(f"  {parser.prog} {name} ")]
        inner = choices.add_parser(
            name,
            help=text,
            description=f"{text[:1].upper()}{text[1:]}.",
            epilog="\n".join(["examples:", *own]),
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_connection(inner)
        add_json(inner)
        inner.set_defaults(work=work)
        return inner

    return add


def print_rows(heads: Sequence[str], rows: Iterable[Sequence[object]], *, as_json: bool) -> None:
    """Print *rows* as a table, or as a JSON list of objects with *heads* as keys."""
    if as_json:
        print_json([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        print(table(heads, rows))


async def confirmed(question: str) -> bool:
    """Ask *question* on stderr and read the answer from stdin; return whether it is y or yes."""
    print(f"{question} [yes/no] ", end="", file=sys.stderr, flush=True)
    answer = await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True) if sys.stdin else ""
    return answer.strip().lower() in ("y", "yes")


def plural(number: int, noun: str) -> str:
    """Return ``1 message`` or ``2 messages``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def one_line(body: bytes) -> str:
    """Return *body* on one line, with escapes for unprintable characters."""
    text = body.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def day_time(ms: int) -> str | None:
    """Return *ms* as local date and time; None if it is 0 or less."""
    if ms <= 0:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000).isoformat(" ", "milliseconds")
    except (OverflowError, ValueError, OSError):
        return str(ms)
