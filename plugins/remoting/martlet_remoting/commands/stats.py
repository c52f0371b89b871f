"""``martlet stats``: the counters of every broker."""

import argparse
import sys
from typing import Any, Final

import trio

from martlet.commands.outcome import Exit
from martlet.commands.terminal import print_json, table
from martlet.contracts import Command
from martlet_remoting.client import Admin, ClientError
from martlet_remoting.client.bodies import load_object, mapping
from martlet_remoting.codes import RequestCode

from .shared import add_json, add_name_server, talking

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet stats                          every counter of every broker
  martlet stats store. server.           only those that begin so
  martlet stats --every 2 server.bytes   again every two seconds, until Ctrl-C
  martlet stats --json | jq .martlet
"""

PREFIX: Final = "martlet."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("name", nargs="*", help="only counters whose names begin so")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="again and again, until Ctrl-C")
    parser.add_argument("--rocketmq", action="store_true", help="under the names of RocketMQ's tools instead")
    add_name_server(parser)
    add_json(parser)


async def show(arguments: Any) -> int:
    starts = tuple(arguments.name)
    async with Admin(arguments.name_server) as admin:
        while True:
            masters = (await admin.cluster()).masters()
            if not masters:
                raise ClientError("name server knows no broker")
            found: dict[str, dict[str, str]] = {}
            for name, address in masters.items():
                counters = await _counters(admin, address, rocketmq=arguments.rocketmq)
                found[name] = {key: counters[key] for key in sorted(counters) if not starts or key.startswith(starts)}
            _print(found, arguments.json)
            sys.stdout.flush()
            if arguments.every is None:
                return Exit.OK
            await trio.sleep(arguments.every)


async def _counters(admin: Admin, address: str, *, rocketmq: bool) -> dict[str, str]:
    """Martlet's own counters where the broker has them, else what every RocketMQ broker tells."""
    answer = await admin.network.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {"counters": "all"})
    told = {str(name): str(value) for name, value in mapping(load_object(answer.body), "table").items()}
    own = {name.removeprefix(PREFIX): value for name, value in told.items() if name.startswith(PREFIX)}
    if own and not rocketmq:
        return own
    return {name: value for name, value in told.items() if not name.startswith(PREFIX)}


def _print(found: dict[str, dict[str, str]], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    for name, counters in found.items():
        print(table((name, ""), counters.items()))


COMMAND = Command("stats", "show the counters of every broker", configure, talking(show))
