"""``martlet stats``: the counters of every broker."""

import argparse
from typing import Any

import trio

from martlet.commands.outcome import Exit
from martlet.commands.terminal import print_json, table
from martlet.contracts import Command
from martlet_remoting.client import Admin, ClientError

from .shared import add_json, add_name_server, talking

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet stats                          every counter of every broker
  martlet stats 'store.*' server         only those that begin with store. or server
  martlet stats --every 2 server.bytes   again every two seconds, until Ctrl-C
  martlet stats --json | jq .martlet
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("name", nargs="*", help="only counters whose names begin so")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="again and again, until Ctrl-C")
    add_name_server(parser)
    add_json(parser)


async def show(arguments: Any) -> int:
    starts = tuple(name.rstrip("*") for name in arguments.name)
    async with Admin(arguments.name_server) as admin:
        while True:
            masters = (await admin.cluster()).masters()
            if not masters:
                raise ClientError("name server knows no broker")
            found: dict[str, dict[str, str]] = {}
            for name, address in masters.items():
                counters = await admin.broker_runtime(address)
                found[name] = {key: counters[key] for key in sorted(counters) if not starts or key.startswith(starts)}
            _print(found, arguments.json)
            if arguments.every is None:
                return Exit.OK
            await trio.sleep(arguments.every)


def _print(found: dict[str, dict[str, str]], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for name, counters in found.items():
        print(table((name, ""), counters.items()))


COMMAND = Command("stats", "show the counters of every broker", configure, talking(show))
