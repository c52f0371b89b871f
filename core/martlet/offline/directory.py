"""Verify and repair a data directory while no broker uses it.

Both run the code of a broker's start: the store's recovery and the loading of the tables. `verify` runs it on a
disk that keeps all changes in memory, then reads the whole log and looks up each record as consumers and queries do.
`repair` runs it on the directory itself and shuts down cleanly.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Literal, final

from msgspec import Struct, field

from martlet.app import saving
from martlet.app.config import Config
from martlet.app.startup import build, dispatchers_of
from martlet.broker import Broker
from martlet.errors import StoreError
from martlet.message import Record
from martlet.offline.verify import Keyed, Served, gone_since_checkpoint, offsets_at_checkpoint
from martlet.plugins.loader import load
from martlet.runtime.clock import SystemClock
from martlet.runtime.stats import Stats
from martlet.store import Disk, Store
from martlet.store.disk.checkpoint import read_checkpoint, stopped_in_order
from martlet.store.disk.dry_disk import DryDisk
from martlet.store.disk.files import Files, read_file
from martlet.store.format.notes import NOTES_TOPIC, read_note
from martlet.store.recovery.inspect import Inspection, LogWalk, require_log

__all__ = ["Finding", "Plan", "Verification", "plan", "repair", "verify"]

Report = Callable[[int, int, int], None]

# Files that every start writes. Changes to them are no findings; damage to them is found by reading them.
OWN_NOTES: Final = ("abort", "checkpoint", "lock", "queues.", "space.probe")
NAMED_MAX: Final = 3
# Logger of warnings that the store has other sizes than the configuration: nothing is damaged, nothing changes.
ABOUT_SIZES: Final = "martlet.store.recovery.sizes"


class Finding(Struct, frozen=True):
    """A problem, and the reaction of a start to it.

    Kinds: ``start``: a warning that a start logs; ``change``: files that a start changes; ``damage``: a part of the log
    without valid records; ``queue``: messages that consumers do not receive; ``keys``: messages that queries by key do
    not find.
    """

    kind: Literal["start", "change", "damage", "queue", "keys"]
    text: str


class Plan(Struct):
    """The repairs that a start would make; none if ``findings`` is empty."""

    stopped_in_order: bool
    findings: list[Finding] = field(default_factory=list)


class Verification(Struct):
    """The contents of the log, and all problems found."""

    inspection: Inspection
    findings: list[Finding] = field(default_factory=list)


@final
class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != ABOUT_SIZES:
            self.texts.append(record.getMessage())


@contextmanager
def _collected_warnings() -> Generator[list[str]]:
    """Collect the warnings of a start instead of logging them."""
    messages = _Messages()
    loggers = [logging.getLogger(name) for name in ("martlet.store", "martlet.tables")]
    before = [(logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.addHandler(messages)
        logger.propagate = False
        logger.setLevel(logging.WARNING)
    try:
        yield messages.texts
    finally:
        for logger, (propagate, level) in zip(loggers, before, strict=True):
            logger.removeHandler(messages)
            logger.propagate = propagate
            logger.setLevel(level)


async def _start(directory: str, config: Config, disk: Disk, report: Report | None) -> Broker:
    """Run the start of a broker up to the point where it opens its ports."""
    clock = SystemClock()
    plugins = load(config.plugins.enabled, config.plugin_tables, config.plugins.required)
    dispatchers = await dispatchers_of(plugins)
    store = await Store.open(Path(directory), config.store, clock, disk, report, dispatchers)
    with ExitStack() as undo:
        undo.callback(store.crash)
        broker = build(config, store, clock, Stats())
        undo.pop_all()
    return broker


async def plan(directory: str, config: Config, disk: Disk, report: Report | None = None) -> Plan:
    """Report the changes that a broker with *config* would make at its start on *directory*; change nothing.

    Raises:
      StoreError: there is no log, or a broker has the directory open.
    """
    found, broker = await _start_dry(directory, config, disk, report)
    broker.store.crash()
    return found


async def _start_dry(directory: str, config: Config, disk: Disk, report: Report | None) -> tuple[Plan, Broker]:
    """Start a broker on a disk that keeps changes in memory.

    Returns what the start found, and the broker, whose store the caller must crash.
    """
    require_log(directory, disk)
    dry = DryDisk(disk)
    plan_of_start = Plan(_was_orderly(directory, disk))
    findings = plan_of_start.findings
    findings += [Finding("start", text) for text in _unusable_notes(directory, disk)]
    before = offsets_at_checkpoint(directory, disk)
    with _collected_warnings() as warnings:
        broker = await _start(directory, config, dry, report)
        await broker.store.upkeep.checkpointer.repair_all()
    warnings += gone_since_checkpoint(broker.store, before)
    reported = {finding.text for finding in findings}
    findings += [Finding("start", text) for text in warnings if text not in reported]
    findings += [Finding("change", text) for text in _changes(directory, dry)]
    return plan_of_start, broker


def _was_orderly(directory: str, disk: Disk) -> bool:
    files = Files(disk, 1, read_only=True)
    try:
        checkpoint = read_checkpoint(files, f"{directory}/checkpoint")
    finally:
        files.close()
    return stopped_in_order(checkpoint, abort="abort" in disk.names(directory))


def _unusable_notes(directory: str, disk: Disk) -> Iterator[str]:
    """Report the files of which a start silently uses an older generation, or none."""
    names = disk.names(f"{directory}/config")
    for name in sorted({name.removesuffix(".bak").removesuffix(".tmp") for name in names}):
        if name.rpartition(".")[2] in ("json", "msgpack") and not read_file(disk, f"{directory}/config/{name}"):
            yield f"config/{name} is missing or empty; using its previous generation"


def _changes(directory: str, disk: DryDisk) -> Iterator[str]:
    """Report the changes that a start made on *disk*: one sentence per folder and kind of change."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, kind in disk.changes().items():
        name = path.removeprefix(f"{directory}/")
        if not name.startswith(OWN_NOTES):
            groups.setdefault((name.partition("/")[0], kind), []).append(name)
    verbs = {"created": "creates", "changed": "changes", "removed": "removes"}
    for (_, kind), names in sorted(groups.items()):
        more = f" and {len(names) - NAMED_MAX:,} more" if len(names) > NAMED_MAX else ""
        yield f"a start {verbs[kind]} {', '.join(names[:NAMED_MAX])}{more}"


async def verify(
    directory: str, config: Config, disk: Disk, trying: Report | None = None, reading: Report | None = None
) -> Verification:
    """Report the changes that a start would make, then read the whole log and look up every record; change nothing.

    No findings mean that a start would change nothing and that every record that is not deleted can be served.

    Args:
      trying, reading: called from time to time with bytes done, total bytes, and records so far.

    Raises:
      StoreError: there is no log, or a broker has the directory open.
    """
    tried, broker = await _start_dry(directory, config, disk, trying)
    store = broker.store
    try:
        served = Served(store)
        keyed = Keyed(store.keys) if store.keys is not None else None

        def take(record: Record) -> None:
            if record.topic == NOTES_TOPIC:
                deleted = read_note(record.body).deleted
                served.forget_topic(deleted)
                if keyed is not None:
                    keyed.forget_topic(deleted)
                return
            served.take(record)
            if keyed is not None:
                keyed.take(record)

        walk = LogWalk(store.segments, bodies=True, take=take)
        walk.run(reading)
    finally:
        store.crash()
    walk.found.stopped_in_order = tried.stopped_in_order
    found = Verification(walk.found, tried.findings)
    for damage in walk.found.damage:
        text = f"position {damage.start:,} to {damage.end:,}: {damage.text}; a start skips it, its records are lost"
        found.findings.append(Finding("damage", text))
    found.findings += [Finding("queue", text) for text in served.findings()]
    if keyed is not None:
        found.findings += [Finding("keys", text) for text in keyed.findings()]
    return found


async def repair(
    directory: str, config: Config, disk: Disk, starting: Report | None = None, indexing: Report | None = None
) -> list[str]:
    """Run a start, complete the key index, and shut down cleanly; return the warnings.

    Args:
      starting: called from time to time with bytes done, total bytes, and records so far.
      indexing: the same with entries of the key index.

    Raises:
      StoreError: there is no log, a broker has the directory open, or the disk is full (a later repair continues).
    """
    require_log(directory, disk)
    with _collected_warnings() as messages:
        broker = await _start(directory, config, disk, starting)
        store = broker.store
        try:
            await store.upkeep.checkpointer.repair_all()
            if store.admission.refusal or not store.upkeep.indexer.complete(indexing) or saving.save(broker):
                raise StoreError(f"disk of data directory {directory!r} is full; free some space and repair again")
        finally:
            await store.close()
    return messages
