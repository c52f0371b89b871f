"""SEND_MESSAGE in all its forms: long and short field names, batches, retries, dead letters.

The order of checks and the codes follow RocketMQ AbstractSendMessageProcessor.msgCheck and SendMessageProcessor.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from martlet.access import Gate, PublishGrant
from martlet.errors import Reason, Refused
from martlet.message import Message, find_property, put_property, remove_property
from martlet.runtime.ids import Ids
from martlet.runtime.steps import Steps
from martlet.stages import Stages
from martlet.store.append.items import AppendItem
from martlet.tables.topics import RETRY_PREFIX, Topic, check_name
from martlet_remoting.handlers.context import Answer, Declined, Handle, RequestContext, supports_transactions
from martlet_remoting.handlers.unheld import TIMER_KEYS, no_transactions
from martlet_remoting.shared.round_sends import Part
from martlet_remoting.shared.templates import Templates, contains
from martlet_remoting.wire.batches import Member, split_batch
from martlet_remoting.wire.codec import encode_send_response
from martlet_remoting.wire.codes import VERSION_3_4_9, RequestCode, ResponseCode
from martlet_remoting.wire.headers import SendHead, SendHeader, decode_send_header
from martlet_remoting.wire.packets import Command, Frame
from martlet_remoting.wire.recall_handles import handle_of
from martlet_remoting.wire.sends import Send, usual_send

__all__ = ["TABLE", "check_load", "make_message", "open_topic", "send_message", "send_run", "stamp"]

TOPIC_CHARS_MAX: Final = 127
MULTI_TAG: Final = 0x2
TRANSACTION_MASK: Final = 0xC
# All bits except those for the body's compression.
UNUSUAL_SYS_FLAG: Final = ~0x701
I32_MIN: Final = -(1 << 31)
I32_MAX: Final = (1 << 31) - 1
DELAY_KEYS: Final = (b"DELAY", *(key.encode() for key in TIMER_KEYS))
# Properties that the broker sets; a producer's values are removed first.
BROKER_KEYS: Final = (b"CLUSTER", b"MSG_REGION", b"TRACE_ON", b"POP_CK")
BROKER_WORDS: Final = (b"CLUSTER", b"MSG_REGION", b"POP_CK")
# Members of a batch that are stored in one turn of the event loop, in 3 ms; a longer batch takes several turns.
BATCH_AT_ONCE: Final = 1024


class _PlacedBatch(NamedTuple):
    queue_id: int
    queue_offset: int
    end: int
    ids: str


def send_usual(context: RequestContext, command: Command) -> Answer:
    """Store a usual send as a run of one, which takes half the time; store any other by `send_message`."""
    if not command.unusual:
        head = SendHead(command.code, decode_send_header(command), command.opaque, command.flag)
        send = usual_send(head, command.body, 0)
        if send is not None and send_run(context, context.gate(command), [send], command.code):
            return None
    return send_message(context, command)


def send_run(
    context: RequestContext, gate: Gate, sends: Sequence[Send], code: int = RequestCode.SEND_MESSAGE_V2
) -> int:
    """Store and answer the first of *sends* at the end of the round, up to the first that must be handled alone.

    Returns their number. Only sends that a stage may want become a `Message`.
    """
    state, host, stamp = context.state, context.peer.host, context.state.templates.stamp
    stages, body_bytes_max = state.broker.stages, state.broker.config.message_bytes_max
    words = (*BROKER_WORDS, *stages.needles) if stages.needles else BROKER_WORDS
    count = len(sends)
    if count > 1 and not contains(b"\x02".join([properties for _, _, _, properties, *_ in sends]), words):
        words = ()  # one search in all is faster than a search in each
    run: list[AppendItem | Message] = []
    staged: dict[int, Callable[[int, int], bytes]] = {}
    room = 0
    while (at := len(run)) < count:
        name = sends[at][0]
        grant = gate.publishable.get(name) or _ask_grant(gate, name)
        topic = _usual_topic(grant)
        if grant is None or topic is None:
            break
        if not run:
            room = state.sends.room(grant)
        terms = topic, host, stamp, body_bytes_max, grant.code_of
        if not stages.every_message:
            room = state.templates.usual_items(sends, run, room, UNUSUAL_SYS_FLAG | stages.sys_flag, words, *terms)
        if len(run) == at:  # a stage may want this one
            one: list[AppendItem] = []
            flags = UNUSUAL_SYS_FLAG & ~stages.sys_flag
            room = state.templates.usual_items(sends[at : at + 1], one, room, flags, BROKER_WORDS, *terms)
            if not one:
                break
            message = _message_of(one[0])
            staged[at] = partial(_staged_answer, context, sends[at], message)
            run.append(message)
    if run:
        sends = sends[: len(run)] if len(run) < count else sends
        state.sends.add(Part(context, gate, sends, run, staged, code), room)
    return len(run)


def _ask_grant(gate: Gate, name: str) -> PublishGrant | None:
    """Return the grant for the first message to a topic; None to leave a refusal to the path of single messages."""
    try:
        return gate.check_publish(name, before_publish=True) if gate.allows("publish", name) else None
    except Refused:  # the topic is internal, or an authorizer has failed
        return None


def _usual_topic(grant: PublishGrant | None) -> Topic | None:
    """Return the topic of *grant* if its messages may be in a run."""
    topic = grant.get() if grant is not None else None
    return None if topic is None or topic.filter_type != "SINGLE_TAG" or topic.name[0] == "%" else topic


def _message_of(item: AppendItem) -> Message:
    """Return *item*, which `usual_items` made, as a message for the stages."""
    queue, body, properties, _, flag, sys_flag, born_ms, host, _, _ = item
    return Message(queue.topic, bytes(body), properties, queue.queue_id, flag, sys_flag, born_ms, host)


def _staged_answer(context: RequestContext, send: Send, message: Message, position: int, offset: int) -> bytes:
    """Return the answer to *send*, whose *message* has passed the stages."""
    templates = context.state.templates
    topic, queue_id, _, _, _, _, _, unique, opaque, _, _ = send
    handle = ""
    if message.topic != topic:  # a stage holds it elsewhere until it is due
        queue_id = _real_queue(message, queue_id)
        handle = handle_of(message.properties, topic, context.state.broker.config.name)
    message_id = templates.message_id(position)
    return encode_send_response(templates.sent, opaque, 0, message_id, queue_id, offset, unique.decode(), handle)


# any send


def send_message(context: RequestContext, command: Command) -> Answer:
    """Store the message or the batch; the answer is sent once it is durable."""
    header = decode_send_header(command)
    state = context.state
    gate = context.gate(command)
    is_retry = header.topic.startswith(RETRY_PREFIX)  # it may go to another topic
    grant = gate.check_publish(header.topic, before_publish=not is_retry)
    topic = open_topic(context, grant, header)
    check_load(grant, state.config.unflushed_bytes_max)
    if header.batch:
        if header.queue_id < 0:
            header.queue_id = state.broker.ids.below(topic.write_queues or 1)
        return _send_batch(context, command, header, grant)
    properties = header.properties.encode()
    if is_retry:
        topic, properties = _retry(context, grant, command, header, topic, properties)
    properties, unique = stamp(properties, state.templates, state.broker.ids)
    if header.sys_flag & TRANSACTION_MASK and not supports_transactions(state.broker):
        raise no_transactions(state.broker)
    message = make_message(context, header, command.body, properties)
    message.topic = topic.name
    if topic.filter_type == "MULTI_TAG":
        message.sys_flag |= MULTI_TAG
    if topic.name == header.topic:
        placed = gate.publish(message)
    else:
        placed = gate.give_back(header.topic.removeprefix(RETRY_PREFIX), message)
    context.peer.hold_until(placed.end)
    queue_id, handle = placed.queue_id, ""
    if message.topic != topic.name:  # a stage holds it elsewhere until it is due
        queue_id = _real_queue(message, queue_id)
        if header.topic[0] != "%":
            handle = handle_of(message.properties, header.topic, state.broker.config.name)
    return encode_send_response(
        state.templates.sent,
        command.opaque,
        0,
        state.templates.message_id(placed.position),
        queue_id,
        placed.queue_offset,
        unique,
        handle,
    )


def _real_queue(message: Message, queue_id: int) -> int:
    """Return the target queue of a held message; *queue_id* if its properties have none."""
    queue = find_property(message.properties, b"REAL_QID")
    return int(queue) if queue.isdigit() else queue_id


def make_message(
    context: RequestContext, header: SendHeader, body: bytes, properties: bytes, flag: int | None = None
) -> Message:
    if not body:
        raise _no_body()
    flag = header.flag if flag is None else flag
    if not (I32_MIN <= flag <= I32_MAX and I32_MIN <= header.sys_flag <= I32_MAX):
        raise Refused(Reason.PARAMETER, f"flag {flag} or sysFlag {header.sys_flag} does not fit 32 bits")
    return Message(
        header.topic,
        body,
        properties,
        header.queue_id,
        flag,
        header.sys_flag,
        header.born_ms,
        context.peer.host,
        min(max(header.reconsume_times, 0), I32_MAX),
    )


def _no_body() -> Declined:
    return Declined(ResponseCode.SYSTEM_ERROR, "message body is empty; send at least one byte")


def check_load(grant: PublishGrant, limit: int) -> None:
    waiting = grant.unflushed_bytes
    if waiting > limit:
        text = f"{waiting} bytes wait to be flushed; remoting.unflushed_bytes_max is {limit}"
        raise Refused(Reason.BUSY, f"[OVERLOAD]system busy, start flow control for a while: {text}")


# the topic


def open_topic(context: RequestContext, grant: PublishGrant, header: SendHeader) -> Topic:
    """Return the topic of a send; create it if the configuration allows it."""
    topic = grant.get()
    if topic is None:
        topic = _make_topic(grant, header)
    topic.check_queue(header.queue_id)
    return topic


def _make_topic(grant: PublishGrant, header: SendHeader) -> Topic:
    name = header.topic
    check_name(name)
    if (group := grant.retry_group()) is not None:
        return group.make_retry_topic(1)
    topic = grant.auto_create(header.default_topic, header.default_queues)
    if topic is None:
        text = f"topic[{name}] not exist, apply first please! Create it with updateTopic, or turn on"
        raise Refused(Reason.NO_TOPIC, f"{text} broker.auto_create_topics and send with the default topic TBW102")
    return topic


def _retry(
    context: RequestContext, grant: PublishGrant, command: Command, header: SendHeader, topic: Topic, properties: bytes
) -> tuple[Topic, bytes]:
    """Return the topic for a consumer's own retry: the retry topic, after too many attempts the dead-letter topic."""
    state = context.state
    of_group = grant.retry_group()
    assert of_group is not None
    policy, group = of_group.ensure(), of_group.name
    if policy is None:
        text = f"subscription group [{group}] does not exist; create it with updateSubGroup, or turn on"
        raise Refused(Reason.NO_GROUP, f"{text} broker.auto_create_groups")
    times_max = policy.retry_max_times
    if command.version >= VERSION_3_4_9 and header.max_reconsume_times >= 0:
        times_max = header.max_reconsume_times
    # An ordered consumer, which holds locks, sends back only messages that it has given up on.
    if header.reconsume_times <= times_max and not state.locks.any_held(group, state.now()):
        return topic, properties
    header.queue_id = -1
    return of_group.make_dead_letter_topic(), put_property(properties, b"DELAY", b"-1")


# the properties


def stamp(properties: bytes, templates: Templates, ids: Ids) -> tuple[bytes, str]:
    """Return the properties to store, and the message's unique key."""
    if b"CLUSTER\x01" in properties or b"MSG_REGION\x01" in properties or b"POP_CK" in properties:
        for key in BROKER_KEYS:
            properties = remove_property(properties, key)
    if properties and properties[-1] != 2:
        properties += b"\x02"
    unique = find_property(properties, b"UNIQ_KEY").decode("utf-8", "replace")
    if not unique:
        unique = ids.unique()
        properties += f"UNIQ_KEY\x01{unique}\x02".encode()
    return properties + templates.stamp, unique


# batches


def _send_batch(
    context: RequestContext, command: Command, header: SendHeader, grant: PublishGrant
) -> bytes | Steps[Frame | None]:
    _check_batch(command, header, context.state.broker.config.message_bytes_max)
    parts = split_batch(command.body, BATCH_AT_ONCE)
    members = next(parts, None)
    if members is None:
        raise Refused(Reason.ILLEGAL, "batch is empty; send at least one message")
    stages = context.state.broker.stages
    needs_stages = _check_members(stages, members)
    if len(members) == BATCH_AT_ONCE:
        return _send_long_batch(context, command, header, grant, members, parts)
    placed = _store_batch(context, command, header, grant, members, needs_stages=needs_stages)
    return _batch_response(context, command, header, placed)


def _send_long_batch(
    context: RequestContext,
    command: Command,
    header: SendHeader,
    grant: PublishGrant,
    members: list[Member],
    parts: Iterator[list[Member]],
) -> Steps[Frame | None]:
    """Check all members, then store `BATCH_AT_ONCE` of them per turn, all or none of each such part, in one queue."""
    groups = [members]
    stages = context.state.broker.stages
    needs_stages = _check_members(stages, members)
    for part in parts:
        yield
        needs_stages = _check_members(stages, part) or needs_stages
        groups.append(part)
    first = last = _store_batch(context, command, header, grant, members, needs_stages=needs_stages)
    ids = [first.ids]
    for group in groups[1:]:
        yield
        last = _store_batch(context, command, header, grant, group, needs_stages=needs_stages)
        ids.append(last.ids)
    return _batch_response(context, command, header, first._replace(end=last.end, ids=",".join(ids)))


def _batch_response(context: RequestContext, command: Command, header: SendHeader, placed: _PlacedBatch) -> bytes:
    context.peer.hold_until(placed.end)
    unique = find_property(header.properties.encode(), b"UNIQ_KEY").decode("utf-8", "replace")
    template = context.state.templates.sent
    return encode_send_response(template, command.opaque, 0, placed.ids, placed.queue_id, placed.queue_offset, unique)


def _store_batch(
    context: RequestContext,
    command: Command,
    header: SendHeader,
    grant: PublishGrant,
    members: Sequence[Member],
    *,
    needs_stages: bool,
) -> _PlacedBatch:
    """Store all or none of *members*; *needs_stages* says whether a stage may want one of them."""
    gate = context.gate(command)
    message = make_message(context, header, *members[0])
    name, sys_flag, born_ms, host = message.topic, message.sys_flag, message.born_ms, message.born_host
    times, queue = message.reconsume_times, None if needs_stages else gate.find_queue(name, header.queue_id)
    items: Sequence[AppendItem | Message]
    if queue is None:
        items = [
            Message(name, body, properties, header.queue_id, flag, sys_flag, born_ms, host, times)
            for body, properties, flag in members
        ]
    else:
        templates = context.state.templates
        items = templates.batch_items(members, queue, sys_flag, born_ms, host, times, grant.code_of)
    result = gate.publish_all(items, atomic=True)
    first = result.placed(0)
    ids = _batch_ids(context.state.templates, result.positions)
    return _PlacedBatch(first.queue_id, first.queue_offset, result.end, ids)


def _batch_ids(templates: Templates, positions: Sequence[int]) -> str:
    host_text = templates.host_text
    return ",".join([f"{host_text}{position:016X}" for position in positions])


def _check_batch(command: Command, header: SendHeader, limit: int) -> None:
    name = header.topic
    if name.startswith(RETRY_PREFIX):
        raise Refused(Reason.ILLEGAL, f"batch request does not support retry group {name.removeprefix(RETRY_PREFIX)}")
    if len(name) > TOPIC_CHARS_MAX:
        raise Refused(Reason.ILLEGAL, f"topic of a batch is {len(name)} characters long; at most {TOPIC_CHARS_MAX}")
    if find_property(header.properties.encode(), b"DELAY") not in (b"", b"0") or header.sys_flag & TRANSACTION_MASK:
        raise Refused(Reason.ILLEGAL, "batch cannot be delayed or transactional; send such messages one by one")
    if len(command.body) > limit:
        raise Refused(Reason.ILLEGAL, f"batch is {len(command.body)} bytes; broker.message_bytes_max is {limit}")


def _check_members(stages: Stages, members: Sequence[Member]) -> bool:
    """Raise `Refused` if one of *members* cannot be in a batch; return whether a stage may want one of them."""
    wanted = stages.may_want_properties(b"".join([properties for _, properties, _ in members]))
    if wanted:
        for _, properties, _ in members:
            _check_member(properties)
    if b"" in [body for body, _, _ in members]:
        raise _no_body()
    return wanted


def _check_member(properties: bytes) -> None:
    if any(find_property(properties, key) not in (b"", b"0") for key in DELAY_KEYS):
        raise Refused(Reason.ILLEGAL, "message of a batch cannot be delayed; send it by itself")
    if find_property(properties, b"TRAN_MSG").lower() == b"true":
        raise Refused(Reason.ILLEGAL, "message of a batch cannot be transactional; send it by itself")


TABLE: Final[dict[int, Handle]] = {
    RequestCode.SEND_MESSAGE: send_message,
    RequestCode.SEND_MESSAGE_V2: send_usual,
    RequestCode.SEND_BATCH_MESSAGE: send_message,
}
