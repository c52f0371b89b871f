"""Writes the tables beside the log (`Broker.tables`) soon after they change.

Topics and groups are written right after a change (many changes together), and who
asked for one can wait for that (`Broker.when_saved`). What groups have consumed is
written at an interval, as RocketMQ does: after a crash a group sees the last seconds
again. A topic that has records and no entry, because the broker died before its table
was written, is made again: the log is the truth. A table is frozen on the event loop
and rendered in a worker thread.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from martlet.broker import Broker
from martlet.errors import StoreError
from martlet.store import Store
from martlet.store.files import is_full
from martlet.tables.saved import Table
from martlet.tables.topics import DLQ_PREFIX, RETRY_PREFIX, TEMPLATE_TOPIC, Topic, is_reserved
from martlet.turns import finish_now, finish_off_loop

__all__ = ["load", "run", "save"]

log = logging.getLogger("martlet.tables")

# Changes so close to each other are written together: at most this, and no longer than two writes took last time.
TOGETHER_S: Final = 0.05
# Who wait for their changes; while the disk stands still there must not be ever more of them.
WAITING_MAX: Final = 10_000


def load(broker: Broker) -> None:
    """Read the broker's own tables; a file that cannot be read gives way to its previous generation."""
    groups, tables = broker.groups, broker.tables
    listed = tables.load(broker.topics.table)
    tables.load(groups.table)
    tables.load(groups.offsets_table)
    tables.load(groups.light_offsets_table)
    if not 0 <= groups.offsets_position <= broker.store.readable:
        # RocketMQ wrote the offsets, or the log is another one: what our log says of offsets so far is older.
        groups.offsets_position = broker.store.readable
        groups.offsets_changed()
    _make_topics_of_records(broker, closed=broker.store.recovered.unlisted if listed else set())


def _make_topics_of_records(broker: Broker, closed: set[str]) -> None:
    """Make an entry for each topic that has records and none.

    RocketMQ deletes the queues and the entry of a topic and leaves no record of it, but lost files beside an old table
    look the same. So topics in *closed* are made without permission to read or write, and keep their messages.
    """
    for name in broker.store.topics_on_disk():
        if broker.topics.get(name) is not None:
            continue
        used = 1 + max(broker.store.queues.topics[name], default=0)
        one = name.startswith((RETRY_PREFIX, DLQ_PREFIX)) or name == TEMPLATE_TOPIC
        queues = used if one else max(used, broker.topics.auto_create_queues)
        if name in closed and not is_reserved(name):
            broker.topics.ensure(name, queues, perm=0)
            log.warning(
                "topic %s has records but neither queues nor an entry in config/topics.json, as if RocketMQ had "
                "deleted it; it is closed: open it with `martlet topic create %s --queues %d`, "
                "or remove its messages with `martlet topic delete %s`",
                *(name, name, queues, name),
            )
        else:
            broker.topics.ensure(name, queues)
            log.warning(
                "topic %s has records but no entry in config/topics.json; it is made again with %d queues", name, queues
            )


def save(broker: Broker) -> str:
    """Write what has changed, at once; for the start and the end of a broker.

    Returns why the disk was too full for some tables, which are still marked as changed; empty when all were written.

    Raises:
      OSError: a table could not be written for another reason; the others were.
    """
    failed: OSError | None = None
    problems: list[str] = []
    for table in _changed(broker, offsets=True):
        try:
            _write(broker.store, table, finish_now(table.freeze(broker.store.durable)), removed=table.removed)
            table.dirty = table.removed = False
        except OSError as error:
            problems.append(f"{table.path} cannot be written; {error}")
            if not is_full(error):
                failed = failed or error
    if failed is not None:
        raise failed
    return ", and ".join(problems)


def _changed(broker: Broker, *, offsets: bool) -> list[Table]:
    """The tables that are to be written; with *offsets* also those that are written at an interval."""
    return broker.tables.to_save(every=offsets)


async def run(broker: Broker) -> None:
    """Save for ever: definitions soon after they change, offsets at their interval."""
    changed = [trio.Event()]
    deleted = False
    waiting: list[Callable[[str], None]] = []

    def notice() -> None:
        changed[0].set()

    def notice_topic(topic: Topic | None) -> None:
        nonlocal deleted
        # Offsets of a deleted topic are wrong for one that is made again under its name: they go with it.
        deleted = deleted or topic is None

    def tell_when_saved(tell: Callable[[str], None]) -> None:
        if len(waiting) >= WAITING_MAX:
            tell(f"{WAITING_MAX} changes wait for the disk")
            return
        waiting.append(tell)
        changed[0].set()

    broker.topics.changed.append(notice_topic)
    broker.tables.notify(notice)
    broker.saver = tell_when_saved
    interval_s = broker.config.offsets_persist_ms / 1000
    due = trio.current_time() + interval_s
    pause_s = 0.0
    while True:
        with trio.move_on_at(due):
            await changed[0].wait()
            await trio.sleep(pause_s)
        changed[0] = trio.Event()
        now = trio.current_time()
        offsets, deleted = deleted or now >= due, False
        told, waiting = waiting, []
        problem = await _try_to_save(broker, offsets=offsets)
        pause_s = min(TOGETHER_S, 2 * (trio.current_time() - now))
        for tell in told:
            tell(problem)
        if now >= due:
            due = now + interval_s


def _write(store: Store, table: Table, data: list[bytes], *, removed: bool) -> None:
    """Write *data*; as both generations of the file when the previous one has an entry that was *removed*."""
    for _ in range(1 + removed):
        store.write_file(table.path, *data)


async def _try_to_save(broker: Broker, *, offsets: bool) -> str:
    """Write what has changed in a worker thread: an fsync takes milliseconds, and messages go on meanwhile.

    Returns why something could not be written, empty when all could.
    """
    store = broker.store
    problem = ""
    for table in _changed(broker, offsets=offsets):
        # What changes while the table is rendered or written marks it again, for the next time.
        table.dirty = False
        removed, table.removed = table.removed, False
        try:
            # What is durable now is in the table; what comes meanwhile may be.
            steps = table.freeze(store.durable)
            data = await store.disk.off_loop(partial(finish_off_loop, steps))
            # A topic may leave its file only once the log says that it was deleted.
            await store.wait_deleted()
            with trio.CancelScope(shield=True):
                await store.disk.off_loop(partial(_write, store, table, data, removed=removed))
        except trio.Cancelled:
            table.dirty, table.removed = True, table.removed or removed
            raise
        except (OSError, StoreError, TypeError, ValueError) as error:
            # Not even a table that cannot be written as JSON may end the broker.
            table.dirty, table.removed = True, table.removed or removed
            log.error("%s cannot be written, tried again; %s", table.path, error)
            problem = f"{table.path} cannot be written; {error}"
    return problem
