"""``martlet stomp``: connections, subscriptions."""

import argparse
from collections.abc import Callable
from typing import Any, Final

from martlet.cli.outcome import Exit, guarded
from martlet.cli.server import add_server_options, server_settings
from martlet.cli.terminal import print_json, table
from martlet.contracts import Command
from martlet_stomp.control import PREFIX

from .client import browse

__all__ = ["COMMAND"]

ADDRESS: Final = "127.0.0.1:61613"
EPILOG: Final = """\
examples:
  martlet stomp connections                     clients, and what they have
  martlet stomp subscriptions --json            with what each has not acknowledged yet
"""
CONNECTIONS: Final = "session", "user", "address", "version", "client_id", "subscriptions", "transactions"
SUBSCRIPTIONS: Final = "session", "id", "destination", "ack", "held", "prefetch", "selector", "durable"


def configure(parser: argparse.ArgumentParser) -> None:
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    parser.epilog = EPILOG

    def add(name: str, text: str, work: Callable[[Any], int]) -> None:
        inner = choices.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        add_server_options(inner, "STOMP", ADDRESS)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.set_defaults(work=work)

    add("connections", "list clients", show_connections)
    add("subscriptions", "list subscriptions, and how many messages each has not acknowledged", show_all)


def run(arguments: Any) -> int:
    """Run the subcommand; return the exit code."""
    work: Callable[[Any], int] = arguments.work
    return guarded(work, arguments)


def show_connections(arguments: Any) -> int:
    return _show(arguments, "connections", CONNECTIONS)


def show_all(arguments: Any) -> int:
    return _show(arguments, "subscriptions", SUBSCRIPTIONS)


def _show(arguments: Any, what: str, heads: tuple[str, ...]) -> int:
    settings = server_settings(arguments)
    # The connection that asks is not worth a line.
    session, rows = browse(settings, f"{PREFIX}{what}")
    rows = [row for row in rows if row["session"] != session]
    if arguments.json:
        print_json(rows)
    else:
        print(table(heads, [[row.get(head) for head in heads] for row in rows]))
    return Exit.OK


COMMAND: Final = Command("stomp", "see clients of a STOMP broker", configure, run)
