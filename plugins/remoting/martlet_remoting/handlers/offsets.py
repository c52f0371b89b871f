"""Offsets: what a group has consumed, where a queue begins and ends, what stood there at a time."""

import os
from typing import Final

from martlet.access import Grant
from martlet.delivery.redelivery import LONGEST_MS
from martlet.errors import Reason, Refused
from martlet.store import Queue
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.codes import RequestCode, ResponseCode
from martlet_remoting.context import Context, Declined, Handle, reply
from martlet_remoting.packets import Command

__all__ = ["TABLE"]

# RocketMQ calls a message "on disk" when this share of the memory was written after it (accessMessageInMemoryMaxRatio).
MEMORY_RATIO: Final = 0.40


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 1 << 33


NEAR_BYTES: Final = int(_memory_bytes() * MEMORY_RATIO)


def _queue(context: Context, command: Command) -> tuple[Grant, Queue | None]:
    """What may be read, and the queue that a request names; None for one that was never used."""
    topic = command.text("topic")
    queue_id = command.integer("queueId")
    grant = context.gate(command).query(topic)
    return grant, grant.store.find_queue(topic, queue_id)


def query_consumer_offset(context: Context, command: Command) -> bytes:
    """Answer what the group has committed; a new group begins a young queue at 0."""
    group, topic, queue_id = command.text("consumerGroup"), command.text("topic"), command.integer("queueId")
    grant = context.gate(command).query_group(group, topic)
    offset = grant.groups.pending_reset(group, topic, queue_id)
    if offset < 0:
        offset = grant.groups.offset(group, topic, queue_id)
    if offset >= 0:
        return reply(command, {"offset": offset})
    zero_allowed = command.text("setZeroIfNotFound", "").lower() != "false"
    if zero_allowed and _begins_near(grant, topic, queue_id):
        return reply(command, {"offset": 0})
    text = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
    raise Declined(ResponseCode.QUERY_NOT_FOUND, f"{text}; group [{group}] committed nothing for {topic}/{queue_id}")


def _begins_near(grant: Grant, topic: str, queue_id: int) -> bool:
    """Whether offset 0 of the queue is still there, and little was written since."""
    queue = grant.store.find_queue(topic, queue_id)
    if queue is None:
        return True
    if queue.first_offset > 0:
        return False
    if grant.store.end_offset(queue) == 0:
        return True
    position = grant.store.position_at(queue, 0)
    return position < 0 or grant.store.readable - position <= NEAR_BYTES


def update_consumer_offset(context: Context, command: Command) -> bytes:
    """Commit; the group and the topic must exist.

    A negative offset, which ali-ons sends for a queue it has consumed nothing of, is accepted and changes nothing.
    RocketMQ puts it in the place of the committed one, so that the group loses its position.
    """
    group, topic = command.text("consumerGroup"), command.text("topic")
    queue_id, offset = command.integer("queueId", -1), command.integer("commitOffset", -1)
    grant = context.gate(command).query_group(group, topic)
    if grant.groups.get(group) is None:
        text = f"subscription group [{group}] does not exist; it is made by its first heartbeat"
        raise Refused(Reason.NO_GROUP, text)
    found = grant.topics.get(topic)
    if found is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{topic}] not exist, apply first please!")
    if not 0 <= queue_id < max(found.read_queues, found.write_queues):
        text = f"queue {queue_id} of topic[{topic}] does not exist; it has {found.read_queues} queues"
        raise Refused(Reason.PARAMETER, text)
    if command.ext.get("commitOffset") in (None, ""):
        raise Refused(Reason.PARAMETER, f"Offset is null, topic is {topic}; send commitOffset")
    if offset >= 0:
        grant.groups.check_may_commit(group, topic, (queue_id,))
        grant.groups.commit(group, topic, queue_id, offset)
    return reply(command)


def get_max_offset(context: Context, command: Command) -> bytes:
    """Answer the offset behind the newest message; 0 for a queue that nobody used.

    Retries that may still wait (`retries`) are not there yet, as on a real broker, which puts them there after their
    pause: a consumer that begins at the end, as one whose group was deleted meanwhile, must not pass them over.
    """
    parts = context.parts
    grant, queue = _queue(context, command)
    if queue is None:
        return reply(command, {"offset": 0})
    end = grant.store.end_offset(queue)
    if queue.topic.startswith(RETRY_PREFIX) and not parts.delays:
        end = min(end, grant.store.offset_by_time(queue, parts.clock.now_ms() - LONGEST_MS))
    return reply(command, {"offset": end})


def get_min_offset(context: Context, command: Command) -> bytes:
    """Answer the oldest kept offset."""
    _, queue = _queue(context, command)
    return reply(command, {"offset": queue.first_offset if queue else 0})


def search_offset(context: Context, command: Command) -> bytes:
    """Answer the first offset stored at or after a time; with boundaryType UPPER the last at or before it."""
    grant, queue = _queue(context, command)
    timestamp = command.integer("timestamp")
    if queue is None:
        return reply(command, {"offset": 0})
    upper = command.text("boundaryType", "").lower() == "upper"
    return reply(command, {"offset": grant.store.offset_by_time(queue, timestamp, upper)})


def get_earliest_store_time(context: Context, command: Command) -> bytes:
    """Answer when the oldest kept message was stored; -1 when there is none."""
    grant, queue = _queue(context, command)
    return reply(command, {"timestamp": grant.store.earliest_store_ms(queue) if queue else -1})


TABLE: Final[dict[int, Handle]] = {
    RequestCode.QUERY_CONSUMER_OFFSET: query_consumer_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: update_consumer_offset,
    RequestCode.GET_MAX_OFFSET: get_max_offset,
    RequestCode.GET_MIN_OFFSET: get_min_offset,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: search_offset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: get_earliest_store_time,
}
