"""Power cuts: a workload is cut at every change of its disk, and what is left is checked each time.

A test writes a `Workload`: its work, and what must hold afterwards. `cut_everywhere` does the work once, `cut_again`
anew for each cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

from martlet.broker import Broker
from martlet.runtime.clock import Clock
from martlet.runtime.ids import Ids
from martlet.runtime.stats import Stats
from martlet.settings import BrokerConfig, DeliveryConfig
from martlet.store import Store
from martlet.tables.groups import Groups
from martlet.tables.topics import Topics
from martlet.testing.disk import Cut, FakeDisk, PowerCut
from martlet.testing.stores import HOST, small_config


class Workload(ABC):
    """Work on a disk, and the knowledge of what must be there after a cut."""

    def __init__(self, disk: FakeDisk, flush: str) -> None:
        self.disk = disk
        self.flush = flush
        self.is_cut = False
        self.changes = 0  # so far, for `count_changes`

    @abstractmethod
    async def work(self) -> None:
        """Do all of it, and stop in order."""

    @abstractmethod
    async def check(self, disk: FakeDisk, kind: Cut) -> None:
        """Start on *disk*, which a cut has left, and see that all is there; called on a copy of that moment."""

    def shared(self) -> Iterable[object]:
        """Return what such a copy shares with the work: whatever the work changes and `check` does not use."""
        return (self.disk,)

    def cut_of(self, number: int) -> Cut:
        """Return the kind of cut at change *number*; with async flush only the end of the process is survived."""
        return list(Cut)[number % 4] if self.flush == "sync" else Cut.KILLED

    async def check_cut(self, number: int, kind: Cut, disk: FakeDisk) -> None:
        """Check what is left, and say of a failure which cut it was."""
        try:
            await self.check(disk, kind)
        except BaseException as error:
            error.add_note(f"{kind.name} at change {number}")
            raise


async def cut_everywhere(work: Workload, first: int = 0) -> int:
    """Do the work once; check what a cut at each change of its disk from number *first* on would leave.

    Returns the number of cuts.
    """
    cuts: list[tuple[Workload, int, Cut, FakeDisk]] = []
    number = 0

    def keep(name: str) -> None:
        nonlocal number
        if number >= first:
            kind = work.cut_of(number)
            known = deepcopy(work, {id(each): each for each in work.shared()})
            cuts.append((known, number, kind, work.disk.after_power_cut(kind, Random(number))))
        number += 1

    work.disk.on_change = keep
    await work.work()
    work.disk.on_change = None
    for known, number, kind, disk in cuts:
        await known.check_cut(number, kind, disk)
    return len(cuts)


async def cut_again(make: Callable[[FakeDisk], Workload], changes: Iterable[int]) -> int:
    """Do the work that *make* makes anew for each of the *changes* of its disk, all of which fail from there on.

    Tasks run in another order each time, and one fdatasync may serve two waiters where there were two before. So the
    last changes may not come; such work has ended in order, and is checked as well. Returns the number of cuts.
    """
    numbers = list(changes)
    cuts = 0
    for number in numbers:
        work = make(FakeDisk())
        cuts += await cut_at(work, number)
        kind = work.cut_of(number)
        await work.check_cut(number, kind, work.disk.after_power_cut(kind, Random(number)))
    assert cuts > len(numbers) // 2, f"of {len(numbers)} changes only {cuts} came"
    return cuts


async def count_changes(work: Workload) -> int:
    """Do the work and return how often it changes its disk."""

    def count(name: str) -> None:
        work.changes += 1

    work.disk.on_change = count
    await work.work()
    work.disk.on_change = None
    return work.changes


async def changes_after(beginning: Workload, whole: Workload) -> range:
    """Do both works; return the numbers of the changes that *whole* makes after *beginning*."""
    changes = range(await count_changes(beginning), await count_changes(whole))
    assert len(changes) > 5
    return changes


async def cut_at(work: Workload, number: int) -> bool:
    """Do the work until change *number* of its disk, counted from 0; all changes from it on fail.

    Returns whether it came.
    """
    left = number

    def cut(name: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            work.is_cut = True
            raise PowerCut

    work.disk.on_change = cut
    try:
        await work.work()
    except (PowerCut, BaseExceptionGroup):
        if not work.is_cut:
            raise  # of something else
    work.disk.on_change = None
    return work.is_cut


def nothing(broker: Broker) -> None:
    """Install no plugin."""


async def opened(
    disk: FakeDisk, clock: Clock, flush: str, *queues: str, install: Callable[[Broker], None] = nothing, **sizes: Any
) -> Broker:
    """Open a broker whose tasks do not run, with a topic of one queue for each of *queues*.

    *install* adds a plugin before its projections are replayed.
    """
    store = await Store.open(Path("/data/store"), small_config(flush=flush, **sizes), clock, disk)
    store.writer.store_host = HOST
    topics = Topics(store, clock, auto_create=True, auto_create_queues=1)
    groups = Groups(clock, auto_create=True)
    broker = Broker(BrokerConfig(), store, topics, groups, clock, Ids(Random(1)), Stats(), DeliveryConfig())
    for name in queues:
        topics.ensure(name, 1)
    install(broker)
    await broker.projections.replay()
    return broker
