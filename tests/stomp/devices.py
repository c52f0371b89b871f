"""Clients that do their work over all crashes of the broker: a producer, a worker with transactions, and a consumer."""

import random
from dataclasses import dataclass, field

import trio
from tests.wire_clients.stomp import Frame, StompClient, frame

IN, OUT = "/queue/in", "/queue/out"
ABORTED = b"aborted "


async def connect(talk: StompClient) -> None:
    await talk.send(frame("CONNECT", accept_version="1.2", host="h"))
    assert (await talk.receive()).command == "CONNECTED"


@dataclass
class Producer:
    """Sends numbered messages; ``stored`` are those with a receipt."""

    chance: random.Random
    stored: set[bytes] = field(default_factory=set)
    number: int = 0

    async def run(self, talk: StompClient) -> None:
        """Send until the connection ends."""
        await connect(talk)
        open_ = list[bytes]()
        while True:
            for _ in range(self.chance.randrange(1, 20)):
                self.number += 1
                body = b"%d" % self.number
                open_.append(body)
                await talk.send(frame("SEND", body, destination=IN, receipt=body.decode()))
            while len(open_) > 20:
                answer = await talk.expect("RECEIPT")
                assert answer["receipt-id"] == open_[0].decode()
                self.stored.add(open_.pop(0))


@dataclass
class Worker:
    """Takes messages from one queue, and sends a result for each to another one, in transactions."""

    chance: random.Random
    committed: set[bytes] = field(default_factory=set)  # with a receipt for COMMIT
    number: int = 0
    came: trio.Event = field(default_factory=trio.Event)

    async def run(self, talk: StompClient) -> None:
        await connect(talk)
        await talk.subscribe(IN, "client-individual", prefetch_count="30")
        while True:
            await self._turn(talk, await talk.some(self.chance.randint(1, 12)))

    async def _turn(self, talk: StompClient, messages: list[Frame]) -> None:
        """Do the work for *messages* in one transaction; sometimes, abort one first."""
        if self.chance.random() < 0.3:
            await self._transact(talk, messages, ABORTED, "ABORT")
        await self._transact(talk, messages, b"", "COMMIT")
        done = {message.body for message in messages}
        assert not done & self.committed, "a message came again after its transaction was committed"
        self.committed |= done
        self.came.set()
        self.came = trio.Event()

    async def _transact(self, talk: StompClient, messages: list[Frame], mark: bytes, end: str) -> None:
        self.number += 1
        name = f"t{self.number}"
        frames = [frame("BEGIN", transaction=name)]
        for message in messages:
            frames.append(frame("SEND", mark + message.body, destination=OUT, transaction=name))
            frames.append(frame("ACK", id=message["ack"], transaction=name))
        await talk.send(*frames, frame(end, transaction=name, receipt=name))
        await talk.receipt(name)

    async def wait_committed(self, count: int) -> None:
        """Wait until *count* messages are committed."""
        while len(self.committed) < count:
            await self.came.wait()


@dataclass
class Consumer:
    """Acknowledges results cumulatively; ``settled`` are those with a receipt for that."""

    chance: random.Random
    received: list[bytes] = field(default_factory=list)
    settled: set[bytes] = field(default_factory=set)
    came: trio.Event = field(default_factory=trio.Event)

    async def run(self, talk: StompClient) -> None:
        await connect(talk)
        await talk.subscribe(OUT, "client", prefetch_count="50")
        while True:
            await self._turn(talk, await talk.some(self.chance.randint(1, 20)))

    async def _turn(self, talk: StompClient, messages: list[Frame]) -> None:
        for message in messages:
            assert message.body not in self.settled, "a message came again after it was acknowledged"
            self.received.append(message.body)
        await talk.send(talk.settling("ACK", messages[-1], receipt="acked"))
        await talk.receipt("acked")
        self.settled.update(message.body for message in messages)
        self.came.set()
        self.came = trio.Event()


async def drain(
    producer: Producer, worker: Worker, consumer: Consumer, working: StompClient, consuming: StompClient
) -> None:
    """Do what is left, until the consumer has a result of each message that has a receipt."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run, working)
        nursery.start_soon(consumer.run, consuming)
        seen = len(consumer.received)
        missing = producer.stored - set(consumer.received)
        while missing:
            await consumer.came.wait()
            missing.difference_update(consumer.received[seen:])
            seen = len(consumer.received)
        nursery.cancel_scope.cancel()


def check(producer: Producer, worker: Worker, consumer: Consumer, results: list[bytes]) -> None:
    """Assert what must hold; *results* is all that the queue of results has."""
    assert len(results) == len(set(results)), "a message was worked on twice"
    assert not [each for each in results if each.startswith(ABORTED)], "what was aborted is there"
    assert producer.stored <= set(results), "a message with a receipt is lost"
    assert worker.committed <= set(results), "a result of a committed transaction is lost"
    assert producer.stored <= set(consumer.received), "a result never came"
    assert set(consumer.received) <= set(results), "a result came that is not stored"
