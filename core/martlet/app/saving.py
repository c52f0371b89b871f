"""Writes the tables (`Broker.tables`) to their files soon after they change.

Topics and groups are written right after a change, many changes together, and a caller can wait for the write
(`Broker.call_when_saved`). Committed offsets are written at an interval, as in RocketMQ: after a crash, a group
receives the messages of the last seconds again. If the broker crashes before it has written a new topic, the topic is
recreated from its records: the log is authoritative. A table is frozen on the event loop and rendered in a worker
thread.

Each file has a copy, its previous generation (``.bak``), so damage to one of them changes nothing. A table that is
written right after a change gets both at once, the others get the copy an interval later.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import trio

from martlet.broker import Broker
from martlet.errors import StoreError
from martlet.runtime.steps import finish_now, finish_off_loop
from martlet.store import Store
from martlet.store.disk.files import is_full
from martlet.store.recovery.inspect import topics_deleted_since
from martlet.tables.saved import Table
from martlet.tables.topics import DLQ_PREFIX, RETRY_PREFIX, REVIVE_PREFIX, TEMPLATE_TOPIC, Topic, is_reserved

__all__ = ["load", "run", "save"]

log = logging.getLogger("martlet.tables")

# Changes within this time are written together; the wait is shorter if two writes took less last time.
TOGETHER_S: Final = 0.05
# The maximum number of requests that wait for their change to be written; bounds them while the disk hangs.
WAITING_MAX: Final = 10_000
NO_END: Final = 1 << 62


def load(broker: Broker) -> None:
    """Load the broker's own tables; if a file is invalid, load its previous generation."""
    groups, tables = broker.groups, broker.tables
    listed = tables.load(broker.topics.table)
    if not listed and len(broker.topics):
        _drop_deleted_topics(broker)
    tables.load(groups.table)
    tables.load(groups.offsets.table)
    tables.load(groups.offsets.light_table)
    is_older = groups.offsets.position > broker.store.readable  # the log, than the table
    if is_older or groups.offsets.position < 0:
        # RocketMQ wrote the offsets, or they are of another log: all offsets noted in our log so far are older.
        groups.offsets.position = broker.store.readable
        groups.offsets.has_foreign_pops = any(topic.name.startswith(REVIVE_PREFIX) for topic in broker.topics)
        groups.offsets.note_changed()
    _lower_offsets(broker, end_of_unused=0 if is_older else NO_END)
    _make_topics_of_records(broker, closed=broker.store.recovered.unlisted if listed else set())
    for topic in broker.topics.read_again():
        log.warning(
            "topic %s has %s queues, but messages in up to %d, which stay readable until they are consumed",
            *(topic.name, topic.read_queues_wanted, topic.read_queues),
        )


def _lower_offsets(broker: Broker, end_of_unused: int) -> None:
    """Lower offsets that are beyond the end of their queue: otherwise their group would skip messages sent from now
    on.

    The log of a copy can be older than its tables, and RocketMQ's offsets can be ahead of the log that a crash has
    left. *end_of_unused* is the end of a queue without messages.
    """
    find = broker.store.queues.find

    def end_of(topic: str, queue_id: int) -> int:
        queue = find(topic, queue_id)
        return queue.next_offset if queue is not None and queue.next_offset else end_of_unused

    lowered = broker.groups.offsets.lower(end_of)
    if lowered:
        log.warning("%d committed offsets were beyond the last message of their queue; lowered them to it", lowered)


def _drop_deleted_topics(broker: Broker) -> None:
    """Drop topics that were deleted after the loaded generation of the table, which is not the newest."""
    store, since = broker.store, broker.topics.loaded_position
    names = set(store.topics_on_disk())
    for name in sorted(topics_deleted_since(store.segments, since if since <= store.readable else 0)):
        if name not in names and broker.topics.drop(name):
            log.warning("topic %s stays deleted: the log records its deletion", name)


def _make_topics_of_records(broker: Broker, closed: set[str]) -> None:
    """Create an entry for each topic that has records but no entry.

    RocketMQ leaves no record of a deletion, and the record of one may be lost with a damaged part of the log. Lost
    files and an old table look the same. So topics in *closed* get no permission to read or write, and keep their
    messages.
    """
    for name in broker.store.topics_on_disk():
        if broker.topics.get(name) is not None:
            continue
        used_queues = 1 + max(broker.store.queues.topics[name], default=0)
        keeps_count = name.startswith((RETRY_PREFIX, DLQ_PREFIX)) or name == TEMPLATE_TOPIC
        queues = used_queues if keeps_count else max(used_queues, broker.topics.auto_create_queues)
        if name in closed and not is_reserved(name):
            broker.topics.ensure(name, queues, perm=0)
            log.warning(
                "topic %s has records but neither queues nor an entry in config/topics.json; it may have been "
                "deleted, so it is closed: reopen it with `martlet topic create %s --queues %d`, "
                "or remove its messages with `martlet topic delete %s`",
                *(name, name, queues, name),
            )
        else:
            broker.topics.ensure(name, queues)
            log.warning(
                "topic %s has records but no entry in config/topics.json; creating it again, queues: %d", name, queues
            )


def save(broker: Broker) -> str:
    """Write all changed tables at once; for the start and the end of a broker.

    Returns why the disk was too full for some tables, which are still marked as changed; empty when all were written.

    Raises:
      OSError: a table could not be written for another reason; the others were.
    """
    failed: OSError | None = None
    problems: list[str] = []
    for table in _tables_to_write(broker, offsets=True):
        try:
            _write(broker.store, table, finish_now(table.freeze(broker.store.durable)), copies=2)
            table.dirty = table.removed = table.behind = False
        except OSError as error:
            problems.append(f"{table.path} cannot be written; {error}")
            if not is_full(error):
                failed = failed or error
    if failed is not None:
        raise failed
    return ", and ".join(problems)


def _tables_to_write(broker: Broker, *, offsets: bool) -> list[Table]:
    """Return the tables to write; with *offsets*, including those that are written at an interval."""
    return broker.tables.to_save(every=offsets)


async def run(broker: Broker) -> None:
    """Write tables until cancelled: urgent ones soon after they change, the others at their interval."""
    change = [trio.Event()]
    was_topic_deleted = False
    waiting_callbacks: list[Callable[[str], None]] = []

    def notice() -> None:
        change[0].set()

    def notice_topic(topic: Topic | None) -> None:
        nonlocal was_topic_deleted
        # The offsets of a deleted topic would be wrong for a new topic of the same name, so they are deleted with it.
        was_topic_deleted = was_topic_deleted or topic is None

    def tell_when_saved(tell: Callable[[str], None]) -> None:
        if len(waiting_callbacks) >= WAITING_MAX:
            tell(f"{WAITING_MAX} changes already wait for the disk")
            return
        waiting_callbacks.append(tell)
        change[0].set()

    broker.topics.changed.append(notice_topic)
    broker.tables.notify(notice)
    broker.saver = tell_when_saved
    interval_s = broker.config.offsets_persist_ms / 1000
    next_interval = trio.current_time() + interval_s
    pause_s = 0.0
    while True:
        with trio.move_on_at(next_interval):
            await change[0].wait()
            await trio.sleep(pause_s)
        change[0] = trio.Event()
        now = trio.current_time()
        offsets, was_topic_deleted = was_topic_deleted or now >= next_interval, False
        callbacks, waiting_callbacks = waiting_callbacks, []
        problem = await _try_to_save(broker, offsets=offsets)
        pause_s = min(TOGETHER_S, 2 * (trio.current_time() - now))
        for tell in callbacks:
            tell(problem)
        if now >= next_interval:
            next_interval = now + interval_s


def _write(store: Store, table: Table, data: list[bytes], *, copies: int) -> None:
    """Write *data*; with two *copies* also as the previous generation of the file."""
    for _ in range(copies):
        store.data_directory.write_file(table.path, *data, mode=table.mode)
    table.writes += 1


async def _try_to_save(broker: Broker, *, offsets: bool) -> str:
    """Write the changed tables in a worker thread, because an fsync takes milliseconds.

    Return why a table could not be written; empty if all were.
    """
    store = broker.store
    problems: list[str] = []
    for table in _tables_to_write(broker, offsets=offsets):
        # A change while the table is being rendered or written marks it again for the next time.
        was_dirty, table.dirty = table.dirty, False
        was_removed, table.removed = table.removed, False
        try:
            # The rendered table contains everything that is durable now, and perhaps newer changes.
            steps = table.freeze(store.durable)
            data = await store.disk.off_loop(partial(finish_off_loop, steps))
            # Remove a topic from the file only after its deletion is in the log.
            await store.deletions.wait_durable()
            with trio.CancelScope(shield=True):
                copies = 2 if was_removed or table.urgent else 1
                await store.disk.off_loop(partial(_write, store, table, data, copies=copies))
                # At the next interval the second copy follows, unless there is another change.
                table.behind = was_dirty and copies == 1
        except trio.Cancelled:
            table.dirty, table.removed = True, table.removed or was_removed
            raise
        except (OSError, StoreError, TypeError, ValueError) as error:
            # The broker must survive even a table that cannot be rendered as JSON.
            table.dirty, table.removed = True, table.removed or was_removed
            log.error("%s cannot be written, retrying; %s", table.path, error)
            problems.append(f"{table.path} cannot be written; {error}")
    return ", and ".join(problems)
