"""BULK_READ, a request of Martlet's own: the records of a queue from one offset to another, in many frames.

Bulk reads are for readers of whole topics, such as the Spark connector. A pull has a limit of a few hundred KiB, and
its client requests, checks and decodes each pull by itself. A bulk read has a credit of bytes, and its frames follow
one another while the socket has room. It belongs to no group: it creates no group, commits no offset and consumes no
pending reset. The broker does not check the CRCs of records that it sends without decoding them: the reader must.

Fields of the request: ``topic``, ``queueId``, ``offset``, ``endOffset`` (default: none), ``creditBytes``, ``waitMs``
(the time to wait at the end of the queue for the first record), ``expressionType``, ``subscription``, ``brokerName``:
another broker that now has this broker's address must not answer with messages of its own queue; ``checked``: "true" to
leave out records that do not match their CRCs.

All frames have the ``opaque`` of the request. Their fields: ``nextBeginOffset`` after the last examined message,
``minOffset`` and ``maxOffset`` of the queue, ``more``: whether frames follow, and ``lost``: the messages found
unreadable since the previous frame, as ranges such as ``5-7,9-10`` with exclusive ends; some may not match the filter.
A body has whole records in the order of their offsets, only those that the filter selects. Tags are compared by hash,
as for pulls. If ``offset`` was removed or lies after the end of the queue, the only frame has the code
PULL_OFFSET_MOVED. A read ends at ``endOffset``, at the end of the queue, or when its credit is used up.
"""

from typing import Final

from martlet.delivery.routing.selection import TAG, Selection
from martlet.errors import MartletError, Reason, Refused
from martlet.store import Care, Queue, ReadResult, ReadStatus, merged
from martlet.tables.topics import READ, Topic
from martlet_remoting.consumers.bulk_reads import BulkRead
from martlet_remoting.consumers.subscriptions import select
from martlet_remoting.handlers.context import Declined, Handle, RequestContext, refusal
from martlet_remoting.wire.codec import encode_prefix
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

__all__ = ["TABLE", "bulk_read", "collect", "finish"]

# Limit of pieces in one write to the kernel; an interleaved queue has a piece for each record.
FRAME_MESSAGES: Final = 1024
UNLIMITED: Final = (1 << 63) - 1
# Cost of a frame itself, and of a scan without a match, in bytes of messages that take the same time.
FRAME_COST_BYTES: Final = 16_384
# Ranges in a frame's ``lost``; if there are more, the last range covers all further ones.
LOST_RANGES_MAX: Final = 100
MOVED: Final = frozenset((ReadStatus.TOO_SMALL, ReadStatus.BEYOND_END, ReadStatus.REMOVED))


def bulk_read(context: RequestContext, command: Command) -> None:
    """Begin a bulk read; its frames follow."""
    if command.flag & FLAG_ONEWAY:
        return
    state, config = context.state, context.state.config
    gate = context.gate(command)
    gate.allowance.check_out()
    _check_name(command.text("brokerName", ""), state.broker.config.name)
    topic, queue_id = command.text("topic"), command.integer("queueId")
    queue = _readable(gate.read(topic).get(), topic, queue_id)
    offset, end = command.integer("offset"), command.integer("endOffset", UNLIMITED)
    credit = min(max(command.integer("creditBytes", config.bulk_bytes_max), 1), config.bulk_bytes_max)
    wait_ms = min(max(command.integer("waitMs", 0), 0), config.suspend_ms_max)
    wait_ms = state.broker.authentication.cut_wait_ms(gate.identity, wait_ms)
    kind, expression = command.text("expressionType", TAG), command.text("subscription", "")
    wanted = _selection(context, kind, expression)
    care = Care.TELL if command.boolean("checked", False) else Care.CALLER_CHECKS
    read = BulkRead(
        context.bulk, command.opaque, gate, queue, offset, end, credit, wait_ms / 1000, wanted, len(expression), care
    )
    state.bulk_reads.begin(read, lambda other: _refuse(context, other, state.bulk_reads.refusal()))


def _check_name(asked: str, name: str) -> None:
    if asked not in ("", name):
        raise Refused(Reason.NO_TOPIC, f"this is broker[{name}], not broker[{asked}]; ask a name server where that is")


def _readable(topic: Topic | None, name: str, queue_id: int) -> Queue:
    if topic is None:
        raise Refused(Reason.NO_TOPIC, f"topic[{name}] not exist, apply first please! Send to it or create it")
    if not topic.perm & READ:
        raise Refused(Reason.NO_PERMISSION, f"the topic[{name}] reading message is forbidden; its perm lacks 4")
    if not topic.has_readable(queue_id):
        text = f"queueId[{queue_id}] is illegal, topic:[{name}] topicConfig.readQueueNums:[{topic.read_queues}]"
        raise Refused(Reason.PARAMETER, text)
    return topic.queue(queue_id)


def _refuse(context: RequestContext, read: BulkRead, error: MartletError) -> None:
    command = Command(RequestCode.BULK_READ, opaque=read.opaque)
    if isinstance(error, Refused) and error.reason is Reason.BUSY:
        context.state.complain_of(read.pending.peer, command.code, error)
    read.pending.peer.send(refusal(context.state, command, error))


def _selection(context: RequestContext, kind: str, expression: str) -> Selection:
    try:
        return select(context.state.broker, kind, expression)
    except Refused as error:
        if error.reason is Reason.NOT_SUPPORTED:
            raise
        text = f"parse the subscription of a bulk read failed; {error}"
        raise Declined(ResponseCode.SUBSCRIPTION_PARSE_FAILED, text) from error


def collect(context: RequestContext, budget_bytes: int) -> None:
    """Send frames of the reads that are ready, one of each in turn."""
    pending = context.bulk
    ready = pending.ready
    while ready and budget_bytes > 0:
        read = ready.popleft()
        budget_bytes -= FRAME_COST_BYTES
        try:
            budget_bytes -= _continue(context, read)
        except MartletError as error:
            context.state.bulk_reads.done(read)
            _refuse(context, read, error)
        if read.gate.allowance.must_wait:
            break
    if ready:
        context.peer.wake_last()


def finish(context: RequestContext) -> None:
    """End every read at its current offset: at shutdown; readers continue after the restart."""
    reads, pending = context.state.bulk_reads, context.bulk
    for read in list(pending.unfinished):
        reads.done(read)
        pending.reader.forget(read)
        end_offset = reads.end_offset(read.queue)
        _send(context, read, ResponseCode.SUCCESS, "the broker is stopping", end_offset)
    pending.ready.clear()


def _continue(context: RequestContext, read: BulkRead) -> int:
    """Send the next frame of *read*, or let it wait; return the size of the frame's body."""
    if read.refused is not None:
        raise read.refused
    context.state.broker.authentication.check_expiry(read.gate.identity)
    topic = read.gate.read(read.queue.topic).get()
    if _readable(topic, read.queue.topic, read.queue.queue_id) is not read.queue:
        raise Refused(Reason.NO_TOPIC, f"topic[{read.queue.topic}] not exist, apply first please! It was deleted")
    end_offset = context.state.bulk_reads.end_offset(read.queue)
    if read.offset >= min(read.end, end_offset):
        return _at_end(context, read, end_offset)
    wanted, count = read.selection, min(FRAME_MESSAGES, read.end - read.offset)
    size = min(read.credit_bytes, context.state.config.bulk_frame_bytes)
    if read.gate.allowance.applies:
        count, size = read.gate.allowance.room(count, size)
        if not count:  # the peer is not woken before the turn of its client
            context.bulk.queue_up(read)
            return 0
    result = context.bulk.reader.read(
        context.peer.start, read, read.queue, read.offset, count, size, wanted.codes, wanted.predicate, read.care
    )
    if result is None:
        stalled = context.bulk.reader.stalled
        if stalled is not None:
            raise stalled
        return 0
    return _deal(context, read, result)


def _at_end(context: RequestContext, read: BulkRead, end_offset: int) -> int:
    """Let *read* wait at the end of its queue if it may, else send its last frame."""
    reads = context.state.bulk_reads
    code, remark = ResponseCode.SUCCESS, ReadStatus.AT_END.name
    if read.offset > end_offset:
        code, remark = ResponseCode.PULL_OFFSET_MOVED, ReadStatus.BEYOND_END.name
    elif read.offset < read.end and reads.may_wait(read):
        reads.wait(read)
        return 0
    reads.done(read)
    _send(context, read, code, remark, end_offset)
    return 0


def _deal(context: RequestContext, read: BulkRead, result: ReadResult) -> int:
    """Send *result* as a frame; send none if *result* is empty and not the last."""
    if result.status in MOVED:
        context.state.bulk_reads.done(read)
        _send(context, read, ResponseCode.PULL_OFFSET_MOVED, result.status.name, result.end_offset)
        return 0
    if result.next_offset > read.end:  # a filter looked further
        result.cut_before(read.end)
    read.offset = min(result.next_offset, read.end)
    if lost := result.lost:
        read.lost = merged((*read.lost, *lost))
    read.credit_bytes -= result.size
    if result.count and read.gate.allowance.applies:
        read.gate.allowance.charge_out(result.count, result.size)
    read.wait_s = 0.0
    more = read.credit_bytes > 0 and read.offset < min(read.end, context.state.bulk_reads.end_offset(read.queue))
    if more:
        context.bulk.ready.append(read)
    else:
        context.state.bulk_reads.done(read)
    if result.count or not more or len(read.lost) >= LOST_RANGES_MAX:
        _send(context, read, ResponseCode.SUCCESS, result.status.name, result.end_offset, result, more=more)
        context.state.rates.found += result.count
    return result.size


def _send(
    context: RequestContext,
    read: BulkRead,
    code: int,
    remark: str,
    end_offset: int,
    result: ReadResult | None = None,
    *,
    more: bool = False,
) -> None:
    ext: dict[str, object] = {
        "nextBeginOffset": read.offset,
        "minOffset": read.queue.first_offset,
        "maxOffset": end_offset,
        "more": more,
    }
    if read.lost:
        ext["lost"] = ",".join([f"{first}-{after}" for first, after in _few(read.lost)])
        read.lost = []
    if result is None:
        context.peer.send(encode_prefix(read.opaque, code, ext, 0, remark))
    else:
        context.peer.send(encode_prefix(read.opaque, code, ext, result.size, remark), *result.pieces)


def _few(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return *ranges*, cut to the number that fits into a frame; then the last one covers all further ranges."""
    if len(ranges) <= LOST_RANGES_MAX:
        return ranges
    return [*ranges[: LOST_RANGES_MAX - 1], (ranges[LOST_RANGES_MAX - 1][0], ranges[-1][1])]


TABLE: Final[dict[int, Handle]] = {RequestCode.BULK_READ: bulk_read}
