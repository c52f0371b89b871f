"""END_TRANSACTION and RESUME_CHECK_HALF_MESSAGE (RocketMQ EndTransactionProcessor, AdminBrokerProcessor).

Clients send END_TRANSACTION oneway, so only clients that ask for an answer see the codes.
"""

from collections.abc import Sequence
from typing import Final

import orjson

from martlet.access import Gate
from martlet.broker import Broker
from martlet.contracts import HalfMessage, PendingTransaction, Transactions
from martlet.errors import Reason, Refused
from martlet.message import decode_properties
from martlet.records.codec import decode_records
from martlet_remoting.handlers.context import Answer, Declined, Handle, RequestContext, reply
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.headers import EndHead
from martlet_remoting.wire.packets import Command

__all__ = ["TABLE", "end_run"]

# The values of commitOrRollback; any other leaves the transaction pending (MessageSysFlag).
COMMIT: Final = 0x8
ROLLBACK: Final = 0xC
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
# Limits: transactions in an answer, bytes of records read for it, and records found by one id.
LISTED_MAX: Final = 500
LISTED_BYTES: Final = 4 * 1024 * 1024
FOUND_MAX: Final = 64
MESSAGE_ID_CHARS: Final = (32, 56)  # address with port, and position, for IPv4 and IPv6
POSITION_CHARS: Final = 16


def _transactions(broker: Broker) -> Transactions:
    found = broker.capability(Transactions)
    if found is None:
        text = f"the broker[{broker.config.name}] does not support transactional messages"
        raise Declined(ResponseCode.NO_PERMISSION, f"{text}; add the plugin tx to plugins.enabled")
    return found


def end_run(context: RequestContext, gate: Gate, heads: Sequence[EndHead]) -> list[Command]:
    """End the transactions of *heads* together; return the few requests that `end_transaction` must handle.

    The returned requests want an answer, do not fit their half messages, or have half messages that are not in memory.
    """
    transactions = context.state.broker.capability(Transactions)
    ends: list[tuple[HalfMessage, bool]] = []
    usual: list[EndHead] = []
    other_heads: list[EndHead] = []
    for head in heads:
        half = _usual_half(transactions, head) if transactions is not None else None
        if half is None:
            other_heads.append(head)
        else:
            ends.append((half, head.fields.decision == COMMIT))
            usual.append(head)
    if ends:
        left = gate.transactions.end_together(ends)
        context.state.counters.requests += len(ends) - len(left)
        other_heads += [usual[place] for place in left]
    return [_command(head) for head in other_heads]


def _usual_half(transactions: Transactions, head: EndHead) -> HalfMessage | None:
    """Return the half message whose transaction *head* may end; None if `end_transaction` must handle *head*."""
    fields = head.fields
    if not head.flag & FLAG_ONEWAY or fields.decision not in (COMMIT, ROLLBACK):
        return None
    half = transactions.find_nowait(fields.table_offset, fields.position)
    if half is None or fields.producer_group != half.group:
        return None
    if fields.from_check.lower() != "true" and transactions.is_late(half):
        return None
    return half


def _command(head: EndHead) -> Command:
    return Command(head.code, head.fields.to_ext(), b"", head.opaque, head.flag)


def end_transaction(context: RequestContext, command: Command) -> Answer:
    """Commit a transaction or roll it back; the answer is sent once the end is durable."""
    transactions = _transactions(context.state.broker)
    if command.integer("commitOrRollback") not in (COMMIT, ROLLBACK):
        return None  # as RocketMQ, which does not answer
    offset, position = command.integer("tranStateTableOffset"), command.integer("commitLogOffset")
    half = transactions.find_nowait(offset, position)
    if half is None:
        return _end_far(context, command, transactions, position)
    try:
        return _end(context, command, transactions, half)
    except Declined as declined:
        return _end_copy(context, command, transactions, position, declined)


async def _end_far(context: RequestContext, command: Command, transactions: Transactions, position: int) -> bytes:
    try:
        return _end(context, command, transactions, await _find(transactions, position))
    except Declined as declined:
        return await _end_copy(context, command, transactions, position, declined)


async def _end_copy(
    context: RequestContext, command: Command, transactions: Transactions, position: int, declined: Declined
) -> bytes:
    """End the transaction of the copy that retention made of the half message at *position*, else raise *declined*."""
    key = command.text("msgId", "")
    copy = await transactions.find_copy(position, key) if key else None
    if copy is None:
        raise declined
    return _end(context, command, transactions, copy, is_copy=True)


async def _find(transactions: Transactions, position: int) -> HalfMessage:
    try:
        return await transactions.find(position)
    except Refused as refused:
        raise _as_rocketmq(refused) from refused


def _as_rocketmq(refused: Refused) -> Refused | Declined:
    if refused.reason is Reason.NOT_FOUND:
        return Declined(ResponseCode.SYSTEM_ERROR, str(refused))
    return refused


def _end(
    context: RequestContext, command: Command, transactions: Transactions, half: HalfMessage, *, is_copy: bool = False
) -> bytes:
    _check(command, transactions, half, is_copy)
    gate = context.gate(command)
    end_it = gate.transactions.force if command.code == RequestCode.END_TRANSACTION_AS_ADMIN else gate.transactions.end
    try:
        end = end_it(half, commit=command.integer("commitOrRollback") == COMMIT)
    except Refused as refused:
        raise _as_rocketmq(refused) from refused
    context.peer.hold_until(end)
    return reply(command)


def _check(command: Command, transactions: Transactions, half: HalfMessage, is_copy: bool) -> None:
    """Raise `Declined` unless *command* is from the producer's group and each of its fields names *half*.

    A request to end the transaction of a copy names the original half message, which may be gone.
    """
    if not command.boolean("fromTransactionCheck") and transactions.is_late(half):
        text = "transaction is older than its CHECK_IMMUNITY_TIME_IN_SECONDS; answer the broker's check instead"
        raise Declined(ResponseCode.ILLEGAL_OPERATION, text)
    group, offset = command.text("producerGroup"), command.integer("tranStateTableOffset")
    if group != half.group:
        text = f"The producer group wrong; the message is of group {half.group!r}, the request of {group!r:.260}"
        raise Declined(ResponseCode.SYSTEM_ERROR, text)
    if offset != half.record.queue_offset and not is_copy:
        text = f"The transaction state table offset wrong; it is {half.record.queue_offset}, the request has {offset}"
        raise Declined(ResponseCode.SYSTEM_ERROR, text)


async def resume_check(context: RequestContext, command: Command) -> bytes:
    """Restart the checks of a transaction, pending or parked."""
    half = await _find(_transactions(context.state.broker), _position(command.text("msgId")))
    try:
        end = context.gate(command).transactions.resume(half)
    except Refused as refused:
        raise _as_rocketmq(refused) from refused
    context.peer.hold_until(end)
    return reply(command)


def _position(message_id: str) -> int:
    """Return the log position in an offset message id."""
    try:
        bytes.fromhex(message_id)
        if len(message_id) in MESSAGE_ID_CHARS:
            return int(message_id[-POSITION_CHARS:], 16)
    except ValueError:
        pass
    text = f"msgId {message_id!r:.80} is not an offset message id; send the 32 hexadecimal digits of the stored message"
    raise Declined(ResponseCode.SYSTEM_ERROR, text)


async def list_transactions(context: RequestContext, command: Command) -> bytes:
    """List pending transactions from a half message on, or with one transaction id."""
    gate = context.gate(command)
    gate.check("update", "")
    transactions = _transactions(context.state.broker)
    key = command.text("transactionId", "")
    if key:
        found: Sequence[PendingTransaction] = await _find_by_id(context, gate, transactions, key)
    else:
        offset, count = command.integer("offset", 0), command.integer("count", LISTED_MAX)
        found = await transactions.pending(max(offset, 0), min(max(count, 1), LISTED_MAX), LISTED_BYTES)
    return reply(command, body=orjson.dumps({"transactions": [_fields(each) for each in found]}))


async def _find_by_id(
    context: RequestContext, gate: Gate, transactions: Transactions, key: str
) -> list[PendingTransaction]:
    steps = gate.queries.keys(HALF_TOPIC, key.encode(), FOUND_MAX, 0, 1 << 62, LISTED_BYTES)
    found = await context.state.broker.turns.finish(steps)
    listed: list[PendingTransaction] = []
    for half in decode_records(b"".join(found.records)):
        if half.property("UNIQ_KEY") == key:
            nearest = await transactions.pending(half.queue_offset, 1, LISTED_BYTES)
            listed += [each for each in nearest if each.half.record.position == half.position]
    return listed


def _fields(transaction: PendingTransaction) -> dict[str, object]:
    half, record = transaction.half, transaction.half.record
    unique = record.property("UNIQ_KEY")
    return {
        "transactionId": unique,
        "msgId": unique,
        "producerGroup": half.group,
        "topic": half.topic,
        "queueId": half.queue_id,
        "tranStateTableOffset": record.queue_offset,
        "commitLogOffset": record.position,
        "bornTimestamp": record.born_ms,
        "storeTimestamp": record.store_ms,
        "checks": transaction.checks,
        "bodyBytes": len(record.body),
        "properties": decode_properties(record.properties),
    }


TABLE: Final[dict[int, Handle]] = {
    RequestCode.END_TRANSACTION: end_transaction,
    RequestCode.END_TRANSACTION_AS_ADMIN: end_transaction,
    RequestCode.LIST_TRANSACTIONS: list_transactions,
    RequestCode.RESUME_CHECK_HALF_MESSAGE: resume_check,
}
