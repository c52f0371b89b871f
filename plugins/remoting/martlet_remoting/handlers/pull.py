"""PULL_MESSAGE and LITE_PULL_MESSAGE: read, or hold until there is something to read.

Order of the checks, codes and offset corrections: RocketMQ PullMessageProcessor and
DefaultPullMessageResultHandler. The records of an answer are pieces of the log, sent as they are.
"""

import math
from collections.abc import Mapping
from typing import Final

from martlet.access import ConsumeGrant
from martlet.delivery.selection import CACHED_CHARS_MAX, EVERYTHING, TAG, Selection
from martlet.errors import Reason, Refused, StoreError, StoreFailed
from martlet.store import ReadResult, ReadStatus
from martlet.tables.topics import READ, RETRY_PREFIX, Topic
from martlet.turns import Steps
from martlet_remoting.codec import encode_pull_prefix
from martlet_remoting.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.context import REASON_CODES, Context, Declined, Handle, Parts, refuse
from martlet_remoting.headers import PULL_COMMIT_OFFSET, PULL_SUBSCRIPTION, PULL_SUSPEND, PullHeader, decode_pull_header
from martlet_remoting.long_poll import Pull
from martlet_remoting.members import BROADCASTING
from martlet_remoting.packets import NO_EXT, Command
from martlet_remoting.retries import hold_back
from martlet_remoting.subscriptions import select

__all__ = ["TABLE", "collect", "finish", "pull_message"]

OFFSET_RESET: Final = "OFFSET_RESET"
# What stopped the store -> code and remark; RocketMQ GetMessageStatus.
STATUS: Final = {
    ReadStatus.FOUND: (ResponseCode.SUCCESS, "FOUND"),
    ReadStatus.NO_MATCH: (ResponseCode.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE"),
    ReadStatus.REMOVED: (ResponseCode.PULL_RETRY_IMMEDIATELY, "MESSAGE_WAS_REMOVING"),
    ReadStatus.NO_QUEUE: (ResponseCode.PULL_NOT_FOUND, "NO_MATCHED_LOGIC_QUEUE"),
    ReadStatus.EMPTY: (ResponseCode.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE"),
    ReadStatus.TOO_SMALL: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_TOO_SMALL"),
    ReadStatus.AT_END: (ResponseCode.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE"),
    ReadStatus.BEYOND_END: (ResponseCode.PULL_OFFSET_MOVED, "OFFSET_OVERFLOW_BADLY"),
    # The next offset is beyond the hole, so the client may go on at once.
    ReadStatus.HOLE: (ResponseCode.PULL_RETRY_IMMEDIATELY, "OFFSET_FOUND_NULL"),
}
# Nothing there yet: for these a pull at offset 0 waits, and any other is sent to 0.
NOTHING_YET: Final = frozenset((ReadStatus.NO_QUEUE, ReadStatus.EMPTY))

BYTES_UNLIMITED: Final = (1 << 31) - 1  # what Java's pull consumers send, which have no opinion
ANSWER_BYTES: Final = 1024  # what an answer counts beside its messages: it takes as long as so many bytes of these
FORBIDDEN_GROUP: Final = 2
FORBIDDEN_TOPIC: Final = 3
FORBIDDEN_BROADCAST: Final = 4
FORBIDDEN_SUBSCRIPTION: Final = 5


def pull_message(context: Context, command: Command) -> Steps[None] | None:
    """Answer with records from the asked offset on, or hold the pull."""
    if command.flag & FLAG_ONEWAY:
        return None
    header = decode_pull_header(command)
    if len(header.expression) > CACHED_CHARS_MAX and header.sys_flag & PULL_SUBSCRIPTION:
        return _pull_in_turn(context, command, header)
    _pull(context, command, header)
    return None


def _pull_in_turn(context: Context, command: Command, header: PullHeader) -> Steps[None]:
    """As `_pull`, in a slice: a long expression takes milliseconds to compile, and one read may hold several."""
    yield
    _pull(context, command, header)


def _pull(context: Context, command: Command, header: PullHeader) -> None:
    parts = context.parts
    gate = context.gate(command)
    grant = gate.consume(header.group, header.topic)
    topic = _readable_topic(context, grant, header.queue_id)
    wanted = _wanted(parts, grant, header)
    pending = context.pulls
    queue = topic.queue(header.queue_id)
    messages = min(max(header.messages_max, 1), parts.config.pull_messages_max)
    size = _bytes_max(parts, header.bytes_max)
    pull = Pull(pending, command.opaque, header.group, queue, header.offset, messages, size, wanted, gate, grant)
    pull.retries = header.topic[0] == "%" and header.topic == RETRY_PREFIX + header.group and not parts.delays
    if header.sys_flag & PULL_SUBSCRIPTION:
        pull.bring_filter(header.expression)
    pending.check_room(pull)
    if header.sys_flag & PULL_COMMIT_OFFSET and header.commit_offset >= 0:
        grant.commit(header.queue_id, header.commit_offset)
    if header.sys_flag & PULL_SUSPEND:
        suspend_ms = min(header.suspend_ms, parts.config.suspend_ms_max)
        if suspend_ms > 0 and not parts.parked.stopping:
            pull.last = False
            pull.suspend_until = parts.now() + suspend_ms / 1000
    _run(context, pull)


def _bytes_max(parts: Parts, asked: int) -> int:
    """How large the answer of a pull may become that asks for *asked* bytes; 0 or less where it does not say."""
    if 0 < asked < BYTES_UNLIMITED:
        return min(asked, parts.config.pull_bytes_asked_max)
    return parts.config.pull_bytes_max


# checks


def _readable_topic(context: Context, grant: ConsumeGrant, queue_id: int) -> Topic:
    """The topic of a pull; the group is created if the configuration allows that."""
    policy, group, name = grant.ensure_group(), grant.group, grant.topic
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
    if not 0 <= queue_id < topic.read_queues:
        text = f"queueId[{queue_id}] is illegal, topic:[{name}]"
        text += f" topicConfig.readQueueNums:[{topic.read_queues}] consumer:[{context.peer.address}]"
        raise Refused(Reason.PARAMETER, text)
    return topic


def _wanted(parts: Parts, grant: ConsumeGrant, header: PullHeader) -> Selection:
    """The filter of a pull: its own, or what its group said in heartbeats."""
    if header.sys_flag & PULL_SUBSCRIPTION:
        return _own_filter(parts, header)
    live = parts.members.group(header.group)
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
        # Says code 1 when no plugin knows this kind of expression.
        return _compiled(parts, header, subscription.kind, subscription.expression)
    return _for_topic(header.topic, subscription.selection)


def _check_allowed(grant: ConsumeGrant) -> None:
    if grant.is_forbidden():
        text = f"the consumer group[{grant.group}] is forbidden for topic[{grant.topic}]"
        raise _forbidden(FORBIDDEN_SUBSCRIPTION, text)


def _own_filter(parts: Parts, header: PullHeader) -> Selection:
    kind = header.expression_type or TAG
    return _compiled(parts, header, kind, header.expression)


def _compiled(parts: Parts, header: PullHeader, kind: str, expression: str) -> Selection:
    try:
        return _for_topic(header.topic, select(parts.broker, kind, expression))
    except Refused as error:
        if error.reason is Reason.NOT_SUPPORTED:
            raise
        text = f"parse the consumer's subscription failed; {error}"
        raise Declined(ResponseCode.SUBSCRIPTION_PARSE_FAILED, text) from error


def _for_topic(topic: str, wanted: Selection) -> Selection:
    """Retries passed the expression when they were first delivered (RocketMQ filterSupportRetry, off by default)."""
    if wanted.predicate is not None and topic.startswith(RETRY_PREFIX):
        return EVERYTHING
    return wanted


def _forbidden(kind: int, text: str) -> Declined:
    return Declined(ResponseCode.NO_PERMISSION, text, {"forbiddenType": kind})


# reading


def collect(context: Context, budget_bytes: float) -> None:
    """Answer what is due: pulls that were woken, whose time is over, or whose records were read from the disk."""
    pending = context.pulls
    ready = pending.ready
    for _ in range(len(ready)):
        pull = ready.popleft()
        budget_bytes -= ANSWER_BYTES
        try:
            budget_bytes -= _run(context, pull)
        except (Refused, Declined, StoreError) as error:
            _drop(context.parts, pull, error)
        if budget_bytes <= 0:
            break
    if ready:
        context.peer.wake()
    elif pending.reader.stalled is not None:
        _refuse_far(context, pending.reader.stalled)


def finish(context: Context) -> None:
    """We stop: answer every pull of this connection that is not held any more, with what is at hand."""
    collect(context, math.inf)
    pending = context.pulls
    for pull in list(pending.reading):
        pending.reader.forget(pull)
        del pending.reading[pull]
        _answer_nothing(context, pull)


def _refuse_far(context: Context, error: Refused) -> None:
    """The connection may start no read: refuse the pulls that wait for one."""
    pending = context.pulls
    pending.reader.forget_all()
    while pending.reading:
        _drop(context.parts, pending.reading.popitem()[0], error)


def _drop(parts: Parts, pull: Pull, error: Refused | Declined | StoreError) -> None:
    parts.parked.done(pull)
    command = Command(RequestCode.PULL_MESSAGE, opaque=pull.opaque)
    ext: Mapping[str, object] = NO_EXT
    if isinstance(error, Refused):
        code = REASON_CODES[error.reason]
    elif isinstance(error, Declined):
        code, ext = error.code, error.ext
    else:
        failed = isinstance(error, StoreFailed)
        code = ResponseCode.SERVICE_NOT_AVAILABLE if failed else ResponseCode.SYSTEM_ERROR
    parts.count_refusal(code)
    pull.pending.peer.send(refuse(command, code, str(error), ext))


def _run(context: Context, pull: Pull) -> int:
    """Read for *pull*, and answer or hold it; return the bytes of the answer's body."""
    queue = pull.queue
    topic = pull.grant.get_topic()
    if topic is None or topic.queue(queue.queue_id) is not queue:  # one of the same name may be there since
        raise Refused(Reason.NO_TOPIC, f"topic[{queue.topic}] not exist, apply first please! It was deleted")
    if pull.bucket >= 0:  # it was held, and what was allowed then may not be any more
        pull.grant = pull.gate.consume(pull.group, queue.topic)
        _readable_topic(context, pull.grant, queue.queue_id)
        if not pull.own_filter:
            _check_allowed(pull.grant)
    reset = pull.grant.pending_reset(queue.queue_id)
    if reset >= 0:
        pull.grant.take_reset(queue.queue_id)
        return _answer_reset(context, pull, reset)
    wanted, pending = pull.selection, context.pulls
    result = pending.reader.read(
        context.peer.start,
        pull,
        queue,
        pull.offset,
        pull.max_messages,
        pull.max_bytes,
        wanted.codes,
        wanted.predicate,
    )
    if result is None:
        _wait_for_disk(context, pull)
        return 0
    return _deal(context, pull, result)


def _wait_for_disk(context: Context, pull: Pull) -> None:
    """*pull* is far behind the tail; the reader calls when it has the records."""
    parts, pending = context.parts, context.pulls
    stalled = pending.reader.stalled
    if parts.parked.stopping or stalled is not None:
        pending.reader.forget(pull)
        if stalled is not None:
            raise stalled
        _answer_nothing(context, pull)
    else:
        _admit(parts, pull)
        pending.reading[pull] = None


def _deal(context: Context, pull: Pull, result: ReadResult) -> int:
    """Answer *pull* with *result*, or hold it when that says nothing and it may wait."""
    parts = context.parts
    if pull.retries and (wait_ms := hold_back(result, parts.clock.now_ms())) and not result.count:
        _hold_back(context, pull, result.next_offset, wait_ms)
        return 0
    status = result.status
    code, remark = STATUS[status]
    next_offset = result.next_offset
    last = pull.last or parts.parked.stopping
    if status is ReadStatus.FOUND:
        parts.rates.got(pull.queue.topic, pull.group, result.count, result.size)
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
        # It was woken by records that it does not want.
        pull.offset = next_offset
        _hold(context, pull)
        return 0
    if status is not ReadStatus.FOUND:
        parts.rates.missed += 1
    parts.parked.done(pull)
    prefix = encode_pull_prefix(
        parts.pull_template,
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


def _hold(context: Context, pull: Pull) -> None:
    """Hold *pull*, unless more came since a thread read for it: nobody would wake it for that."""
    parts = context.parts
    _admit(parts, pull)
    if pull.grant.end_offset(pull.queue.queue_id) > pull.offset:
        pull.pending.queue_up(pull)
    else:
        parts.parked.park(pull)


def _hold_back(context: Context, pull: Pull, offset: int, wait_ms: int) -> None:
    """Hold *pull* while the retry at *offset* has to wait."""
    parts = context.parts
    pull.offset = offset
    if pull.last or parts.parked.stopping:
        _answer_nothing(context, pull)
    else:
        _admit(parts, pull)
        parts.parked.park(pull, parts.now() + wait_ms / 1000)


def _admit(parts: Parts, pull: Pull) -> None:
    """Let *pull* wait; where too many do, pulls of the connections with the largest shares are refused for it."""
    for other in parts.parked.admit(pull):
        _drop(parts, other, parts.parked.refusal())
        other.pending.peer.wake()


def _answer_nothing(context: Context, pull: Pull) -> None:
    """The client asks again from where it is; that may be another broker by then."""
    parts = context.parts
    parts.parked.done(pull)
    parts.rates.missed += 1
    first, end = pull.queue.first_offset, pull.grant.end_offset(pull.queue.queue_id)
    moved = pull.offset != pull.asked_offset
    code, remark = STATUS[ReadStatus.NO_MATCH if moved else ReadStatus.AT_END]
    context.peer.send(encode_pull_prefix(parts.pull_template, pull.opaque, code, pull.offset, first, end, remark))


def _answer_reset(context: Context, pull: Pull, offset: int) -> int:
    parts = context.parts
    parts.parked.done(pull)
    first, end = pull.queue.first_offset, pull.grant.end_offset(pull.queue.queue_id)
    code = ResponseCode.PULL_OFFSET_MOVED
    context.peer.send(encode_pull_prefix(parts.pull_template, pull.opaque, code, offset, first, end, OFFSET_RESET))
    return 0


TABLE: Final[dict[int, Handle]] = {
    RequestCode.PULL_MESSAGE: pull_message,
    RequestCode.LITE_PULL_MESSAGE: pull_message,
}
