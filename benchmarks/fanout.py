"""What a message costs that only some of many subscribers want, inside the process: append, commit, route, encode.

    python benchmarks/fanout.py [--messages 20000] [--loads filters,names,storm,return,plain]

- filters: 50 disjoint filters with a wildcard over 20,000 names, then 1,000 to 100,000 filters of which one matches.
- names: as many subscriptions to exact names.
- storm: 10,000 clients subscribe between messages; how many routes have to be found again.
- return: 10,000 clients with a filter each return at once to what they missed; how many records are looked at.
- plain: the same messages with nobody there; the difference is what matching costs.

Messages have 256 B and are committed 40 at a time, as a socket read brings them. Each receiver that matches encodes
its run, which is shared. Processor time of the least of several rounds, in microseconds a message.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Hashable
from itertools import islice
from pathlib import Path

import trio
import trio.lowlevel

from martlet.broker import Broker
from martlet.delivery.cursor import CursorPlace
from martlet.delivery.fanout import Encoding, parts
from martlet.delivery.routing.route_cache import RouteCache
from martlet.delivery.runs import Run
from martlet.message import Message
from martlet.store import StoreConfig
from martlet.testing.peers import serving

NAMES = 20_000
CLIENTS = 10_000
MESSAGES_A_READ = 40
ROUNDS = 3
ENCODING = Encoding("bench", lambda piece: [body for _, _, _, body, _ in parts(piece)])


class Receiver:
    """Counts what it gets."""

    received = 0
    bytes = 0

    def matched(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        Receiver.received += run.count
        Receiver.bytes += len(run.frames(ENCODING).data)


async def send(broker: Broker, topic: str, names: list[str], messages: int, between: Callable[[], None]) -> float:
    """The processor time of a message in microseconds."""
    properties = [f"TAGS\x01{name}\x02".encode() for name in names]
    body, queues = b"x" * 256, broker.topics.ensure(topic, 8).write_queues
    least = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for number in range(messages):
            at = number * 7919 % len(names)
            broker.publish(Message(topic, body, properties[at], at % queues))
            if number % MESSAGES_A_READ == MESSAGES_A_READ - 1:
                broker.store.committer.commit()
                between()
        broker.store.committer.commit()
        least = min(least, (time.process_time() - began) * 1e6 / messages)
        await trio.sleep(0.1)
    return least


def names_of(groups: int) -> list[str]:
    return [f"site/{number % groups}/device/{number}" for number in range(max(NAMES, groups))]


async def run(load: str, filters: list[str], names: list[str], messages: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served:
            broker = served.broker
            routes: RouteCache[Receiver] = RouteCache()
            reader = broker.tails.of(broker.topics.ensure("bench", 8))
            if filters or load == "storm":
                reader.attach(routes)
            for each in filters:
                routes.add(each, Receiver())
            clients = iter(range(10_000 if load == "storm" else 0))
            if load == "storm":
                routes.add("site/#", Receiver())

            def between() -> None:
                for client in islice(clients, 20):
                    routes.add(f"client/{client}/commands/#", Receiver())

            Receiver.received = 0
            cost = await send(broker, "bench", names, messages, between)
            matches = Receiver.received / ROUNDS / messages
            print(
                f"{load:8} {len(routes):7} filters, {len(names):6} names: {cost:6.2f} us a message, "
                f"{matches:.2f} matches, {routes.routes_found} routes found, {reader.viewed} viewed"
            )


async def come_back(messages: int) -> None:
    """Print the cost of 10,000 clients that return at once, and the longest turn of the event loop."""
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served, trio.open_nursery() as nursery:
            broker = served.broker
            broker.topics.ensure("bench", 8)
            feed = broker.cursors.open(["bench"])
            for number in range(messages):
                device = number * 7919 % CLIENTS
                properties = f"TAGS\x01device/{device}/state\x02".encode()
                broker.publish(Message("bench", b"x" * 256, properties, device % 8))
                if number % MESSAGES_A_READ == MESSAGES_A_READ - 1:
                    broker.store.committer.commit()
            broker.store.committer.commit()
            await trio.sleep(1)  # lets the key index catch up
            joined = [feed.open(lambda: None, {f"device/{client}/#": 0}, 0) for client in range(CLIENTS)]
            pauses: list[float] = []
            nursery.start_soon(watch_pauses, pauses)
            began = time.process_time()
            with trio.fail_after(60):
                while feed.catch_up.is_sweeping:
                    await trio.lowlevel.checkpoint()
            assert all(cursor.place is CursorPlace.TAIL for cursor in joined)
            seconds = time.process_time() - began
            nursery.cancel_scope.cancel()
            found = sum(run.count for cursor in joined for run, _ in cursor.collect(1 << 30))
            print(
                f"return   {CLIENTS} clients, {messages} messages: {seconds:.2f} s of processor time, "
                f"{feed.catch_up.sweeps} sweep, {feed.catch_up.viewed} viewed, {found} delivered, "
                f"longest pause {max(pauses) * 1e3:.1f} ms"
            )


async def watch_pauses(pauses: list[float]) -> None:
    while True:
        began = time.process_time()
        await trio.lowlevel.checkpoint()
        pauses.append(time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--loads", default="plain,filters,names,storm,return")
    words = parser.parse_args()
    loads: dict[str, list[tuple[list[str], list[str]]]] = {
        "plain": [([], names_of(50))],
        "filters": [([f"site/{n}/#" for n in range(count)], names_of(count)) for count in (50, 1000, 10_000, 100_000)],
        "names": [([f"site/0/device/{n}" for n in range(count)], names_of(1)[:count]) for count in (1000, 20_000)]
        + [([f"site/1/device/{n}" for n in range(100_000)], [f"site/1/device/{n}" for n in range(100_000)])],
        "storm": [([], names_of(50))],
    }
    for load in words.loads.split(","):
        if load == "return":
            trio.run(come_back, words.messages)
            continue
        for filters, names in loads[load]:
            trio.run(run, load, filters, names, words.messages)


if __name__ == "__main__":
    main()
