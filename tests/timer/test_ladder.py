"""The ladder of retries: 16 of them in 4 hours and 46 minutes, then the dead-letter topic, on trio's virtual clock.

Each client has its own words for a failure. tests/interop has the same ladder with the stock clients and short pauses,
tests/timer/test_client.py with the Python client and the real pauses.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from tests.remoting.conftest import FakeClient, FakeClock, Harness, send_ext
from tests.timer.delays import Delays, delays
from trio.testing import MockClock

from martlet.store.format.delays import DELAYS_MS
from martlet_remoting.config import RemotingConfig
from martlet_remoting.wire.codes import RequestCode

RETRIES = 16
PAUSES_MS = DELAYS_MS[2:]
LADDER_S = (4 * 60 + 45) * 60 + 40  # RocketMQ says 4 hours and 46 minutes
RETRY, DEAD = "%RETRY%G", "%DLQ%G"


@asynccontextmanager
async def consumer() -> AsyncIterator[tuple[Delays, FakeClient]]:
    """A broker with delays, and the connection of a member of group G that reads T."""
    async with delays(flush="async") as running, trio.open_nursery() as nursery:
        stages = running.broker.stages.pairs
        harness = Harness(running.broker, RemotingConfig(), FakeClock(), nursery)
        running.broker.set_stages([*running.broker.stages.pairs, *stages])
        client = harness.client()
        await client.heartbeat("c", "G", "t")
        yield running, client
        nursery.cancel_scope.cancel()


async def first(client: FakeClient) -> int:
    """Send a message; return its log position."""
    answer = await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("t", 0, "KEYS\x01k\x02"), b"poison")
    assert answer.code == 0
    return int(str(answer.ext["msgId"])[16:], 16)


async def send_back(client: FakeClient, record: Any, position: int, failures: int, level: int = 0) -> None:
    """Give the message back as the Java, the Go and the Node client do; at level 0 the broker chooses the pause."""
    more = {"originTopic": "t", "originMsgId": "k", "unitMode": "false", "maxReconsumeTimes": f"{RETRIES}"}
    ext = {"offset": str(position), "group": "G", "delayLevel": str(level), **more}
    assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)).code == 0


async def send_back_in_few_words(client: FakeClient, record: Any, position: int, failures: int) -> None:
    """Give the message back as the C++ client does: the group says how many retries there are."""
    ext = {"offset": str(position), "group": "G", "delayLevel": "0"}
    assert (await client.ask(RequestCode.CONSUMER_SEND_MSG_BACK, ext)).code == 0


async def send_again(client: FakeClient, record: Any, position: int, failures: int) -> None:
    """Send the message to the retry topic, as clients do if the broker that has it cannot be reached."""
    properties = f"KEYS\x01k\x02RETRY_TOPIC\x01t\x02DELAY\x01{3 + failures}\x02"
    ext = send_ext(RETRY, 0, properties, j=str(failures + 1), l=str(RETRIES))
    assert (await client.ask(RequestCode.SEND_MESSAGE_V2, ext, b"poison")).code == 0


@pytest.mark.parametrize("fail", [send_back, send_back_in_few_words, send_again])
async def test_a_message_that_always_fails_climbs_all_levels(fail: Any, autojump_clock: MockClock) -> None:
    async with consumer() as (running, client):
        position, record = await first(client), None
        began = trio.current_time()
        for failures, pause_ms in enumerate(PAUSES_MS):
            failed_at = trio.current_time()
            await fail(client, record, position, failures)
            await running.wait_for(failures + 1, RETRY)
            assert pause_ms <= (trio.current_time() - failed_at) * 1000 + 1 < pause_ms + 50
            record = running.records(RETRY)[-1]
            assert (record.body, record.reconsume_times) == (b"poison", failures + 1)
            assert (record.property("RETRY_TOPIC"), record.property("KEYS")) == ("t", "k")
            position = record.position
        assert len(PAUSES_MS) == RETRIES
        assert LADDER_S <= trio.current_time() - began < LADDER_S + 1
        await fail(client, record, position, RETRIES)
        await trio.sleep(0.01)
        (dead,) = running.records(DEAD)
        assert (dead.body, dead.reconsume_times, dead.property("KEYS")) == (b"poison", RETRIES + 1, "k")
        await trio.sleep(PAUSES_MS[-1] / 1000 + 1)
        assert (len(running.records(RETRY)), len(running.records(DEAD))) == (RETRIES, 1)


async def test_a_delayed_send_is_answered_with_the_queue_that_it_names(autojump_clock: MockClock) -> None:
    async with consumer() as (running, client):
        running.broker.topics.update("t", 4, 4)
        answer = await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("t", 3, "DELAY\x017\x02"), b"x")
        assert (answer.code, answer.ext["queueId"]) == (0, "3")


@pytest.mark.parametrize(("level", "pause_ms"), [(1, 1000), (5, 60_000)])
async def test_a_consumer_may_choose_the_level(level: int, pause_ms: int, autojump_clock: MockClock) -> None:
    async with consumer() as (running, client):
        position = await first(client)
        began = trio.current_time()
        await send_back(client, None, position, 0, level)
        await running.wait_for(1, RETRY)
        assert pause_ms <= (trio.current_time() - began) * 1000 + 1 < pause_ms + 50


async def test_a_consumer_may_bury_a_message_at_once(autojump_clock: MockClock) -> None:
    async with consumer() as (running, client):
        await send_back(client, None, await first(client), 0, -1)
        await trio.sleep(0.01)
        assert running.bodies(DEAD) == ["poison"]
        assert running.statistics["pending"] == 0
