"""Shared by the tests of push delivery: a broker on a disk in memory, and a peer that collects when it is woken."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from martlet.broker import Broker
from martlet.contracts import Buffer
from martlet.delivery.fanout import Encoding, parts
from martlet.delivery.subscriptions import Delivery, TopicSubscription
from martlet.message import Message
from martlet.settings import DeliveryConfig
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer, serving
from martlet.testing.stores import ManualClock, small_config


def framed(piece: Buffer) -> list[bytes]:
    return [b"%d:%d:%b\n" % (queue_id, offset, body) for queue_id, offset, _, body, _ in parts(piece)]


LINES = Encoding("lines", framed)


@asynccontextmanager
async def broker_in_memory(
    disk: FakeDisk | None = None,
    delivery: DeliveryConfig | None = None,
    clock: ManualClock | None = None,
    **store: Any,
) -> AsyncIterator[Broker]:
    """A broker on *disk*, with async flush unless *store* sets another."""
    async with serving(
        Path("/data"),
        disk=disk or FakeDisk(),
        delivery=delivery,
        clock=clock or ManualClock(),
        store=small_config(**{"flush": "async", **store}),
    ) as running:
        yield running.broker


def publish(broker: Broker, topic: str, queue_id: int, *bodies: bytes, properties: bytes = b"") -> None:
    """Append and commit."""
    for body in bodies:
        broker.publish(Message(topic, body, properties, queue_id))
    broker.store.committer.commit()


def told(deliveries: list[Delivery]) -> list[str]:
    """Every message as ``queue:offset:body``."""
    found: list[str] = []
    for delivery in deliveries:
        lines = bytes(delivery.data).decode().splitlines()
        assert len(lines) == delivery.count
        assert lines[0].startswith(f"{delivery.queue_id}:")
        assert delivery.first <= int(lines[0].split(":")[1]) <= int(lines[-1].split(":")[1]) < delivery.next
        found += lines
    return found


class Collector:
    """A peer and its subscription, as the server and a handler would serve them."""

    def __init__(self, peer: RecordingPeer, subscription: TopicSubscription) -> None:
        self.peer = peer
        self.subscription = subscription
        self.got: list[str] = []

    async def turn(self, budget_bytes: int = 1 << 20) -> list[str]:
        """Collect once if somebody woke the peer; return what came."""
        await self.peer.run_started()
        if not self.peer.wakes:
            return []
        self.peer.wakes = 0
        came = told(self.subscription.collect(budget_bytes))
        self.got += came
        return came

    async def drain(self, budget_bytes: int = 1 << 20) -> list[str]:
        """Collect until the peer is no longer woken; return all messages."""
        came: list[str] = []
        turns = 0
        while self.peer.wakes or self.peer.started:
            came += await self.turn(budget_bytes)
            turns += 1
            assert turns < 10_000, "the peer is woken without end"
        return came


def subscribe(broker: Broker, topic: str, **options: Any) -> Collector:
    peer = RecordingPeer()
    options.setdefault("credit", 1_000_000)
    return Collector(peer, broker.subscriptions.open(peer, topic, LINES, **options))
