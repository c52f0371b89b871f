"""One simulated world: a machine that loses power, a broker on it, clients, and links between them.

Everything random comes from one seed, every wait is virtual, and no thread runs: the same
seed makes the same trace. What is real is the broker, its store, the server and the
remoting plugin; what is played are the disk, the links and the clients.
"""

import errno
import logging
import random
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, final

import trio
import trio.testing

from martlet.app import saving
from martlet.app.services import run_services
from martlet.errors import LocalProtocolError, StoreFailed
from martlet.net.addresses import pack_host
from martlet.settings import BrokerConfig, ServerConfig
from martlet.store import Store, StoreConfig
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk, PowerCut
from martlet.testing.links import Conditions, MemoryLink
from martlet.testing.stores import small_config

from .checker import Checker, Tap, Violation
from .clients import consume, produce
from .disk import SlowDisk
from .held import DATA
from .held_clients import delay, give_back, pop, transact
from .ledger import move
from .life import Life

__all__ = ["Outcome", "Plan", "Script", "World", "simulate"]

TRACE_SHOWN: Final = 60
# What is computed from the log, or only handed over to RocketMQ, in groups of which each may be lost alone.
DERIVED: Final = (
    ("checkpoint",),
    ("config/delayOffset.json",),
    ("config/timercheck", "timerlog/", "timerwheel"),
    ("config/", ".snapshot"),
    ("consumequeue/",),
    ("index/",),
    ("queues.",),
)
SKEW_MS_MAX: Final = 86_400_000
FULL_PAUSE_S: Final = 4.0


@dataclass(frozen=True)
class Plan:
    """What a seed decides before anything runs."""

    flush: str
    segment_bytes: int
    page_bytes: int
    latency_s: float
    disk_delay_s: float
    producers: int
    consumers: int
    topics: int
    queues: int
    chaos_s: float
    fault_every_s: float
    capacity_bytes: int
    cuts: tuple[Cut, ...]
    light: bool
    delayers: int
    transactors: int
    retriers: int
    poppers: int

    @classmethod
    def draw(cls, chance: random.Random) -> "Plan":
        segment_bytes = chance.choice([8192, 16384, 65536])
        return cls(
            flush=chance.choice(["sync", "sync", "sync", "async"]),
            segment_bytes=segment_bytes,
            page_bytes=chance.choice([1024, 4096]),
            latency_s=chance.choice([0.0, 0.001, 0.02]),
            disk_delay_s=chance.choice([0.001, 0.01, 0.2]),
            producers=chance.randint(1, 3),
            consumers=chance.randint(1, 3),
            topics=chance.randint(1, 2),
            queues=chance.randint(1, 3),
            chaos_s=chance.uniform(15, 40),
            fault_every_s=chance.choice([1.0, 3.0, 8.0]),
            capacity_bytes=chance.choice([2048, 65536]),
            cuts=chance.choice([tuple(Cut), (Cut.LOST,), (Cut.TORN,)]),
            light=chance.random() < 0.5,
            delayers=chance.choice([0, 1, 1, 2]),
            transactors=chance.choice([0, 1, 1, 2]),
            retriers=chance.choice([0, 0, 1]),
            poppers=chance.choice([0, 1, 2]),
        )


@final
class Watch(trio.abc.Instrument):
    """Lets the checker look after every step of every task."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        life = self._world.life
        if life is not None:
            self._world.checker.step(life)


@final
class World:
    """A seed, and what became of it."""

    def __init__(self, seed: int, plan: Plan | None = None, script: "Script | None" = None) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.plan = plan = plan or Plan.draw(self.chance)
        self._script = script
        # What somebody does to the files once the broker has ended.
        self.damage: Callable[[FakeDisk], None] | None = None
        self.clock = TrioClock()
        self.broker_config = BrokerConfig(offsets_persist_ms=2000)
        self.server_config = ServerConfig(unsent_bytes_max=16384, unsent_total_bytes_max=65536, collect_bytes=4096)
        self.store_config: StoreConfig = small_config(
            flush=plan.flush,
            flush_interval_ms=300,
            segment_bytes=plan.segment_bytes,
            page_bytes=plan.page_bytes,
            persist_interval_ms=400,
            checkpoint_interval_ms=1500,
            message_bytes_max=4096,
            disk_used_ratio_max=0.85,
            disk_clean_ratio=0.85,
            retention_interval_ms=1000,
        )
        self.disk = FakeDisk()
        self.checker = Checker(sync=plan.flush == "sync", segment_bytes=plan.segment_bytes, offsets_persist_s=2.0)
        self.life: Life | None = None
        self.links = 0
        self.calm = False
        self.over = False
        self.starts = 0
        self.moves = 0
        self.crashes = 0
        self.lossless = True
        self.ended_at = 0.0
        self.crowded_until = 0.0
        self.full_until = -FULL_PAUSE_S
        self.producing = 0
        self.consuming = 0
        self.idle = trio.Event()

    # links

    def dial(self) -> MemoryLink | None:
        """Connect a client to the broker; None while there is none."""
        life = self.life
        if life is None or not life.serving or not life.alive:
            return None
        self.links += 1
        plan = self.plan
        name = f"link-{self.links}"
        link = MemoryLink(
            Conditions(
                capacity_bytes=plan.capacity_bytes,
                latency_s=plan.latency_s,
                jitter_s=plan.latency_s,
                chance=random.Random(self.chance.getrandbits(32)),
            )
        )
        tap = Tap(self.checker, life, link.far, name)
        life.taps = [tap for tap in life.taps if not tap.end.closed]
        life.taps.append(tap)
        life.links[name] = link
        self.checker.note(f"{name} opens")
        try:
            life.server.serve(life.protocol, tap, name, pack_host("127.0.0.1", self.links))
        except RuntimeError:  # the server's nursery is closed: it has just died of its disk
            life.serving = False
            return None
        return link

    # the machine

    def crash(self, cut: Cut, why: str) -> None:
        """The power goes in this very moment; what runs on does so in a world that nobody sees."""
        life = self.life
        if life is None or not life.alive:
            return
        self.checker.note(f"crash, {cut.name}: {why}")
        self.crashes += 1
        self._end(life, cut)

    def _end(self, life: Life, cut: Cut) -> None:
        life.alive = life.serving = False
        life.ended.set()
        self.ended_at = trio.current_time()
        self.lossless = self.checker.sync or cut is Cut.KILLED
        self.disk = life.disk.after_power_cut(cut, self.chance)
        self.disk.free_bytes = None
        life.disk.on_change = None
        if self.damage is not None:
            self.damage(self.disk)
            self.damage = None
        elif self._script is None and not self.calm and self.chance.random() < 0.2:
            self._lose_derived()
        for link in life.links.values():
            link.cut()
        life.scope.cancel()

    def _lose_derived(self) -> None:
        """Somebody deletes derived files while the broker does not run."""
        for parts in self.chance.sample(DERIVED, self.chance.randint(1, len(DERIVED))):
            self.checker.note(f"files are lost: {parts}")
            for path in sorted(path for path in self.disk.files if all(part in path for part in parts)):
                self.disk.unlink(path)
                self.disk.sync_directory(path.rpartition("/")[0])

    async def run_machine(self) -> None:
        """Start the broker again whenever it has ended, until the world is over."""
        while not self.over:
            await self._live()
            await trio.sleep(self.chance.uniform(0.01, 2.0))

    async def _live(self) -> None:
        life = self.life = Life(self)
        self.starts += 1
        with life.scope:
            try:
                await self._run_broker(life)
            except BaseExceptionGroup as group:
                self._died(life, group)
            except (PowerCut, StoreFailed, OSError) as error:
                self._died(life, error)

    def _died(self, life: Life, error: BaseException) -> None:
        """The broker ended by itself: of a power cut, or of a disk that failed. Anything else is a defect."""
        errors: list[BaseException] = [error]
        causes: list[BaseException] = []
        while errors:
            one = errors.pop()
            if isinstance(one, BaseExceptionGroup):
                errors.extend(one.exceptions)
            elif not isinstance(one, trio.Cancelled):
                causes.append(one)
        if any(isinstance(cause, PowerCut) for cause in causes):
            return
        failed = [cause for cause in causes if not isinstance(cause, StoreFailed | OSError)]
        if failed:
            self.checker.fail(f"the broker died of {failed[0]!r}")
            raise failed[0]
        self.crash(self.chance.choice(self.plan.cuts), f"the broker ended: {causes}")

    async def _run_broker(self, life: Life) -> None:
        """As `martlet.app.startup` does it."""
        disk = SlowDisk(life.disk, self.chance, self.plan.disk_delay_s, partial(self.checker.on_unlink, life))
        store = await Store.open(Path(DATA), self.store_config, self.clock, disk, dispatchers=life.dispatchers)
        life.build(self, store)
        self.checker.on_start(life, lossless=self.lossless, ended_at=self.ended_at)
        self.checker.note(f"start {self.starts}: log up to {store.readable}, {store.recovered.records} recovered")
        async with trio.open_nursery() as nursery:
            await nursery.start(store.upkeep.run)
            await life.broker.projections.replay()
            self.checker.check_ledger(life, "after a start")
            problem = saving.save(life.broker)
            if problem:
                self.checker.note(problem)
            await self._start_services(life, nursery)
            await nursery.start(life.server.run, [])
            broker = life.broker
            runs = broker.tails.run, broker.cursors.run, broker.revocation.run, broker.shared_groups.run
            for run in (*runs, broker.projections.run):
                nursery.start_soon(run)
            nursery.start_soon(saving.run, broker)
            nursery.start_soon(move, self, life, self._chance())
            nursery.start_soon(self._watch, life)
            life.serving = True
            await life.stop.wait()
            life.serving = False
            with trio.move_on_after(10):
                life.stop_serving()
                await life.server.wait_idle()
            nursery.cancel_scope.cancel()
        life.broker.projections.save()
        saving.save(life.broker)
        in_order = await store.close()
        self.checker.note("orderly stop" if in_order else "stop, not in order")
        self._end(life, self.chance.choice(self.plan.cuts))
        # Whatever the power does now, an orderly stop has left everything on the disk.
        self.lossless = self.lossless or in_order

    @staticmethod
    async def _start_services(life: Life, nursery: trio.Nursery) -> None:
        """Start the services of all plugins, and wait for those that say when they are ready."""
        for service in life.services:
            is_ready = trio.Event()
            nursery.start_soon(run_services, "simulated", [(service, is_ready)], trio.CancelScope())
            await is_ready.wait()

    async def _watch(self, life: Life) -> None:
        while True:
            await trio.sleep(0.25)
            self.checker.watch(life)
            if trio.current_time() > self.crowded_until:
                life.disk.used_ratio = 0.1
            if trio.current_time() > self.full_until:
                life.disk.free_bytes = None

    # faults

    async def run_faults(self) -> None:
        """Do harm at random times while the chaos lasts."""
        faults: list[Callable[[Life], None]] = [
            self._cut_link,
            self._cut_link,
            self._stall_link,
            self.crash_now,
            self.crash_soon,
            self._fail_sync,
            self._fail_write,
            self._fill_disk,
            self.crowd_disk,
            self.stop,
            self._skew_clock,
        ]
        while not self.calm:
            await trio.sleep(self.chance.expovariate(1 / self.plan.fault_every_s))
            life = self.life
            if life is not None and life.alive and not self.calm:
                self.chance.choice(faults)(life)

    def _some_link(self, life: Life) -> tuple[str, MemoryLink] | None:
        names = [tap.name for tap in life.taps if not tap.end.closed]
        if not names:
            return None
        name = self.chance.choice(names)
        return name, life.links[name]

    def _cut_link(self, life: Life) -> None:
        found = self._some_link(life)
        if found:
            self.checker.note(f"{found[0]} is cut")
            found[1].cut()

    def _stall_link(self, life: Life) -> None:
        found = self._some_link(life)
        if found:
            seconds = self.chance.uniform(0.5, 8)
            self.checker.note(f"{found[0]} stalls for {seconds:.3f} s")
            found[1].stall(seconds)

    def crash_now(self, life: Life) -> None:
        self.crash(self.chance.choice(self.plan.cuts), "at any time")

    def crash_soon(self, life: Life) -> None:
        """Cut the power just before one of the next changes of the disk."""
        left = [self.chance.randint(1, 30)]
        cut = self.chance.choice(self.plan.cuts)

        def count(name: str) -> None:
            left[0] -= 1
            if left[0] <= 0 and life.alive:
                self.crash(cut, f"before a {name}")
                raise PowerCut

        life.disk.on_change = count

    def _fail_sync(self, life: Life) -> None:
        if self.chance.random() < 0.5:
            self.checker.note("the next sync fails")
            life.disk.fail_next("sync", errno.EIO)
            self.checker.disturbed_until = trio.current_time() + 10  # it may hit a table, which is written again later

    def _fail_write(self, life: Life) -> None:
        code = self.chance.choice([errno.EIO, errno.ENOSPC])
        self.checker.note(f"a write fails soon: {errno.errorcode[code]}")
        life.disk.fail_next("write", code, after=self.chance.randint(0, 5))
        self.checker.disturbed_until = trio.current_time() + 10

    def _fill_disk(self, life: Life) -> None:
        """Leave no space for a while; after 10 s, retention would remove what somebody still needs.

        So a time without space follows the last one only when the broker has noticed that there is space again, which
        takes it two looks, one second apart.
        """
        if trio.current_time() < self.full_until + FULL_PAUSE_S:
            return
        self.checker.note("the disk is full")
        life.disk.free_bytes = self.chance.choice([0, 4096, 16384])
        self.full_until = trio.current_time() + self.chance.uniform(1, 7)
        self.checker.disturbed_until = trio.current_time() + 20

    def crowd_disk(self, life: Life) -> None:
        """Others use the disk for a moment: the oldest segments have to go."""
        self.checker.note("the disk is crowded")
        life.disk.used_ratio = 0.86
        self.crowded_until = trio.current_time() + 1

    def stop(self, life: Life) -> None:
        self.checker.note("the broker is asked to stop")
        life.stop.set()

    def _skew_clock(self, life: Life) -> None:
        self._set_clock(self.chance.choice([0, -3_600_000, 5000, SKEW_MS_MAX]))

    def _set_clock(self, skew_ms: int) -> None:
        self.checker.note(f"the clock is wrong by {skew_ms} ms")
        self.clock.skew_ms = skew_ms
        self.checker.held.skews.change(skew_ms)

    # the whole

    async def run(self) -> None:
        """Chaos, then calm in which everybody must finish, then a last look from outside."""
        trio.lowlevel.add_instrument(Watch(self))
        plan = self.plan
        self.checker.note(f"seed {self.seed}: {plan}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.run_machine)
            nursery.start_soon(self._end_when_broken, nursery.cancel_scope)
            self._start_clients(nursery)
            with trio.move_on_after(plan.chaos_s):
                await (self._script(self) if self._script is not None else self.run_faults())
            await self._calm_down()
            nursery.cancel_scope.cancel()

    def _start_clients(self, nursery: trio.Nursery) -> None:
        plan = self.plan
        producers = (produce, "p", plan.producers), (delay, "ph1", plan.delayers), (transact, "ph2", plan.transactors)
        consumers = (consume, "c", plan.consumers), (give_back, "r", plan.retriers), (pop, "q", plan.poppers)
        self.producing = sum(count for _, _, count in producers)
        self.consuming = sum(count for _, _, count in consumers)
        for client, name, count in (*producers, *consumers):
            for number in range(count):
                nursery.start_soon(partial(client, self, f"{name}{number}", self._chance()))

    @property
    def pending_transactions(self) -> bool:
        """Whether some have not ended, as far as the broker knows; true while it does not run."""
        life = self.life
        return life is None or not life.serving or bool(life.pending_transactions)

    def _chance(self) -> random.Random:
        return random.Random(self.chance.getrandbits(64))

    async def _end_when_broken(self, scope: trio.CancelScope) -> None:
        await self.checker.broken.wait()
        scope.cancel()

    async def _calm_down(self) -> None:
        self.calm = True
        self.checker.note("calm")
        life = self.life
        if life is not None:
            life.disk.free_bytes = None
            life.disk.failures.clear()
            life.disk.on_change = None
        # Now all timers are due, whatever time it was when they were sent.
        self._set_clock(SKEW_MS_MAX)
        with trio.move_on_after(120) as patience:
            await self.idle.wait()
        if patience.cancelled_caught:
            self.checker.fail(
                f"after 120 s of calm {self.producing} producers and {self.consuming} consumers have not finished"
            )
        else:
            self.checker.held.check_end()
            self.checker.popped.check_end()
        self.over = True
        life = self.life
        assert life is not None
        life.stop.set()
        await life.ended.wait()
        await self._look_from_outside()

    async def _look_from_outside(self) -> None:
        """Open the store once more, without the indexes: nothing that a client can see has changed."""
        for path in [path for path in self.disk.files if path.startswith((f"{DATA}/consumequeue", f"{DATA}/index"))]:
            self.disk.unlink(path)
        assert self.life is not None
        dispatchers = self.life.dispatchers
        store = await Store.open(Path(DATA), self.store_config, self.clock, self.disk, dispatchers=dispatchers)
        found = self.checker.contents(store)
        self.checker.compare(found, "after the indexes were deleted")
        self.checker.check_keys(store)
        await store.close()

    def finished(self, *, produces: bool = False) -> None:
        """One more client has done what it wanted."""
        if produces:
            self.producing -= 1
        else:
            self.consuming -= 1
        if not self.producing and not self.consuming:
            self.idle.set()


Script: TypeAlias = Callable[[World], Awaitable[None]]


@dataclass
class Outcome:
    """What a seed came to."""

    seed: int
    failure: Violation | None
    digest: str
    trace: list[str] = field(repr=False)
    acknowledged: int = 0
    delivered: int = 0
    groups: int = 0
    crashes: int = 0
    starts: int = 0
    delayed: int = 0
    recalled: int = 0
    committed: int = 0
    checks: int = 0
    popped: int = 0
    pops_settled: int = 0

    def report(self) -> str:
        """Say what went wrong and how to see it again."""
        lines = "\n".join(self.trace[-TRACE_SHOWN:])
        return f"seed {self.seed}: {self.failure}\n{lines}\nagain: python -m tests.sim --seed {self.seed} --trace"


class _Defects(logging.Handler):
    """An error on the log with a traceback, or of our own against a protocol, is a violation, too."""

    def __init__(self, checker: Checker) -> None:
        super().__init__(logging.ERROR)
        self._checker = checker

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        of_text = record.args[-1] if isinstance(record.args, tuple) and record.args else None
        if error is not None and not _is_of_power_cut(error):
            self._checker.fail(f"{record.getMessage()}: {error!r}")
        elif isinstance(of_text, LocalProtocolError):  # it closes a connection, and the client comes again
            self._checker.fail(record.getMessage())


def _is_of_power_cut(error: BaseException | None) -> bool:
    """Return whether *error* is a power cut, or was raised while one unwound the stack, which a machine never sees."""
    while error is not None and not isinstance(error, PowerCut):
        error = error.__context__
    return error is not None


@contextmanager
def _deterministic(seed: int, checker: Checker) -> Generator[None]:
    """Make trio's scheduling a function of *seed*, and listen to the log."""
    core = trio._core._run
    logger = logging.getLogger("martlet")
    handler = _Defects(checker)
    state, before, propagate = core._r.getstate(), core._ALLOW_DETERMINISTIC_SCHEDULING, logger.propagate
    core._r.seed(seed)
    setattr(core, "_ALLOW_DETERMINISTIC_SCHEDULING", True)  # noqa: B010, it is declared final
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        setattr(core, "_ALLOW_DETERMINISTIC_SCHEDULING", before)  # noqa: B010
        core._r.setstate(state)


def simulate(seed: int, plan: Plan | None = None, script: Script | None = None) -> Outcome:
    """Run the world of *seed* from beginning to end, with *script* instead of faults at random times."""
    made: list[World] = []

    async def main() -> None:
        world = World(seed, plan, script)
        made.append(world)
        with _deterministic(seed, world.checker):
            await world.run()

    try:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    except Exception as error:
        made[0].checker.failure = made[0].checker.failure or Violation(f"the simulation broke: {error!r}")
        made[0].checker.failure.__cause__ = error
    world = made[0]
    checker = world.checker
    return Outcome(
        seed,
        checker.failure,
        checker.digest,
        checker.trace,
        checker.acknowledged,
        checker.delivered,
        world.moves,
        world.crashes,
        world.starts,
        checker.held.delivered - checker.held.committed,
        checker.held.recalls,
        checker.held.committed,
        checker.held.asked_back,
        checker.popped.deliveries,
        checker.popped.settled,
    )
