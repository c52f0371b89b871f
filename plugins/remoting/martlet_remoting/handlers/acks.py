"""ACK_MESSAGE, BATCH_ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME: settle popped messages, or extend their leases.

The checks and codes follow RocketMQ AckMessageProcessor and ChangeInvisibleTimeProcessor. A message is found by its
offset and by the pop time in its handle, which is the generation of its lease: the newest handle settles it, over any
connection. An older handle has no effect, even if another consumer holds the message now.

An answer is sent when the acknowledgement is durable.
"""

import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from martlet.access import ConsumeGrant, Gate
from martlet.errors import Reason, Refused
from martlet.groups.group import SharedGroup
from martlet.runtime.steps import Budget, Steps
from martlet.state.journal import NEXT_COMMIT
from martlet.store import Queue
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.handlers.bodies import integer, items, read_body, text
from martlet_remoting.handlers.context import NOTHING_POPPED, Declined, Handle, RequestContext, reply
from martlet_remoting.handlers.pops import check_invisible
from martlet_remoting.wire.codec import encode_ack_response, encode_response
from martlet_remoting.wire.codes import FLAG_ONEWAY, FLAG_RESPONSE, RequestCode, ResponseCode
from martlet_remoting.wire.headers import AckHead, AckHeader, decode_header
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import handle_ms, parse_handle, real_topic
from martlet_remoting.wire.runs import Ack

__all__ = ["TABLE", "ack_run"]

NO_ANSWER: Final = FLAG_ONEWAY | FLAG_RESPONSE
NOT_ZERO: Final = re.compile(rb"[^\0]")
# Messages of a batch that are settled before the clock is checked.
SETTLED_AT_ONCE: Final = 256
STALE: Final = "nothing was acknowledged; the message was acknowledged before, or its invisible time has ended"


def ack_message(context: RequestContext, command: Command) -> bytes:
    """Settle one message. As in RocketMQ, a handle that is no longer valid gets the same answer as a valid one."""
    fields = decode_header(command, AckHeader)
    shared_group = _shared_group(context, context.gate(command), fields, fields.offset)
    pop_ms = handle_ms(fields.handle)
    if shared_group is not None and shared_group.ack(fields.queue_id, fields.offset, pop_ms):
        context.peer.hold_until(NEXT_COMMIT)
        context.state.rates.acked(fields.topic, fields.group, 1)
        return encode_ack_response(context.state.templates.acknowledged, command.opaque)
    return encode_response(command.opaque, ResponseCode.SUCCESS, remark=STALE)


def ack_run(context: RequestContext, gate: Gate, acks: Sequence[Ack]) -> int:
    """Settle messages together through *gate*; return the number of answered requests, counted from the first.

    The next request must be refused, or wants no answer.
    """
    template = context.state.templates.acknowledged
    answers: list[bytes] = []
    has_settled = False
    while len(answers) < len(acks):
        heads = _requests_alike(acks, len(answers))
        if not heads:
            break
        fields, offsets = heads[0].fields, [head.fields.offset for head in heads]
        try:
            if not (gate.allows("subscribe", RETRY_PREFIX + fields.group) and gate.allows("subscribe", fields.topic)):
                break  # refused as a single request
            shared_group = _shared_group(context, gate, fields, offsets[-1])
            pop_ms = handle_ms(fields.handle)
        except (Refused, Declined):
            break
        settled = shared_group.settlement.ack_all(fields.queue_id, offsets, pop_ms) if shared_group is not None else []
        if settled:
            has_settled = True
            context.state.rates.acked(fields.topic, fields.group, len(settled), len(settled))
        if len(settled) == len(offsets):
            answers += [encode_ack_response(template, head.opaque) for head in heads]
        else:
            answers += [_answer(template, head, head.fields.offset in settled) for head in heads]
    if answers:
        context.state.counters.requests += len(answers)
        if has_settled:
            context.peer.hold_until(NEXT_COMMIT)
        context.peer.send(b"".join(answers))
    return len(answers)


def _requests_alike(acks: Sequence[Ack], first: int) -> list[AckHead]:
    """Return requests from *first* on that acknowledge messages of one queue and one pop, in ascending order."""
    heads: list[AckHead] = []
    group = topic = handle_start = ""
    queue_id = offset = -1
    for index in range(first, len(acks)):
        head = acks[index][0]
        fields = head.fields
        if head.flag & NO_ANSWER:
            break
        if not heads:
            group, topic, queue_id = fields.group, fields.topic, fields.queue_id
            tokens = fields.handle.split(" ", 2)
            handle_start = f"{tokens[0]} {tokens[1]} " if len(tokens) > 2 else fields.handle
        elif (
            fields.queue_id != queue_id
            or fields.offset <= offset
            or not fields.handle.startswith(handle_start)
            or fields.topic != topic
            or fields.group != group
        ):
            break
        offset = fields.offset
        heads.append(head)
    return heads


def _answer(template: bytes, head: AckHead, settled: bool) -> bytes:
    if settled:
        return encode_ack_response(template, head.opaque)
    return encode_response(head.opaque, ResponseCode.SUCCESS, remark=STALE)


def change_invisible_time(context: RequestContext, command: Command) -> bytes:
    """Set the time at which a message becomes visible again, earlier or later than before; answer its new handle."""
    fields = decode_header(command, AckHeader)
    check_invisible(fields.invisible_ms)
    shared_group = _shared_group(context, context.gate(command), fields, fields.offset, readable=True)
    handle = parse_handle(fields.handle)
    generation = 0
    if shared_group is not None:
        generation = shared_group.renew(fields.queue_id, fields.offset, handle.pop_ms, fields.invisible_ms / 1000)
    if not generation:
        text_ = f"message {fields.offset} of queue {fields.queue_id} is not held by this handle"
        text_ += "; it was acknowledged, or its invisible time has ended"
        raise Declined(ResponseCode.NO_MESSAGE, text_, NOTHING_POPPED)
    context.peer.hold_until(NEXT_COMMIT)
    ext = {"popTime": generation, "invisibleTime": fields.invisible_ms, "reviveQid": handle.revive_queue}
    return reply(command, ext)


def _shared_group(
    context: RequestContext, gate: Gate, fields: AckHeader, last_offset: int, *, readable: bool = False
) -> SharedGroup | None:
    """Return the group that popped messages up to offset *last_offset*, None if it has never consumed the topic.

    With *readable* the messages must exist.

    Raises:
      Refused: the topic or the group may not be read, or the topic does not exist.
      Declined: there is no such queue or message.
    """
    grant = gate.consume(fields.group, fields.topic)
    queue = _queue(context, grant, fields.queue_id)
    first_offset, end_offset = queue.first_offset, queue.next_offset
    if not first_offset <= fields.offset <= last_offset <= end_offset or (readable and last_offset == end_offset):
        text_ = f"offset is illegal, key:{fields.topic}@{fields.queue_id}, commit:{fields.offset},"
        text_ += f" store:{first_offset}~{end_offset}"
        raise Declined(ResponseCode.NO_MESSAGE, text_, NOTHING_POPPED)
    return context.state.pops.shared_group(gate, fields.group, fields.topic)


def _queue(context: RequestContext, grant: ConsumeGrant, queue_id: int) -> Queue:
    topic = grant.get_topic()
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{grant.topic}] not exist, apply first please! It may be deleted")
    if not topic.has_readable(queue_id):
        text_ = f"queueId[{queue_id}] is illegal, topic:[{grant.topic}]"
        text_ += f" topicConfig.readQueueNums:[{topic.read_queues}] consumer:[{context.peer.address}]"
        raise Declined(ResponseCode.MESSAGE_ILLEGAL, text_, NOTHING_POPPED)
    return topic.queue(queue_id)


def batch_ack_message(context: RequestContext, command: Command) -> Steps[None]:
    """Settle many messages; messages whose handles are no longer valid are skipped, as in RocketMQ."""
    gate = context.gate(command)
    body = (yield from read_body(command)) if command.body else {}
    acks = items(body, "acks")
    if not acks:
        raise Declined(ResponseCode.NO_MESSAGE, "batch has no acks; send at least one")
    budget, settled = Budget(), False
    for ack in acks:
        group = text(ack, "c")
        topic = real_topic(text(ack, "t"), group, text(ack, "r", "0"))
        shared_group = _group_of_batch(context, gate, group, topic, integer(ack, "q", -1))
        first, pop_ms, queue_id = integer(ack, "so"), integer(ack, "pt"), integer(ack, "q", -1)
        numbers = _bits(text(ack, "b"))
        while offsets := [first + number for number in islice(numbers, SETTLED_AT_ONCE)]:
            if shared_group is not None and (done := shared_group.settlement.ack_all(queue_id, offsets, pop_ms)):
                settled = True
                context.state.rates.acked(topic, group, len(done))
            if budget.is_over(len(offsets)):
                yield
    if settled:
        context.peer.hold_until(NEXT_COMMIT)
    context.answer(command, reply(command))


def _group_of_batch(context: RequestContext, gate: Gate, group: str, topic: str, queue_id: int) -> SharedGroup | None:
    """Return the group of a batch's messages; None if the topic or the queue does not exist."""
    found = gate.consume(group, topic).get_topic()
    if found is None or not found.has_readable(queue_id):
        return None
    return context.state.pops.shared_group(gate, group, topic)


def _bits(encoded: str) -> Iterator[int]:
    """Yield the numbers in a BitSet: base64 of its bytes, the lowest first."""
    try:
        data = b64decode(encoded, validate=True)
    except (Base64Error, ValueError) as error:
        text_ = f"bit set {encoded!r:.40} of a batch is not base64; {error}"
        raise Refused(Reason.MALFORMED, text_) from error
    for found in NOT_ZERO.finditer(data):
        byte = data[found.start()]
        for bit in range(8):
            if byte >> bit & 1:
                yield found.start() * 8 + bit


TABLE: Final[dict[int, Handle]] = {
    RequestCode.ACK_MESSAGE: ack_message,
    RequestCode.BATCH_ACK_MESSAGE: batch_ack_message,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: change_invisible_time,
}
