"""Each derived file, damaged in each way after each kind of stop: clients see no difference.

The broker holds delayed, timed, half and popped messages meanwhile, in its simulated world.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Final

import trio
from tests.damage import files

from martlet.testing.disk import Cut, FakeDisk

from .held import DATA
from .world import Outcome, Plan, World, simulate

__all__ = ["ALL", "DAMAGES", "FILES", "STOPS", "Damage", "damage_one"]

PLAN: Final = Plan(
    flush="sync",
    segment_bytes=16384,
    page_bytes=1024,
    latency_s=0.001,
    disk_delay_s=0.001,
    producers=1,
    consumers=1,
    topics=1,
    queues=2,
    chaos_s=60,
    fault_every_s=1,
    capacity_bytes=65536,
    cuts=(Cut.LOST,),
    light=True,
    delayers=1,
    transactors=1,
    retriers=0,
    poppers=1,
)
# The topics of consume queues in this world.
TOPICS: Final = ("RMQ_SYS_TRANS_", "SCHEDULE_TOPIC_XXXX", "martlet.journal.", "rmq_sys_wheel_timer", "topic-0")
# What its plugins and clients do not write.
ABSENT: Final = (
    "config/lmqConsumerOffset.json",
    "config/mqtt-retained.snapshot",
    "config/sessions.snapshot",
    "config/tx-external.snapshot",
)


def prefixes() -> Iterator[str]:
    """Yield how the paths of each kind of derived file begin."""
    for each in files.FILES:
        if each.kind is files.Kind.DERIVED and each.name not in ABSENT:
            begin, is_of_topic, _ = re.split("(TOPIC)|TIME|0000", f"{each.name}0000", maxsplit=1)
            yield from [begin + topic for topic in TOPICS] if is_of_topic else [begin]


FILES: Final = tuple(sorted(prefixes()))
Files = dict[str, bytes]


def remove(disk: FakeDisk, path: str, older: bytes | None) -> None:
    disk.unlink(path)
    disk.sync_directory(path.rpartition("/")[0])


def replace(disk: FakeDisk, path: str, data: bytes) -> None:
    fd = disk.open(path)
    disk.truncate(fd, 0)
    disk.write(fd, data, 0)
    disk.sync(fd)
    disk.close(fd)


def zero(disk: FakeDisk, path: str, older: bytes | None) -> None:
    replace(disk, path, bytes(len(disk.files[path].data)))


def cut(disk: FakeDisk, path: str, older: bytes | None) -> None:
    replace(disk, path, bytes(disk.files[path].data[: len(disk.files[path].data) // 2]))


def put_back(disk: FakeDisk, path: str, older: bytes | None) -> None:
    """Put back an older version, or that there was none."""
    if older is None:
        remove(disk, path, None)
    else:
        replace(disk, path, older)


Damage = Callable[[FakeDisk, str, bytes | None], None]
STOPS: Final = ("stopped", "killed", "power lost")
DAMAGES: Final[tuple[Damage, ...]] = (remove, zero, cut, put_back)
ALL: Final = list(product(FILES, DAMAGES, STOPS))


def files_of(disk: FakeDisk, prefix: str) -> Files:
    return {path: bytes(file.data) for path, file in sorted(disk.files.items()) if path.startswith(f"{DATA}/{prefix}")}


async def play(damaged: list[str], prefix: str, damage: Damage, stop: str, world: World) -> None:
    """Stop the broker in order once, so that all files exist, and later in another way; then do the damage."""
    await trio.sleep(3)
    await stop_once(world, "stopped", None)
    older = files_of(world.disk, prefix)
    await trio.sleep(3)

    def do(disk: FakeDisk) -> None:
        for path in files_of(disk, prefix):
            damage(disk, path, older.get(path))
            damaged.append(path)

    await stop_once(world, stop, do)
    await trio.sleep(1)


async def stop_once(world: World, how: str, damage: Callable[[FakeDisk], None] | None) -> None:
    life = world.life
    assert life is not None
    world.damage = damage or (lambda disk: None)
    if how == "stopped":
        life.stop.set()
    else:
        world.crash(Cut.KILLED if how == "killed" else Cut.LOST, how)
    await life.ended.wait()


def damage_one(prefix: str, damage: Damage, stop: str) -> Outcome:
    """Run the world with the files whose paths begin with *prefix* damaged after *stop*."""
    damaged: list[str] = []
    outcome = simulate(1, PLAN, partial(play, damaged, prefix, damage, stop))
    if not damaged or not min(outcome.delayed, outcome.committed, outcome.popped):
        raise ValueError(f"{prefix!r}: {len(damaged)} files were damaged; {outcome}")
    return outcome
