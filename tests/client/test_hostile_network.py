"""Brokers that swallow packets, answers that overlap, and listeners of every shape."""

import asyncio
import math
import threading
from dataclasses import dataclass, field

import pytest
import trio
from trio.testing import MockClock

from martlet_client import ConsumeFrom, Message, Producer, ReceivedMessage, SendFailed, aio, pulling
from martlet_client.consumption import CacheLimits, ConsumedQueue, Work
from martlet_client.network import Network
from martlet_client.pulling import Pulled, PullStatus, QueuePulls, subscription_of
from martlet_remoting.wire.packets import MessageQueue

from .fake import Cluster, ThreadCluster

QUEUE = MessageQueue("T", "broker-a", 0)


def reach_late(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, late_s: float) -> None:
    """Let each connection to the broker take *late_s*; every attempt is counted."""
    connect_as_ever = cluster.connect

    async def connect(host: str, port: int) -> trio.abc.Stream:
        if host == "a":
            cluster.connected.append("a:1")
            await trio.sleep(late_s)
        return await connect_as_ever(host, port)

    monkeypatch.setattr(cluster, "connect", connect)


async def test_sends_to_a_broker_that_swallows_packets_fail_together(
    cluster: Cluster, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach_late(cluster, monkeypatch, math.inf)
    took: list[float] = []

    async def send(producer: Producer) -> None:
        start = trio.current_time()
        with pytest.raises(SendFailed):
            await producer.send(Message("T", b"x"))
        took.append(trio.current_time() - start)

    async with Producer(cluster.settings(), "P", retries=0) as producer, trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(send, producer)
    assert len(took) == 20
    assert max(took) < 4
    assert cluster.connected.count("a:1") < 3


async def test_a_send_whose_time_is_over_does_not_wait_for_the_connection(
    cluster: Cluster, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach_late(cluster, monkeypatch, 2)
    async with Producer(cluster.settings(), "P", retries=0) as producer:
        await producer.queues("T")
        start = trio.current_time()
        with pytest.raises(SendFailed):
            await producer.send(Message("T", b"x"), timeout_s=0.5)
        assert trio.current_time() - start < 1
        # The connection is made all the same, for the next.
        await producer.send(Message("T", b"y"))


@dataclass
class SlowOffsets:
    """Offsets that take a second to be written."""

    written: list[int] = field(default_factory=list)

    async def read(self, queue: MessageQueue) -> int | None:
        return None

    async def write(self, queue: MessageQueue, offset: int) -> None:
        self.written.append(offset)
        await trio.sleep(1)

    async def flush(self) -> None:
        return


def consumed(cluster: Cluster, offsets: SlowOffsets) -> ConsumedQueue:
    async def begin(queue: MessageQueue) -> int:
        return 100

    network, subscription = Network(cluster.settings()), subscription_of("T", "*", 1)
    pulls = QueuePulls(network, "G", QUEUE, subscription, 32, is_clustering=True)
    return ConsumedQueue(pulls, CacheLimits(32, 1000, 1 << 20), offsets, begin)


async def test_no_commit_of_the_old_place_follows_a_move(
    cluster: Cluster, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [PullStatus.OFFSET_MOVED]

    async def pull(*arguments: object) -> Pulled:
        if not answers:
            await trio.sleep_forever()
        return Pulled(answers.pop(), [], [], 0, 0, 100, 0)

    monkeypatch.setattr(pulling, "pull", pull)
    offsets = SlowOffsets()
    queue = consumed(cluster, offsets)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run, trio.open_memory_channel[Work](1000)[0])
        await trio.sleep(0.5)
        assert offsets.written == [0]
        await queue.commit()  # as the loop of commits does, while the move is on its way
        assert offsets.written[-1] == 0
        queue.stop()


async def test_a_jump_is_committed_although_an_older_commit_came_after_it(
    cluster: Cluster, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pull(*arguments: object) -> Pulled:
        return await trio.sleep_forever()

    monkeypatch.setattr(pulling, "pull", pull)
    offsets = SlowOffsets()
    queue = consumed(cluster, offsets)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.run, trio.open_memory_channel[Work](1000)[0])
        await trio.sleep(0.1)
        await offsets.write(QUEUE, 7)
        await queue.commit()
        assert offsets.written == [7, 100]
        queue.jump(7)
        await trio.sleep(0.1)
        await queue.commit()
        assert offsets.written[-1] == 7
        queue.stop()


class AsyncCallable:
    """A listener that is an object."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.threads: set[int] = set()
        self.done = asyncio.Event()

    async def __call__(self, message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        self.threads.add(threading.get_ident())
        self.bodies.append(message.body)
        self.done.set()


@pytest.mark.parametrize("plain", [False, True])
def test_a_listener_that_gives_a_coroutine_runs_in_the_asyncio_loop(plain: bool) -> None:
    async def main() -> None:
        cluster = ThreadCluster(lambda made: made.broker.put("T", 0, b"x"))
        listener = AsyncCallable()
        given = (lambda message: listener(message)) if plain else listener
        consumer = aio.PushConsumer(cluster.settings(), "G", given, {"T": "*"}, consume_from=ConsumeFrom.FIRST)
        async with consumer:
            await asyncio.wait_for(listener.done.wait(), 20)
        assert listener.bodies == [b"x"]
        assert listener.threads == {threading.get_ident()}

    asyncio.run(main())
