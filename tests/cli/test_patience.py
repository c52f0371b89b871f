"""A command succeeds although the broker, or its own machine, stalls for a moment."""

import argparse
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from tests.client.fake import NAME_SERVER, Cluster, Reply
from trio.testing import MockClock

from martlet.cli.outcome import Exit
from martlet_client import ClientSettings, NameServerUnreachable
from martlet_remoting.commands.connecting import TIMEOUT_S, talking
from martlet_remoting.commands.ping import ping
from martlet_remoting.commands.send import configure, send
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

STILL_S = 20.0


class StandsStill:
    """The answers of a broker that stalls at the first request and then continues."""

    def __init__(self, cluster: Cluster) -> None:
        self.overrides = cluster.broker.overrides

    def __call__(self, command: Command) -> Reply:
        del self.overrides[command.code]
        return Reply(hold=trio.Event(), hold_s=STILL_S)


def test_commands_wait_for_answers() -> None:
    seen: list[ClientSettings] = []

    async def look(arguments: Any) -> int:
        seen.append(arguments.settings)
        return Exit.OK

    assert talking(look)(argparse.Namespace(name_server="names:9876")) == Exit.OK
    assert (seen[0].name_server, min(seen[0].request_timeout_s, seen[0].connect_timeout_s) > STILL_S) == (
        "names:9876",
        True,
    )


async def test_a_message_is_not_sent_twice(
    nursery: trio.Nursery, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(nursery)
    cluster.broker.overrides[RequestCode.SEND_MESSAGE_V2] = StandsStill(cluster)
    parser = argparse.ArgumentParser()
    configure(parser)
    arguments = parser.parse_args(["T", "x"])
    arguments.settings = replace(cluster.settings(), request_timeout_s=TIMEOUT_S)
    assert await send(arguments) == Exit.OK
    assert capsys.readouterr().out.startswith("stored on ")
    assert len(cluster.broker.asked(RequestCode.SEND_MESSAGE_V2)) == 2, "once, and once more looked at"


async def test_send_does_not_wait_for_a_name_server_that_is_not_there(
    nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    """A program outlasts an outage; whoever types a command may have mistyped the address."""
    cluster = Cluster(nursery)
    cluster.names_down.add(NAME_SERVER)
    parser = argparse.ArgumentParser()
    configure(parser)
    arguments = parser.parse_args(["T", "x"])
    arguments.settings = replace(cluster.settings(), request_timeout_s=TIMEOUT_S)
    began = trio.current_time()
    with pytest.raises(NameServerUnreachable):
        await send(arguments)
    assert trio.current_time() == began, "in virtual time"


async def test_ping_tells_the_broker_that_does_not_answer(
    nursery: trio.Nursery, autojump_clock: MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(nursery, brokers=2)
    cluster.brokers[0].overrides[RequestCode.GET_BROKER_RUNTIME_INFO] = lambda command: Reply(body=b"{}")
    cluster.brokers[1].down = True
    arguments = argparse.Namespace(settings=cluster.settings(), broker=None, json=False, quiet=False)
    assert await ping(arguments) == Exit.FAILED
    said = capsys.readouterr()
    assert "broker broker-a at a:1 answers in " in said.out
    assert said.err == (
        "martlet: broker broker-b at b:1 does not answer; connection to b:1 cannot be opened: connection refused\n"
    )
