"""Whatever ends the broker, sessions and groups get every message of QoS 1 that its publisher was told is stored.

``MARTLET_KILL_ROUNDS`` makes the test with a real process longer, ``MARTLET_CRASH_SEEDS`` the one on a simulated disk.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio
from topics_talk import SocketPeer, Talk, run, topics_broker

from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_topics.config import TopicsConfig

ROUNDS = int(os.environ.get("MARTLET_KILL_ROUNDS", "4"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "3")))
PROCESS = Path(__file__).with_name("topics_process.py")
NAMES = ("a/1", "a/2", "b/1/c", "b/2")


class Consumer:
    """What one subscriber knows over all crashes; it acknowledges late and out of order."""

    def __init__(self, chance: random.Random, *filters: str) -> None:
        self.chance = chance
        self.filters = filters
        self.received: set[bytes] = set()
        self.repeated = 0
        self.unacknowledged: list[int] = []
        self.is_subscribed = trio.Event()

    async def run(self, talk: Talk) -> None:
        """Take messages until the connection ends."""
        assert await talk.ask(*self.filters) == "OK"
        self.is_subscribed.set()
        while True:
            await self.take(talk)

    async def take(self, talk: Talk) -> None:
        for each in await talk.messages(1):
            self.repeated += each.body in self.received
            self.received.add(each.body)
            self.unacknowledged.append(each.packet_id)
        if len(self.unacknowledged) > self.chance.randrange(15):  # fewer than the window, or no more would come
            self.chance.shuffle(self.unacknowledged)
            await talk.say(*(f"ACK {self.unacknowledged.pop()} 1" for _ in range(len(self.unacknowledged) // 2 + 1)))

    async def drain(self, talk: Talk, stored: set[bytes]) -> None:
        """Take what is left, up to the last message that is known to be *stored*."""
        assert await talk.ask(*self.filters) == "OK"
        with trio.move_on_after(120):
            while not self.received >= stored:
                await self.take(talk)
        assert stored - self.received == set()


class World:
    """What a publisher, a durable subscriber and a client of a group know over all crashes."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.number = 0
        self.stored: set[bytes] = set()
        # Packet ids of a session live on, those of a group go with their connection.
        self.session = Consumer(chance, "SUB a/+ 1", "SUB b/# 1")
        self.group = Consumer(chance, "SUB $share/group/# 1")

    async def publish(self, talk: Talk) -> None:
        """Publish runs until the connection ends, once there is somebody to get them."""
        await self.session.is_subscribed.wait()
        await self.group.is_subscribed.wait()
        while True:
            numbers = range(self.number, self.number + self.chance.randrange(1, 30))
            self.number = numbers.stop
            bodies = [b"%d" % each for each in numbers]
            await talk.wire.send(run(1, *((self.chance.choice(NAMES), body) for body in bodies)))
            assert await talk.line() == f"ACK 1 {len(bodies)}"
            self.stored.update(bodies)


@asynccontextmanager
async def talking(address: str, name: str = "") -> AsyncIterator[Talk]:
    host, _, port = address.rpartition(":")
    stream = await trio.open_tcp_stream(host, int(port))
    async with stream:
        talk = Talk(SocketPeer(stream))
        assert (await talk.ask(f"HELLO {name}")).startswith("OK")
        yield talk


async def traffic(world: World, address: str, seconds: float, process: "subprocess.Popen[str]") -> None:
    """Talk over several connections, one after the other for the subscriber, until the broker is killed."""

    async def publisher() -> None:
        with suppress(trio.BrokenResourceError, EOFError, OSError):
            async with talking(address) as talk:
                await world.publish(talk)

    async def subscriber(consumer: Consumer, name: str) -> None:
        with suppress(trio.BrokenResourceError, EOFError, OSError):
            while True:
                with trio.move_on_after(world.chance.uniform(0.05, 0.3)):
                    async with talking(address, name) as talk:
                        if not name:
                            consumer.unacknowledged.clear()
                        await consumer.run(talk)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(publisher)
        nursery.start_soon(subscriber, world.session, "me")
        nursery.start_soon(subscriber, world.group, "")
        await trio.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
        await trio.to_thread.run_sync(process.wait)
        nursery.cancel_scope.cancel()


def kill_rounds(directory: Path, flush: str, world: World) -> None:
    command = [sys.executable, str(PROCESS), str(directory), flush]
    environment = {**os.environ, "PYTHONPATH": str(PROCESS.parents[1])}
    for turn in range(ROUNDS + 1):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            try:
                if turn < ROUNDS:
                    trio.run(traffic, world, address, world.chance.uniform(0.3, 1.0), process)
                else:
                    trio.run(drained, world, address)
            finally:
                process.kill()


async def drained(world: World, address: str) -> None:
    for consumer, name in ((world.session, "me"), (world.group, "")):
        async with talking(address, name) as talk:
            await consumer.drain(talk, world.stored)


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_durable_session_loses_nothing_to_kill_9(tmp_path: Path, flush: str) -> None:
    world = World(random.Random(flush))
    kill_rounds(tmp_path, flush, world)
    assert len(world.stored) > 20 * ROUNDS
    print(f"{len(world.stored)} messages stored, {world.session.repeated} and {world.group.repeated} came again")


@pytest.mark.parametrize("cut", list(Cut))
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_durable_session_loses_nothing_to_a_power_cut(cut: Cut, seed: int) -> None:
    chance = random.Random(seed)
    world, disk = World(chance), FakeDisk()
    store = small_config(flush="sync", segment_bytes=1 << 16, page_bytes=1 << 13, cache_bytes=1 << 16)
    config, directory = TopicsConfig(window=20, lease_s=1), Path("/data")
    for _ in range(3):
        async with (
            topics_broker(directory, config, store=store, disk=disk) as topics,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(world.publish, await topics.connect())
            nursery.start_soon(world.session.run, await topics.connect("me"))
            world.group.unacknowledged.clear()
            nursery.start_soon(world.group.run, await topics.connect())
            goal = len(world.session.received) + chance.randrange(5, 80)
            while len(world.session.received) < goal:
                await trio.lowlevel.checkpoint()
            after = disk.after_power_cut(cut, chance)
            nursery.cancel_scope.cancel()
        disk = after
    async with topics_broker(directory, config, store=store, disk=disk) as topics:
        await world.session.drain(await topics.connect("me", "OK old"), world.stored)
        await world.group.drain(await topics.connect(), world.stored)
    assert len(world.stored) > 15
