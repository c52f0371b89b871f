"""CONSUMER_SEND_MSG_BACK: a consumer failed on a message; the broker redelivers it later or dead-letters it.

RocketMQ AbstractSendMessageProcessor.consumerSendMsgBack. The copy is in the retry topic before the consumer
gets the answer. `retries` decides when to deliver it and ignores the delay level in the copy.
"""

from typing import Final

from martlet.access import Gate, GroupGrant
from martlet.errors import CorruptRecord, Reason, Refused
from martlet.message import Message, Record, find_property, put_property
from martlet.records.codec import decode_record
from martlet.store.format.light import places
from martlet.tables.groups import Group
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply
from martlet_remoting.handlers.groups import make_retry_topic
from martlet_remoting.shared.templates import Templates
from martlet_remoting.wire.codes import VERSION_3_4_9, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

__all__ = ["TABLE", "found_record", "send_back"]

RECONSUME_TIMES_MAX: Final = (1 << 31) - 1  # the limit of the record's field; a producer can set it
FIRST_LEVEL: Final = 3  # 10 s; RocketMQ does not use the first two levels for retries


async def send_back(context: RequestContext, command: Command) -> bytes:
    """Store a copy of the record for its group; the answer is sent once the copy is durable."""
    state, gate, position = context.state, context.gate(command), command.integer("offset")
    grant = gate.queries.group(command.text("group"))
    name = grant.name
    data = await gate.queries.record_at(position)
    record = found_record(data, position) if data is not None else None
    if record is not None:
        gate.consume(name, _readable_topic(gate, record))
    policy = grant.ensure()
    if policy is None:
        text = f"subscription group [{name}] does not exist; create it with updateSubGroup, or turn on"
        raise Refused(Reason.NO_GROUP, f"{text} broker.auto_create_groups")
    if policy.retry_queue_nums <= 0:
        return reply(command)
    if record is None:
        raise _not_found(position)
    make_retry_topic(grant, policy, unit=command.boolean("unitMode"))
    placed = gate.give_back(name, _copy(state.templates, grant, command, record, policy))
    state.rates.came_back(record.topic, name)
    context.peer.hold_until(placed.end)
    return reply(command)


def _readable_topic(gate: Gate, record: Record) -> str:
    """Return a topic that gives read access to *record*: its own or one of its light topics."""
    return next((topic for topic, _, _ in places(record) if gate.allows("subscribe", topic)), record.topic)


def found_record(data: bytes | None, position: int) -> Record:
    """Return the record in *data*, the bytes at *position* of the log. Raises `Declined` if the bytes are no record."""
    if data is not None:
        try:
            return decode_record(data, 0, position)
        except CorruptRecord:
            pass
    raise _not_found(position)


def _not_found(position: int) -> Declined:
    return Declined(ResponseCode.SYSTEM_ERROR, f"look message by offset failed, {position}; no record starts there")


def _copy(templates: Templates, grant: GroupGrant, command: Command, record: Record, policy: Group) -> Message:
    """Return the message to redeliver to the group; a compressed body stays compressed."""
    times_max = policy.retry_max_times
    if command.version >= VERSION_3_4_9:
        times_max = command.integer("maxReconsumeTimes", times_max)
    level = command.integer("delayLevel", 0)
    if record.reconsume_times >= times_max or level < 0:
        topic = grant.make_dead_letter_topic().name
        level = 0
    else:
        topic = RETRY_PREFIX + policy.name
        level = level or FIRST_LEVEL + record.reconsume_times
    return Message(
        topic,
        record.body,
        _properties(templates, record, level),
        -1,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        min(record.reconsume_times + 1, RECONSUME_TIMES_MAX),
    )


def _properties(templates: Templates, record: Record, level: int) -> bytes:
    properties = record.properties
    if not find_property(properties, b"RETRY_TOPIC"):
        properties = put_property(properties, b"RETRY_TOPIC", record.topic.encode())
    if not find_property(properties, b"ORIGIN_MESSAGE_ID").strip():
        properties = put_property(properties, b"ORIGIN_MESSAGE_ID", templates.message_id(record.position).encode())
    properties = put_property(properties, b"WAIT", b"false")
    return put_property(properties, b"DELAY", b"%d" % level)


TABLE: Final[dict[int, Handle]] = {RequestCode.CONSUMER_SEND_MSG_BACK: send_back}
