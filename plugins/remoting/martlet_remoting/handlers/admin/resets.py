"""Changes of a group's offsets: reset to a time or an offset, and copy from another group."""

from typing import Final

from martlet.access import GroupAdminGrant, TopicOffsets
from martlet.broker import Broker
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet.tables.groups import check_group_name
from martlet_remoting.consumers.long_poll import ParkedPulls
from martlet_remoting.consumers.members import Members
from martlet_remoting.handlers.admin.clients import VERSION_3_0_7
from martlet_remoting.handlers.admin.common import QUEUE_US, message_queue
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply, reply_in_pieces
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.fastjson import dumps_in_steps
from martlet_remoting.wire.packets import Command, Frame, MessageQueue

__all__ = ["TABLE"]

REQUEST_US: Final = 20.0
BYTES_OF_A_STEP: Final = 65_536  # of a request that is sent to each member


def reset(context: RequestContext, command: Command) -> Steps[Frame]:
    """Reset a group's offsets to a time, or one queue to an offset.

    The broker stores the new offsets and returns them when the consumers pull (RocketMQ's
    ``useServerSideResetOffset``). If that is switched off, the broker sends them to live consumers immediately.
    """
    state = context.state
    grant = context.gate(command).admin.group(command.text("group"))
    if state.switches["useServerSideResetOffset"]:
        return (yield from _reset_here(state.broker, state.parked, grant, command))
    return (yield from _reset_clients(state.broker, state.members, grant, command))


def _reset_here(broker: Broker, parked: ParkedPulls, grant: GroupAdminGrant, command: Command) -> Steps[Frame]:
    name, group = command.text("topic"), command.text("group")
    topic_offsets = grant.topic_offsets(name)
    topic = topic_offsets.get()
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"Topic {name} does not exist")
    if grant.get() is None:
        raise Refused(Reason.NO_GROUP, f"Group {group} does not exist")
    queue_id, timestamp = command.integer("queueId", -1), command.integer("timestamp", -1)
    topic.check_queue(queue_id)
    offsets: dict[int, int] = {}
    budget = Budget(QUEUE_US)
    if queue_id >= 0 and (offset := command.integer("offset", -1)) != -1:
        offsets[queue_id] = _check_offset(topic_offsets, queue_id, offset)
    else:
        for number in [queue_id] if queue_id >= 0 else range(topic.read_queues):
            offsets[number] = yield from _offset_at(topic_offsets, number, timestamp)
            if budget.is_over():
                yield
    table: dict[MessageQueue, int] = {}
    for number, to in offsets.items():
        table[message_queue(broker, name, number)] = to
        if budget.is_over():
            yield
    if topic_offsets.get() is None:
        raise Refused(Reason.NO_TOPIC, f"Topic {name} was deleted meanwhile")
    if not offsets:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"No queues to reset.; topic[{name}] has none to read")
    grant.reset(name, offsets)
    parked.wake_topic(name)
    return (yield from _answer(command, table))


def _check_offset(topic_offsets: TopicOffsets, queue_id: int, offset: int) -> int:
    first, end = topic_offsets.first_offset(queue_id), topic_offsets.end_offset(queue_id)
    if not first <= offset <= end:
        text = f"Target offset {offset} not in consume queue range [{first}-{end}]"
        raise Declined(ResponseCode.SYSTEM_ERROR, text)
    return offset


def _offset_at(topic_offsets: TopicOffsets, queue_id: int, timestamp: int) -> Steps[int]:
    """Return the first offset stored at or after *timestamp*; the end of the queue for a negative *timestamp*."""
    if timestamp < 0:
        return topic_offsets.end_offset(queue_id)
    return (yield from topic_offsets.offset_by_time(queue_id, timestamp))


def _answer(command: Command, table: dict[MessageQueue, int]) -> Steps[Frame]:
    return reply_in_pieces(command, (yield from dumps_in_steps({"offsetTable": table})))


def _reset_clients(broker: Broker, members: Members, grant: GroupAdminGrant, command: Command) -> Steps[Frame]:
    """Send the new offsets to every live member; unless forced, no offset moves forward."""
    name, group = command.text("topic"), command.text("group")
    timestamp, forced = command.integer("timestamp", -1), command.boolean("isForce")
    topic_offsets = grant.topic_offsets(name)
    topic = topic_offsets.get()
    if topic is None:
        text = f"[reset-offset] reset offset failed, no topic in this broker. topic={name}"
        raise Declined(ResponseCode.SYSTEM_ERROR, text)
    table: dict[MessageQueue, int] = {}
    budget = Budget(QUEUE_US)
    for number in range(topic.read_queues):
        committed = grant.offset(name, number)
        if committed < 0:
            if number >= topic.write_queues:
                continue
            raise Declined(ResponseCode.SYSTEM_ERROR, f"THe consumer group <{group}> not exist")
        target = yield from _offset_at(topic_offsets, number, timestamp)
        table[message_queue(broker, name, number)] = target if forced else min(target, committed)
        if budget.is_over():
            yield
    yield from _tell(members, command, group, name, table)
    return (yield from _answer(command, table))


def _tell(members: Members, command: Command, group: str, topic: str, table: dict[MessageQueue, int]) -> Steps[None]:
    live = members.group(group)
    if live is None:
        text = f"Consumer not online, so can not reset offset, Group: {group} Topic: {topic}"
        raise Declined(ResponseCode.CONSUMER_NOT_ONLINE, f"{text} Timestamp: {command.integer('timestamp', -1)}")
    ext = {name: command.ext[name] for name in ("topic", "group", "timestamp", "isForce") if name in command.ext}
    present = list(live.members.values())
    for member in present:
        if member.version < VERSION_3_0_7:
            text = f"the client does not support this feature. version={member.version}"
            raise Declined(ResponseCode.SYSTEM_ERROR, f"[reset-offset] {text}")
    bodies: dict[bool, bytes] = {}
    budget = Budget(REQUEST_US)
    for member in present:
        is_cpp = member.language == "CPP"
        if is_cpp not in bodies:
            offsets = _as_list(table) if is_cpp else table
            bodies[is_cpp] = b"".join((yield from dumps_in_steps({"offsetTable": offsets})))
        body = bodies[is_cpp]
        if member.connection in live.members:
            member.connection.tell(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, ext, body)
        if budget.is_over(1 + len(body) // BYTES_OF_A_STEP):
            yield


def _as_list(table: dict[MessageQueue, int]) -> list[dict[str, object]]:
    """Return *table* in the form that C++ clients read."""
    return [
        {"brokerName": queue.broker_name, "offset": offset, "queueId": queue.queue_id, "topic": queue.topic}
        for queue, offset in table.items()
    ]


def clone(context: RequestContext, command: Command) -> Steps[bytes]:
    """Copy the offsets of one group to another."""
    state, gate = context.state, context.gate(command)
    source, target, topic = command.text("srcGroup"), command.text("destGroup"), command.text("topic", "")
    copy = gate.admin.group(target)
    original = gate.queries.group(source)
    check_group_name(target)
    live = state.members.group(source)
    subscribed = live.subscriptions if live is not None and not command.boolean("offline") else {}
    budget = Budget()
    for name in [topic] if topic.strip() else original.topics():
        offsets = original.committed(name)
        if copy.topic_offsets(name).get() is not None and (not subscribed or name in subscribed):
            copy.commit(name, offsets)
        if budget.is_over(1 + len(offsets)):
            yield
    return reply(command)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET: reset,
    RequestCode.CLONE_GROUP_OFFSET: clone,
}
