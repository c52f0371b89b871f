"""Our Python client and a broker with delays, both on trio's virtual clock: retries over hours, and delayed sends."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import final

import pytest
import trio
from tests.client.listening import Listener
from tests.timer.delays import Delays, delays
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.contracts import Protocol
from martlet.store.format.delays import DELAYS_MS
from martlet.testing.peers import MemoryPeer
from martlet_client import Admin, ClientSettings, ConsumeFrom, Message, Outcome, Producer, PushConsumer
from martlet_remoting.config import RemotingConfig
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.plugin import NameServerPlugin
from martlet_remoting.plugin import RemotingPlugin

NAMES_PORT = 9876


@final
class MemoryStream(trio.abc.Stream):
    """The client's end of a connection to a server, as a stream."""

    def __init__(self, peer: MemoryPeer) -> None:
        self._peer = peer

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._peer.send(bytes(data))

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._peer.receive_some()

    async def aclose(self) -> None:
        self._peer.close()
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Delays, ClientSettings]]:
    """A broker with delays and its name server, and the settings of clients that connect to them in memory."""
    remoting = RemotingPlugin(RemotingConfig(listen="127.0.0.1:0", vip=False))
    names = NameServerPlugin(NameServerConfig(listen="127.0.0.1:0"))
    protocols: list[Protocol] = []

    def ports(broker: Broker) -> Sequence[Protocol]:
        found = [each.martlet_capabilities(broker) for each in (names, remoting)]
        broker.capabilities = {**broker.capabilities, **found[0], **found[1]}
        protocols.extend([*names.martlet_protocols(broker), *remoting.martlet_protocols(broker)])
        return protocols

    async with delays(flush="async", ports=ports) as running:
        broker, serving = running.broker, running.serving
        first = [("remoting", stage) for stage in remoting.martlet_stages(broker)]
        broker.set_stages([*first, *broker.stages.pairs])
        for service in [*remoting.martlet_services(broker), *names.martlet_services(broker)]:
            serving.nursery.start_soon(service)

        async def connect(host: str, port: int) -> trio.abc.Stream:
            return MemoryStream(serving.connect(protocols[0 if port == NAMES_PORT else 1]))

        yield running, ClientSettings(f"names:{NAMES_PORT}", connect=connect, clock=running.clock)


async def test_a_message_that_always_fails_climbs_all_levels_and_becomes_a_dead_letter(
    autojump_clock: MockClock,
) -> None:
    times: list[float] = []

    def fail(message: object) -> Outcome:
        times.append(trio.current_time())
        return Outcome.RETRY

    async with cluster() as (running, settings):
        async with Producer(settings, "p") as producer:
            await producer.send(Message("t", b"poison"))
        listener = Listener(fail)
        async with PushConsumer(settings, "G", listener, {"t": "*"}, consume_from=ConsumeFrom.FIRST):
            await running.wait_for(1, "%DLQ%G", within_s=100_000)
        due = zip(pairwise(times), DELAYS_MS[2:], strict=True)
        late_s = [later - earlier - delay_ms / 1000 for (earlier, later), delay_ms in due]
        assert min(late_s) >= -0.001
        assert max(late_s) < 0.1
        assert [message.reconsume_times for message in listener.messages] == list(range(17))
        assert running.bodies("%DLQ%G") == ["poison"]


@pytest.mark.parametrize(("level", "delay_s"), [(1, 1), (18, 7200)])
async def test_a_delayed_send_arrives_when_it_is_due(level: int, delay_s: int, autojump_clock: MockClock) -> None:
    async with cluster() as (running, settings), Producer(settings, "p") as producer:
        began = trio.current_time()
        await producer.send(Message("t", b"later", delay_level=level))
        assert await running.wait_for(1) == ["later"]
        assert delay_s <= trio.current_time() - began + 0.001 < delay_s + 0.1


async def test_runtime_information_says_what_waits(autojump_clock: MockClock) -> None:
    async with cluster() as (running, settings), Producer(settings, "p") as producer, Admin(settings) as admin:
        before = await admin.broker_runtime("broker:10911")
        assert "scheduleMessageOffset_1" not in before
        for _ in range(3):
            await producer.send(Message("t", b"level", delay_level=1))
        await trio.sleep(0.01)
        assert (await admin.broker_runtime("broker:10911"))["scheduleMessageOffset_1"] == "0,3"
        await running.wait_for(3)
        await producer.send(Message("t", b"level", delay_level=1))
        for _ in range(20):
            await producer.send(Message("t", b"timer", delay_ms=60_000))
        await trio.sleep(0.5)
        table = await admin.broker_runtime("broker:10911")
        assert table["scheduleMessageOffset_1"] == "3,4"
        assert (table["timerCongestNum"], table["timerReadBehind"]) == ("20", "0")
        assert 1.5 <= float(table["timerEnqueueTps"]) <= 20
        await trio.sleep(59.4)
        assert (await admin.broker_runtime("broker:10911"))["timerDequeueTps"] == "0.0"
        await running.wait_for(24)
        table = await admin.broker_runtime("broker:10911")
        assert table["timerCongestNum"] == "0"
        assert 1.5 <= float(table["timerDequeueTps"]) <= 20
