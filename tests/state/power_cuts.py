"""Work on a disk whose power is cut at one of its changes, and a broker that does nothing by itself meanwhile."""

from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar, final

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

W = TypeVar("W")


@final
@dataclass(frozen=True)
class Left(Generic[W]):
    """What a power cut at change *number* leaves: the disk, and what was known at that moment."""

    number: int
    kind: Cut
    disk: FakeDisk
    known: W


async def cut_everywhere(
    disk: FakeDisk,
    work: Callable[[], Awaitable[None]],
    known: Callable[[], W],
    kind_of: Callable[[int], Cut],
    first: int = 0,
) -> list[Left[W]]:
    """Do *work* once; return what a power cut at each change of *disk* from number *first* on would leave.

    *known* returns a copy of what is known, which the rest of the work does not change.
    """
    found: list[Left[W]] = []
    number = 0

    def keep(name: str) -> None:
        nonlocal number
        if number >= first:
            kind = kind_of(number)
            found.append(Left(number, kind, disk.after_power_cut(kind, Random(number)), known()))
        number += 1

    disk.on_change = keep
    await work()
    disk.on_change = None
    return found


def copied(known: W, *shared: object) -> W:
    """Return a copy of *known* that refers to the same objects *shared*."""
    return deepcopy(known, {id(each): each for each in shared})


async def count_changes(disk: FakeDisk, work: Callable[[], Awaitable[None]]) -> int:
    """Do *work* and return how often it changes *disk*."""
    changes = 0

    def count(name: str) -> None:
        nonlocal changes
        changes += 1

    disk.on_change = count
    await work()
    return changes


async def changes_after(
    beginning: Callable[[FakeDisk], Callable[[], Awaitable[None]]],
    whole: Callable[[FakeDisk], Callable[[], Awaitable[None]]],
) -> range:
    """Do both works, each on a new disk; return the numbers of the changes that *whole* makes after *beginning*."""
    disk = FakeDisk()
    begin = await count_changes(disk, beginning(disk))
    disk = FakeDisk()
    changes = range(begin, await count_changes(disk, whole(disk)))
    assert len(changes) > 5
    return changes


async def cut_at(disk: FakeDisk, number: int, work: Callable[[], Awaitable[None]]) -> None:
    """Do *work* until change *number* of *disk*, counted from 0, which must come; all changes from it on fail."""
    left = number

    def cut(name: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise PowerCut

    disk.on_change = cut
    try:
        await work()
    except (PowerCut, BaseExceptionGroup):
        if left >= 0:
            raise  # of something else
    disk.on_change = None
    assert left < 0


def cut_of(number: int, flush: str) -> Cut:
    """Return the kind of cut for change *number*; with async flush only the end of the process is survived."""
    return list(Cut)[number % 4] if flush == "sync" else Cut.KILLED


def nothing(broker: Broker) -> None:
    """Install no plugin."""


async def opened(
    disk: FakeDisk, clock: Clock, flush: str, *queues: str, install: Callable[[Broker], None] = nothing, **sizes: Any
) -> Broker:
    """Open a broker whose tasks do not run, with a topic of one queue for each of *queues*.

    *install* adds a plugin before its projections are replayed.
    """
    store = await Store.open(Path("/data/store"), small_config(flush=flush, **sizes), clock, disk)
    store.store_host = HOST
    topics = Topics(store, clock, auto_create=True, auto_create_queues=1)
    groups = Groups(clock, auto_create=True)
    broker = Broker(BrokerConfig(), store, topics, groups, clock, Ids(Random(1)), Stats(), DeliveryConfig())
    for name in queues:
        topics.ensure(name, 1)
    install(broker)
    await broker.projections.replay()
    return broker
