"""How long clients that are behind wait for each other, in the broker's process.

    python benchmarks/behind.py [--messages 1000000] [--clients 10000] [--rate 10000]

- alone: a cursor that takes everything reads the whole log; what one sweep takes.
- near: while such a cursor catches up and publishers send *rate* messages/s, a cursor returns that is 1,000 messages
  behind, and takes a name or everything; one of these messages has the name. How long after its return does it get
  its first message, and when is it at the tail?
- mixed: *clients* cursors with a name each, and one with all, return together at all distances. How long until all are
  at the tail, with one sweep that takes them along from the furthest on, and with several?
- live: what a cursor at the tail waits for a message, with and without one that is far behind.

Messages have 256 B and as many names as there are clients, in 8 queues. Nothing is sent over sockets. Each figure is of
one run.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import quantiles
from typing import Final

import trio

from martlet.broker import Broker
from martlet.delivery.catch_up import sweeps
from martlet.delivery.cursor import Cursor, CursorPlace
from martlet.delivery.feed import Feed
from martlet.message import Message
from martlet.store import StoreConfig
from martlet.testing.peers import serving

QUEUES = 8
NEAR = 1000
NAME = 7
A_READ = 40
COLLECT_BYTES = 1 << 18
LIVE_S = 5.0
SETTLE_S = 2.0
LOOK_S = 0.001
# What a publisher that was kept waiting makes up for; more than that would keep the readers waiting.
LATE_S = 0.1


class Client:
    """Collects what its cursor brings as soon as it is woken; if it *watches*, keeps how old each message was."""

    def __init__(self, feed: Feed, topic_filter: str, position: int | None, *, watches: bool = False) -> None:
        self.count = 0
        self.first_s = 0.0
        self.ages: list[float] = []
        self._watches = watches
        self._began = time.monotonic()
        self.cursor: Cursor = feed.open(self._wake, {topic_filter: None}, position)

    def _wake(self) -> None:
        WOKEN[self] = None

    def collect(self) -> None:
        """Take what there is."""
        for run, _ in self.cursor.collect(COLLECT_BYTES):
            self.count += run.count
            self.first_s = self.first_s or time.monotonic() - self._began
            if self._watches:
                now = time.monotonic()
                self.ages += [now - float(bytes(record.body[:20])) for record in run.records()]

    async def until_at_tail(self) -> float:
        """Return how long it took, in seconds."""
        await until(lambda: self.cursor.place is CursorPlace.TAIL)  # it gets there without a message for it
        return time.monotonic() - self._began


WOKEN: Final[dict[Client, None]] = {}


async def until(condition: Callable[[], bool]) -> None:
    """Wait until *condition* holds; looks every millisecond."""
    while True:
        if condition():
            return
        await trio.sleep(LOOK_S)


def _is_readable(broker: Broker, position: int) -> bool:
    return broker.store.readable >= position


def _has_received(client: Client) -> bool:
    return client.count > 0


async def collect_all() -> None:
    """Let clients collect, as peers with room do."""
    while True:
        for client in list(islice(WOKEN, 64)):
            del WOKEN[client]
            client.collect()
        await trio.sleep(0 if WOKEN else 0.0005)


def publish(broker: Broker, number: int, names: int) -> int:
    """Publish a message and return its log position."""
    return publish_name(broker, number * 7919 % names)


def publish_name(broker: Broker, name: int) -> int:
    body = f"{time.monotonic():020.6f}".encode().ljust(256, b"x")
    return broker.publish(Message("bench", body, b"TAGS\x01n/%d\x02" % name, name % QUEUES)).position


async def fill(broker: Broker, count: int, names: int) -> list[int]:
    """Publish *count* messages; return their positions."""
    positions: list[int] = []
    for start in range(0, count, A_READ):
        positions += [publish(broker, number, names) for number in range(start, min(start + A_READ, count))]
        broker.store.committer.commit()
        await trio.lowlevel.checkpoint()
    await trio.sleep(SETTLE_S)  # lets the key index catch up
    return positions


async def keep_publishing(broker: Broker, rate: int, names: int) -> None:
    began, number = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - began) * rate)
        number = max(number, due - int(LATE_S * rate))
        while number < due:
            for _ in range(min(A_READ, due - number)):
                publish(broker, number, names)
                number += 1
            broker.store.committer.commit()
        await trio.sleep(0.002)


async def measure(broker: Broker, positions: Sequence[int], clients: int, rate: int) -> None:
    feed, store = broker.cursors.open(["bench"]), broker.store
    began = time.monotonic()
    one = Client(feed, "#", 0)
    await one.until_at_tail()
    alone = time.monotonic() - began
    print(f"alone   {one.count} messages in {alone:.2f} s")
    one.cursor.close()

    several, sweeps.REACH = sweeps.REACH, 1 << 40
    one_s = await mixed("one sweep", feed, positions, clients)
    sweeps.REACH = several
    several_s = await mixed("several", feed, positions, clients)
    print(f"mixed   {several_s / one_s:.2f} times as long")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_publishing, broker, rate, clients)
        await trio.sleep(1)
        p99 = [await live(feed)]
        for topic_filter in (f"n/{NAME}", "#"):
            far = Client(feed, "#", 0)
            await trio.sleep(0.2)
            behind = NEAR * (positions[-1] - positions[0]) // len(positions)
            match = publish_name(broker, NAME)
            await until(partial(_is_readable, broker, match + behind // 2))
            near = Client(feed, topic_filter, store.readable - behind)
            seconds = await near.until_at_tail()
            is_far = far.cursor.place is not CursorPlace.TAIL
            await until(partial(_has_received, near))
            took = f"first message after {near.first_s * 1e3:.0f} ms, at the tail after {seconds:.2f} s"
            print(f"near    {topic_filter}: {took}, the far one {'still behind' if is_far else 'at the tail, too'}")
            near.cursor.close()
            if topic_filter == "#":
                p99.append(await live(feed))
            far.cursor.close()
        print(f"live    p99 {p99[0] * 1e3:.1f} ms without, {p99[1] * 1e3:.1f} ms with one that is far behind")
        nursery.cancel_scope.cancel()


async def mixed(what: str, feed: Feed, positions: Sequence[int], clients: int) -> float:
    """Let *clients* return together from everywhere; return how long it takes until all are at the tail."""
    began, sweeps_before, viewed_before = time.monotonic(), feed.catch_up.sweeps, feed.catch_up.viewed
    found = [Client(feed, f"n/{each}", positions[each * len(positions) // clients]) for each in range(clients)]
    found.append(Client(feed, "#", 0))
    for each in found:
        await each.until_at_tail()
    seconds = time.monotonic() - began
    count, viewed = feed.catch_up.sweeps - sweeps_before, feed.catch_up.viewed - viewed_before
    print(f"mixed   {what}: {clients} clients in {seconds:.2f} s, {count} sweeps, {viewed} viewed")
    for each in found:
        each.cursor.close()
    return seconds


async def live(feed: Feed) -> float:
    """Return the 99th percentile of how old messages are when a cursor at the tail gets them."""
    client = Client(feed, "#", None, watches=True)
    await trio.sleep(LIVE_S)
    client.cursor.close()
    return quantiles(client.ages, n=100)[-1]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rate", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served, trio.open_nursery() as nursery:
            served.broker.topics.ensure("bench", QUEUES)
            nursery.start_soon(collect_all)
            positions = await fill(served.broker, arguments.messages, arguments.clients)
            await measure(served.broker, positions, arguments.clients, arguments.rate)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
