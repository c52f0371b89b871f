"""``martlet tiered``: what a cold tier has, how far it is, whether it is whole, and repairs."""

import argparse
from pathlib import Path
from typing import Any, Final

from martlet.contracts import Subcommand
from martlet_tiered.commands import listing, purging, rebuilding, restoring, status, verifying
from martlet_tiered.errors import missing_package

__all__ = ["COMMAND"]

EPILOG: Final = """\
examples:
  martlet tiered ls --config martlet.toml                  days and kinds: files, messages, sizes
  martlet tiered ls --url s3://bucket/brokers/a --topics   topics: queues, messages, times
  martlet tiered ls --url /srv/history --topic orders      the queues of a topic: first and last offset
  martlet tiered verify --config martlet.toml              read everything, and compare it with its checksums
  martlet tiered status --config martlet.toml              how far it is, and how far the broker is behind with it
  martlet tiered rebuild --config martlet.toml             make missing or damaged keys, and the index, again
  martlet tiered purge --config martlet.toml               remove the bytes of deleted topics now
  martlet tiered restore --from s3://bucket/brokers/a /var/lib/martlet    a data directory for a new machine
ls, status and verify only read. The commands need the place (tiered.url) and its credentials, and no broker. rebuild
may run beside a broker, too: it leaves the broker's index alone then, and messages of a file are not found by key while
its keys are replaced. restore ends the uploads of a broker that still runs.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to *parser*."""
    parser.epilog = EPILOG
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    for name, text, module in (
        ("ls", "list what the cold tier has", listing),
        ("status", "show how far the cold tier is, and how far a running broker is behind with it", status),
        ("verify", "read everything that the cold tier has, and compare it with its checksums", verifying),
        ("rebuild", "make the keys of files, and the index of a stopped broker, again from the data files", rebuilding),
        ("purge", "remove the bytes of deleted topics now, and what the table does not need any more", purging),
        ("restore", "make the data directory of a broker whose disk is lost", restoring),
    ):
        inner = choices.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        add = inner.add_argument
        add("--config", metavar="FILE", type=Path, help="the broker's configuration file")
        add(
            "--from" if name == "restore" else "--url",
            dest="url",
            metavar="URL",
            help="the place of the cold tier, instead of tiered.url",
        )
        add("--set", metavar="tiered.KEY=VALUE", action="append", default=[], help="set one key of [tiered]")
        add("--json", action="store_true", help="print a JSON object")
        module.configure(inner)
        inner.set_defaults(work=module.run)


def run(arguments: Any) -> int:
    """Run the chosen subcommand."""
    try:
        code: int = arguments.work(arguments)
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    return code


COMMAND: Final = Subcommand("tiered", "list, verify, rebuild, purge and restore what the cold tier has", configure, run)
