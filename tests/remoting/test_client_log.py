"""What the log says of remoting clients: when they come and go, and what they are refused for a limit."""

import logging

import orjson
import pytest
import trio

from martlet_remoting.wire.codes import RequestCode, ResponseCode

from .conftest import OpenHarness, pull_ext, send_ext
from .test_in_server import PULL, SEND, Client, serve


async def beat(client: Client, groups: int = 0) -> int:
    consumers = [{"groupName": f"G{number}", "subscriptionDataSet": []} for number in range(groups)]
    body = orjson.dumps({"clientID": "10.0.0.1@7", "consumerDataSet": consumers})
    return (await client.ask(RequestCode.HEART_BEAT, {}, body)).code


def lines(caplog: pytest.LogCaptureFixture, logger: str, level: int) -> list[str]:
    return [each.getMessage() for each in caplog.records if (each.name, each.levelno) == (logger, level)]


async def test_a_client_is_named_by_its_first_heartbeat(
    open_harness: OpenHarness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served = await serve(await open_harness(store={"flush": "async"}))
    client, silent = served.dial(), served.dial()
    for _ in range(2):
        assert await beat(client) == ResponseCode.SUCCESS
    await silent.ask(RequestCode.GET_MIN_OFFSET, {"topic": "T", "queueId": "0"})
    for each in client, silent:
        each.link.near.close()
    await trio.testing.wait_all_tasks_blocked()
    who = "remoting client '10.0.0.1@7' at 10.0.0.1:0"
    assert lines(caplog, "martlet.server", logging.INFO) == [
        f"{who} connected (PYTHON)",
        f"{who} disconnected; the connection ended without a goodbye",
    ]


async def test_what_a_client_is_refused_for_a_limit_is_logged_with_its_key(
    open_harness: OpenHarness, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(await open_harness(store={"flush": "async"}, groups_peer_max=1, parked_peer_max=1))
    client = served.dial()
    assert await beat(client) == ResponseCode.SUCCESS
    for _ in range(3):
        assert await beat(client, 2) == ResponseCode.SYSTEM_BUSY
    await client.send(PULL, pull_ext("T", 0, sysFlag="6", suspendTimeoutMillis="50000"))
    answer = await client.ask(PULL, pull_ext("T", 1, sysFlag="6", suspendTimeoutMillis="50000"))
    assert answer.code == ResponseCode.SYSTEM_BUSY
    limit = served.harness.broker.config.message_bytes_max
    answer = await client.ask(SEND, send_ext("T"), bytes(limit + 1))
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    who = "of the remoting client '10.0.0.1@7' at 10.0.0.1:0"
    groups = "heartbeat names 2 consumer and 0 producer groups; remoting.groups_peer_max is 1"
    pulls = "1 pulls of this connection wait already; remoting.parked_peer_max is 1"
    body = f"message body is {limit + 1} bytes; broker.message_bytes_max is {limit}"
    assert lines(caplog, "martlet.remoting", logging.WARNING) == [
        f"refused request HEART_BEAT {who}; {groups}",
        f"refused request PULL_MESSAGE {who}; {pulls}",
        f"refused request SEND_MESSAGE_V2 {who}; {body}",
    ]


async def test_a_frame_over_the_limit_is_logged_with_its_key(
    open_harness: OpenHarness, caplog: pytest.LogCaptureFixture
) -> None:
    served = await serve(await open_harness(store={"flush": "async"}))
    limit = served.harness.config.frame_bytes_max
    client = served.dial()
    await client.caller.send((limit + 1).to_bytes(4) + bytes(8))
    await client.closed_after()
    text = f"frame length {limit + 1} is over the limit of {limit} bytes (remoting.frame_bytes_max)"
    assert lines(caplog, "martlet.server", logging.WARNING) == [f"remoting 10.0.0.1:0 closed; {text}"]
