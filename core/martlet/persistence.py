"""Tables that live beside the log: read at the start, written soon after they change.

Topics and groups are written right after a change (many changes together), what
groups have consumed at an interval, as RocketMQ does: after a crash a group sees the
last seconds again. A topic that has records and no entry, because the broker died
before its table was written, is made again: the log is the truth.
"""

import logging
from collections.abc import Callable
from typing import Final

import trio

from martlet.broker import Broker
from martlet.errors import StoreError
from martlet.topics import DLQ_PREFIX, RETRY_PREFIX, TEMPLATE_TOPIC

__all__ = ["load", "run", "save"]

log = logging.getLogger("martlet.tables")

TOPICS: Final = "config/topics.json"
GROUPS: Final = "config/subscriptionGroup.json"
OFFSETS: Final = "config/consumerOffset.json"
SESSIONS: Final = "config/sessions.msgpack"

# Changes so close to each other are written together.
TOGETHER_S: Final = 0.05


def load(broker: Broker) -> None:
    """Read every table; a file that cannot be read gives way to its previous generation."""
    _load(broker, TOPICS, broker.topics.load)
    _load(broker, GROUPS, broker.groups.load)
    _load(broker, OFFSETS, broker.groups.load_offsets)
    _load(broker, SESSIONS, broker.sessions.load)
    _make_topics_of_records(broker)


def _load(broker: Broker, name: str, take: Callable[[bytes], None]) -> None:
    for data in broker.store.read_generations(name):
        try:
            take(data)
            return
        except (StoreError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s cannot be used, its previous generation is tried; %s", name, error)


def _make_topics_of_records(broker: Broker) -> None:
    for name in broker.store.topics_on_disk():
        if broker.topics.get(name) is None:
            used = 1 + max(broker.store.queues.topics[name], default=0)
            one = name.startswith((RETRY_PREFIX, DLQ_PREFIX)) or name == TEMPLATE_TOPIC
            queues = used if one else max(used, broker.topics.auto_create_queues)
            broker.topics.ensure(name, queues)
            log.warning(
                "topic %s has records but no entry in %s; it is made again with %d queues", name, TOPICS, queues
            )


def save(broker: Broker, *, offsets: bool = True) -> None:
    """Write what has changed; *offsets* says whether that of groups and sessions too."""
    topics, groups, sessions, store = broker.topics, broker.groups, broker.sessions, broker.store
    if topics.dirty:
        store.write_file(TOPICS, topics.to_json())
        topics.dirty = False
    if groups.dirty:
        store.write_file(GROUPS, groups.to_json())
        groups.dirty = False
    if offsets and groups.offsets_dirty:
        store.write_file(OFFSETS, groups.offsets_to_json())
        groups.offsets_dirty = False
    if offsets and sessions.dirty:
        store.write_file(SESSIONS, sessions.to_bytes())
        sessions.dirty = False


async def run(broker: Broker) -> None:
    """Save for ever: definitions soon after they change, offsets at their interval."""
    changed = [trio.Event()]

    def notice(_: object) -> None:
        changed[0].set()

    broker.topics.changed.append(notice)
    broker.groups.changed.append(notice)
    interval_s = broker.config.offsets_persist_ms / 1000
    due = trio.current_time() + interval_s
    while True:
        with trio.move_on_at(due):
            await changed[0].wait()
            await trio.sleep(TOGETHER_S)
        changed[0] = trio.Event()
        now = trio.current_time()
        _try_to_save(broker, offsets=now >= due)
        if now >= due:
            due = now + interval_s


def _try_to_save(broker: Broker, *, offsets: bool) -> None:
    try:
        save(broker, offsets=offsets)
    except (OSError, StoreError, TypeError, ValueError) as error:
        # Not even a table that cannot be written as JSON may end the broker.
        log.error("topics, groups and offsets cannot be written, tried again; %s", error)
