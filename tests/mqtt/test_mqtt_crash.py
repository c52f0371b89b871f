"""Whatever ends the broker: QoS 1 loses nothing, QoS 2 loses nothing and brings nothing twice.

``MARTLET_CRASH_SEEDS`` makes the test on a simulated disk longer.
"""

import math
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from tests.broker_process import BrokerProcess
from tests.kills import ROUNDS, survive_kills
from tests.mqtt.devices import Receiver, Sender, check
from tests.wire_clients.mqtt import MqttClient, mqtt_broker, mqtt_process
from tests.wire_clients.streams import Wire, dialed

from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.packets import Packet

SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "3")))
GONE = (trio.BrokenResourceError, trio.ClosedResourceError, EOFError, OSError)


class ShortClient(MqttClient):
    """A connection that the client drops after some packets."""

    def __init__(self, wire: Wire, packets: float) -> None:
        super().__init__(wire)
        self._left = packets

    async def receive(self) -> Packet:
        if self._left <= 0:
            raise EOFError("the client drops the connection")
        self._left -= 1
        return await super().receive()


@asynccontextmanager
async def talking(address: str, packets: float = math.inf) -> AsyncIterator[MqttClient]:
    async with dialed(address) as wire:
        yield ShortClient(wire, packets)


async def connected(device: Sender | Receiver, address: str, chance: random.Random) -> None:
    """MqttClient over several connections, one after the other, without end."""
    while True:
        with suppress(*GONE):
            async with talking(address, chance.randrange(5, 150)) as talk:
                await device.connect(talk)
                await device.run(talk)
        await trio.lowlevel.checkpoint()


async def traffic(sender: Sender, receiver: Receiver, victim: BrokerProcess) -> None:
    """Let both talk until the broker is killed after some messages."""
    address = victim.addresses["mqtt"]
    goal = len(receiver.received) + sender.chance.randrange(50, 300)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connected, receiver, address, sender.chance)
        await receiver.subscribed.wait()
        nursery.start_soon(connected, sender, address, sender.chance)
        await receiver.wait_received(goal)
        victim.kill()
        nursery.cancel_scope.cancel()


async def drained(sender: Sender, receiver: Receiver, address: str) -> None:
    async with talking(address) as talk:
        await sender.connect(talk)
        await sender.finish(talk)
    async with talking(address) as talk:
        await receiver.connect(talk)
        while not sender.stored.keys() <= receiver.received.keys():
            await receiver.take(talk)


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_kill_9_loses_nothing_and_repeats_nothing_of_qos_2(tmp_path: Path, flush: str) -> None:
    chance = random.Random(flush)
    sender, receiver = Sender(chance), Receiver(chance)

    def work(victim: BrokerProcess) -> None:
        trio.run(traffic, sender, receiver, victim)

    def finish(victim: BrokerProcess) -> None:
        trio.run(drained, sender, receiver, victim.addresses["mqtt"])

    survive_kills(partial(mqtt_process, tmp_path, flush), work, finish)
    check(sender, receiver)
    assert len(sender.stored) > 50 * ROUNDS


@pytest.mark.parametrize("cut", list(Cut))
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_power_cut_loses_nothing_and_repeats_nothing_of_qos_2(cut: Cut, seed: int) -> None:
    chance = random.Random(seed)
    sender, receiver, disk = Sender(chance), Receiver(chance), FakeDisk()
    store = small_config(flush="sync", segment_bytes=1 << 16, page_bytes=1 << 13, cache_bytes=1 << 16)
    config, directory = MqttConfig(in_flight_max=20), Path("/data")

    async def connected(device: Sender | Receiver, talk: MqttClient) -> None:
        await device.connect(talk)
        await device.run(talk)

    for _ in range(3):
        async with mqtt_broker(directory, config, store=store, disk=disk) as mqtt, trio.open_nursery() as nursery:
            nursery.start_soon(connected, receiver, mqtt.open())
            await receiver.subscribed.wait()
            nursery.start_soon(connected, sender, mqtt.open())
            goal = len(receiver.received) + chance.randrange(5, 80)
            await receiver.wait_received(goal)
            after = disk.after_power_cut(cut, chance)
            if cut in {Cut.REORDERED, Cut.TORN}:
                sender.power_cut()
            nursery.cancel_scope.cancel()
        disk = after
    async with mqtt_broker(directory, config, store=store, disk=disk) as mqtt:
        talk = mqtt.open()
        await sender.connect(talk)
        await sender.finish(talk)
        talk = mqtt.open()
        await receiver.connect(talk)
        while not sender.stored.keys() <= receiver.received.keys():
            await receiver.take(talk)
    check(sender, receiver)
    assert len(sender.stored) > 15
