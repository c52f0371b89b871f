"""Group membership: heartbeats, unregistration, member lists, and the locks of ordered consumers.

RocketMQ ClientManageProcessor, ConsumerManageProcessor and AdminBrokerProcessor (locks).
"""

from collections.abc import Iterable
from typing import Final

import orjson

from martlet.access import Allowance, Gate, GroupGrant
from martlet.broker import Broker
from martlet.delivery.routing.selection import EXPRESSION_CHARS_MAX, TAG, Selection
from martlet.errors import Reason, Refused
from martlet.runtime.steps import Budget, Steps
from martlet.tables.groups import Group
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.consumers.members import CLUSTERING, Members, RegisteredClient
from martlet_remoting.consumers.subscriptions import GroupSubscription, select
from martlet_remoting.handlers.bodies import boolean, enum_name, integer, items, queues, read_body, text
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, reply, reply_in_pieces
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.fastjson import LazyList, dumps_in_steps
from martlet_remoting.wire.packets import Command, Frame, MessageQueue

__all__ = ["TABLE", "make_retry_topic"]

CONSUME_TYPES: Final = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS: Final = ("BROADCASTING", "CLUSTERING")
FROM_WHERE: Final = (
    "CONSUME_FROM_LAST_OFFSET",
    "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST",
    "CONSUME_FROM_MIN_OFFSET",
    "CONSUME_FROM_MAX_OFFSET",
    "CONSUME_FROM_FIRST_OFFSET",
    "CONSUME_FROM_TIMESTAMP",
)
HAS_UNIT_SUBSCRIPTION: Final = 0x2  # bit of a topic's sys flag
SUBSCRIPTIONS_MAX: Final = 4096
TOPIC_CHARS_MAX: Final = 255
QUEUES_LOCKED_AT_ONCE_MAX: Final = 16_384
CLIENT_ID_CHARS_MAX: Final = 1024
# Costs in steps of the default size of `martlet.runtime.steps.Budget`: to create a group with its retry topic, and to
# call the authorizers once. The characters of an expression that compile in one step.
STEPS_OF_A_GROUP: Final = 64
STEPS_OF_A_CHECK: Final = 8
CHARS_OF_A_STEP: Final = 16
LANGUAGE_CHARS_MAX: Final = 32


def heartbeat(context: RequestContext, command: Command) -> Steps[bytes]:
    """Register the client in the groups that the heartbeat names; other groups are unchanged."""
    state = context.state
    body = yield from read_body(command)
    client_id = text(body, "clientID")
    if not client_id or len(client_id) > CLIENT_ID_CHARS_MAX:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"clientID of {len(client_id)} characters is invalid in a heartbeat")
    consumers, producers = items(body, "consumerDataSet"), items(body, "producerDataSet")
    limit = state.config.groups_peer_max
    if len(consumers) > limit or len(producers) > limit:
        text_ = f"heartbeat names {len(consumers)} consumer and {len(producers)} producer groups"
        raise Refused(Reason.BUSY, f"{text_}; remoting.groups_peer_max is {limit}")
    budget = Budget()
    gate = context.gate(command)
    yield from _check_heartbeat(context, gate, client_id, consumers, budget)
    if not boolean(body, "withoutSub"):
        _count_consumers(gate.allowance, consumers)
    language = command.language[:LANGUAGE_CHARS_MAX]
    context.client_id = context.client_id or client_id
    context.peer.introduce(client_id, language)
    member = RegisteredClient(context, client_id, language, command.version, state.now(), state.broker.clock.now_ms())
    fingerprint = integer(body, "heartbeatFingerprint")
    without_subscriptions = boolean(body, "withoutSub")
    changed = fingerprint == 0
    for data in consumers:
        subscriptions = None if without_subscriptions else (yield from _subscriptions(state.broker, data, budget))
        if text(data, "groupName"):
            grant = gate.queries.group(text(data, "groupName"))
            changed = _consume(state.members, grant, member, data, fingerprint, subscriptions) or changed
        if budget.is_over(STEPS_OF_A_GROUP):
            yield
    for data in producers:
        if name := text(data, "groupName"):
            if len(name) > TOPIC_CHARS_MAX:
                text_ = f"producer group {name!r:.80} has {len(name)} characters; at most {TOPIC_CHARS_MAX}"
                raise Refused(Reason.PARAMETER, text_)
            state.members.join_producers(name, member)
    return reply(command, {"IS_SUPPORT_HEART_BEAT_V2": True, "IS_SUB_CHANGE": changed})


def _check_heartbeat(
    context: RequestContext, gate: Gate, client_id: str, consumers: list[dict[object, object]], budget: Budget
) -> Steps[None]:
    """Refuse the whole heartbeat if the client may not consume a topic in a group; producers need no permission.

    A member of a group gets a share of the queues, so it takes more than the permission to look at the group. For the
    same reason a client that was a member leaves the group at once: nobody else would read from its queues.
    """
    denied: Refused | None = None
    for data in consumers:
        if group := text(data, "groupName"):
            try:
                yield from _check_group(gate, group, data, budget)
            except Refused as refused:
                if refused.reason is not Reason.NO_PERMISSION:
                    raise
                context.state.members.expel(context, group, client_id)
                denied = denied or refused
    if denied is not None:
        raise denied


def _check_group(gate: Gate, group: str, data: dict[object, object], budget: Budget) -> Steps[None]:
    gate.check("subscribe", RETRY_PREFIX + group)
    for item in items(data, "subscriptionDataSet"):
        if topic := text(item, "topic"):
            gate.consume(group, topic)
        if budget.is_over(STEPS_OF_A_CHECK):
            yield


def _count_consumers(allowance: Allowance, consumers: list[dict[object, object]]) -> None:
    """Count the groups and the topics of a heartbeat for the client's quotas. Raises `Refused` (QUOTA)."""
    topics = sum(len(items(data, "subscriptionDataSet")) for data in consumers)
    if topics > allowance.subscriptions:
        allowance.check_subscriptions(topics - allowance.subscriptions)
    allowance.note_groups([("", name, "") for data in consumers if (name := text(data, "groupName"))])
    allowance.note_subscriptions(topics)


def _consume(
    members: Members,
    grant: GroupGrant,
    member: RegisteredClient,
    data: dict[object, object],
    fingerprint: int,
    subscriptions: list[GroupSubscription] | None,
) -> bool:
    """Register one consumer group of a heartbeat; return whether the client should send its subscriptions again.

    *subscriptions* is None in a heartbeat that does not change them.
    """
    name = text(data, "groupName")
    policy = _policy(grant)
    if policy is None:
        return False
    make_retry_topic(grant, policy, unit=boolean(data, "unitMode"))
    # `join` may refuse, so it comes before the group is created: a group without members would never be removed.
    group = members.join(name, member, subscriptions)
    held = group.fingerprint
    if fingerprint:
        group.fingerprint = fingerprint
    if subscriptions is None:
        if members.enter(group, member):
            members.notify(group)
        # After a restart the broker has no subscriptions and needs the full form.
        return held != fingerprint
    group.kind = enum_name(data, "consumeType", CONSUME_TYPES, "CONSUME_PASSIVELY")
    group.model = enum_name(data, "messageModel", MESSAGE_MODELS, CLUSTERING)
    group.from_where = enum_name(data, "consumeFromWhere", FROM_WHERE, FROM_WHERE[0])
    joined = members.enter(group, member)
    members.report_faults(group, member, subscriptions)
    if group.subscribe(subscriptions) or joined:
        members.notify(group)
    return held is not None and held != fingerprint


def _policy(grant: GroupGrant) -> Group | None:
    """Return the policy of the group; None for a group that cannot be created: it is skipped, as in RocketMQ."""
    try:
        return grant.ensure()
    except Refused:
        return None


def make_retry_topic(grant: GroupGrant, policy: Group, *, unit: bool = False) -> None:
    """Create the retry topic of a group, so that its route exists before the group first requests it."""
    if policy.retry_queue_nums > 0:
        grant.make_retry_topic(policy.retry_queue_nums, HAS_UNIT_SUBSCRIPTION if unit else 0)


def _subscriptions(broker: Broker, data: dict[object, object], budget: Budget) -> Steps[list[GroupSubscription]]:
    objects = items(data, "subscriptionDataSet")
    if len(objects) > SUBSCRIPTIONS_MAX:
        text_ = f"heartbeat names {len(objects)} topics for one group; at most {SUBSCRIPTIONS_MAX}"
        raise Refused(Reason.PARAMETER, text_)
    subscriptions: list[GroupSubscription] = []
    for item in objects:
        if text(item, "topic"):
            subscriptions.append(_subscription(broker, item))
            if budget.is_over(1 + len(subscriptions[-1].expression) // CHARS_OF_A_STEP):
                yield
    return subscriptions


def _subscription(broker: Broker, data: dict[object, object]) -> GroupSubscription:
    kind = text(data, "expressionType") or TAG
    topic, expression = text(data, "topic"), text(data, "subString", "*")
    if len(topic) > TOPIC_CHARS_MAX or len(expression) > EXPRESSION_CHARS_MAX or len(kind) > TOPIC_CHARS_MAX:
        text_ = f"subscription of {topic!r:.80} is too long; its topic has at most {TOPIC_CHARS_MAX} characters"
        raise Refused(Reason.PARAMETER, f"{text_}, its expression {EXPRESSION_CHARS_MAX}")
    made: Selection | None = None
    fault = ""
    try:
        made = select(broker, kind, expression)
    except Refused as error:
        fault = str(error)
    return GroupSubscription(
        topic,
        expression,
        kind,
        integer(data, "subVersion"),
        made,
        boolean(data, "classFilterMode"),
        fault,
    )


def unregister(context: RequestContext, command: Command) -> bytes:
    """Remove the client from the producer and consumer group in the request; C++ clients send "" for an unused one."""
    members = context.state.members
    if group := command.text("producerGroup", ""):
        members.leave_producers(context, group)
    if group := command.text("consumerGroup", ""):
        members.leave(context, group)
    return reply(command)


def consumer_list(context: RequestContext, command: Command) -> bytes:
    """Answer all live members of a group, including the requester."""
    name = command.text("consumerGroup")
    context.gate(command).queries.group(name)
    group = context.state.members.group(name)
    if group is None:
        raise Declined(ResponseCode.SYSTEM_ERROR, f"no consumer for this group, {name}")
    return reply(command, body=group.client_ids_as_json())


def check_client_config(context: RequestContext, command: Command) -> Steps[bytes]:
    """Check whether this broker supports a subscription's expression, before the consumer starts."""
    if not command.body:
        return reply(command)
    data = (yield from read_body(command)).get("subscriptionData")
    if not isinstance(data, dict):
        return reply(command)
    kind = text(data, "expressionType") or TAG
    if kind == TAG:
        return reply(command)
    try:
        select(context.state.broker, kind, text(data, "subString"))
    except Refused as error:
        if error.reason is Reason.NOT_SUPPORTED:
            raise
        raise Declined(ResponseCode.SUBSCRIPTION_PARSE_FAILED, str(error)) from error
    return reply(command)


# locks


def lock_queues(context: RequestContext, command: Command) -> Steps[Frame]:
    """Lock queues; answer the queues that the client has locked now, including earlier locks."""
    state = context.state
    body = yield from read_body(command)
    queues = yield from _named_queues(body)
    group, client_id = yield from _owner(context.gate(command), body, queues)
    locked_queues = yield from state.locks.lock(context, group, client_id, queues, state.now())
    rows = ({"brokerName": q.broker_name, "queueId": q.queue_id, "topic": q.topic} for q in locked_queues)
    return reply_in_pieces(command, (yield from dumps_in_steps({"lockOKMQSet": LazyList(map(orjson.dumps, rows))})))


def unlock_queues(context: RequestContext, command: Command) -> Steps[bytes]:
    """Unlock the named queues as far as the client holds their locks."""
    body = yield from read_body(command)
    given = yield from _named_queues(body)
    group, client_id = yield from _owner(context.gate(command), body, given)
    yield from context.state.locks.unlock(group, client_id, given)
    return reply(command)


def _named_queues(body: dict[object, object]) -> Steps[list[MessageQueue]]:
    named = items(body, "mqSet")
    if len(named) > QUEUES_LOCKED_AT_ONCE_MAX:
        text_ = f"request locks {len(named)} queues; at most {QUEUES_LOCKED_AT_ONCE_MAX}"
        raise Refused(Reason.PARAMETER, text_)
    return (yield from queues(named))


def _owner(gate: Gate, body: dict[object, object], wanted: Iterable[MessageQueue]) -> Steps[tuple[str, str]]:
    """Return the group and client of a lock request; refuse it unless it may consume all *wanted* topics."""
    group, client_id = text(body, "consumerGroup"), text(body, "clientId")
    if not group or not client_id:
        raise Refused(Reason.MALFORMED, "lock request lacks consumerGroup or clientId; send both")
    if len(group) > TOPIC_CHARS_MAX or len(client_id) > CLIENT_ID_CHARS_MAX:
        text_ = f"consumerGroup of {len(group)} or clientId of {len(client_id)} characters is too long"
        raise Refused(Reason.PARAMETER, f"{text_}; at most {TOPIC_CHARS_MAX} and {CLIENT_ID_CHARS_MAX}")
    gate.check("subscribe", RETRY_PREFIX + group)
    budget = Budget()
    for topic in dict.fromkeys(queue.topic for queue in wanted):
        gate.check("subscribe", topic)
        if budget.is_over(STEPS_OF_A_CHECK):
            yield
    return group, client_id


TABLE: Final[dict[int, Handle]] = {
    RequestCode.HEART_BEAT: heartbeat,
    RequestCode.UNREGISTER_CLIENT: unregister,
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: consumer_list,
    RequestCode.CHECK_CLIENT_CONFIG: check_client_config,
    RequestCode.LOCK_BATCH_MQ: lock_queues,
    RequestCode.UNLOCK_BATCH_MQ: unlock_queues,
}
