"""``martlet stats``: the counters of every broker, or their rates."""

import argparse
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import trio

from martlet.cli.outcome import Exit, flush_output
from martlet.cli.terminal import print_json, print_json_line, table
from martlet.contracts import Subcommand
from martlet_client import Admin, ClientError
from martlet_remoting.commands.common import add_json
from martlet_remoting.commands.connecting import add_connection, talking
from martlet_remoting.commands.values import seconds
from martlet_remoting.wire.answers.bodies import load_object, mapping
from martlet_remoting.wire.codes import RequestCode

__all__ = ["COMMAND"]

NUMBER: Final = re.compile(r"-?\d{1,18}(\.\d+)?(e[+-]?\d{1,3})?", re.ASCII)

EPILOG = """\
examples:
  martlet stats                          every counter of every broker
  martlet stats store. server.           counters whose names begin with store. or server.
  martlet stats --every 2 server.bytes   print every two seconds, until Ctrl-C
  martlet stats --rates                  change per second, measured over one second
  martlet stats --rates --every 10 store.
  martlet stats --json | jq .martlet
With --every, --json prints one object per line.
"""

PREFIX: Final = "martlet."
RATES_S: Final = 1.0

Counters = Mapping[str, Mapping[str, str]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("name", nargs="*", help="only counters whose names begin with this")
    parser.add_argument(
        "--every", type=seconds("--every"), metavar="SECONDS", help="repeat at this interval, until Ctrl-C"
    )
    parser.add_argument(
        "--rates",
        action="store_true",
        help=f"print changes per second, measured over {RATES_S:g} s or over --every; omit unchanged counters",
    )
    parser.add_argument("--rocketmq", action="store_true", help="print RocketMQ's counters instead of Martlet's")
    add_json(parser)
    add_connection(parser)


async def show(arguments: Any) -> int:
    async with Admin(arguments.settings) as admin:
        before, before_s = await _read(admin, arguments), time.monotonic()
        if not arguments.rates:
            _print(before, arguments)
        while arguments.rates or arguments.every is not None:
            await trio.sleep(arguments.every or RATES_S)
            now, now_s = await _read(admin, arguments), time.monotonic()
            _print(_rates(before, now, now_s - before_s) if arguments.rates else now, arguments)
            before, before_s = now, now_s
            if arguments.every is None:
                break
    return Exit.OK


async def _read(admin: Admin, arguments: Any) -> Counters:
    """Return the selected counters of each broker."""
    starts = tuple(arguments.name)
    masters = (await admin.cluster()).masters()
    if not masters:
        raise ClientError("no broker is registered with the name server; `martlet run` starts one")
    found: dict[str, dict[str, str]] = {}
    for name, address in masters.items():
        counters = await _counters(admin, address, rocketmq=arguments.rocketmq)
        found[name] = {key: counters[key] for key in sorted(counters) if not starts or key.startswith(starts)}
    for start in starts:
        if not any(key.startswith(start) for counters in found.values() for key in counters):
            raise ClientError(f"counter {start!r} is unknown; `martlet stats` lists all")
    return found


async def _counters(admin: Admin, address: str, *, rocketmq: bool) -> dict[str, str]:
    """Return Martlet's own counters if the broker has them and *rocketmq* is false, else RocketMQ's."""
    answer = await admin.network.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {"counters": "all"})
    told = {str(name): str(value) for name, value in mapping(load_object(answer.body), "table").items()}
    own = {name.removeprefix(PREFIX): value for name, value in told.items() if name.startswith(PREFIX)}
    if own and not rocketmq:
        return own
    return {name: value for name, value in told.items() if not name.startswith(PREFIX)}


def _rates(before: Counters, now: Counters, spent_s: float) -> dict[str, dict[str, float]]:
    """Return the change per second of each counter that changed."""

    def changes(old_counters: Mapping[str, str], new_counters: Mapping[str, str]) -> Iterator[tuple[str, float]]:
        for key, text in new_counters.items():
            change = round((_number(text) - _number(old_counters.get(key, text))) / spent_s, 2)
            if change:
                yield key, change

    return {name: dict(changes(before.get(name, {}), counters)) for name, counters in now.items()}


def _number(text: str) -> float:
    """Return *text* as a number; 0, and so a rate of 0, if *text* is no number."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _typed(value: object) -> object:
    """Return *value* as a number if it is the text of a number: on the wire all counters are text."""
    if isinstance(value, str) and NUMBER.fullmatch(value):
        return float(value) if "." in value or "e" in value else int(value)
    return value


def _print(found: Mapping[str, Mapping[str, object]], arguments: Any) -> None:
    if arguments.json:
        typed = {name: {key: _typed(value) for key, value in counters.items()} for name, counters in found.items()}
        (print_json if arguments.every is None else print_json_line)(typed)
    else:
        for name, counters in found.items():
            print(table((name, "per second" if arguments.rates else ""), counters.items()))
            if not counters:
                print("nothing changed")
    flush_output()


COMMAND = Subcommand("stats", "show the counters of every broker, or their rates", configure, talking(show))
