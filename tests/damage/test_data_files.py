"""Whatever happens to a file beside the log, after whatever kind of stop, clients of all plugins see no difference.

The product of (file) x (damage) x (stop), of which the normal run takes a part; ``MARTLET_DAMAGE=all`` takes all of it,
and ``MARTLET_DAMAGE_BITS`` says how many flipped bits of each file (default: 4).
"""

import logging
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from random import Random
from typing import Final, TypeVar

import pytest
import trio
from tests.damage.files import FILES, Kind, file_of
from tests.damage.world import DATA, Plugins, Seen, copy_of, fill, living, see
from trio.testing import MockClock

from martlet.plugins.loader import GROUP
from martlet.testing.clock import START_MS
from martlet.testing.disk import Cut, FakeDisk

WHOLE: Final = os.environ.get("MARTLET_DAMAGE", "") == "all"
BITS: Final = int(os.environ.get("MARTLET_DAMAGE_BITS", "4"))
STOPS: Final = ("orderly", "killed", "killed at once", "killed twice", "power lost")
DAMAGES: Final = ("removed", "emptied", "zeroed", "truncated", "stale", *(f"flipped {bit}" for bit in range(BITS)))
# Index entries have no checksum: a query may miss a message, see docs/store.md.
UNCHECKED: Final = ("index/",)
# Consumers' offsets are written at an interval, so after a kill both copies may say something else.
LATER: Final = ("config/consumerOffset.json", "config/lmqConsumerOffset.json")
T = TypeVar("T")
Files = dict[str, bytes]


def played(main: Callable[..., Awaitable[T]], *arguments: object) -> T:
    return trio.run(main, *arguments, clock=MockClock(autojump_threshold=0))


class History:
    """A broker that was used and stopped in each way, what it had left after its first stop, and what clients see."""

    def __init__(self) -> None:
        self.older: Files = {}
        self.kept: set[str] = set()  # snapshots and tables, also those that have nothing to write
        self.stopped: dict[str, FakeDisk] = {}
        self.seen: dict[str, Seen] = {}

    async def make(self) -> None:
        disk = FakeDisk()
        async with living(disk, START_MS) as live:
            await fill(live, "first")
            self.kept = {f"config/{each.name}.snapshot" for each in live.broker.projections._driven}
            self.kept |= {each.path for each in live.broker.tables._tables}
            await trio.sleep(12)
        self.older = content_of(disk)
        async with living(disk, START_MS + 30_000) as live:
            await fill(live, "second")
            self.stopped["killed at once"] = copy_of(disk)
            await trio.sleep(12)
            self.stopped["killed"] = copy_of(disk)
            self.stopped["power lost"] = copy_of(disk, Cut.LOST)
        self.stopped["orderly"] = disk
        again = copy_of(self.stopped["killed"])
        async with living(again, START_MS + 60_000):
            self.stopped["killed twice"] = copy_of(again)

    def expected(self, stop: str) -> Seen:
        if stop not in self.seen:
            self.seen[stop] = played(see, copy_of(self.stopped[stop]))
        return self.seen[stop]


@pytest.fixture(scope="module")
def history(small_wheels: None) -> History:
    """Made once for each worker; each test works on a copy."""
    made = History()
    played(made.make)
    return made


def content_of(disk: FakeDisk) -> Files:
    """Return the content of all files, by their path in the data directory."""
    return {path.removeprefix(f"{DATA}/"): bytes(file.data) for path, file in sorted(disk.files.items())}


def put(disk: FakeDisk, path: str, data: bytes) -> None:
    file = disk.files[f"{DATA}/{path}"]
    file.data[:] = data
    file.stable[:] = data
    file.changes.clear()


def spoil(disk: FakeDisk, path: str, damage: str, older: Files) -> None:
    """Do *damage* to the file at *path*."""
    data, random = bytearray(disk.files[f"{DATA}/{path}"].data), Random(f"{path} {damage}")
    used = len(data.rstrip(b"\0")) or len(data)
    if damage == "removed" or (damage == "stale" and path not in older):
        disk.unlink(f"{DATA}/{path}")
        disk.sync_directory(os.path.dirname(f"{DATA}/{path}"))
    elif damage == "stale":
        put(disk, path, older[path])
    elif damage == "emptied":
        put(disk, path, b"")
    elif damage == "zeroed":
        put(disk, path, bytes(len(data)))
    elif damage == "truncated":
        put(disk, path, bytes(data[: random.randrange(used)]))
    elif data:
        data[random.randrange(used)] ^= 1 << random.randrange(8)
        put(disk, path, bytes(data))


NAMES: Final = [
    f"{each.name}{end}"
    for each in FILES
    if each.kind in (Kind.DERIVED, Kind.COPIED)
    for end in (("", ".bak") if each.has_bak else ("",))
]


def is_told(name: str, damage: str, stop: str) -> bool:
    """Return whether anything can tell that *damage* was done: an older table is a table, and some bits are no more."""
    plain = name.removesuffix(".bak")
    entry = next(each for each in FILES if each.name == plain)
    if entry.kind is Kind.COPIED and damage == "stale":
        return False
    return not (plain in LATER and stop == "killed at once")


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield file, damage and stop: all of them, or each file with each damage in turn, at one of the stops."""
    for row, name in enumerate(NAMES):
        found = [(name, damage, stop) for damage in DAMAGES for stop in STOPS if is_told(name, damage, stop)]
        turns = 1 if name.endswith(".bak") else 2
        yield from found if WHOLE else [found[(row * 7 + turn * 11) % len(found)] for turn in range(turns)]


def paths_of(disk: FakeDisk, name: str) -> list[str]:
    """Return the files that *name* stands for; of consume queues and the log of timers, there are many."""
    plain, is_bak = name.removesuffix(".bak"), name.endswith(".bak")
    return [
        path
        for path in content_of(disk)
        if path.endswith(".bak") is is_bak and (found := file_of(path)) is not None and found.name == plain
    ]


def differences(seen: Seen, expected: Seen) -> dict[str, tuple[object, object]]:
    return {name: (seen.get(name), expected[name]) for name in expected if seen.get(name) != expected[name]}


@pytest.mark.parametrize(("name", "damage", "stop"), list(cases()))
def test_damage_to_a_file_beside_the_log_changes_nothing(history: History, name: str, damage: str, stop: str) -> None:
    disk = copy_of(history.stopped[stop])
    paths = paths_of(disk, name)
    for path in paths:
        spoil(disk, path, damage, history.older)
    assert paths or stop != "orderly", "nothing was damaged"
    seen, expected = played(see, disk), dict(history.expected(stop))
    if seen["keys"] is None or name.startswith(UNCHECKED):
        del expected["keys"]
    assert differences(seen, expected) == {}


@pytest.mark.parametrize("stop", STOPS)
def test_a_start_without_damage_reports_none(history: History, stop: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither a snapshot nor a table that a broker has written is refused by the next one."""
    with caplog.at_level(logging.WARNING):
        played(see, copy_of(history.stopped[stop]))
    assert [record.getMessage() for record in caplog.records if record.name != "martlet.tx"] == []


def unlisted(paths: Iterable[str]) -> list[str]:
    return [path for path in paths if file_of(path) is None]


@pytest.mark.parametrize("stop", STOPS)
def test_every_file_is_on_the_list(history: History, stop: str) -> None:
    disk = history.stopped[stop]
    assert unlisted([*content_of(disk), *history.kept]) == [], "add these to tests/damage/files.py and operations.md"
    if stop == "orderly":
        missing = [each.name for each in FILES if not any(each.matches(path) for path in content_of(disk))]
        assert missing == ["abort", "space.probe"], "these are listed, but a broker with all plugins does not have them"


def test_the_file_of_a_new_plugin_is_not_on_the_list() -> None:
    new = ["config/new.snapshot", "config/new.json.bak", "config/timers.snapshot.2", "new/00000000000000000000", "new"]
    assert unlisted(new) == new


def test_all_plugins_take_part() -> None:
    """Those that come with Martlet, but three: Spark's has commands only, people edit the files of access control, and
    the index of the cold tier is a file of SQLite, which `tests/tiered/test_reading.py` damages.
    """
    ours = {each.name for each in entry_points(group=GROUP) if each.dist is not None and each.dist.name == "martlet"}
    assert {name for name, _ in Plugins().all} == ours - {"acl", "spark", "tiered"}


def test_the_list_is_that_of_the_documentation() -> None:
    text = Path("docs/operations.md").read_text()
    section = text[text.index("## The data directory") :]
    section = section[: section.index("**Backup.**")]
    rows = dict(re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE))
    assert rows == {each.name: each.kind.value for each in FILES}
