"""What the example plugin martlet-topics costs in the broker's process: decode, publish, commit, route, collect.

    PYTHONPATH=examples/martlet-topics python benchmarks/topics.py [--messages 20000] [--loads plain,filters]

- plain: a publisher and no subscriber.
- filters: 50 disjoint filters with a wildcard cover 20,000 names, one client each; up to 99,950 more match none.
- exact: 100,000 subscriptions to the 20,000 names, so each message has five receivers.
- return: 10,000 durable sessions with a filter of QoS 1 each come back at once to what they missed.
- offline: 100,000 durable sessions with a filter each are left by their clients, saved, restored, and expire.

Messages have 256 B and come in runs of 40 with packet ids, as one socket read brings them. Clients are handlers of the
plugin; nothing is sent over sockets. Prints the least processor time of several rounds for each part, in microseconds a
message.
"""

import argparse
import gc
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import trio

from martlet.contracts import Buffer, Identity, Protocol
from martlet.net.addresses import pack_host
from martlet.runtime.gc_schedule import OldObjects
from martlet.runtime.steps import finish_now
from martlet.store import StoreConfig
from martlet.testing.peers import Serving, serving
from martlet_topics.codec import encode_frame
from martlet_topics.config import TopicsConfig
from martlet_topics.handler import TopicsHandler
from martlet_topics.plugin import TopicsPlugin

NAMES = 20_000
CLIENTS = 10_000
SESSIONS = 100_000
CONNECTS_A_ROUND = 16
MESSAGES_A_READ = 40
COLLECTS_A_ROUND = 64
ROUNDS = 8
COLLECT_BYTES = 1 << 18
HOST = pack_host("127.0.0.1", 1)


WOKEN: "list[Client]" = []


class Client:
    """A peer that counts what it is sent, and its handler."""

    sent_bytes = 0

    address = "memory:1"
    host = HOST
    identity = Identity()

    def __init__(self, protocol: Protocol, name: str = "") -> None:
        self.is_woken = False
        self.connection = protocol.connect(0.0)
        self.handler = protocol.handle(self, self.connection)
        self.receive(f"HELLO {name}\n".encode())

    def send(self, *pieces: Buffer) -> None:
        for piece in pieces:
            Client.sent_bytes += len(piece)

    def hold_until(self, position: int) -> None:
        """Do nothing: output of this client is only counted."""

    def wake(self) -> None:
        if not self.is_woken:
            self.is_woken = True
            WOKEN.append(self)

    def start(self, work: object, *arguments: object) -> None:
        raise RuntimeError(f"the protocol started {work!r}; this client runs nothing in the background")

    def close(self, reason: str) -> None:
        raise RuntimeError(reason)

    def receive(self, data: bytes) -> None:
        self.connection.receive_data(data, 0.0)
        for event in self.connection.events():
            self.handler.handle(event)


def end_round(served: Serving) -> tuple[float, float]:
    """Commit, let some woken clients collect, and commit what they note; return the time of each in seconds."""
    began = time.process_time()
    served.broker.store.committer.commit()
    committed = time.process_time()
    woken = WOKEN[:COLLECTS_A_ROUND]
    del WOKEN[:COLLECTS_A_ROUND]
    for client in woken:
        client.is_woken = False
        client.handler.collect(COLLECT_BYTES)
    served.broker.store.committer.commit()
    return committed - began, time.process_time() - committed


def runs_of(names: Sequence[str], messages: int) -> list[bytes]:
    body = b"x" * 256
    frames = [encode_frame(names[number * 7919 % len(names)].encode(), body) for number in range(messages)]
    runs: list[bytes] = []
    for start in range(0, messages, MESSAGES_A_READ):
        part = frames[start : start + MESSAGES_A_READ]
        data = b"".join(part)
        runs.append(b"RUN 1 %d %d\n%b" % (len(part), len(data), data))
    return runs


async def subscribe(served: Serving, protocol: Protocol, filters: Sequence[str]) -> list[Client]:
    clients: list[Client] = []
    for number, each in enumerate(filters):
        client = Client(protocol)
        client.receive(f"SUB {each} 0\n".encode())
        clients.append(client)
        if number % 1000 == 0:
            end_round(served)
            await trio.lowlevel.checkpoint()
    while WOKEN:
        end_round(served)
    return clients


async def deliver(load: str, filters: Sequence[str], messages: int) -> None:
    names = [f"site/{number % 50}/device/{number}" for number in range(NAMES)]
    with tempfile.TemporaryDirectory() as folder:
        plugin = TopicsPlugin(TopicsConfig())
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served:
            protocol = plugin.protocol(served.broker)
            clients = await subscribe(served, protocol, filters)
            publisher, runs = Client(protocol), runs_of(names, messages)
            handler = publisher.handler
            assert isinstance(handler, TopicsHandler)
            least = [float("inf")] * 3
            for _ in range(ROUNDS):
                costs = round_of(served, publisher, runs)
                least = [min(before, cost * 1e6 / messages) for before, cost in zip(least, costs, strict=True)]
                await trio.sleep(0.1)
            matches = handler.shared.delivered / ROUNDS / messages
            publish, match, give = least
            print(
                f"{load:8} {len(clients):7} filters: {sum(least):6.2f} us a message, {matches:.2f} matches "
                f"(decode and publish {publish:.2f}, commit and match {match:.2f}, deliver {give:.2f})",
                flush=True,
            )


def round_of(served: Serving, publisher: Client, runs: Sequence[bytes]) -> tuple[float, float, float]:
    """Publish *runs* and deliver them; return the processor time of publishing, committing and delivering."""
    began = time.process_time()
    commits = delivers = 0.0
    for run in runs:
        publisher.receive(run)
        while True:
            commit, deliver = end_round(served)
            commits += commit
            delivers += deliver
            if not WOKEN:
                break
    return time.process_time() - began - commits - delivers, commits, delivers


async def come_back(messages: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plugin = TopicsPlugin(TopicsConfig())
        async with serving(Path(folder), store=StoreConfig(flush="async")) as served:
            protocol = plugin.protocol(served.broker)
            clients = [Client(protocol, f"client-{number}") for number in range(CLIENTS)]
            for number, client in enumerate(clients):
                client.receive(f"SUB device/{number}/# 1\n".encode())
            end_round(served)
            for client in clients:
                client.handler.closed("")
            end_round(served)
            await trio.sleep(1)  # lets the projection catch up
            publisher = Client(protocol)
            for run in runs_of([f"device/{number}/state" for number in range(CLIENTS)], messages):
                publisher.receive(run)
                end_round(served)
            await trio.sleep(1)  # lets the key index catch up
            handler = publisher.handler
            assert isinstance(handler, TopicsHandler)
            feed, before, began = handler.shared.feed, handler.shared.delivered, time.process_time()
            wall = time.monotonic()
            clients = []
            longest = 0.0
            for number in range(CLIENTS):
                clients.append(Client(protocol, f"client-{number}"))
            while feed.catch_up.is_sweeping or WOKEN:
                slice_began = time.thread_time()
                await trio.lowlevel.checkpoint()
                end_round(served)
                longest = max(longest, time.thread_time() - slice_began)
            print(
                f"return   {CLIENTS} sessions, {messages} messages: {time.process_time() - began:.2f} s of processor "
                f"time, {time.monotonic() - wall:.2f} s, {feed.catch_up.sweeps} sweeps, {feed.catch_up.viewed} viewed, "
                f"{handler.shared.delivered - before} delivered, longest turn {longest * 1e3:.0f} ms"
            )


class ShiftedClock:
    """A wall clock that can be set ahead."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms


class Pauses:
    """The turns of the event loop since the last call of `take`, in processor time of its thread."""

    def __init__(self) -> None:
        self.turns = [0.0]

    async def watch(self) -> None:
        while True:
            began = time.thread_time()
            await trio.lowlevel.checkpoint()
            self.turns.append(time.thread_time() - began)

    async def take(self) -> str:
        for _ in range(3):  # tasks of a turn run in any order: `watch` sees the end of this turn after two more
            await trio.lowlevel.checkpoint()
        turns, self.turns = sorted(self.turns), [0.0]
        text = (
            f"longest turn {turns[-1] * 1e3:.1f} ms, 999 of 1000 at most {turns[len(turns) * 999 // 1000] * 1e3:.1f} ms"
        )
        return f"{text} ({len(turns)} turns)"


async def leave_sessions(served: Serving, protocol: Protocol) -> None:
    for first in range(0, SESSIONS, CONNECTS_A_ROUND):
        numbers = range(first, min(first + CONNECTS_A_ROUND, SESSIONS))
        clients = [Client(protocol, f"client-{number:06}") for number in numbers]
        for number, client in zip(numbers, clients, strict=True):
            client.receive(f"SUB site/{number}/temperature/# 1\n".encode())
        end_round(served)
        for client in clients:
            client.handler.closed("")
        end_round(served)
        WOKEN.clear()
        await trio.lowlevel.checkpoint()


async def applied(served: Serving) -> None:
    while not all(driven.order.at_end for driven in served.broker.projections._driven):
        await trio.lowlevel.checkpoint()


async def stay_away() -> None:
    clock, pauses, plugin = ShiftedClock(), Pauses(), TopicsPlugin(TopicsConfig())
    with tempfile.TemporaryDirectory() as folder:
        options = {"store": StoreConfig(flush="async"), "clock": clock}
        async with serving(Path(folder), **options) as served, trio.open_nursery() as nursery:  # type: ignore[arg-type]
            protocol = plugin.protocol(served.broker)
            nursery.start_soon(pauses.watch)
            await leave_sessions(served, protocol)
            await applied(served)
            print(f"offline  {SESSIONS} sessions came and left; {await pauses.take()}")
            (driven,) = (each for each in served.broker.projections._driven if each.name == "sessions")
            began = time.thread_time()
            steps = driven.projection.freeze()
            next(steps)
            print(f"offline  frozen in {(time.thread_time() - began) * 1e3:.2f} ms")
            steps.close()
            await served.broker.projections._save(driven)
            size = (Path(folder) / driven.path).stat().st_size
            print(f"offline  saved, {size / SESSIONS:.1f} bytes a session; {await pauses.take()}")
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pauses.watch)
            async with serving(Path(folder), **options) as served:  # type: ignore[arg-type]
                print(f"offline  restored; {await pauses.take()}")
                sessions = served.broker.sessions
                gc.collect()
                tracemalloc.start()
                copy = type(sessions.table)("copy")
                finish_now(copy.restore(b"".join(finish_now(sessions.table.freeze())), 0))
                used = tracemalloc.get_traced_memory()[0]
                tracemalloc.stop()
                assert len(copy) == SESSIONS
                print(f"offline  {used / SESSIONS:.0f} bytes of memory a session")
                del copy
                await pauses.take()
                clock.ahead_ms = (plugin.config.session_expiry_s + 600) * 1000
                await served.broker.turns.finish(sessions.expiry.sweep())
                served.broker.store.committer.commit()
                await applied(served)
                assert not len(sessions)
                print(f"offline  expired; {await pauses.take()}")
            nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--loads", default="plain,filters,exact,return,offline")
    words = parser.parse_args()
    OldObjects().start()  # as `martlet run` does at its start
    disjoint = [f"site/{number}/#" for number in range(50)]
    others = [f"other/{number}/#" for number in range(99_950)]
    loads: dict[str, list[Sequence[str]]] = {
        "plain": [[]],
        "filters": [disjoint + others[: count - 50] for count in (50, 1000, 10_000, 100_000)],
        "exact": [[f"site/{number % 50}/device/{number % NAMES}" for number in range(100_000)]],
    }
    for load in words.loads.split(","):
        if load == "return":
            trio.run(come_back, words.messages)
        if load == "offline":
            trio.run(stay_away)
        for filters in loads.get(load, ()):
            trio.run(deliver, load, filters, words.messages)


if __name__ == "__main__":
    main()
