"""PULL_MESSAGE and LITE_PULL_MESSAGE: answer with records, or hold the pull until there are some.

The order of checks, the codes and the offset corrections follow RocketMQ PullMessageProcessor and
DefaultPullMessageResultHandler. An answer contains unchanged pieces of the log.
"""

import math
from collections.abc import Mapping
from typing import Final

from martlet.access import ConsumeGrant
from martlet.broker import Broker
from martlet.delivery.routing.selection import CACHED_CHARS_MAX, EVERYTHING, TAG, Selection
from martlet.errors import Reason, Refused, StoreError, StoreFailed
from martlet.runtime.steps import Steps
from martlet.store import ReadResult, ReadStatus
from martlet.tables.topics import READ, RETRY_PREFIX, Topic
from martlet_remoting.config import RemotingConfig
from martlet_remoting.consumers.long_poll import Pull
from martlet_remoting.consumers.members import BROADCASTING, Members
from martlet_remoting.consumers.retries import hold_back
from martlet_remoting.consumers.subscriptions import select
from martlet_remoting.handlers.context import (
    Declined,
    Handle,
    RequestContext,
    in_own_slice,
    refuse,
    supports_delays,
)
from martlet_remoting.wire.codec import encode_pull_prefix
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.headers import (
    PULL_COMMIT_OFFSET,
    PULL_SUBSCRIPTION,
    PULL_SUSPEND,
    PullHeader,
    decode_pull_header,
)
from martlet_remoting.wire.packets import NO_EXT, Command

__all__ = ["TABLE", "collect", "finish", "pull_message"]

OFFSET_RESET: Final = "OFFSET_RESET"
# Result of a read -> code and remark; RocketMQ GetMessageStatus.
STATUS: Final = {
    ReadStatus.FOUND: (ResponseCode.SUCCESS, "FOUND"),
    ReadStatus.NO_MATCH: (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
    ReadStatus.REMOVED: (ResponseCode.PULL_RETRY_IMMEDIATELY, "MESSAGE_WAS_REMOVING"),
    ReadStatus.NO_QUEUE: (ResponseCode.PULL_NOT_FOUND, "NO_MATCHED_LOGIC_QUEUE"),
    ReadStatus.EMPTY: (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE"),
    ReadStatus.TOO_SMALL: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL"),
    ReadStatus.AT_END: (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE"),
    ReadStatus.BEYOND_END: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY"),
    # The next offset is after the hole, so the client can continue immediately.
    ReadStatus.HOLE: (ResponseCode.PULL_RETRY_IMMEDIATELY, "OFFSET_FOUND_NULL"),
}
# Results without messages yet: a pull at offset 0 waits, any other is redirected to 0.
NOTHING_YET: Final = frozenset((ReadStatus.NO_QUEUE, ReadStatus.EMPTY))

BYTES_UNLIMITED: Final = (1 << 31) - 1  # Java's pull consumers send this for "no limit"
ANSWER_BYTES: Final = 1024  # cost of an answer itself, in bytes of messages that take the same time
PATIENCE_S: Final = 5.0  # how long clients wait for an answer after the time that they asked it to be held for
FORBIDDEN_GROUP: Final = 2
FORBIDDEN_TOPIC: Final = 3
FORBIDDEN_BROADCAST: Final = 4
FORBIDDEN_SUBSCRIPTION: Final = 5


def pull_message(context: RequestContext, command: Command) -> Steps[None] | None:
    """Answer with records from the requested offset on, or hold the pull."""
    if command.flag & FLAG_ONEWAY:
        return None
    header = decode_pull_header(command)
    if len(header.expression) > CACHED_CHARS_MAX and header.sys_flag & PULL_SUBSCRIPTION:
        # a read can contain several requests with long expressions
        return in_own_slice(_pull, context, command, header)
    _pull(context, command, header)
    return None


def _pull(context: RequestContext, command: Command, header: PullHeader) -> None:
    state = context.state
    gate = context.gate(command)
    grant = gate.consume(header.group, header.topic)
    topic = _readable_topic(context, grant, header.queue_id)
    selection = _selection(state.broker, state.members, grant, header)
    pending = context.pulls
    queue = topic.queue(header.queue_id)
    messages = min(max(header.messages_max, 1), state.config.pull_messages_max)
    size = _bytes_max(state.config, header.bytes_max)
    pull = Pull(pending, command.opaque, header.group, queue, header.offset, messages, size, selection, gate, grant)
    pull.retries = (
        header.topic[0] == "%" and header.topic == RETRY_PREFIX + header.group and not supports_delays(state.broker)
    )
    if header.sys_flag & PULL_SUBSCRIPTION:
        pull.bring_filter(header.expression)
    pending.check_room(pull)
    if header.sys_flag & PULL_COMMIT_OFFSET and header.commit_offset >= 0:
        _commit(grant, topic, header)
    if header.sys_flag & PULL_SUSPEND:
        suspend_ms = state.broker.authentication.cut_wait_ms(
            gate.identity, min(header.suspend_ms, state.config.suspend_ms_max)
        )
        if suspend_ms > 0 and not state.parked.stopping:
            pull.must_answer = False
            pull.suspend_until = state.now() + suspend_ms / 1000
    _run(context, pull)


def _commit(grant: ConsumeGrant, topic: Topic, header: PullHeader) -> None:
    """Commit the offset of a pull; creates the group if it has consumed messages."""
    if grant.get_group() is None:
        if not 0 < header.commit_offset <= topic.queue(header.queue_id).next_offset:
            return
        grant.ensure_group()
    grant.commit(header.queue_id, header.commit_offset)


def _bytes_max(config: RemotingConfig, asked: int) -> int:
    """Return the size limit of an answer; *asked* is the size in the request; 0 or less means none."""
    if 0 < asked < BYTES_UNLIMITED:
        return min(asked, config.pull_bytes_asked_max)
    return config.pull_bytes_max


# checks


def _readable_topic(context: RequestContext, grant: ConsumeGrant, queue_id: int) -> Topic:
    """Return the topic of a pull. Creates no group: any client can pull with any name."""
    policy, group, name = grant.group_policy(), grant.group, grant.topic
    if policy is None:
        text = f"subscription group [{group}] does not exist; create it with updateSubGroup, or turn on"
        raise Refused(Reason.NO_GROUP, f"{text} broker.auto_create_groups")
    if not policy.consume_enable:
        raise _forbidden(FORBIDDEN_GROUP, f"subscription group no permission, {group}: consumeEnable is false")
    topic = grant.open_topic()
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{name}] not exist, apply first please! Send to it or create it")
    if not topic.perm & READ:
        raise _forbidden(FORBIDDEN_TOPIC, f"the topic[{name}] pulling message is forbidden; its perm lacks 4")
    if not topic.has_readable(queue_id):
        text = f"queueId[{queue_id}] is illegal, topic:[{name}]"
        text += f" topicConfig.readQueueNums:[{topic.read_queues}] consumer:[{context.peer.address}]"
        raise Refused(Reason.PARAMETER, text)
    if grant.get_group() is None:
        context.state.pulled_groups.add(group)
    return topic


def _selection(broker: Broker, members: Members, grant: ConsumeGrant, header: PullHeader) -> Selection:
    """Return the filter of a pull: its own, or the filter in its group's heartbeats."""
    if header.sys_flag & PULL_SUBSCRIPTION:
        return _own_filter(broker, header)
    live = members.group(header.group)
    if live is None:
        text = f"the consumer's group info not exist, group [{header.group}]; it must send a heartbeat first"
        raise Declined(ResponseCode.SUBSCRIPTION_NOT_EXIST, text)
    policy = grant.get_group()
    if policy is not None and not policy.consume_broadcast_enable and live.model == BROADCASTING:
        text = f"the consumer group[{header.group}] can not consume by broadcast way"
        raise _forbidden(FORBIDDEN_BROADCAST, text)
    _check_allowed(grant)
    subscription = live.subscriptions.get(header.topic)
    if subscription is None:
        text = f"the consumer's subscription not exist, group [{header.group}] topic [{header.topic}]"
        raise Declined(ResponseCode.SUBSCRIPTION_NOT_EXIST, f"{text}; its last heartbeat did not name it")
    if subscription.version < header.sub_version:
        text = f"the consumer's subscription not latest, held {subscription.version}, asked {header.sub_version}"
        raise Declined(ResponseCode.SUBSCRIPTION_NOT_LATEST, text)
    if subscription.kind == TAG:
        return subscription.selection or EVERYTHING
    if subscription.selection is None:
        # Answers code 1 if no plugin supports this kind of expression.
        return _compile(broker, header, subscription.kind, subscription.expression)
    return _for_topic(header.topic, subscription.selection)


def _check_allowed(grant: ConsumeGrant) -> None:
    if grant.is_forbidden():
        text = f"the consumer group[{grant.group}] is forbidden for topic[{grant.topic}]"
        raise _forbidden(FORBIDDEN_SUBSCRIPTION, text)


def _own_filter(broker: Broker, header: PullHeader) -> Selection:
    kind = header.expression_type or TAG
    return _compile(broker, header, kind, header.expression)


def _compile(broker: Broker, header: PullHeader, kind: str, expression: str) -> Selection:
    try:
        return _for_topic(header.topic, select(broker, kind, expression))
    except Refused as error:
        if error.reason is Reason.NOT_SUPPORTED:
            raise
        text = f"parse the consumer's subscription failed; {error}"
        raise Declined(ResponseCode.SUBSCRIPTION_PARSE_FAILED, text) from error


def _for_topic(topic: str, wanted: Selection) -> Selection:
    """Select all retries: the filter matched at their first delivery (RocketMQ filterSupportRetry, default off)."""
    if wanted.predicate is not None and topic.startswith(RETRY_PREFIX):
        return EVERYTHING
    return wanted


def _forbidden(kind: int, text: str) -> Declined:
    return Declined(ResponseCode.NO_PERMISSION, text, {"forbiddenType": kind})


# reading


def collect(context: RequestContext, budget_bytes: float) -> None:
    """Answer pulls that were woken or have expired, or whose records were read from disk."""
    pending = context.pulls
    ready = pending.ready
    for _ in range(len(ready)):
        pull = ready.popleft()
        budget_bytes -= ANSWER_BYTES
        try:
            budget_bytes -= _run(context, pull)
        except (Refused, Declined, StoreError) as error:
            _drop(context, pull, error)
        if budget_bytes <= 0:
            break
    if ready:
        context.peer.wake()
    elif pending.reader.stalled is not None:
        _refuse_far(context, pending.reader.stalled)


def finish(context: RequestContext) -> None:
    """At shutdown, after the held pulls were released: answer each pending pull with the records available now."""
    collect(context, math.inf)
    pending = context.pulls
    for pull in list(pending.reading):
        pending.reader.forget(pull)
        del pending.reading[pull]
        _answer_nothing(context, pull)


def _refuse_far(context: RequestContext, error: Refused) -> None:
    """Refuse the pulls that wait for a read from disk, because the connection may start none."""
    pending = context.pulls
    pending.reader.forget_all()
    while pending.reading:
        _drop(context, pending.reading.popitem()[0], error)


def _drop(context: RequestContext, pull: Pull, error: Refused | Declined | StoreError) -> None:
    state = context.state
    state.parked.done(pull)
    command = Command(RequestCode.PULL_MESSAGE, opaque=pull.opaque)
    ext: Mapping[str, object] = NO_EXT
    if isinstance(error, Refused):
        code = state.templates.reason_codes[error.reason]
    elif isinstance(error, Declined):
        code, ext = error.code, error.ext
    else:
        failed = isinstance(error, StoreFailed)
        code = ResponseCode.SERVICE_NOT_AVAILABLE if failed else ResponseCode.SYSTEM_ERROR
    state.counters.count_refusal(code)
    pull.pending.peer.send(refuse(command, code, str(error), ext))


def _run(context: RequestContext, pull: Pull) -> int:
    """Read for *pull*, then answer or hold it; return the size of the answer's body."""
    queue = pull.queue
    topic = pull.grant.get_topic()
    if topic is None or topic.queue(queue.queue_id) is not queue:  # the topic may have been created again
        raise Refused(Reason.NO_TOPIC, f"topic[{queue.topic}] not exist, apply first please! It was deleted")
    if pull.is_counted:  # the pull has waited; permissions may have changed since
        if pull.refused is not None:
            raise pull.refused
        context.state.broker.authentication.check_expiry(pull.gate.identity)
        pull.grant = pull.gate.consume(pull.group, queue.topic)
        _readable_topic(context, pull.grant, queue.queue_id)
        if not pull.own_filter:
            _check_allowed(pull.grant)
    reset = pull.grant.pending_reset(queue.queue_id)
    if reset >= 0:
        pull.grant.take_reset(queue.queue_id)
        return _answer_reset(context, pull, reset)
    selection, pending, allowance = pull.selection, context.pulls, pull.gate.allowance
    messages, size = pull.max_messages, pull.max_bytes
    if allowance.applies and not context.state.parked.stopping:
        allowance.check_out()
        messages, size = allowance.room(messages, size)
        if not messages:
            return _wait_for_quota(context, pull)
    result = pending.reader.read(
        context.peer.start,
        pull,
        queue,
        pull.offset,
        messages,
        size,
        selection.codes,
        selection.predicate,
    )
    if result is None:
        _wait_for_disk(context, pull)
        return 0
    return _deal(context, pull, result)


def _wait_for_quota(context: RequestContext, pull: Pull) -> int:
    """Let *pull* run again when its client may receive more: the peer does not collect before that."""
    if 0 < pull.suspend_until < context.state.now() - PATIENCE_S:
        _answer_nothing(context, pull)
    else:
        _admit(context, pull)
        pull.pending.queue_up(pull)
    return 0


def _wait_for_disk(context: RequestContext, pull: Pull) -> None:
    """Let *pull*, which is far behind the tail, wait until the reader has its records."""
    state, pending = context.state, context.pulls
    stalled = pending.reader.stalled
    if state.parked.stopping or stalled is not None:
        pending.reader.forget(pull)
        if stalled is not None:
            raise stalled
        _answer_nothing(context, pull)
    else:
        try:
            state.cold.check(pull.group, is_cold=pull.offset < pull.queue.local_from)
        except Refused:
            pending.reader.forget(pull)
            raise
        pull.far = True
        _admit(context, pull)
        pending.reading[pull] = None


def _deal(context: RequestContext, pull: Pull, result: ReadResult) -> int:
    """Answer *pull* with *result*, or hold *pull* if the result is empty and it may wait."""
    state = context.state
    if pull.retries and (wait_ms := hold_back(result, state.broker.clock.now_ms())) and not result.count:
        _hold_back(context, pull, result.next_offset, wait_ms)
        return 0
    status = result.status
    code, remark = STATUS[status]
    next_offset = result.next_offset
    last = pull.must_answer or state.parked.stopping
    if status is ReadStatus.FOUND:
        state.rates.got(pull.queue.topic, pull.group, result.count, result.size)
        if pull.gate.allowance.applies:
            pull.gate.allowance.charge_out(result.count, result.size)
        if pull.far:
            # A result begins in the cold tier or in the log, and does not go on in the other.
            state.cold.took(pull.group, result.size, is_cold=pull.offset < pull.queue.local_from)
    elif code == ResponseCode.PULL_NOT_FOUND and status in NOTHING_YET and pull.offset != 0:
        code, next_offset = ResponseCode.PULL_OFFSET_MOVED, 0
    elif code == ResponseCode.PULL_NOT_FOUND:
        next_offset = pull.offset
        if not last:
            _hold(context, pull)
            return 0
        if pull.offset != pull.asked_offset:
            code, remark = STATUS[ReadStatus.NO_MATCH]
    elif status is ReadStatus.NO_MATCH and pull.bucket >= 0 and not last and next_offset >= result.end_offset:
        # Records that do not match the pull's filter woke it.
        pull.offset = next_offset
        _hold(context, pull)
        return 0
    if status is not ReadStatus.FOUND:
        state.rates.missed += 1
    state.parked.done(pull)
    prefix = encode_pull_prefix(
        state.templates.pulled,
        pull.opaque,
        code,
        next_offset,
        result.first_offset,
        result.end_offset,
        remark,
        result.size,
    )
    context.peer.send(prefix, *result.pieces)
    return result.size


def _hold(context: RequestContext, pull: Pull) -> None:
    """Hold *pull*, unless new records arrived while a thread read for it: such records do not wake it."""
    state = context.state
    _admit(context, pull)
    if pull.grant.end_offset(pull.queue.queue_id) > pull.offset:
        pull.pending.queue_up(pull)
    else:
        state.parked.park(pull)


def _hold_back(context: RequestContext, pull: Pull, offset: int, wait_ms: int) -> None:
    """Hold *pull* until the delay of the retry at *offset* is over."""
    state = context.state
    pull.offset = offset
    if pull.must_answer or state.parked.stopping:
        _answer_nothing(context, pull)
    else:
        _admit(context, pull)
        state.parked.park(pull, state.now() + wait_ms / 1000)


def _admit(context: RequestContext, pull: Pull) -> None:
    """Let *pull* wait; if too many pulls wait, refuse some of the connections with the largest shares."""
    state = context.state
    for other in state.parked.admit(pull):
        refused = state.parked.refusal()
        state.complain_of(other.pending.peer, RequestCode.PULL_MESSAGE, refused)
        _drop(context, other, refused)
        other.pending.peer.wake()


def _answer_nothing(context: RequestContext, pull: Pull) -> None:
    """Answer without records; the client pulls again from its offset, perhaps from another broker."""
    state = context.state
    state.parked.done(pull)
    state.rates.missed += 1
    first_offset, end_offset = pull.queue.first_offset, pull.grant.end_offset(pull.queue.queue_id)
    has_moved = pull.offset != pull.asked_offset
    code, remark = STATUS[ReadStatus.NO_MATCH if has_moved else ReadStatus.AT_END]
    context.peer.send(
        encode_pull_prefix(state.templates.pulled, pull.opaque, code, pull.offset, first_offset, end_offset, remark)
    )


def _answer_reset(context: RequestContext, pull: Pull, offset: int) -> int:
    state = context.state
    state.parked.done(pull)
    first, end = pull.queue.first_offset, pull.grant.end_offset(pull.queue.queue_id)
    code = ResponseCode.PULL_OFFSET_MOVED
    context.peer.send(encode_pull_prefix(state.templates.pulled, pull.opaque, code, offset, first, end, OFFSET_RESET))
    return 0


TABLE: Final[dict[int, Handle]] = {
    RequestCode.PULL_MESSAGE: pull_message,
    RequestCode.LITE_PULL_MESSAGE: pull_message,
}
