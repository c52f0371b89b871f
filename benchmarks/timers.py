"""What a million pending timers cost, and how late they are delivered.

    python benchmarks/timers.py [table] [pending] [kill] [deliver] [kills] [--timers 1000000] [--seconds 60]
        [--flush async]

table: memory of the table of pending timers alone.
pending: timers of the next day in a broker on a real disk: appended, saved, appended again for retention, restored.
kill: the start after kill -9 with as many timers pending.
deliver: timers due within --seconds, delivered end to end; from when each is due to when it is readable.
kills: the same, with kill -9 again and again; each message must come once, and none early.

A turn is one round of the event loop; its processor time does not depend on what else the machine does.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from martlet.broker import Broker
from martlet.message import Message, find_property
from martlet.records.codec import decode_records
from martlet.runtime.gc_schedule import OldObjects
from martlet.runtime.steps import finish_now
from martlet.state import Projection
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin
from martlet_timer.timers.pending import HOUR_MS, PendingTimers
from martlet_timer.timers.schedule import Schedule

QUEUES = 8
BODY = bytes(100)
DAY_MS = 24 * HOUR_MS
AT_ONCE = 20


class LongestTurn(trio.abc.Instrument):
    """The longest turn of the event loop since `reset`, in ms of processor time and of time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.cpu_ms = self.wall_ms = self._cpu = self._wall = 0.0

    def after_io_wait(self, timeout: float) -> None:
        self._cpu, self._wall = time.thread_time(), time.perf_counter()

    def before_io_wait(self, timeout: float) -> None:
        if self._wall:
            self.cpu_ms = max(self.cpu_ms, (time.thread_time() - self._cpu) * 1000)
            self.wall_ms = max(self.wall_ms, (time.perf_counter() - self._wall) * 1000)

    def __str__(self) -> str:
        return f"longest turn {self.cpu_ms:.1f} ms of processor time, {self.wall_ms:.1f} ms in all"


TURN = LongestTurn()


class Figures:
    """Takes the place of the plugin's histogram."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []

    def add(self, late_ms: float) -> None:
        self.late_ms.append(late_ms)

    def statistics(self) -> dict[str, object]:
        return {}

    def at(self, share: float) -> float:
        return sorted(self.late_ms)[min(int(share * len(self.late_ms)), len(self.late_ms) - 1)]


class Phase:
    """Prints what one phase took."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count

    def __enter__(self) -> None:
        TURN.reset()
        self._rss, self._began, self._cpu = resident(), time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter() - self._began
        cpu_us = (time.process_time() - self._cpu) / self._count * 1_000_000
        rate, grown = self._count / took, (resident() - self._rss) / (1 << 20)
        print(f"{self._name}: {took:.2f} s, {rate:,.0f}/s, {cpu_us:.1f} us of processor time each", flush=True)
        print(f"  {TURN}, memory {grown:+.0f} MiB", flush=True)


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def install(broker: Broker, plugin: TimerPlugin) -> Sequence[Projection]:
    """Call the hooks of *plugin* in the broker's order, up to those for projections."""
    broker.topics.ensure("T", QUEUES)
    broker.capabilities = dict(plugin.martlet_capabilities(broker))
    broker.set_stages([("timer", stage) for stage in plugin.martlet_stages(broker)])
    return plugin.martlet_projections(broker)


@asynccontextmanager
async def running(folder: str, flush: str) -> AsyncIterator[tuple[Broker, TimerPlugin]]:
    plugin = TimerPlugin(TimerConfig())
    async with serving(
        Path(folder),
        store=StoreConfig(flush="sync" if flush == "sync" else "async"),
        projections=lambda broker: install(broker, plugin),
        dispatchers=plugin.martlet_dispatchers(),
    ) as served:
        for service in plugin.martlet_services(served.broker):
            served.nursery.start_soon(service)
        yield served.broker, plugin


async def append(broker: Broker, count: int, first_ms: int, last_ms: int) -> None:
    """Append *count* timers that are due evenly from *first_ms* to *last_ms*, in a mixed order."""
    for number in range(count):
        due_ms = first_ms + number * 7919 % count * (last_ms - first_ms) // count
        properties = b"UNIQ_KEY\x01%032d\x02TIMER_DELIVER_MS\x01%d\x02" % (number, due_ms)
        broker.publish(Message("T", BODY, properties, number % QUEUES))
        if number % AT_ONCE == 0:
            await trio.lowlevel.checkpoint()
    await flushed(broker)


async def flushed(broker: Broker) -> None:
    broker.store.committer.commit()
    await broker.store.flusher.wait_flushed(broker.store.appended)


async def until_applied(plugin: TimerPlugin, count: int) -> None:
    while len(plugin.timers.pending) != count:  # noqa: ASYNC110
        await trio.sleep(0.01)


def table(count: int) -> None:
    start_ms = time.time_ns() // 1_000_000 // HOUR_MS * HOUR_MS
    kept: list[object] = []  # else the second would get the memory of the first
    for name, span_ms in (("a minute", 60_000), ("a year", 365 * DAY_MS)):
        before, pending = resident(), PendingTimers(1 << 30)
        for number in range(count):
            pending.add(start_ms + number * 7919 % count * span_ms // count, number * 400, number)
        far = (resident() - before) / count
        schedule = Schedule(pending)
        finish_now(schedule.prepare(start_ms))
        near = (resident() - before) / count
        kept += [pending, schedule]
        print(f"table, due within {name}: {far:.1f} bytes a timer, {near:.1f} once the first are near", flush=True)


async def pending(count: int, flush: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with running(folder, flush) as (broker, plugin):
            now_ms = broker.clock.now_ms()
            with Phase("appended", count):
                await append(broker, count, now_ms + HOUR_MS, now_ms + DAY_MS)
                await until_applied(plugin, count)
            (driven,) = (each for each in broker.projections._driven if each.name == "timers")
            with Phase("saved", count):
                await broker.projections._save(driven)
            with Phase("appended again", count):
                await broker.turns.finish(plugin.timers.roll(0, broker.store.appended))
                await flushed(broker)
                await until_applied(plugin, count)
            TURN.reset()
            began = time.perf_counter()
        print(f"stopped: {time.perf_counter() - began:.2f} s", flush=True)
        await restored(folder, count, flush, "restored")


async def restored(folder: str, count: int, flush: str, name: str) -> None:
    phase = Phase(name, count)
    phase.__enter__()
    async with running(folder, flush) as (_, plugin):
        phase.__exit__()
        assert len(plugin.timers.pending) == count, len(plugin.timers.pending)


async def delivering(folder: str, count: int, seconds: float, flush: str, first_ms: int) -> None:
    """Append timers if *first_ms* is not 0, say so, and deliver until somebody ends the process."""
    async with running(folder, flush) as (broker, _):
        if first_ms:
            await append(broker, count, first_ms, first_ms + int(seconds * 1000))
        print("ready", flush=True)
        await trio.sleep_forever()


def kills(count: int, seconds: float, flush: str) -> None:
    first_ms = time.time_ns() // 1_000_000 + count // 3 + 5000
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        while time.time() < first_ms / 1000 + seconds:
            words = ["--child", folder, "--timers", str(count), "--seconds", str(seconds), "--flush", flush]
            words += ["--first", str(0 if number else first_ms)]
            with subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                time.sleep(max(first_ms / 1000 - time.time(), 0) + random.uniform(0.5, seconds / 5))
                process.kill()
            number += 1
        print(f"killed {number} times during deliveries, {flush} flush", flush=True)
        trio.run(checked, folder, count, flush)


async def checked(folder: str, count: int, flush: str) -> None:
    """Wait for what is still pending, then look at each delivered message."""
    came: Counter[bytes] = Counter()
    early = 0
    async with running(folder, flush) as (broker, plugin):
        await until_applied(plugin, 0)
        await flushed(broker)
        for queue in broker.store.queues.topics["T"].values():
            offset = queue.first_offset
            while offset < broker.store.readers.end_offset(queue):
                result = await broker.store.readers.read_far(queue, offset, 1000, 1 << 20)
                for record in decode_records(b"".join(result.pieces)):
                    came[find_property(record.properties, b"UNIQ_KEY")] += 1
                    early += record.store_ms < int(find_property(record.properties, b"TIMER_DELIVER_MS"))
                offset = result.next_offset
    print(f"  {len(came):,} of {count:,} came, {came.total() - len(came)} of them again, {early} early", flush=True)


async def child(folder: str, count: int, flush: str) -> None:
    async with running(folder, flush) as (broker, plugin):
        now_ms = broker.clock.now_ms()
        await append(broker, count, now_ms + HOUR_MS, now_ms + DAY_MS)
        await until_applied(plugin, count)
        os.kill(os.getpid(), signal.SIGKILL)


def kill(count: int, flush: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--child", folder, "--timers", str(count), "--flush", flush]
        subprocess.run([sys.executable, __file__, *words], check=False)
        trio.run(restored, folder, count, flush, "replayed after kill -9", instruments=[TURN])


async def deliver(count: int, seconds: float, flush: str) -> None:
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        async with running(folder, flush) as (broker, plugin):
            plugin.timer_delivery.outcomes.lateness = figures  # type: ignore[assignment]
            first_ms = broker.clock.now_ms() + count // 3 + 5000
            await append(broker, count, first_ms, first_ms + int(seconds * 1000))
            await until_applied(plugin, count)
            assert broker.clock.now_ms() < first_ms, "appending took too long"
            await trio.sleep(max((first_ms - broker.clock.now_ms()) / 1000 - 0.5, 0))
            with Phase(f"delivered {count:,} due in {seconds:g} s, {flush} flush", count):
                while len(figures.late_ms) < count:  # noqa: ASYNC110
                    await trio.sleep(0.05)
    late = ", ".join(f"p{100 * share:g} {figures.at(share):.0f}" for share in (0.5, 0.99, 0.999))
    print(f"  late: {late}, max {figures.at(1):.0f} ms; earliest {figures.at(0):.0f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["table", "pending", "kill", "deliver", "kills"])
    parser.add_argument("--timers", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--flush", choices=["sync", "async"], default="async")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=-1, help=argparse.SUPPRESS)
    words = parser.parse_args()
    OldObjects().start()
    if words.first >= 0:
        trio.run(delivering, words.child, words.timers, words.seconds, words.flush, words.first)
        return
    if words.child:
        trio.run(child, words.child, words.timers, words.flush)
        return
    for part in words.parts:
        if part == "table":
            table(words.timers)
        elif part == "pending":
            trio.run(pending, words.timers, words.flush, instruments=[TURN])
        elif part == "kill":
            kill(words.timers, words.flush)
        elif part == "kills":
            kills(words.timers, words.seconds, words.flush)
        else:
            trio.run(deliver, words.timers, words.seconds, words.flush, instruments=[TURN])


if __name__ == "__main__":
    main()
