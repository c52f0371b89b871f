"""``martlet tiered restore``: makes the data directory of a broker from its cold tier."""

import argparse
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import trio
from msgspec import structs

from martlet.app.config import Config, read_config
from martlet.cli.interrupts import ended_by
from martlet.cli.outcome import Exit
from martlet.cli.terminal import Bar, print_json
from martlet.errors import ConfigError, StoreError
from martlet.offline.directory import repair
from martlet.offline.unfinished import unfinished_backup
from martlet.runtime.clock import SystemClock
from martlet.runtime.ids import Ids
from martlet.store.disk.files import RealDisk

if TYPE_CHECKING:
    from martlet_tiered.commands.place import OpenedTable
    from martlet_tiered.restore.broker_state import BrokerState
    from martlet_tiered.restore.directory import Restored

__all__ = ["configure", "run"]

ACL: Final = "config/acl.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("directory", metavar="DIR", help="the new data directory, which is missing or empty")


def run(arguments: Any) -> int:
    """Make the directory, and print what it has, and what may be lost."""
    from martlet_tiered.commands.place import open_for_writing, open_place, read_tables
    from martlet_tiered.owners import Owners
    from martlet_tiered.restore.directory import make_directory
    from martlet_tiered.upload.ownership import write_owners

    disk, target = RealDisk(), os.path.abspath(arguments.directory)
    config = read_config(read_tables(arguments))
    place = open_place(arguments)
    if arguments.config and config.broker.name != place.broker:
        raise ConfigError(
            f"the tier at {place.url!r} is of broker {place.broker!r}, and broker.name is {config.broker.name!r}"
        )
    _check_target(target, disk)
    _state_of(place)
    os.umask(0o077)  # no other user may read messages
    unique = Ids().unique()
    if os.path.isdir(target):
        disk.remove_directory(target)
    with ended_by(signal.SIGTERM, signal.SIGHUP), unfinished_backup(target, disk) as folder:
        # Only now, when nothing else is missing: the old broker cannot upload any more.
        epoch = open_for_writing(arguments, unique, SystemClock().now_ms())[1].take_over(f"{unique}/restore")
        place = open_place(arguments)
        state, problems = _state_of(place)
        done = _shown(
            "reading",
            lambda bar: make_directory(folder, disk, place.objects, place.files, state, place.end, bar.update),
        )
        done.problems[:0] = problems
        write_owners(disk, folder, Owners(epoch, [unique]))
        store = structs.replace(config.store, segment_bytes=state.segment_bytes)
        _complete(folder, disk, structs.replace(config, store=store))
    _print(arguments, place, target, state, done)
    return Exit.FAILED if done.problems else Exit.OK


def _check_target(target: str, disk: RealDisk) -> None:
    """Check that a directory can be renamed to *target*."""
    if os.path.islink(target):
        raise StoreError(f"{target!r} is a symbolic link; give the directory that it leads to")
    if os.path.lexists(target) and not os.path.isdir(target):
        raise StoreError(f"{target!r} is not a directory; choose another one")
    if os.path.ismount(target):
        raise StoreError(f"{target!r} is a mount point, which cannot be replaced; choose a directory in it")
    if disk.names(target):
        raise StoreError(f"{target!r} is not empty; choose another directory")


def _state_of(place: "OpenedTable") -> "tuple[BrokerState, list[str]]":
    """Return the newest intact state of the broker, and why newer ones cannot be used. Raises `TableRefused`."""
    from martlet_tiered.errors import TableRefused
    from martlet_tiered.restore.broker_state import find_state

    state, problems = find_state(place.objects, place.reach)
    if state is None:
        why = f" ({problems[0]})" if problems else ", because an older version has uploaded it"
        raise TableRefused(f"the tier at {place.url!r} has no state of its broker{why}; its messages can be read alone")
    return state, problems


def _shown(label: str, work: "Callable[[Bar], Restored]") -> "Restored":
    bar = Bar(label, "files")
    try:
        return work(bar)
    finally:
        bar.close()


def _complete(folder: str, disk: RealDisk, config: Config) -> None:
    """Make the queues of the new log, as a start does, and stop in order."""
    bar = Bar("making queues", "B")

    async def complete() -> None:
        await repair(folder, config, disk, lambda done, total, records: bar.update(done, total))

    try:
        trio.run(complete)
    finally:
        bar.close()


def _when(time_ms: int) -> str:
    ago = timedelta(seconds=max(SystemClock().now_ms() - time_ms, 0) // 1000)
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC, {ago} ago"


def _print(arguments: Any, place: "OpenedTable", target: str, state: "BrokerState", done: "Restored") -> None:
    last_ms = place.last_upload_ms() or state.time_ms
    behind = max(done.end - state.position, 0)
    has_users = ACL in state.files
    if arguments.json:
        fields = {"url": place.url, "broker": place.broker, "directory": target, "start_position": done.start}
        fields |= {"end_position": done.end, "last_upload_ms": last_ms, "state_position": state.position}
        fields |= {"state_ms": state.time_ms, "state_behind_bytes": behind}
        fields |= {"internal_records": done.records, "queues": done.queues, "problems": done.problems}
        print_json({**fields, "lacks_secrets": has_users})
        return
    print(f"restored  {target} from {place.url}, broker {place.broker!r}")
    print(
        f"log       position {done.start:,} to {done.end:,}; {done.queues:,} queues, {done.records:,} internal records"
    )
    print(f"lost      what was stored after the last upload: {_when(last_ms)}")
    print(f"state     topics, groups and offsets are of {_when(state.time_ms)}; {behind:,} bytes of log are newer")
    if has_users:
        print("secrets   of users are not in the tier: copy config/acl.secrets, or set them again with `martlet acl`")
    for problem in done.problems:
        print(f"damaged   {problem}")
    print(f"next      start the broker with broker.name = {place.broker!r}, tiered.url and this data directory;")
    print("          as the user who owns the files; do not start the old one again: it would upload nothing")
