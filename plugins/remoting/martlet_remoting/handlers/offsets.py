"""Offsets: committed offsets of groups, first and last offsets of queues, and offsets by time."""

import os
from typing import Final

from martlet.access import ConsumeGrant, TopicGrant
from martlet.errors import Reason, Refused
from martlet.groups.strategy.redelivery import LONGEST_MS
from martlet.runtime.steps import Steps
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply, supports_delays
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

__all__ = ["TABLE", "begins_near"]

# RocketMQ assumes that a message is no longer in memory once this share of the memory was written after it
# (accessMessageInMemoryMaxRatio).
MEMORY_RATIO: Final = 0.40


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 1 << 33


NEAR_BYTES: Final = int(_memory_bytes() * MEMORY_RATIO)


def _queue(context: RequestContext, command: Command) -> tuple[TopicGrant, int]:
    """Return the permission to read the topic of a request, and the queue id in the request."""
    return context.gate(command).queries.topic(command.text("topic")), command.integer("queueId")


def query_consumer_offset(context: RequestContext, command: Command) -> bytes | Steps[bytes]:
    """Answer the group's committed offset; for a new group, 0 if little was written since offset 0."""
    group, topic, queue_id = command.text("consumerGroup"), command.text("topic"), command.integer("queueId")
    grant = context.gate(command).consume(group, topic)
    offset = grant.pending_reset(queue_id)
    if offset < 0:
        offset = grant.offset(queue_id)
    if offset >= 0:
        return reply(command, {"offset": offset})
    return _first_offset(command, grant, queue_id)


def _first_offset(command: Command, grant: ConsumeGrant, queue_id: int) -> Steps[bytes]:
    zero_allowed = command.text("setZeroIfNotFound", "").lower() != "false"
    if zero_allowed and (yield from begins_near(grant, queue_id)):
        return reply(command, {"offset": 0})
    text = "Not found, V3_0_6_SNAPSHOT maybe this group consumer boot first"
    what = f"group [{grant.group}] committed nothing for {grant.topic}/{queue_id}"
    raise Declined(ResponseCode.QUERY_NOT_FOUND, f"{text}; {what}")


def begins_near(grant: ConsumeGrant, queue_id: int) -> Steps[bool]:
    """Return whether offset 0 of the queue still exists and little was written since."""
    topic_offsets = grant.topic_offsets()
    if topic_offsets.is_cold(queue_id, 0):
        return False
    return (
        topic_offsets.first_offset(queue_id) == 0 and (yield from topic_offsets.bytes_since(queue_id, 0)) <= NEAR_BYTES
    )


def update_consumer_offset(context: RequestContext, command: Command) -> bytes:
    """Commit an offset; the topic must exist, and so must the group, unless it has pulled lately: then it is created.

    A negative offset is accepted and ignored; ali-ons sends it for a queue that it has not consumed yet. RocketMQ
    stores it, and the group loses its position.
    """
    group, topic = command.text("consumerGroup"), command.text("topic")
    queue_id, offset = command.integer("queueId", -1), command.integer("commitOffset", -1)
    grant = context.gate(command).consume(group, topic)
    if grant.get_group() is None and group not in context.state.pulled_groups:
        text = f"subscription group [{group}] does not exist; its first heartbeat creates it"
        raise Refused(Reason.NO_GROUP, text)
    found = grant.get_topic()
    if found is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{topic}] not exist, apply first please!")
    if not found.has_readable(queue_id):
        text = f"queue {queue_id} of topic[{topic}] does not exist; it has {found.read_queues} queues"
        raise Refused(Reason.PARAMETER, text)
    if command.ext.get("commitOffset") in (None, ""):
        raise Refused(Reason.PARAMETER, f"Offset is null, topic is {topic}; send commitOffset")
    if offset >= 0:
        grant.ensure_group()
        grant.commit(queue_id, offset)
    return reply(command)


def get_max_offset(context: RequestContext, command: Command) -> bytes | Steps[bytes]:
    """Answer the offset after the newest message, once that message is readable; 0 for a queue that was never used.

    Retries that may still be delayed (`retries`) do not count. RocketMQ writes them only after their delay. A
    consumer that begins at the end, for example because its group was deleted, must not skip them.
    """
    broker = context.state.broker
    grant, queue_id = _queue(context, command)
    if grant.name.startswith(RETRY_PREFIX) and not supports_delays(broker):
        return _end_of_retries(command, grant, queue_id, broker.clock.now_ms() - LONGEST_MS)
    offset, position = grant.next_offset(queue_id)
    context.peer.hold_until(position)
    return reply(command, {"offset": offset})


def _end_of_retries(command: Command, grant: TopicGrant, queue_id: int, before_ms: int) -> Steps[bytes]:
    end = grant.end_offset(queue_id)
    return reply(command, {"offset": min(end, (yield from grant.offset_by_time(queue_id, before_ms)))})


def get_min_offset(context: RequestContext, command: Command) -> bytes:
    """Answer the oldest offset left."""
    grant, queue_id = _queue(context, command)
    return reply(command, {"offset": grant.first_offset(queue_id)})


def search_offset(context: RequestContext, command: Command) -> Steps[bytes]:
    """Answer the first offset stored at a time or later; with boundaryType UPPER, the last at that time or earlier."""
    grant, queue_id = _queue(context, command)
    timestamp = command.integer("timestamp")
    upper = command.text("boundaryType", "").lower() == "upper"
    offset = yield from grant.offset_by_time(queue_id, timestamp, upper=upper)
    return reply(command, {"offset": offset})


def get_earliest_store_time(context: RequestContext, command: Command) -> Steps[bytes]:
    """Answer the store time of the oldest message left; -1 if there is none."""
    grant, queue_id = _queue(context, command)
    return reply(command, {"timestamp": (yield from grant.earliest_store_ms(queue_id))})


TABLE: Final[dict[int, Handle]] = {
    RequestCode.QUERY_CONSUMER_OFFSET: query_consumer_offset,
    RequestCode.UPDATE_CONSUMER_OFFSET: update_consumer_offset,
    RequestCode.GET_MAX_OFFSET: get_max_offset,
    RequestCode.GET_MIN_OFFSET: get_min_offset,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: search_offset,
    RequestCode.GET_EARLIEST_MSG_STORETIME: get_earliest_store_time,
}
