"""POP_MESSAGE and NOTIFICATION, PEEK_MESSAGE and POLLING_INFO: lease messages for a time, or wait for some.

The order of checks and the codes follow RocketMQ PopMessageProcessor, NotificationProcessor, PeekMessageProcessor and
PollingInfoProcessor. `acks` settles the leased messages.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from martlet.access import ConsumeGrant, Gate
from martlet.broker import Broker
from martlet.contracts import Buffer
from martlet.delivery.routing.selection import CACHED_CHARS_MAX, EVERYTHING, TAG, Selection
from martlet.delivery.subscriptions import Delivery, Start, from_earliest
from martlet.errors import Reason, Refused, StoreError, StoreFailed
from martlet.groups.group import SharedGroup
from martlet.message import PROPERTIES_BYTES_MAX, Message, put_property
from martlet.records.codec import decode_records, encode_record
from martlet.records.layout import RecordView, with_reconsume_times
from martlet.runtime.steps import Steps
from martlet.store import Queue
from martlet.tables.topics import READ, RETRY_PREFIX, Topic
from martlet_remoting.consumers.pops import ANY_QUEUE, STALL_S, Pop, PopGroup, split_records
from martlet_remoting.consumers.subscriptions import select
from martlet_remoting.handlers.context import NOTHING_POPPED, Declined, Handle, RequestContext, refuse, reply
from martlet_remoting.handlers.offsets import begins_near
from martlet_remoting.wire.codec import encode_pop_prefix, encode_response
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.headers import NotificationHeader, PopHeader, decode_header
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import IN_ORDER_QUEUE, Popped, places, retry_flag
from martlet_remoting.wire.pop_handles import Handle as MessageHandle

__all__ = ["TABLE", "check_invisible", "collect", "finish"]

COUNT_MAX: Final = 32
PATIENCE_S: Final = 5.0  # how long clients wait for an answer after the end of their poll time
LATE_MS: Final = 500  # age beyond a request's poll time at which no client waits any more
ATTEMPT_CHARS_MAX: Final = 128  # proxies send UUIDs; each queue of a group keeps the last one
INVISIBLE_MS_MAX: Final = 10 * 365 * 86_400_000
NEWEST: Final = 1  # initMode; RocketMQ ConsumeInitMode.MAX
# The time for which a pop that does not want to wait may wait for a thread to read its messages.
READ_S: Final = 10.0
ANSWER_BYTES: Final = 1024  # cost of an answer itself, in bytes of messages that take the same time
HANDLE_KEY: Final = b"POP_CK"  # MessageConst.PROPERTY_POP_CK
NO_MESSAGE: Final = "NO_MESSAGE_IN_QUEUE"


def pop_message(context: RequestContext, command: Command) -> Steps[None] | None:
    """Answer with messages, which are invisible to others for a time, or hold the pop until there are some."""
    if command.flag & FLAG_ONEWAY:
        return None
    header = decode_header(command, PopHeader)
    if len(header.expression) > CACHED_CHARS_MAX:
        return _pop_later(context, command, header)
    return _pop(context, command, header)


def _pop_later(context: RequestContext, command: Command, header: PopHeader) -> Steps[None]:
    """Compile a long expression in a slice of its own."""
    yield
    rest = _pop(context, command, header)
    if rest is not None:
        yield from rest


def _pop(context: RequestContext, command: Command, header: PopHeader) -> Steps[None] | None:
    _check_age(context, header)
    if not 0 < header.count_max <= COUNT_MAX:
        text = f"pop message's num {header.count_max} is not between 1 and {COUNT_MAX}; ask for fewer, more often"
        raise Declined(ResponseCode.INVALID_PARAMETER, text, NOTHING_POPPED)
    check_invisible(header.invisible_ms)
    gate = context.gate(command)
    grant = gate.consume(header.group, header.topic)
    topic = _readable_topic(context, grant, header.queue_id)
    pop = _make(context, gate, command, header)
    pop.count_max = header.count_max
    pop.invisible_ms = header.invisible_ms
    pop.selection = _selection(context.state.broker, header)
    is_new = header.init_mode == NEWEST and context.state.pops.find(header.group, header.topic) is None
    if is_new:
        return _run_from_newest(context, pop, grant, topic)
    _run(context, pop, from_earliest)
    return None


def _run_from_newest(context: RequestContext, pop: Pop, grant: ConsumeGrant, topic: Topic) -> Steps[None]:
    _run(context, pop, (yield from _from_newest(grant, topic)))


def notification(context: RequestContext, command: Command) -> None:
    """Answer whether there are messages to pop, or hold the request until there are some."""
    if command.flag & FLAG_ONEWAY:
        return
    header = decode_header(command, NotificationHeader)
    _check_age(context, header)
    gate = context.gate(command)
    grant = gate.consume(header.group, header.topic)
    topic = _readable_topic(context, grant, header.queue_id)
    pop = _make(context, gate, command, header)
    # The first pop of a new group decides its start, which matters only if there are messages.
    if context.state.pops.find(pop.name, pop.topic) is None and _is_new(grant, topic):
        _answer_notification(context, pop, found=True)
    else:
        _run(context, pop, from_earliest)


def _is_new(grant: ConsumeGrant, topic: Topic) -> bool:
    """Return whether the topic has messages and the group has consumed none."""
    queues = range(topic.read_queues)
    if any(grant.offset(queue_id) >= 0 for queue_id in queues):
        return False
    return any(topic.queue(queue_id).first_offset < grant.end_offset(queue_id) for queue_id in queues)


def _make(context: RequestContext, gate: Gate, command: Command, header: NotificationHeader) -> Pop:
    state = context.state
    pop = Pop(
        context.pops,
        gate,
        command.opaque,
        header.group,
        header.topic,
        max(header.queue_id, ANY_QUEUE),
        in_order=header.in_order,
    )
    pop.attempt = header.attempt[:ATTEMPT_CHARS_MAX]
    now_ms = state.broker.clock.now_ms()
    # By the client's clock, which may be ahead of the broker's.
    left_ms = min((header.born_ms or now_ms) + header.poll_ms - now_ms, header.poll_ms, state.config.suspend_ms_max)
    pop.until = state.now() + state.broker.authentication.cut_wait_ms(gate.identity, left_ms) / 1000
    return pop


# checks


def _check_age(context: RequestContext, header: NotificationHeader) -> None:
    now_ms = context.state.broker.clock.now_ms()
    late_ms = now_ms - (header.born_ms or now_ms) - header.poll_ms
    if late_ms > LATE_MS:
        text = f"pop message is timeout too much: its poll time ended {late_ms} ms ago by this broker's clock"
        raise Declined(ResponseCode.POLLING_TIMEOUT, text, NOTHING_POPPED)


def check_invisible(invisible_ms: int) -> None:
    """Raise `Declined` unless a message may be invisible for that long."""
    if not 0 <= invisible_ms <= INVISIBLE_MS_MAX:
        text = f"invisibleTime {invisible_ms} is not between 0 and {INVISIBLE_MS_MAX}; it is in ms"
        raise Declined(ResponseCode.INVALID_PARAMETER, text, NOTHING_POPPED)


def _readable_topic(context: RequestContext, grant: ConsumeGrant, queue_id: int) -> Topic:
    """Return the topic of a pop; the group is created when it leases messages or waits."""
    name, group = grant.topic, grant.group
    topic = grant.open_topic()
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{name}] not exist, apply first please! Send to it or create it")
    if not topic.perm & READ:
        raise Refused(Reason.NO_PERMISSION, f"the topic[{name}] peeking message is forbidden; its perm lacks 4")
    if queue_id >= topic.read_queues:
        text = f"queueId[{queue_id}] is illegal, topic:[{name}]"
        text += f" topicConfig.readQueueNums:[{topic.read_queues}] consumer:[{context.peer.address}]"
        raise Refused(Reason.PARAMETER, text)
    policy = grant.group_policy()
    if policy is None:
        text = f"subscription group [{group}] does not exist; create it with updateSubGroup, or turn on"
        raise Refused(Reason.NO_GROUP, f"{text} broker.auto_create_groups")
    if not policy.consume_enable:
        raise Refused(Reason.NO_PERMISSION, f"subscription group no permission, {group}: consumeEnable is false")
    return topic


def _selection(broker: Broker, header: PopHeader) -> Selection:
    try:
        selection = select(broker, header.expression_type or TAG, header.expression)
    except Refused as error:
        if error.reason is Reason.NOT_SUPPORTED:
            raise
        text = f"parse the consumer's subscription failed; {error}"
        raise Declined(ResponseCode.SUBSCRIPTION_PARSE_FAILED, text, NOTHING_POPPED) from error
    # Retries matched when they were first delivered.
    is_retry = selection.predicate is not None and header.topic.startswith(RETRY_PREFIX)
    return EVERYTHING if is_retry else selection


def _from_newest(grant: ConsumeGrant, topic: Topic) -> Steps[Start]:
    """Return the start of a new group that wants only new messages: the last message, or 0 on a young queue."""
    offsets: dict[int, int] = {}
    for queue_id in range(topic.read_queues):
        is_near = yield from begins_near(grant, queue_id)
        offsets[queue_id] = 0 if is_near else max(grant.end_offset(queue_id) - 1, 0)
    return lambda queue: max(offsets.get(queue.queue_id, 0), queue.first_offset)


# running


def collect(context: RequestContext, budget_bytes: float) -> None:
    """Run pops that were called or have expired."""
    pending = context.pops
    ready = pending.ready
    for _ in range(len(ready)):
        pop = ready.popleft()
        pop.is_queued = False
        budget_bytes -= ANSWER_BYTES
        try:
            budget_bytes -= _run_again(context, pop)
        except (Refused, Declined, StoreError) as error:
            _drop(context, pop, error)
        if budget_bytes <= 0:
            break
    if ready:
        context.peer.wake()


def finish(context: RequestContext) -> None:
    """Answer every pop of this connection, with the messages available now: at shutdown."""
    collect(context, math.inf)


def _run_again(context: RequestContext, pop: Pop) -> int:
    """Run a pop that was held; permissions may have changed since."""
    if pop.refused is not None:
        raise pop.refused
    context.state.broker.authentication.check_expiry(pop.gate.identity)
    _readable_topic(context, pop.gate.consume(pop.name, pop.topic), pop.queue_id)
    return _run(context, pop, from_earliest)


def _drop(context: RequestContext, pop: Pop, error: Refused | Declined | StoreError) -> None:
    context.state.pops.done(pop)
    ext: Mapping[str, object] = NOTHING_POPPED
    if isinstance(error, Refused):
        code = context.state.templates.reason_codes[error.reason]
    elif isinstance(error, Declined):
        code, ext = error.code, error.ext
    else:
        failed = isinstance(error, StoreFailed)
        code = ResponseCode.SERVICE_NOT_AVAILABLE if failed else ResponseCode.SYSTEM_ERROR
    context.state.counters.count_refusal(code)
    context.peer.send(refuse(Command(RequestCode.POP_MESSAGE, opaque=pop.opaque), code, str(error), ext))


def _run(context: RequestContext, pop: Pop, start: Start) -> int:
    """Lease messages for *pop*, then answer or hold it; return the size of the answer's body."""
    state = context.state
    group = state.pops.open(pop, start)
    if not pop.count_max:
        if group.is_ready(pop.queue_id, in_order=pop.in_order, attempt=pop.attempt):
            _answer_notification(context, pop, found=True)
            group.wake()
        else:
            _wait(context, pop, group)
        return 0
    if not pop.is_counted and group.has_called_pops and _queue(context, pop, group):
        return 0
    messages, size, allowance = pop.count_max, state.config.pull_bytes_max, pop.gate.allowance
    if allowance.applies and not state.pops.stopping:
        allowance.check_out()
        messages, size = allowance.room(messages, size)
        if not messages:
            return _wait_for_quota(context, pop, group)
    source, found = group.hand_out(pop, messages, size)
    if not found:
        _wait(context, pop, group)
        return 0
    return _answer(context, pop, source.shared_group, found)


def _wait_for_quota(context: RequestContext, pop: Pop, group: PopGroup) -> int:
    """Let *pop* run again when its client may receive more: the peer does not collect before that."""
    if pop.until < context.state.now() - PATIENCE_S:
        _answer_nothing(context, pop, ResponseCode.POLLING_TIMEOUT)
    else:
        pop.pending.call(pop)
    group.wake()  # other clients may have the messages meanwhile
    return 0


def _queue(context: RequestContext, pop: Pop, group: PopGroup) -> bool:
    """Queue a new *pop* after called ones; return False if it cannot wait."""
    state = context.state
    if state.pops.stopping or len(pop.pending.held) >= state.config.parked_peer_max:
        return False
    pop.until = max(pop.until, state.now() + STALL_S)
    return state.pops.park(group, pop)


def _wait(context: RequestContext, pop: Pop, group: PopGroup) -> None:
    """Hold *pop*, which has found no messages, or answer it."""
    state, pops = context.state, context.state.pops
    now, is_reading = state.now(), group.is_reading(pop.queue_id, in_order=pop.in_order)
    if pop.must_answer or pops.stopping or (pop.until <= now and not is_reading):
        _answer_nothing(context, pop, ResponseCode.POLLING_TIMEOUT)
        return
    if not is_reading and group.is_ready(pop.queue_id, in_order=pop.in_order, attempt=pop.attempt):
        pop.group = group  # the messages that were read did not match; there are more
        pop.pending.call(pop)
        return
    if pop.until <= now:
        pop.until = now + READ_S
    if len(pop.pending.held) >= state.config.parked_peer_max or not pops.park(group, pop):
        keys = "remoting.parked_peer_max, remoting.pops_line_max and remoting.pops_waiting_max limit that"
        context.complain(RequestCode.POP_MESSAGE, Refused(Reason.BUSY, f"too many pops wait; {keys}"))
        _answer_nothing(context, pop, ResponseCode.POLLING_FULL)
    elif is_reading:
        group.look_again()


# answers


def _answer(context: RequestContext, pop: Pop, shared_group: SharedGroup, found: Sequence[Delivery]) -> int:
    """Send the messages *found* by ``distribution.hand_out``, by queue, all of the same generation."""
    state, is_retry = context.state, shared_group.context.topic.name != pop.topic
    pieces: list[Buffer] = []
    by_queue: dict[int, Popped] = {}
    size = count = 0
    for delivery in found:
        data = delivery.data
        queue_id, failures = delivery.queue_id, delivery.delivery - 1
        if failures:
            data = _failed_before(data, failures)
        if is_retry:
            data = _as_of_topic(context, pop, data, delivery)
        pieces.append(data)
        size += len(data)
        count += delivery.count
        popped = by_queue.get(queue_id)
        if popped is None:
            popped = by_queue[queue_id] = Popped(queue_id, [], {})
        popped.offsets.extend(delivery.offsets)
        if failures:
            popped.failures.update(dict.fromkeys(delivery.offsets, failures))
    state.pops.done(pop)
    state.rates.got(pop.topic, pop.name, count, size)
    if pop.gate.allowance.applies:
        pop.gate.allowance.charge_out(count, size)
    prefix = encode_pop_prefix(
        state.templates.popped,
        pop.opaque,
        ResponseCode.SUCCESS,
        "FOUND",
        found[0].generation,
        pop.invisible_ms,
        IN_ORDER_QUEUE if pop.in_order else 0,
        shared_group.distribution.rest(ANY_QUEUE if is_retry else pop.queue_id),
        places(shared_group.context.topic.name, list(by_queue.values()), in_order=pop.in_order),
        size,
    )
    context.peer.send(prefix, *pieces)
    return size


def _failed_before(data: Buffer, failures: int) -> bytes:
    """Return the records in *data* as after *failures* more failed deliveries of each."""
    changed = [
        with_reconsume_times(record, RecordView(record).reconsume_times + failures) for record in split_records(data)
    ]
    return b"".join(changed)


def _as_of_topic(context: RequestContext, pop: Pop, data: Buffer, delivery: Delivery) -> bytes:
    """Return the records of a retry topic in *data*, changed to the topic of *pop*, as RocketMQ does.

    A property of each record has its handle. A record that would become too long stays as it is stored: clients
    understand both.
    """
    new_records: list[bytes] = []
    for stored_record, record in zip(split_records(data), decode_records(data), strict=True):
        handle = MessageHandle(
            delivery.offsets[0],
            delivery.generation,
            pop.invisible_ms,
            0,
            retry_flag(record.topic),
            context.state.broker.config.name,
            record.queue_id,
            record.queue_offset,
        )
        properties = put_property(record.properties, HANDLE_KEY, str(handle).encode())
        if len(properties) > PROPERTIES_BYTES_MAX:
            new_records.append(stored_record)
            continue
        message = Message(
            pop.topic,
            record.body,
            properties,
            record.queue_id,
            record.flag,
            record.sys_flag,
            record.born_ms,
            record.born_host,
            record.reconsume_times,
        )
        new_records.append(
            encode_record(
                message, record.queue_id, record.queue_offset, record.position, record.store_ms, record.store_host
            )
        )
    return b"".join(new_records)


def _answer_nothing(context: RequestContext, pop: Pop, code: int) -> None:
    state = context.state
    if not pop.count_max:
        _answer_notification(context, pop, found=False, full=code == ResponseCode.POLLING_FULL)
        return
    state.pops.done(pop)
    state.rates.missed += 1
    remark = NO_MESSAGE
    if code == ResponseCode.POLLING_FULL:
        state.counters.count_refusal(code)
        remark = f"{state.pops.waiting} pops wait on this broker; remoting.pops_waiting_max, pops_line_max or"
        remark += " parked_peer_max is reached"
    context.peer.send(encode_response(pop.opaque, code, NOTHING_POPPED, remark=remark))


def _answer_notification(context: RequestContext, pop: Pop, *, found: bool, full: bool = False) -> None:
    context.state.pops.done(pop)
    context.peer.send(encode_response(pop.opaque, ResponseCode.SUCCESS, {"hasMsg": found, "pollingFull": full}))


# without taking anything


async def peek_message(context: RequestContext, command: Command) -> bytes:
    """Answer with messages that were not popped yet, without a lease."""
    count_max, queue_id = command.integer("maxMsgNums"), command.integer("queueId")
    if not 0 < count_max <= COUNT_MAX:
        text = f"peek message's num {count_max} is not between 1 and {COUNT_MAX}; ask for fewer, more often"
        raise Declined(ResponseCode.INVALID_PARAMETER, text, NOTHING_POPPED)
    grant = context.gate(command).consume(command.text("consumerGroup"), command.text("topic"))
    topic = _readable_topic(context, grant, queue_id)
    queues = [topic.queue(number) for number in (range(topic.read_queues) if queue_id < 0 else (queue_id,))]
    return await _peek(context, command, grant, queues, count_max)


async def _peek(
    context: RequestContext, command: Command, grant: ConsumeGrant, queues: Sequence[Queue], count_max: int
) -> bytes:
    state = context.state
    bytes_left, messages_left = state.config.pull_bytes_max, 0
    body: list[Buffer] = []
    allowance = context.gate(command).allowance
    allowance.check_out()
    for queue in queues:
        offset = _next_offset(context, grant, queue)
        queue_messages_left = max(grant.end_offset(queue.queue_id) - offset, 0)
        messages_left += queue_messages_left
        if queue_messages_left and count_max > 0 and bytes_left > 0:
            result = await grant.read(queue.queue_id, offset, count_max, bytes_left)
            body += result.pieces
            if result.count:
                allowance.charge_out(result.count, result.size)
            count_max -= result.count
            bytes_left -= result.size
    has_messages = bool(body)
    code = ResponseCode.SUCCESS if has_messages else ResponseCode.PULL_NOT_FOUND
    ext = {**NOTHING_POPPED, "restNum": messages_left}
    return encode_response(command.opaque, code, ext, b"".join(body), "FOUND" if has_messages else NO_MESSAGE)


def _next_offset(context: RequestContext, grant: ConsumeGrant, queue: Queue) -> int:
    """Return the first offset of *queue* that the group has not popped."""
    group = context.state.pops.find(grant.group, grant.topic)
    offset = group.shared_group.next_offset(queue.queue_id) if group is not None else grant.offset(queue.queue_id)
    return max(offset, queue.first_offset)


def polling_info(context: RequestContext, command: Command) -> bytes:
    """Answer the number of the group's pops that wait for the queue."""
    group, queue_id = command.text("consumerGroup"), command.integer("queueId")
    grant = context.gate(command).consume(group, command.text("topic"))
    _readable_topic(context, grant, queue_id)
    return reply(command, {"pollingNum": context.state.pops.count(group, grant.topic, max(queue_id, ANY_QUEUE))})


TABLE: Final[dict[int, Handle]] = {
    RequestCode.NOTIFICATION: notification,
    RequestCode.PEEK_MESSAGE: peek_message,
    RequestCode.POLLING_INFO: polling_info,
    RequestCode.POP_MESSAGE: pop_message,
}
