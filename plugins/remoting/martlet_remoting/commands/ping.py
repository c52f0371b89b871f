"""``martlet ping``: a health check whose exit code tells whether the name server and every broker answer."""

import argparse
import time
from typing import Any, Final, final

import trio
from msgspec import Struct

from martlet.cli.outcome import Exit, Unreachable, complain
from martlet.cli.terminal import print_json
from martlet.contracts import Subcommand
from martlet_client import Admin, BrokerError, ClientError
from martlet_remoting.commands.common import add_json
from martlet_remoting.commands.connecting import add_connection, talking
from martlet_remoting.commands.values import address
from martlet_remoting.wire.codes import RequestCode, ResponseCode

__all__ = ["COMMAND"]

TIMEOUT_S: Final = 3.0

EPILOG = """\
examples:
  martlet ping                                   the name server and every registered broker
  martlet ping --broker 127.0.0.1:10911          one broker, without a name server
  martlet ping --quiet || systemctl restart martlet

Exit codes: 0 all answer; 1 a broker does not answer, or none is registered; 2 invalid command line or configuration;
3 the name server, or the broker given by --broker, does not answer.
"""


@final
class Pong(Struct, frozen=True):
    """The result of one request; *error* is empty if the request was answered."""

    role: str
    name: str
    address: str
    ms: float
    error: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "--broker",
        type=address("--broker"),
        metavar="HOST:PORT",
        help="ping only the broker at this address, without a name server",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only errors")
    add_json(parser)
    add_connection(parser, timeout_s=TIMEOUT_S)


async def ping(arguments: Any) -> int:
    pongs: list[Pong] = []
    async with Admin(arguments.settings) as admin:
        if arguments.broker is not None:
            pongs.append(await _ask_alone(admin, arguments.broker))
        else:
            start = time.perf_counter()
            masters = (await admin.cluster()).masters()
            pongs.append(Pong("name server", "", admin.network.settings.name_server, _since_ms(start), ""))
            async with trio.open_nursery() as nursery:

                async def ping_broker(name: str, address: str) -> None:
                    try:
                        pongs.append(await _ask(admin, name, address))
                    except ClientError as error:
                        pongs.append(Pong("broker", name, address, 0.0, str(error)))

                for name, address in masters.items():
                    nursery.start_soon(ping_broker, name, address)
            if not masters:
                complain("no broker is registered with the name server; `martlet run` starts one")
    _show(pongs, arguments)
    return Exit.OK if all(not pong.error for pong in pongs) and _has_broker(pongs) else Exit.FAILED


async def _ask(admin: Admin, name: str, address: str) -> Pong:
    """Request the broker's counters: Martlet and RocketMQ answer this request without authentication."""
    began = time.perf_counter()
    await admin.network.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO, {})
    return Pong("broker", name, address, _since_ms(began), "")


async def _ask_alone(admin: Admin, address: str) -> Pong:
    """Ask the only broker, at the given address, where another kind of server may listen."""
    try:
        return await _ask(admin, "", address)
    except BrokerError as error:
        if error.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            raise
        raise Unreachable(f"{address} answers, but is no broker: it may be a name server's port") from error


def _since_ms(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 1)


def _has_broker(pongs: list[Pong]) -> bool:
    return any(pong.role == "broker" for pong in pongs)


def _show(pongs: list[Pong], arguments: Any) -> None:
    if arguments.json and not arguments.quiet:
        fields = [
            {"role": p.role, "name": p.name, "address": p.address, "ms": p.ms, "error": p.error or None} for p in pongs
        ]
        print_json(fields)
        return
    for pong in pongs:
        who = " ".join(filter(None, (pong.role, pong.name, f"at {pong.address}")))
        if pong.error:
            complain(f"{who} does not answer; {pong.error}")
        elif not arguments.quiet:
            print(f"{who} answers in {pong.ms} ms")


COMMAND = Subcommand("ping", "check whether the name server and every broker answer", configure, talking(ping))
