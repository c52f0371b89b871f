"""``martlet stomp``: connections, subscriptions, queues."""

import argparse
from collections.abc import Callable
from typing import Any, Final

from martlet.cli.outcome import Exit, guarded
from martlet.cli.server import add_server_options, server_settings
from martlet.cli.terminal import print_json, table
from martlet.contracts import Subcommand
from martlet_stomp.admin.control import DELETE, PREFIX
from martlet_stomp.commands.client import browse

__all__ = ["COMMAND"]

ADDRESS: Final = "127.0.0.1:61613"
EPILOG: Final = """\
examples:
  martlet stomp connections                     clients, and what they have
  martlet stomp subscriptions --json            with what each has not acknowledged yet
  martlet stomp queues                          queues that were ever consumed, also without consumers
  martlet stomp delete /queue/orders            forget what the consumers of a queue have had
"""
CONNECTIONS: Final = "session", "user", "address", "version", "client_id", "subscriptions", "transactions"
QUEUES: Final = "destination", "durable", "consumers", "held", "waiting", "auto_delete", "owns_topic", "unused_s"
SUBSCRIPTIONS: Final = "session", "id", "destination", "ack", "held", "prefetch", "selector", "durable"


def configure(parser: argparse.ArgumentParser) -> None:
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    parser.epilog = EPILOG

    def add(name: str, text: str, work: Callable[[Any], int]) -> argparse.ArgumentParser:
        inner = choices.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        add_server_options(inner, "STOMP", ADDRESS)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.set_defaults(work=work)
        return inner

    add("connections", "list clients", show_connections)
    add("subscriptions", "list subscriptions, and how many messages each has not acknowledged", show_all)
    add("queues", "list queues and durable subscriptions, also without consumers", show_queues)
    deleting = add(
        "delete", "forget what the consumers of a queue have had, and delete its topic if it was made for it", delete
    )
    deleting.add_argument("destination", help="such as /queue/orders; it must have no consumers")


def run(arguments: Any) -> int:
    """Run the subcommand; return the exit code."""
    work: Callable[[Any], int] = arguments.work
    return guarded(work, arguments)


def show_connections(arguments: Any) -> int:
    return _show(arguments, "connections", CONNECTIONS)


def show_all(arguments: Any) -> int:
    return _show(arguments, "subscriptions", SUBSCRIPTIONS)


def show_queues(arguments: Any) -> int:
    return _show(arguments, "queues", QUEUES)


def delete(arguments: Any) -> int:
    wanted: str = arguments.destination
    if not wanted.startswith("/"):
        wanted = f"/queue/{wanted}"
    _, rows = browse(server_settings(arguments), f"{DELETE}{wanted}")
    row = rows[0]
    if arguments.json:
        print_json(rows)
    elif row["owns_topic"]:
        print(f"deleted {row['destination']} with its topic and {row['waiting']} waiting messages")
    else:
        print(f"forgot what the consumers of {row['destination']} have had; the topic and its messages stay")
    return Exit.OK


def _show(arguments: Any, what: str, heads: tuple[str, ...]) -> int:
    settings = server_settings(arguments)
    # Omit the connection of this command.
    session, rows = browse(settings, f"{PREFIX}{what}")
    rows = [row for row in rows if row.get("session") != session]
    if arguments.json:
        print_json(rows)
    else:
        print(table(heads, [[row.get(head) for head in heads] for row in rows]))
    return Exit.OK


COMMAND: Final = Subcommand("stomp", "see clients of a STOMP broker", configure, run)
