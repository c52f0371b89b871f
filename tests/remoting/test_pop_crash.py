"""The power is cut at every change of the disk while a group pops: what was acknowledged stays so, leases live on.

``MARTLET_CRASH_STEPS`` makes the workload longer (default 60 steps); ``MARTLET_CRASH_SEEDS`` runs more of them.
"""

import os
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
import trio
from tests.state import power_cuts
from tests.state.power_cuts import cut_everywhere, opened

from martlet.broker import Broker
from martlet.config import fill
from martlet.message import Message
from martlet.testing.disk import Cut, FakeDisk
from martlet_remoting.config import RemotingConfig
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, FakeClock, Harness
from .pop_talk import Popped, ack_ext, pop_ext, popped

STEPS = int(os.environ.get("MARTLET_CRASH_STEPS", "60"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
CONFIG: dict[str, Any] = {"segment_bytes": 8192, "page_bytes": 512, "cache_bytes": 8192}
ACTIONS = ("publish", "pop", "ack", "change", "end", "commit", "flush", "save")
WEIGHTS = (6, 8, 8, 4, 4, 4, 5, 2)
DAY_MS = 86_400_000


def talk(broker: Broker, clock: FakeClock, nursery: trio.Nursery) -> FakeClient:
    return Harness(broker, fill(RemotingConfig, {}, "remoting"), clock, nursery).client()


def ask(client: FakeClient, code: int, ext: dict[str, object]) -> Command:
    """Send a request and return its answer, as it would leave; nothing is committed."""
    opaque = client.send(code, ext)
    client.receive()
    return client.answers.pop(opaque)


async def take(client: FakeClient, **more: object) -> list[Popped]:
    """Pop up to 5 messages; reads in threads are waited for."""
    opaque = client.send(RequestCode.POP_MESSAGE, pop_ext("t", -1, maxMsgNums="5", **more))
    for _ in range(50):
        client.receive()
        if opaque in client.answers:
            break
        await trio.testing.wait_all_tasks_blocked(0.001)
        client.harness.collect()
    answer = client.answers.pop(opaque)
    return popped(answer) if answer.code == 0 else []


class Workload(power_cuts.Workload):
    """Random work of consumers that pop; knows what must be there after a crash, and what must not."""

    def __init__(self, disk: FakeDisk, flush: str, random: Random, nursery: trio.Nursery) -> None:
        super().__init__(disk, flush)
        self.random = random
        self.nursery = nursery
        self.clock = FakeClock()
        self.published = 0
        self.held: dict[int, Popped] = {}
        self.settled: set[int] = set()
        # offset -> when it comes again, and how often it was delivered
        self.leases: dict[int, tuple[int, int]] = {}
        # The same when the log was flushed last, and what has changed since.
        self.durable_settled: set[int] = set()
        self.durable_published = 0
        self.durable_leases: dict[int, tuple[int, int]] = {}
        self.touched: set[int] = set()

    def shared(self) -> Iterable[object]:
        return self.disk, self.random, self.nursery

    async def work(self) -> None:
        broker = await opened(self.disk, self.clock, self.flush, "t", **CONFIG)
        client = talk(broker, self.clock, self.nursery)
        for _ in range(STEPS):
            await self.step(broker, client)
        broker.projections.save()
        await broker.store.close()

    async def step(self, broker: Broker, client: FakeClient) -> None:
        (action,) = self.random.choices(ACTIONS, WEIGHTS)
        self.clock.ms += self.random.randrange(20)
        if action == "publish":
            for _ in range(self.random.randrange(1, 6)):
                broker.publish(Message("t", b"x", queue_id=0))
                self.published += 1
            broker.store.committer.commit()
        elif action == "pop":
            await self.pop(client)
        elif action in ("commit", "flush", "save"):
            broker.store.committer.commit()
            if action != "commit":
                await self.make_durable(broker)
            if action == "save":
                await broker.projections.snapshots.write(broker.projections._driven[0])
        elif self.held:
            self.settle(client, action)

    async def pop(self, client: FakeClient) -> None:
        invisible_ms = self.random.choice((60_000, 7_200_000))
        for message in await take(client, invisibleTime=str(invisible_ms)):
            deliveries = self.leases.get(message.offset, (0, 0))[1] + 1
            assert message.offset not in self.settled
            assert message.times == deliveries - 1
            self.held[message.offset] = message
            self.leases[message.offset] = (message.handle.pop_ms + invisible_ms, deliveries)
            self.touched.add(message.offset)

    def settle(self, client: FakeClient, action: str) -> None:
        for offset in self.random.sample(sorted(self.held), self.random.randrange(1, 1 + min(len(self.held), 5))):
            message = self.held.pop(offset)
            self.touched.add(offset)
            if action == "ack":
                assert ask(client, RequestCode.ACK_MESSAGE, ack_ext(message)).remark is None
                self.settled.add(offset)
                del self.leases[offset]
                continue
            invisible_ms = 0 if action == "end" else self.random.choice((600_000, 3_600_000))
            ext = ack_ext(message, invisibleTime=str(invisible_ms))
            answer = ask(client, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)
            pop_ms = answer.integer("popTime")
            assert pop_ms > message.handle.pop_ms
            self.leases[offset] = (pop_ms + invisible_ms, self.leases[offset][1])
            handle = str(message.handle).split(" ")
            handle[1] = str(pop_ms)
        group = client.harness.state.pops.find("G", "t")
        assert group is not None
        group.shared_group.tick(trio.current_time())

    async def make_durable(self, broker: Broker) -> None:
        await broker.store.flusher.flush()
        self.durable_settled = set(self.settled)
        self.durable_published = self.published
        self.durable_leases = dict(self.leases)
        self.touched.clear()

    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        for later_ms in (0, DAY_MS):
            clock = FakeClock()
            clock.ms = self.clock.ms + later_ms
            broker = await opened(disk.after_power_cut(Cut.KILLED, Random(0)), clock, self.flush, "t", **CONFIG)
            await self.check_leases(broker, clock, late=later_ms > 0)
            broker.store.crash()

    async def check_leases(self, broker: Broker, clock: FakeClock, *, late: bool) -> None:
        """What was acknowledged does not come again; all else does when its time is over, and knows its number."""
        client = talk(broker, clock, self.nursery)
        came: dict[int, int] = {}
        while found := await take(client, invisibleTime="36000000"):
            came |= {message.offset: message.times for message in found}
        assert not came.keys() & self.durable_settled
        for offset, (until_ms, deliveries) in self.durable_leases.items():
            if offset not in self.touched:
                assert (offset in came) == (late or until_ms <= clock.ms), offset
                assert came.get(offset, deliveries) == deliveries
        if late:
            assert set(range(self.durable_published)) - came.keys() <= self.settled


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_pops_survive_a_power_cut_at_every_change(seed: int, flush: str) -> None:
    async with trio.open_nursery() as nursery:
        workload = Workload(FakeDisk(), flush, Random(seed), nursery)
        assert await cut_everywhere(workload) > STEPS
        assert workload.settled
        assert max(deliveries for _, deliveries in workload.leases.values()) > 1
        nursery.cancel_scope.cancel()
