"""``martlet tiered``: what a cold tier has, and whether it is whole."""

import argparse
from pathlib import Path
from typing import Any, Final

from martlet.contracts import Subcommand
from martlet_tiered.commands import listing, verifying
from martlet_tiered.errors import missing_package

__all__ = ["COMMAND"]

EPILOG: Final = """\
examples:
  martlet tiered ls --config martlet.toml                  days and kinds: files, messages, sizes
  martlet tiered ls --url s3://bucket/brokers/a --topics   topics: queues, messages, times
  martlet tiered ls --url /srv/history --topic orders      the queues of a topic: first and last offset
  martlet tiered verify --config martlet.toml              read everything, and compare it with its checksums
The commands only read. They need the place (tiered.url) and its credentials, and no broker.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands to *parser*."""
    parser.epilog = EPILOG
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    for name, text, module in (
        ("ls", "list what the cold tier has", listing),
        ("verify", "read everything that the cold tier has, and compare it with its checksums", verifying),
    ):
        inner = choices.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        add = inner.add_argument
        add("--config", metavar="FILE", type=Path, help="the broker's configuration file")
        add("--url", metavar="URL", help="the place of the cold tier, instead of tiered.url")
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


COMMAND: Final = Subcommand("tiered", "list and verify what the cold tier has", configure, run)
