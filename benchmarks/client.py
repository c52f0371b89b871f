"""What the Python client costs on trio, on asyncio and in plain code: sends, batches and push consumption.

    python benchmarks/client.py [--rounds 30] [FACE...]

A face is LOOP:MODULE, with the loop trio, asyncio or threads and a module with the client's classes; by default the
three of the client. So another version of the client can be compared, under another name on PYTHONPATH.

One broker with async flush serves one process per face. They run a load by turns, in a new order each round, so the
machine's moods meet all. Printed are medians of wall and processor time of the face's process, and the median of the
ratios to the first face in the same round.
"""

import argparse
import asyncio
import importlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import trio

from martlet_client import Message
from martlet_client.blocking import Admin, Producer

FACES = ("trio:martlet_client", "asyncio:martlet_client.aio", "threads:martlet_client.blocking")
# name: operations in a round, in flight, messages an operation
LOADS = {"send": (200, 1, 1), "sends": (1500, 64, 1), "batches": (30, 1, 100), "push": (3000, 20, 1)}
TITLES = {
    "send": "sends of 1 KiB, 1 in flight",
    "sends": "sends of 1 KiB, 64 in flight",
    "batches": "batches of 100 messages of 128 B, 1 in flight",
    "push": "push consumption, 256 B",
}
PORTS = "127.0.0.1:20911", "127.0.0.1:19876"
FILLED = "Filled"  # the topic that is consumed
BODY = b"x" * 1024


class Face:
    """The client's classes in *module*, used on one kind of loop; `run` reads loads from stdin and answers."""

    def __init__(self, module: str, name_server: str) -> None:
        self.module = importlib.import_module(module)
        self.base = importlib.import_module(module.partition(".")[0])
        self.name_server = name_server
        self.started = self.ended = (0.0, 0.0)

    def operation(self, load: str, producer: Any) -> Callable[[], Any]:
        """Return one operation of *load*: a call, or what makes a coroutine."""
        new = self.base.Message
        if load == "batches":
            return lambda: producer.send_batch([new("T", BODY[:128]) for _ in range(LOADS[load][2])])
        return lambda: producer.send(new("T", BODY))

    def consumer(self, listener: Callable[[Any], Any]) -> Any:
        group = f"G{time.time_ns()}"
        first = self.base.ConsumeFrom.FIRST
        return self.module.PushConsumer(self.name_server, group, listener, {FILLED: "*"}, consume_from=first)

    def producer(self) -> Any:
        return self.module.Producer(self.name_server, "P", send_timeout_s=30)

    def begin(self) -> None:
        self.started = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.ended = time.perf_counter(), time.process_time()

    def counting(self, done: Callable[[], object]) -> Callable[[], None]:
        """Return what a listener calls; it times from the first message to the last and then calls *done*."""
        numbers = itertools.count(1)

        def count() -> None:
            number = next(numbers)
            if number == 1:
                self.begin()
            elif number == LOADS["push"][0]:
                self.end()
                done()

        return count

    def answer(self) -> None:
        print(json.dumps([end - start for start, end in zip(self.started, self.ended, strict=True)]), flush=True)


class AsyncFace(Face):
    """A face of coroutines."""

    async def load(self, name: str, producer: Any) -> None:
        if name == "push":
            await self.consume()
            return
        count, width, _ = LOADS[name]
        call, left = self.operation(name, producer), iter(range(count))

        async def work() -> None:
            for _ in left:
                await call()

        self.begin()
        await self.together(work, width)
        self.end()

    async def consume(self) -> None:
        done = self.event()
        count = self.counting(done.set)

        async def listen(message: Any) -> None:
            if message.topic == FILLED:
                count()

        async with self.consumer(listen):
            await done.wait()

    async def main(self) -> None:
        async with self.producer() as producer:
            await producer.send(self.base.Message("T", BODY))
            print("ready", flush=True)
            while line := (await self.in_thread(sys.stdin.readline)).strip():
                await self.load(line, producer)
                self.answer()


class TrioFace(AsyncFace):
    event = trio.Event
    in_thread = staticmethod(trio.to_thread.run_sync)

    async def together(self, work: Callable[[], Any], width: int) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(width):
                nursery.start_soon(work)

    def run(self) -> None:
        trio.run(self.main)


class AsyncioFace(AsyncFace):
    event = asyncio.Event
    in_thread = staticmethod(asyncio.to_thread)

    async def together(self, work: Callable[[], Any], width: int) -> None:
        await asyncio.gather(*(work() for _ in range(width)))

    def run(self) -> None:
        asyncio.run(self.main())


class ThreadFace(Face):
    def load(self, name: str, producer: Any) -> None:
        if name == "push":
            self.consume()
            return
        count, width, _ = LOADS[name]
        call, left = self.operation(name, producer), iter(range(count))

        def work() -> None:
            for _ in left:
                call()

        threads = [threading.Thread(target=work) for _ in range(width)]
        self.begin()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.end()

    def consume(self) -> None:
        done = threading.Event()
        count = self.counting(done.set)

        def listen(message: Any) -> None:
            if message.topic == FILLED:
                count()

        with self.consumer(listen):
            done.wait()

    def run(self) -> None:
        with self.producer() as producer:
            producer.send(self.base.Message("T", BODY))
            print("ready", flush=True)
            while line := sys.stdin.readline().strip():
                self.load(line, producer)
                self.answer()


KINDS = {"trio": TrioFace, "asyncio": AsyncioFace, "threads": ThreadFace}


def fill(name_server: str) -> None:
    """Create the topics, and store the messages that are consumed."""
    with Admin(name_server) as admin:
        admin.create_topic(FILLED, queues=4)
        admin.create_topic("T", queues=4)
    with Producer(name_server, "F", send_timeout_s=30) as producer:
        for _ in range(LOADS["push"][0] // 100 + 4):
            producer.send_batch([Message(FILLED, BODY[:256]) for _ in range(100)])


def ask(child: "subprocess.Popen[str]", load: str) -> tuple[float, float]:
    """Return the microseconds a message that *child* took for *load*: wall and processor time."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(load + "\n")
    child.stdin.flush()
    wall, cpu = json.loads(child.stdout.readline())
    count, _, each = LOADS[load]
    return wall * 1e6 / (count * each), cpu * 1e6 / (count * each)


def measure(children: "dict[str, subprocess.Popen[str]]", load: str, rounds: int) -> None:
    found: dict[str, list[tuple[float, float]]] = {face: [] for face in children}
    for number in range(rounds + 1):
        for face in random.sample([*children], len(children)):
            cost = ask(children[face], load)
            if number:  # the first round warms up
                found[face].append(cost)
    print(f"{TITLES[load]}, us a message, median of {rounds} rounds")
    base = next(iter(found.values()))
    for face, costs in found.items():
        wall, cpu = (statistics.median(each[side] for each in costs) for side in (0, 1))
        pairs = list(zip(costs, base, strict=True))
        ratios = (statistics.median(ours[side] / first[side] for ours, first in pairs) for side in (0, 1))
        shown = "  ".join(f"x{ratio:.2f}" for ratio in ratios)
        print(f"  {face:34} wall {wall:7.1f} ({1e6 / wall:8,.0f}/s)  processor {cpu:7.1f}  {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    parser.add_argument("--child", nargs=2, metavar=("FACE", "NAMESERVER"), help=argparse.SUPPRESS)
    parser.add_argument("faces", nargs="*", metavar="FACE", default=FACES)
    words = parser.parse_args()
    if words.child:
        loop, _, module = words.child[0].partition(":")
        KINDS[loop](module, words.child[1]).run()
        return
    remoting, name_server = PORTS
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "martlet", "run", "--data", folder, "--log-level", "warning"]
        for key, value in (
            ("store.flush", "async"),
            ("remoting.listen", remoting),
            ("nameserver.listen", name_server),
            ("plugins.enabled", '["nameserver", "remoting"]'),
        ):
            command += ["--set", f"{key}={value}"]
        broker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        children = {}
        try:
            assert broker.stdout is not None
            assert broker.stdout.readline().startswith("martlet ready")
            fill(name_server)
            for face in words.faces:
                child = [sys.executable, __file__, "--child", face, name_server]
                children[face] = subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                assert children[face].stdout.readline() == "ready\n"
            for load in words.loads:
                measure(children, load, words.rounds)
        finally:
            for each in children.values():
                each.terminate()
            broker.terminate()
            for each in (*children.values(), broker):
                each.wait()


if __name__ == "__main__":
    main()
