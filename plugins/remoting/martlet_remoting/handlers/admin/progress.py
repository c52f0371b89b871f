"""Statistics of topics and the progress of groups (RocketMQ AdminBrokerProcessor, ConsumeStats)."""

from typing import Final

from martlet.access import GroupGrant, TopicGrant, TopicOffsets
from martlet.broker import Broker
from martlet.records.layout import BLANK_SIZE, ENTRY, ENTRY_BYTES
from martlet.runtime.steps import Budget, Steps
from martlet.tables.topics import Topic
from martlet_remoting.consumers.members import Members
from martlet_remoting.consumers.subscriptions import GroupSubscription
from martlet_remoting.handlers.admin.common import QUEUE_US, existing_topic, message_queue
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply, reply_in_pieces
from martlet_remoting.wire.codec import encode_response
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.fastjson import dumps, dumps_in_steps
from martlet_remoting.wire.packets import Command, Frame, MessageQueue

__all__ = ["TABLE", "consume_stats"]

QUEUE_ENTRIES_MAX: Final = 1024
# The key of statistics of the whole broker is the cluster's name.
WHOLE_BROKER: Final = {
    "BROKER_PUT_NUMS": ("BROKER", "PUT"),
    "BROKER_GET_NUMS": ("BROKER", "GET"),
    "BROKER_ACK_NUMS": ("BROKER", "ACK"),
}
LONG_MAX: Final = (1 << 63) - 1


def topic_stats(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the first and last offset and the last store time of every queue of a topic."""
    state, name = context.state, command.text("topic")
    grant = context.gate(command).queries.topic(name)
    topic = existing_topic(grant)
    table: dict[MessageQueue, object] = {}
    budget = Budget(QUEUE_US)
    for queue_id in topic.queue_ids():
        end = grant.end_offset(queue_id)
        table[message_queue(state.broker, topic.name, queue_id)] = {
            "lastUpdateTimestamp": (yield from _stored_ms(grant, queue_id, end - 1)),
            "maxOffset": end,
            "minOffset": grant.first_offset(queue_id),
        }
        if budget.is_over():
            yield
    tps = state.rates.tps("TOPIC_PUT_NUMS", topic.name)
    return reply_in_pieces(command, (yield from dumps_in_steps({"offsetTable": table, "topicPutTps": tps})))


def _stored_ms(topic_offsets: TopicOffsets, queue_id: int, offset: int) -> Steps[int]:
    """Return the time in ms at which the message at *offset* was stored; 0 if there is none."""
    return max((yield from topic_offsets.store_ms_at(queue_id, offset)), 0)


def _topics_of(members: Members, grant: GroupGrant, topic_names: list[str]) -> list[Topic]:
    """Return the existing topics of the group, without topics that its live members no longer subscribe to."""
    live = members.group(grant.name)
    subscribed = live.subscriptions if live is not None else {}
    names = topic_names or grant.topics()
    topics = (grant.topic_offsets(name).get() for name in names)
    return [topic for topic in topics if topic is not None and (not subscribed or topic.name in subscribed)]


def consume_stats(
    broker: Broker, grant: GroupGrant, topic: Topic, queues: int, budget: Budget
) -> Steps[dict[MessageQueue, dict[str, int]]]:
    """Return the group's progress in the first *queues* queues of *topic* (OffsetWrapper)."""
    topic_offsets = grant.topic_offsets(topic.name)
    table: dict[MessageQueue, dict[str, int]] = {}
    for queue_id in range(queues):
        committed = max(grant.offset(topic.name, queue_id), 0)
        table[message_queue(broker, topic.name, queue_id)] = {
            "brokerOffset": topic_offsets.end_offset(queue_id),
            "consumerOffset": committed,
            "lastTimestamp": (yield from _stored_ms(topic_offsets, queue_id, committed - 1)),
            # Only clients know their pull offset; the committed offset is a lower bound.
            "pullOffset": committed,
        }
        if budget.is_over():
            yield
    return table


def group_stats(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the progress of a group in its topics."""
    state, group = context.state, command.text("consumerGroup")
    grant = context.gate(command).queries.group(group)
    topic_names = [name for name in command.text("topicList", "").split(";") if name]
    if topic := command.text("topic", ""):
        topic_names = [topic]
    table: dict[MessageQueue, dict[str, int]] = {}
    tps, budget = 0.0, Budget(QUEUE_US)
    for group_topic in _topics_of(state.members, grant, topic_names):
        table |= yield from consume_stats(state.broker, grant, group_topic, group_topic.read_queues, budget)
        tps += state.rates.tps("GROUP_GET_NUMS", f"{group_topic.name}@{group}")
    return reply_in_pieces(command, (yield from dumps_in_steps({"consumeTps": tps, "offsetTable": table})))


def all_group_stats(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the progress of every group on this broker."""
    state, ordered = context.state, command.boolean("isOrder")
    grant = context.gate(command).queries.broker("list")
    found: list[object] = []
    total, budget = 0, Budget(QUEUE_US)
    for group in grant.groups():
        stats: list[object] = []
        of_group = grant.group(group)
        for topic in _topics_of(state.members, of_group, []):
            if ordered and not topic.order:
                continue
            table = yield from consume_stats(state.broker, of_group, topic, topic.read_queues, budget)
            total += sum(entry["brokerOffset"] - entry["consumerOffset"] for entry in table.values())
            tps = state.rates.tps("GROUP_GET_NUMS", f"{topic.name}@{group}")
            stats.append({"consumeTps": tps, "offsetTable": table})
        # As text: freeing the objects of 20,000 groups together would take 10 ms.
        found.append(b"".join((yield from dumps_in_steps({group: stats}))))
        if budget.is_over():
            yield
    address = state.registrar.address if state.registrar else ""
    body = {"brokerAddr": address, "consumeStatsList": found, "totalDiff": total, "totalInflightDiff": 0}
    return reply_in_pieces(command, (yield from dumps_in_steps(body)))


def stats_data(context: RequestContext, command: Command) -> bytes:
    """Answer one of RocketMQ's statistics over the last minute, hour and day."""
    name, key = command.text("statsName"), command.text("statsKey")
    context.gate(command).queries.broker()
    place = (name, key)
    if key == context.state.broker.config.cluster:
        place = WHOLE_BROKER.get(name, place)
    series = context.state.rates.series(*place)
    if series is None:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"The stats <{name}> <{key}> not exist")
    return reply(command, body=dumps(series.as_json()))


def time_span(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer, for each queue of a group, the times of the first, last and last consumed message, and the delay."""
    state, name, group = context.state, command.text("topic"), command.text("group")
    grant = context.gate(command).queries.topic(name)
    topic = existing_topic(grant)
    spans: list[object] = []
    budget = Budget(QUEUE_US)
    for queue_id in range(topic.read_queues):
        end = grant.end_offset(queue_id)
        first_ms = yield from grant.earliest_store_ms(queue_id)
        committed = grant.committed(group).get(queue_id, -1)
        next_ms = (yield from _stored_ms(grant, queue_id, committed)) if 0 <= committed < end else 0
        consumed_ms = (yield from _stored_ms(grant, queue_id, committed - 1)) if committed > 0 else first_ms
        spans.append(
            {
                "consumeTimeStamp": consumed_ms,
                "delayTime": max(state.broker.clock.now_ms() - next_ms, 0) if next_ms else 0,
                "maxTimeStamp": (yield from _stored_ms(grant, queue_id, end - 1)) or -1,
                "messageQueue": {"brokerName": state.broker.config.name, "queueId": queue_id, "topic": topic.name},
                "minTimeStamp": first_ms,
            }
        )
        if budget.is_over():
            yield
    return reply_in_pieces(command, (yield from dumps_in_steps({"consumeTimeSpanSet": spans})))


def consumers_of_topic(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the groups of a topic: live groups that subscribe to it, and groups with committed offsets."""
    state, topic = context.state, command.text("topic")
    grant = context.gate(command).queries.topic(topic)
    alive = [name for name, group in state.members.consumers.items() if topic in group.subscriptions]
    yield
    names = list(dict.fromkeys(alive + grant.groups()))
    return reply_in_pieces(command, (yield from dumps_in_steps({"groupList": names})))


def topics_of_group(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the topics with committed offsets of a group."""
    state, group = context.state, command.text("group")
    grant = context.gate(command).queries.group(group)
    address = state.registrar.address if state.registrar else ""
    names = grant.topics()
    return reply_in_pieces(command, (yield from dumps_in_steps({"brokerAddr": address, "topicList": names})))


def subscription_of_group(context: RequestContext, command: Command) -> bytes:
    """Answer a live group's subscription to a topic; empty if the group has no members."""
    group, topic = command.text("group"), command.text("topic")
    context.gate(command).queries.group(group)
    live = context.state.members.group(group)
    held = live.subscriptions.get(topic) if live is not None else None
    body = {"group": group, "subscriptionData": held.as_json() if held is not None else None, "topic": topic}
    return reply(command, body=dumps(body))


def all_offsets(context: RequestContext, command: Command) -> Steps[Frame]:
    """Answer the committed offsets of all groups."""
    grant = context.gate(command).queries.broker("list")
    return reply_in_pieces(command, (yield from grant.offsets_in_steps()))


def correction_offsets(context: RequestContext, command: Command) -> Steps[bytes]:
    """Answer, for each queue, the lowest offset of the other groups, if the compared group is ahead of it.

    A group that takes over from others can be reset to these offsets.
    """
    topic = command.text("topic")
    grant = context.gate(command).queries.topic(topic)
    left_out = {name for name in command.text("filterGroups", "").split(",") if name}
    slowest: dict[int, int] = {}
    budget = Budget()
    for group in grant.groups():
        committed = grant.committed(group) if group not in left_out else {}
        for queue_id, offset in committed.items():
            if offset >= grant.first_offset(queue_id):
                slowest[queue_id] = min(slowest.get(queue_id, offset), offset)
        if budget.is_over(1 + len(committed)):
            yield
    compared = grant.committed(command.text("compareGroup"))
    for queue_id, offset in compared.items():
        if slowest.get(queue_id, -1) > offset:
            slowest[queue_id] = LONG_MAX
    return reply(command, body=dumps({"correctionOffsets": slowest}))


def consume_queue(context: RequestContext, command: Command) -> Steps[bytes]:
    """Answer entries of a consume queue, and whether each matches a live group's subscription."""
    state = context.state
    topic, queue_id, index = command.text("topic"), command.integer("queueId"), command.integer("index")
    count = min(max(command.integer("count"), 0), QUEUE_ENTRIES_MAX)
    grant = context.gate(command).queries.topic(topic)
    if not grant.has_used(queue_id):
        return _no_queue(grant, command, queue_id)
    live = state.members.group(command.text("consumerGroup", ""))
    subscription = live.subscriptions.get(topic) if live is not None else None
    entries: list[dict[str, object]] = []
    first, end = grant.first_offset(queue_id), grant.end_offset(queue_id)
    offset, stop = max(index, first), min(index + count, end)
    while offset < stop and (data := (yield from grant.entries(queue_id, offset, stop - offset))):
        for position, size, code in ENTRY.iter_unpack(data):
            if size > 0 and size != BLANK_SIZE:
                is_selected = subscription is not None and _wants(subscription, code)
                entries.append({"eval": is_selected, "physicOffset": position, "physicSize": size, "tagsCode": code})
        offset += len(data) // ENTRY_BYTES
    body = {
        "maxQueueIndex": end,
        "minQueueIndex": first,
        "queueData": entries,
        "subscriptionData": subscription.as_json() if subscription is not None else None,
    }
    return reply(command, body=dumps(body))


def _no_queue(grant: TopicGrant, command: Command, queue_id: int) -> bytes:
    """Answer for a missing consume queue: empty if the topic has this queue, else an error."""
    found = grant.get()
    if found is None or not found.has_readable(queue_id):
        raise Declined(ResponseCode.SYSTEM_ERROR, f"{queue_id}-{grant.name} not exists.")
    remark = f"Index {command.integer('index')} of {queue_id}@{grant.name} is not exist!"
    return encode_response(command.opaque, ResponseCode.SUCCESS, remark=remark)


def _wants(held: GroupSubscription, code: int) -> bool:
    """Return whether a queue entry with tag code *code* may match the subscription *held*."""
    return held.selection is not None and (held.selection.codes is None or code in held.selection.codes)


TABLE: Final[dict[int, Handle]] = {
    RequestCode.GET_TOPIC_STATS_INFO: topic_stats,
    RequestCode.GET_CONSUME_STATS: group_stats,
    RequestCode.GET_BROKER_CONSUME_STATS: all_group_stats,
    RequestCode.VIEW_BROKER_STATS_DATA: stats_data,
    RequestCode.QUERY_CONSUME_TIME_SPAN: time_span,
    RequestCode.QUERY_TOPIC_CONSUME_BY_WHO: consumers_of_topic,
    RequestCode.QUERY_TOPICS_BY_CONSUMER: topics_of_group,
    RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER: subscription_of_group,
    RequestCode.GET_ALL_CONSUMER_OFFSET: all_offsets,
    RequestCode.QUERY_CORRECTION_OFFSET: correction_offsets,
    RequestCode.QUERY_CONSUME_QUEUE: consume_queue,
}
